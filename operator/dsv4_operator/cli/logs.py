"""`dsv4 logs`: what the members and the loop wrote."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli.errors import CommandError, ExitCode, bad_input
from dsv4_operator.cli.output import DocumentFormat, say, without_escapes

POLL_SECONDS = 0.25


class Component(StrEnum):
    """Whose log."""

    AGENT = "agent"
    RAY = "ray"
    VLLM = "vllm"
    LOOP = "loop"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Source:
    """One log file; the loop's has no rank."""

    path: Path
    rank: int | None
    component: Component

    @property
    def label(self) -> str:
        """What stands before its lines when there are several sources."""
        return str(self.component) if self.rank is None else f"{self.rank} {self.component}"


@dataclass(frozen=True, slots=True)
class Line:
    """One line and where it came from."""

    source: Source
    text: str


def incarnations(directory: Path) -> list[int]:
    """The incarnations that still have files, oldest first."""
    names = (re.fullmatch(r"i(\d+)", path.name) for path in directory.glob("i*"))
    return sorted(int(name[1]) for name in names if name)


def sources(state: DeploymentState, rank: int | None, component: Component) -> list[Source]:
    """The log files that were asked for and exist: the latest incarnation's, and the loop's only by its name."""
    if component is Component.LOOP:
        return [Source(state.log, None, component)] if state.log.exists() else []
    numbers = incarnations(state.directory)
    if not numbers:
        return []
    wanted = (Component.AGENT, Component.RAY, Component.VLLM) if component is Component.ALL else (component,)
    found = []
    for directory in state.incarnation(numbers[-1]).glob("m*"):
        member = directory.name[1:]
        if member.isdigit() and rank in (None, int(member)):
            found += [Source(directory / f"{each}.log", int(member), each) for each in wanted]
    return sorted(
        (source for source in found if source.path.exists()), key=lambda source: (source.rank, source.component)
    )


def render_line(line: Line, *, labelled: bool, form: DocumentFormat | None, colour: bool) -> str:
    """One line for people, or one JSON object, or one item of a YAML list."""
    text = line.text if colour and form is None else without_escapes(line.text)
    if form is None:
        return f"[{line.source.label}] {text}" if labelled else text
    place = {} if line.source.rank is None else {"rank": line.source.rank}
    record = json.dumps({**place, "component": line.source.component, "line": text}, ensure_ascii=False)
    # JSON is YAML, and one item a line can be read while it is being written.
    return record if form is DocumentFormat.JSON else f"- {record}"


class Reader:
    """Reads whole lines from a file that grows."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._file: BinaryIO = source.path.open("rb")
        self._rest = b""

    def lines(self, *, last: int | None = None, final: bool = False) -> list[Line]:
        """What came since the last time, at most `last` lines; with `final` also a line that has no end yet."""
        return list(deque(self._read(final), last))

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def _read(self, final: bool) -> Iterator[Line]:
        while chunk := self._file.read(1 << 20):
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            for line in whole:
                yield self._line(line)
        if final and self._rest:
            yield self._line(self._rest)
            self._rest = b""

    def _line(self, raw: bytes) -> Line:
        # A progress bar rewrites its line; what stayed on the screen is the last of it.
        text = raw.removesuffix(b"\r").rpartition(b"\r")[2]
        return Line(self.source, text.decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class Request:
    """What `dsv4 logs` was asked for."""

    rank: int | None
    component: Component
    follow: bool
    tail: int | None
    form: DocumentFormat | None
    colour: bool


def show(state: DeploymentState, request: Request, *, wait: Callable[[float], None] = time.sleep) -> ExitCode:
    """Print what there is; with `follow` go on, also into the next incarnation, until the deployment has ended."""
    found = sources(state, request.rank, request.component)
    if not found and not (request.follow and state.holder() is not None):
        raise _nothing(state, request)
    readers: dict[Path, Reader] = {}
    try:
        tail = request.tail
        while True:
            # Looked at before the files: what is written before the end is then still read.
            running = state.holder() is not None
            found = sources(state, request.rank, request.component)
            _drop_replaced(readers, found)
            final = not (request.follow and running)
            for source in found:
                new = source.path not in readers
                if new:
                    readers[source.path] = Reader(source)
                _print(readers[source.path].lines(last=tail if new else None, final=final), request)
            # Only for what was there at the start; a file that appears later is new from its first line.
            tail = None
            if final:
                return ExitCode.OK
            wait(POLL_SECONDS)
    finally:
        for reader in readers.values():
            reader.close()


def _drop_replaced(readers: dict[Path, Reader], found: list[Source]) -> None:
    kept = {source.path for source in found}
    for path in [path for path in readers if path not in kept]:
        readers.pop(path).close()


def _print(lines: list[Line], request: Request) -> None:
    # Fixed by the question, not by how many files there happen to be just now.
    labelled = request.component is not Component.LOOP and (request.rank is None or request.component is Component.ALL)
    for line in lines:
        say(render_line(line, labelled=labelled, form=request.form, colour=request.colour))


def _nothing(state: DeploymentState, request: Request) -> CommandError:
    numbers = incarnations(state.directory)
    if numbers:
        ranks = sorted(path.name[1:] for path in state.incarnation(numbers[-1]).glob("m*"))
        what = f"component {request.component}" if request.rank is None else f"rank {request.rank}"
        return bad_input(f"{state.name!r} has no logs of {what}; its ranks are {', '.join(ranks) or 'not started yet'}")
    if state.holder() is not None:
        return bad_input(f"{state.name!r} has started no member yet; see `dsv4 logs --component loop`")
    left = f"; what failed members left lies in {state.evidence}" if state.evidence.exists() else ""
    return bad_input(f"{state.name!r} is not running, and its members' logs went with them{left}")
