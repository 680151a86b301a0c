"""A process without a free file descriptor."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing within the block: every new descriptor would exceed its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Objects of earlier tests would close descriptors; pytest reports some, which imports a module and so opens a file.
    gc.disable()
    # The kernel takes the lowest number that is free.
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
