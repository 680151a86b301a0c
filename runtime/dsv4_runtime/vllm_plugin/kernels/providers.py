"""Providers of an operation besides the bundled kernels: vLLM's own CUDA and Triton kernels, and packages called by
vLLM.

Each maker returns a function with the inputs of an operation of `dsv4_kernels.registry` as keywords and its outputs as
result, so that all providers are compared and timed equally. One-time preparations of a layer (repacked weights, scales
in the layout of a kernel) happen in the first call, which is not timed. The `…_missing` functions return the reason why
a provider cannot run here, or None.

FlashInfer's sparse attention and b12x exist in vLLM for compute capability 12.x only. They are called like in vLLM
0.33, through its wrappers. Neither package is imported on other cards, nor in the process that starts the trials. Their
makers raise if the package has other arguments than vLLM passes, or if vLLM would refuse the shape.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from dsv4_kernels.mla_cache.api import mla_cache_write
from dsv4_kernels.moe.api import LIMIT
from dsv4_kernels.numerics import ds_mla, ue8m0_decode
from dsv4_kernels.registry import Operation, Provider, once, operation, register_provider
from dsv4_runtime.contract.kernels import BUNDLED, BUNDLED_W4A8, Op

Make = Callable[[Mapping[str, Any], torch.device], Callable[..., Any]]
_MOST_DECODES = 512
# Maximum rows of a trial that counts as a decode step.


def _fp8(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn)


def _float_scales() -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function that decodes the scales of both sides of a product to float32."""
    return once(lambda *scales: tuple(ue8m0_decode(scale).float().contiguous() for scale in scales))


def deep_gemm_missing() -> str | None:
    """Return the reason why DeepGEMM cannot run here, or None."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import deep_gemm

    if not deep_gemm.is_deep_gemm_supported():
        return "DeepGEMM is not installed, or does not support this card"
    if capability()[0] != 9:
        return "its scales are packed in another way on this card; tried on compute capability 9.0 only"
    return None


def deep_gemm(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return DeepGEMM's FP8 product."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import deep_gemm

    out = torch.empty((params["tokens"], params["n"]), dtype=torch.bfloat16, device=device)

    @once
    def scales(a_scale: torch.Tensor, w_scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = ue8m0_decode(a_scale).float()
        return deep_gemm.get_col_major_tma_aligned_tensor(wide), ue8m0_decode(w_scale).float()

    def call(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        sa, sw = scales(a_scale, w_scale)
        deep_gemm.fp8_gemm_nt((_fp8(a), sa), (_fp8(w), sw), out, is_deep_gemm_e8m0_used=False)
        return out

    return call


def deep_gemm_einsum(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return DeepGEMM's grouped FP8 product."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import deep_gemm

    out = torch.empty((params["tokens"], params["groups"], params["n"]), dtype=torch.bfloat16, device=device)

    @once
    def scales(a_scale: torch.Tensor, w_scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # [T, G, K/128] with T innermost and padded to 4.
        wide = ue8m0_decode(a_scale).float()
        tokens = wide.shape[0]
        padded = torch.zeros((*wide.shape[1:], -(-tokens // 4) * 4), device=device)
        padded[..., :tokens] = wide.permute(1, 2, 0)
        return padded[..., :tokens].permute(2, 0, 1), ue8m0_decode(w_scale).float()

    def call(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        sa, sw = scales(a_scale, w_scale)
        deep_gemm.fp8_einsum("bhr,hdr->bhd", (_fp8(a), sa), (_fp8(w), sw), out, recipe=(1, 128, 128))
        return out

    return call


def vllm_triton(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return vLLM's FP8 product in Triton."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import w8a8_triton_block_scaled_mm

    scales = _float_scales()

    def call(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> Any:
        sa, sw = scales(a_scale, w_scale)
        return w8a8_triton_block_scaled_mm(_fp8(a), _fp8(w), sa, sw, [128, 128], torch.bfloat16)

    return call


def cutlass_missing() -> str | None:
    """Return the reason why CUTLASS's FP8 products cannot run here, or None."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import custom_ops as ops

    major, minor = capability()
    able = ops.cutlass_scaled_mm_supports_block_fp8(major * 10 + minor)
    return None if able else f"vLLM's CUTLASS has no block-scaled product for compute capability {major}.{minor}"


