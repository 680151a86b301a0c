"""vLLM's compressor of DeepSeek-V4's keys and values by `dsv4_kernels.compressor`, and the projections of its inputs.

vLLM computes the products of a layer's input concurrently, and each compressor saves its own afterwards.
`dsv4_kernels.compressor` computes and saves them in one launch for few tokens: the compressors get None in place of
their products, and only store. For more tokens the products are vLLM's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from dsv4_kernels.arch import DEFAULT_ARCH
from dsv4_kernels.compressor.api import MOST_TOKENS, ProjectionPlan, SavePlan, StorePlan
from dsv4_kernels.compressor.api import projections_supported as shapes_supported
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels import vllm_api
from dsv4_runtime.vllm_plugin.kernels.choice import choice
from dsv4_runtime.vllm_plugin.kernels.plans import aligned, announced_plan
from dsv4_runtime.vllm_plugin.kernels.sublayers import UnusedKernels
from dsv4_runtime.vllm_plugin.kernels.vllm_api import ReplicatedLinear, envs, execute_in_parallel, get_forward_context


def supported(layer: Any) -> bool:
    """Return whether the layout of the compressor `layer` is supported."""
    return layer.head_dim in (128, 512) and layer.compress_ratio in (4, 128) and not layer.use_fp4_cache


def choosing(original: Callable[..., None]) -> Callable[..., None]:
    """Return `__init__` of vLLM's compressor, which decides whether the new compressor is bundled."""
    unused = vllm_api.adapter().CUTE_COMPRESSOR

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        if choice().bundled(Op.COMPRESSOR):
            sys.modules.setdefault(unused, UnusedKernels(unused))
        original(self, *args, **kwargs)
        self.dsv4_bundled = choice().bundled(Op.COMPRESSOR) and supported(self)

    return make


def chosen(original: Callable[..., None]) -> Callable[..., None]:
    """Return `forward` of vLLM's compressor, or the bundled one for a bundled compressor."""

    @functools.wraps(original)
    def chosen_forward(self: Any, kv_score: Any, positions: Any, rotary_emb: Any) -> None:
        (forward if self.dsv4_bundled else original)(self, kv_score, positions, rotary_emb)

    return chosen_forward


