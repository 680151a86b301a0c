"""Cache of launches in Triton's interpreter by their arguments and memory.

The interpreter runs the programs of a launch sequentially, so the memory after a launch depends on these inputs only.
The configurations of two architectures often differ only in options that the interpreter ignores (warps, stages).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from triton.runtime import interpreter

_LARGEST = 1 << 24
"""Largest memory of a cached launch in bytes; launches with more memory always run."""
_KEPT = 1 << 27
_VALUES = (int, float, bool, str, type(None), interpreter.tl.dtype)

Call = Callable[..., None]


def _described(executor: Any, arguments: dict[str, Any]) -> tuple[Hashable, list[torch.Tensor]] | None:
    """Return all inputs of the launch and its memory as bytes; None if they cannot be determined."""
    if callable(executor.grid) or executor.pre_run_hooks:
        return None
    key: list[Hashable] = [executor.fn, executor.grid]
    memory: dict[int, torch.Tensor] = {}
    for name in executor.arg_names:
        value = arguments.get(name)
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            storage = value.untyped_storage()
            if storage.data_ptr() not in memory:
                memory[storage.data_ptr()] = torch.tensor([], dtype=torch.uint8).set_(storage)
            place = list(memory).index(storage.data_ptr())
            key.append((name, value.dtype, value.storage_offset(), value.shape, value.stride(), place))
        elif isinstance(value, _VALUES):
            key.append((name, type(value), repr(value)))
        else:
            return None
    if sum(one.numel() for one in memory.values()) > _LARGEST:
        return None
    key += [hashlib.blake2b(one.numpy()).digest() for one in memory.values()]
    return tuple(key), list(memory.values())


def remember_launches() -> None:
    """Run each launch of this process's interpreter once, and restore its resulting memory on repetitions."""
    plain: Call = interpreter.GridExecutor.__call__
    left: OrderedDict[Hashable, list[torch.Tensor]] = OrderedDict()
    kept = 0

    def call(self: Any, *args: Any, **arguments: Any) -> None:
        nonlocal kept
        described = None if args else _described(self, arguments)
        if described is None:
            plain(self, *args, **arguments)
            return
        key, memory = described
        if (found := left.get(key)) is None:
            plain(self, **arguments)
            left[key] = [one.clone() for one in memory]
            kept += sum(one.numel() for one in memory)
            while kept > _KEPT:
                kept -= sum(one.numel() for one in left.popitem(last=False)[1])
            return
        for one, after in zip(memory, found, strict=True):
            one.copy_(after)

    interpreter.GridExecutor.__call__ = call
