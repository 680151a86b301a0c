"""vLLM's compressor of DeepSeek-V4's keys and values, computed by `dsv4_kernels.compressor`."""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context

from dsv4_kernels.compressor.api import SavePlan, StorePlan
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels.precompile import announced_plan


def supported(layer: Any) -> bool:
    """Tell whether the compressor `layer` writes a layout that is known here."""
    return layer.head_dim in (128, 512) and layer.compress_ratio in (4, 128) and not layer.use_fp4_cache


def forward(layer: Any, kv_score: torch.Tensor | None, positions: torch.Tensor, rotary_emb: Any) -> None:
    """Save the tokens' projections kv_score float32 [T, 2W], and store the entries whose window is now complete.

    Without projections the tokens' states are saved already (`vllm_plugin.kernels.projections`).
    """
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        return
    state = metadata[layer.state_cache.prefix]
    cache = layer.state_cache.kv_cache
    keys = layer._static_forward_context[layer.k_cache_prefix].kv_cache
    slots = state.slot_mapping
    save, store = _plans(layer, cache, keys)
    if kv_score is not None:
        kv, score = kv_score.split(kv_score.shape[1] // 2, dim=-1)
        save.run(kv=kv, score=score, ape=layer.ape, positions=positions, state_cache=cache, slot_mapping=slots)
    complete = layer.compress_ratio != 128 or getattr(state, "c128_boundary", None) is not False
    if not complete and not torch.cuda.is_current_stream_capturing():
        # vLLM knows on the host that no window of this step is complete.
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
    """Make the plans that the compressor `layer` will ask for, once it has its caches."""
    _plans(layer, layer.state_cache.kv_cache, layer._static_forward_context[layer.k_cache_prefix].kv_cache)


def _plans(layer: Any, cache: torch.Tensor, keys: torch.Tensor) -> tuple[SavePlan, StorePlan]:
    head, ratio, page = layer.head_dim, layer.compress_ratio, keys.shape[1]
    key = (Op.COMPRESSOR, head, ratio, page, cache.stride(0), keys.stride(0), cache.device)
    sizes = (layer.max_num_batched_tokens, head, ratio, cache.device)
    options = {"page": page, "state_stride": cache.stride(0), "kv_stride": keys.stride(0)}
    name = "compressor_store" if head == 512 else "compressor_store_indexer"
    save = announced_plan((*key, "save"), SavePlan, "compressor_save", *sizes, **options)
    return save, announced_plan(key, StorePlan, name, *sizes, **options)
