"""vLLM's own CUDA and Triton kernels as providers of an operation: what each needs to be there, and how it is called.

Each maker returns a function of the inputs of an operation of `dsv4_kernels.registry`, as keywords, that returns its
outputs, so that all providers are compared and timed alike. What a layer prepares once (repacked weights, scales in a
kernel's own layout) is made at the first call, which is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsv4_kernels.moe.reference import LIMIT
from dsv4_kernels.numerics import ue8m0_decode

Make = Callable[[Mapping[str, Any], torch.device], Callable[..., Any]]
_MOST_DECODES = 512
# Rows of a trial up to which they are those of a decode step.


def _capability() -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def _fp8(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn)


def _once(make: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Keep what the first call of `make` returned."""
    kept: list[tuple[torch.Tensor, ...]] = []

    def call(*args: Any) -> tuple[torch.Tensor, ...]:
        if not kept:
            kept.append(make(*args))
        return kept[0]

    return call


def deep_gemm_missing() -> str | None:
    """Return why DeepGEMM cannot run here; None if it can."""
    from vllm.utils.deep_gemm import is_deep_gemm_supported

    if not is_deep_gemm_supported():
        return "DeepGEMM is not installed, or does not know this card"
    if _capability()[0] != 9:
        return "its scales are packed in another way on this card; tried on compute capability 9.0 only"
    return None


