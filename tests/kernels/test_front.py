"""Norms, RoPE and the cache entry beyond the registry's cases: far pages, padded tokens, zero rows, refusals."""

from __future__ import annotations

import pytest
import torch

from dsv4_kernels.fp8.api import fp8_quant
from dsv4_kernels.front.api import InsertPlan, NormPlan, _insert_inputs, _norm_inputs
from dsv4_kernels.mla_cache.api import mla_cache_read

PARAMS = {"tokens": 4, "heads": 8, "padded": 8, "page": 64, "dense": True}


def test_pages_beyond_two_gigabytes_are_reached(device: torch.device) -> None:
    """Untouched memory is free here."""
    stride = 2**31 + 64
    inputs = _insert_inputs({**PARAMS, "tokens": 1}, device, 1)
    raw = torch.empty(stride + 64 * 584, dtype=torch.uint8, device=device)
    cache = raw.as_strided((2, 64 * 584), (stride, 1))
    cache[1] = 0xFF
    inputs["slot_mapping"].fill_(64 + 7)
    InsertPlan(1, 8, 8, device, 64, stride).run(**{**inputs, "kv_cache": cache})
    row = mla_cache_read(cache[1:].clone(), torch.tensor([7], device=device))
    near = _insert_inputs({**PARAMS, "tokens": 1}, device, 1)
    near["slot_mapping"].fill_(7)
    InsertPlan(1, 8, 8, device).run(**near)
    assert torch.equal(row, mla_cache_read(near["kv_cache"], near["slot_mapping"]))
    assert int((cache[1] != 0xFF).sum()) <= 584


def test_padded_tokens_leave_the_cache_alone_and_get_queries(device: torch.device) -> None:
    inputs = _insert_inputs(PARAMS, device, 2)
    inputs["slot_mapping"].fill_(-1)
    before = inputs["kv_cache"].clone()
    q, _ = InsertPlan(4, 8, 8, device).run(**inputs)
    assert torch.equal(inputs["kv_cache"], before)
    norm = q.float().square().mean(-1)
    torch.testing.assert_close(norm, torch.ones_like(norm), atol=2e-2, rtol=0.0)


def test_queries_are_written_to_the_callers_buffer(device: torch.device) -> None:
    """An engine provides the output: a plan for thousands of tokens would hold hundreds of megabytes."""
    inputs, own = (_insert_inputs(PARAMS, device, 2) for _ in range(2))
    want, _ = InsertPlan(4, 8, 8, device).run(**own)
    plan = InsertPlan(4, 8, 8, device, own_output=False)
    plan.warmup()
    out = torch.empty_like(want)
    assert plan.run(**inputs, out=out)[0] is out
    assert torch.equal(out, want)
    assert torch.equal(inputs["kv_cache"], own["kv_cache"])
    with pytest.raises(ValueError, match=r"out has shape \(1, 8, 512\)"):
        plan.run(**inputs)


def test_rows_of_zeros_stay_zero(device: torch.device) -> None:
    inputs = _norm_inputs({"tokens": 2, "rank": 64}, device, 3)
    inputs["qr"].zero_()
    inputs["kv"].zero_()
    for out in NormPlan(2, 64, device).run(**inputs):
        assert not bool(out.any())


def test_inputs_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    with pytest.raises(ValueError, match="rank is 60"):
        NormPlan(1, 60, device)
    with pytest.raises(ValueError, match="9 heads of 8 padded"):
        InsertPlan(1, 9, 8, device)
    inputs = _insert_inputs(PARAMS, device, 1)
    with pytest.raises(ValueError, match=r"q has shape \(4, 8, 512\), needs \[tokens ≤ 3, 8, 512\]"):
        InsertPlan(3, 8, 8, device).run(**inputs)
    with pytest.raises(ValueError, match="16 heads and page 64"):
        InsertPlan(4, 8, 8, device).run(**{**inputs, "padded_heads": 16})


def test_codes_are_those_that_the_quantiser_makes_of_the_normed_query(device: torch.device) -> None:
    inputs = _norm_inputs({"tokens": 3, "rank": 384}, device, 4)
    plan = NormPlan(4, 384, device, quantised=True)
    qr, kv = plan.run(**inputs)
    codes = plan.codes(3)
    assert codes is not None
    wanted = NormPlan(4, 384, device).run(**inputs)
    for got, want in zip((qr, kv, *codes), (*wanted, *fp8_quant(wanted[0])), strict=True):
        assert torch.equal(got, want)


def test_a_query_is_quantised_only_on_request_and_for_supported_ranks(device: torch.device) -> None:
    assert NormPlan(1, 72, device).codes(1) is None
    with pytest.raises(ValueError, match="rank is 72, needs a multiple of 128 to be quantised"):
        NormPlan(1, 72, device, quantised=True)
