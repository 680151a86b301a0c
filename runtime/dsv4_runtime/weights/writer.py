"""Files and the page cache: hashing writer, rate limiter, byte counter; reads files ahead and drops them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

from dsv4_runtime.contract import PageCache
from dsv4_runtime.util.procfs import meminfo

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


RESERVE_BYTES = 4 << 30
"""Memory reserved for other users of the page cache."""

FLOOR_BYTES = 8 << 30
"""Free memory below which files are dropped on unified memory: the driver's allocations fail before the kernel reclaims
cached pages for them."""

_BLOCK = 8 << 20
_AHEAD = 32 << 20
_CHECK_BYTES = 1 << 28
_REPORT_SECONDS = 1.0
_MEASURE_BYTES = 1 << 26


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the available memory without swapping, within the limit of this container."""
    available = meminfo(proc / "meminfo").get("MemAvailable", 0)
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        available = min(available, limit - used + int(stat["inactive_file"]) + int(stat["active_file"]))
    return available


def read_ahead_limit(policy: PageCache, available: int, resident: int, reserve: int = RESERVE_BYTES) -> int:
    """Return the bytes of files that may be read ahead.

    Args:
        policy: whether devices share the memory.
        available: available memory.
        resident: memory of the engine; mostly on the devices unless they share the memory.
        reserve: memory to leave free.
    """
    taken = resident if policy is PageCache.UNIFIED else 0
    return max(0, available - taken - reserve)


def drop(paths: Sequence[Path]) -> None:
    """Drop files from the page cache except mapped pages. Needs no privileges."""
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def keep_free(folder: Path) -> bool:
    """Drop the checkpoint's files if free memory is below the floor; return whether it was."""
    if meminfo().get("MemFree", FLOOR_BYTES) >= FLOOR_BYTES:
        return False
    drop(sorted(folder.rglob("*.safetensors")))
    return True


def storage_bytes(proc: Path = Path("/proc")) -> int:
    """Return the bytes this process has read from storage; 0 if unknown.

    Includes network file systems, excludes the page cache.
    """
    try:
        rows = dict(line.split(": ") for line in (proc / "self/io").read_text().splitlines())
        return int(rows["read_bytes"])
    except (OSError, ValueError, KeyError):
        return 0


def disk_rate(stored: int, read: int, seconds: float) -> float | None:
    """Return the disk throughput in bytes per second; None if too little was read from the disk.

    Args:
        stored: bytes read from the disk; at least 64 MiB for a result.
        read: bytes read in total. If most came from memory, the time is not that of the disk.
        seconds: elapsed time.
    """
    return stored / seconds if stored >= max(_MEASURE_BYTES, read / 2) and seconds > 0 else None


def read_ahead(paths: Sequence[Path], limit: int, report: Callable[[int, float], None]) -> int:
    """Read files sequentially until `limit` bytes are read or memory runs low; return the bytes read.

    Uses buffered reads with kernel read-ahead, because O_DIRECT would bypass the page cache.

    Args:
        paths: files in the engine's load order.
        limit: bytes.
        report: called at most once a second with bytes read and seconds elapsed.
    """
    buffer = memoryview(bytearray(_BLOCK))
    begun = reported = time.monotonic()
    read, next_check = 0, _CHECK_BYTES
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            offset = 0
            while read < limit:
                os.posix_fadvise(descriptor, offset, _AHEAD, os.POSIX_FADV_WILLNEED)
                got = os.preadv(descriptor, [buffer[: min(_BLOCK, limit - read)]], offset)
                if not got:
                    break
                offset += got
                read += got
                now = time.monotonic()
                due = now - reported >= _REPORT_SECONDS
                if due:
                    reported = now
                    report(read, now - begun)
                if due or read >= next_check:
                    next_check = read + _CHECK_BYTES
                    if available_bytes() < RESERVE_BYTES:
                        return read
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return read
