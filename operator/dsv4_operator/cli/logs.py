"""`dsv4 logs` on this machine: the files that the members and the loop write."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli.errors import CommandError, ExitCode, bad_input
from dsv4_operator.cli.log_lines import LogComponent, LogOptions, LogOrigin, show_line, shown_text

POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class LogFile:
    """One log file and who writes it."""

    path: Path
    origin: LogOrigin


def files(state: DeploymentState, request: LogOptions) -> list[LogFile]:
    """Return the log files that were asked for and exist: the latest incarnation's, and the loop's only by its name."""
    if request.component is LogComponent.LOOP:
        return [LogFile(state.log, LogOrigin(None, request.component))] if state.log.exists() else []
    groups = [group for group in state.groups() if state.incarnations(group)]
    found = [
        LogFile(member / f"{component}.log", LogOrigin(rank, component, group if len(groups) > 1 else None))
        for group in groups
        for rank, member in _members(state, group)
        if request.rank in (None, rank)
        for component in request.components
    ]
    return [file for file in found if file.path.exists()]


def _members(state: DeploymentState, group: int) -> list[tuple[int, Path]]:
    """Return the ranks of a group's latest incarnation, with where their files are."""
    numbers = state.incarnations(group)
    if not numbers:
        return []
    names = (path.name[1:] for path in state.incarnation(numbers[-1], group).glob("m*"))
    return [
        (rank, state.member(numbers[-1], rank, group)) for rank in sorted(int(one) for one in names if one.isdigit())
    ]


class LineReader:
    """Reads whole lines from a file that grows."""

    def __init__(self, source: LogFile) -> None:
        self.source = source
        self._file: BinaryIO = source.path.open("rb")
        self._rest = b""

    def _moved(self) -> bool:
        """Tell whether another file has this one's name now, because this one grew too long."""
        try:
            return not os.path.samestat(self.source.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def lines(self, *, last: int | None = None, final: bool = False) -> list[str]:
        """Return what came since the last time, at most `last` lines; with `final` also a line that has no end yet."""
        return list(deque(self._read(final), last))

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def _read(self, final: bool) -> Iterator[str]:
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            # It was cut, as the agent does with logs that grow too long; what is there now is new.
            self._file.seek(0)
            self._rest = b""
        # Asked before it is read to its end, so that nothing written before the move is missed.
        moved = self._moved()
        yield from self._read_on(final)
        if moved:
            self._file.close()
            self._file = self.source.path.open("rb")
            yield from self._read_on(final)

    def _read_on(self, final: bool) -> Iterator[str]:
        while chunk := self._file.read(1 << 20):
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            for line in whole:
                yield shown_text(line)
        if final and self._rest:
            yield shown_text(self._rest)
            self._rest = b""


def show(state: DeploymentState, request: LogOptions, *, wait: Callable[[float], None] = time.sleep) -> ExitCode:
    """Print what there is; with `follow` go on, also into the next incarnation, until the deployment has ended."""
    found = files(state, request)
    if not found and not (request.follow and state.holder() is not None):
        raise _nothing(state, request)
    readers: dict[Path, LineReader] = {}
    try:
        tail = request.tail
        while True:
            # Looked at before the files: what is written before the end is then still read.
            running = state.holder() is not None
            found = files(state, request)
            _drop_replaced(readers, found)
            final = not (request.follow and running)
            for source in found:
                new = source.path not in readers
                if new:
                    readers[source.path] = LineReader(source)
                for line in readers[source.path].lines(last=tail if new else None, final=final):
                    show_line(source.origin, line, request)
            # Only for what was there at the start; a file that appears later is new from its first line.
            tail = None
            if final:
                return ExitCode.OK
            wait(POLL_SECONDS)
    finally:
        for reader in readers.values():
            reader.close()


def _drop_replaced(readers: dict[Path, LineReader], found: list[LogFile]) -> None:
    kept = {source.path for source in found}
    for path in [path for path in readers if path not in kept]:
        readers.pop(path).close()


def _nothing(state: DeploymentState, request: LogOptions) -> CommandError:
    if any(state.incarnations(group) for group in state.groups()):
        ranks = sorted({str(rank) for group in state.groups() for rank, _ in _members(state, group)})
        what = f"component {request.component}" if request.rank is None else f"rank {request.rank}"
        return bad_input(f"{state.name!r} has no logs of {what}; its ranks are {', '.join(ranks) or 'not started yet'}")
    if state.holder() is not None:
        return bad_input(f"{state.name!r} has started no member yet; see `dsv4 logs --component loop`")
    left = f"; what failed members left lies in {state.evidence()}" if state.evidence().exists() else ""
    return bad_input(f"{state.name!r} is not running, and its members' logs went with them{left}")
