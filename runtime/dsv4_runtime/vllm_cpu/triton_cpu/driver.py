"""Driver of the interpreter backend: the CPU as device, and a benchmark function."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from dsv4_runtime.vllm_cpu.triton_cpu import InterpretedOnlyError

_ARCH = 0  # no kernel is compiled for it


def _cuda_is_here() -> bool:
    import torch  # slow; only under the interpreter

    return bool(torch.cuda.is_available())


class CPUDriver(DriverBase):  # type: ignore[misc]  # Triton ships no types
    """The CPU as a device; active under `TRITON_INTERPRET=1` without a CUDA device."""

    @classmethod
    def is_active(cls) -> bool:
        """Return whether Triton selects this driver."""
        return os.environ.get("TRITON_INTERPRET") == "1" and not _cuda_is_here()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", _ARCH, 1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """Do nothing; there is one device."""

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Refuse: only a compiled kernel's launcher needs C++ types."""
        raise InterpretedOnlyError(f"a launcher's C++ type for {ty}")

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a function that times one call in milliseconds; timings of the interpreter are not meaningful."""

        def benchmark(kernel_call: Callable[[], Any], *, quantiles: Sequence[float] = (), **_: Any) -> Any:
            begin = time.perf_counter()
            kernel_call()
            elapsed = (time.perf_counter() - begin) * 1e3
            return [elapsed] * len(quantiles) if quantiles else elapsed

        return benchmark
