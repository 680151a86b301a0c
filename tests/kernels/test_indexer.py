"""The indexer beyond the registry's cases: far pages, query to scores to reference, refusals."""

from __future__ import annotations

import pytest
import torch

from dsv4_kernels.indexer.api import LogitsPlan, PagedLogitsPlan, QueryPlan
from dsv4_kernels.indexer.reference import indexer_paged_logits, logits_inputs, paged_inputs, query_inputs


def test_pages_beyond_two_gigabytes_are_reached(device: torch.device) -> None:
    """57 thousand pages of a layer in a shared block exceed 2³¹ bytes; untouched memory is free here."""
    stride, page = 2**31 + 64, 64
    inputs = paged_inputs({"batch": 1, "next_n": 1, "keys": 64, "heads": 16, "page": page, "dense": True}, device, 1)
    raw = torch.empty(stride + page * 132, dtype=torch.uint8, device=device)
    cache = raw.as_strided((2, page, 132), (stride, 132, 1))
    cache[1] = inputs["kv_cache"][int(inputs["block_tables"][0, 0])]
    inputs["block_tables"].fill_(1)
    plan = PagedLogitsPlan(1, 64, 16, device, page, stride)
    got = plan.run(**{**inputs, "kv_cache": cache}).clone()
    small = torch.stack((cache[1], cache[1]))
    want = indexer_paged_logits(**{**inputs, "kv_cache": small}, exact=True)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-2)


def test_one_key_is_the_same_paged_and_unpaged(device: torch.device) -> None:
    """A row's score of a key does not depend on the format of the key."""
    paged = paged_inputs({"batch": 1, "next_n": 1, "keys": 130, "heads": 64, "page": 64, "dense": True}, device, 2)
    flat = paged["kv_cache"].flatten(1)[paged["block_tables"][0].long()]
    k = flat[:, : 64 * 128].reshape(-1, 128)[:130].contiguous()
    scale = flat[:, 64 * 128 :].contiguous().view(torch.float32).flatten()[:130].contiguous()
    ends = torch.full((1,), 130, dtype=torch.int32, device=device)
    out = torch.full((1, 135), -torch.inf, device=device)
    LogitsPlan(64, device).run(
        q=paged["q"][0], k=k, k_scale=scale, weights=paged["weights"], cu_seqlen_ks=ends * 0, cu_seqlen_ke=ends, out=out
    )
    PagedLogitsPlan(1, 130, 64, device).run(**paged)
    torch.testing.assert_close(out, paged["out"], rtol=1e-5, atol=1e-2)


def test_inputs_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    with pytest.raises(ValueError, match="129 heads"):
        LogitsPlan(129, device)
    with pytest.raises(ValueError, match="pages are 4356 bytes apart"):
        PagedLogitsPlan(1, 64, 64, device, page=33)
    inputs = query_inputs({"tokens": 3, "heads": 4}, device, 1)
    with pytest.raises(ValueError, match=r"index_q has shape \(3, 4, 128\), needs \[tokens ≤ 2, 4, 128\]"):
        QueryPlan(2, 4, device).run(**inputs)
    inputs = logits_inputs({"rows": 3, "keys": 9, "heads": 4}, device, 1)
    with pytest.raises(ValueError, match=r"out has shape \(2, \d+\), needs \[≥ rows = 3, any\]"):
        LogitsPlan(4, device).run(**{**inputs, "out": inputs["out"][:2]})
