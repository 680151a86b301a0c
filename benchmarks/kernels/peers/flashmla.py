"""FlashMLA (hand-written CUDA for sm_90) of an installed vLLM, or else of vLLM's wheel in third_party/peers."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from benchmarks.kernels.source import installed

from dsv4_kernels.registry import Provider, once, register_provider

ROOT = Path("third_party/peers/vllm")


def missing() -> str | None:
    if not (ROOT / "_flashmla_C.abi3.so").exists() and not installed("vllm._flashmla_C"):
        return f"{ROOT}/_flashmla_C.abi3.so is not there, and no vLLM that brings it is installed"
    if torch.cuda.get_device_capability() != (9, 0):
        return "has kernels for sm_90 and sm_100 only"
    return None


def interface() -> Any:
    """Return FlashMLA's own Python interface; without an installed vLLM, with a stand-in for its package."""
    if "flash_mla_interface" not in sys.modules and installed("vllm._flashmla_C"):
        from vllm.third_party.flashmla import flash_mla_interface

        sys.modules["flash_mla_interface"] = flash_mla_interface
    if "flash_mla_interface" not in sys.modules:
        torch.ops.load_library(str((ROOT / "_flashmla_C.abi3.so").resolve()))
        package = sys.modules.setdefault("vllm", types.ModuleType("vllm"))
        package._flashmla_C = types.ModuleType("vllm._flashmla_C")  # type: ignore[attr-defined]
        sys.modules["vllm._flashmla_C"] = package._flashmla_C  # type: ignore[attr-defined]
        path = ROOT / "third_party" / "flashmla" / "flash_mla_interface.py"
        spec = importlib.util.spec_from_file_location("flash_mla_interface", path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules["flash_mla_interface"] = module
        spec.loader.exec_module(module)
    return sys.modules["flash_mla_interface"]


def decode_call(module: Any, params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return a call of `module`, which has FlashMLA's interface.

    It supports 64 or 128 heads: fewer are padded, as in vLLM. The schedule is made once (vLLM: once per step).
    """
    schedule, _ = module.get_mla_metadata()
    tokens, heads = params["tokens"], params["heads"]
    padded = 64 if heads <= 64 else 128
    out = torch.empty((tokens, 1, padded, 512), dtype=torch.bfloat16, device=device)

    @once
    def pad(q: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Belongs to the previous layer, so it is not timed.
        wide = torch.nn.functional.pad(q, (0, 0, 0, padded - heads)).unsqueeze(1).contiguous()
        return wide, torch.nn.functional.pad(sink, (0, padded - heads)).contiguous()

    def view(cache: torch.Tensor, page: int) -> torch.Tensor:
        return cache.as_strided((cache.shape[0], page, 1, 584), (cache.stride(0), 584, 584, 1))

    def call(
        q: torch.Tensor, sink: torch.Tensor, pages: tuple[int, int], **x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide, sinks = pad(q, sink)
        more = {}
        if params["topk"]:
            more = {
                "extra_k_cache": view(x["cmp_cache"], pages[1]),
                "extra_indices_in_kvcache": x["cmp_idx"].unsqueeze(1),
                "extra_topk_length": x["cmp_len"],
            }
        o, lse = module.flash_mla_with_kvcache(
            q=wide,
            k_cache=view(x["swa_cache"], pages[0]),
            block_table=None,
            cache_seqlens=None,
            head_dim_v=512,
            tile_scheduler_metadata=schedule,
            is_fp8_kvcache=True,
            indices=x["swa_idx"].unsqueeze(1),
            topk_length=x["swa_len"],
            softmax_scale=512**-0.5,
            attn_sink=sinks,
            out=out,
            **more,
        )
        return o[:, 0, :heads], lse[:, :heads, 0]

    return call


def prefill_call(module: Any, params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return a call of flash_mla_sparse_fwd: 8, 16, 32, 64 or 128 heads, width of lists a multiple of 128."""

    def call(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor, sink: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, _, lse = module.flash_mla_sparse_fwd(
            q, kv[:, None], indices[:, None], 512**-0.5, attn_sink=sink, topk_length=lengths
        )
        return o, lse

    return call


def register() -> None:
    make = lambda params, device: decode_call(interface(), params, device)  # noqa: E731
    register_provider("mla_decode", Provider("FlashMLA", missing, make))
    prefill = lambda params, device: prefill_call(interface(), params, device)  # noqa: E731
    register_provider("mla_prefill", Provider("FlashMLA", missing, prefill))
