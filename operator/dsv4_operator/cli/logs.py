"""Options of `dsv4 logs`, and rendering of log lines from every source."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum

from dsv4_operator.cli.output import DocumentFormat, print_line, without_escapes


class LogComponent(StrEnum):
    """Component that writes a log, or all of a member's components."""

    AGENT = "agent"
    RAY = "ray"
    VLLM = "vllm"
    LOOP = "loop"
    ALL = "all"


_MEMBER_COMPONENTS = (LogComponent.AGENT, LogComponent.RAY, LogComponent.VLLM)


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of `dsv4 logs`."""

    rank: int | None
    component: LogComponent
    follow: bool
    tail: int | None
    form: DocumentFormat | None
    colour: bool
    since: str | None = None
    """Age of the oldest line, as `kubectl` reads it; clusters only."""

    @property
    def components(self) -> tuple[LogComponent, ...]:
        """Return the selected components."""
        return _MEMBER_COMPONENTS if self.component is LogComponent.ALL else (self.component,)

    @property
    def labelled(self) -> bool:
        """Return whether lines have a label: depends on the options only, not on the present number of logs."""
        return self.component is not LogComponent.LOOP and (self.rank is None or self.component is LogComponent.ALL)


@dataclass(frozen=True, slots=True)
class LogOrigin:
    """Writer of a line; the reconcile loop has no rank."""

    rank: int | None
    component: LogComponent
    group: int | None = None
    """None if the deployment has a single group."""

    @property
    def label(self) -> str:
        """Return the label of its lines."""
        rank = "" if self.rank is None else f"{self.rank} "
        return f"{rank if self.group is None else f'group {self.group} {rank}'}{self.component}"


def decode_line(raw: bytes) -> str:
    """Return a line as text; of a progress bar, which rewrites its line after carriage returns, the last version."""
    return raw.removesuffix(b"\r").rpartition(b"\r")[2].decode(errors="replace")


_TIME = re.compile(rb"(?:\d{4}-)?(\d\d)-(\d\d) (\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)")
_TIME_BYTES = 96
"""Length of the part of a line that has its time: vLLM's begins with a process name."""


def log_time(raw: bytes, month: int) -> str | None:
    """Return the time of a line of an agent, Ray or vLLM, as text that sorts by time; None if it has none.

    Args:
        raw: the line.
        month: the present month, for vLLM's times, which have no year: later months are of the previous one.
    """
    if (found := _TIME.search(raw[:_TIME_BYTES])) is None:
        return None
    of, day, clock = (part.decode() for part in found.groups())
    return f"{int(of) <= month:d}-{of}-{day} {clock.replace('.', ',')}"


def print_log_line(origin: LogOrigin, text: str, options: LogOptions) -> None:
    """Print one line as text, as a JSON object, or as an item of a YAML list."""
    if not options.colour or options.form is not None:
        text = without_escapes(text)
    if options.form is None:
        print_line(f"[{origin.label}] {text}" if options.labelled else text)
        return
    place = {"group": origin.group, "rank": origin.rank}
    record = {key: value for key, value in place.items() if value is not None}
    line = json.dumps({**record, "component": origin.component, "line": text}, ensure_ascii=False)
    # JSON is valid YAML; one item per line can be read while the list is still being written.
    print_line(line if options.form is DocumentFormat.JSON else f"- {line}")
