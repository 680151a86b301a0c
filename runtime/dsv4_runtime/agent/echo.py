"""Copies the logs of Ray and vLLM to stdout with a prefix (`[vllm rank 0] `), so that `kubectl logs` shows them.

The children write files, which the agent's own readers follow (`engine.logs`); nothing reads the copy. A thread follows
the files on its own, so the decisions never wait for stdout. While stdout is not read, the thread waits; then it skips
to the end of the logs and prints the number of skipped lines. Text of clients and secrets are left out, because
clusters collect the output of containers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from dsv4_runtime.contract import Phase
from dsv4_runtime.util.log_lines import ServerLogFilter

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
# Bounds the processor time for a log that grows without a pause: 64 KiB in 50 ms.
_READ_BYTES = 1 << 16
_PAUSE_SECONDS = 0.05
_BEHIND_BYTES = 4 << 20
"""Unread bytes of a log from which on lines are skipped."""
_LINE_BYTES = 4096
_CLOSE_SECONDS = 1.0
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,16}m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_STARTING = frozenset(
    {Phase.PREFLIGHT, Phase.STAGING, Phase.JOINING, Phase.LOADING, Phase.WARMING, Phase.RESTARTING},
)
"""Phases in which no client can write into the log of vLLM."""


class LogEcho:
    """Copies the logs of one member while it runs."""

    def __init__(self, directory: Path, rank: int, phase: Callable[[], Phase], output: int = 1) -> None:
        """Args:
        directory: of the member's logs, which need not exist yet.
        rank: rank of the member.
        phase: returns the member's present phase; called in a thread.
        output: file descriptor.
        """
        self._logs = (
            _Log(directory / "ray.log", f"[ray rank {rank}] ", lambda: False),
            _Log(directory / "vllm.log", f"[vllm rank {rank}] ", lambda: phase() not in _STARTING),
        )
        self._output = output
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="echo", daemon=True)

    def __enter__(self) -> LogEcho:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Copy the last lines, within a second."""
        self._stop.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while True:
                stopping = self._stop.is_set()
                lines = [line for log in self._logs for line in log.read()]
                self._write("".join(f"{line}\n" for line in lines).encode(errors="replace"))
                if not any(log.behind for log in self._logs):
                    if stopping:
                        return
                    self._stop.wait(_POLL_SECONDS)
                elif not stopping:
                    time.sleep(_PAUSE_SECONDS)
        except Exception:
            # The files remain, and the member does not depend on the copy.
            _log.exception("the logs of Ray and vLLM are no longer copied to stdout")
        finally:
            for log in self._logs:
                log.close()

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._output, data) :]
            except BlockingIOError:
                # Another process made the pipe non-blocking.
                time.sleep(_PAUSE_SECONDS)


class _Log:
    """One growing log file."""

    def __init__(self, path: Path, prefix: str, serving: Callable[[], bool]) -> None:
        self._path, self._prefix, self._serving = path, prefix, serving
        self._file: BinaryIO | None = None
        self._filter = ServerLogFilter()
        self._rest = b""
        self._cut = False
        """Whether the beginning of the present line was printed, and its rest is discarded."""

    @property
    def behind(self) -> bool:
        """Return whether there is unread data."""
        return self._unread() > 0

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _unread(self) -> int:
        return 0 if self._file is None else os.fstat(self._file.fileno()).st_size - self._file.tell()

    def read(self) -> list[str]:
        """Return new lines with the prefix, at most 64 KiB; before them the number of skipped lines."""
        if self._file is None:
            with contextlib.suppress(OSError):
                self._file = self._path.open("rb")
        if self._file is None:
            return []
        if self._unread() < 0:
            # The file was truncated (`engine.logs.bound`); its content is new.
            self._file.seek(0)
            self._rest, self._cut = b"", False
        skipped = self._skip(self._file)
        data = self._file.read(_READ_BYTES)
        # Afterwards: text of clients is only written after the phase has changed.
        serving = self._serving()
        found = (
            [f"{skipped} lines are skipped, because they were written faster than stdout is read"] if skipped else []
        )
        found += [line for raw in self._pieces(data) if (line := self._clean(raw, serving))]
        return [self._prefix + line for line in found]

    def _skip(self, file: BinaryIO) -> int:
        """Skip to the last lines of a log that is far ahead; return the number of skipped lines."""
        skipped = 0
        if self._unread() > _BEHIND_BYTES:
            while (ahead := self._unread() - _READ_BYTES) > 0:
                skipped += file.read(min(ahead, _READ_BYTES)).count(b"\n")
            # The position is within a line, perhaps of an engine that served.
            self._rest, self._cut = b"", True
            self._filter.distrust()
        return skipped

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that `data` ends, and the beginning of a line that is too long."""
        if self._cut:
            _, end, data = data.partition(b"\n")
            self._cut = not end
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from lines
        if len(self._rest) > _LINE_BYTES and not self._cut:
            # A progress bar rewrites its line after carriage returns.
            self._rest = self._rest[max(0, self._rest.rfind(b"\r")) :]
            if len(self._rest) > _LINE_BYTES:
                yield self._rest
                self._rest, self._cut = b"", True

    def _clean(self, raw: bytes, serving: bool) -> str | None:
        """Return a line without client text, colours and control characters; None if nothing remains."""
        raw = raw.removesuffix(b"\r")
        # Behind a carriage return, text of clients may imitate another line.
        shown = raw.partition(b"\r")[0] if serving or self._filter.strict else raw.rpartition(b"\r")[2]
        line = _COLOUR.sub("", shown.decode(errors="replace")).rstrip()
        kept = self._filter.clean(line, serving=serving) if line else None
        return None if kept is None else _CONTROL.sub("\N{REPLACEMENT CHARACTER}", kept[:_LINE_BYTES])


@contextlib.contextmanager
def exit_message(file: Path | None) -> Iterator[None]:
    """Keep the reason of an exit in `file`, a container's termination message.

    With an empty file, Kubernetes would take the end of the container's log, to which vLLM's log was copied.
    """

    def keep(text: str) -> None:
        if file is not None:
            with contextlib.suppress(OSError):
                file.write_text(f"{text}\n")

    keep("")
    try:
        yield
    except SystemExit as error:
        keep(error.code if isinstance(error.code, str) else "")
        raise
    except BaseException as error:
        keep(f"{type(error).__name__}: {error}")
        raise
