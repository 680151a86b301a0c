"""Errors and exit codes of commands, formats of times, documents, tables and log lines, pipes and terminals."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4_operator.api import Finding  # slow to load: `dsv4 --help` needs none of it

KUBECTL_PLUGIN = "kubectl-dsv4"
"""Program that kubectl runs for `kubectl dsv4`."""
KUBECTL_COMPLETION = "kubectl_complete-dsv4"
"""Program that kubectl runs for shell completion after `kubectl dsv4`."""


def program_name() -> str:
    """Return the command as typed by the user: `dsv4` or `kubectl dsv4`."""
    return "kubectl dsv4" if Path(sys.argv[0]).name in (KUBECTL_PLUGIN, KUBECTL_COMPLETION) else "dsv4"


class ExitCode(IntEnum):
    """Exit code of a command; documented in `dsv4 --help`."""

    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    UNCERTAIN = 3
    """`dsv4 plan`: the plan expects too little memory by less than its uncertainty. `dsv4 verify` and
    `dsv4 bench`: the endpoint does not answer, or checks or rows are missing."""
    INTERRUPTED = 130


class CommandError(Exception):
    """An expected error that ends a command: each message becomes one `error: ...` line, never a traceback."""

    def __init__(self, *messages: str, code: ExitCode = ExitCode.FAILED, findings: Sequence[Finding] = ()) -> None:
        super().__init__("\n".join(messages))
        self.messages = messages
        self.code = code
        self.findings = tuple(findings)
        """The same as data, for documents."""


def bad_input(*messages: str, findings: Sequence[Finding] = ()) -> CommandError:
    """Return the error for invalid input, or for a machine in an unsuitable state."""
    return CommandError(*messages, code=ExitCode.BAD_INPUT, findings=findings)


def invalid(source: str, findings: Sequence[Finding]) -> CommandError:
    """Return the error for findings about `source`, a file or an option."""
    return bad_input(*(f"{source}: {finding}" for finding in findings), findings=findings)


@contextmanager
def convert_os_errors(action: str) -> Iterator[None]:
    """Convert an operating system error (disk full, no permission) into a `CommandError` that names the action."""
    try:
        yield
    except OSError as error:
        file = f" {str(error.filename)!r}" if error.filename else ""
        raise bad_input(f"{action}{file}: {error.strerror or error}") from error


class DocumentFormat(StrEnum):
    """Machine-readable output format of a command."""

    JSON = "json"
    YAML = "yaml"


class TableFormat(StrEnum):
    """Output format of `dsv4 status`."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


def format_seconds(value: float) -> str:
    """Return a measured duration: `3.2 s`, `41 s`, `2 min 5 s`."""
    if value < 10:
        return f"{value:.1f} s"
    whole = round(value)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60} s"


def format_elapsed(value: float) -> str:
    """Return an elapsed time: `0:07`, `12:30`, `1:00:05`."""
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_age(value: float) -> str:
    """Return an age in the format of kubectl: `45s`, `12m`, `3h10m`, `4d`."""
    whole = max(int(value), 0)
    if whole < 120:
        return f"{whole}s"
    minutes = whole // 60
    if minutes < 120:
        return f"{minutes}m"
    hours = minutes // 60
    if hours < 10:
        return f"{hours}h{minutes % 60}m"
    return f"{hours}h" if hours < 48 else f"{hours // 24}d"


def local_time(timestamp: float) -> str:
    """Return the time of day of a Unix time, in the time zone of this machine."""
    return time.strftime("%H:%M:%S", time.localtime(timestamp))


def local_datetime(timestamp: float) -> str:
    """Return date and time of day of a Unix time, in the time zone of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp))


def plural(count: int, word: str) -> str:
    """Return `1 restart`, `2 restarts`."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def one_line(text: str, limit: int = 200) -> str:
    """Return `text` on one line, truncated to `limit` characters."""
    joined = " ".join(text.split())
    return joined if len(joined) <= limit else joined[: limit - 3] + "..."


