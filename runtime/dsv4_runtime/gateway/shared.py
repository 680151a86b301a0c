"""A result that many ask for and that costs something: made once at a time, and shared for a while."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """The latest result of `make`. However often it is asked for, `make` runs once at a time and once in `seconds`."""

    def __init__(self, make: Callable[[], Awaitable[T]], seconds: float) -> None:
        self._make, self._seconds = make, seconds
        self._task: asyncio.Task[T] | None = None
        self._ended = 0.0

    async def get(self) -> T:
        """Return the result; raises what `make` raised."""
        task = self._task
        if task is None or (task.done() and time.monotonic() - self._ended >= self._seconds):
            task = self._task = asyncio.create_task(self._run())
        # The others still wait when one of them leaves.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel what is being made."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task

    async def _run(self) -> T:
        try:
            return await self._make()
        finally:
            self._ended = time.monotonic()
