"""The quantiser in torch."""

from __future__ import annotations

import torch

from dsv4_kernels.numerics import quantize_e4m3

GROUP = 128
FLOOR = 1e-4


def fp8_quant(x: torch.Tensor, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """x bf16 [T, K] → (code uint8 [T, K], scale uint8 [T, K/128]); `exact` changes nothing, both outputs are bytes."""
    return quantize_e4m3(x, GROUP, FLOOR)


def silu_mul_quant(x: torch.Tensor, limit: float, exact: bool = False) -> tuple[torch.Tensor, ...]:
    """x bf16 [T, 2K] → (y bf16 [T, K], code uint8 [T, K], scale uint8 [T, K/128]); exact: y float64."""
    gate, up = x.double().chunk(2, dim=-1)
    y = torch.nn.functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
    return (y if exact else y.bfloat16(), *fp8_quant(y.bfloat16()))
