"""Messages, waits and errors of all parts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
_STARTED = time.monotonic()


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


def main_guard(main: Callable[[], int]) -> None:
    """Run a command; an expected failure is one sentence and exit code 1."""
    try:
        sys.exit(main())
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        sys.exit(1)
