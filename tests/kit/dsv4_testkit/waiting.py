"""Bounded waits, and free ports."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from functools import cache

_STEP_SECONDS = 0.01
_TICK_SECONDS = 0.02
_PAUSE_SECONDS = 0.2


def free_ports(count: int) -> tuple[int, ...]:
    """Return free ports of loopback, all different."""
    with contextlib.ExitStack() as held:
        # Held until all are chosen: the kernel may assign a freed port again at once.
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return tuple(int(probe.getsockname()[1]) for probe in probes)


def free_port() -> int:
    (port,) = free_ports(1)
    return port


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Evaluate `condition` repeatedly until it is true.

    Raises:
        TimeoutError: it is not true after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {seconds:g} s")
        time.sleep(_STEP_SECONDS)


def wait_for_port(port: int, seconds: float = 20.0) -> None:
    """Wait until a process listens on `port` of this machine; raises `TimeoutError`."""

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens, seconds)


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Evaluate `condition` repeatedly while other tasks run; raises `TimeoutError` after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(_STEP_SECONDS)


class Pauses:
    """Intervals in which this process did not run, because the machine was busy or paused.

    A separate thread measures them, so code that blocks only its own thread causes no pause.
    """

    def __init__(self) -> None:
        self._pauses: list[tuple[float, float]] = []
        self._latest = time.monotonic()
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        while True:
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            if now - self._latest >= _PAUSE_SECONDS:
                self._pauses.append((self._latest, now))
            self._latest = now

    def ran(self, begun: float) -> float:
        """Return the seconds from the monotonic time `begun` until now without the pauses."""
        now = time.monotonic()
        found = [*self._pauses, (self._latest, now)] if now - self._latest >= _PAUSE_SECONDS else list(self._pauses)
        return now - begun - sum(end - max(first, begun) for first, end in found if end > begun)


@cache
def pauses() -> Pauses:
    """Return the pauses of this process since the first call."""
    return Pauses()
