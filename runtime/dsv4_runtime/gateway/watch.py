"""Asks the agent of a group's head how its engine is, and vLLM itself when a request gives reason to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping

import aiohttp

from dsv4_runtime.client import AGENT_ERRORS, AgentClient
from dsv4_runtime.contract.gateway import GroupRoute
from dsv4_runtime.engine import token_auth
from dsv4_runtime.gateway.engine import EngineView
from dsv4_runtime.gateway.route import RouteFile

_log = logging.getLogger("dsv4.gateway")

_RETRY_SECONDS = 0.2
_HEALTH_SECONDS = 2.0


class Watch:
    """Keeps the `EngineView` of one group informed.

    A watch that breaks is a signal with an age, no death: the last verdict stands until the next.
    """

    def __init__(self, route: GroupRoute, routes: RouteFile, engine: EngineView) -> None:
        """Args:
        route: where the group is.
        routes: has the token key.
        engine: what is told.
        """
        self._agent, self._api, self._routes, self._engine = route.agent, route.api, routes, engine
        self._heard: float | None = None
        self._client = AgentClient()
        self._vllm = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_SECONDS), auto_decompress=False)

    @property
    def age(self) -> float | None:
        """Return the seconds since the agent was last heard; None: never."""
        return None if self._heard is None else time.monotonic() - self._heard

    @property
    def auth(self) -> Mapping[str, str]:
        """Return the headers that open vLLM's port in the incarnation whose agent was heard last."""
        return token_auth.headers(self._client.token(self._agent))

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            await asyncio.gather(self._follow(), self._settle_doubts())
        finally:
            await asyncio.gather(self._client.close(), self._vllm.close())

    async def _follow(self) -> None:
        broken: str | None = None
        while True:
            try:
                await self._listen()
                broken = None
            except AGENT_ERRORS as error:
                # Said once: an agent that is away for minutes is no news five times a second.
                reason = f"{type(error).__name__}: {str(error)[:200]}"
                if reason != broken:
                    _log.warning("the agent at %s cannot be heard (%s)", self._agent, reason)
                broken = reason
            await asyncio.sleep(_RETRY_SECONDS)

    async def _listen(self) -> None:
        """Pass on what the agent says, until it can no longer be heard."""
        async with contextlib.aclosing(self._client.watch(self._agent, self._routes.token_key())) as stream:
            async for status in stream:
                self._heard = time.monotonic()
                self._engine.report(status)

    async def _settle_doubts(self) -> None:
        while True:
            await self._engine.doubts.wait()
            if await self._alive():
                self._engine.trust()
            else:
                await asyncio.sleep(_RETRY_SECONDS)

    async def _alive(self) -> bool:
        try:
            async with self._vllm.get(self._api + "/health", headers=self.auth) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
