"""`dsv4 status`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from dsv4_operator.cli import render
from dsv4_operator.cli.errors import ExitCode
from dsv4_operator.cli.look import DeploymentView
from dsv4_operator.cli.output import DocumentFormat, TableFormat, note, on_screen, render_document, say
from dsv4_operator.cli.patience import Patience
from dsv4_operator.cli.source import DeploymentSource


def show(
    source: DeploymentSource,
    name: str | None,
    form: TableFormat,
    *,
    watch: bool,
    everywhere: bool = False,
    wait: Callable[[float], None] = time.sleep,
) -> ExitCode:
    """Print one deployment, or all when several could be meant; with `watch` again whenever something changed."""

    def read() -> list[DeploymentView]:
        return [source.one(name)] if name is not None else source.every(everywhere=everywhere)

    def text(items: list[DeploymentView]) -> str:
        return render_items(items, form, time.time(), namespaces=everywhere)

    tables = form in (TableFormat.TABLE, TableFormat.WIDE)
    place = "in any namespace" if everywhere else source.place
    if not watch:
        items = read()
        if not items and tables:
            note(f"no deployments {place}")
        else:
            say(text(items))
        return ExitCode.OK
    # A document is for programs, also when a person looks on.
    with on_screen() if tables else nullcontext() as screen:
        shown: list[dict[str, Any]] | None = None
        patient = Patience()
        items = read()
        while True:
            documents = [item.document() for item in items]
            if screen is not None:
                screen(text(items) if items else f"no deployments {place}")
            elif documents != shown:
                # The documents decide, not the text: an age is different every second.
                say(text(items))
            shown = documents
            wait(source.pause)
            found = patient(read)
            items = items if found is None else found


def render_items(items: list[DeploymentView], form: TableFormat, now: float, *, namespaces: bool = False) -> str:
    """Return everything that is printed for `items`; with `namespaces` each row begins with its own."""
    if form in (TableFormat.JSON, TableFormat.YAML):
        documents = [item.document() for item in items]
        document = documents[0] if len(documents) == 1 else render.list_document(documents)
        return render_document(document, DocumentFormat(form))
    wide = form is TableFormat.WIDE
    if len(items) == 1 and not namespaces:
        return render.deployment_text(items[0], now, wide=wide)
    return render.deployments_table(items, now, wide=wide, namespaces=namespaces)
