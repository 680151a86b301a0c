"""The projections beyond the registry's cases: absent inputs are not read, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_kernels.compressor import api
from dsv4_kernels.compressor.api import ProjectionPlan, SavePlan

SMALL = {"hidden": 64, "ratio": 4, "width": 256}


def inputs_of(device: torch.device, tokens: int = 5, **more: Any) -> dict[str, Any]:
    return api._inputs({"tokens": tokens, **SMALL, **more}, device, 1)


def test_states_are_those_that_the_compressor_saves(device: torch.device) -> None:
    """For products that float32 represents exactly: bit for bit, without changes to tokens without a slot."""
    inputs = inputs_of(device)
    inputs["x"] = inputs["x"].sign()
    inputs["weight"] = (inputs["weight"] * 64).round()
    kv, score = (inputs["x"].float() @ inputs["weight"].float().T).chunk(2, 1)
    wanted = inputs["state_cache"].clone()
    SavePlan("compressor_save", 5, 128, 4, device).run(
        kv=kv,
        score=score,
        ape=inputs["ape"],
        positions=inputs["positions"],
        state_cache=wanted,
        slot_mapping=inputs["slot_mapping"],
    )
    before = inputs["state_cache"].clone()
    (found,) = ProjectionPlan(device, 5, **SMALL).run(**inputs)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, before)


def test_a_token_beyond_the_counted_ones_changes_nothing(device: torch.device) -> None:
    """Padding of a graph may be NaN; it has no slot, and its heads do not affect others."""
    more = {"index_width": 32, "heads": 8}
    plan, inputs = ProjectionPlan(device, 5, **SMALL, **more), inputs_of(device, **more)
    state, index_state, heads = (out.clone() for out in plan.run(**inputs))
    inputs["x"][4] = torch.nan
    again = plan.run(**inputs)
    assert torch.equal(again[0], state)
    assert torch.equal(again[1], index_state)
    assert torch.equal(again[2][:4], heads[:4])
    assert bool(again[2][4].isnan().all())


def test_inputs_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    def plan(**other: Any) -> ProjectionPlan:
        return ProjectionPlan(device, **{"tokens": 4, **SMALL, **other})

    for other, told in (
        ({"tokens": 33}, "33 tokens, needs 32"),
        ({"ratio": 8}, "ratio is 8"),
        ({"hidden": 60}, "hidden is 60"),
        ({"width": 40}, "widths are 40"),
        ({"index_width": 32}, "with 0 heads"),
        ({"state_stride": 2050}, "multiples of 16 bytes"),
    ):
        with pytest.raises(ValueError, match=told):
            plan(**other)
    inputs = inputs_of(device)
    with pytest.raises(ValueError, match=r"x has shape \(\d+, \d+\), needs \[tokens ≤ 4, "):
        plan().run(**inputs)
    inputs = inputs_of(device, tokens=2)
    with pytest.raises(ValueError, match="index_weight"):
        plan(index_width=32, heads=8).run(**inputs)
    with pytest.raises(ValueError, match="slot_mapping has dtype int32, needs int64"):
        plan().run(**{**inputs, "slot_mapping": inputs["slot_mapping"].int()})
    with pytest.raises(ValueError, match="state_cache has strides"):
        plan(state_stride=4096).run(**inputs)
