"""Entry point `triton.backends`: a backend for machines without a GPU, on which kernels run interpreted.

Triton queries the driver of every backend and requires exactly one active driver. Without a GPU there is none, so that
even code for `TRITON_INTERPRET=1` fails when it queries the device; and vLLM's CPU build disables Triton without a
backend named `cpu`. This backend compiles nothing. It is active only under `TRITON_INTERPRET=1` without CUDA.
"""


class InterpretedOnlyError(RuntimeError):
    """Triton requested the compilation of a kernel for the CPU, where kernels are only interpreted."""

    def __init__(self, wanted: str) -> None:
        remedy = "set TRITON_INTERPRET=1 before importing triton"
        super().__init__(f"{wanted}: kernels are interpreted on the CPU, never compiled; {remedy}")
