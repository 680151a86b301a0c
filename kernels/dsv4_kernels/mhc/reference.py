"""Hyper-connections in torch, float64; see the package docstring."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_kernels.fp8_quant.reference import fp8_quant


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
