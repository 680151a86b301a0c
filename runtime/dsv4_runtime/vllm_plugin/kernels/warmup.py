"""Compile before vLLM records its graphs: the bundled kernels around its own `kernel_warmup`, and what that misses."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dsv4_runtime.vllm_plugin.kernels import front, indexer
from dsv4_runtime.vllm_plugin.kernels.active import LOGGER, warm_up
from dsv4_runtime.vllm_plugin.kernels.precompile import begin_anew, finish


def after_precompile(original: Any) -> Any:
    """Return the worker's `determine_available_memory`, begun when the kernels that layers announced are compiled.

    Its step launches them: it would compile them a second time, one by one. Beside it the process that compiles
    attention imports what it needs.
    """

    @functools.wraps(original)
    def determine_available_memory(worker: Any) -> int:
        begin_anew()
        available: int = original(worker)
        return available

    return determine_available_memory


def around_kernel_warmup(original: Any) -> Any:
    """Return vLLM's `kernel_warmup`, before which attention is planned, and after which everything is compiled.

    The plans that need the KV cache's strides are compiled by processes while vLLM compiles its own kernels, until it
    has the first batch attend (`before_attention`).
    """

    @functools.wraps(original)
    def kernel_warmup(worker: Any, *args: Any, **kwargs: Any) -> Any:
        _plan_attention(worker.model_runner)
        result = original(worker, *args, **kwargs)
        finish()
        late = warm_up()
        LOGGER.info("dsv4 kernels: %s plans that vLLM's warm-up asked for were compiled after it", late)
        return result

    return kernel_warmup


def before_attention(original: Any) -> Any:
    """Return vLLM's warm-up of attention, begun when all plans are compiled: it would compile them one by one."""

    @functools.wraps(original)
    def deepseek_v4_sparse_mla_attention_warmup(worker: Any) -> None:
        begun = time.monotonic()
        finish()
        LOGGER.info("dsv4 kernels: %s plans compiled in %.1f s", warm_up(), time.monotonic() - begun)
        original(worker)

    return deepseek_v4_sparse_mla_attention_warmup


def before_profiled_capture(original: Any) -> Any:
    """Return the runner's `capture_model`, which begins the capture that is only profiled with attention's plans.

    The profile binds a small KV cache, with the real one's strides, and its graphs would compile the plans one by one.
    Made once vLLM has begun to measure, their buffers are part of what it keeps free for graphs, as if a graph made
    them.
    """

    @functools.wraps(original)
    def capture_model(runner: Any, *, profile_only: bool = False) -> Any:
        if not profile_only:
            return original(runner)
        manager = runner.cudagraph_manager
        capture = manager.capture

        def planned(*args: Any, **kwargs: Any) -> Any:
            begun = time.monotonic()
            _plan_attention(runner)
            finish()
            made = warm_up()
            LOGGER.info("dsv4 kernels: %s plans compiled in %.1f s for profiled graphs", made, time.monotonic() - begun)
            return capture(*args, **kwargs)

        manager.capture = planned
        try:
            return original(runner, profile_only=True)
        finally:
            del manager.capture

    return capture_model


def _plan_attention(runner: Any) -> None:
    """Make the plans of attention, or say why they are made later."""
    models = (runner.model, getattr(getattr(runner, "speculator", None), "model", None))
    try:
        plan_attention([model for model in models if model is not None])
    except Exception as error:
        # They are made when they are asked for, as they would be for a layer that is not known here.
        LOGGER.warning("dsv4 kernels: attention is planned late (%s: %s)", type(error).__name__, error)


def plan_attention(models: Sequence[Any]) -> None:
    """Make the plans whose sizes the KV cache gives, of the layers of `models`."""
    for model in models:
        for layer in model.modules():
            if hasattr(layer, "swa_cache_layer"):
                front.plan_ahead_of_requests(layer)
            if hasattr(layer, "_run_parallel_input_projections"):
                # Not with this module: it imports vLLM's.
                from dsv4_runtime.vllm_plugin.kernels import projections

                projections.plan_ahead_of_requests(layer)
            if hasattr(layer, "plan_decode_ahead"):
                layer.plan_decode_ahead()
            elif getattr(layer, "dsv4_bundled", False):
                # As above.
                from dsv4_runtime.vllm_plugin.kernels import compressor

                compressor.plan_ahead_of_requests(layer)
            elif hasattr(layer, "indexer_op"):
                indexer.plan_ahead_of_requests(layer)


