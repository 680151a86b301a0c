"""torch: the bf16 product of the same size through cuBLAS, twice the weight bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsv4_kernels.numerics import dequantize_blocks, dequantize_e4m3
from dsv4_kernels.registry import Provider, register_provider


def make_bf16(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    out = torch.empty((params["tokens"], params["n"]), dtype=torch.bfloat16, device=device)
    kept: dict[str, torch.Tensor] = {}

    def call(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept["a"] = dequantize_e4m3(a, a_scale, 128).bfloat16()
            kept["w"] = dequantize_blocks(w, w_scale).bfloat16().T
        return torch.mm(kept["a"], kept["w"], out=out)

    return call


def register() -> None:
    register_provider("fp8_gemm", Provider("cuBLAS bf16", lambda: None, make_bf16))
