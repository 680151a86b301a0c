"""Plan, run, warm up, freeze: how an operation is used by a serving process.

`plan(...)` picks the configuration and allocates every buffer for the largest shape. `Plan.run(...)` launches: no
allocation, no host synchronisation, so that it can be captured in a CUDA graph. `Plan.warmup()` compiles all that `run`
can ever launch. `freeze()` then turns any later compilation of a kernel of this package into `FrozenError`, because a
compilation in the middle of serving is a stall of seconds.

`Launcher` launches kernels that Triton has compiled without Triton's own search for them. For each launch Triton binds
the arguments, derives the specialisation and finds the compiled kernel: 8 to 14 µs of the host, for which a step
outside of CUDA graphs waits.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dsv4_kernels.arch import DEFAULT_ARCH, Arch, detect
from dsv4_kernels.device import AT_REST

BF16, F32, I32, I64, U8 = torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8


class FrozenError(RuntimeError):
    """A kernel would be compiled, or a plan made, after `freeze()`."""


@dataclass(frozen=True)
class Support:
    """Whether an operation can run a shape; false carries the reason in one sentence."""

    reason: str | None = None

    def __bool__(self) -> bool:
        return self.reason is None


SUPPORTED = Support()


class Plan(ABC):
    """Buffers and launch constants of one operation for one largest shape on one device."""

    operation: str
    inputs: Inputs

    def __init__(
        self,
        operation: str,
        shape: Mapping[str, Any],
        device: torch.device,
        arch: Arch | None,
        is_supported: Callable[[Mapping[str, Any], Arch], Support],
    ) -> None:
        """Args:
        operation: name in the registry.
        shape: the largest shape, by the names of the registry's cases.
        arch: architecture whose configurations are used; None for that of `device`.
        is_supported: the operation's own.

        Raises:
            FrozenError: `freeze()` is in force; planning allocates.
            ValueError: the operation cannot run the shape.
        """
        if _FREEZER.frozen:
            raise FrozenError(f"{operation}: plans are made before freeze()")
        self.operation, self.shape, self.device = operation, shape, device
        self.arch = arch or detect(device) or DEFAULT_ARCH
        support = is_supported(shape, self.arch)
        if not support:
            raise ValueError(support.reason)

    def declare(self, **inputs: Input) -> Inputs:
        """Return the declared tensors of a run, with their checks."""
        return Inputs(self.operation, self.device, **inputs)

    @staticmethod
    def first_of_each(most: int, kind: Callable[[int], Hashable]) -> tuple[int, ...]:
        """Return the least of the token counts 1 to `most` of each `kind`, for the warm-up."""
        found: dict[Hashable, int] = {}
        for tokens in range(1, most + 1):
            found.setdefault(kind(tokens), tokens)
        return tuple(found.values())

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch; same keywords and results as the operation's reference."""

    @abstractmethod
    def warmup(self) -> None:
        """Compile all variants that `run` may launch within the planned shape."""


class _Freezer:
    def __init__(self) -> None:
        self.frozen = False
        self._previous: Callable[..., Any] | None = None

    def freeze(self) -> None:
        if not self.frozen:
            self._previous = triton.knobs.runtime.jit_cache_hook
            triton.knobs.runtime.jit_cache_hook = self._on_compile
            self.frozen = True

    def thaw(self) -> None:
        if self.frozen:
            triton.knobs.runtime.jit_cache_hook = self._previous
            self.frozen = False

    def _on_compile(self, **event: Any) -> Any:
        fn = event["fn"]
        if str(fn.module).startswith("dsv4_kernels"):
            raise FrozenError(
                f"{fn.module}.{fn.name} would be compiled after freeze(): warm it up first. "
                f"Its signature is {event['repr']}"
            )
        return self._previous(**event) if self._previous is not None else None


_FREEZER = _Freezer()


def freeze() -> None:
    """Make any further compilation of this package's kernels an error, in this process."""
    _FREEZER.freeze()


