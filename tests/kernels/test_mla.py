"""Sparse MLA decode and the packed cache: known errors of other implementations, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_kernels import registry
from dsv4_kernels.arch import Arch
from dsv4_kernels.mla_cache.api import CachePlan, mla_cache_read, mla_cache_write
from dsv4_kernels.mla_decode.api import DecodeConfig, DecodePlan, select, split_count, tile_count
from dsv4_kernels.mla_decode.reference import decode_inputs, looked_up, mla_decode
from dsv4_kernels.numerics import ds_mla
from dsv4_kernels.registry import operation

SMALL = {"tokens": 3, "heads": 8, "window": 48, "topk": 40, "pages": (64, 2)}


def plan_for(params: dict[str, Any], device: torch.device, arch: Arch | None) -> DecodePlan:
    return DecodePlan(
        params["tokens"],
        params["heads"],
        params["window"],
        params["topk"],
        device,
        pages=params.get("pages", (64, 64)),
        strides=params.get("strides"),
        arch=arch,
    )


def check(params: dict[str, Any], inputs: dict[str, Any], device: torch.device, arch: Arch | None) -> Any:
    op = operation("mla_decode")
    plan = plan_for(params, device, arch)
    out = tuple(t.clone() for t in plan.run(**inputs))
    registry.compare(op, out, mla_decode(**inputs, exact=True))
    return out


def test_nan_bytes_in_unused_slots_do_not_change_the_result(device: torch.device, arch: Arch | None) -> None:
    inputs = decode_inputs(SMALL, device, 5)
    first = check(SMALL, inputs, device, arch)
    for name in ("swa", "cmp"):
        page = dict(zip(("swa", "cmp"), SMALL["pages"], strict=True))[name]
        cache = inputs[f"{name}_cache"]
        assert bool((cache == 0xFF).any()), "the inputs are meant to hold NaN bytes"
        clean = torch.zeros_like(cache)
        layout = ds_mla(page)
        idx = inputs[f"{name}_idx"]
        used = torch.unique(idx[(idx >= 0) & (idx < 2**30)]).long()
        for slot in used.tolist():
            base, offset = slot // page, slot % page
            rows = slice(offset * layout.data_row, (offset + 1) * layout.data_row)
            at = page * layout.data_row + offset * layout.scale_row
            clean[base, rows] = cache[base, rows]
            clean[base, at : at + layout.scale_row] = cache[base, at : at + layout.scale_row]
        inputs[f"{name}_cache"] = clean
    second = plan_for(SMALL, device, arch).run(**inputs)
    assert torch.equal(first[0], second[0])


def test_rows_without_entries_give_zero_and_minus_infinity(device: torch.device, arch: Arch | None) -> None:
    inputs = decode_inputs(SMALL, device, 6)
    inputs["swa_idx"][0] = inputs["cmp_idx"][0] = -1
    inputs["swa_len"][1] = inputs["cmp_len"][1] = 0
    o, lse = check(SMALL, inputs, device, arch)
    assert bool((o[:2] == 0).all())
    assert bool((lse[:2] == -torch.inf).all())


def test_gaps_move_nothing(device: torch.device, arch: Arch | None) -> None:
    """The same entries with −1 between them give the same attention."""
    inputs = decode_inputs({**SMALL, "dense": True}, device, 7)
    o, _ = check(SMALL, inputs, device, arch)
    for name in ("swa", "cmp"):
        idx = inputs[f"{name}_idx"]
        wide = torch.full((idx.shape[0], 2 * idx.shape[1]), -1, dtype=torch.int32, device=device)
        wide[:, ::2] = idx
        inputs[f"{name}_idx"], inputs[f"{name}_len"] = wide, inputs[f"{name}_len"] * 2
    spread = {**SMALL, "window": 96, "topk": 80}
    again, _ = check(spread, inputs, device, arch)
    assert torch.allclose(o.float(), again.float(), atol=2e-3, rtol=2e-2)


def test_an_entry_listed_twice_counts_twice(device: torch.device, arch: Arch | None) -> None:
    inputs = decode_inputs({**SMALL, "dense": True}, device, 8)
    inputs["swa_idx"][:] = inputs["swa_idx"][:, :1]
    inputs["cmp_len"][:] = 0
    inputs["swa_len"][:] = torch.tensor([1, 2, 48], dtype=torch.int32, device=device)
    _, lse = check(SMALL, inputs, device, arch)
    one = decode_inputs({**SMALL, "dense": True}, device, 8)
    one["swa_idx"][:] = one["swa_idx"][:, :1]
    one["cmp_len"][:], one["swa_len"][:] = 0, 1
    _, single = check(SMALL, one, device, arch)
    grown = (lse - single).mean(1)
    expected = torch.log(torch.tensor([1.0, 2.0, 48.0], device=device))
    assert torch.allclose(grown, expected, atol=1e-4)


def test_the_sink_only_enlarges_the_denominator(device: torch.device, arch: Arch | None) -> None:
    inputs = decode_inputs({**SMALL, "dense": True}, device, 9)
    inputs["sink"][:] = -torch.inf
    o, lse = check(SMALL, inputs, device, arch)
    inputs["sink"][:] = torch.inf
    nothing, same = check(SMALL, inputs, device, arch)
    assert bool((nothing == 0).all())
    assert torch.equal(lse, same)
    inputs["sink"][:] = lse[0]  # a sink as heavy as all entries together halves the output
    half, _ = check(SMALL, inputs, device, arch)
    assert torch.allclose(half[0].float() * 2, o[0].float(), atol=2e-3, rtol=2e-2)


def test_page_strides_beyond_32_bits(device: torch.device, arch: Arch | None) -> None:
    """Two pages, 2.2 GB apart: the address of the second one needs 64 bits. Untouched memory is never allocated."""
    stride = 2_200_000_000 // 576 * 576
    if device.type == "cpu":
        whole = torch.empty(stride + 40_000, dtype=torch.uint8)
    else:
        whole = torch.zeros(stride + 40_000, dtype=torch.uint8, device=device)
    cache = whole.as_strided((2, 37_440), (stride, 1))
    # Values of the size for which the absolute limit is intended (see decode_inputs).
    kv = (torch.randn((4, 512), generator=torch.Generator().manual_seed(1)) / 8).bfloat16().to(device)
    slots = torch.tensor([64, 70, 127, 3], device=device)
    CachePlan(True, 4, 64, stride, device, arch).run(kv=kv, slots=slots, cache=cache)
    small = torch.zeros((2, 37_440), dtype=torch.uint8, device=device)
    mla_cache_write(kv, slots, small)
    rows = CachePlan(False, 4, 64, stride, device, arch).run(cache=cache, slots=slots)
    assert torch.equal(rows.view(torch.int16), mla_cache_read(small, slots).view(torch.int16))
    params = {"tokens": 1, "heads": 8, "window": 16, "topk": 0, "strides": (stride, 37_440)}
    inputs = decode_inputs({**params, "strides": None}, device, 3)
    inputs["swa_cache"], inputs["swa_idx"] = cache, torch.full((1, 16), -1, dtype=torch.int32, device=device)
    inputs["swa_idx"][0, :4] = slots.int()
    inputs["swa_len"][:] = 16
    out, _ = plan_for(params, device, arch).run(**inputs)
    wanted, _ = mla_decode(**{**inputs, "swa_cache": small}, exact=True)
    assert torch.allclose(out.double(), wanted, atol=1e-3, rtol=2e-2)


def test_padded_tokens_of_a_graph_are_harmless(device: torch.device, arch: Arch | None) -> None:
    """Slot −1 for writes, length 0 for reads."""
    cache = torch.full((3, ds_mla(61).page_bytes), 0xA5, dtype=torch.uint8, device=device)
    before = cache.clone()
    kv = torch.full((5, 512), torch.nan, dtype=torch.bfloat16, device=device)
    slots = torch.full((5,), -1, dtype=torch.int64, device=device)
    CachePlan(True, 5, 61, ds_mla(61).page_bytes, device, arch).run(kv=kv, slots=slots, cache=cache)
    assert torch.equal(cache, before)


def test_bytes_of_other_rows_stay(device: torch.device, arch: Arch | None) -> None:
    cache = torch.full((2, ds_mla(53).page_bytes), 0xA5, dtype=torch.uint8, device=device)
    kv = torch.randn((1, 512), generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    CachePlan(True, 1, 53, ds_mla(53).page_bytes, device, arch).run(
        kv=kv, slots=torch.tensor([60], device=device), cache=cache
    )
    assert int((cache != 0xA5).sum()) <= 584
    assert bool((cache[0] == 0xA5).all())
    assert bool((cache[1, : 7 * 576] == 0xA5).all())


def test_values_beside_a_power_of_two_get_the_right_exponent(device: torch.device, arch: Arch | None) -> None:
    """An approximate logarithm is wrong exactly for these: amax = 448·2^k and its bf16 neighbours."""
    exact = torch.tensor([448.0 * 2.0**k for k in range(-20, 20)]).bfloat16()
    bits = exact.view(torch.int16)
    values = torch.cat([(bits + step).view(torch.bfloat16) for step in (-1, 0, 1)]).to(device)
    kv = torch.zeros((values.shape[0], 512), dtype=torch.bfloat16, device=device)
    kv[:, ::64] = values[:, None]
    slots = torch.arange(kv.shape[0], device=device)
    size = ds_mla(64).page_bytes
    ours = torch.zeros((2, size), dtype=torch.uint8, device=device)
    CachePlan(True, kv.shape[0], 64, size, device, arch).run(kv=kv, slots=slots, cache=ours)
    wanted = mla_cache_write(kv, slots, torch.zeros_like(ours))
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize("heads", [16, 64])
def test_a_share_of_one_tile(heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """No loop; with 64 heads the scores are summed differently. One list is shorter than its width, one is empty."""
    monkeypatch.setattr("dsv4_kernels.mla_decode.api.select", lambda *_: DecodeConfig(heads, 32, 8, 1, 2))
    params = {"tokens": 2, "heads": heads, "window": 32, "topk": 32}
    inputs = decode_inputs({**params, "dense": True}, device, 3)
    inputs["swa_len"].copy_(torch.tensor([7, 32]))
    inputs["cmp_len"].copy_(torch.tensor([20, 0]))
    assert plan_for(params, device, Arch.SM_90).splits(2) == 2
    check(params, inputs, device, Arch.SM_90)


@pytest.mark.parametrize("heads", [16, 64])
def test_pages_from_the_block_table_give_the_result_of_the_slots(
    heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit; a token without entries, such as padding, has no valid row of the table either."""
    monkeypatch.setattr("dsv4_kernels.mla_decode.api.select", lambda *_: DecodeConfig(heads, 32, 8, 1, 2))
    params = {"tokens": 3, "heads": heads, "window": 32, "topk": 32, "lookup": True}
    inputs = decode_inputs(params, device, 3)
    inputs["cmp_idx"][2] = 2**31 - 1
    plan = DecodePlan(3, heads, 32, 32, device, arch=Arch.SM_90, lookup=True)
    found = tuple(x.clone() for x in plan.run(**inputs))
    table, request, counts = (inputs.pop(name) for name in ("table", "request", "counts"))
    inputs["cmp_idx"][2] = -1
    inputs["cmp_idx"], inputs["cmp_len"] = looked_up(inputs["cmp_idx"], 64, table, request, counts)
    for ours, theirs in zip(found, plan_for(params, device, Arch.SM_90).run(**inputs), strict=True):
        assert torch.equal(ours, theirs)


