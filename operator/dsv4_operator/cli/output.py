"""Writing results: documents as JSON or YAML, tables as kubectl draws them, all without a terminal's help."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

from dsv4_operator.cli.errors import CommandError


class DocumentFormat(StrEnum):
    """Format in which a command prints what it found, for programs."""

    JSON = "json"
    YAML = "yaml"


class TableFormat(StrEnum):
    """Format in which `dsv4 status` prints what it found."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


def render_document(document: object, form: DocumentFormat) -> str:
    """Return a document of plain JSON values as text, keys in the document's own order."""
    if form is DocumentFormat.JSON:
        return json.dumps(document, indent=2, ensure_ascii=False)
    import yaml

    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120).rstrip("\n")


def render_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns as wide as their widest cell, three spaces apart; nothing is ever cut, so that a pipe gets all of
    it.
    """
    lines = [list(headers), *[[cell or "-" for cell in row] for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def without_escapes(text: str) -> str:
    """Return `text` without the sequences that colour a terminal."""
    return _ESCAPES.sub("", text)


def say(text: str = "") -> None:
    """Write one line (or some) to stdout, at once: whoever reads a pipe sees it when it happens.

    Raises:
        CommandError: it cannot be written, for example to a full disk.
        SystemExit: nobody reads any more; 141, as of a program that SIGPIPE ended.
    """
    try:
        print(text, flush=True)  # the one place that prints
    except BrokenPipeError:
        _to_nowhere()
        raise SystemExit(_SIGPIPE) from None
    except OSError as error:
        _to_nowhere()
        raise CommandError(f"the output cannot be written: {error.strerror}") from None


_SIGPIPE = 128 + 13


def _to_nowhere() -> None:
    """Point stdout at nothing: what is still in the buffer must not be tried again when Python ends."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def note(text: str) -> None:
    """Write a line to stderr: progress and remarks that are not the result."""
    if sys.stderr.isatty():
        text = fitted(text, shutil.get_terminal_size().columns)
    print(text, file=sys.stderr, flush=True)


def fitted(text: str, width: int) -> str:
    """Return `text` with lines of at most `width` characters, broken between words.

    What follows begins below the last column of the line, where it has columns (three spaces apart).
    """
    return "\n".join(part for line in text.split("\n") for part in _broken(line, width))


_NARROWEST = 16
"""Of a last column that is kept as one."""


def _broken(line: str, width: int) -> Iterator[str]:
    columns = [match.end() for match in re.finditer(r" {3,}(?=\S)", line)]
    indent = columns[-1] if columns and columns[-1] <= width - _NARROWEST else len(line) - len(line.lstrip(" -"))
    while len(line) > width:
        at = line.rfind(" ", indent + 1, width + 1)
        if at < 0:
            at = line.find(" ", width)
        if at < 0:
            break
        yield line[:at].rstrip()
        line = " " * indent + line[at + 1 :]
    yield line


@contextmanager
def on_screen() -> Iterator[Callable[[str], None] | None]:
    """Yield a function that replaces what it showed last, for a terminal; None when stdout is something else."""
    if not sys.stdout.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(), auto_refresh=False, transient=False, vertical_overflow="crop") as live:

        def show(text: str) -> None:
            shown = Text(text, no_wrap=True, overflow="ellipsis")
            for style, names in _STYLES.items():
                shown.highlight_words(names, style)
            live.update(shown, refresh=True)

        yield show


_STYLES = {
    "green": ["Serving"],
    "red": ["Failed", "Degraded", "Stopped"],
    "yellow": ["Restarting", "Recovering", "Draining"],
    "bold": ["RANK", "ROLE", "ADDRESS", "PHASE", "MESSAGE", "NAME", "READY", "MODEL", "RESTARTS", "AGE", "ENDPOINT"],
}


@contextmanager
def countdown(doing: str) -> Iterator[Callable[[float], None]]:
    """Show `stopping nano (3 s)` on stderr while something takes its time: a line that rewrites itself, or one word."""
    terminal = sys.stderr.isatty()
    if not terminal:
        note(doing)
        yield lambda _: None
        return

    def tick(waited: float) -> None:
        print(f"\r{doing} ({waited:.0f} s)", end="", file=sys.stderr, flush=True)

    tick(0)
    try:
        yield tick
    finally:
        print(file=sys.stderr, flush=True)
