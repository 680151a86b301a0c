"""Hyper-connections beyond the registry's cases: running in place, Sinkhorn's result, refusals."""

from __future__ import annotations

import pytest
import torch

from dsv4_kernels.fp8.api import fp8_quant
from dsv4_kernels.mhc import api
from dsv4_kernels.mhc.api import HeadPlan, MixConfig, PostPlan, PrePlan
from dsv4_kernels.mhc.reference import (
    head_inputs,
    mhc_post_pre,
    post_inputs,
    post_pre_inputs,
    pre_broadcast_inputs,
    pre_inputs,
)

PARAMS = {"tokens": 18, "hidden": 96, "norm": True}


def test_a_seam_may_read_the_outputs_of_the_same_plan(device: torch.device) -> None:
    """An engine passes residual, post and comb of one layer to the next one's seam: they are in the plan's buffers."""
    plan = PrePlan("mhc_post_pre", 18, 96, device)
    first, second = post_pre_inputs(PARAMS, device, 1), post_pre_inputs(PARAMS, device, 2)
    residual, post, comb, _ = (t.clone() for t in plan.run(**first))
    want = mhc_post_pre(**{**second, "residual": residual, "post_layer_mix": post, "comb_res_mix": comb}, exact=True)
    residual, post, comb, _ = plan.run(**first)
    got = plan.run(**{**second, "residual": residual, "post_layer_mix": post, "comb_res_mix": comb})
    for out, expected in zip(got, want, strict=True):
        torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=2.0**-7)


@pytest.mark.parametrize(
    "config",
    [
        MixConfig(16, 32, 32, 4, 2, apart=True, coefficients=4),
        MixConfig(16, 16, 64, 4, 2, apart=True, coefficients=32),
        MixConfig(32, 16, 32, 4, 3, coefficients=8),
        MixConfig(32, 32, 96, 4, 2),
    ],
    ids=str,
)
def test_separate_terms_and_splits_do_not_change_the_result(
    device: torch.device, config: MixConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run tiles that the tuner may choose for many tokens, with tokens that fill no tile."""
    monkeypatch.setattr(api, "select", lambda *_: config)
    inputs = post_pre_inputs(PARAMS, device, 6)
    got = PrePlan("mhc_post_pre", 18, 96, device).run(**inputs)
    for out, expected in zip(got, mhc_post_pre(**inputs, exact=True), strict=True):
        torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=2.0**-7)


def test_comb_is_doubly_stochastic(device: torch.device) -> None:
    plan = PrePlan("mhc_pre", 18, 96, device)
    inputs = pre_inputs(PARAMS, device, 3)
    # Close to uniform: rows only converge within 20 steps if softmax is not saturated.
    _, comb, _ = plan.run(**{**inputs, "hc_scale": 0.2 * inputs["hc_scale"], "hc_base": 0.2 * inputs["hc_base"]})
    for axis in (-1, -2):
        torch.testing.assert_close(comb.sum(axis), torch.ones_like(comb[..., 0]), atol=1e-4, rtol=0.0)


def test_one_sinkhorn_step_is_the_column_step(device: torch.device) -> None:
    plan = PrePlan("mhc_pre", 18, 96, device)
    inputs = {**pre_inputs(PARAMS, device, 4), "sinkhorn_repeat": 1}
    _, comb, _ = plan.run(**inputs)
    assert (comb.sum(-2) - 1).abs().max() < 1e-4
    assert (comb.sum(-1) - 1).abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
def test_infinities_of_one_token_stay_there(device: torch.device) -> None:
    """A padded row of a captured batch may contain anything; its neighbours share its tiles of the tensor cores."""
    plan = PrePlan("mhc_post_pre", 18, 96, device)
    inputs = post_pre_inputs(PARAMS, device, 5)
    clean = [t.clone() for t in plan.run(**inputs)]
    inputs["residual"][7] = torch.inf
    for out, before in zip(plan.run(**inputs), clean, strict=True):
        others = torch.arange(18, device=device) != 7
        assert torch.equal(out[others], before[others])
        assert not bool(out[7].isfinite().all())


def test_inputs_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    with pytest.raises(ValueError, match="hidden is 72"):
        PrePlan("mhc_pre", 4, 72, device)
    with pytest.raises(ValueError, match=r"residual has shape \(18, 4, 96\), needs \[tokens ≤ 4, 4, 96\]"):
        PostPlan("mhc_post", 4, 96, device).run(**post_inputs(PARAMS, device, 1))
    plan = HeadPlan("mhc_head", 18, 96, device)
    inputs = head_inputs(PARAMS, device, 1)
    with pytest.raises(ValueError, match="hc_base"):
        plan.run(**{**inputs, "hc_base": torch.zeros(24, device=device)})
    plan = PrePlan("mhc_post_pre", 18, 96, device)
    inputs = post_pre_inputs(PARAMS, device, 1)
    with pytest.raises(ValueError, match="mhc_post_pre: x is missing"):
        plan.run(**{**inputs, "x": None})


FORMS = {"mhc_pre": pre_inputs, "mhc_pre_broadcast": pre_broadcast_inputs, "mhc_post_pre": post_pre_inputs}


@pytest.mark.parametrize("form", FORMS)
def test_codes_are_those_that_the_quantiser_makes_of_y(device: torch.device, form: str) -> None:
    """Bit for bit: a product with these codes gives the same result as with a separate quantiser launch."""
    params = {"tokens": 5, "hidden": 384, "norm": True}
    plan = PrePlan(form, 5, 384, device, quantised=5)
    plain = PrePlan(form, 5, 384, device)
    for seed in (1, 2):
        inputs = FORMS[form](params, device, seed)
        results, before = plan.run(**inputs), plain.run(**inputs)
        codes = plan.codes(5)
        assert codes is not None
        for got, want in zip((*results, *codes), (*before, *fp8_quant(before[-1])), strict=True):
            assert torch.equal(got, want)


def test_only_runs_of_up_to_the_requested_tokens_are_quantised(device: torch.device) -> None:
    plan = PrePlan("mhc_pre", 4, 128, device, quantised=2)
    plan.run(**pre_inputs({"tokens": 2, "hidden": 128, "norm": True}, device, 1))
    two = [t.clone() for t in plan.codes(2) or ()]
    plan.run(**pre_inputs({"tokens": 3, "hidden": 128, "norm": True}, device, 2))
    assert plan.codes(3) is None
    assert all(torch.equal(a, b) for a, b in zip(two, plan.codes(2) or (), strict=True))
    assert PrePlan("mhc_pre", 4, 96, device).codes(1) is None
    with pytest.raises(ValueError, match="hidden is 96, needs a multiple of 128 to be quantised"):
        PrePlan("mhc_pre", 4, 96, device, quantised=1)
