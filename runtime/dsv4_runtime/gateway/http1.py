"""HTTP/1.1 message parsing shared by the server side (`http_server`) and the client side (`http_client`).

Requests arrive far apart, so most run with idle CPU states and cold caches, and every layer costs several times its
cost in a tight loop (docs/decisions/0006-gateway-protocols.md). Both sides are therefore event loop protocols directly
around llhttp's parser and `Message`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import cast

Headers = list[tuple[bytes, bytes]]
Fields = list[tuple[bytes, bytes, bytes]]
"""Received headers in order: lower-case name, original name, value."""

MAX_WAITING_BYTES = 2**18
"""Buffered bytes of a body beyond which reading from the peer is paused."""
BODILESS = frozenset({204, 304})
"""Statuses of responses without a body; responses to HEAD have none either (RFC 9110, 6.4.1)."""


class BrokenMessageError(ConnectionError):
    """The connection broke before the message was complete, or the bytes are not HTTP/1.1."""


class BaseConnection(asyncio.BaseProtocol):
    """Common part of client and engine connections."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        """None before the connection is established and after it is lost."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def pause(self) -> None:
        if self.transport is not None:
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.transport is not None:
            self.transport.resume_reading()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class Message:
    """Headers and a body received in parts. The parser's owner adds parts; one task consumes them."""

    def __init__(self, connection: BaseConnection) -> None:
        self.headers: Fields = []
        self.complete = False
        """Whether the whole message was received."""
        self._connection = connection
        self._parts: list[bytes] = []
        self._waiting = 0
        self._broken: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def header(self, name: bytes) -> str:
        """Return the value of the header `name` (lower case): empty if absent, comma-joined if repeated."""
        return ",".join([value.decode("latin-1") for key, _, value in self.headers if key == name])

    async def part(self) -> bytes:
        """Return the body bytes received since the last call, waiting for the first; empty at the end of the body.

        Raises:
            BrokenMessageError: the body is incomplete; raised after all received bytes were returned.
        """
        while not self._parts:
            if self.complete:
                return b""
            await self.wait_for_data()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        was_full = self.is_full
        self.drop()
        if was_full:
            self._connection.resume()
        return data

    async def wait_for_data(self) -> None:
        """Wait until more of the message was received; raise BrokenMessageError if that is impossible."""
        if self._broken is not None:
            # A new exception each time: a stored one would keep the frames of its traceback alive.
            raise BrokenMessageError(self._broken)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def is_full(self) -> bool:
        """Return whether the buffered part of the body exceeds its limit."""
        return self._waiting > MAX_WAITING_BYTES

    def put(self, data: bytes) -> None:
        """Append a part of the body."""
        self._parts.append(data)
        self._waiting += len(data)
        if self.is_full:
            self._connection.pause()
        self.wake()

    def drop(self) -> None:
        """Discard the buffered part of the body."""
        self._parts.clear()
        self._waiting = 0

    def finish(self) -> None:
        """Mark the message as complete."""
        self.complete = True
        self.wake()

    def fail(self, reason: str) -> None:
        """Mark the message as broken unless it is complete."""
        if not self.complete and self._broken is None:
            self._broken = reason
        self.wake()

    def wake(self) -> None:
        """Wake the waiting consumer."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def encode_headers(headers: Mapping[str, str]) -> Headers:
    """Encode headers as bytes."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def encode_head(first: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode the first line, the headers and the empty line."""
    return b"".join((first, b"\r\n", *[b"%b: %b\r\n" % header for header in headers], b"\r\n"))