def test_inputs_that_do_not_match_the_plans_page_lookup_are_refused(device: torch.device) -> None:
    params = {"tokens": 400, "heads": 16, "window": 64, "topk": 32}
    plan = DecodePlan(*params.values(), device, arch=Arch.SM_120, lookup=True)
    assert plan.looks_up(1)
    assert not plan.looks_up(400), "several tiles in a row would wait for each other"
    assert not plan_for(params, device, Arch.SM_120).looks_up(1)
    looked = decode_inputs({**params, "tokens": 1, "lookup": True}, device, 3)
    slots = decode_inputs({**params, "tokens": 1}, device, 3)
    for given, message in (
        (slots, "cmp_len is given, a run of 1 tokens gets table, request and counts"),
        ({**looked, "cmp_len": slots["cmp_len"]}, "cmp_len is given"),
        ({**looked, "table": looked["table"].T}, "table has strides"),
        ({**looked, "counts": looked["counts"].int()}, "counts has dtype int32, needs bool"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.run(**given)
    with pytest.raises(ValueError, match="table is given, a run of 1 tokens gets cmp_len"):
        plan_for(params, device, Arch.SM_120).run(**looked)


def test_splits_depend_on_nothing_that_lives_on_the_device() -> None:
    for arch in Arch:
        for heads in (8, 16, 32, 64, 128):
            for tokens in (1, 3, 8, 64, 512):
                config = select(arch, heads, tokens)
                tiles = tile_count(config, 128, 512)
                splits = split_count(config, tokens, heads, tiles, arch.spec.multiprocessors)
                assert 1 <= splits <= tiles
                share = -(-tiles // splits)
                assert (splits - 1) * share < tiles, "no share is empty"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 129}, "needs 1 to 128"),
        ({"heads": 0}, "needs 1 to 128"),
        ({"window": 0}, "index row is empty"),
        ({"strides": (37_448, 37_440)}, "multiple of 16"),
    ],
)
def test_unsupported_shapes_are_refused(change: dict[str, Any], message: str, device: torch.device) -> None:
    op = operation("mla_decode")
    support = op.is_supported({**SMALL, **change}, Arch.SM_120)
    assert not support
    assert message in str(support.reason)
    with pytest.raises(ValueError, match=message):
        plan_for({**SMALL, **change}, device, None)


def test_a_call_beyond_the_plan_is_refused(device: torch.device) -> None:
    plan = plan_for(SMALL, device, None)
    inputs = decode_inputs({**SMALL, "tokens": 4}, device, 1)
    with pytest.raises(ValueError, match=r"q has shape \(4, \d+, 512\), needs \[tokens ≤ 3, "):
        plan.run(**inputs)
    narrow = decode_inputs({**SMALL, "window": 16}, device, 1)
    with pytest.raises(ValueError, match="swa_idx has shape"):
        plan.run(**narrow)


@pytest.mark.gpu
def test_the_same_inputs_give_the_same_bits(device: torch.device) -> None:
    params = {"tokens": 8, "heads": 64, "window": 128, "topk": 512}
    inputs = decode_inputs(params, device, 1)
    plan = plan_for(params, device, None)
    first = plan.run(**inputs)[0].clone()
    for _ in range(20):
        assert torch.equal(first, plan.run(**inputs)[0])
