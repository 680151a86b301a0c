"""The mixture of experts in torch."""

from __future__ import annotations

import torch

from dsv4_kernels.numerics import dequantize_e4m3, dequantize_mxfp4, quantize_e4m3

LIMIT = 10.0
GROUP = 32
AMAX_FLOOR = 1e-10


def moe_w4a16(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    exact: bool = False,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """bf16 activations; shapes in the package's contract. `exact` returns float64 and leaves h unrounded."""
    routed = _moe(x.double(), topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, exact, a8=False)
    return routed if addend is None else addend + routed


def moe_w4a8(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    exact: bool = False,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """E4M3 activations; shapes in the package's contract. `exact` returns float64; x and h are rounded to E4M3 either
    way."""
    routed = _moe(_through_e4m3(x), topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, exact, a8=True)
    return routed if addend is None else addend + routed


def _moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    exact: bool,
    a8: bool,
) -> torch.Tensor:
    experts, inter = w13.shape[0], w13.shape[1] // 2
    out = torch.zeros_like(x)
    for expert in topk_ids.unique().tolist():
        if not 0 <= expert < experts:
            continue
        token, slot = torch.nonzero(topk_ids == expert, as_tuple=True)
        gate_up = x[token] @ dequantize_mxfp4(w13[expert], w13_scale[expert]).T
        gate = gate_up[:, :inter].clamp_max(LIMIT)
        up = gate_up[:, inter:].clamp(-LIMIT, LIMIT)
        h = torch.nn.functional.silu(gate) * up * topk_weights[token, slot].double()[:, None]
        if a8:
            h = _through_e4m3(h)
        elif not exact:
            h = h.to(torch.bfloat16).double()
        out.index_add_(0, token, h @ dequantize_mxfp4(w2[expert], w2_scale[expert]).T)
    return out if exact else out.to(torch.bfloat16)


def _through_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to E4M3 with one power-of-two scale per 32; returns float64."""
    code, scale = quantize_e4m3(x, GROUP, AMAX_FLOOR)
    return dequantize_e4m3(code, scale, GROUP)
