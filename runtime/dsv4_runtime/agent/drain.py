"""The end of an engine that is well: what it has begun, it finishes, within a bound."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

import aiohttp

from dsv4_runtime.agent.state import MemberRecord
from dsv4_runtime.contract import DrainReport, Progress
from dsv4_runtime.health.samples import steps_and_requests

_log = logging.getLogger(__name__)

_ASK_SECONDS = 0.25
_ANSWER_SECONDS = 2.0
# A request that came with the last moment before the gateway heard is in no count until the engine's next step.
_EMPTY_SECONDS = 1.0

Ask = Callable[[], Awaitable[int | None]]
"""Requests that vLLM computes or has waiting; None: it does not say."""


class DrainWait:
    """One wait for the open requests. From its beginning the member says that it is `Draining`."""

    def __init__(self, state: MemberRecord, ask: Ask, seconds: float) -> None:
        """Args:
        state: of a member whose engine serves.
        ask: asks vLLM; bounded in time.
        seconds: the longest wait.
        """
        self._state, self._ask = state, ask
        self._open: int | None = None
        self._over = False
        state.finish("waiting for open requests")
        self._task = asyncio.create_task(self._wait(seconds))
        self._task.add_done_callback(_tell)

    @property
    def report(self) -> DrainReport:
        """Return how far it is."""
        return DrainReport(over=self._over or not self._lasts, open=self._open)

    @property
    def _lasts(self) -> bool:
        """Tell whether there is an engine that can finish anything."""
        return self._state.finishing and self._state.failure is None

    async def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        empty: float | None = None
        try:
            while self._lasts and (asked := time.monotonic()) < deadline:
                found = await self._ask()
                if found is not None:
                    self._count(found)
                # Silence says nothing about what is open.
                empty = None if found != 0 else asked if empty is None else empty
                if empty is not None and asked - empty >= _EMPTY_SECONDS:
                    break
                await asyncio.sleep(min(_ASK_SECONDS, max(0.0, deadline - time.monotonic())))
        finally:
            self._over = True
        if not self._lasts:
            return
        if empty is None:
            self._state.advance(Progress(stage=f"no longer waiting for {self._left}: {seconds:g} s are over"))
        else:
            self._state.advance(Progress(stage="all requests are answered"))
        _log.info("drained: %s", self._left)

    def _count(self, found: int) -> None:
        self._open = found
        if self._lasts:
            self._state.advance(Progress(stage=f"waiting for {self._left}"))

    @property
    def _left(self) -> str:
        return "open requests" if self._open is None else f"{self._open} open request{'s' * (self._open != 1)}"


async def open_requests(base: str, headers: Mapping[str, str]) -> int | None:
    """Return what vLLM says of the requests that it computes or has waiting; None if it says nothing within 2 s.

    Args:
        base: URL of vLLM's API.
        headers: what its port asks for (`engine.token_auth`).
    """
    try:
        limit = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        session = aiohttp.ClientSession(timeout=limit, headers=headers)
        async with session, session.get(f"{base}/metrics") as answer:
            answer.raise_for_status()
            found = steps_and_requests(await answer.read())
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
    return None if found is None else found[1]


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the agent made a mistake", exc_info=error)
