"""A kernel with an illegal address, for `patch_faults`; imported only when one is ordered, since it needs Triton."""

import triton
import triton.language as tl

_NOBODYS = 0x7FFF_F000_0000


@triton.jit
def _write(address):  # type: ignore[no-untyped-def]
    tl.store(address.to(tl.pointer_type(tl.float32)), 1.0)


def launch() -> None:
    """Launch the kernel; the CUDA context is lost from then on, and whoever synchronises next is told."""
    _write[(1,)](_NOBODYS)
