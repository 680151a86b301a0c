"""Hashing file writer with or without the page cache, rate limiter and byte counter."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

_WINDOW_SECONDS = 5.0


class Limiter:
    """Limits all streams together to `rate` bytes per second; None: unlimited."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, count: int) -> None:
        """Wait until `count` more bytes are allowed."""
        if self._rate is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic() - 0.1) + count / self._rate
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


class Meter:
    """Byte counter with a rate over the last seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self.total = 0
        """Bytes received over the network or from the shared directory."""

    def add(self, count: int) -> None:
        """Count received bytes."""
        with self._lock:
            self.total += count

    def rate(self) -> float:
        """Return bytes per second."""
        now = time.monotonic()
        with self._lock:
            self._marks.append((now, self.total))
            while len(self._marks) > 2 and now - self._marks[0][0] > _WINDOW_SECONDS:
                self._marks.popleft()
            then, before = self._marks[0]
            return (self.total - before) / max(now - then, 1e-3)


def human(count: float) -> str:
    """Format bytes: `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


BLOCK_BYTES = 11 << 16
"""Unit of receiving, writing and hashing. A killed process loses up to one block and the network's buffers, together
less than 1 MiB; smaller blocks cost more (docs/weights.md)."""

ALIGN_BYTES = 4096
"""Alignment of offset, length and memory of direct writes: the disk's block, at most a page (open(2))."""

# One being received, one being hashed, and one between them.
_BLOCKS = 3
_WRITEBACK_BYTES = 4 << 20


class HashingWriter:
    """Appends to a file and hashes the appended bytes. `close` must be called; the descriptor stays open.

    Bytes are received directly into the buffer from which they are written and hashed: `room`, then `add`. A thread
    hashes one block while the next is received and written, because SHA-256 takes as long as all other steps; it
    releases the GIL.

    Direct writes keep unified memory free for the devices and need slightly less CPU time. On file systems without
    support the page cache is used.
    """

    def __init__(
        self, descriptor: int, size: int, hashed: Callable[[memoryview], object], *, direct: bool = False
    ) -> None:
        """Args:
        descriptor: file opened for writing.
        size: its present bytes. Direct writes start at a multiple of `ALIGN_BYTES`.
        hashed: called with all added bytes in order, from another thread.
        direct: whether to bypass the page cache.
        """
        self._descriptor = descriptor
        self._written = size
        self._begun = size
        self._hashed = hashed
        self._direct = direct and self._set_direct(True)
        # A mapping is page-aligned, other memory need not be.
        self._block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        self._filled = 0
        self._free: SimpleQueue[memoryview | None] = SimpleQueue()
        for _ in range(_BLOCKS - 1):
            self._free.put(None)
        self._full: SimpleQueue[tuple[memoryview, int]] = SimpleQueue()
        self._thread = threading.Thread(target=self._hash, name="hash", daemon=True)
        self._thread.start()

    @property
    def size(self) -> int:
        """Return the bytes of the file, including unwritten ones."""
        return self._written + self._filled

    @property
    def room(self) -> memoryview:
        """Return the buffer for the next bytes; never empty."""
        return self._block[self._filled :]

    def add(self, count: int) -> None:
        """Add the first `count` bytes of `room`; raise OSError if a write fails."""
        self._filled += count
        if self._filled == BLOCK_BYTES:
            self._flush()
            # The thread returns a block after a millisecond of SHA-256. Blocks are mapped on demand: most files are
            # smaller than one.
            self._block = self._free.get() or memoryview(mmap.mmap(-1, BLOCK_BYTES))

    def close(self, *, keep: bool = True) -> None:
        """Write the remaining bytes, or discard them unless `keep`, and wait until all written bytes are hashed.

        Raises:
            OSError: the write failed.
        """
        try:
            if keep and self._filled:
                self._flush()
            self._filled = 0
        finally:
            self._full.put((self._block, 0))
            self._thread.join()

    def _flush(self) -> None:
        """Write and hash the block concurrently."""
        count, self._filled = self._filled, 0
        self._full.put((self._block, count))
        # On a full disk, the written part is valid and the rest is lost.
        self._put(self._block[:count])
        if not self._direct:
            self._write_back()

    def _hash(self) -> None:
        while True:
            block, count = self._full.get()
            if not count:
                return
            self._hashed(block[:count])
            self._free.put(block)

    def _put(self, left: memoryview) -> None:
        """Write all of `left`; a disk that becomes full accepts a part."""
        while left:
            try:
                count = os.pwrite(self._descriptor, left, self._written)
            except OSError as error:
                # The end of the file is not page-aligned, nor is a partial write on a full disk; some file systems
                # report missing support only on write.
                if error.errno != errno.EINVAL or not self._set_direct(False):
                    raise
                self._direct = False
                continue
            self._written += count
            left = left[count:]

    def _write_back(self) -> None:
        if self._written - self._begun >= _WRITEBACK_BYTES:
            # Start writeback of these pages, which keeps the disk busy during the transfer and shortens the final sync.
            os.posix_fadvise(self._descriptor, self._begun, self._written - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = self._written

    def _set_direct(self, wanted: bool) -> bool:
        """Set or clear O_DIRECT; return whether the flag changed."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        asked = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
        if asked != flags:
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, asked)
                return True
        return False
