"""`dsv4 status`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dsv4_operator.backends.local.state import deployments
from dsv4_operator.cli import render
from dsv4_operator.cli.choose import the_one
from dsv4_operator.cli.errors import ExitCode
from dsv4_operator.cli.look import Shown, look
from dsv4_operator.cli.output import DocumentFormat, TableFormat, note, on_screen, render_document, say

WATCH_SECONDS = 1.0


def show(
    root: Path,
    name: str | None,
    form: TableFormat,
    *,
    watch: bool,
    wait: Callable[[float], None] = time.sleep,
) -> ExitCode:
    """Print one deployment, or all when several could be meant; with `watch` again whenever something changed."""
    tables = form in (TableFormat.TABLE, TableFormat.WIDE)
    if not watch:
        items = _read(root, name)
        if not items and tables:
            note(f"no deployments under {root}")
        else:
            say(text(items, form, time.time()))
        return ExitCode.OK
    # A document is for programs, also when a person looks on.
    with on_screen() if tables else nullcontext() as screen:
        shown: list[dict[str, Any]] | None = None
        while True:
            items = _read(root, name)
            documents = [item.document() for item in items]
            if screen is not None:
                screen(text(items, form, time.time()) if items else f"no deployments under {root}")
            elif documents != shown:
                # The documents decide, not the text: an age is different every second.
                say(text(items, form, time.time()))
            shown = documents
            wait(WATCH_SECONDS)


def text(items: list[Shown], form: TableFormat, now: float) -> str:
    """Everything that is printed for `items`."""
    if form in (TableFormat.JSON, TableFormat.YAML):
        documents = [item.document() for item in items]
        document = documents[0] if len(documents) == 1 else render.list_document(documents)
        return render_document(document, DocumentFormat(form))
    wide = form is TableFormat.WIDE
    if len(items) == 1:
        return render.deployment_text(items[0], now, wide=wide)
    return render.deployments_table(items, now, wide=wide)


def _read(root: Path, name: str | None) -> list[Shown]:
    if name is not None:
        return [look(the_one(root, name))]
    return [look(state) for state in deployments(root)]
