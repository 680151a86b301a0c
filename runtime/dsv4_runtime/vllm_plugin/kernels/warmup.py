"""Compilation before vLLM captures its graphs: the bundled kernels, and variants that vLLM's own warm-up omits.

The plans of attention depend on the strides of the KV cache, which follow from the layers alone. vLLM plans a small
cache itself to measure the memory of its graphs. The same planning without memory, once the model is made, determines
the strides while the weights load: the resulting plans are announced (`plans.announce`) and discarded. If the real
cache differs, its plans are compiled when they are made.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from dsv4_kernels.arch import compile_for
from dsv4_runtime.util.files import replace_file
from dsv4_runtime.vllm_plugin.kernels import indexer, sublayers, vllm_api
from dsv4_runtime.vllm_plugin.kernels.choice import LOGGER
from dsv4_runtime.vllm_plugin.kernels.hooks import Assignment
from dsv4_runtime.vllm_plugin.kernels.plans import (
    begin_anew,
    finish,
    gpu_target,
    needed_later,
    warm_up,
    without_keeping_plans,
)
from dsv4_runtime.vllm_plugin.kernels.trial import DIRECTORY
from dsv4_runtime.vllm_plugin.retained import key_of


def after_precompile(original: Any) -> Any:
    """Return the worker's `determine_available_memory`, started after the compilation of the announced kernels.

    Its step launches them and would compile them again in sequence. Meanwhile the process that compiles attention
    performs its imports.
    """

    @functools.wraps(original)
    def determine_available_memory(worker: Any) -> int:
        begin_anew()
        available: int = original(worker)
        return available

    return determine_available_memory


def reusing_graph_estimate(original: Any) -> Any:
    """Return the runner's `profile_cudagraph_memory`, which returns the estimate of an earlier start if there is one.

    The estimate takes a capture of graphs over a small KV cache, 4 s of a restart (four layers of Flash, H200,
    2026-11-28), and is the same for equal versions, configurations, kernels and devices. The file is in the directory
    of the kernels' evidence. All ranks estimate or none, because the capture calls collectives.
    """

    @functools.wraps(original)
    def profile_cudagraph_memory(runner: Any) -> int:
        place = _estimate_file(runner)
        known = _read_estimate(place)
        if _on_all_ranks(known is not None) and known is not None:
            # The words of vLLM's line, which the plan is compared with.
            LOGGER.info("dsv4 memory: Estimated CUDA graph memory: %.2f GiB total, by an earlier start", known / 2**30)
            return known
        estimate: int = original(runner)
        if place is not None:
            try:
                # Stock kernels have no trial, which else makes the directory.
                place.parent.mkdir(parents=True, exist_ok=True)
                replace_file(place, json.dumps({"bytes": estimate}), mode=0o644)
            except OSError as error:
                LOGGER.warning("dsv4 memory: the estimate of CUDA graphs cannot be kept: %s", error)
        return estimate

    return profile_cudagraph_memory


def _estimate_file(runner: Any) -> Path | None:
    """Return the file of the estimate for this rank; None without a directory, or if the key is unknown."""
    folder = os.environ.get(DIRECTORY)
    if not folder:
        return None
    try:
        config = runner.vllm_config
        facts = [
            key_of(config, config.model_config, ""),
            [config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens],
            config.compilation_config.cudagraph_capture_sizes,
            str(config.compilation_config.cudagraph_mode),
        ]
        name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    except Exception as error:
        LOGGER.warning("dsv4 memory: no earlier estimate of CUDA graphs (%s: %s)", type(error).__name__, error)
        return None
    return Path(folder) / f"graphs-{name}.json"


def _read_estimate(place: Path | None) -> int | None:
    """Return the stored estimate in bytes; None if there is none, or no readable one."""
    try:
        found = None if place is None else json.loads(place.read_text())["bytes"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if isinstance(found, int) and found >= 0 else None


def _on_all_ranks(here: bool) -> bool:
    """Return whether `here` is true on all ranks of this engine; each of them calls it."""
    group = vllm_api.get_world_group()
    if group.world_size == 1:
        return here
    votes = torch.tensor([int(here)])
    torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(votes.item())


def around_kernel_warmup(original: Any) -> Any:
    """Return vLLM's `kernel_warmup` with the planning of attention before it and complete compilation after it.

    Plans that depend on the strides of the KV cache are compiled by processes while vLLM compiles its own kernels, up
    to the first batch with attention (`before_attention`).
    """

    @functools.wraps(original)
    def kernel_warmup(worker: Any, *args: Any, **kwargs: Any) -> Any:
        _plan_attention(worker.model_runner)
        result = original(worker, *args, **kwargs)
        _compile_plans(time.monotonic(), "requests of vLLM's warm-up")
        return result

    return kernel_warmup


def _compile_plans(begun: float, what: str) -> None:
    """Compile all new plans, and log the time since `begun`."""
    finish()
    made = warm_up()
    LOGGER.info("dsv4 kernels: %s plans compiled in %.1f s for %s", made, time.monotonic() - begun, what)


def before_attention(original: Any) -> Any:
    """Return vLLM's warm-up of attention, started after the compilation of all plans; it would compile in sequence."""

    @functools.wraps(original)
    def deepseek_v4_sparse_mla_attention_warmup(worker: Any) -> None:
        _compile_plans(time.monotonic(), "attention")
        original(worker)

    return deepseek_v4_sparse_mla_attention_warmup