def thaw() -> None:
    """Undo `freeze()` (tests, and a runtime that plans again)."""
    _FREEZER.thaw()


def next_power_of_2(n: int) -> int:
    """Return the least power of two ≥ n."""
    return 1 << (n - 1).bit_length()


def counters(count: int, device: torch.device) -> torch.Tensor:
    """Return `count` counters of arrivals at rest, int32, for `device.is_last`."""
    return torch.full((count,), AT_REST.value, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Size:
    """A dimension from `least` to `most`, numbers or names of earlier dimensions; later tensors refer to its `name`."""

    name: str = ""
    least: int | str = 0
    most: int | str | None = None


Dimension = int | str | Size | None
"""A number, a name (any size at its first use, then that one), an earlier name with a factor or a summand ("batch*2",
"requests+1"), a range, or any size."""
# Strides of a matrix whose rows are contiguous, and anywhere.
ROWS = (None, 1)


@dataclass(frozen=True)
class Input:
    """Requirements of a plan for one tensor.

    `dtypes`: one, or those to choose from. `strides`: None where the tensor is contiguous, else a number, or None for a
    multiple of `step` elements; a first dimension of one element may have any. `aligned`: it starts at a multiple of 16
    bytes, which Triton derives at launch: a pointer without it compiles another kernel (a stall after freeze) whose
    loads cannot be pipelined. `optional`: it may be None.
    """

    dtypes: torch.dtype | tuple[torch.dtype, ...]
    shape: tuple[Dimension, ...]
    strides: tuple[int | None, ...] | None = None
    step: int = 1
    aligned: bool = True
    optional: bool = False

    def zeros(self, device: torch.device, shape: Sequence[int]) -> torch.Tensor:
        """Return zeros of this shape with the first dtype and the strides, free ones as close as they can be."""
        dtype = self.dtypes[0] if isinstance(self.dtypes, tuple) else self.dtypes
        if self.strides is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        strides: list[int] = []
        packed = 1
        for size, stride in zip(reversed(shape), reversed(self.strides), strict=True):
            strides.insert(0, stride or -(-packed // self.step) * self.step)
            packed = strides[0] * size
        room = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return torch.zeros((max(room, 1),), dtype=dtype, device=device).as_strided(shape, strides)

    def problem(self, tensor: torch.Tensor, device: torch.device, sizes: dict[str, int]) -> tuple[str, Any, str] | None:
        """Return the property that differs with its value and the needed one; `sizes` of dimensions are added to."""
        dtypes = self.dtypes if isinstance(self.dtypes, tuple) else (self.dtypes,)
        if tensor.dtype not in dtypes:
            return "dtype", _word(tensor.dtype), " or ".join(map(_word, dtypes))
        if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
            return "device", tensor.device, str(device)
        before = dict(sizes)
        if tensor.dim() != len(self.shape) or not all(map(_fits, tensor.shape, self.shape, [sizes] * tensor.dim())):
            return "shape", tuple(tensor.shape), f"[{', '.join(_dimension(one, before) for one in self.shape)}]"
        if self.strides is None:
            if not tensor.is_contiguous():
                return "strides", tensor.stride(), "a contiguous tensor"
        elif tensor.numel():
            for position, (stride, need) in enumerate(zip(tensor.stride(), self.strides, strict=True)):
                compared = position or tensor.shape[0] > 1
                if stride % self.step if need is None else compared and stride != need:
                    free = "any" if self.step == 1 else f"a multiple of {self.step}"
                    return "strides", tensor.stride(), f"({', '.join(str(one or free) for one in self.strides)})"
        if self.aligned and tensor.data_ptr() % 16:
            return "address", hex(tensor.data_ptr()), "a multiple of 16"
        return None


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fits(size: int, need: Dimension, sizes: dict[str, int]) -> bool:
    if isinstance(need, str):
        return size == (sizes.setdefault(need, size) if need.isidentifier() else _end(need, sizes))
    if isinstance(need, Size):
        if need.name and sizes.setdefault(need.name, size) != size:
            return False
        return size >= _end(need.least, sizes) and (need.most is None or size <= _end(need.most, sizes))
    return need is None or size == need


def _end(end: int | str, sizes: Mapping[str, int]) -> int:
    if isinstance(end, int):
        return end
    name, sign, number = re.split(r"([*+])", f"{end}+0")[:3]
    return sizes[name] * int(number) if sign == "*" else sizes[name] + int(number)


def _dimension(need: Dimension, sizes: Mapping[str, int]) -> str:
    def value(end: int | str) -> str:
        known = isinstance(end, str) and re.split(r"\W", end)[0] in sizes
        return f"{end} = {_end(end, sizes)}" if known else str(end)

    if isinstance(need, Size):
        if need.name in sizes:
            return value(need.name)
        least = f"≥ {value(need.least)}" if need.least else ""
        most = "" if need.most is None else f"≤ {value(need.most)}"
        return " ".join(part for part in (need.name, least, most) if part) or "any"
    return "any" if need is None else value(need)


class Inputs:
    """The tensors of a run and their checks, declared once."""

    def __init__(self, operation: str, device: torch.device, **declared: Input) -> None:
        """Args:
        operation: name for messages.
        device: place of every tensor.
        declared: the tensors by name, in the order of `check`.
        """
        self.operation, self.device, self.declared = operation, device, declared
        # Of the tensors that were checked last: dtype, shape, strides (None: contiguous), alignment.
        self._last: list[tuple[Any, ...] | None] | None = None

    def check(self, **tensors: torch.Tensor | None) -> None:
        """Raise ValueError unless all declared tensors are as declared.

        Tensors like those of the run before, as in the next layer, are compared with these only. Their device is left
        to `Launcher`, which compares it at each launch.
        """
        # A loop and no generator: a short step outside of graphs waits for it.
        if self._last is not None:
            for tensor, last in zip(tensors.values(), self._last, strict=True):
                if tensor is None or last is None:
                    if tensor is not last:
                        break
                    continue
                dtype, shape, strides, aligned = last
                if tensor.dtype is not dtype or tensor.shape != shape:
                    break
                if not tensor.is_contiguous() if strides is None else tensor.stride() != strides:
                    break
                if aligned and tensor.data_ptr() & 15:
                    break
            else:
                return
        self._last = None
        self._check(tensors)
        self._last = [
            None
            if one is None
            else (one.dtype, one.shape, None if needed.strides is None else one.stride(), needed.aligned)
            for one, needed in zip(tensors.values(), self.declared.values(), strict=True)
        ]

    def zeros(self, **sizes: int) -> dict[str, torch.Tensor]:
        """Return zeros as declared, with `sizes` of named dimensions, and others as small as they may be."""

        def size_of(need: Dimension) -> int:
            if isinstance(need, Size):
                return sizes.setdefault(need.name, _end(need.least, sizes)) if need.name else _end(need.least, sizes)
            return 1 if need is None else _end(need, sizes)

        shapes = {name: tuple(map(size_of, one.shape)) for name, one in self.declared.items()}
        return {name: self.declared[name].zeros(self.device, shape) for name, shape in shapes.items()}

    def _check(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        if tuple(tensors) != tuple(self.declared):
            raise TypeError(f"{self.operation}: got {tuple(tensors)}, needs {tuple(self.declared)}")
        sizes: dict[str, int] = {}
        for (name, tensor), needed in zip(tensors.items(), self.declared.values(), strict=True):
            if tensor is None:
                if not needed.optional:
                    raise ValueError(f"{self.operation}: {name} is missing")
            elif found := needed.problem(tensor, self.device, sizes):
                what, value, need = found
                raise ValueError(f"{self.operation}: {name} has {what} {value}, needs {need}")


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
