"""Has vLLM inspect a model's class in a fork of the process that asks, instead of one that imports vLLM anew."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from dsv4_runtime.vllm_plugin.forking import call_in_child, has_cuda
from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, expect_parameters

_MODULE = "vllm.model_executor.models.registry"
_SYMBOL = "_run_in_subprocess"
_SECONDS = 60.0
_LOGGER = logging.getLogger("vllm.dsv4")


def in_fork(original: Callable[[Callable[[], Any]], Any]) -> Callable[[Callable[[], Any]], Any]:
    """Return vLLM's `_run_in_subprocess`, which is asked only for what a forked child could not answer.

    A child can hang where another thread held a lock when it was forked, hence the bound.
    """

    @functools.wraps(original)
    def run(fn: Callable[[], Any]) -> Any:
        if has_cuda():
            return original(fn)
        begun = time.monotonic()
        try:
            found = call_in_child(fn, _SECONDS)
        except Exception as error:
            # vLLM's own way says what is wrong with the model, if it is the model.
            _LOGGER.warning("dsv4 inspection: again in a process of its own (%s: %s)", type(error).__name__, error)
            return original(fn)
        _LOGGER.info("dsv4 inspection: the model's class was inspected in %.1f s", time.monotonic() - begun)
        return found

    return run


def apply() -> PatchOutcome:
    """Replace the function, once: the process in waiting does so before it loads the plugins.

    Raises:
        PatchRefusedError: it is another one than the patch knows.
    """
    registry: Any = sys.modules[_MODULE]
    original: Any = getattr(registry, _SYMBOL, None)
    expect_parameters(f"{_MODULE}.{_SYMBOL}", original, ["fn"])
    if not hasattr(original, "__wrapped__"):
        registry._run_in_subprocess = in_fork(original)
    return PatchOutcome.APPLIED


PATCH = Patch(
    module=_MODULE,
    symbol=_SYMBOL,
    why=(
        "where no earlier start has kept the answer, vLLM asks a process of its own, which imports vLLM once more: 14"
        " to 21 s of a start; a fork has imported it. Not where CUDA is in use; within 60 s, and else as vLLM does it"
    ),
    upstream="none: a process of its own is right where CUDA is in use",
    versions="vLLM 0.32.0 and 0.33.0",
    obsolete_when="vLLM keeps the answers for its own models in the package",
    apply=apply,
)
