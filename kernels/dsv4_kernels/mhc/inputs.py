"""Random inputs for the hyper-connections, with streams of very different sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_kernels.numerics import seeded


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
