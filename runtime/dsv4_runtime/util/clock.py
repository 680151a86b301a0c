"""Unix time of a process, without jumps.

Budgets, backoff and silence use Unix time, because it is stored across processes and sent between machines. But a
machine's clock can be set while a process runs: one hour forwards would make every member silent for an hour, and one
day backwards would date every restart in the future.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable


async def tick(seconds: float) -> None:
    """Wait for the next multiple of `seconds` of the monotonic clock."""
    now = time.monotonic()
    await asyncio.sleep((math.floor(now / seconds) + 1) * seconds - now)


_FOLLOWED = 0.1
"""Maximum correction towards a changed clock, in seconds per second."""


class SteadyClock:
    """Unix time that advances with the monotonic clock and follows a changed clock slowly."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._lock = threading.Lock()
        self._unix, self._read = wall(), monotonic()

    def __call__(self) -> float:
        """Return Unix time in seconds: 0.9 to 1.1 s later for each second since the last call."""
        with self._lock:
            read = self._monotonic()
            passed, self._read = read - self._read, read
            self._unix += passed
            reach = _FOLLOWED * passed
            self._unix += min(reach, max(-reach, self._wall() - self._unix))
            return self._unix


unix_time = SteadyClock()
"""Time of this process. For times of files and of the API server use `time.time`."""
