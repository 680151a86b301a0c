"""Child process of `test_vllm_plans.py`: vLLM's own planner over the caches of a model.

Reads a list of cases as JSON from stdin: `{"ratios": […], "sources": […], "draft_tokens": n, "stages": [[first, end],
…], "available": bytes, "length": n, "in_flight": n}`; V4.1 has sources, layers that own a compressed cache. Prints a
list of `[blocks, tokens, concurrency]`, and vLLM's own division of the layers into stages.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_capacity, get_kv_cache_configs
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec
from vllm.v1.kv_cache_layout import KVCacheLayout

WINDOW, HEAD, INDEX = 128, 512, 128


def caches(layer: int, ratio: int) -> dict[str, KVCacheSpec]:
    """Return the caches that the layers declare (`models/deepseek_v4`, `v1/attention/backends/mla/sparse_swa.py`)."""
    common: dict[str, Any] = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 576}
    packed = {
        "dtype": torch.uint8,
        "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
        "state_content_bytes": 584,
    }
    found: dict[str, KVCacheSpec] = {
        f"layers.{layer}.swa": SlidingWindowMLASpec(
            block_size=64, head_size=HEAD, sliding_window=WINDOW, **common, **packed
        )
    }
    if not ratio:
        return found
    found[f"layers.{layer}.main"] = MLAAttentionSpec(
        block_size=256, head_size=HEAD, tokens_per_state=ratio, **common, **packed
    )
    width = 2 if ratio == 4 else 1
    state = {"block_size": 4 if ratio == 4 else 8, "dtype": torch.float32, "sliding_window": width * ratio}
    found[f"layers.{layer}.state"] = SlidingWindowMLASpec(head_size=2 * width * HEAD, **common, **state)
    if ratio == 4:
        found[f"layers.{layer}.keys"] = MLAAttentionSpec(
            block_size=256, head_size=INDEX + 4, dtype=torch.uint8, tokens_per_state=4, **common
        )
        found[f"layers.{layer}.keys_state"] = SlidingWindowMLASpec(head_size=2 * width * INDEX, **common, **state)
    return found


def shared_caches(layer: int, ratio: int, case: dict[str, Any]) -> dict[str, KVCacheSpec]:
    """Return the caches that V4.1's layers declare on SM12x (`models/deepseek_v41/attention.py`, `compressor.py`)."""
    common: dict[str, Any] = {"num_kv_heads": 1, "alignment": 576}
    packed = {
        "dtype": torch.uint8,
        "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
        "state_content_bytes": 584,
    }
    found: dict[str, KVCacheSpec] = {
        f"layers.{layer}.swa": SlidingWindowMLASpec(
            block_size=32,
            head_size=HEAD,
            sliding_window=WINDOW,
            bounded_replay=True,
            max_tp_shards=1,
            **common,
            **packed,
        )
    }
    if layer in case["sources"]:
        found[f"layers.{layer}.main"] = MLAAttentionSpec(
            block_size=128, head_size=HEAD, tokens_per_state=ratio, **common, **packed
        )
        found[f"layers.{layer}.keys"] = MLAAttentionSpec(
            block_size=128, head_size=INDEX + 4, dtype=torch.uint8, tokens_per_state=ratio, **common
        )
        if ratio > 1:
            rows = max(8, 1 << (case["draft_tokens"] + 1).bit_length())
            found[f"layers.{layer}.state"] = CircularBufferSpec(
                block_size=rows, num_kv_heads=1, head_size=2 * HEAD, head_size_v=0, dtype=torch.float32
            )
    return found


def config(case: dict[str, Any]) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, decode_context_parallel_size=1),
        model_config=SimpleNamespace(max_model_len=case["length"], original_max_model_len=case["length"]),
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=case["in_flight"],
    )


def planned(case: dict[str, Any]) -> list[float]:
    told = config(case)
    found = get_kv_cache_configs(told, caches_by_stage(case), [case["available"]] * len(case["stages"]))
    scheduled = generate_scheduler_kv_cache_config(found)
    return [scheduled.num_blocks, *get_kv_cache_capacity(told, scheduled)]


def is_allocated(case: dict[str, Any]) -> bool:
    """Return whether `allocate_kv_cache` finds the group of every tensor on every stage."""
    found = get_kv_cache_configs(config(case), caches_by_stage(case), [case["available"]] * len(case["stages"]))
    return all(
        any(tensor.layers[0] in group.layer_names for group in one.kv_cache_groups)
        for one in found
        for tensor in one.kv_cache_tensors
    )


def caches_by_stage(case: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            name: spec
            for layer in range(*stage)
            for name, spec in (
                shared_caches(layer, case["ratios"][layer], case)
                if case["sources"]
                else caches(layer, case["ratios"][layer])
            ).items()
        }
        for stage in case["stages"]
    ]


asked = json.load(sys.stdin)
json.dump(
    {
        "plans": [planned(case) for case in asked["plans"]],
        "allocated": [is_allocated(case) for case in asked["divisions"]],
        "stages": [
            [get_pp_indices(layers, rank, size) for rank in range(size)]
            for layers in (4, 43, 61)
            for size in (1, 2, 3, 4, 8, 16)
            if size <= layers
        ],
    },
    sys.stdout,
)
