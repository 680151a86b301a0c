"""vLLM's Triton product with block scales: fp8_utils.py and its table of configurations, from vLLM's wheel."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.kernels.source import load_functions

from dsv4_kernels.numerics import ue8m0_decode
from dsv4_kernels.registry import Provider, once, register_provider

FILE = Path("third_party/peers/vllm/model_executor/layers/quantization/utils/fp8_utils.py")
NAMES = ("_w8a8_triton_block_scaled_mm", "get_w8a8_block_fp8_configs", "w8a8_triton_block_scaled_mm")


def missing() -> str | None:
    return None if FILE.exists() else f"{FILE} is not there"


def make(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Scales are decoded before the timed calls."""
    platform = SimpleNamespace(
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        get_device_name_as_file_name=lambda: torch.cuda.get_device_name().replace(" ", "_"),
        get_device_name=torch.cuda.get_device_name,
    )
    module = load_functions(
        FILE,
        NAMES,
        current_platform=platform,
        get_device_name_as_file_name=platform.get_device_name_as_file_name,
        envs=SimpleNamespace(VLLM_BATCH_INVARIANT=False),
        logger=logging.getLogger("vllm"),
        functools=functools,
        json=json,
        os=os,
        Any=Any,
    )
    scales = once(lambda *both: tuple(ue8m0_decode(scale).float() for scale in both))

    def call(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> Any:
        codes = a.view(torch.float8_e4m3fn), w.view(torch.float8_e4m3fn)
        return module.w8a8_triton_block_scaled_mm(*codes, *scales(a_scale, w_scale), [128, 128], torch.bfloat16)

    return call


def register() -> None:
    register_provider("fp8_gemm", Provider("vLLM Triton", missing, make))
