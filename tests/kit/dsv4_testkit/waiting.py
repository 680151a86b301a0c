"""Bounded waits, free ports, and suspended processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_SECONDS = 60.0
"""Bound of a wait for something that a defect alone prevents, however busy the machine is."""
_STEP_SECONDS = 0.01
_TICK_SECONDS = 0.02
_PAUSE_SECONDS = 0.1
_PORTS = range(20_000, 30_000)
_given: set[int] = set()


def free_ports(count: int) -> tuple[int, ...]:
    """Return free ports, all different from each other and from earlier ones of this process.

    They are outside the range from which Linux chooses ports itself. A port that it had chosen for a socket that is
    closed again may be that of any other connection by the time a test's server listens there.
    """
    found: list[int] = []
    # Independent of seeds, which are the same in all processes of pytest-xdist.
    chance = random.SystemRandom()
    while len(found) < count:
        port = chance.choice(_PORTS)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        _given.add(port)
        found.append(port)
    return tuple(found)


def free_port() -> int:
    (port,) = free_ports(1)
    return port


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Evaluate `condition` repeatedly until it is true.

    Raises:
        TimeoutError: it is not true after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {seconds:g} s")
        time.sleep(_STEP_SECONDS)


def wait_for_port(port: int, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until a process listens on `port` of this machine; raises `TimeoutError`."""

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens, seconds)


def suspend(pid: int) -> None:
    """Send SIGSTOP to process `pid` and wait until all its threads are stopped: until then they may still answer."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _thread_states(pid) == {"T"})


def _thread_states(pid: int) -> set[str]:
    try:
        return {stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")}
    except (FileNotFoundError, ProcessLookupError):
        return set()  # a thread has just ended


async def until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Evaluate `condition` repeatedly while other tasks run; raises `TimeoutError` after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(_STEP_SECONDS)


class Pauses:
    """Context manager that measures a block without the times in which this process did not run.

    The machine was busy then, or paused. A thread of its own measures them, so code that blocks only its own thread
    causes no pause. It ends with the block.
    """

    ran: float
    """Duration of the block in seconds, without the pauses; set at its end."""

    def __enter__(self) -> Pauses:
        self._over = threading.Event()
        self._lost = 0.0
        self._begun = self._latest = time.monotonic()
        self._thread = threading.Thread(target=self._tick)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()
        self.ran = self._latest - self._begun - self._lost

    def _tick(self) -> None:
        while not self._over.wait(_TICK_SECONDS):
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._latest >= _PAUSE_SECONDS:
            self._lost += now - self._latest
        self._latest = now