def render_document(document: object, form: DocumentFormat) -> str:
    """Return a document of JSON values as text; the order of keys is kept."""
    if form is DocumentFormat.JSON:
        return json.dumps(document, indent=2, ensure_ascii=False)
    import yaml

    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120).rstrip("\n")


def render_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns as wide as their widest cell, three spaces apart. Cells are never truncated."""
    lines = [list(headers), *[[cell or "-" for cell in row] for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def without_escapes(text: str) -> str:
    """Return `text` without terminal escape sequences."""
    return _ESCAPES.sub("", text)


_SIGPIPE = 128 + 13


def print_line(text: str = "") -> None:
    """Write one or more lines to stdout and flush, so that readers of a pipe receive them immediately.

    Raises:
        CommandError: the write failed, for example because of a full disk.
        SystemExit: the reader closed the pipe; exit code 141, as for a program that SIGPIPE ended.
    """
    try:
        print(text, flush=True)  # the one place that prints
    except BrokenPipeError:
        _discard_stdout()
        raise SystemExit(_SIGPIPE) from None
    except OSError as error:
        _discard_stdout()
        raise CommandError(f"the output cannot be written: {error.strerror}") from None


def _discard_stdout() -> None:
    """Redirect stdout to the null device, so that Python does not write the rest of the buffer at exit."""
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), sys.stdout.fileno())


def note(text: str) -> None:
    """Write a line to stderr: progress and remarks that are not part of the result."""
    if sys.stderr.isatty():
        text = wrap(text, shutil.get_terminal_size().columns)
    print(text, file=sys.stderr, flush=True)


_MIN_COLUMN_WIDTH = 16
"""Minimum width of a last column in which continuation lines are indented."""


def wrap(text: str, width: int) -> str:
    """Return `text` with lines of at most `width` characters, broken between words.

    Continuation lines of a line with columns (three spaces apart) are indented to its last column.
    """
    return "\n".join(part for line in text.split("\n") for part in _wrapped(line, width))


def _wrapped(line: str, width: int) -> Iterator[str]:
    columns = [match.end() for match in re.finditer(r" {3,}(?=\S)", line)]
    indent = columns[-1] if columns and columns[-1] <= width - _MIN_COLUMN_WIDTH else len(line) - len(line.lstrip(" -"))
    while len(line) > width:
        at = line.rfind(" ", indent + 1, width + 1)
        if at < 0:
            at = line.find(" ", width)
        if at < 0:
            break
        yield line[:at].rstrip()
        line = " " * indent + line[at + 1 :]
    yield line


_STYLES = {
    "green": ["Serving"],
    "red": ["Failed", "Degraded", "Stopped"],
    "yellow": ["Restarting", "Recovering", "Draining"],
    "bold": ["RANK", "ROLE", "ADDRESS", "PHASE", "MESSAGE", "NAME", "READY", "MODEL", "RESTARTS", "AGE", "ENDPOINT"],
}


@contextmanager
def live_screen() -> Iterator[Callable[[str], None] | None]:
    """Yield a function that replaces the text shown on the terminal; None if stdout is not a terminal."""
    if not sys.stdout.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(), auto_refresh=False, transient=False, vertical_overflow="crop") as live:

        def show(text: str) -> None:
            shown = Text(text, no_wrap=True, overflow="ellipsis")
            for style, names in ({} if os.environ.get("NO_COLOR") else _STYLES).items():
                shown.highlight_words(names, style)
            live.update(shown, refresh=True)

        yield show


@contextmanager
def countdown(action: str) -> Iterator[Callable[[float], None]]:
    """Show `stopping nano (3 s)` on stderr during an action: updated in place on a terminal, else printed once."""
    if not sys.stderr.isatty():
        note(action)
        yield lambda _: None
        return

    def tick(waited: float) -> None:
        print(f"\r{action} ({waited:.0f} s)", end="", file=sys.stderr, flush=True)

    tick(0)
    try:
        yield tick
    finally:
        print(file=sys.stderr, flush=True)


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


_TIME = re.compile(rb"(?:\d{4}-)?(\d\d)-(\d\d)[ T](\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)")
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
