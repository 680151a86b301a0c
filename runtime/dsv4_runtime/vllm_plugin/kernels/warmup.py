"""Compile before vLLM records its graphs: the bundled kernels around its own `kernel_warmup`, and what that misses."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dsv4_runtime.vllm_plugin.kernels.active import LOGGER, warm_up
from dsv4_runtime.vllm_plugin.kernels.precompile import finish


def after_precompile(original: Any) -> Any:
    """Return the worker's `determine_available_memory`, begun when the kernels that layers announced are compiled.

    Its step launches them: it would compile them a second time, one by one.
    """

    @functools.wraps(original)
    def determine_available_memory(worker: Any) -> int:
        finish()
        available: int = original(worker)
        return available

    return determine_available_memory


def around_kernel_warmup(original: Any) -> Any:
    """Return vLLM's `kernel_warmup`, with that of the bundled kernels before and after it."""

    @functools.wraps(original)
    def kernel_warmup(worker: Any, *args: Any, **kwargs: Any) -> Any:
        finish()
        begun = time.monotonic()
        # Plans that the profile made first, side by side: the batches of vLLM's own warm-up compile one by one.
        plans, seconds = warm_up(), time.monotonic() - begun
        result = original(worker, *args, **kwargs)
        begun = time.monotonic()
        plans, seconds = plans + warm_up(), seconds + time.monotonic() - begun
        LOGGER.info("dsv4 kernels: %s plans compiled in %.1f s", plans, seconds)
        return result

    return kernel_warmup


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
