"""A process without a free file descriptor."""

from __future__ import annotations

import contextlib
import gc
import resource
from collections.abc import Iterator

_STREAMS = 3


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing within the block: every new descriptor would exceed its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Objects of earlier tests would close descriptors; pytest reports some, which imports a module and so opens a file.
    gc.disable()
    # Only numbers of the standard streams are allowed, so that one which is closed meanwhile cannot be taken again.
    resource.setrlimit(resource.RLIMIT_NOFILE, (_STREAMS, hard))
    try:
        yield
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
