"""Kernels that vLLM has for compute capability 12.x alone, as providers: FlashInfer's sparse attention, and b12x.

Called as vLLM 0.33 calls them, through its own wrappers. Nothing of the two packages is imported where the card is
another one, nor in the process that starts the trials. A maker raises where the package takes other arguments than
vLLM gives it, or where vLLM would refuse the shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from dsv4_kernels.mla_cache.reference import mla_cache_write
from dsv4_kernels.moe.reference import LIMIT
from dsv4_kernels.numerics import ds_mla, ue8m0_decode

FP8_ATTENTION = "rounds the queries, the softmax's weights or both to FP8"
"""Reason why FlashInfer's attention is not within the contract's tolerance; its own tests allow 5e-2."""
_HEADS = (8, 16, 32, 64, 128)
# Heads that FlashInfer has kernels for; vLLM pads to them.
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


def here() -> bool:
    """Tell whether the card is one of those that these kernels are made for."""
    return capability()[0] == 12


def _absent(package: str) -> str | None:
    major, minor = capability()
    if major != 12:
        return f"vLLM uses {package} for this on compute capability 12.x, this card has {major}.{minor}"
    return None if find_spec(package) else f"{package} is not installed"


def _expect(symbol: str, function: Callable[..., Any], positional: int, *keywords: str) -> None:
    """Raise TypeError unless `function` takes so many arguments by position, and these by name."""
    try:
        inspect.signature(function).bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        raise TypeError(f"{symbol} does not take what vLLM 0.33 gives it: {error}") from None


def flash_infer_missing() -> str | None:
    """Return why FlashInfer's sparse attention cannot run here; None if it can."""
    if reason := _absent("flashinfer"):
        return reason
    from vllm.utils.flashinfer import has_flashinfer_sparse_mla_sm120

    there = has_flashinfer_sparse_mla_sm120()
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
    """Return FlashInfer's sparse prefill: the decode's function, which vLLM calls for prompts too.

    It reads packed pages. The workspace's rows are packed at the first call, and the last columns of the lists, as many
    as the window has, are its first segment.
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
    """Return pages with the rows of `kv`; rows of NaN, which no list names, are left out."""
    pages = -(-kv.shape[0] // _PAGE)
    cache = torch.zeros((pages, ds_mla(_PAGE).page_bytes), dtype=torch.uint8, device=kv.device)
    slots = kv.isfinite().all(1).nonzero()[:, 0]
    return mla_cache_write(kv[slots], slots, cache, _PAGE)


def _segment(cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor, page: int) -> _Segment:
    """Return a cache [pages, page, 1, 584], its index rows, dense and −1 behind their lengths, and the lengths."""
    wide = lengths.view(-1, *[1] * (indices.dim() - 1))
    behind = torch.arange(indices.shape[-1], device=indices.device) >= wide
    pages = cache.as_strided((cache.shape[0], page, 1, _ROW), (cache.stride(0), _ROW, _ROW, 1))
    return pages, indices.masked_fill(behind, -1).contiguous(), lengths.contiguous()


def _sparse_attention(
    params: Mapping[str, Any], window: int, device: torch.device
) -> Callable[..., tuple[torch.Tensor, None]]:
    """Return the call of vLLM's class for SM12x, over one or two segments. It gives no log-sum-exp."""
    from vllm.utils import flashinfer as wrappers

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
    wide: list[torch.Tensor] = []

    def call(q: torch.Tensor, sink: torch.Tensor, swa: _Segment, more: _Segment | None = None) -> Any:
        if not wide:
            wide.append(torch.nn.functional.pad(q, (0, 0, 0, padded - heads)).contiguous())
            wide.append(torch.nn.functional.pad(sink, (0, padded - heads), value=-torch.inf).clamp(max=_LARGE_SINK))
        cache, indices, lengths = more or (None, None, None)
        wrappers.flashinfer_trtllm_batch_decode_sparse_mla_dsv4(
            query=wide[0], swa_kv_cache=swa[0], workspace_buffer=workspace, sparse_indices=swa[1],
            compressed_kv_cache=cache, out=out, bmm1_scale=512**-0.5, sinks=wide[1], kv_layout="NHD",
            swa_topk_lens=swa[2], extra_sparse_indices=indices, extra_sparse_topk_lens=lengths,
        )  # fmt: skip
        return out[:, :heads], None

    return call


def b12x_linear_missing() -> str | None:
    """Return why b12x's FP8 products cannot run here; None if they can."""
    if reason := _absent("b12x"):
        return reason
    from vllm.model_executor.kernels.linear.scaled_mm.b12x import B12xFp8BlockScaledMMKernel

    able, reason = B12xFp8BlockScaledMMKernel.is_supported()
    return None if able else str(reason)


def b12x_linear(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return b12x's FP8 product; float32 scales, those of A by rows."""
    from vllm.model_executor.kernels.linear.scaled_mm.b12x import B12xFp8BlockScaledMMKernel
    from vllm.utils.b12x import get_b12x_blockscaled

    n, k = params["n"], params["k"]
    if n % 128 or k % 128:
        raise ValueError(f"vLLM gives b12x weights of multiples of 128, not {n} x {k}")
    _expect("b12x.gemm.blockscaled.mm_block_fp8", get_b12x_blockscaled().mm_block_fp8, 4, "out_dtype")
    layer = SimpleNamespace(config=SimpleNamespace(out_dtype=torch.bfloat16))
    scales: list[torch.Tensor] = []

    def call(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> Any:
        if not scales:
            scales.extend(ue8m0_decode(scale).float().contiguous() for scale in (a_scale, w_scale))
        codes, weights = a.view(torch.float8_e4m3fn), w.view(torch.float8_e4m3fn)
        return B12xFp8BlockScaledMMKernel.apply_block_scaled_mm(layer, codes, weights, *scales)

    return call


def b12x_moe_missing() -> str | None:
    """Return why b12x's experts cannot run here; None if they can."""
    if reason := _absent("b12x"):
        return reason
    from vllm.model_executor.layers.fused_moe.b12x import B12xExperts

    return None if B12xExperts._supports_current_device() else "b12x has no experts here, or not the CuTe they need"


def b12x_moe(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Return b12x's experts with bf16 activations (`VLLM_B12X_MOE_FP4_FORCE_A16=1`)."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    config = _moe_config(params, device)
    kept: list[Any] = []

    def call(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, **w: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.extend(_prepared_experts(config, x.shape[0], w))
        experts, out, scratch = kept
        experts.apply(
            output=out, hidden_states=x, w1=w["w13"], w2=w["w2"], topk_weights=topk_weights, topk_ids=topk_ids,
            activation=MoEActivation.SILU, global_num_experts=config.num_experts, expert_map=None, a1q_scale=None,
            a2_scale=None, workspace13=None, workspace2=scratch, expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )  # fmt: skip
        return out

    return call


def _moe_config(params: Mapping[str, Any], device: torch.device) -> Any:
    """Return vLLM's description of the layer, on one rank.

    Raises:
        ValueError: vLLM does not give such a layer to b12x.
        TypeError: b12x takes other arguments than vLLM gives it.
    """
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.b12x import B12xExperts
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static
    from vllm.utils.b12x import get_b12x_fused_moe

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
    """Return vLLM's experts with their weights prepared, as a layer has them, room for their output, and scratch."""
    from vllm.model_executor.layers.fused_moe.b12x import B12xExperts
    from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config

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