def forward(layer: Any, kv_score: torch.Tensor | None, positions: torch.Tensor, rotary_emb: Any) -> None:
    """Save the tokens' projections kv_score float32 [T, 2W], and store the entries whose window is now complete.

    Without projections the tokens' states are already saved (`at_once`).
    """
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        return
    state = metadata[layer.state_cache.prefix]
    cache = layer.state_cache.kv_cache
    keys = layer._static_forward_context[layer.k_cache_prefix].kv_cache
    slots = state.slot_mapping
    save, store = _compressor_plans(layer, cache, keys)
    if kv_score is not None:
        kv, score = kv_score.split(kv_score.shape[1] // 2, dim=-1)
        save.run(kv=kv, score=score, ape=layer.ape, positions=positions, state_cache=cache, slot_mapping=slots)
    complete = layer.compress_ratio != 128 or getattr(state, "c128_boundary", None) is not False
    if not complete and not torch.cuda.is_current_stream_capturing():
        # According to vLLM's host metadata no window of this step is complete.
        return
    store.run(
        state_cache=cache,
        token_to_req_indices=state.token_to_req_indices,
        positions=positions,
        slot_mapping=slots,
        block_table=state.block_table,
        rms_norm_weight=layer.norm.weight,
        rms_norm_eps=layer.rms_norm_eps,
        cos_sin_cache=rotary_emb.cos_sin_cache,
        kv_cache=keys.view(torch.uint8),
        kv_slot_mapping=metadata[layer.k_cache_prefix].slot_mapping[: slots.shape[0]],
        compress_ratio=layer.compress_ratio,
    )


def plan_ahead_of_requests(layer: Any) -> None:
    """Make the plans of the compressor `layer`, once it has its caches."""
    _compressor_plans(layer, layer.state_cache.kv_cache, layer._static_forward_context[layer.k_cache_prefix].kv_cache)


def _compressor_plans(layer: Any, cache: torch.Tensor, keys: torch.Tensor) -> tuple[SavePlan, StorePlan]:
    head, ratio, page = layer.head_dim, layer.compress_ratio, keys.shape[1]
    key = (Op.COMPRESSOR, head, ratio, page, cache.stride(0), keys.stride(0), cache.device)
    sizes = (layer.max_num_batched_tokens, head, ratio, cache.device)
    options = {"page": page, "state_stride": cache.stride(0), "kv_stride": keys.stride(0)}
    name = "compressor_store" if head == 512 else "compressor_store_indexer"
    save = announced_plan((*key, "save"), SavePlan, "compressor_save", *sizes, **options)
    return save, announced_plan(key, StorePlan, name, *sizes, **options)


def noting_positions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` of vLLM's attention, which provides the positions for the projections."""

    @functools.wraps(original)
    def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.dsv4_positions = positions
        try:
            return original(self, positions, hidden_states, *args, **kwargs)
        finally:
            self.dsv4_positions = None

    return forward


def at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `_run_parallel_input_projections` of vLLM's attention, with one launch beside the largest product."""

    @functools.wraps(original)
    def _run_parallel_input_projections(self: Any, hidden_states: torch.Tensor) -> Any:
        metadata, tokens = get_forward_context().attn_metadata, hidden_states.shape[0]
        positions = getattr(self, "dsv4_positions", None)
        if (
            tokens > MOST_TOKENS
            or positions is None
            or not isinstance(metadata, dict)
            or not projections_supported(self)
        ):
            return original(self, hidden_states)
        streams = self.aux_stream_list
        qr_kv, (results,) = execute_in_parallel(
            lambda: self._fused_wqa_wkv_gemm(hidden_states),
            [functools.partial(_project, self, hidden_states, positions, metadata)],
            self.ln_events[0],
            self.ln_events[1:2],
            None if streams is None else streams[:1],
            enable=tokens <= envs.VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD,
        )
        return qr_kv, None, None, results[2] if len(results) > 1 else None

    return _run_parallel_input_projections


def projections_supported(layer: Any) -> bool:
    """Return whether the attention `layer` has bundled compressors, and supported products."""
    compressors = _compressors(layer)
    if not compressors or not all(getattr(one, "dsv4_bundled", False) for one in compressors):
        return False
    # If vLLM's first runner prepares the attention outside of its graphs, states must not be saved inside of them.
    if layer._prepare_and_attn_fn != layer._prepare_and_attn:
        return False
    weights = [one.fused_wkv_wgate.weight for one in compressors]
    if layer.indexer is not None:
        head = layer.indexer.weights_proj
        # Excludes a layer with a LoRA adapter, which replaces vLLM's.
        if type(head) is not ReplicatedLinear or head.bias is not None:
            return False
        weights.append(head.weight)
    if not all(weight.dtype == torch.bfloat16 and weight.is_contiguous() for weight in weights):
        return False
    return bool(shapes_supported(_projection_shape(layer), DEFAULT_ARCH))


def plan_projections(layer: Any) -> None:
    """Make the projection plan of the attention `layer`, once its compressors have their caches."""
    if projections_supported(layer):
        _projection_plan(layer)


def _compressors(layer: Any) -> list[Any]:
    """Return the existing compressors of `layer` and of its indexer."""
    # V4.1's indexers have none.
    return [one for one in (layer.compressor, getattr(layer.indexer, "compressor", None)) if one is not None]


def _project(
    layer: Any, hidden_states: torch.Tensor, positions: torch.Tensor, metadata: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    tokens = hidden_states.shape[0]
    inputs: dict[str, torch.Tensor] = {}
    for prefix, one in zip(("", "index_"), _compressors(layer), strict=False):
        inputs |= {
            f"{prefix}weight": one.fused_wkv_wgate.weight,
            f"{prefix}ape": one.ape,
            f"{prefix}state_cache": one.state_cache.kv_cache,
            f"{prefix}slot_mapping": metadata[one.state_cache.prefix].slot_mapping[:tokens],
        }
    if layer.indexer is not None:
        inputs["head_weight"] = layer.indexer.weights_proj.weight
    x = aligned(hidden_states.contiguous())
    results: tuple[torch.Tensor, ...] = _projection_plan(layer).run(x=x, positions=positions, **inputs)
    return results


def _projection_shape(layer: Any) -> dict[str, int]:
    main, *index = _compressors(layer)
    width = main.ape.shape[1]
    shape = {"tokens": MOST_TOKENS, "hidden": layer.hidden_size, "ratio": main.compress_ratio, "width": width}
    for one in index:
        shape |= {"index_width": one.ape.shape[1], "heads": layer.indexer.n_head}
    return shape


def _projection_plan(layer: Any) -> ProjectionPlan:
    caches = [one.state_cache.kv_cache for one in _compressors(layer)]
    strides = {name: cache.stride(0) for name, cache in zip(("state_stride", "index_stride"), caches, strict=False)}
    options = {**_projection_shape(layer), **strides}
    key = (Op.COMPRESSOR, "projections", *options.items(), caches[0].device)
    return announced_plan(key, ProjectionPlan, caches[0].device, **options)
