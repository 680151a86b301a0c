"""HTTP client of agents, for backends, gateways and the other members of a group."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import aiohttp
from pydantic import BaseModel

from dsv4_runtime.contract import AgentStatus, DrainReport, GroupReport
from dsv4_runtime.contract.token import AgentCredential

_log = logging.getLogger("dsv4")

SILENCE_SECONDS = 2.5
"""A stream on which nothing came for so long is broken; agents write once a second."""
STATUS_SECONDS = 1.5
_CONNECT_SECONDS = 1.0
_DRAIN_SECONDS = 1.5
_EVIDENCE_SECONDS = 10.0
_CONNECTIONS = 1024
_CREDENTIALS = 4096
"""Of so many agents the tokens are remembered: another one is asked twice."""
# 16 members, each with at most 20 failures of 1 KiB, twice over.
_LINE_BYTES = 2**20
_LARGEST_BYTES = 16 * 2**20
"""Of an answer; evidence, the longest, has at most some hundred kilobytes."""

D = TypeVar("D", bound=BaseModel)

AGENT_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, ValueError)
"""Errors of a question to an agent: no answer in time, an error as the answer, or one that is none."""


class AgentClient:
    """Connections to agents. Agents are named by their base URL, and asked with the token of their incarnation.

    A member of the same incarnation has that token. For everybody else it is made with the deployment's token key, when
    an agent refuses and says which one it is.
    """

    def __init__(self, token: str = "") -> None:
        """Take `token`, of the incarnation whose agents are asked; empty: each question brings the token key."""
        self._token = token
        self._open: aiohttp.ClientSession | None = None
        self._credentials: dict[str, AgentCredential] = {}
        """By base URL, those used last at the end."""

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._open is None:
            connector = aiohttp.TCPConnector(limit=_CONNECTIONS)
            # Agents compress nothing; a member that somebody has taken over must not make the operator expand it.
            self._open = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
            )
        return self._open

    async def close(self) -> None:
        """Close all connections."""
        if self._open is not None:
            await self._open.close()
            self._open = None

    def token(self, url: str) -> str:
        """Return the token that the agent at `url` asked for last; empty before its first refusal."""
        known = self._credentials.get(url)
        return known.token if known is not None else self._token

    async def status(self, url: str, key: str | None = None, seconds: float = STATUS_SECONDS) -> AgentStatus:
        """Return what the agent says of itself.

        Raises:
            AGENT_ERRORS: it does not within `seconds`.
        """
        return AgentStatus.model_validate_json(await self._get(url, "/v1/status", key, seconds))

    async def evidence(self, url: str, key: str | None) -> bytes:
        """Return what the agent kept of its engine's death, as JSON.

        Raises:
            AGENT_ERRORS: it does not answer within 10 s.
        """
        return await self._get(url, "/v1/evidence", key, _EVIDENCE_SECONDS)

    async def drain(self, url: str, key: str | None, seconds: float) -> bool:
        """Have the engine at the head's `url` finish its open requests within `seconds`; return whether it is over.

        It is over where nobody listens, or where the answer is no answer; not where none has come in time. That is
        what a busy machine looks like, and a node that is gone has been silent for too long before long.
        """
        limits = aiohttp.ClientTimeout(total=_DRAIN_SECONDS, sock_connect=_CONNECT_SECONDS)
        path = f"/v1/drain?seconds={seconds}"
        try:
            async with self._ask("POST", url, path, key, timeout=limits) as answer:
                return DrainReport.model_validate_json(await answer.read()).over
        except AGENT_ERRORS as error:
            if isinstance(error, TimeoutError):
                return False
            _log.warning("the engine at %s ends without a drain: %s", url, str(error) or type(error).__name__)
            return True

    def watch(self, url: str, key: str | None) -> AsyncGenerator[AgentStatus]:
        """Yield the status of the agent at `url` whenever it sends one, until the stream ends.

        Raises:
            AGENT_ERRORS: the stream is broken.
        """
        return self._documents(url, "/v1/watch", key, AgentStatus)

    def watch_group(self, url: str, key: str | None) -> AsyncGenerator[GroupReport]:
        """Yield the reports of the head's agent at `url` on its group, until the stream ends.

        Raises:
            AGENT_ERRORS: the stream is broken.
        """
        return self._documents(url, "/v1/watch?group=1", key, GroupReport)

    async def _documents(self, url: str, path: str, key: str | None, kind: type[D]) -> AsyncGenerator[D]:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        async with self._ask("GET", url, path, key, timeout=limits, read_bufsize=_LINE_BYTES) as stream:
            while line := await stream.content.readline():
                yield kind.model_validate_json(line)

    async def _get(self, url: str, path: str, key: str | None, seconds: float) -> bytes:
        async with self._ask("GET", url, path, key, timeout=aiohttp.ClientTimeout(total=seconds)) as answer:
            data = await answer.content.read(_LARGEST_BYTES)
            while not answer.content.at_eof() and len(data) < _LARGEST_BYTES:
                data += await answer.content.read(_LARGEST_BYTES - len(data))
        if len(data) >= _LARGEST_BYTES:
            raise ValueError(f"an answer of more than {_LARGEST_BYTES} bytes")
        return data

    @contextlib.asynccontextmanager
    async def _ask(
        self, method: str, url: str, path: str, key: str | None, **options: Any
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Ask the agent at `url`, and once more if it names another incarnation's token than was shown.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError: there is no answer, or it is an error.
        """
        credential = self._credentials.pop(url, None) or AgentCredential(self._token)
        self._credentials[url] = credential
        if len(self._credentials) > _CREDENTIALS:
            del self._credentials[next(iter(self._credentials))]
        for last in (False, True):
            shown = credential.headers
            async with self._session.request(method, url + path, headers=shown, **options) as answer:
                if answer.status == 401 and not last and key and credential.answer(key, shown, answer.headers):
                    continue
                answer.raise_for_status()
                yield answer
                return
