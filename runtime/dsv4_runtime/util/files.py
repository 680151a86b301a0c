"""Files: atomic replacement, safe opening, the bounded log of a process, counters in shared memory."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
import struct
import sys
import time
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path


def replace_file(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Replace `path` as a whole: readers, and a machine after a power loss, find the old text or the new one. The file
    has the permissions `mode` from its first byte on.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power loss, if its file system supports that.

    Raises:
        OSError: it is not there.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """Open a regular file and return its descriptor; a FIFO, which would block, and a device are refused. If `follow`,
    the last part of `path` may be a symbolic link.

    Raises:
        OSError: there is none.
    """
    links = 0 if follow else os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | links, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link; put the file itself there", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


LOG_BYTES = 32 << 20
"""Limit of a log; the same amount of earlier lines is kept as `<name>.1`."""


class _Bounded(RotatingFileHandler):
    """Redirects standard output and error too, because fatal errors bypass `logging`."""

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        for inherited in (sys.stdout, sys.stderr):
            inherited.flush()
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
        return stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line. Unlike the base class, format it once, and call `fstat` instead of `stat` twice."""
        try:
            line = self.format(record) + self.terminator
            if self.stream is None:
                self.stream = self._open()
            if os.fstat(self.stream.fileno()).st_size + len(line) > self.maxBytes:
                self.doRollover()
            self.stream.write(line)
            self.flush()
        except Exception:
            self.handleError(record)


def log_to(file: Path | None, form: str = "%(asctime)s %(message)s", limit: int = LOG_BYTES) -> None:
    """Write the log of this process to `file`, with times in UTC; None: to standard error.

    At `limit` bytes the file is moved to `<name>.1`, over the previous one. `form` is a format of `logging.Formatter`.

    Raises:
        OSError: the file cannot be written.
    """
    logging.Formatter.converter = time.gmtime
    handler = (
        logging.StreamHandler(sys.stderr)
        if file is None
        else _Bounded(file, maxBytes=limit, backupCount=1, encoding="utf-8", errors="backslashreplace")
    )
    logging.basicConfig(level=logging.INFO, format=form, handlers=[handler], force=True)


_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (shared memory's place)
_PREFIX = "dsv4-ledger"
_COUNT = struct.Struct("=Q")


class LedgerWriter:
    """Number of collective operations that an engine worker has begun, shared with its agent through shared memory.

    In a hang all ranks but one wait inside a collective that this one has not begun: the lowest count identifies it.
    The worker's side is a patch of `vllm_plugin`; it counts in a file of eight bytes with its process id in the name.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._path = _ledger_path(os.getpid() if pid is None else pid)
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


def read_ledger(pid: int) -> LedgerReader | None:
    """Return worker `pid`'s ledger, or None, and remove the file's name, so that it exists only while it is open."""
    path = _ledger_path(pid)
    try:
        with path.open("rb") as file:
            reader = LedgerReader(mmap.mmap(file.fileno(), _COUNT.size, prot=mmap.PROT_READ))
        path.unlink(missing_ok=True)
    except (OSError, ValueError):
        return None
    return reader


def _ledger_path(pid: int) -> Path:
    return _SHARED_MEMORY / f"{_PREFIX}.{pid}"
