"""HTTP/1.1 messages as they come in: what is the same for the client's requests and vLLM's answers.

Requests to an engine are far apart, and what a gateway does for one is done by a processor that has slept and caches
that others have filled: there every layer costs several times what it costs in a loop
(docs/decisions/0006-gateway-protocols.md). So `downstream` and `upstream` are protocols of the event loop around
llhttp's parser and this class, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import cast

Headers = list[tuple[bytes, bytes]]
Fields = list[tuple[bytes, bytes, bytes]]
"""Headers as they came, in their order: the name in lower case, the name as it was spelled, the value."""

MAX_WAITING_BYTES = 2**18
"""Bytes that may wait for somebody who reads slowly; more stays with the other side."""
BODILESS = frozenset({204, 304})
"""Statuses whose answers have no body, as have those to HEAD (RFC 9110, 6.4.1)."""


class BrokenMessageError(ConnectionError):
    """The connection broke before the message was complete, or what came over it is no HTTP/1.1."""


class BaseConnection(asyncio.BaseProtocol):
    """Common part of both sides' connections."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        """None before it is made and after it is lost."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport that the event loop made."""
        self.transport = cast(asyncio.Transport, transport)

    def pause(self) -> None:
        """Read no more for now."""
        if self.transport is not None:
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self.transport is not None:
            self.transport.resume_reading()

    def abort(self) -> None:
        """Break it."""
        if self.transport is not None:
            self.transport.abort()


class Message:
    """Headers and a body that comes in pieces. The parser's owner puts in, one task takes out."""

    def __init__(self, connection: BaseConnection) -> None:
        self.headers: Fields = []
        self.complete = False
        """Whether all of it is here."""
        self._connection = connection
        self._parts: list[bytes] = []
        self._waiting = 0
        self._broken: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def header(self, name: bytes) -> str:
        """Return the value of a header: empty if there is none, joined by commas if several. `name` in lower case."""
        return ",".join([value.decode("latin-1") for key, _, value in self.headers if key == name])

    async def part(self) -> bytes:
        """Return what has come of the body since the last call, once there is something; nothing: that was all of it.

        Raises:
            BrokenMessageError: it broke off; what came before that is given first.
        """
        while not self._parts:
            if self.complete:
                return b""
            await self.news()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        was_full = self.is_full
        self.drop()
        if was_full:
            self._connection.resume()
        return data

    async def news(self) -> None:
        """Wait until something more of it is here.

        Raises:
            BrokenMessageError: nothing more will come.
        """
        if self._broken is not None:
            # A new one each time: an exception that is kept keeps the frames that it was raised in.
            raise BrokenMessageError(self._broken)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def is_full(self) -> bool:
        """Tell whether as much of the body waits as may wait."""
        return self._waiting > MAX_WAITING_BYTES

    def put(self, data: bytes) -> None:
        """Append a piece of the body."""
        self._parts.append(data)
        self._waiting += len(data)
        if self.is_full:
            self._connection.pause()
        self.wake()

    def drop(self) -> None:
        """Forget what has come of the body and was not taken."""
        self._parts.clear()
        self._waiting = 0

    def finish(self) -> None:
        """Note that nothing more will come: that was all of it."""
        self.complete = True
        self.wake()

    def fail(self, reason: str) -> None:
        """Note that nothing more will come, though it is not complete."""
        if not self.complete and self._broken is None:
            self._broken = reason
        self.wake()

    def wake(self) -> None:
        """Wake who waits: there is something new."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def encode_headers(headers: Mapping[str, str]) -> Headers:
    """Return headers as bytes."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def encode_head(first: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the first line, headers and the empty line after them."""
    return b"".join((first, b"\r\n", *[b"%b: %b\r\n" % header for header in headers], b"\r\n"))
