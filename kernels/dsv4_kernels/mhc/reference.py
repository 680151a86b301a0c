"""Hyper-connections in torch, float64, and random inputs with streams of very different sizes.

See the package docstring.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_kernels.fp8.api import fp8_quant
from dsv4_kernels.numerics import seeded


def _mixes(x: torch.Tensor, fn: torch.Tensor, rms_eps: float) -> torch.Tensor:
    """x [T, N], fn [M, N] → x · fnᵀ by the root mean square of x, float64 [T, M]."""
    x, fn = x.double(), fn.double()
    return (x @ fn.t()) * torch.rsqrt(x.square().mean(-1, keepdim=True) + rms_eps)


def _coefficients(
    mixes: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mixes [T, 24] → (pre [T, 4], post [T, 4, 1], comb [T, 4, 4]), float64."""
    scale, base = hc_scale.double(), hc_base.double()
    pre = torch.sigmoid(mixes[:, :4] * scale[0] + base[:4]) + hc_pre_eps
    post = torch.sigmoid(mixes[:, 4:8] * scale[1] + base[4:8]) * hc_post_mult_value
    comb = torch.softmax((mixes[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4), -1) + hc_sinkhorn_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_sinkhorn_eps)
    for _ in range(sinkhorn_repeat - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_sinkhorn_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_sinkhorn_eps)
    return pre, post[:, :, None], comb


def _layer_input(
    pre: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor | None, norm_eps: float
) -> torch.Tensor:
    y = (pre[:, :, None] * residual.double()).sum(1)
    if norm_weight is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.double()
    return y


def mhc_pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """residual bf16 [T, 4, H] → (post float32 [T, 4, 1], comb float32 [T, 4, 4], y bf16 [T, H])."""
    mixes = _mixes(residual.flatten(1), fn, rms_eps)
    pre, post, comb = _coefficients(
        mixes, hc_scale, hc_base, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
    )
    y = _layer_input(pre, residual, norm_weight, norm_eps)
    return (post, comb, y) if exact else (post.float(), comb.float(), y.bfloat16())


def mhc_pre_broadcast(
    residual: torch.Tensor,
    fn_broadcast: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """residual bf16 [T, H] → (streams bf16 [T, 4, H], post, comb, y)."""
    streams = residual[:, None].expand(-1, 4, -1).contiguous()
    mixes = _mixes(residual, fn_broadcast, rms_eps)
    pre, post, comb = _coefficients(
        mixes, hc_scale, hc_base, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
    )
    y = _layer_input(pre, streams, norm_weight, norm_eps)
    return (streams, post, comb, y) if exact else (streams, post.float(), comb.float(), y.bfloat16())


def mhc_post(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    exact: bool = False,
) -> torch.Tensor:
    """x bf16 [T, H], residual bf16 [T, 4, H] → residual' bf16 [T, 4, H]."""
    mixed = torch.einsum("tij,tih->tjh", comb_res_mix.double(), residual.double())
    out = mixed + post_layer_mix.double().view(-1, 4, 1) * x.double()[:, None]
    return out if exact else out.bfloat16()


def mhc_post_pre(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mhc_post`, then `mhc_pre` of the rounded result → (residual', post', comb', y')."""
    after = mhc_post(x, residual, post_layer_mix, comb_res_mix, exact=True)
    post, comb, y = mhc_pre(
        after.bfloat16(),
        fn,
        hc_scale,
        hc_base,
        rms_eps,
        hc_pre_eps,
        hc_sinkhorn_eps,
        hc_post_mult_value,
        sinkhorn_repeat,
        norm_weight,
        norm_eps,
        exact,
    )
    return after if exact else after.bfloat16(), post, comb, y


def mhc_post_pre_o8(exact: bool = False, **inputs: Any) -> tuple[torch.Tensor, ...]:
    """`mhc_post_pre`, and y' quantised once it is rounded → (residual', post', comb', y', code, scale)."""
    residual, post, comb, y = mhc_post_pre(**inputs, exact=exact)
    return residual, post, comb, y, *fp8_quant(y.bfloat16())


def mhc_head(
    hs_flat: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
    exact: bool = False,
) -> torch.Tensor:
    """hs_flat bf16 [T, 4, H] → bf16 [T, H]."""
    mixes = _mixes(hs_flat.flatten(1), fn, rms_eps)
    pre = torch.sigmoid(mixes * hc_scale.double() + hc_base.double()) + hc_eps
    y = _layer_input(pre, hs_flat, None, 0.0)
    return y if exact else y.bfloat16()


def _residual(params: Mapping[str, Any], device: torch.device, draw: torch.Generator) -> torch.Tensor:
    size = (params["tokens"], 4, params["hidden"])
    streams = torch.randn(size, generator=draw, device=device)
    streams *= torch.exp2(torch.randint(-3, 4, size[:2], generator=draw, device=device).float())[:, :, None]
    return streams.bfloat16()


def _weights(
    params: Mapping[str, Any], device: torch.device, draw: torch.Generator, rows: int, columns: int
) -> dict[str, Any]:
    # Products of standard deviation around 1, as σ and softmax want them.
    fn = torch.randn((rows, columns), generator=draw, device=device) * columns**-0.5
    scale = torch.rand((3 if rows == 24 else 1,), generator=draw, device=device) + 0.5
    base = torch.randn((rows,), generator=draw, device=device)
    return {"fn": fn, "hc_scale": scale, "hc_base": base, "rms_eps": 1e-6}


def _layer(params: Mapping[str, Any], device: torch.device, draw: torch.Generator) -> dict[str, Any]:
    weight = 1 + 0.2 * torch.randn((params["hidden"],), generator=draw, device=device)
    return {
        "hc_pre_eps": 1e-6,
        "hc_sinkhorn_eps": 1e-6,
        "hc_post_mult_value": 2.0,
        "sinkhorn_repeat": 20,
        "norm_weight": weight.bfloat16() if params["norm"] else None,
        "norm_eps": 1e-6,
    }


def pre_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Inputs of `mhc_pre`."""
    draw = seeded(device, seed)
    weights = _weights(params, device, draw, 24, 4 * params["hidden"])
    return {"residual": _residual(params, device, draw), **weights, **_layer(params, device, draw)}


def pre_broadcast_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Inputs of `mhc_pre_broadcast`."""
    draw = seeded(device, seed)
    weights = _weights(params, device, draw, 24, params["hidden"])
    weights["fn_broadcast"] = weights.pop("fn")
    residual = _residual(params, device, draw)[:, 0].contiguous()
    return {"residual": residual, **weights, **_layer(params, device, draw)}


def post_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Inputs of `mhc_post`."""
    draw = seeded(device, seed)
    tokens = params["tokens"]
    return {
        "x": torch.randn((tokens, params["hidden"]), generator=draw, device=device).bfloat16(),
        "residual": _residual(params, device, draw),
        "post_layer_mix": 2 * torch.rand((tokens, 4, 1), generator=draw, device=device),
        "comb_res_mix": torch.rand((tokens, 4, 4), generator=draw, device=device) / 2,
    }


def post_pre_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Inputs of `mhc_post_pre`."""
    draw = seeded(device, seed + 1)
    weights = _weights(params, device, draw, 24, 4 * params["hidden"])
    return {**post_inputs(params, device, seed), **weights, **_layer(params, device, draw)}


def head_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Inputs of `mhc_head`."""
    draw = seeded(device, seed)
    weights = _weights(params, device, draw, 4, 4 * params["hidden"])
    return {"hs_flat": _residual(params, device, draw), **weights, "hc_eps": 1e-6}
