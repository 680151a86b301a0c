"""Files: atomic replacement, safe opening, logs as text or JSON, counters in shared memory, files below /sys, and the
limit of open files."""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import re
import resource
import stat
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from dsv4_runtime.util import LOG_FORMAT

LOOP_DUE = struct.Struct("=d")
"""Content of the memory file that a control loop without Kubernetes shares with its gateways: the time from which on a
successful reconcile is overdue, in seconds of the machine's monotonic clock."""


def raise_file_limit() -> None:
    """Raise this process' soft limit of open files to the hard one.

    The soft limit of containers and services is usually 1024, because `select` cannot handle more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_NETWORK = frozenset(
    {
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE),
        *(errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH),
    }
)
"""Errors that are no consequence of a shortage."""


def own_shortage(error: BaseException | None) -> OSError | None:
    """Return the error, `error` or one that caused it, by which this process lacked a file descriptor or memory of the
    kernel; None if there is none.

    A request or a reading of /proc that fails for this reason proves nothing about the process at the other end.
    """
    unclear = False
    while error is not None:
        if isinstance(error, OSError):
            if error.errno in _SHORTAGES:
                return error
            unclear |= not isinstance(error, TimeoutError) and error.errno not in _NETWORK
        error = error.__cause__ or error.__context__
    return _present_shortage() if unclear else None


def _present_shortage() -> OSError | None:
    """Return the error of opening a file now, if it is a shortage.

    The resolution of a name fails with any number then: with libnss-mdns, which Ubuntu installs, with that of an
    earlier call.
    """
    try:
        os.close(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error if error.errno in _SHORTAGES else None
    return None


def replace_file(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Replace `path` as a whole: readers, and a machine after a power loss, find the old text or the new one. The file
    has the permissions `mode` from its first byte on.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        # On a full disk it would take the space that the next attempt needs.
        partial.unlink(missing_ok=True)
        raise
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


_LIMIT = 1 << 20
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


class SystemTree:
    """A machine's /sys, /proc and /dev, or a copy of them. Unreadable files count as missing; nothing raises."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def text(self, path: str) -> str | None:
        """Return the stripped content of a file; None if there is none.

        Reading fails with EINVAL for empty slots of a GID table and for the speed of a link that is down.
        """
        file = self._root / path
        try:
            # Only regular files: opening a FIFO would block.
            if not file.is_file():
                return None
            with file.open("rb") as stream:
                return stream.read(_LIMIT).decode(errors="replace").strip("\0 \t\r\n")
        except (OSError, ValueError):
            return None

    def data(self, path: str) -> bytes:
        """Return the content of a regular file; empty if it cannot be read."""
        try:
            with (self._root / path).open("rb") as stream:
                return stream.read(_LIMIT)
        except (OSError, ValueError):
            return b""

    def parents(self, path: str) -> list[str]:
        """Return the names of the directories above the target of a link, the nearest first; empty if it is none."""
        try:
            return [parent.name for parent in (self._root / path).resolve(strict=True).parents]
        except (OSError, ValueError, RuntimeError):
            return []

    def number(self, path: str) -> float | None:
        """Return the first number of a file; None if there is none. `200 Gb/sec (4X HDR)` is 200."""
        return first_number(self.text(path))

    def names(self, path: str) -> list[str]:
        """Return the entries of a directory, numbers in numeric order; empty if there is none."""
        try:
            found = os.listdir(self._root / path)
        except (OSError, ValueError):
            return []
        return sorted(found, key=lambda name: (0, int(name), name) if _plain(name) else (1, 0, name))

    def target(self, path: str) -> str | None:
        """Return the last component of a link's target; None if it is no valid link."""
        try:
            return (self._root / path).resolve(strict=True).name
        except (OSError, ValueError, RuntimeError):
            return None

    def exists(self, path: str) -> bool:
        """Return whether the path exists."""
        try:
            return (self._root / path).exists()
        except (OSError, ValueError):
            return False


def first_number(text: str | None) -> float | None:
    """Return the first number of a text, within the range of sysfs values; None if there is none."""
    match = _NUMBER.search(text) if text else None
    return float(match[0]) if match and len(match[0]) <= 18 else None


def _plain(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10


LOG_FORMATS = ("text", "json")
LOG_FIELDS = ("namespace", "deployment", "group", "incarnation", "generation")
log_context: ContextVar[Mapping[str, object]] = ContextVar("log_context", default={})  # noqa: B039  (never changed)
"""Some of `LOG_FIELDS` for the lines of a task."""


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with all of `LOG_FIELDS`; null if a line is about none or about several.

    The fields of a record (`extra`) precede those of its task (`log_context`), and these those of the process.
    """

    def __init__(self, fields: Callable[[], Mapping[str, object]]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        seconds, milliseconds = time.gmtime(record.created), int(record.msecs)
        document: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', seconds)}.{milliseconds:03}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **dict.fromkeys(LOG_FIELDS),
            **self._fields(),
            **log_context.get(),
            **{name: getattr(record, name) for name in LOG_FIELDS if hasattr(record, name)},
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def is_json(chosen: str | None) -> bool:
    """Return whether logs are JSON by `chosen` or the variable `DSV4_LOG_FORMAT`."""
    return (chosen or os.environ.get(LOG_FORMAT)) == "json"


def format_logs(chosen: str | None, fields: Callable[[], Mapping[str, object]] = dict) -> None:
    """Write the log as JSON if `chosen` or the variable `DSV4_LOG_FORMAT` says so; `fields` are those of the process.

    Call it after the log is set up. A wrong value is no reason to stop: the log is text, and has a warning.
    """
    wanted = chosen or os.environ.get(LOG_FORMAT) or "text"
    if is_json(chosen):
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter(fields))
    elif wanted != "text":
        logging.getLogger("dsv4").warning("%s %r is not text or json; the log is text", LOG_FORMAT, wanted)


_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (shared memory's place)
_PREFIX = "dsv4-ledger"
_COUNT = struct.Struct("=Q")


class LedgerWriter:
    """Number of collective operations that an engine worker has begun, shared with its agent through shared memory.

    In a hang all ranks but one wait inside a collective that this one has not begun: the lowest count identifies it.
    The worker's side is a patch of `vllm_plugin`; it counts in a file of eight bytes with its process id in the name.
    """

    def __init__(self, pid: int | None = None) -> None:
        """Make the file.

        Raises:
            OSError: shared memory has no room for it, or another user's file is in its place.
        """
        path = _ledger_path(os.getpid() if pid is None else pid)
        self._count = 0
        # Every user of the machine can write there.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # Reserved now: in a full file system the first count would end the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, _COUNT.size)
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
