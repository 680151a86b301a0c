"""Files: atomic replacement, safe opening, and the bounded log of a process."""

from __future__ import annotations

import errno
import logging
import os
import stat
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
