"""The driver half of the interpreter's backend: says which device there is (the CPU) and how to time on it."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from dsv4_runtime.vllm_plugin.triton_cpu import InterpretedOnlyError

_ARCH = 0  # no kernel is compiled for it


def _cuda_is_here() -> bool:
    import torch  # slow; asked only when the interpreter was asked for

    return bool(torch.cuda.is_available())


class CPUDriver(DriverBase):  # type: ignore[misc]  # Triton ships no types
    """Stands for the CPU; active under `TRITON_INTERPRET=1` where there is no CUDA device."""

    @classmethod
    def is_active(cls) -> bool:
        """Tell Triton whether to choose this driver."""
        return os.environ.get("TRITON_INTERPRET") == "1" and not _cuda_is_here()

    def get_current_target(self) -> GPUTarget:
        """Return a target that names the CPU; nothing is compiled for it."""
        return GPUTarget("cpu", _ARCH, 1)

    def get_active_torch_device(self) -> Any:
        """Return torch's CPU device."""
        import torch

        return torch.device("cpu")

    def get_current_device(self) -> int:
        """Return the only device's number."""
        return 0

    def set_current_device(self, device: int) -> None:
        """Accept the only device; there is nothing to switch."""

    def get_current_stream(self, device: int) -> int:
        """Return the default stream's number; the CPU has no streams."""
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Refuse: only a compiled kernel's launcher needs C++ types."""
        raise InterpretedOnlyError(f"a launcher's C++ type for {ty}")

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a function that times a kernel once, in milliseconds: interpreted timings carry no meaning."""

        def benchmark(kernel_call: Callable[[], Any], *, quantiles: Sequence[float] = (), **_: Any) -> Any:
            begin = time.perf_counter()
            kernel_call()
            elapsed = (time.perf_counter() - begin) * 1e3
            return [elapsed] * len(quantiles) if quantiles else elapsed

        return benchmark
