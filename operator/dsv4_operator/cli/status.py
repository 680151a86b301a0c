"""`dsv4 status`, `dsv4 why` and `dsv4 kernels`: the state of deployments; `dsv4 why --log`: the cause of any run."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pydantic

from dsv4_operator.cli import render
from dsv4_operator.cli.errors import CommandError, ExitCode, bad_input
from dsv4_operator.cli.output import DocumentFormat, TableFormat, live_screen, note, print_line, render_document
from dsv4_operator.cli.sources.base import DeploymentSource, DeploymentView, RetryingPoll
from dsv4_runtime.contract import Cause
from dsv4_runtime.contract.gateway import FatalRequests
from dsv4_runtime.engine.signatures import REMEDIES, diagnose

_GATEWAY_SECONDS = 2.0


def show(
    source: DeploymentSource,
    name: str | None,
    form: TableFormat,
    *,
    watch: bool,
    all_namespaces: bool = False,
    wait: Callable[[float], None] = time.sleep,
) -> ExitCode:
    """Print one deployment, or all if `name` is None; with `watch` repeatedly, after every change."""

    def read() -> list[DeploymentView]:
        return [source.get(name)] if name is not None else source.get_all(all_namespaces=all_namespaces)

    def text(items: list[DeploymentView]) -> str:
        return _render(items, form, time.time(), namespaces=all_namespaces)

    tables = form in (TableFormat.TABLE, TableFormat.WIDE)
    location = "in any namespace" if all_namespaces else source.location
    items = read()
    if not watch:
        if not items and tables:
            note(f"no deployments {location}")
        else:
            print_line(text(items))
        return ExitCode.OK
    # Documents are for programs, even on a terminal.
    with live_screen() if tables else nullcontext() as screen:
        shown: list[dict[str, Any]] | None = None
        poll = RetryingPoll()
        while True:
            documents = [item.document() for item in items]
            if screen is not None:
                screen(text(items) if items else f"no deployments {location}")
            elif documents != shown:
                # Compare documents, not the text: ages change every second.
                print_line(text(items))
            shown = documents
            wait(source.poll_seconds)
            found = poll(read)
            items = items if found is None else found


def _render(items: list[DeploymentView], form: TableFormat, now: float, *, namespaces: bool) -> str:
    if form in (TableFormat.JSON, TableFormat.YAML):
        documents = [item.document() for item in items]
        # Several objects become a List, like those of kubectl.
        many = {"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": documents}
        return render_document(documents[0] if len(documents) == 1 else many, DocumentFormat(form))
    wide = form is TableFormat.WIDE
    if len(items) == 1 and not namespaces:
        return render.deployment_text(items[0], now, wide=wide)
    return render.deployments_table(items, now, wide=wide, namespaces=namespaces)


def show_why(source: DeploymentSource, name: str | None, form: DocumentFormat | None) -> ExitCode:
    """Print the latest failure, its cause and its repair."""
    item = source.get(name)
    now = time.time()
    fatal = fatal_requests(source, item) if item.running else FatalRequests()
    text = render.why_text(item, now, fatal)
    print_line(text if form is None else render_document(render.why_document(item, now, fatal), form))
    return ExitCode.OK


def show_why_of_logs(files: Sequence[str], form: DocumentFormat | None) -> ExitCode:
    """Print the cause that log files of vLLM, Ray or NCCL prove, of any run; in order of the files.

    Raises:
        CommandError: a file cannot be read.
    """
    lines, places = list[str](), list[str]()
    for name in files:
        try:
            text = _log_text(name)
        except OSError as error:
            raise bad_input(f"--log: {name} cannot be read: {error.strerror or error}") from None
        for number, line in enumerate(text.splitlines(), 1):
            lines.append(line)
            places.append(f"{name}:{number}")
    found = diagnose(lines)
    if found is None:
        print_line("no error in the log" if form is None else render_document({"cause": None, "evidence": []}, form))
        return ExitCode.FAILED
    cause = found.cause or (Cause.ENGINE_CORE_DIED if found.core_died else Cause.UNKNOWN)
    document = {
        "cause": str(cause),
        "deterministic": cause.deterministic,
        "message": found.message,
        "evidence": [{"line": places[number - 1], "text": text} for number, text in found.evidence],
        "remedy": REMEDIES.get(cause, ""),
        "page": f"docs/failures/{_kebab(cause)}.md",
    }
    print_line(render.log_cause_text(document) if form is None else render_document(document, form))
    return ExitCode.OK


_MOST_LOG_BYTES = 64 * 2**20
"""About 20 s of analysis."""


def _log_text(name: str) -> str:
    """Return the last 64 MiB of a log."""
    with Path(name).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size > _MOST_LOG_BYTES:
            note(f"{name}: only the last 64 MiB of {size / 2**20:.0f} MiB are read; line numbers start there")
        file.seek(max(0, size - _MOST_LOG_BYTES))
        return file.read(_MOST_LOG_BYTES).decode(errors="replace")


def _kebab(cause: Cause) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", cause).lower()


def fatal_requests(source: DeploymentSource, item: DeploymentView) -> FatalRequests:
    """Return what the gateway refuses because engines died of it; nothing if the gateway does not respond."""
    from dsv4_operator.cli import http

    try:
        with source.api(item) as api:
            url = api.url().removesuffix("/v1") + "/dsv4/fatal-requests"
            with http.open_url("GET", url, token=api.token, total_seconds=_GATEWAY_SECONDS) as response:
                if response.status == HTTPStatus.OK:
                    return FatalRequests.model_validate_json(response.read())
    except (CommandError, *http.ERRORS, pydantic.ValidationError):
        pass
    return FatalRequests()


def show_kernels(source: DeploymentSource, name: str | None, form: DocumentFormat | None) -> ExitCode:
    """Print the providers of a layer's operations in each group's engine, and the alternatives."""
    item = source.get(name)
    text = render.kernels_text(item)
    print_line(text if form is None else render_document(render.kernels_document(item), form))
    return ExitCode.OK
