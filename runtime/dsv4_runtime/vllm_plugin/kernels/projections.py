"""Hooks of vLLM's DeepSeek-V4 attention: the projections for its compressors and indexer in one launch.

vLLM computes the products of a layer's input side by side, and has each compressor save its own later on. Here
`dsv4_kernels.compressor` computes them and saves at once: the compressors are called with None in the place of their
products, and only store. Of more tokens the products are vLLM's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm import envs
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.utils.multi_stream_utils import execute_in_parallel

from dsv4_kernels.arch import DEFAULT_ARCH
from dsv4_kernels.compressor.api import MOST_TOKENS, ProjectionPlan, projections_supported
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels.precompile import announced_plan
from dsv4_runtime.vllm_plugin.kernels.views import aligned


def noting_positions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` of vLLM's attention, which keeps the positions for the projections while it runs."""

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
        if tokens > MOST_TOKENS or positions is None or not isinstance(metadata, dict) or not supported(self):
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


def supported(layer: Any) -> bool:
    """Tell whether the attention `layer` has compressors that are bundled, and what its products need."""
    compressors = _compressors(layer)
    if not compressors or not all(getattr(one, "dsv4_bundled", False) for one in compressors):
        return False
    # Where vLLM's first runner prepares the attention outside of its graphs, states must not be saved inside of them.
    if layer._prepare_and_attn_fn != layer._prepare_and_attn:
        return False
    weights = [one.fused_wkv_wgate.weight for one in compressors]
    if layer.indexer is not None:
        head = layer.indexer.weights_proj
        # Not a layer with an adapter, which stands in the place of vLLM's.
        if type(head) is not ReplicatedLinear or head.bias is not None:
            return False
        weights.append(head.weight)
    if not all(weight.dtype == torch.bfloat16 and weight.is_contiguous() for weight in weights):
        return False
    return bool(projections_supported(_shape(layer), DEFAULT_ARCH))


def plan_ahead_of_requests(layer: Any) -> None:
    """Make the plan that the attention `layer` will ask for, once its compressors have their caches."""
    if supported(layer):
        _plan(layer)


def _compressors(layer: Any) -> list[Any]:
    """Return the compressor of `layer` and its indexer's, those that are there."""
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
    results: tuple[torch.Tensor, ...] = _plan(layer).run(x=x, positions=positions, **inputs)
    return results


def _shape(layer: Any) -> dict[str, int]:
    main, *index = _compressors(layer)
    width = main.ape.shape[1]
    shape = {"tokens": MOST_TOKENS, "hidden": layer.hidden_size, "ratio": main.compress_ratio, "width": width}
    for one in index:
        shape |= {"index_width": one.ape.shape[1], "heads": layer.indexer.n_head}
    return shape


def _plan(layer: Any) -> ProjectionPlan:
    caches = [one.state_cache.kv_cache for one in _compressors(layer)]
    strides = {name: cache.stride(0) for name, cache in zip(("state_stride", "index_stride"), caches, strict=False)}
    options = {**_shape(layer), **strides}
    key = (Op.COMPRESSOR, "projections", *options.items(), caches[0].device)
    plan: ProjectionPlan = announced_plan(key, ProjectionPlan, caches[0].device, **options)
    return plan
