"""Page cache management: read files ahead while memory permits, and drop them where the engine needs the memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dsv4_runtime.contract import PageCache

RESERVE_BYTES = 4 << 30
"""Memory reserved for other users of the page cache."""

FLOOR_BYTES = 8 << 30
"""Free memory below which files are dropped on unified memory: the driver's allocations fail before the kernel reclaims
cached pages for them."""

_BLOCK = 8 << 20
_AHEAD = 32 << 20
_REPORT_BYTES = 1 << 28
_REPORT_SECONDS = 1.0
_MEASURE_BYTES = 1 << 26


def meminfo(text: str) -> dict[str, int]:
    """Return `/proc/meminfo` in bytes."""
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) == 3}


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the available memory without swapping, within the limit of this container."""
    available = meminfo((proc / "meminfo").read_text()).get("MemAvailable", 0)
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
    if meminfo(Path("/proc/meminfo").read_text()).get("MemFree", FLOOR_BYTES) >= FLOOR_BYTES:
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
        report: called periodically with bytes read and seconds elapsed.
    """
    buffer = memoryview(bytearray(_BLOCK))
    begun = reported = time.monotonic()
    read, next_report = 0, _REPORT_BYTES
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
                if read >= next_report or now - reported >= _REPORT_SECONDS:
                    next_report, reported = read + _REPORT_BYTES, now
                    report(read, now - begun)
                    if available_bytes() < RESERVE_BYTES:
                        return read
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return read
