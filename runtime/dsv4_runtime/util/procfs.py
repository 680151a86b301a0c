"""Processes: the table from /proc, read once for all uses, and the liveness probe of child processes.

A scan takes a millisecond and runs several times a second. The probe is an empty line over a socket pair that is the
child's stdin, which the child's reader thread answers with one. An answer proves that the process runs, whatever state
the kernel shows for it: a frozen process of a control group sleeps or waits for a device. A missing answer proves
nothing while the process works, because a C extension may hold the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dsv4_runtime.util.files import own_shortage

_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STOPPED = frozenset("Tt")
"""States of a stopped process: by a signal, and by a debugger."""
FROZEN = "T"
"""State in which a frozen process is reported."""
_FREEZERS = frozenset({b"do_freezer_trap", b"get_signal", b"__refrigerator"})
"""Kernel functions in which frozen processes wait: of control groups of version 2, where it may be inlined into its
caller, and of version 1."""
WORK_SHARE = 0.1
"""Share of a core from which processor time counts as work: waiting processes with timers use less."""
_WORK_BYTES = 64 << 10
_GROWTH_BYTES = 1 << 20


def become_reaper() -> bool:
    """Become the parent of orphans below this process, as process 1 is anyway; return whether that is possible."""
    return os.getpid() == 1 or ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A process as `/proc/<pid>/stat` shows it (proc(5))."""

    pid: int
    parent: int
    state: str
    cpu_seconds: float
    threads: int
    memory: int
    """Resident bytes."""
    ended_seconds: float
    """Processor time of the processes below it that ended and were waited for."""

    @property
    def ended(self) -> bool:
        """Return whether no thread of it runs.

        Linux also calls a process a zombie whose first thread has ended while others still hold its ports and memory;
        its parent cannot collect it yet (wait(2)).
        """
        return self.state in "ZX" and self.threads <= 1


def read_file(pid: int, name: str) -> bytes | None:
    """Return the file `name` of a process in /proc; None if the process has ended, or denies it.

    Raises:
        OSError: this process lacks the resources to read it, so nothing is known about the other one. The other
            functions of this module raise it too.
    """
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError as error:
        if own_shortage(error) is not None:
            raise
        return None


def entry(pid: int) -> Entry | None:
    """Return the process; None if there is none of that number."""
    text = read_file(pid, "stat")
    if text is None:
        return None
    # The name in parentheses may hold anything, parentheses and spaces too.
    fields = text[text.rindex(b")") + 2 :].split(None, 22)
    own, ended = ((int(fields[at]) + int(fields[at + 1])) / _TICKS for at in (11, 13))
    return Entry(pid, int(fields[1]), fields[0].decode(), own, int(fields[17]), int(fields[21]) * _PAGE_BYTES, ended)


def is_frozen(pid: int) -> bool:
    """Return whether the freezer of a control group keeps a process from running, which looks as if it slept."""
    return read_file(pid, "wchan") in _FREEZERS


def command_of(pid: int) -> list[str]:
    """Return a process's command line; empty if it has ended."""
    text = read_file(pid, "cmdline")
    return [] if text is None else text.decode(errors="replace").rstrip("\0").split("\0")


class Work(NamedTuple):
    """Sums over some processes, of which differences show work."""

    time: float
    """Monotonic time of the reading."""
    pids: frozenset[int]
    waiting: frozenset[int]
    """Those of them that run, or wait for a processor."""
    cpu_seconds: float
    memory: int
    storage: int
    """Bytes read from and written to disks."""

    @classmethod
    def of(cls, entries: Iterable[Entry], now: float) -> Work:
        """Return the work of `entries`, which were just read."""
        known = [entry for entry in entries if not entry.ended]
        return cls(
            now,
            frozenset(entry.pid for entry in known),
            frozenset(entry.pid for entry in known if entry.state == "R"),
            sum(entry.cpu_seconds for entry in known),
            sum(entry.memory for entry in known),
            sum(storage_bytes(entry.pid) for entry in known),
        )

    def beyond(self, before: Work) -> bool:
        """Return whether the processes worked since `before`, or are kept from it by others on the same processors.

        A process that started or ended is work too, such as a compiler's.
        """
        return (
            self.grew(before)
            or bool(self.waiting & before.waiting)
            or self.cpu_seconds - before.cpu_seconds >= WORK_SHARE * (self.time - before.time)
        )

    def grew(self, before: Work) -> bool:
        """Return whether that work shows otherwise than by processor time, which a process can also spend in vain."""
        return (
            self.pids != before.pids
            or self.storage - before.storage >= _WORK_BYTES
            or abs(self.memory - before.memory) >= _GROWTH_BYTES
        )


def meminfo(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """Return the values of `/proc/meminfo` in bytes."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) == 3}


def storage_bytes(pid: int) -> int:
    """Return the bytes that a process has read from and written to disks; 0 if they cannot be read."""
    try:
        counts = dict(line.split(b": ", 1) for line in (read_file(pid, "io") or b"").splitlines())
        return int(counts[b"read_bytes"]) + int(counts[b"write_bytes"])
    except (KeyError, ValueError):
        return 0


def below(root: int) -> dict[int, Entry]:
    """Return every process below `root`, by process id; zombies too."""
    children: dict[int, list[Entry]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := entry(int(name))) is not None:
            children[found.parent].append(found)
    result: dict[int, Entry] = {}
    ahead = [root]
    while ahead:
        for child in children[ahead.pop()]:
            result[child.pid] = child
            ahead.append(child.pid)
    return result


def trees(table: Mapping[int, Entry], roots: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Map each root to itself and the processes below it, up to (and without) other roots."""
    own = {root: root for root in roots}

    def root_of(pid: int) -> int | None:
        if pid not in own:
            found = table.get(pid)
            above = root_of(found.parent) if found is not None else None
            if above is None:
                return None
            own[pid] = above
        return own[pid]

    result: dict[int, list[int]] = {root: [] for root in own}
    for pid in table:
        if (root := root_of(pid)) is not None:
            result[root].append(pid)
    return {root: tuple(pids) for root, pids in result.items()}


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
        """Return whether the child `pid` answers within `seconds`, or works; a stopped one is not alive.

        A child that cannot be observed, for example without a free file descriptor, counts as alive.
        """
        try:
            return await self._alive(pid, seconds)
        except OSError:
            return True

    async def _alive(self, pid: int, seconds: float) -> bool:
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


def input_lines(descriptor: int) -> Iterator[bytes]:
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
