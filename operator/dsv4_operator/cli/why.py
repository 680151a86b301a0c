"""`dsv4 why`."""

from __future__ import annotations

import time

from dsv4_operator.cli import render
from dsv4_operator.cli.errors import ExitCode
from dsv4_operator.cli.output import DocumentFormat, render_document, say
from dsv4_operator.cli.source import Source


def show(source: Source, name: str | None, form: DocumentFormat | None) -> ExitCode:
    """Print what died last, why, and what became of it."""
    item = source.one(name)
    now = time.time()
    say(render.why_text(item, now) if form is None else render_document(render.why_document(item, now), form))
    return ExitCode.OK
