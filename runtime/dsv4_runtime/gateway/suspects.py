"""Requests that may be what their engines die of."""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from types import TracebackType

from dsv4_runtime.contract.gateway import FatalRequest, FatalRequests
from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.errors import RefusedError
from dsv4_runtime.gateway.exchange import Exchange

_log = logging.getLogger("dsv4.gateway")

SUSPECTED_DEATHS = 2
"""Engines that died under a request before it is tried alone; one more, and it is answered with an error."""
_KEEP_FOUND = 20
TRIAL_SECONDS = 30.0
"""Time for which a suspected request is tried alone: one that is still being answered then is no longer suspected."""


class Suspects:
    """Has requests under which engines died tried one at a time, so that the next death says which of them it is.

    Requests that no engine died under go on beside the one that is tried: one more death does not make them suspected.
    """

    def __init__(self) -> None:
        self._under: dict[Exchange, None] = {}
        """Requests under which an engine died."""
        self._turn = asyncio.Lock()
        self._found: collections.deque[FatalRequest] = collections.deque(maxlen=_KEEP_FOUND)

    @property
    def found(self) -> FatalRequests:
        """Return the latest requests that were refused."""
        return FatalRequests(requests=tuple(self._found))

    def alone(self, exchange: Exchange) -> SuspectTurn:
        """Return a context within which no other suspected request is tried."""
        return SuspectTurn(self._turn, exchange)

    def record(self, exchange: Exchange, engine: str) -> None:
        """Count an engine that died under a request.

        Raises:
            RefusedError: it died while the request was tried alone; those that were suspected with it no longer are.
        """
        exchange.deaths += 1
        self._under[exchange] = None
        if exchange.deaths <= SUSPECTED_DEATHS:
            return
        for other in self._under:
            other.deaths = 0
        size, engines = len(exchange.body), SUSPECTED_DEATHS + 1
        self._found.append(FatalRequest(id=exchange.id, size=size, engines=engines, time=time.time()))
        _log.error(
            "request %s (%d bytes) is refused: %d engines died while they had it, the last (%s) with no other suspect",
            exchange.id,
            size,
            engines,
            engine,
        )
        raise RefusedError(errors.fatal(engines))

    def forget(self, exchange: Exchange) -> None:
        """Forget a request that is answered."""
        self._under.pop(exchange, None)


class SuspectTurn:
    """One suspected request's turn."""

    def __init__(self, turn: asyncio.Lock, exchange: Exchange) -> None:
        self._turn, self._exchange = turn, exchange
        self._mine = False
        """Whether it is this one's turn."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Count the time from now: an engine has the request."""
        if self._mine and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TRIAL_SECONDS, self._acquit)

    async def __aenter__(self) -> SuspectTurn:
        await self._turn.acquire()
        if self._exchange.deaths < SUSPECTED_DEATHS:
            # It was another request.
            self._turn.release()
        else:
            self._mine = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._release()

    def _acquit(self) -> None:
        self._exchange.deaths = 0
        self._release()

    def _release(self) -> None:
        if self._mine:
            self._mine = False
            self._turn.release()
