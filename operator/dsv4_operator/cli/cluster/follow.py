"""Logs of pods as they are written, from one incarnation to the next."""

from __future__ import annotations

import os
import selectors
import subprocess
import tempfile
import time
from typing import Self

from dsv4_operator.cli.cluster.kubectl import END_SECONDS, Kubectl, end, first_line
from dsv4_operator.cli.cluster.pod_logs import PodLog, pod_logs
from dsv4_operator.cli.cluster.pods import member_pods
from dsv4_operator.cli.log_lines import LogComponent, LogOptions, LogOrigin, show_line, shown_text
from dsv4_operator.cli.output import note

_CHUNK = 1 << 16

LogKey = tuple[str, LogComponent]
"""A pod's name, and which of its logs."""


class _LogStream:
    """One log that is being followed by a `kubectl`."""

    def __init__(self, kubectl: Kubectl, log: PodLog, tail: int | None) -> None:
        self.origin: LogOrigin = log.origin
        self.told = False
        """Whether it has brought anything."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        command = log.command(tail, follow=True)
        self._process = kubectl.start(*command, stdout=subprocess.PIPE, stderr=self._errors)
        self._rest = b""

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something, or the end."""
        assert self._process.stdout is not None  # noqa: S101
        return self._process.stdout.fileno()

    def lines(self) -> list[bytes] | None:
        """Return what has come; None at the end."""
        chunk = os.read(self.fileno(), _CHUNK)
        self.told |= bool(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if chunk:
            return lines
        # The last line has no end.
        lines, self._rest = ([self._rest] if self._rest else []), b""
        return lines or None

    def reason(self) -> str | None:
        """Return, after the end, why it ended, if that was an error."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        self._errors.seek(0)
        return first_line(self._errors.read(_CHUNK).decode(errors="replace")) if code else None

    def close(self) -> None:
        """End it."""
        end(self._process)
        assert self._process.stdout is not None  # noqa: S101
        self._process.stdout.close()
        self._errors.close()


class Follower:
    """Follows the logs of the latest incarnation, whichever that is, while it is entered."""

    def __init__(self, kubectl: Kubectl, name: str, request: LogOptions, *, grouped: bool) -> None:
        self._kubectl, self._name, self._request, self._grouped = kubectl, name, request, grouped
        self._selector = selectors.DefaultSelector()
        self._streams: dict[LogKey, _LogStream] = {}
        self._known: set[LogKey] = set()
        self._hopeless: set[LogKey] = set()
        """Those that brought an error and nothing else; to say so once is enough."""
        self._tail = request.tail

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._streams):
            self._drop(key)
        self._selector.close()

    def look(self) -> bool:
        """Begin with every log that is new, and again with those that broke off; False if there is no pod."""
        pods = member_pods(self._kubectl, self._name)
        for pod in pods:
            for log in pod_logs(pod, self._request, grouped=self._grouped):
                key = (pod.name, log.origin.component)
                if key not in self._known:
                    self._start(key, log, self._tail)
                elif key not in self._streams and key not in self._hopeless and pod.running:
                    # What came in between is lost to a follower; `logs` without `-f` has it.
                    self._start(key, log, 0)
        # Only for what was there at the start; a pod that appears later is new from its first line.
        self._tail = None
        return bool(pods)

    def read(self, seconds: float) -> None:
        """Print what comes within `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not self._streams:
                time.sleep(left)
                return
            for ready, _ in self._selector.select(left):
                self._print(ready.data)

    def _print(self, key: LogKey) -> None:
        stream = self._streams[key]
        lines = stream.lines()
        for line in lines or ():
            show_line(stream.origin, shown_text(line), self._request)
        if lines is None:
            if reason := stream.reason():
                note(f"{stream.origin.label}: {reason}")
                if not stream.told:
                    self._hopeless.add(key)
            self._drop(key)

    def _start(self, key: LogKey, log: PodLog, tail: int | None) -> None:
        stream = _LogStream(self._kubectl, log, tail)
        self._streams[key] = stream
        self._known.add(key)
        self._selector.register(stream, selectors.EVENT_READ, key)

    def _drop(self, key: LogKey) -> None:
        stream = self._streams.pop(key)
        self._selector.unregister(stream)
        stream.close()
