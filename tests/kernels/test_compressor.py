"""The compressor beyond the registry's cases: chunked prefill, padded tokens, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_kernels.compressor.api import SavePlan, StorePlan
from dsv4_kernels.compressor.reference import save_inputs, store_inputs
from dsv4_kernels.device import AT_REST


def _sequence(head: int, ratio: int, device: torch.device) -> dict[str, Any]:
    """Return one request of 140 tokens with room for its states, and a cache for its entries."""
    params = {"tokens": 140, "head": head, "ratio": ratio, "page": 4, "dense": True}
    inputs = {**store_inputs(params, device, 3), **save_inputs(params, device, 3)}
    inputs["kv_slot_mapping"] = torch.where(
        (inputs["positions"][:140] + 1) % ratio == 0, inputs["positions"][:140] // ratio, -1
    )
    return inputs


def _run(inputs: dict[str, Any], head: int, ratio: int, chunks: list[int], device: torch.device) -> torch.Tensor:
    """Save and store chunk after chunk; return the cache."""
    save = SavePlan("compressor_save", max(chunks), head, ratio, device, page=4)
    store = StorePlan("compressor_store", max(chunks), head, ratio, device, page=4)
    state, like = torch.full_like(inputs["state_cache"], torch.nan), inputs["kv_cache"]
    cache = torch.empty_strided(like.shape, like.stride(), dtype=torch.uint8, device=device).fill_(0xFF)
    begin = 0
    for size in chunks:
        part = slice(begin, begin + size)
        positions, slots = inputs["positions"][part].clone(), inputs["slot_mapping"][part].clone()
        save.run(
            kv=inputs["kv"][part],
            score=inputs["score"][part],
            ape=inputs["ape"],
            positions=positions,
            state_cache=state,
            slot_mapping=slots,
        )
        store.run(
            state_cache=state,
            token_to_req_indices=torch.zeros(size, dtype=torch.int32, device=device),
            positions=positions,
            slot_mapping=slots,
            block_table=inputs["block_table"],
            rms_norm_weight=inputs["rms_norm_weight"],
            rms_norm_eps=1e-6,
            cos_sin_cache=inputs["cos_sin_cache"],
            kv_cache=cache,
            kv_slot_mapping=inputs["kv_slot_mapping"][part].clone(),
            compress_ratio=ratio,
        )
        begin += size
    return cache


@pytest.mark.parametrize(("head", "ratio"), [(512, 4), (128, 4), (512, 128)])
def test_entries_do_not_depend_on_how_a_prompt_is_cut(head: int, ratio: int, device: torch.device) -> None:
    inputs = _sequence(head, ratio, device)
    whole = _run(inputs, head, ratio, [140], device)
    assert bool((whole[0] != 0xFF).any())
    for chunks in ([7, 1, 132], [126, 1, 1, 12]):
        assert torch.equal(_run(inputs, head, ratio, chunks, device), whole)


def test_padded_tokens_change_nothing(device: torch.device) -> None:
    """A captured batch has slot −1 with any position; its request's window may be uninitialised."""
    params = {"tokens": 6, "head": 512, "ratio": 4, "page": 64, "dense": True}
    inputs = store_inputs(params, device, 1)
    inputs["slot_mapping"][2:] = -1
    plan = StorePlan("compressor_store", 6, 512, 4, device)
    before = inputs["kv_cache"].clone()
    plan.run(**inputs)
    changed = (inputs["kv_cache"] != before).sum()
    assert 0 < int(changed) <= 2 * 584
    inputs["slot_mapping"][:] = -1
    kept = inputs["kv_cache"].clone()
    plan.run(**inputs)
    assert torch.equal(inputs["kv_cache"], kept)


def test_inputs_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    with pytest.raises(ValueError, match="ratio is 8"):
        StorePlan("compressor_store", 4, 512, 8, device)
    with pytest.raises(ValueError, match="head is 64"):
        SavePlan("compressor_save", 4, 64, 4, device)
    params = {"tokens": 6, "head": 512, "ratio": 4, "page": 64}
    inputs = store_inputs(params, device, 1)
    with pytest.raises(ValueError, match=r"slot_mapping has shape \(6,\), needs \[tokens ≤ 4\]"):
        StorePlan("compressor_store", 4, 512, 4, device).run(**inputs)
    plan = StorePlan("compressor_store", 6, 512, 4, device)
    with pytest.raises(ValueError, match="compress_ratio is 128"):
        plan.run(**{**inputs, "compress_ratio": 128})
    with pytest.raises(ValueError, match=r"kv_cache has shape \(\d+, 64, 132\), needs \[any, 64, 584\]"):
        plan.run(**{**inputs, "kv_cache": inputs["kv_cache"][:, :, :132]})


def test_entries_of_many_programs_are_the_same_in_the_next_run(device: torch.device) -> None:
    """The programs of an entry count themselves; the last one compares the count, and resets it."""
    params = {"tokens": 3, "head": 512, "ratio": 128, "page": 2, "dense": True}
    plan = StorePlan("compressor_store", 3, 512, 128, device, page=2)
    inputs = store_inputs(params, device, 5)
    first = plan.run(**inputs).clone()
    assert not torch.equal(first, store_inputs(params, device, 5)["kv_cache"])
    inputs["kv_cache"].copy_(store_inputs(params, device, 5)["kv_cache"])
    assert torch.equal(plan.run(**inputs), first)
    assert (plan.count == AT_REST.value).all()
