"""Entry point `triton.backends`: a backend for machines without a GPU, where kernels run interpreted.

Triton asks every backend whether its driver is active and wants exactly one. Without a GPU there is none, so even code
that only ever runs under `TRITON_INTERPRET=1` fails when it asks for the device; and vLLM's CPU build disables Triton
when no backend is called `cpu`. This one compiles nothing. It is active only under `TRITON_INTERPRET=1` and only where
CUDA is not.
"""


class InterpretedOnlyError(RuntimeError):
    """Triton wanted to compile a kernel for the CPU, where kernels are only interpreted."""

    def __init__(self, wanted: str) -> None:
        remedy = "set TRITON_INTERPRET=1 before importing triton"
        super().__init__(f"{wanted}: kernels are interpreted on the CPU, never compiled; {remedy}")
