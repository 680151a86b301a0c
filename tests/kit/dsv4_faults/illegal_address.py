"""A kernel that writes to an illegal address; a module of its own because it needs Triton."""

import triton
import triton.language as tl

_UNMAPPED = 0x7FFF_F000_0000


@triton.jit
def _write(address):
    tl.store(address.to(tl.pointer_type(tl.float32)), 1.0)


def launch() -> None:
    """Launch the kernel. It destroys the CUDA context; the next synchronization raises the error."""
    _write[(1,)](_UNMAPPED)
