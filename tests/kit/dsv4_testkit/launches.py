"""Launches of kernels without a GPU, recorded at the interface between Triton and the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.compiler import CompiledKernel
from triton.runtime import driver

from dsv4_kernels.arch import Arch, TargetGPU, compile_for
from dsv4_kernels.precompile import CompileOnly


@dataclass(frozen=True)
class Launch:
    """One launch with the arguments of the driver."""

    kernel: CompiledKernel
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


def record_launches(arch: Arch) -> list[Launch]:
    """Return a list of every later launch of this process; each compiles its kernel for `arch` without running it."""
    compile_for(TargetGPU(arch, arch.spec.multiprocessors))
    recorder = CompileOnly(arch)
    recorder.launches = True
    driver.set_active(recorder)
    made: list[Launch] = []

    def load(kernel: CompiledKernel) -> None:
        def run(x: int, y: int, z: int, *rest: Any) -> None:
            # Omitted arguments: stream, function, two of metadata, two hooks.
            made.append(Launch(kernel, (x, y, z), rest[6:]))

        kernel.module = kernel.function = 0
        kernel._run = run

    CompiledKernel._init_handles = load
    return made
