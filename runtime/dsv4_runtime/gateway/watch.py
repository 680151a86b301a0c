"""Asks the head's agent how the engine is, and vLLM itself when a request gives reason to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pydantic

from dsv4_runtime.contract import AgentStatus
from dsv4_runtime.contract.gateway import GatewayRoute
from dsv4_runtime.engine import door
from dsv4_runtime.gateway.engine import Engine

_log = logging.getLogger("dsv4.gateway")

# The agent writes at least once a second.
_SILENCE_SECONDS = 3.0
_CONNECT_SECONDS = 1.0
_RETRY_SECONDS = 0.2
_HEALTH_SECONDS = 2.0
# An agent's status has at most 20 failures of 1 KiB; the reader holds twice this.
_LINE_BYTES = 2**18


class RouteFile:
    """The route as it is now in its file, which is always replaced as a whole."""

    def __init__(self, path: Path) -> None:
        """Raises:
        OSError, ValueError: it cannot be read.
        """
        self._path = path
        self._stamp = self._look()
        self.route = self._read()
        self._token = ""

    def changed(self) -> bool:
        """Whether there is a new one, which is in `route` then; one that cannot be read changes nothing."""
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            before, self.route = self.route, self._read()
        except (OSError, ValueError) as error:
            _log.warning("route %s cannot be read, the last one stays: %s", self._path, error)
            return False
        return self.route != before

    def token(self) -> str:
        """The group's token, which its agents and vLLM's port ask for.

        Raises:
            OSError: it cannot be read.
        """
        self._token = Path(self.route.token_file).read_text().strip()
        return self._token

    def door(self) -> Mapping[str, str]:
        """The headers that open vLLM's port, with the token as the watch read it last: no request waits for a file."""
        return door.headers(self._token or self.token())

    def _look(self) -> tuple[int, int]:
        seen = self._path.stat()
        return seen.st_mtime_ns, seen.st_ino

    def _read(self) -> GatewayRoute:
        return GatewayRoute.model_validate_json(self._path.read_bytes())


class Watch:
    """Keeps an `Engine` informed.

    A watch that breaks is a signal with an age, no death: the last verdict stands until the next.
    """

    def __init__(self, routes: RouteFile, engine: Engine) -> None:
        self._routes, self._engine = routes, engine
        self._heard: float | None = None
        self._streams = True
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS),
            read_bufsize=_LINE_BYTES,
        )

    @property
    def age(self) -> float | None:
        """Seconds since the agent was last heard; None: never."""
        return None if self._heard is None else time.monotonic() - self._heard

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await asyncio.gather(self._follow(), self._settle_doubts())
        finally:
            await self._session.close()

    async def _follow(self) -> None:
        broken: str | None = None
        while True:
            self._engine.give_up(self._routes.route.given_up)
            try:
                await self._listen()
                broken = None
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                # Said once: an agent that is away for minutes is no news five times a second.
                reason = f"{type(error).__name__}: {str(error)[:200]}"
                if reason != broken:
                    _log.warning("the agent at %s cannot be heard (%s)", self._routes.route.agent, reason)
                broken = reason
            await asyncio.sleep(_RETRY_SECONDS)
            self._routes.changed()

    async def _listen(self) -> None:
        """Until the route changes or the agent can no longer be heard."""
        route = self._routes.route
        path = "/v1/watch" if self._streams else "/v1/status"
        headers = {"Authorization": f"Bearer {self._routes.token()}"}
        async with self._session.get(route.agent + path, headers=headers) as answer:
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
                if self._routes.changed():
                    return

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
            url, headers = self._routes.route.api + "/health", self._routes.door()
            async with self._session.get(url, headers=headers, timeout=timeout) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
