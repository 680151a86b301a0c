"""The growing end of a file: written through the page cache or past it, and hashed beside that."""

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
    """Keeps all streams together to `rate` bytes a second; None: no limit."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, count: int) -> None:
        """Wait until `count` bytes more are allowed."""
        if self._rate is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic() - 0.1) + count / self._rate
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


class Meter:
    """Counts bytes; the rate is that of the last seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self.total = 0
        """Bytes that came over the network, or from the shared directory."""

    def add(self, count: int) -> None:
        """Add `count` bytes that came."""
        with self._lock:
            self.total += count

    def rate(self) -> float:
        """Return the bytes a second."""
        now = time.monotonic()
        with self._lock:
            self._marks.append((now, self.total))
            while len(self._marks) > 2 and now - self._marks[0][0] > _WINDOW_SECONDS:
                self._marks.popleft()
            then, before = self._marks[0]
            return (self.total - before) / max(now - then, 1e-3)


def human(count: float) -> str:
    """Return bytes as people write them: `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


BLOCK_BYTES = 11 << 16
"""Received, written and hashed at once. A process that is killed loses what has come of one, and what the network has
delivered besides, which together is less than 1 MiB; smaller blocks cost more (docs/weights.md)."""

ALIGN_BYTES = 4096
"""Multiple that offset, length and memory of a direct write must be: the disk's block, at most a page (open(2))."""

# One that bytes come into, one that is hashed, and one between them.
_BLOCKS = 3
_WRITEBACK_BYTES = 4 << 20


class HashingWriter:
    """Appends to a file, and hashes what it appends. Whoever is done with it closes it; the descriptor stays open.

    Bytes are received straight into the memory that they are written from and hashed in: `room`, then `add`. A thread
    hashes a block while the next ones come and are written, because SHA-256 takes as long as all the rest together;
    Python's lock is free meanwhile.

    Past the page cache, memory that devices share with it stays theirs, and the processor has a little less to do.
    Where a file system cannot do that, it goes through the page cache.
    """

    def __init__(
        self, descriptor: int, size: int, hashed: Callable[[memoryview], object], *, direct: bool = False
    ) -> None:
        """Args:
        descriptor: of the file, open to write.
        size: bytes that it has. Past the page cache goes what follows a multiple of `ALIGN_BYTES`.
        hashed: called with all bytes that are added, in their order, from another thread.
        direct: whether to write past the page cache.
        """
        self._descriptor = descriptor
        self._written = size
        self._begun = size
        self._hashed = hashed
        self._direct = direct and self._set_direct(True)
        # A mapping begins with a page, which memory of any other kind need not.
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
        """Return the bytes of the file, with those that are not written yet."""
        return self._written + self._filled

    @property
    def room(self) -> memoryview:
        """Return the memory where the next bytes belong; never empty."""
        return self._block[self._filled :]

    def add(self, count: int) -> None:
        """Note that the first `count` bytes of `room` have come.

        Raises:
            OSError: the disk is full, or does not take it.
        """
        self._filled += count
        if self._filled == BLOCK_BYTES:
            self._flush()
            # The thread gives a block back after a millisecond of SHA-256. Blocks are mapped when they are needed: most
            # files of a checkpoint are smaller than one.
            self._block = self._free.get() or memoryview(mmap.mmap(-1, BLOCK_BYTES))

    def close(self, *, keep: bool = True) -> None:
        """Write what is left, or forget it if it is not to be kept, and wait until all that was written is hashed.

        Raises:
            OSError: as `add`.
        """
        try:
            if keep and self._filled:
                self._flush()
            self._filled = 0
        finally:
            self._full.put((self._block, 0))
            self._thread.join()

    def _flush(self) -> None:
        """Write the block and have it hashed, at the same time."""
        count, self._filled = self._filled, 0
        self._full.put((self._block, count))
        # What a full disk did not take has no place any more; what it took is right as far as it goes.
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
        """Write all of `left`; a disk that becomes full takes only a part of it."""
        while left:
            try:
                count = os.pwrite(self._descriptor, left, self._written)
            except OSError as error:
                # The file's end is no whole page; what a full disk took may be none either; and not every file system
                # says beforehand that it cannot.
                if error.errno != errno.EINVAL or not self._set_direct(False):
                    raise
                self._direct = False
                continue
            self._written += count
            left = left[count:]

    def _write_back(self) -> None:
        if self._written - self._begun >= _WRITEBACK_BYTES:
            # Linux starts to write these pages out, and keeps them while it does: so the disk works beside the network,
            # and the sync at the file's end has little left to wait for.
            os.posix_fadvise(self._descriptor, self._begun, self._written - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = self._written

    def _set_direct(self, wanted: bool) -> bool:
        """Change how the file is written; whether it was changed."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        asked = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
        if asked != flags:
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, asked)
                return True
        return False
