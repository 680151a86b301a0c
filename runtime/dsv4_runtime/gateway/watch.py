"""Follows the agent of a group's head, and checks vLLM itself when the agent or a request gives reason to."""

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
from dsv4_runtime.gateway.route import RouteFile, TokenKeyError

_log = logging.getLogger("dsv4.gateway")

_RETRY_SECONDS = 0.2
_HEALTH_SECONDS = 2.0
SILENCE_SECONDS = 6.0
"""Time without a status of the agent and without an answer of vLLM after which a request no longer waits for them."""
_LOOK_SECONDS = 1.0
_REPEAT_SECONDS = 60.0
"""Between two lines of the log about the same state of an agent."""


class Watch:
    """Keeps the `EngineView` of one group up to date.

    A connection to the agent that breaks says nothing about the engine: the last verdict stands until the next, as long
    as vLLM answers. When neither does, the machine or the way to it is gone, and no verdict will come from there.
    """

    def __init__(self, route: GroupRoute, routes: RouteFile, engine: EngineView) -> None:
        """Args:
        route: where the group is.
        routes: has the token key.
        engine: what is kept up to date.
        """
        self._agent, self._api, self._routes, self._engine = route.agent, route.api, routes, engine
        self._group = route.group
        self._heard: float | None = None
        self._proved = 0.0
        """Time of the last answer of vLLM while the agent was silent."""
        self.connected = False
        """Whether the agent sends its status now."""
        self.refusal: str | None = None
        """Reason why this gateway's credentials do not open the agent; None: they do, or it was not reached yet."""
        self._problem = ""
        self._logged = 0.0
        self._client = AgentClient()
        self._vllm = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_SECONDS), auto_decompress=False)

    @property
    def age(self) -> float | None:
        """Return the seconds since the agent's last status; None: there was none."""
        return None if self._heard is None else time.monotonic() - self._heard

    @property
    def auth(self) -> Mapping[str, str]:
        """Return the headers that open vLLM's port in the incarnation of the agent's last status."""
        return token_auth.headers(self._client.token(self._agent))

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            await asyncio.gather(self._follow(), self._settle_doubts(), self._check_silence())
        finally:
            await asyncio.gather(self._client.close(), self._vllm.close())

    async def _follow(self) -> None:
        while True:
            try:
                await self._listen()
            except TokenKeyError as error:
                self._refuse(str(error))
            except aiohttp.ClientResponseError as error:
                if error.status == 401:
                    path = self._routes.route.token_key_file
                    self._refuse(f"the agent of group {self._group} answers 401: its token key is not that in {path}")
                else:
                    self._note("unreachable", f"status {error.status}")
            except AGENT_ERRORS as error:
                self._note("unreachable", f"{type(error).__name__}: {str(error)[:200]}")
            finally:
                self.connected = False
            await asyncio.sleep(_RETRY_SECONDS)

    async def _listen(self) -> None:
        """Pass on the agent's statuses until the connection ends.

        Raises:
            TokenKeyError: there is no key to make a token with.
            AGENT_ERRORS: the connection broke, or the agent refused it.
        """
        async with contextlib.aclosing(self._client.watch(self._agent, self._routes.token_key())) as stream:
            async for status in stream:
                self._heard = time.monotonic()
                self.connected, self.refusal = True, None
                self._note("", "")
                self._engine.report(status)

    def _refuse(self, reason: str) -> None:
        """Note that the credentials do not open the agent: another incarnation is there, or another deployment."""
        self.refusal = f"agent credentials rejected: {reason}"
        self._engine.lose()
        self._note("credentials rejected", reason)

    def _note(self, problem: str, reason: str) -> None:
        """Log a change of the agent's state at once, and a state that lasts at most once a minute."""
        now = time.monotonic()
        if problem == self._problem and (not problem or now - self._logged < _REPEAT_SECONDS):
            return
        if problem:
            _log.warning("group %d: agent at %s: %s (%s)", self._group, self._agent, problem, reason)
        elif self._problem:
            _log.info("group %d: agent at %s: reachable again", self._group, self._agent)
        self._problem, self._logged = problem, now

    async def _check_silence(self) -> None:
        """While the agent is silent, check that vLLM answers; when it does not for long, give up this life of it."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self.connected or self._heard is None or not self._engine.alive:
                continue
            if await self._alive():
                self._proved = time.monotonic()
                continue
            if self.connected:
                continue
            self._engine.doubt_all()
            if time.monotonic() - max(self._heard, self._proved) > SILENCE_SECONDS:
                _log.warning("group %d: neither its agent nor vLLM answers; its requests go elsewhere", self._group)
                self._engine.lose()

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
