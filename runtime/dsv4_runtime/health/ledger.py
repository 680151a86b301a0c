"""Number of collective operations that an engine worker has begun, shared with the agent through shared memory.

In a hang all ranks but one wait inside a collective that this one has not begun: the lowest count identifies it. The
worker's side is a patch of `vllm_plugin`; it counts in a file of eight bytes with its process id in the name.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

_DIRECTORY = Path("/dev/shm")  # noqa: S108  (shared memory's place)
_PREFIX = "dsv4-ledger"
_COUNT = struct.Struct("=Q")


class Writer:
    """The worker's side."""

    def __init__(self, pid: int | None = None) -> None:
        self._path = _path(os.getpid() if pid is None else pid)
        self._count = 0
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _COUNT.size)
            self._memory = mmap.mmap(descriptor, _COUNT.size)
        finally:
            os.close(descriptor)

    def begin(self) -> None:
        """Count one operation. Takes half a microsecond."""
        self._count += 1
        _COUNT.pack_into(self._memory, 0, self._count)


class LedgerReader:
    """The agent's side; it keeps the file open after the worker's end."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @property
    def count(self) -> int:
        """Return the number of operations begun so far."""
        return int(_COUNT.unpack_from(self._memory, 0)[0])

    def close(self) -> None:
        """Close the file."""
        self._memory.close()


def read(pid: int) -> LedgerReader | None:
    """Return worker `pid`'s ledger, or None, and remove the file's name, so that it exists only while it is open."""
    path = _path(pid)
    try:
        with path.open("rb") as file:
            reader = LedgerReader(mmap.mmap(file.fileno(), _COUNT.size, prot=mmap.PROT_READ))
        path.unlink(missing_ok=True)
    except (OSError, ValueError):
        return None
    return reader


def _path(pid: int) -> Path:
    return _DIRECTORY / f"{_PREFIX}.{pid}"
