"""The router beyond the registry's cases: extreme logits, a poisoned token, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_kernels.router.api import RouterPlan, _inputs, router

PARAMS = {"tokens": 6, "hidden": 64, "experts": 24, "k": 6}


@pytest.mark.parametrize("size", [30.0, -30.0])
def test_weights_of_extreme_logits_are_right(size: float, device: torch.device) -> None:
    """Scores of 1e-7 are as precise as others after normalisation; 1 + e^-30 is 1 in float32."""
    inputs = _inputs(PARAMS, device, 1)
    inputs["x"] = torch.ones_like(inputs["x"])
    inputs["weight"] = (torch.linspace(0.9, 1.1, 24)[:, None].expand(24, 64) * size / 64).bfloat16().to(device)
    weights, ids = RouterPlan(6, 64, 24, 6, device).run(**inputs)
    want, want_ids = router(**inputs, exact=True)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights.double(), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("largest", [-128.0, -20.0, 0.0])
def test_scores_that_underflow_give_weights_of_zero(hashed: bool, largest: float, device: torch.device) -> None:
    """Experts whose logit is -128 have the score 0 in float32; a token with no other expert gets no NaN."""
    inputs = _inputs({**PARAMS, "hashed": hashed}, device, 5)
    inputs["x"] = torch.full_like(inputs["x"], 0.5)
    logits = torch.full((24,), -128.0)
    logits[::12] = largest
    inputs["weight"] = (logits[:, None].expand(24, 64) / 32).bfloat16().to(device)
    if not hashed:
        inputs["bias"] = torch.linspace(0.0, 1.0, 24, device=device).flip(0)
    weights, ids = RouterPlan(6, 64, 24, 6, device).run(**inputs)
    want, want_ids = router(**inputs, exact=True)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights.double(), want, atol=1e-6, rtol=1e-5)
    if largest == -128.0:
        assert not weights.any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_in_one_token_stays_there(device: torch.device) -> None:
    plan = RouterPlan(6, 64, 24, 6, device)
    inputs = _inputs(PARAMS, device, 2)
    clean = [t.clone() for t in plan.run(**inputs)]
    inputs["x"][3] = torch.nan
    others = torch.arange(6, device=device) != 3
    for out, before in zip(plan.run(**inputs), clean, strict=True):
        assert torch.equal(out[others], before[others])
    ids = plan.ids[3].tolist()
    assert len(set(ids)) == 6, "experts, each once"
    assert all(0 <= expert < 24 for expert in ids)


def test_identifiers_of_either_width_and_padding_may_start_anywhere(device: torch.device) -> None:
    plan = RouterPlan(6, 64, 24, 6, device)
    inputs = _inputs({**PARAMS, "hashed": True}, device, 4)
    padding = torch.arange(7, device=device)[1:] > 4
    for dtype in (torch.int32, torch.int64):
        moved = torch.cat((inputs["input_ids"][:1], inputs["input_ids"])).to(dtype)[1:]
        weights, ids = plan.run(**{**inputs, "input_ids": moved, "padding": padding})
        want, want_ids = router(**inputs, padding=padding)
        torch.testing.assert_close(weights, want, atol=1e-5, rtol=1e-4)
        assert torch.equal(ids, want_ids)
        assert ids[4:].tolist() == [[-1] * 6] * 2


def test_warm_up_compiles_every_kind_of_call(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[bool, torch.dtype | None, bool]] = set()
    run = RouterPlan.run

    def noted(self: RouterPlan, **inputs: Any) -> Any:
        identifiers = inputs.get("input_ids")
        dtype = None if identifiers is None else identifiers.dtype
        seen.add((inputs.get("bias") is None, dtype, inputs.get("padding") is not None))
        return run(self, **inputs)

    monkeypatch.setattr(RouterPlan, "run", noted)
    RouterPlan(6, 64, 24, 6, device).warmup()
    kinds = ((False, None), (True, torch.int32), (True, torch.int64))
    assert seen == {(*kind, padded) for kind in kinds for padded in (False, True)}


def test_inputs_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    with pytest.raises(ValueError, match="9 of 24 experts"):
        RouterPlan(1, 64, 24, 9, device)
    plan = RouterPlan(6, 64, 24, 6, device)
    inputs = _inputs(PARAMS, device, 3)
    with pytest.raises(ValueError, match="either bias"):
        plan.run(**{**inputs, "bias": None})
    hashed = _inputs({**PARAMS, "hashed": True}, device, 3)
    with pytest.raises(ValueError, match="either bias"):
        plan.run(**{**hashed, "bias": inputs["bias"]})
    with pytest.raises(ValueError, match="k is 4"):
        plan.run(**{**inputs, "k": 4})
    with pytest.raises(ValueError, match="input_ids has dtype float32, needs int32 or int64"):
        plan.run(**{**hashed, "input_ids": hashed["input_ids"].float()})
    with pytest.raises(ValueError, match=r"padding has shape \(5,\), needs \[tokens = 6\]"):
        plan.run(**inputs, padding=torch.zeros(5, dtype=torch.bool, device=device))
