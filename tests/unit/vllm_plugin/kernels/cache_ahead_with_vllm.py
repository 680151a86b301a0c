"""Child process of `test_cache_ahead.py`: the predicted caches, and those that vLLM makes for its own layers.

Prints one JSON object. The layers are those of Flash that have a cache: the window's, compressed entries of ratio 4 and
128, the compressors' states and the indexer's keys.
"""

# ruff: noqa: E402 -- the plugins must be loaded before what they change is imported
import json
import os
from types import SimpleNamespace
from typing import Any

from vllm.plugins import load_general_plugins

load_general_plugins()

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.utils import allocate_kv_cache, prepare_kernel_block_sizes
from vllm.v1.worker.worker_base import WorkerBase

from dsv4_runtime.vllm_plugin.kernels.warmup import bound, foreseen_caches

MEMORY = 1 << 28


def attention(config: Any, prefix: str, ratio: int) -> None:
    """Add a layer of attention with compressed entries and the owners of its caches to the model's context."""
    made = DeepseekV4FlashMLAAttention.__new__(DeepseekV4FlashMLAAttention)
    torch.nn.Module.__init__(made)
    vars(made).update(
        prefix=prefix, compress_ratio=ratio, kv_cache_dtype="fp8_ds_mla", kv_cache_torch_dtype=torch.uint8,
        head_dim=512, kv_cache=torch.tensor([]), use_fp8_ds_mla_layout=True,
    )  # fmt: skip
    context = config.compilation_config.static_forward_context
    DeepseekV4SWACache(512, 128, torch.uint8, f"{prefix}.swa", config.cache_config)
    if ratio > 1:
        context[prefix] = made
        CompressorStateCache(2048 if ratio == 4 else 1024, torch.float32, ratio, f"{prefix}.state")
    if ratio == 4:
        DeepseekV4IndexerCache(132, torch.uint8, f"{prefix}.keys", config.cache_config, ratio)
        CompressorStateCache(512, torch.float32, ratio, f"{prefix}.index_state")


def of_vllm(config: Any) -> dict[str, torch.Tensor]:
    """Return the caches of an engine that has `MEMORY` bytes for them."""
    specs = get_kv_cache_spec(config)
    supported = WorkerBase.get_supported_kv_cache_layouts(SimpleNamespace(vllm_config=config))
    layout = resolve_kv_cache_layout(config, [supported], specs.values())
    (planned,) = get_kv_cache_configs(config, [specs], [MEMORY])
    context = config.compilation_config.static_forward_context
    groups = [
        [
            SimpleNamespace(backend=context[name].get_attn_backend(), kv_cache_spec=specs[name])
            for name in one.layer_names
        ]
        for one in planned.kv_cache_groups
    ]
    return allocate_kv_cache(planned, torch.device("cpu"), layout, prepare_kernel_block_sizes(planned, groups))


def shown(caches: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: [str(one.dtype), list(one.shape[1:]), list(one.stride())] for name, one in sorted(caches.items())}


engine = EngineArgs(
    model=os.environ["NANO_MODEL"], skip_tokenizer_init=True, kv_cache_dtype="fp8", block_size=256, max_model_len=1024,
    max_num_batched_tokens=1024, enable_prefix_caching=False,
)  # fmt: skip
config = engine.create_engine_config()
# The value that the first layer of the model resolves.
config.cache_config.cache_dtype = "fp8_ds_mla"
with set_current_vllm_config(config):
    for number, ratio in enumerate((1, 4, 128, 4)):
        attention(config, f"model.layers.{number}.attn", ratio)
    foreseen = foreseen_caches(config)
    context = config.compilation_config.static_forward_context
    before = {name: one.kv_cache for name, one in context.items()}
    with bound(config, foreseen):
        inside = {name: list(one.kv_cache.shape[1:]) for name, one in context.items()}
    kept = all(context[name].kv_cache is cache for name, cache in before.items())
    resolved = config.cache_config.kv_cache_layout
    real = of_vllm(config)
told = {
    "foreseen": shown(foreseen),
    "real": shown(real),
    "devices": sorted({str(one.device) for one in foreseen.values()}),
    "inside": inside,
    "kept": kept,
    "resolved": resolved,
    "layout": config.cache_config.kv_cache_layout,
    "bytes": sum({one.untyped_storage().nbytes() for one in real.values()}),
}
print(json.dumps(told))
