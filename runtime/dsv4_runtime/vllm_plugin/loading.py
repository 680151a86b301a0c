"""Logs how far the weights are: a model loader that is registered with vLLM in the place of its default one.

vLLM's own bars count files, or bytes without a total, each format in its own words. The agent reads the lines that are
written here (`dsv4_runtime.engine.logs`), whatever the format.

The format `ipc_cache` is refused together with bundled kernels, before anything is loaded: vLLM's weight cache holds
weights as vLLM's own kernels keep them, and its loader would load a second copy beside them.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dsv4_runtime.contract.kernels import VARIABLE, Op, parse_kernel_choice
from dsv4_runtime.vllm_plugin import patch
from dsv4_runtime.vllm_plugin.patch import expect_parameters

LOGGER = logging.getLogger("vllm.dsv4")
MODULE = "vllm.model_executor.model_loader"
FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor")
"""Formats that vLLM's default loader reads, of files of safetensors."""
SHARED = "ipc_cache"
"""Format of weights that a daemon of vLLM (`vllm preload`) has loaded before."""
_SECONDS = 1.0
_SHARE = 0.01
# Between two lines: both must have passed.


def attach() -> None:
    """Register the loader for each format that vLLM's default one still has; the module has just been imported."""
    module: Any = sys.modules[MODULE]
    try:
        expect_parameters("register_model_loader", module.register_model_loader, ["load_format"])
        default = module.DefaultModelLoader
        expect_parameters("get_all_weights", default.get_all_weights, ["self", "model_config", "model"])
        known = module._LOAD_FORMAT_TO_MODEL_LOADER
        loader, shared = telling(default), known.get(SHARED)
        replaced = dict.fromkeys((name for name in FORMATS if known.get(name) is default), loader)
    except Exception as error:
        LOGGER.warning("dsv4 weights: no rate is logged (%s: %s)", type(error).__name__, error)
        return
    if shared is not None:
        replaced[SHARED] = refusing(shared)
    # vLLM warns of each loader that is replaced.
    module.logger.disabled, before = True, module.logger.disabled
    try:
        for name, kind in replaced.items():
            module.register_model_loader(name)(kind)
    finally:
        module.logger.disabled = before


def refusing(shared: type) -> type:
    """Return `shared`, vLLM's loader of weights of another process, which is not made where kernels may be bundled."""

    def make(self: Any, *args: Any, **options: Any) -> None:
        text = os.environ.get(VARIABLE)
        if any(map(parse_kernel_choice(text).bundled, Op)) and not patch.is_cpu_build():
            raise ValueError(
                f"{VARIABLE}={text} does not work with load format {SHARED}: the cached weights are laid out for "
                f"vLLM's own kernels. Set {VARIABLE}=off, or another load format"
            )
        shared.__init__(self, *args, **options)  # type: ignore[misc]

    return type(shared.__name__, (shared,), {"__init__": make})


def telling(default: type) -> type:
    """Return `default`, vLLM's loader, with lines about its progress on rank 0."""

    def get_all_weights(self: Any, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        found = default.get_all_weights(self, model_config, model)  # type: ignore[attr-defined]
        total = _size(Path(model_config.model))
        return counted(found, total, _say) if total and _first() else found

    return type(f"Telling{default.__name__}", (default,), {"get_all_weights": get_all_weights})


def counted(
    weights: Iterator[tuple[str, Any]],
    total: int,
    say: Callable[[int, int, float], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[str, Any]]:
    """Yield `weights`, names and tensors, and call `say` about once a second and at the end.

    Args:
        weights: as a loader yields them.
        total: bytes of the checkpoint's files.
        say: gets the bytes that have passed, `total`, and bytes a second: since the last call, at the end altogether.
        clock: seconds.
    """
    begun = told_time = clock()
    done = told = 0
    for name, tensor in weights:
        done += tensor.numel() * tensor.element_size()
        yield name, tensor
        # Here the model has taken the tensor.
        now = clock()
        if now - told_time >= _SECONDS and done - told >= _SHARE * total:
            say(done, total, (done - told) / (now - told_time))
            told, told_time = done, now
    say(done, total, done / max(clock() - begun, 1e-9))


def _size(folder: Path) -> int:
    """Return the bytes of the checkpoint in `folder`; 0 if it is no directory: its name is a repository's."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _first() -> bool:
    """Tell whether this process shall speak for all, as vLLM's bars have it."""
    import torch

    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _say(done: int, total: int, rate: float) -> None:
    LOGGER.info("dsv4 weights: %.3f of %.3f GB at %.3f GB/s", done / 1e9, total / 1e9, rate / 1e9)
