"""`dsv4 why`."""

from __future__ import annotations

import time

import httpx
import pydantic

from dsv4_operator.cli import render
from dsv4_operator.cli.errors import CommandError, ExitCode
from dsv4_operator.cli.look import DeploymentView
from dsv4_operator.cli.output import DocumentFormat, render_document, say
from dsv4_operator.cli.source import DeploymentSource
from dsv4_runtime.contract.gateway import FatalRequest, FatalRequests

_GATEWAY_SECONDS = 2.0


def show(source: DeploymentSource, name: str | None, form: DocumentFormat | None) -> ExitCode:
    """Print what died last, why, and what became of it."""
    item = source.one(name)
    now = time.time()
    fatal = fatal_requests(source, item) if item.running else ()
    if form is None:
        say(render.why_text(item, now, fatal))
    else:
        say(render_document(render.why_document(item, now, fatal), form))
    return ExitCode.OK


def fatal_requests(source: DeploymentSource, item: DeploymentView) -> tuple[FatalRequest, ...]:
    """Return the requests that the gateway refused because engines died of them; none if it cannot be asked."""
    try:
        with source.api(item) as api, httpx.Client(timeout=_GATEWAY_SECONDS, trust_env=False) as client:
            headers = {"Authorization": f"Bearer {api.key}"} if api.key else {}
            answer = client.get(api.url().removesuffix("/v1") + "/dsv4/fatal-requests", headers=headers)
            return FatalRequests.model_validate_json(answer.raise_for_status().content).requests
    except (CommandError, httpx.HTTPError, pydantic.ValidationError):
        return ()
