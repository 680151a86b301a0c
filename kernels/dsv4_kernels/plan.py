"""Plan, run, warm up, freeze: how an operation is used by a serving process.

`plan(...)` picks the configuration and allocates every buffer for the largest shape. `Plan.run(...)` launches: no
allocation, no host synchronisation, so that it can be captured in a CUDA graph. `Plan.warmup()` compiles all that `run`
can ever launch. `freeze()` then turns any later compilation of a kernel of this package into `FrozenError`, because a
compilation in the middle of serving is a stall of seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from dsv4_kernels.arch import DEFAULT_ARCH, Arch, detect
from dsv4_kernels.device import AT_REST


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
                f"It was asked for {event['repr']}"
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


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Raise ValueError unless `tensor` is contiguous, 16-byte aligned and has the dtype and shape (None: any size).

    Alignment is not a nicety: Triton derives it at launch, and a pointer without it compiles another kernel (a stall
    after freeze) whose loads cannot be pipelined.
    """
    if tensor.dtype != dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}, needs {dtype}")
    have = tensor.shape
    # A loop and no generator: a launch checks several tensors, and a short step outside of graphs waits for it.
    if have != shape:
        fits = len(have) == len(shape)
        for size, want in zip(have, shape, strict=False):
            if size != want and want is not None:
                fits = False
        if not fits:
            raise ValueError(f"{name} has shape {tuple(have)}, needs {shape}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous (strides {tensor.stride()})")
    if tensor.data_ptr() % 16:
        raise ValueError(f"{name} starts at an address that is no multiple of 16 bytes")
