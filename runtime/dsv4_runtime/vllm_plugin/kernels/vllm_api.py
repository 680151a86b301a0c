"""Symbols of the installed vLLM by name, from the adapter of its version.

`from dsv4_runtime.vllm_plugin.kernels.vllm_api import SamplingParams` imports `SamplingParams` from the module that
`SYMBOLS` of the adapter (`v032`, `v033`) names. Modules of this package import vLLM in no other way. Nothing is cached:
a symbol that a hook has replaced is found with its replacement.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from dsv4_runtime.vllm_plugin.kernels import v032, v033
from dsv4_runtime.vllm_plugin.patch import vllm_version


@functools.cache
def adapter() -> ModuleType:
    """Return the adapter module of the installed vLLM; of the newest version for an unknown one."""
    return v032 if vllm_version().partition(" ")[2].startswith("0.32.") else v033


def __getattr__(name: str) -> Any:
    try:
        location: str = adapter().SYMBOLS[name]
    except KeyError:
        raise AttributeError(f"no symbol {name} of vLLM is known") from None
    module, _, symbol = location.partition(":")
    found = importlib.import_module(module)
    if not symbol:
        return found
    try:
        return getattr(found, symbol)
    except AttributeError:
        try:
            return importlib.import_module(f"{module}.{symbol}")
        except ModuleNotFoundError:
            raise AttributeError(f"{module} has no {symbol}") from None
