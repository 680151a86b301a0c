"""FlagGems (Triton), from its repository: third_party/peers/FlagGems.

Its decode of DeepSeek-V4's cache has a second body for the FlagTree compiler, which stock Triton cannot run; the plain
one is measured. It allocates its result and partial results in the call; capture in a graph excludes this from the
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.kernels.peers.flashmla import decode_call
from benchmarks.kernels.source import load

from dsv4_kernels.numerics import ue8m0_decode
from dsv4_kernels.registry import Provider, once, register_provider

ROOT = Path("third_party/peers/FlagGems/src/flag_gems")
DECODE = ROOT / "fused/flash_mla_with_kvcache.py"
PRODUCT = ROOT / "ops/w8a8_block_fp8_matmul.py"


def missing(path: Path) -> str | None:
    return None if path.exists() else f"{path} is not there"


def make_decode(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    return decode_call(load(DECODE, "flag_gems", has_triton_tle=lambda *_: False), params, device)


def make_product(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Scales are decoded before the timed calls; its table may lack configurations for this GPU and shape."""
    module = load(PRODUCT, "flag_gems", flag_gems=SimpleNamespace(device="cuda"))
    scales = once(lambda *both: tuple(ue8m0_decode(scale).float() for scale in both))

    def call(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> Any:
        codes = a.view(torch.float8_e4m3fn), w.view(torch.float8_e4m3fn)
        return module.w8a8_block_fp8_matmul(*codes, *scales(a_scale, w_scale), [128, 128], torch.bfloat16)

    return call


def register() -> None:
    register_provider("mla_decode", Provider("FlagGems", lambda: missing(DECODE), make_decode))
    register_provider("fp8_gemm", Provider("FlagGems", lambda: missing(PRODUCT), make_product))
