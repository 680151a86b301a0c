"""CUTLASS's block-scaled product from vLLM's wheel: third_party/peers/vllm/_C_stable_libtorch.abi3.so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dsv4_kernels.numerics import ue8m0_decode
from dsv4_kernels.registry import Provider, once, register_provider

LIBRARY = Path("third_party/peers/vllm/_C_stable_libtorch.abi3.so")


def missing() -> str | None:
    if not LIBRARY.exists():
        return f"{LIBRARY} is not there"
    if torch.cuda.get_device_capability() != (9, 0):
        return "is used here for sm_90 only"
    return None


def make(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Scales are converted to its layout (fp32, tokens as the fast axis) before the timed calls."""
    if not hasattr(torch.ops._C, "cutlass_scaled_mm"):
        torch.ops.load_library(LIBRARY)
    out = torch.empty((params["tokens"], params["n"]), dtype=torch.bfloat16, device=device)

    @once
    def scales(a_scale: torch.Tensor, w_scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ue8m0_decode(a_scale).float().t().contiguous().t(), ue8m0_decode(w_scale).float().t()

    def call(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        codes, weights = a.view(torch.float8_e4m3fn), w.view(torch.float8_e4m3fn).t()
        torch.ops._C.cutlass_scaled_mm(out, codes, weights, *scales(a_scale, w_scale), None)
        return out

    return call


def register() -> None:
    register_provider("fp8_gemm", Provider("CUTLASS", missing, make))
