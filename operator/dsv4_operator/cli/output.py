"""Writing results: documents as JSON or YAML, tables as kubectl draws them, all without a terminal's help."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum


class DocumentFormat(StrEnum):
    """How a command prints what it found, for programs."""

    JSON = "json"
    YAML = "yaml"


class TableFormat(StrEnum):
    """How `dsv4 status` prints what it found."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


def render_document(document: object, form: DocumentFormat) -> str:
    """A document of plain JSON values as text, keys in the document's own order."""
    if form is DocumentFormat.JSON:
        return json.dumps(document, indent=2, ensure_ascii=False)
    import yaml

    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120).rstrip("\n")


def render_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, three spaces apart; nothing is ever cut, so that a pipe gets all of it."""
    lines = [list(headers), *[[cell or "-" for cell in row] for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def without_escapes(text: str) -> str:
    """`text` without the sequences that colour a terminal."""
    return _ESCAPES.sub("", text)


def say(text: str = "") -> None:
    """One line (or some) to stdout, at once: whoever reads a pipe sees it when it happens."""
    print(text, flush=True)  # the one place that prints


def note(text: str) -> None:
    """A line to stderr: progress and remarks that are not the result."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def on_screen() -> Iterator[Callable[[str], None] | None]:
    """A function that replaces what it showed last, for a terminal; None when stdout is something else."""
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
    """`stopping nano (3 s)` on stderr while something takes its time: one line that rewrites itself, or one word."""
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
