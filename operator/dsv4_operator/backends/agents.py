"""HTTP client of the members' agents, the same for every backend."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

import aiohttp
import pydantic

from dsv4_runtime.contract import AgentStatus, DrainReport, GroupReport

_log = logging.getLogger("dsv4")

# The head's agent writes once a second.
SILENCE_SECONDS = 2.5
_CONNECT_SECONDS = 1.0
_STATUS_SECONDS = 1.5
_DRAIN_SECONDS = 1.5
_EVIDENCE_SECONDS = 10.0
_CONNECTIONS = 1024
# 16 members, each with at most 20 failures of 1 KiB, twice over.
_LINE_BYTES = 2**20

_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, pydantic.ValidationError)


class AgentClient:
    """Connections to agents. Agents are named by their base URL, and asked with the deployment's token."""

    def __init__(self) -> None:
        self._open: aiohttp.ClientSession | None = None

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._open is None:
            connector = aiohttp.TCPConnector(limit=_CONNECTIONS)
            self._open = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._open

    async def close(self) -> None:
        """Close all connections."""
        if self._open is not None:
            await self._open.close()
            self._open = None

    async def status(self, url: str, token: str | None) -> AgentStatus | None:
        """Return what the agent says of itself; None if it does not answer within 1.5 s."""
        answer = await self._get(f"{url}/v1/status", token, _STATUS_SECONDS)
        try:
            return AgentStatus.model_validate_json(answer) if answer is not None else None
        except pydantic.ValidationError:
            return None

    async def evidence(self, url: str, token: str | None) -> bytes | None:
        """Return what the agent kept of its engine's death, as JSON; None if it does not answer within 10 s."""
        return await self._get(f"{url}/v1/evidence", token, _EVIDENCE_SECONDS)

    async def drain(self, url: str, token: str | None, seconds: float) -> bool:
        """Have the engine at the head's `url` finish its open requests within `seconds`; return whether it is over.

        It is not over while an agent that can be reached takes its time to answer; it is where there is none, or
        where its answer is no answer.
        """
        limits = aiohttp.ClientTimeout(total=_DRAIN_SECONDS, sock_connect=_CONNECT_SECONDS)
        asked = {"seconds": str(seconds)}
        try:
            async with self._session.post(
                f"{url}/v1/drain", params=asked, headers=_headers(token), timeout=limits
            ) as answer:
                answer.raise_for_status()
                return DrainReport.model_validate_json(await answer.read()).over
        except _ERRORS as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
                return False
            _log.warning("the engine at %s ends without a drain: %s", url, str(error) or type(error).__name__)
            return True

    async def watch_group(self, url: str, token: str | None) -> AsyncGenerator[GroupReport]:
        """Yield what the head's agent at `url` reports of its group, until the stream ends.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError, ValueError: the stream is broken.
        """
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        async with self._session.get(
            f"{url}/v1/watch?group=1", headers=_headers(token), timeout=limits, read_bufsize=_LINE_BYTES
        ) as stream:
            stream.raise_for_status()
            while line := await stream.content.readline():
                yield GroupReport.model_validate_json(line)

    async def _get(self, url: str, token: str | None, seconds: float) -> bytes | None:
        limits = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.get(url, headers=_headers(token), timeout=limits) as answer:
                answer.raise_for_status()
                return await answer.read()
        except _ERRORS:
            return None


def _headers(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token is not None else {}
