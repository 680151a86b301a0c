"""Liveness probe of child processes: lines over a socket pair that is the child's stdin.

The parent sends an empty line and the child's reader thread answers with one. An answer proves that the process runs,
whatever state the kernel shows for it: a frozen process of a control group sleeps or waits for a device. A missing
answer proves nothing while the process works, because a C extension may hold the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator

from dsv4_runtime.util.procfs import STOPPED, Work, entry

PROBE_SECONDS = 1.0
"""Interval of the probes."""
ANSWER_SECONDS = 2.0
"""A process that is not stopped and does not work either answers within this time."""
_READ_BYTES = 1 << 16


class ChildLine:
    """The parent's end."""

    def __init__(self) -> None:
        self._own, self.stdin = socket.socketpair()
        self._own.setblocking(False)

    def opened(self) -> None:
        """Close the child's end here; call it once the child has started."""
        self.stdin.close()

    def send(self, line: bytes) -> bool:
        """Send a line; return whether the child can receive it."""
        try:
            return self._own.send(line) == len(line)
        except OSError:
            return False

    def close(self) -> None:
        """Close the line. The child reads the end of its input."""
        self._own.close()

    async def answered(self, seconds: float) -> bool:
        """Send an empty line; return whether the child answers within `seconds`."""
        with contextlib.suppress(OSError):
            # An answer to an earlier line.
            self._own.recv(_READ_BYTES)
        if not self.send(b"\n"):
            return False
        try:
            async with asyncio.timeout(seconds):
                return bool(await asyncio.get_running_loop().sock_recv(self._own, _READ_BYTES))
        except (OSError, TimeoutError):
            return False

    async def alive(self, pid: int, seconds: float = ANSWER_SECONDS) -> bool:
        """Return whether the child `pid` answers within `seconds`, or works; a stopped one is not alive."""
        before = entry(pid)
        if before is None or before.ended or before.state in STOPPED:
            return False
        work = Work.of([before], time.monotonic())
        if await self.answered(seconds):
            return True
        after = entry(pid)
        if after is None or after.state in STOPPED:
            return False
        return Work.of([after], time.monotonic()).beyond(work)


def lines(descriptor: int) -> Iterator[bytes]:
    """Yield the lines that a child reads, and answer the empty ones, until the end of the input."""
    rest = b""
    while True:
        try:
            read = os.read(descriptor, _READ_BYTES)
        except OSError:
            return
        if not read:
            return
        *whole, rest = (rest + read).split(b"\n")
        for line in whole:
            if line:
                yield line
            else:
                # The input of a process that was started by hand cannot be written to.
                with contextlib.suppress(OSError):
                    os.write(descriptor, b"\n")