def deep_gemm(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return DeepGEMM's FP8 product."""
    from vllm.utils import deep_gemm

    out = torch.empty((params["tokens"], params["n"]), dtype=torch.bfloat16, device=device)

    @_once
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
    from vllm.utils import deep_gemm

    out = torch.empty((params["tokens"], params["groups"], params["n"]), dtype=torch.bfloat16, device=device)

    @_once
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
    from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm

    scales = _once(lambda a_scale, w_scale: (ue8m0_decode(a_scale).float(), ue8m0_decode(w_scale).float()))

    def call(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> Any:
        sa, sw = scales(a_scale, w_scale)
        return w8a8_triton_block_scaled_mm(_fp8(a), _fp8(w), sa, sw, [128, 128], torch.bfloat16)

    return call


def cutlass_missing() -> str | None:
    """Return why CUTLASS's FP8 products cannot run here; None if they can."""
    from vllm import _custom_ops as ops

    major, minor = _capability()
    able = ops.cutlass_scaled_mm_supports_block_fp8(major * 10 + minor)
    return None if able else f"vLLM's CUTLASS has no block-scaled product for compute capability {major}.{minor}"


def cutlass(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return CUTLASS's FP8 product."""
    from vllm import _custom_ops as ops

    @_once
    def scales(a_scale: torch.Tensor, w_scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Scales of A with the tokens innermost, those of W transposed.
        wide = ue8m0_decode(a_scale).float()
        return wide.t().contiguous().t(), ue8m0_decode(w_scale).float().t()

    def call(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> Any:
        sa, sw = scales(a_scale, w_scale)
        return ops.cutlass_scaled_mm(_fp8(a), _fp8(w).t(), out_dtype=torch.bfloat16, scale_a=sa, scale_b=sw)

    return call


def marlin_missing() -> str | None:
    """Return why Marlin cannot run here; None if it can."""
    import vllm._custom_ops  # noqa: F401  (loads vLLM's libraries)

    return None if hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm") else "vLLM was built without Marlin's experts"


def marlin(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return Marlin's mixture of experts, its activation included."""
    from types import SimpleNamespace

    from vllm.model_executor.layers.fused_moe.activation import silu_and_mul_with_clamp
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_moe_mxfp4_layer_for_marlin
    from vllm.scalar_type import scalar_types

    @_once
    def pack(w13: torch.Tensor, w2: torch.Tensor, s13: torch.Tensor, s2: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layer: Any = SimpleNamespace(params_dtype=torch.bfloat16)
        return tuple(prepare_moe_mxfp4_layer_for_marlin(layer, w13, w2, s13, s2, None, None)[:4])

    def clamped(_: Any, output: torch.Tensor, both: torch.Tensor, **__: Any) -> None:
        silu_and_mul_with_clamp(output, both, LIMIT)

    experts, spread = params["experts"], "routing" in params

    @_once
    def mapped(topk_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # vLLM gives the numbers of all ranks' experts, and a map in which those of other ranks are −1.
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
    """Return why FlashMLA cannot run here; None if it can."""
    from vllm.v1.attention.ops.flashmla import is_flashmla_sparse_supported

    able, reason = is_flashmla_sparse_supported()
    return None if able else str(reason)


def flash_mla(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return FlashMLA's sparse decode."""
    from vllm.v1.attention.ops import flashmla

    schedule, _ = flashmla.get_mla_metadata()
    tokens, heads = params["tokens"], params["heads"]
    padded = 64 if heads <= 64 else 128
    out = torch.empty((tokens, 1, padded, 512), dtype=torch.bfloat16, device=device)

    @_once
    def pad(q: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = torch.nn.functional.pad(q, (0, 0, 0, padded - heads)).unsqueeze(1).contiguous()
        return wide, torch.nn.functional.pad(sink, (0, padded - heads)).contiguous()

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
            q=wide, k_cache=pages(x["swa_cache"], x["pages"][0]), block_table=None, cache_seqlens=None,
            head_dim_v=512, tile_scheduler_metadata=schedule, is_fp8_kvcache=True,
            indices=x["swa_idx"].unsqueeze(1), topk_length=x["swa_len"], softmax_scale=512**-0.5, attn_sink=sinks,
            out=out, **more,
        )  # fmt: skip
        lse = lse[:, :heads, 0]
        # Rows without entries have +inf there and −inf in the contract.
        return o[:, 0, :heads], torch.where(torch.isposinf(lse), -torch.inf, lse)

    return call


def flash_mla_prefill(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return FlashMLA's sparse prefill."""
    from vllm.v1.attention.ops import flashmla

    tokens, heads = params["tokens"], params["heads"]
    # As vLLM's class pads them.
    padded = 64 if heads <= 64 else 128
    out = torch.empty((tokens, padded, 512), dtype=torch.bfloat16, device=device)

    @_once
    def pad(q: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = torch.nn.functional.pad(q, (0, 0, 0, padded - heads)).contiguous()
        return wide, torch.nn.functional.pad(sink, (0, padded - heads)).contiguous()

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
    """Return why vLLM's fused insertion cannot run here; None if it can."""
    import vllm._custom_ops  # noqa: F401  (loads vLLM's libraries)

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
    from vllm.models.common.ops.fused_qk_rmsnorm import fused_q_kv_rmsnorm

    return fused_q_kv_rmsnorm  # type: ignore[no-any-return]


def tilelang_missing() -> str | None:
    """Return why TileLang's hyper-connections cannot run here; None if they can."""
    from importlib.util import find_spec

    return None if find_spec("tilelang") else "tilelang is not installed"


def tilelang(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return TileLang's hyper-connections between two sublayers."""
    from vllm.model_executor.kernels.mhc.tilelang import mhc_fused_post_pre_tilelang

    return mhc_fused_post_pre_tilelang  # type: ignore[no-any-return]


def cute_missing() -> str | None:
    """Return why CuTe's compressor cannot run here; None if it can."""
    from vllm.utils.import_utils import has_cutedsl

    return None if has_cutedsl() else "nvidia-cutlass-dsl is not installed"


def cute(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return CuTe's compressor."""
    from types import SimpleNamespace

    from vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl import _SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL

    ratio = params["ratio"]

    def call(
        state_cache: torch.Tensor, kv_cache: torch.Tensor, kv_slot_mapping: torch.Tensor, **x: Any
    ) -> torch.Tensor:
        _SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL(
            state_cache=state_cache, num_actual=kv_slot_mapping.shape[0], block_size=state_cache.shape[1],
            state_width=state_cache.shape[2] // 2, kv_cache=kv_cache,
            k_cache_metadata=SimpleNamespace(slot_mapping=kv_slot_mapping), pdl_kwargs={"launch_pdl": False},
            head_dim=512, rope_head_dim=64, overlap=ratio == 4, use_fp4_cache=False, quant_block=64, token_stride=576,
            scale_dim=8, store_full_kv=False, store_full_fp8=False, fp8_scale=None, **x,
        )  # fmt: skip
        return kv_cache

    return call


def gate(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return what vLLM's `GateLinear` and the router behind it launch. Token ids are int32, as vLLM has them."""
    from vllm.model_executor.kernels.linear.cute_dsl import ll_bf16
    from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import fused_topk_bias
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    few = _capability()[0] in (9, 10) and ll_bf16.is_available() and params["tokens"] <= GateLinear.LL_BF16_MAX_TOKENS

    @_once
    def narrow(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (ids.int(),)

    def call(
        x: torch.Tensor, weight: torch.Tensor, scaling: float, k: int, bias: torch.Tensor | None = None,
        tid2eid: torch.Tensor | None = None, input_ids: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        logits = ll_bf16.ll_bf16_gemm(x, weight) if few else torch.mm(x, weight.T, out_dtype=torch.float32)
        ids = None if input_ids is None else narrow(input_ids)[0]
        return fused_topk_bias(
            x, logits, "sqrtsoftplus", bias, k, True, torch.int32, ids, tid2eid, routed_scaling_factor=scaling
        )

    return call


def indexer_topk(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return the kernel that vLLM's indexer picks: for prompts the one by rows, else as its `auto` has it."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.indexer_topk import RADIX_TOPK_WORKSPACE_SIZE, SparseIndexerTopk

    rows, k = params["rows"], params["k"]
    # As the indexer has it: a kernel may leave places unwritten.
    out = torch.full((rows, k), -1, dtype=torch.int32, device=device)
    workspace = torch.empty((RADIX_TOPK_WORKSPACE_SIZE,), dtype=torch.uint8, device=device)
    picks = SparseIndexerTopk("auto")

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
