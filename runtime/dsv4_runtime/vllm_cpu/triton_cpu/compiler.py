"""Compiler of the interpreter backend: required by Triton, without stages."""

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget

from dsv4_runtime.vllm_cpu.triton_cpu import InterpretedOnlyError


class CPUBackend(BaseBackend):  # type: ignore[misc]  # Triton ships no types
    """Refuses to compile; not called under `TRITON_INTERPRET=1`."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "dsv4-interpreter"

    def parse_options(self, options: dict[str, Any]) -> Any:
        """Refuse, see `add_stages`."""
        raise InterpretedOnlyError("compiler options")

    def add_stages(self, stages: dict[str, Any], options: object) -> None:
        """Refuse: there is no code generator for the CPU."""
        raise InterpretedOnlyError("compiler stages")

    def load_dialects(self, context: Any) -> None:
        """Load nothing."""

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
