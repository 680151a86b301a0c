"""torch: the bf16 product of the same size through cuBLAS, twice the weight bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsv4_kernels.numerics import dequantize_blocks, dequantize_e4m3
from dsv4_kernels.registry import Provider, once, register_provider


def make_bf16(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    out = torch.empty((params["tokens"], params["n"]), dtype=torch.bfloat16, device=device)

    @once
    def dequantised(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> tuple[Any, ...]:
        return dequantize_e4m3(a, a_scale, 128).bfloat16(), dequantize_blocks(w, w_scale).bfloat16().T

    def call(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        return torch.mm(*dequantised(a, a_scale, w, w_scale), out=out)

    return call


def register() -> None:
    register_provider("fp8_gemm", Provider("cuBLAS bf16", lambda: None, make_bf16))