def of_called_gates(original: Any) -> Any:
    """Return the query for the gates' shapes that vLLM's warm-up compiles, without gates that the bundled router reads.

    They are not called, and CuTe compiles each shape at every start: 4.4 s for the nano model on an H200 (2026-11-26).
    """

    @functools.wraps(original)
    def _ll_bf16_router_shapes_from_model(model: Any) -> Any:
        called = [module for module in model.modules() if not getattr(module, "dsv4_replaced", False)]
        return original(SimpleNamespace(modules=lambda: called))

    return _ll_bf16_router_shapes_from_model


def before_profiled_capture(original: Any) -> Any:
    """Return the runner's `capture_model`, which plans attention at the begin of a profiled capture.

    The profile binds a small KV cache with the real strides, and its graphs would compile the plans in sequence. The
    plans are made after the begin of vLLM's measurement, so that it counts their buffers as memory of graphs.
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
            _compile_plans(begun, "profiled graphs")
            return capture(*args, **kwargs)

        manager.capture = planned
        try:
            return original(runner, profile_only=True)
        finally:
            del manager.capture

    return capture_model


def _plan_attention(runner: Any) -> None:
    """Make the plans of attention, or log why they are made later."""
    models = (runner.model, getattr(getattr(runner, "speculator", None), "model", None))
    try:
        plan_attention([model for model in models if model is not None])
    except Exception as error:
        # Layers make them at the first use.
        LOGGER.warning("dsv4 kernels: attention is planned late (%s: %s)", type(error).__name__, error)


def plan_attention(models: Sequence[Any]) -> None:
    """Make the plans of the layers of `models` that depend on the KV cache."""
    for model in models:
        for layer in model.modules():
            if hasattr(layer, "swa_cache_layer"):
                sublayers.plan_ahead_of_requests(layer)
            if hasattr(layer, "_run_parallel_input_projections"):
                # Imported late: it imports modules of vLLM.
                from dsv4_runtime.vllm_plugin.kernels import compressor

                compressor.plan_projections(layer)
            if hasattr(layer, "plan_decode_ahead"):
                layer.plan_decode_ahead()
            elif getattr(layer, "dsv4_bundled", False):
                # As above.
                from dsv4_runtime.vllm_plugin.kernels import compressor

                compressor.plan_ahead_of_requests(layer)
            elif hasattr(layer, "indexer_op"):
                indexer.plan_ahead_of_requests(layer)


def every_gather(module: ModuleType) -> list[Assignment]:
    """Return the assignments that add all caches and alignments to the warm-up of vLLM's gather of a prefill's window.

    `module` has the kernel. vLLM 0.33 compiles it for contiguous pages with the size of the
    compressed caches; pages of the window have another size and the stride of the largest layer. Lengths start at the
    first request of a chunk of prefills, entries after the compressed ones.
    """
    kernel = module.DequantizeAndGatherKCacheKernel
    keys_of, inputs_of = kernel.get_warmup_keys, kernel.warmup_inputs

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
            # The window cache; attention layers have a window and a compressed cache.
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
    """Return `get_warmup_keys` of vLLM's combined index lists with all alignments of its pointers.

    They point into tensors of the step, at the first request of a chunk of prefills: the number of preceding requests
    determines their alignment. vLLM 0.33 compiles three combinations; two others occur when a step contains requests of
    different lengths.
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
    """Return vLLM's `prepare_dflash_inputs`, which compiles its kernel for all step lengths at its first call.

    The kernel is specialized for the tokens of the longest request of a step with its drafts, rounded up to a power of
    two of at most 256. Prompts of vLLM 0.33's warm-up have up to 15 tokens: with DSpark's five drafts longer prompts
    would compile 64, 128 and 256 at their arrival. Each KV cache group has a table with its own row alignment. The
    additional launches use the inputs and write the outputs of that first call.
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


_MODELS: list[Any] = []


def announcing_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loader's `initialize_model`, followed by the announcement of attention's plans.

    Draft layers share the blocks of the cache: with a draft model the announcement follows the second call.
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
    """Announce the plans that the attention of `models` will make with the KV cache.

    Raises:
        Exception: raised by vLLM's planning.
    """
    if (found := gpu_target()) is None:
        return
    compile_for(found)
    with needed_later(), without_keeping_plans(), bound(vllm_config, foreseen_caches(vllm_config)):
        plan_attention(models)


@contextlib.contextmanager
def bound(vllm_config: Any, caches: dict[str, torch.Tensor]) -> Iterator[None]:
    """Bind `caches` to the layers, by name, within this context."""
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
    """Return a cache per layer name on the device "meta", with the strides of the real cache.

    Raises:
        AttributeError, ImportError: this vLLM plans caches differently.
    """
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import (
        WorkerBase,
        allocate_kv_cache,
        get_kv_cache_spec,
        resolve_kv_cache_layout,
    )
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import (
        init_minimal_kv_cache_for_profiling as _init_minimal_kv_cache_for_profiling,
    )

    # Planning stores resolved values in the configuration; the engine's own planning resolves them again.
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
