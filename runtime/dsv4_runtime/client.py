"""HTTP client of agents, for backends, gateways and the other members of a group."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator
from itertools import islice
from typing import Any, TypeVar

import aiohttp
from aiohttp.http_exceptions import LineTooLong
from pydantic import BaseModel
from pydantic_core import from_json

from dsv4_runtime.contract import AgentStatus, DrainReport, GroupReport
from dsv4_runtime.contract.token import AgentCredential
from dsv4_runtime.util.files import own_shortage

_log = logging.getLogger("dsv4")

SILENCE_SECONDS = 2.5
"""A stream without data for this long is broken; agents write once a second."""
STATUS_SECONDS = 1.5
_CONNECT_SECONDS = 1.0
_DRAIN_SECONDS = 1.5
_EVIDENCE_SECONDS = 10.0
_CREDENTIALS = 4096
"""Number of agents with a cached token; another agent needs a second request."""
_LARGEST_BYTES = 256 * 2**10
"""Limit of an agent's report: 20 failures of 1 KiB, and some kilobytes beside them."""
_LINE_BYTES = 2**20
"""Limit of a line of a stream: the reports of 16 members."""
_EVIDENCE_BYTES = 16 * 2**20
_LARGEST_INTEGER = 2**63 - 1
_LONGEST_TEXT = 1024
_MOST_ITEMS = 256

D = TypeVar("D", bound=BaseModel)

AGENT_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, ValueError)
"""Errors of a request to an agent: no answer in time, an error status, or an invalid answer."""


class AgentClient:
    """Connections to agents. Agents are identified by their base URL and authenticated with the token of their
    incarnation.

    A member of the same incarnation has that token. Other clients derive it from the deployment's token key and the
    salt in an agent's refusal.
    """

    def __init__(self, token: str = "") -> None:
        """Take `token`, of the agents' incarnation; if it is empty, each request takes the token key."""
        self._token = token
        self._open: aiohttp.ClientSession | None = None
        self._credentials: dict[str, AgentCredential] = {}
        """By base URL, least recently used first."""

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._open is None:
            # One stream for each group of the operator, and one poll for each stale agent: beyond a limit, they would
            # wait for others to end, and agents would seem silent.
            connector = aiohttp.TCPConnector(limit=0)
            # Agents compress nothing; a compromised member must not make the operator decompress.
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
        """Return the token that the agent at `url` required last; empty before its first refusal."""
        known = self._credentials.get(url)
        return known.token if known is not None else self._token

    async def status(self, url: str, key: str | None = None, seconds: float = STATUS_SECONDS) -> AgentStatus:
        """Return the agent's status.

        Raises:
            AGENT_ERRORS: it does not within `seconds`.
        """
        return _report(AgentStatus, await self._get(url, "/v1/status", key, seconds, _LARGEST_BYTES))

    async def evidence(self, url: str, key: str | None) -> bytes:
        """Return the agent's evidence of its engine's death, as JSON.

        Raises:
            AGENT_ERRORS: it does not answer within 10 s.
        """
        return await self._get(url, "/v1/evidence", key, _EVIDENCE_SECONDS, _EVIDENCE_BYTES)

    async def drain(self, url: str, key: str | None, seconds: float) -> bool:
        """Drain the engine at the head's `url` within `seconds`; return whether the drain is over.

        It is over if the connection is refused or the answer is invalid, but not after a timeout: a busy machine may
        cause it, and the silence of a lost node soon counts as its loss. Nor without a file descriptor for the request.
        """
        limits = aiohttp.ClientTimeout(total=_DRAIN_SECONDS, sock_connect=_CONNECT_SECONDS)
        path = f"/v1/drain?seconds={seconds}"
        try:
            async with self._ask("POST", url, path, key, timeout=limits) as answer:
                return _report(DrainReport, await read_content(answer, _LARGEST_BYTES)).over
        except AGENT_ERRORS as error:
            if isinstance(error, TimeoutError) or own_shortage(error) is not None:
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
        # aiohttp refuses a line of more than twice its buffer.
        async with self._ask("GET", url, path, key, timeout=limits, read_bufsize=_LINE_BYTES // 2) as stream:
            while line := await _line(stream):
                yield _report(kind, line)

    async def _get(self, url: str, path: str, key: str | None, seconds: float, most: int) -> bytes:
        async with self._ask("GET", url, path, key, timeout=aiohttp.ClientTimeout(total=seconds)) as answer:
            return await read_content(answer, most)

    @contextlib.asynccontextmanager
    async def _ask(
        self, method: str, url: str, path: str, key: str | None, **options: Any
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request to the agent at `url`, and once more if it refuses with the salt of another token.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError: there is no answer, or an error status.
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


async def read_content(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the whole content.

    Raises:
        ValueError: it has more than `most` bytes.
    """
    pieces: list[bytes] = []
    size = 0
    async for piece in answer.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise ValueError(f"an answer of more than {most} bytes")
    return b"".join(pieces)


async def _line(stream: aiohttp.ClientResponse) -> bytes:
    """Return the next line, empty at the end of the stream.

    Raises:
        ValueError: it is longer than the buffer of the stream.
    """
    try:
        return await stream.content.readline()
    except LineTooLong as error:
        # Not an `aiohttp.ClientError`.
        raise ValueError(str(error)[:200]) from None


def _report(kind: type[D], data: bytes) -> D:
    """Read a report. A member runs the user's image, so its reports may be of any shape and size.

    Longer texts are cut to 1,024 characters, and of a list the last 256 items are kept, of an object the first 256.

    Raises:
        ValueError: the report is invalid, or has a number that JSON writers do not accept.
    """
    return kind.model_validate(_bounded(from_json(data, allow_inf_nan=False)))


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_LONGEST_TEXT]
    if isinstance(value, dict):
        return {name[:_LONGEST_TEXT]: _bounded(item) for name, item in islice(value.items(), _MOST_ITEMS)}
    if isinstance(value, list):
        return [_bounded(item) for item in value[-_MOST_ITEMS:]]
    if isinstance(value, int | float) and not -_LARGEST_INTEGER <= value <= _LARGEST_INTEGER:
        raise ValueError("a number of more than 63 bits")
    return value
