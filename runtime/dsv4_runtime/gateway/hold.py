"""Requests that wait for the engine, as many as there is room for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from dsv4_runtime.contract.gateway import GatewaySettings
from dsv4_runtime.gateway.engine import Life
from dsv4_runtime.gateway.errors import RefusedError, away
from dsv4_runtime.gateway.groups import Groups, RoutedGroup
from dsv4_runtime.gateway.metrics import GatewayMetrics


class Hold:
    """Wait of requests for an engine that answers."""

    def __init__(self, settings: GatewaySettings, groups: Groups, metrics: GatewayMetrics) -> None:
        self._settings, self._groups, self._metrics = settings, groups, metrics
        self._count = self._bytes = 0

    async def wait(
        self,
        size: int,
        admits: Callable[[RoutedGroup], bool] | None = None,
        changed: Callable[[], Awaitable[None]] | None = None,
        *,
        admitted: bool,
    ) -> tuple[RoutedGroup, Life]:
        """Return a group that answers and the life of its engine, after a wait.

        Args:
            size: bytes of the request's body.
            admits: see `Groups.available`.
            changed: see `Groups.available`.
            admitted: whether the engine had the request already. Such a one always finds room: the bounds are for
                those that come while there is nobody to answer.

        Raises:
            RefusedError: no room, or the engine did not come back in time.
        """
        settings = self._settings
        if not admitted and (self._count >= settings.max_held_requests or self._bytes + size > settings.max_held_bytes):
            raise RefusedError(away("the engine is away, and as many requests as may wait for it do so already"))
        self._change(1, size)
        begun = time.monotonic()
        try:
            async with asyncio.timeout(settings.hold_timeout_seconds) as bound:
                return await self._groups.available(admits, changed)
        except TimeoutError:
            if not bound.expired():
                raise
            message = f"the engine is away and did not come back within {settings.hold_timeout_seconds:g} s"
            raise RefusedError(away(message)) from None
        finally:
            self._change(-1, -size)
            self._metrics.hold.observe(time.monotonic() - begun)

    def _change(self, count: int, size: int) -> None:
        self._count += count
        self._bytes += size
        self._metrics.held.set(self._count)
        self._metrics.held_bytes.set(self._bytes)
