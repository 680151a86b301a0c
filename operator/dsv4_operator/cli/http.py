"""HTTP requests of synchronous commands, without the environment's proxy: deployments are reached directly."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

CONNECT_SECONDS = 5.0
_LARGEST_BYTES = 1 << 20
ERRORS = (aiohttp.ClientError, OSError)
"""Errors of a request: no connection, no response in time, or a broken response."""


class HttpResponse:
    """Response whose body arrives while it is read."""

    def __init__(self, runner: asyncio.Runner, response: aiohttp.ClientResponse) -> None:
        self._runner = runner
        self._content = response.content
        self.status = response.status

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the body as they arrive."""
        while data := self._runner.run(self._content.readany()):
            yield data

    def read(self) -> bytes:
        """Return the body, at most its first MiB."""
        data = bytearray()
        for chunk in self.chunks():
            data += chunk
            if len(data) > _LARGEST_BYTES:
                break
        return bytes(data[:_LARGEST_BYTES])


@contextmanager
def open_url(
    method: str,
    url: str,
    *,
    token: str = "",
    body: Any = None,
    total_seconds: float | None = None,
    silence_seconds: float | None = None,
) -> Iterator[HttpResponse]:
    """Yield the response to a request; redirects are not followed.

    Args:
        method: HTTP method.
        url: address.
        token: bearer token; empty if none is required.
        body: JSON document to send.
        total_seconds: limit for the whole response.
        silence_seconds: limit for the next bytes.

    Raises:
        ERRORS: the request failed.
    """
    limits = aiohttp.ClientTimeout(total=total_seconds, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def request() -> tuple[aiohttp.ClientSession, aiohttp.ClientResponse]:
        session = aiohttp.ClientSession(timeout=limits, headers=headers)
        try:
            return session, await session.request(method, url, json=body, allow_redirects=False)
        except BaseException:
            await session.close()
            raise

    with asyncio.Runner() as runner:
        session, response = runner.run(request())
        try:
            yield HttpResponse(runner, response)
        finally:
            response.close()
            runner.run(session.close())


def reason(error: Exception) -> str:
    """Return the cause of one of `ERRORS`."""
    if isinstance(error, aiohttp.ClientConnectorError) and (error.os_error.errno or 0) > 0:
        # asyncio's text has the address only.
        return os.strerror(error.os_error.errno or 0)
    return str(error) or type(error).__name__
