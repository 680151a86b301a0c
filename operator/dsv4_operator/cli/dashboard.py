"""`dsv4 dashboard`: the way to Ray's dashboard."""

from __future__ import annotations

import time
from collections.abc import Callable

from dsv4_operator.cli.errors import CommandError, ExitCode
from dsv4_operator.cli.output import note, say
from dsv4_operator.cli.patience import Patience
from dsv4_operator.cli.source import DeploymentSource

ANSWER_SECONDS = 10.0
LOOK_SECONDS = 1.0


def show(
    source: DeploymentSource, name: str | None, group: int, *, wait: Callable[[float], None] = time.sleep
) -> ExitCode:
    """Print address and token; where the way ends with this command, keep it open until Ctrl-C.

    Raises:
        CommandError: there is no dashboard, or it does not answer.
    """
    item = source.one(name)
    with source.dashboard(item, group) as found:
        url = found.url()
        _check(url, found.token)
        say(f"dashboard   {url}")
        if found.token:
            say(f"token       {found.token}")
        if found.lasts:
            return ExitCode.OK
        note("The page asks for the token once; a new incarnation has another one. Ctrl-C ends the connection.")
        patient = Patience()
        while True:
            wait(LOOK_SECONDS)
            # A new incarnation's head takes the old one's place, which can take a while.
            patient(found.url)


def _check(url: str, token: str) -> None:
    import httpx

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        httpx.get(url, headers=headers, timeout=ANSWER_SECONDS, trust_env=False)
    except httpx.HTTPError as error:
        raise CommandError(f"the dashboard at {url} does not answer ({error})") from None
