"""Lines of logs, wherever they come from: what was asked for, and how a line is shown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

from dsv4_operator.cli.output import DocumentFormat, say, without_escapes


class LogComponent(StrEnum):
    """Component whose log is meant."""

    AGENT = "agent"
    RAY = "ray"
    VLLM = "vllm"
    LOOP = "loop"
    ALL = "all"


MEMBERS = (LogComponent.AGENT, LogComponent.RAY, LogComponent.VLLM)
"""Logs that a member writes."""


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options that `dsv4 logs` was asked for."""

    rank: int | None
    component: LogComponent
    follow: bool
    tail: int | None
    form: DocumentFormat | None
    colour: bool

    @property
    def components(self) -> tuple[LogComponent, ...]:
        """Return the members' logs that were asked for."""
        return MEMBERS if self.component is LogComponent.ALL else (self.component,)

    @property
    def labelled(self) -> bool:
        """Tell whether lines say whose they are: fixed by the question, not by how many logs there happen to be now."""
        return self.component is not LogComponent.LOOP and (self.rank is None or self.component is LogComponent.ALL)


@dataclass(frozen=True, slots=True)
class LogOrigin:
    """Writer of a line; the loop has no rank."""

    rank: int | None
    component: LogComponent
    group: int | None = None
    """None: there is only one."""

    @property
    def label(self) -> str:
        """Return the text that stands before its lines when there are several origins."""
        place = "" if self.rank is None else f"{self.rank} "
        return f"{place if self.group is None else f'group {self.group} {place}'}{self.component}"


def render_line(origin: LogOrigin, text: str, request: LogOptions) -> str:
    """Return one line for people, or one JSON object, or one item of a YAML list."""
    shown = text if request.colour and request.form is None else without_escapes(text)
    if request.form is None:
        return f"[{origin.label}] {shown}" if request.labelled else shown
    place = {"group": origin.group, "rank": origin.rank}
    record = {key: value for key, value in place.items() if value is not None}
    line = json.dumps({**record, "component": origin.component, "line": shown}, ensure_ascii=False)
    # JSON is YAML, and one item a line can be read while it is being written.
    return line if request.form is DocumentFormat.JSON else f"- {line}"


def show_line(origin: LogOrigin, text: str, request: LogOptions) -> None:
    """Print one line."""
    say(render_line(origin, text, request))


def shown_text(raw: bytes) -> str:
    """Return a line as a terminal would have left it: a progress bar rewrites its line, and the last of it stays."""
    return raw.removesuffix(b"\r").rpartition(b"\r")[2].decode(errors="replace")
