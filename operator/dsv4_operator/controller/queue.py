"""Work queue: keys wait for a worker, one at a time each, and come back by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dsv4_runtime.contract.recovery import backoff

QueueKeyT = TypeVar("QueueKeyT")

_log = logging.getLogger("dsv4")

FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 1.0, 300.0


@dataclass(slots=True)
class _Turns:
    """One key."""

    news: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    begun: float | None = None
    """Beginning of the present turn, by the loop's clock; None between turns."""


class WorkQueue(Generic[QueueKeyT]):
    """Calls `work` for every key that was added: at once after news, else when the last turn asked for it.

    No two turns of one key overlap; news during a turn are a reason for another one. A turn that raised is repeated
    after a backoff of 1 s to `longest` with jitter, which news cut short, but not below its first second.
    """

    def __init__(
        self,
        work: Callable[[QueueKeyT], Awaitable[float | None]],
        *,
        workers: int = 16,
        apart: float = 0.0,
        longest: float = LONGEST_BACKOFF_SECONDS,
        failed: Callable[[QueueKeyT, Exception, float], None] | None = None,
    ) -> None:
        """Args:
        work: one turn. Returns the seconds until the next one, None if the key is done with.
        workers: turns at once.
        apart: seconds between two turns of one key, unless the first asked for less: news come in crowds, and one
            look at them all is enough.
        longest: longest wait in seconds after a turn that raised.
        failed: told of every turn that raised, and of the wait that follows.
        """
        self._work = work
        self._longest = longest
        self._slots = asyncio.Semaphore(workers)
        self._apart = apart
        self._failed = failed or _log_failure
        self._turns: dict[QueueKeyT, _Turns] = {}
        self._closed = False

    def add(self, key: QueueKeyT) -> None:
        """Note that there is news of `key`."""
        if self._closed:
            return
        turns = self._turns.get(key)
        if turns is None:
            turns = self._turns[key] = _Turns()
            turns.task = asyncio.create_task(self._serve(key, turns), name=f"turns of {key}")
        turns.news.set()

    def __len__(self) -> int:
        """Return the keys that are not done with."""
        return len(self._turns)

    @property
    def longest_turn(self) -> float:
        """Return the seconds that the longest of the turns under way has taken."""
        begun = [turns.begun for turns in self._turns.values() if turns.begun is not None]
        return asyncio.get_running_loop().time() - min(begun) if begun else 0.0

    async def close(self) -> None:
        """End all turns, also those under way: every action may be interrupted."""
        self._closed = True
        tasks = [turns.task for turns in self._turns.values() if turns.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._turns.clear()

    async def _serve(self, key: QueueKeyT, turns: _Turns) -> None:
        failures = 0
        while True:
            turns.news.clear()
            least = 0.0
            try:
                async with self._slots:
                    turns.begun = asyncio.get_running_loop().time()
                    pause = await self._work(key)
                failures = 0
                least = min(pause or 0.0, self._apart)
            except Exception as error:
                failures += 1
                wait = backoff(failures, first=FIRST_BACKOFF_SECONDS, longest=self._longest)
                pause = wait * random.uniform(0.9, 1.1)  # noqa: S311
                least = min(pause, FIRST_BACKOFF_SECONDS)
                self._failed(key, error, pause)
            finally:
                turns.begun = None
            if pause is not None:
                await asyncio.sleep(least)
                await _wait(turns.news, pause - least)
            elif not turns.news.is_set():
                del self._turns[key]
                return


async def _wait(news: asyncio.Event, seconds: float) -> None:
    # Not `wait_for`, which before Python 3.12 loses a cancellation that comes together with the news.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await news.wait()


def _log_failure(key: object, error: Exception, pause: float) -> None:
    _log.error("%s failed, again in %.1f s", key, pause, exc_info=error)
