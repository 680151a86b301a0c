"""Compile the bundled kernels before vLLM records its graphs: after its own `kernel_warmup`."""

from __future__ import annotations

import functools
import time
from typing import Any

from dsv4_runtime.vllm_plugin.kernels.active import LOGGER, warm_up


def after_kernel_warmup(original: Any) -> Any:
    """Return vLLM's `kernel_warmup`, followed by that of the bundled kernels."""

    @functools.wraps(original)
    def kernel_warmup(worker: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(worker, *args, **kwargs)
        begun = time.monotonic()
        plans = warm_up()
        LOGGER.info("dsv4 kernels: %s plans compiled in %.1f s", plans, time.monotonic() - begun)
        return result

    return kernel_warmup