def every_gather(kernel: type) -> list[tuple[Any, Any, Any]]:
    """Return the assignments that have vLLM's gather of a prefill's window compiled for all caches and alignments.

    `kernel` is `DequantizeAndGatherKCacheKernel`. vLLM 0.33 compiles it for pages of the compressed caches' size that
    lie without gaps; the window's have a size of their own and lie as far apart as the largest layer's. Lengths begin
    at the first request of a chunk of prefills, and entries where the compressed ones end.
    """
    keys_of, inputs_of = kernel.get_warmup_keys, kernel.warmup_inputs  # type: ignore[attr-defined]

    @dataclass(frozen=True)
    class Key(kernel.CompileKey):  # type: ignore[misc, name-defined]
        unaligned: frozenset[str] = field(default=frozenset())

    @functools.wraps(keys_of)
    def get_warmup_keys(self: Any, vllm_config: Any) -> list[Any]:
        keys = keys_of(self, vllm_config)
        context = vllm_config.compilation_config.static_forward_context.values()
        caches = {
            (layer.kv_cache.shape[1], layer.kv_cache.stride(0))
            for layer in context
            # The window's cache; layers of attention have a window too, and a compressed cache.
            if hasattr(layer, "window_size") and not hasattr(layer, "compress_ratio") and layer.kv_cache.dim() == 3
        }
        more = []
        for page, stride in caches:
            blocks = -(-vllm_config.model_config.max_model_len // page)
            pointers = ("seq_lens", "gather_lens", "block_table") if blocks % 4 else ("seq_lens", "gather_lens")
            for key, which in itertools.product(keys, _subsets(pointers)):
                if key.has_gather_lens:
                    shape = {"cache_block_size": page, "block_stride": stride, "max_blocks_per_seq": blocks}
                    more.append(Key(**{**vars(key), **shape}, unaligned=which))
        return list(dict.fromkeys([*keys, *more]))

    @functools.wraps(inputs_of)
    def warmup_inputs(self: Any, compile_key: Any) -> dict[str, Any]:
        inputs = dict(inputs_of(self, compile_key))
        for name in getattr(compile_key, "unaligned", ()):
            inputs[name] = replace(inputs[name], aligned=False)
        return inputs

    return [(kernel, "get_warmup_keys", get_warmup_keys), (kernel, "warmup_inputs", warmup_inputs)]


def _subsets(names: tuple[str, ...]) -> list[frozenset[str]]:
    return [frozenset(found) for size in range(len(names) + 1) for found in itertools.combinations(names, size)]


def every_alignment(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return `get_warmup_keys` of vLLM's combined index lists, with every alignment that its pointers may have.

    They point into tensors of the step, at the first request of a chunk of prefills: how many requests come before it
    decides whether Triton finds them aligned. vLLM 0.33 compiles three of the combinations and meets two others as soon
    as requests of different lengths come together.
    """

    @functools.wraps(original)
    def get_warmup_keys(self: Any, vllm_config: Any) -> list[Any]:
        keys = original(self, vllm_config)
        more = [
            replace(
                key,
                input_variant=type(key.input_variant).from_alignment(
                    topk_indices=lists, query_start_loc=requests, seq_lens=requests, gather_lens=prefills
                ),
            )
            for key in keys
            for lists, requests, prefills in itertools.product((True, False), repeat=3)
        ]
        return list(dict.fromkeys([*keys, *more]))

    return get_warmup_keys


def every_block(original: Callable[..., None]) -> Callable[..., None]:
    """Return vLLM's `prepare_dflash_inputs`, which compiles its kernel for steps of every length at its first call.

    The kernel is compiled for as many tokens as the longest request of a step has together with its drafts, rounded up
    to a power of two of at most 256. Prompts of vLLM 0.33's warm-up have up to 15 tokens: with DSpark's five drafts
    longer ones would have 64, 128 and 256 compiled when they come. Each KV cache group has a table of its own, whose
    rows may be aligned otherwise. The launches take the inputs of that call's step and write what its own one writes.
    """
    names = list(inspect.signature(original).parameters)
    at, met = names.index("block_table"), set[tuple[int, int]]()

    @functools.wraps(original)
    def prepare_dflash_inputs(*args: Any, **options: Any) -> None:
        table = args[at] if at < len(args) else options["block_table"]
        if (seen := (table.data_ptr(), table.stride(0))) not in met:
            met.add(seen)
            given = dict(zip(names, args, strict=False)) | options
            drafted, batch = given["num_query_per_req"], copy.copy(given["input_batch"])
            for power in range(drafted.bit_length(), 9):
                batch.num_scheduled_tokens = np.full_like(batch.num_scheduled_tokens, (1 << power) - drafted)
                original(**{**given, "input_batch": batch})
        original(*args, **options)

    return prepare_dflash_inputs
