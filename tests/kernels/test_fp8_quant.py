"""The quantiser after the activation, beyond the registry's cases: the same bits as in two launches, and refusals."""

from __future__ import annotations

import pytest
import torch

from dsv4_kernels.fp8.api import QuantPlan, SiluMulPlan, _silu_inputs


@pytest.mark.parametrize("tokens", [3, 66])
def test_codes_are_those_that_the_quantiser_makes_of_the_activation(device: torch.device, tokens: int) -> None:
    inputs = _silu_inputs({"tokens": tokens, "k": 640, "limit": 10.0}, device, 1)
    y, *codes = SiluMulPlan(tokens, 640, device).run(**inputs)
    for got, want in zip(codes, QuantPlan(tokens, 640, device).run(x=y), strict=True):
        assert torch.equal(got, want)


def test_both_sides_are_clamped(device: torch.device) -> None:
    x = torch.full((1, 256), 100.0, dtype=torch.bfloat16, device=device)
    x[0, 128:192] = -100.0
    y, _, _ = SiluMulPlan(1, 128, device).run(x=x, limit=10.0)
    assert y[0].tolist() == [-100.0] * 64 + [100.0] * 64
    y, _, _ = SiluMulPlan(1, 128, device).run(x=x, limit=float("inf"))
    assert y[0, 64:].tolist() == [9984.0] * 64


def test_inputs_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    with pytest.raises(ValueError, match="k is 96"):
        SiluMulPlan(1, 96, device)
    plan = SiluMulPlan(1, 128, device)
    with pytest.raises(ValueError, match=r"x has shape \(2, 256\), needs \[tokens ≤ 1, 256\]"):
        plan.run(x=torch.zeros((2, 256), dtype=torch.bfloat16, device=device), limit=10.0)
    with pytest.raises(ValueError, match="x has shape"):
        plan.run(x=torch.zeros((1, 128), dtype=torch.bfloat16, device=device), limit=10.0)