def cutlass(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return CUTLASS's FP8 product."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import custom_ops as ops

    @once
    def scales(a_scale: torch.Tensor, w_scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Scales of A with the tokens innermost, those of W transposed.
        wide = ue8m0_decode(a_scale).float()
        return wide.t().contiguous().t(), ue8m0_decode(w_scale).float().t()

    def call(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> Any:
        sa, sw = scales(a_scale, w_scale)
        return ops.cutlass_scaled_mm(_fp8(a), _fp8(w).t(), out_dtype=torch.bfloat16, scale_a=sa, scale_b=sw)

    return call


def marlin_missing() -> str | None:
    """Return the reason why Marlin cannot run here, or None."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import custom_ops  # noqa: F401  (loads vLLM's libraries)

    return None if hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm") else "vLLM was built without Marlin's experts"


def marlin(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return Marlin's mixture of experts, its activation included."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import (
        fused_marlin_moe,
        prepare_moe_mxfp4_layer_for_marlin,
        scalar_types,
        silu_and_mul_with_clamp,
    )

    @once
    def pack(w13: torch.Tensor, w2: torch.Tensor, s13: torch.Tensor, s2: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layer: Any = SimpleNamespace(params_dtype=torch.bfloat16)
        return tuple(prepare_moe_mxfp4_layer_for_marlin(layer, w13, w2, s13, s2, None, None)[:4])

    def clamped(_: Any, output: torch.Tensor, both: torch.Tensor, **__: Any) -> None:
        silu_and_mul_with_clamp(output, both, LIMIT)

    experts, spread = params["experts"], "routing" in params

    @once
    def mapped(topk_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # vLLM passes global expert ids, and a map with −1 for experts of other ranks.
        local = torch.arange(experts + 1, dtype=torch.int32, device=device)
        local[experts] = -1
        return torch.where((topk_ids >= 0) & (topk_ids < experts), topk_ids, experts), local

    def call(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, **w: torch.Tensor) -> Any:
        w13, w2, s13, s2 = pack(w["w13"], w["w2"], w["w13_scale"], w["w2_scale"])
        ids, expert_map = mapped(topk_ids) if spread else (topk_ids, None)
        return fused_marlin_moe(
            x, w13, w2, None, None, s13, s2, topk_weights, ids, quant_type_id=scalar_types.float4_e2m1f.id,
            activation_func=clamped, global_num_experts=experts + 1 if spread else -1, expert_map=expert_map,
        )  # fmt: skip

    return call


def flash_mla_missing() -> str | None:
    """Return the reason why FlashMLA cannot run here, or None."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import flashmla

    able, reason = flashmla.is_flashmla_sparse_supported()
    return None if able else str(reason)


def flash_mla(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return FlashMLA's sparse decode."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import flashmla

    schedule, _ = flashmla.get_mla_metadata()
    tokens, heads = params["tokens"], params["heads"]
    padded, pad = _flash_mla_padding(heads)
    out = torch.empty((tokens, 1, padded, 512), dtype=torch.bfloat16, device=device)

    def pages(cache: torch.Tensor, page: int) -> torch.Tensor:
        return cache.as_strided((cache.shape[0], page, 1, 584), (cache.stride(0), 584, 584, 1))

    def call(q: torch.Tensor, sink: torch.Tensor, **x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        wide, sinks = pad(q, sink)
        more = {}
        if params["topk"]:
            more = {
                "extra_k_cache": pages(x["cmp_cache"], x["pages"][1]),
                "extra_indices_in_kvcache": x["cmp_idx"].unsqueeze(1),
                "extra_topk_length": x["cmp_len"],
            }
        o, lse = flashmla.flash_mla_with_kvcache(
            q=wide.unsqueeze(1), k_cache=pages(x["swa_cache"], x["pages"][0]), block_table=None, cache_seqlens=None,
            head_dim_v=512, tile_scheduler_metadata=schedule, is_fp8_kvcache=True,
            indices=x["swa_idx"].unsqueeze(1), topk_length=x["swa_len"], softmax_scale=512**-0.5, attn_sink=sinks,
            out=out, **more,
        )  # fmt: skip
        lse = lse[:, :heads, 0]
        # Rows without entries are +inf there and −inf in the contract.
        return o[:, 0, :heads], torch.where(torch.isposinf(lse), -torch.inf, lse)

    return call


def _flash_mla_padding(heads: int) -> tuple[int, Callable[..., tuple[torch.Tensor, ...]]]:
    """Return the heads to which vLLM's class pads `heads`, and a function that pads q [T, H, 512] and sink [H]."""
    padded = 64 if heads <= 64 else 128

    @once
    def pad(q: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = torch.nn.functional.pad(q, (0, 0, 0, padded - heads)).contiguous()
        return wide, torch.nn.functional.pad(sink, (0, padded - heads)).contiguous()

    return padded, pad


def flash_mla_prefill(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return FlashMLA's sparse prefill."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import flashmla

    tokens, heads = params["tokens"], params["heads"]
    padded, pad = _flash_mla_padding(heads)
    out = torch.empty((tokens, padded, 512), dtype=torch.bfloat16, device=device)

    def call(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor, sink: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide, sinks = pad(q, sink)
        _, _, lse = flashmla.flash_mla_sparse_fwd(
            q=wide, kv=kv.unsqueeze(1), indices=indices.unsqueeze(1), sm_scale=512**-0.5, attn_sink=sinks,
            topk_length=lengths, out=out,
        )  # fmt: skip
        lse = lse[:, :heads]
        return out[:, :heads], torch.where(torch.isposinf(lse), -torch.inf, lse)

    return call


def front_missing() -> str | None:
    """Return the reason why vLLM's fused insertion cannot run here, or None."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import custom_ops  # noqa: F401  (loads vLLM's libraries)

    there = hasattr(torch.ops._C, "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert")
    return None if there else "vLLM was built without DeepSeek-V4's fused insertion"


def front_insert(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return vLLM's fused insertion, its CUDA operator."""

    def call(
        q: torch.Tensor, kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, positions: torch.Tensor,
        cos_sin_cache: torch.Tensor, padded_heads: int, eps: float, page: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        found = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
            q, kv, kv_cache, slot_mapping, positions, cos_sin_cache, padded_heads, eps, page
        )
        return found, kv_cache

    return call


def front_norm(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return vLLM's norms of query and key, in Triton."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import fused_q_kv_rmsnorm

    return fused_q_kv_rmsnorm  # type: ignore[no-any-return]


def tilelang_missing() -> str | None:
    """Return the reason why TileLang's hyper-connections cannot run here, or None."""
    return None if find_spec("tilelang") else "tilelang is not installed"


def tilelang(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return TileLang's hyper-connections between two sublayers."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import mhc_fused_post_pre_tilelang

    return mhc_fused_post_pre_tilelang  # type: ignore[no-any-return]


def cute_missing() -> str | None:
    """Return the reason why CuTe's compressor cannot run here, or None."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import has_cutedsl

    return None if has_cutedsl() else "nvidia-cutlass-dsl is not installed"


def cute(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return CuTe's compressor."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL

    ratio = params["ratio"]

    def call(
        state_cache: torch.Tensor, kv_cache: torch.Tensor, kv_slot_mapping: torch.Tensor, **x: Any
    ) -> torch.Tensor:
        SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL(
            state_cache=state_cache, num_actual=kv_slot_mapping.shape[0], block_size=state_cache.shape[1],
            state_width=state_cache.shape[2] // 2, kv_cache=kv_cache,
            k_cache_metadata=SimpleNamespace(slot_mapping=kv_slot_mapping), pdl_kwargs={"launch_pdl": False},
            head_dim=512, rope_head_dim=64, overlap=ratio == 4, use_fp4_cache=False, quant_block=64, token_stride=576,
            scale_dim=8, store_full_kv=False, store_full_fp8=False, fp8_scale=None, **x,
        )  # fmt: skip
        return kv_cache

    return call


def gate(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return the launches of vLLM's `GateLinear` and its router. Token ids are int32 as in vLLM."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import GateLinear, fused_topk_bias_router, ll_bf16

    few = capability()[0] in (9, 10) and ll_bf16.is_available() and params["tokens"] <= GateLinear.LL_BF16_MAX_TOKENS

    @once
    def narrow(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (ids.int(),)

    def call(
        x: torch.Tensor, weight: torch.Tensor, scaling: float, k: int, bias: torch.Tensor | None = None,
        tid2eid: torch.Tensor | None = None, input_ids: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        logits = ll_bf16.ll_bf16_gemm(x, weight) if few else torch.mm(x, weight.T, out_dtype=torch.float32)
        ids = None if input_ids is None else narrow(input_ids)[0]
        return fused_topk_bias_router.fused_topk_bias(
            x, logits, "sqrtsoftplus", bias, k, True, torch.int32, ids, tid2eid, routed_scaling_factor=scaling
        )

    return call


def indexer_topk(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return the kernel selected by vLLM's indexer: by rows for prompts, else that of its `auto`."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import custom_ops as ops
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import indexer_topk as topk

    rows, k = params["rows"], params["k"]
    # Filled like in the indexer: a kernel may leave elements unwritten.
    out = torch.full((rows, k), -1, dtype=torch.int32, device=device)
    workspace = torch.empty((topk.RADIX_TOPK_WORKSPACE_SIZE,), dtype=torch.uint8, device=device)
    picks = topk.SparseIndexerTopk("auto")

    def call(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
        name = "per_row" if rows > _MOST_DECODES else picks.resolve_backend(logits, k, rows)
        if name == "per_row":
            starts = torch.zeros_like(lengths)
            ops.top_k_per_row_prefill(logits, starts, lengths, out, rows, logits.stride(0), logits.stride(1), k)
        else:
            kernel = getattr(torch.ops._C, f"{name}_topk")
            kernel(logits, lengths, out, workspace, k, params["width"])
        return out

    return call


FP8_ATTENTION = "rounds the queries, the softmax's weights or both to FP8"
"""Reason why FlashInfer's attention exceeds the contract's tolerance; its own tests allow 5e-2."""
_HEADS = (8, 16, 32, 64, 128)
# Numbers of heads of FlashInfer's kernels; vLLM pads to them.
_WORKSPACE_BYTES = 128 << 20
_PAGE, _ROW = 64, 584
_LARGE_SINK = 1e30
# FlashInfer's sinks are finite or −inf.
_Segment = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def capability() -> tuple[int, int]:
    """Return the compute capability of this process's card; (0, 0) without one."""
    if not torch.cuda.is_available():
        return 0, 0
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def is_sm12x() -> bool:
    """Return whether the card has compute capability 12.x."""
    return capability()[0] == 12


def _absent(package: str) -> str | None:
    major, minor = capability()
    if major != 12:
        return f"vLLM uses {package} for this on compute capability 12.x, this card has {major}.{minor}"
    return None if find_spec(package) else f"{package} is not installed"


def _expect(symbol: str, function: Callable[..., Any], positional: int, *keywords: str) -> None:
    """Raise TypeError unless `function` accepts `positional` arguments and these keywords."""
    try:
        inspect.signature(function).bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        raise TypeError(f"{symbol} does not accept the arguments of vLLM 0.33: {error}") from None


def flash_infer_missing() -> str | None:
    """Return the reason why FlashInfer's sparse attention cannot run here, or None."""
    if reason := _absent("flashinfer"):
        return reason
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import flashinfer

    there = flashinfer.has_flashinfer_sparse_mla_sm120()
    return None if there else "this FlashInfer has no sparse attention for 12.x, or no nvcc and ninja to compile it"


def flash_infer(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return FlashInfer's sparse decode."""
    attend = _sparse_attention(params, params["window"], device)
    kept: list[_Segment] = []

    def call(q: torch.Tensor, sink: torch.Tensor, **x: Any) -> tuple[torch.Tensor, None]:
        if not kept:
            kept.append(_segment(x["swa_cache"], x["swa_idx"], x["swa_len"], x["pages"][0]))
            if params["topk"]:
                kept.append(_segment(x["cmp_cache"], x["cmp_idx"].unsqueeze(1), x["cmp_len"], x["pages"][1]))
        return attend(q, sink, *kept)

    return call


def flash_infer_prefill(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return FlashInfer's sparse prefill: the decode function, which vLLM also calls for prompts.

    It reads packed pages. The first call packs the workspace rows; the last columns of the lists, one per window
    position, are its first segment.
    """
    attend, chosen = _sparse_attention(params, params["window"], device), params["width"] - params["window"]
    kept: list[_Segment] = []

    def call(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor, sink: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        if not kept:
            cache = _packed(kv)
            kept.append(_segment(cache, indices[:, chosen:], (lengths - chosen).clamp(min=0), _PAGE))
            if chosen:
                kept.append(_segment(cache, indices[:, :chosen], lengths.clamp(max=chosen), _PAGE))
        return attend(q, sink, *kept)

    return call


def _packed(kv: torch.Tensor) -> torch.Tensor:
    """Return pages with the rows of `kv` without rows of NaN, which no list contains."""
    pages = -(-kv.shape[0] // _PAGE)
    cache = torch.zeros((pages, ds_mla(_PAGE).page_bytes), dtype=torch.uint8, device=kv.device)
    slots = kv.isfinite().all(1).nonzero()[:, 0]
    return mla_cache_write(kv[slots], slots, cache, _PAGE)


def _segment(cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor, page: int) -> _Segment:
    """Return a cache [pages, page, 1, 584], its dense index rows with −1 after their lengths, and the lengths."""
    wide = lengths.view(-1, *[1] * (indices.dim() - 1))
    behind = torch.arange(indices.shape[-1], device=indices.device) >= wide
    pages = cache.as_strided((cache.shape[0], page, 1, _ROW), (cache.stride(0), _ROW, _ROW, 1))
    return pages, indices.masked_fill(behind, -1).contiguous(), lengths.contiguous()


def _sparse_attention(
    params: Mapping[str, Any], window: int, device: torch.device
) -> Callable[..., tuple[torch.Tensor, None]]:
    """Return the call of vLLM's class for SM12x over one or two segments. It returns no log-sum-exp."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import flashinfer as wrappers

    heads = params["heads"]
    padded = next((n for n in _HEADS if heads <= n), 0)
    if not wrappers.has_flashinfer_sparse_mla_sm120_config(padded, window):
        raise ValueError(f"FlashInfer has no sparse attention for {heads} heads and a window of {window}")
    plain = (
        "query", "swa_kv_cache", "workspace_buffer", "sparse_indices", "compressed_kv_cache", "out", "bmm1_scale",
        "sinks", "kv_layout", "swa_topk_lens", "extra_sparse_indices", "extra_sparse_topk_lens",
    )  # fmt: skip
    symbol = "trtllm_batch_decode_sparse_mla_dsv4"
    _expect(f"flashinfer.decode.{symbol}", getattr(import_module("flashinfer.decode"), symbol), 0, *plain)
    workspace = torch.zeros((_WORKSPACE_BYTES,), dtype=torch.uint8, device=device)
    out = torch.empty((params["tokens"], padded, 512), dtype=torch.bfloat16, device=device)

    @once
    def pad(q: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sinks = torch.nn.functional.pad(sink, (0, padded - heads), value=-torch.inf).clamp(max=_LARGE_SINK)
        return torch.nn.functional.pad(q, (0, 0, 0, padded - heads)).contiguous(), sinks

    def call(q: torch.Tensor, sink: torch.Tensor, swa: _Segment, more: _Segment | None = None) -> Any:
        wide, sinks = pad(q, sink)
        cache, indices, lengths = more or (None, None, None)
        wrappers.flashinfer_trtllm_batch_decode_sparse_mla_dsv4(
            query=wide, swa_kv_cache=swa[0], workspace_buffer=workspace, sparse_indices=swa[1],
            compressed_kv_cache=cache, out=out, bmm1_scale=512**-0.5, sinks=sinks, kv_layout="NHD",
            swa_topk_lens=swa[2], extra_sparse_indices=indices, extra_sparse_topk_lens=lengths,
        )  # fmt: skip
        return out[:, :heads], None

    return call


def b12x_linear_missing() -> str | None:
    """Return the reason why b12x's FP8 products cannot run here, or None."""
    if reason := _absent("b12x"):
        return reason
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import B12xFp8BlockScaledMMKernel

    able, reason = B12xFp8BlockScaledMMKernel.is_supported()
    return None if able else str(reason)


def b12x_linear(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return b12x's FP8 product; float32 scales, those of A by rows."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import B12xFp8BlockScaledMMKernel, get_b12x_blockscaled

    n, k = params["n"], params["k"]
    if n % 128 or k % 128:
        raise ValueError(f"vLLM gives b12x weights of multiples of 128, not {n} x {k}")
    _expect("b12x.gemm.blockscaled.mm_block_fp8", get_b12x_blockscaled().mm_block_fp8, 4, "out_dtype")
    layer = SimpleNamespace(config=SimpleNamespace(out_dtype=torch.bfloat16))
    scales = _float_scales()

    def call(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> Any:
        return B12xFp8BlockScaledMMKernel.apply_block_scaled_mm(layer, _fp8(a), _fp8(w), *scales(a_scale, w_scale))

    return call


def b12x_moe_missing() -> str | None:
    """Return the reason why b12x's experts cannot run here, or None."""
    if reason := _absent("b12x"):
        return reason
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import B12xExperts

    return None if B12xExperts._supports_current_device() else "b12x has no experts here, or not the CuTe they need"


def b12x_moe(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return b12x's experts with bf16 activations (`VLLM_B12X_MOE_FP4_FORCE_A16=1`)."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import MoEActivation

    config = _moe_config(params, device)
    prepared = once(functools.partial(_prepared_experts, config, params["tokens"]))

    def call(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, **w: torch.Tensor) -> Any:
        experts, out, scratch = prepared(w)
        experts.apply(
            output=out, hidden_states=x, w1=w["w13"], w2=w["w2"], topk_weights=topk_weights, topk_ids=topk_ids,
            activation=MoEActivation.SILU, global_num_experts=config.num_experts, expert_map=None, a1q_scale=None,
            a2_scale=None, workspace13=None, workspace2=scratch, expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )  # fmt: skip
        return out

    return call


def _moe_config(params: Mapping[str, Any], device: torch.device) -> Any:
    """Return vLLM's configuration of the layer on one rank.

    Raises:
        ValueError: vLLM does not use b12x for such a layer.
        TypeError: b12x has other arguments than vLLM passes.
    """
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import (
        B12xExperts,
        FusedMoEConfig,
        FusedMoEParallelConfig,
        MoEActivation,
        RoutingMethodType,
        get_b12x_fused_moe,
        kMxfp4Static,
    )

    experts = params["experts"]
    config = FusedMoEConfig(
        num_experts=experts, num_local_experts=experts, num_logical_experts=experts, device=device,
        experts_per_token=params["topk"], hidden_dim=params["hidden"], intermediate_size=params["inter"],
        activation=MoEActivation.SILU, routing_method=RoutingMethodType.DeepseekV4, in_dtype=torch.bfloat16,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(), swiglu_limit=LIMIT,
    )  # fmt: skip
    standard = B12xExperts.activation_format()
    able, reason = B12xExperts.is_supported_config(B12xExperts, config, kMxfp4Static, None, standard)
    if not able:
        raise ValueError(f"vLLM does not give these experts to b12x: {reason}")
    _expect(
        "b12x.moe.fused_moe.Caps", get_b12x_fused_moe().Caps, 0, "max_tokens", "num_topk", "device", "weight_plan",
        "core_token_counts", "route_num_experts", "quant_mode", "apply_router_weight_on_input", "swiglu_limit",
        "swiglu_alpha", "swiglu_beta", "frozen",
    )  # fmt: skip
    return config


def _prepared_experts(config: Any, tokens: int, w: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """Return vLLM's experts with prepared weights, their output buffer, and the workspace."""
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import B12xExperts, mxfp4_w4a16_moe_quant_config

    quant = mxfp4_w4a16_moe_quant_config(w1_scale=w["w13_scale"], w2_scale=w["w2_scale"], gemm1_clamp_limit=LIMIT)
    experts = B12xExperts(config, quant)
    layer = SimpleNamespace(
        apply_router_weight_on_input=False, activation=config.activation, w13_weight=w["w13"], w2_weight=w["w2"],
        w13_weight_scale=w["w13_scale"], w2_weight_scale=w["w2_scale"],
    )  # fmt: skip
    experts.process_weights_after_loading(layer)
    count, width, inter = config.num_experts, config.hidden_dim, config.intermediate_size
    _, scratch, out = experts.workspace_shapes(
        tokens, 2 * inter, width, config.experts_per_token, count, count, None, config.activation
    )
    made = (torch.empty(shape, dtype=config.in_dtype, device=w["w13"].device) for shape in (out, scratch))
    return experts, *made


_VLLM: Mapping[Op, tuple[tuple[str, Callable[[], str | None], Make], ...]] = {
    Op.MOE: (("marlin", marlin_missing, marlin),),
    Op.FP8_LINEAR: (
        ("deepgemm", deep_gemm_missing, deep_gemm),
        ("cutlass", cutlass_missing, cutlass),
        ("triton", lambda: None, vllm_triton),
    ),
    Op.MLA_DECODE: (("flashmla", flash_mla_missing, flash_mla),),
    Op.MLA_PREFILL: (("flashmla", flash_mla_missing, flash_mla_prefill),),
    Op.FRONT: (("cuda", front_missing, front_insert),),
    Op.O_PROJ: (("deepgemm", deep_gemm_missing, deep_gemm_einsum),),
    Op.MHC: (("tilelang", tilelang_missing, tilelang),),
    Op.COMPRESSOR: (("cute", cute_missing, cute),),
    Op.INDEXER: (),
    Op.ROUTER: (("gate", lambda: None, gate),),
    Op.TOPK: (("cuda", lambda: None, indexer_topk),),
}


_SM12X: Mapping[Op, tuple[Provider, ...]] = {
    Op.MOE: (Provider("b12x", b12x_moe_missing, b12x_moe),),
    Op.FP8_LINEAR: (Provider("b12x", b12x_linear_missing, b12x_linear),),
    Op.MLA_DECODE: (Provider("flashinfer", flash_infer_missing, flash_infer, FP8_ATTENTION),),
    Op.MLA_PREFILL: (Provider("flashinfer", flash_infer_missing, flash_infer_prefill, FP8_ATTENTION),),
}
"""Tried on compute capability 12.x only."""

_OPERATIONS: Mapping[Op, str] = {
    Op.MOE: "moe_w4a16",
    Op.FP8_LINEAR: "fp8_gemm",
    Op.MLA_DECODE: "mla_decode",
    Op.MLA_PREFILL: "mla_prefill",
    Op.FRONT: "front_insert",
    Op.O_PROJ: "wo_a_einsum",
    Op.MHC: "mhc_post_pre",
    Op.COMPRESSOR: "compressor_store",
    Op.ROUTER: "router",
    Op.TOPK: "topk",
}


@functools.cache
def register() -> None:
    """Register vLLM's kernels as providers of the registry's operations."""
    for op in _OPERATIONS:
        for provider in of(op):
            register_provider(_OPERATIONS[op], provider)
    # Its second operation, computed by vLLM in Triton.
    register_provider("front_norm", Provider("cuda", front_missing, front_norm))


def of(op: Op) -> tuple[Provider, ...]:
    """Return vLLM's own kernels for `op`, including those specific to this card."""
    return (*(Provider(*row) for row in _VLLM[op]), *(_SM12X.get(op, ()) if is_sm12x() else ()))


def names(op: Op) -> tuple[str, ...]:
    """Return the names of the tried providers of `op`, bundled ones first."""
    bundled = (BUNDLED, BUNDLED_W4A8) if op is Op.MOE else (BUNDLED,)
    return (*bundled, *(provider.name for provider in of(op)))


def find(operation_name: str, name: str) -> tuple[Operation, Provider]:
    """Return an operation of the registry and its provider `name`.

    Raises:
        KeyError: unknown name.
    """
    register()
    row = operation("moe_w4a8" if name == BUNDLED_W4A8 else operation_name)
    wanted = "dsv4" if name in (BUNDLED, BUNDLED_W4A8) else name
    for provider in row.providers():
        if provider.name == wanted:
            return row, provider
    raise KeyError(f"{operation_name} has no provider {name!r}")
