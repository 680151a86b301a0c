"""Exit codes for people."""

from __future__ import annotations

import signal


def describe_exit(code: int) -> str:
    """Return an exit code, or the negative number of the signal that ended a process, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
