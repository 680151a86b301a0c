"""Asks the agent of a group's head how its engine is, and vLLM itself when a request gives reason to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

import aiohttp
import pydantic

from dsv4_runtime.contract import AgentStatus
from dsv4_runtime.contract.gateway import GroupRoute
from dsv4_runtime.contract.token import AgentCredential
from dsv4_runtime.engine import door
from dsv4_runtime.gateway.engine import EngineView
from dsv4_runtime.gateway.route import RouteFile

_log = logging.getLogger("dsv4.gateway")

# The agent writes at least once a second.
_SILENCE_SECONDS = 3.0
_CONNECT_SECONDS = 1.0
_RETRY_SECONDS = 0.2
_HEALTH_SECONDS = 2.0
# An agent's status has at most 20 failures of 1 KiB; the reader holds twice this.
_LINE_BYTES = 2**18


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
        self._credential = AgentCredential()
        self._heard: float | None = None
        self._streams = True
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS),
            read_bufsize=_LINE_BYTES,
            auto_decompress=False,
        )

    @property
    def age(self) -> float | None:
        """Seconds since the agent was last heard; None: never."""
        return None if self._heard is None else time.monotonic() - self._heard

    @property
    def door(self) -> Mapping[str, str]:
        """The headers that open vLLM's port in the incarnation whose agent was heard last."""
        return door.headers(self._credential.token)

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            await asyncio.gather(self._follow(), self._settle_doubts())
        finally:
            await self._session.close()

    async def _follow(self) -> None:
        broken: str | None = None
        while True:
            try:
                await self._listen()
                broken = None
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                # Said once: an agent that is away for minutes is no news five times a second.
                reason = f"{type(error).__name__}: {str(error)[:200]}"
                if reason != broken:
                    _log.warning("the agent at %s cannot be heard (%s)", self._agent, reason)
                broken = reason
            await asyncio.sleep(_RETRY_SECONDS)

    async def _listen(self) -> None:
        """Pass on what the agent says, until it can no longer be heard."""
        path = "/v1/watch" if self._streams else "/v1/status"
        for last in (False, True):
            shown = self._credential.headers
            async with self._session.get(self._agent + path, headers=shown) as answer:
                # Of a new incarnation, perhaps: it is asked again with the token that it names, once.
                refused = answer.status == 401 and not last
                if refused and self._credential.answer(self._routes.token_key(), shown, answer.headers):
                    continue
                await self._pass_on(answer)
                return

    async def _pass_on(self, answer: aiohttp.ClientResponse) -> None:
        """Report every status in `answer`, until it ends."""
        if answer.status == 404 and self._streams:
            # An agent of an earlier version: ask it again and again instead.
            self._streams = False
            return
        answer.raise_for_status()
        async for line in answer.content:
            if not line.strip():
                continue
            try:
                status = AgentStatus.model_validate_json(line)
            except pydantic.ValidationError as error:
                raise ValueError(f"not a status: {error.error_count()} errors") from error
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
            timeout = aiohttp.ClientTimeout(total=_HEALTH_SECONDS)
            url, headers = self._api + "/health", self.door
            async with self._session.get(url, headers=headers, timeout=timeout) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
