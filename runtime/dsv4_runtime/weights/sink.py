"""The growing end of a file, written through the page cache or past it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os

BLOCK_BYTES = 1 << 19
"""Written at once past the page cache; what of it has not come yet is lost when the process is killed."""

# What Linux asks of offset, length and memory of a direct write is the disk's block, at most a page (open(2)).
_ALIGN = 4096
_WRITEBACK_BYTES = 32 << 20


class Sink:
    """Appends to a file. Whoever is done with it closes it, which writes what is left; the descriptor stays open.

    Past the page cache, memory that devices share with it stays theirs, and the processor has a little less to do.
    Where a file system cannot do that, it goes through the page cache.
    """

    def __init__(self, descriptor: int, size: int, *, direct: bool) -> None:
        """Args:
        descriptor: of the file, open to read and write.
        size: bytes that it has.
        direct: whether to write past the page cache.
        """
        self._descriptor = descriptor
        self._written = size
        self._begun = size
        self._block: memoryview | None = None
        self._filled = 0
        if direct:
            # A mapping begins with a page, which memory of any other kind need not.
            block, tail = memoryview(mmap.mmap(-1, BLOCK_BYTES)), size % _ALIGN
            # An unfinished page is written again with what follows. It is read as it was written: not directly.
            os.preadv(descriptor, [block[:tail]], size - tail)
            if self._set_direct(True):
                self._block, self._written, self._filled = block, size - tail, tail

    @property
    def size(self) -> int:
        """Bytes of the file, with those that are not written yet."""
        return self._written + self._filled

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`.

        Raises:
            OSError: the disk is full, or does not take it.
        """
        left = memoryview(data)
        if self._block is None:
            self._put(left)
            self._write_back()
            return
        while left:
            count = min(len(left), BLOCK_BYTES - self._filled)
            self._block[self._filled : self._filled + count] = left[:count]
            self._filled += count
            left = left[count:]
            if self._filled == BLOCK_BYTES:
                self._filled = 0
                self._put(self._block)

    def close(self) -> None:
        """Write what is left; raises as `write` does."""
        if self._block is not None:
            block, self._block, self._filled = self._block[: self._filled], None, 0
            self._set_direct(False)
            self._put(block)

    def _put(self, left: memoryview) -> None:
        """Write all of `left`; a disk that becomes full takes only a part of it."""
        while left:
            try:
                count = os.pwrite(self._descriptor, left, self._written)
            except OSError as error:
                # Not every file system says beforehand that it cannot; and what a full disk took may have no round end.
                if error.errno != errno.EINVAL or not self._set_direct(False):
                    # What is written is right as far as it goes; the rest has no place any more.
                    self._block, self._filled = None, 0
                    raise
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
