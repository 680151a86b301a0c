"""Messages, waits and errors of all parts."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Value = TypeVar("Value")
_STARTED = time.monotonic()
_STEP_SECONDS = 0.5


class ClusterError(Exception):
    """The cluster is missing or not as requested; the text is one sentence for the user."""


def say(text: str) -> None:
    """Print one line of progress with the seconds since this process started."""
    print(f"cluster {time.monotonic() - _STARTED:6.1f} s  {text}", flush=True)


def until(what: str, look: Callable[[], Value], *, seconds: float, every: float = 0.1) -> Value:
    """Return the result of `look` once it is true. It may raise `ClusterError` to fail early.

    Raises:
        ClusterError: `what` was not there after `seconds`.
    """
    end = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > end:
            raise ClusterError(f"{what}: not there after {seconds:.0f} s")
        time.sleep(every)
    return found


async def unchanged(look: Callable[[], Awaitable[Value]], *, seconds: float, limit: float = 60.0) -> Value:
    """Return the result of `look` once it has been the same for `seconds`.

    Raises:
        ClusterError: it still changed after `limit` seconds.
    """
    end = time.monotonic() + limit
    found, same = await look(), 0.0
    # Steps are counted, because nothing changes while the machine is paused.
    while same < seconds:
        if time.monotonic() > end:
            raise ClusterError(f"still changing after {limit:.0f} s: {found}")
        await asyncio.sleep(_STEP_SECONDS)
        latest = await look()
        found, same = latest, same + _STEP_SECONDS if latest == found else 0.0
    return found


def main_guard(main: Callable[[], int]) -> None:
    """Run a command; an expected failure is one sentence and exit code 1."""
    try:
        sys.exit(main())
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        sys.exit(1)
