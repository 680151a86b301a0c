"""A hook: the module and symbol of vLLM that it changes, what they must look like, and the change.

What a hook does not recognise it leaves alone: one warning names the symbol, and vLLM's own kernel computes the
operation.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels.active import LOGGER
from dsv4_runtime.vllm_plugin.patch import vllm_version


class HookMismatchError(Exception):
    """vLLM's symbol is not the one that the hook knows."""


@dataclass(frozen=True)
class Hook:
    """One attachment of bundled kernels.

    `expects` are the parameters that the symbol must have (None: it is no function). `apply` gets the module. Without
    `ops` it is made in every CUDA build, whoever computes the operations.
    """

    ops: tuple[Op, ...]
    module: str
    symbol: str
    expects: tuple[str, ...] | None
    apply: Callable[[ModuleType], None]


def run(hook: Hook) -> None:
    """Attach `hook` to its module, which has just been imported, or say in one line why not."""
    try:
        _check(hook, sys.modules[hook.module])
        hook.apply(sys.modules[hook.module])
    except (HookMismatchError, AttributeError, ImportError) as error:
        where = f"{hook.module}.{hook.symbol} of {vllm_version()}: {error}"
        if hook.ops:
            LOGGER.warning("dsv4 kernels: %s stays with vLLM's own kernels (%s)", ", ".join(hook.ops), where)
        else:
            LOGGER.warning("dsv4 warm-up: stays as vLLM has it (%s)", where)


def _check(hook: Hook, module: ModuleType) -> None:
    target: Any = module
    for name in hook.symbol.split("."):
        target = getattr(target, name, None)
        if target is None:
            raise HookMismatchError("it is gone")
    if hook.expects is not None:
        parameters = tuple(inspect.signature(target).parameters)
        if parameters != hook.expects:
            raise HookMismatchError(f"its parameters are {parameters}, expected {hook.expects}")
