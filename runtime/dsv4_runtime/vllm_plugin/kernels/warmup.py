"""Compile the bundled kernels before vLLM records its graphs: around its own `kernel_warmup`."""

from __future__ import annotations

import functools
import time
from typing import Any

from dsv4_runtime.vllm_plugin.kernels.active import LOGGER, warm_up
from dsv4_runtime.vllm_plugin.kernels.precompile import finish


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
