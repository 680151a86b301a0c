"""The quantiser and the block-scaled products in torch, float64 inside."""

from __future__ import annotations

import torch

from dsv4_kernels.numerics import dequantize_blocks, dequantize_e4m3, quantize_e4m3

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


def wo_a_einsum(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, exact: bool = False
) -> torch.Tensor:
    """a uint8 [T, G, K], a_scale [T, G, K/128], w uint8 [G, N, K], w_scale [G, ⌈N/128⌉, K/128] → bf16 [T, G, N]."""
    wide = dequantize_e4m3(a, a_scale, 128)
    out = torch.stack([wide[:, g] @ dequantize_blocks(w[g], w_scale[g]).T for g in range(w.shape[0])], 1)
    return out if exact else out.to(torch.bfloat16)


def wo_a_einsum_o8(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, exact: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return `wo_a_einsum` bf16 [T, G, N], and its code uint8 [T, G·N] and scale uint8 [T, G·N/128]."""
    out = wo_a_einsum(a, a_scale, w, w_scale, exact)
    return (out, *quantize_e4m3(out.to(torch.bfloat16).flatten(1), 128, 1e-4))


def fp8_gemm(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, exact: bool = False
) -> torch.Tensor:
    """a uint8 [T, K], a_scale [T, K/128], w uint8 [N, K], w_scale [⌈N/128⌉, K/128] → bf16 [T, N]."""
    return wo_a_einsum(a[:, None], a_scale[:, None], w[None], w_scale[None], exact)[:, 0]
