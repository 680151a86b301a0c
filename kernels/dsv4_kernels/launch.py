"""Launch kernels that Triton has compiled without Triton's own search for them.

For each launch Triton binds the arguments, derives the specialisation and finds the compiled kernel: 8 to 14 µs of the
host, for which a step outside of CUDA graphs waits. `Launcher` derives a key that distinguishes at least as much, and
calls the `CompiledKernel` that Triton returned for it the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_LARGE = 2**31
_DESCRIPTOR_OPTIONS = ("padding", "round_f32_to_tf32")


def hash_helpers(kernel: Any) -> None:
    """Have Triton hash the functions that a kernel calls before the kernel.

    Into a kernel's key in the cache on disk Triton 3.6 and 3.7 take the constants that its helpers use, but only of
    those that were hashed before it: a process that compiles other kernels first would have another key.
    """
    if isinstance(kernel, JITFunction):
        for name in kernel.fn.__code__.co_names:
            hash_helpers(kernel.fn.__globals__.get(name))
        # Waits while another thread hashes it: the constants that it uses are known only then.
        _ = kernel.cache_key


class Launcher:
    """`kernel[grid](**arguments)`, faster from the second launch of a kind on.

    Triton's debug and instrumentation options count as they were at the first one.
    """

    def __init__(self, kernel: Any) -> None:
        """Args:
        kernel: result of `triton.jit`; its compile-time constants are its last arguments.

        Raises:
            ValueError: another argument follows a constant.
        """
        self.kernel = kernel
        self._names = tuple(kernel.arg_names)
        # Functions of the interpreter have no such parameters, and return nothing that could be kept.
        constant = [one.is_constexpr for one in getattr(kernel, "params", ())]
        self._variables = constant.index(True) if True in constant else len(constant)
        if not all(constant[self._variables :]):
            raise ValueError(f"{kernel.__name__}: constants have to be its last arguments, has {self._names}")
        self._compiled: dict[Hashable, CompiledKernel] = {}
        self._hashed = False
        self._layouts: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a callable that launches on a grid of one to three sizes, on the current stream.

        It takes the kernel's arguments by name and in the kernel's order, then Triton's options.
        """
        return lambda **arguments: self._launch(grid, arguments)

    def _launch(self, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        names, values = tuple(arguments), tuple(arguments.values())
        key = self._key(values, names)
        found = None if key is None else self._compiled.get(key)
        if found is not None:
            found[(*grid, 1, 1)[:3]](*values[: len(self._names)])
            return
        if names[: len(self._names)] != self._names:
            raise TypeError(f"{self.kernel.__name__} got {names}, needs the order {self._names}")
        self._check_places(names, values)
        if not self._hashed:
            hash_helpers(self.kernel)
            self._hashed = True
        compiled = self.kernel[grid](**arguments)
        # A launch that only compiles, or compiles in another thread, returns no kernel.
        if key is not None and isinstance(compiled, CompiledKernel):
            self._compiled[key] = compiled
            # A layout stands in the key by its address, which no other one may get.
            self._layouts += [value.layout for value in values if hasattr(value, "block_shape")]

    def _check_places(self, names: tuple[str, ...], values: tuple[Any, ...]) -> None:
        """Raise ValueError if a tensor has no memory or lies on another device: Triton would hand its address over."""
        for name, value in zip(names, values, strict=True):
            tensor = getattr(value, "base", value) if hasattr(value, "block_shape") else value
            if not isinstance(tensor, torch.Tensor) or tensor.device.type == "cpu":
                continue
            if tensor.is_meta:
                # A driver that only compiles has no others.
                elsewhere = getattr(driver.active, "launches", True)
            else:
                elsewhere = tensor.get_device() != driver.active.get_current_device()
            if elsewhere:
                raise ValueError(
                    f"{self.kernel.__name__}: {name} is on {tensor.device}, needs a tensor on the current device"
                )

    def _key(self, values: tuple[Any, ...], names: tuple[str, ...] = ()) -> Hashable | None:
        """Return everything that Triton may specialise on; None where Triton or `_check_places` must decide.

        Args:
            values: the kernel's arguments, then the values of Triton's options.
            names: the names of both.
        """
        if not self._variables:
            return None
        device, constants = driver.active.get_current_device(), values[self._variables :]
        # 1 and True are equal, and so are 0.0 and -0.0.
        classes = tuple(map(type, constants))
        signs = tuple(map(str, constants)) if float in classes else None
        key: list[Any] = [device, names, constants, classes, signs]
        address = 0
        for value in values[: self._variables]:
            if isinstance(value, torch.Tensor):
                place = value.get_device()
                if place != device and (place >= 0 or value.is_meta):
                    return None
                key.append(value.dtype)
                address |= value.data_ptr()
            elif value.__class__ is int:
                if not -_LARGE <= value < _LARGE:
                    return None
                # Triton makes a constant of 1, and specialises on multiples of 16.
                key.append(value == 1 or (value & 15 == 0) * 16)
            elif value is None or value.__class__ is float:
                key.append(value.__class__)
            elif hasattr(value, "block_shape"):
                # A tensor descriptor, whose layout has no hash and is one of the few that are kept.
                base, options = value.base, [getattr(value, name, None) for name in _DESCRIPTOR_OPTIONS]
                if base.is_meta or base.get_device() not in (-1, device):
                    return None
                key.append((base.dtype, *value.block_shape, id(value.layout), *options))
            else:
                return None
        # A pointer that is no multiple of 16 bytes needs another kernel.
        return None if address & 15 else tuple(key)
