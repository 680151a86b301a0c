"""`dsv4 dashboard`: access to Ray's dashboard."""

from __future__ import annotations

import time
from collections.abc import Callable

from dsv4_operator.cli.errors import CommandError, ExitCode
from dsv4_operator.cli.output import note, print_line
from dsv4_operator.cli.sources.base import DeploymentSource, RetryingPoll

_RESPONSE_SECONDS = 10.0
_POLL_SECONDS = 1.0


def show(
    source: DeploymentSource, name: str | None, group: int, *, wait: Callable[[float], None] = time.sleep
) -> ExitCode:
    """Print address and token. If the connection ends with the command, keep it open until Ctrl-C.

    Raises:
        CommandError: there is no dashboard, or it does not respond.
    """
    item = source.get(name)
    with source.dashboard(item, group) as access:
        url = access.url()
        _check(url, access.token)
        print_line(f"dashboard   {url}")
        if access.token:
            print_line(f"token       {access.token}")
        if access.permanent:
            return ExitCode.OK
        note("The page asks for the token once; a new incarnation has another one. Ctrl-C ends the connection.")
        poll = RetryingPoll()
        while True:
            wait(_POLL_SECONDS)
            # The head of a new incarnation replaces the previous one, which can take some time.
            poll(access.url)


def _check(url: str, token: str) -> None:
    from dsv4_operator.cli import http

    try:
        with http.open_url("GET", url, token=token, total_seconds=_RESPONSE_SECONDS):
            return
    except http.ERRORS as error:
        raise CommandError(f"the dashboard at {url} does not answer ({http.reason(error)})") from None
