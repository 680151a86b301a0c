"""Attention's plans, announced while the weights load: the strides of the KV cache follow from the layers alone.

vLLM plans a small cache itself to measure the memory of its graphs. The same planning, of a cache without memory, says
once the model is made how its layers' caches will lie. The plans that the layers make for those are announced
(`precompile.announce`) and forgotten. If the real cache lies otherwise, its plans are compiled when they are made.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from dsv4_kernels.arch import compile_for
from dsv4_runtime.vllm_plugin.kernels.active import LOGGER, without_keeping_plans
from dsv4_runtime.vllm_plugin.kernels.precompile import gpu_target, needed_later
from dsv4_runtime.vllm_plugin.kernels.warmup import plan_attention

_MODELS: list[Any] = []


def announcing_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loader's `initialize_model`, after which attention's plans are announced.

    Where tokens are drafted with layers of their own, those share the blocks of the cache: then after the second call.
    """

    @functools.wraps(original)
    def initialize_model(*args: Any, **options: Any) -> Any:
        model = original(*args, **options)
        config = options["vllm_config"] if "vllm_config" in options else args[0]
        _MODELS.append(model)
        drafts = config.speculative_config
        if drafts is None or options.get("model_config") is drafts.draft_model_config:
            try:
                announce_attention(_MODELS, config)
            except Exception as error:
                LOGGER.warning(
                    "dsv4 kernels: attention is compiled once there is a KV cache (%s: %s)", type(error).__name__, error
                )
            _MODELS.clear()
        return model

    return initialize_model


def announce_attention(models: Sequence[Any], vllm_config: Any) -> None:
    """Announce the plans that the attention of `models` will make once there is a KV cache.

    Raises:
        Exception: whatever vLLM's planning raises.
    """
    if (found := gpu_target()) is None:
        return
    compile_for(found)
    with needed_later(), without_keeping_plans(), bound(vllm_config, foreseen_caches(vllm_config)):
        plan_attention(models)


@contextlib.contextmanager
def bound(vllm_config: Any, caches: dict[str, torch.Tensor]) -> Iterator[None]:
    """Let the layers have `caches`, by name, while inside."""
    context = vllm_config.compilation_config.static_forward_context
    before = {name: context[name].kv_cache for name in caches}
    try:
        for name, cache in caches.items():
            context[name].bind_kv_cache(cache)
        yield
    finally:
        for name, cache in before.items():
            context[name].kv_cache = cache


def foreseen_caches(vllm_config: Any) -> dict[str, torch.Tensor]:
    """Return a cache of each layer, by its name, on the device "meta"; as far apart as those of the real cache will be.

    Raises:
        AttributeError, ImportError: this vLLM plans caches otherwise.
    """
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
    from vllm.v1.worker.gpu.cudagraph_utils import _init_minimal_kv_cache_for_profiling
    from vllm.v1.worker.utils import allocate_kv_cache
    from vllm.v1.worker.worker_base import WorkerBase

    # Planning notes what it resolves; the engine's own will come to it by itself.
    config = copy.copy(vllm_config)
    config.cache_config = copy.copy(vllm_config.cache_config)
    specs = get_kv_cache_spec(config)
    supported = WorkerBase.get_supported_kv_cache_layouts(SimpleNamespace(vllm_config=config))
    layout = resolve_kv_cache_layout(config, [supported], specs.values())
    planned: list[Any] = []
    _init_minimal_kv_cache_for_profiling(
        SimpleNamespace(
            vllm_config=config,
            cache_config=config.cache_config,
            compilation_config=SimpleNamespace(max_cudagraph_capture_size=1),
            max_num_reqs=1,
            get_kv_cache_spec=lambda: specs,
            initialize_kv_cache=lambda found, is_profiling: planned.append(found),
        )
    )
    caches: dict[str, torch.Tensor] = allocate_kv_cache(planned[0], torch.device("meta"), layout)
    return caches
