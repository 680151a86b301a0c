"""HTTP/1.1: messages of both sides, also of `http_server`, and the client for vLLM with persistent connections.

Requests arrive far apart, so most run with idle CPU states and cold caches, and every layer costs several times its
cost in a tight loop (docs/decisions/0006-gateway-protocols.md). Both sides are therefore event loop protocols directly
around llhttp's parser and `Message`.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import cast
from urllib.parse import urlsplit

import httptools

from dsv4_runtime.util.files import own_shortage

Headers = list[tuple[bytes, bytes]]
Fields = list[tuple[bytes, bytes, bytes]]
"""Received headers in order: lower-case name, original name, value."""

MAX_WAITING_BYTES = 2**18
"""Buffered bytes of a body beyond which reading from the peer is paused."""
GENERATING = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/pooling"}
)
"""Paths whose 200 responses are computed by the engine."""
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
    def is_broken(self) -> bool:
        """Return whether the rest of the message cannot be received."""
        return self._broken is not None

    @property
    def has_data(self) -> bool:
        """Return whether a part of the body is buffered."""
        return bool(self._parts)

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


_CONNECT_SECONDS = 2.0
_SHORTAGE_SECONDS, _SHORTAGE_PAUSE_SECONDS = 30.0, 0.1
"""Longest wait for a free file descriptor of this process, and pause between two attempts."""
_IDLE_SECONDS = 4.0
"""Below vLLM's keep-alive timeout of 5 s."""
# Detect dead machines by TCP keep-alive only: vLLM itself may take arbitrarily long to respond.
_SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000),
)
# Requests without a body have no Content-Length for these methods (RFC 9110, 8.6).
_USUALLY_EMPTY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "DELETE"})

_MAX_JOINED_BYTES = 2**16
"""Above this size, copying a body costs more than separate writes."""

_Address = tuple[str, int]
BodyPiece = bytes | bytearray | memoryview
"""Part of a request body. A body is sent in parts where joining them would double its memory."""


@functools.lru_cache(maxsize=64)
def _endpoint(api: str) -> tuple[str, _Address]:
    """Return the value of `Host` and the address to connect to."""
    parts = urlsplit(api)
    return parts.netloc, (parts.hostname or "", parts.port or 80)


class UnreachableError(ConnectionError):
    """No connection was established; vLLM has not received the request."""


class UpstreamResponse(Message):
    """Response of vLLM to one request, and the parser's callback object (`on_*`)."""

    def __init__(self, connection: _EngineConnection, *, to_head: bool, computed: bool) -> None:
        super().__init__(connection)
        self._last_body, self._place = connection.last_body, connection.place
        self._computed = computed
        self.status = 0
        self.continued = False
        """Whether vLLM asked for the body (status 100)."""
        self.reusable = False
        """Whether the connection can be reused after the response is complete."""
        self._to_head = to_head
        self._parser = httptools.HttpResponseParser(self)
        self._until_closed = False

    async def read(self) -> bytes:
        """Return the whole body; raise BrokenMessageError if it is incomplete."""
        parts = []
        while part := await self.part():
            parts.append(part)
        return b"".join(parts)

    def feed(self, data: bytes) -> None:
        """Parse received bytes."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.reusable = False
            self.fail(f"vLLM's response is not HTTP/1.1 ({type(error).__name__}: {error})")

    def closed(self, error: Exception | None) -> None:
        """Handle the end of the connection."""
        self.reusable = False
        if self._until_closed and error is None:
            self.finish()
        what = "in the middle of its answer" if self.status else "without an answer"
        self.fail(f"vLLM closed the connection {what}" + (f" ({error})" if error else ""))

    def on_message_begin(self) -> None:
        """Mark the connection as not reusable if an unsolicited response arrives."""
        if self.complete:
            self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; trailers are dropped."""
        if not self.status:
            self.headers.append((name.lower(), name, value))

    def on_headers_complete(self) -> None:
        """Store the status; interim responses (1xx), which consist of a head only, are dropped."""
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()
            if status == 100:
                self.continued = True
                self.wake()
            return
        self.status = status
        framed = {name for name, _, _ in self.headers} & {b"content-length", b"transfer-encoding"}
        self._until_closed = not framed and status not in BODILESS
        if self._to_head:
            # Content-Length of a HEAD response describes a body that is not sent; the parser would wait for it.
            self.finish()
        self.wake()

    def on_body(self, data: bytes) -> None:
        """Store a part of the body."""
        if not self.complete:
            if self.status == 200 and self._computed:
                self._last_body[self._place] = time.monotonic()
            self.put(data)

    def on_message_complete(self) -> None:
        """Handle the end of the response, or of an interim response."""
        if self.status and not self.complete:
            self.reusable = self._parser.should_keep_alive()
            self.finish()


class _EngineConnection(BaseConnection, asyncio.Protocol):
    """Connection with at most one response in progress."""

    def __init__(self, place: _Address, last_body: dict[_Address, float]) -> None:
        super().__init__()
        self.place = place
        self.answer: UpstreamResponse | None = None
        self.idle_since = 0.0
        self.last_body = last_body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if (found := transport.get_extra_info("socket")) is not None:
            for option in _SOCKET_OPTIONS:
                found.setsockopt(*option)

    @property
    def alive(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        if self.answer is None:
            self.abort()
        else:
            self.answer.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.answer is not None:
            self.answer.closed(exc)

    def send(self, request: Sequence[BodyPiece], *, to_head: bool, computed: bool) -> UpstreamResponse:
        self.answer = UpstreamResponse(self, to_head=to_head, computed=computed)
        if self.transport is None:
            self.answer.closed(None)
        else:
            self.write(request)
        return self.answer

    def write(self, pieces: Sequence[BodyPiece]) -> None:
        if self.transport is not None:
            for piece in filter(len, pieces):
                self.transport.write(piece)


class UpstreamRequest:
    """Request that is sent by `async with`, which returns the response after its head and releases the connection."""

    def __init__(
        self,
        upstream: Upstream,
        place: _Address,
        request: Sequence[BodyPiece],
        admitted: Callable[[], None] | None,
        *,
        to_head: bool,
        computed: bool,
    ) -> None:
        self._upstream, self._place = upstream, place
        self._request, self._admitted, self._to_head, self._computed = request, admitted, to_head, computed
        self._connection: _EngineConnection | None = None
        self._withheld = admitted is not None
        """Whether the body was not sent, so no other request can follow on the connection."""

    async def __aenter__(self) -> UpstreamResponse:
        self._connection = await self._upstream.connection(self._place)
        (head, *body), admitted = self._request, self._admitted
        self._request = ()
        try:
            first = (head, *body) if admitted is None else (head,)
            answer = self._connection.send(first, to_head=self._to_head, computed=self._computed)
            if admitted is not None:
                try:
                    while not (answer.continued or answer.status):
                        await answer.wait_for_data()
                except BrokenMessageError as error:
                    raise UnreachableError(str(error)) from error
                if answer.continued:
                    admitted()
                    self._connection.write(body)
                    self._withheld = False
            while not answer.status:
                await answer.wait_for_data()
        except BaseException as error:
            if not self._outlives(error):
                self.close()
            raise
        return answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._outlives(error):
            self.close()

    def _outlives(self, error: BaseException | None) -> bool:
        return self._admitted is not None and isinstance(error, asyncio.CancelledError)

    @property
    def answer(self) -> UpstreamResponse | None:
        """Return the response of a request that is open."""
        return self._connection.answer if self._connection is not None else None

    def close(self) -> None:
        """Release the connection. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._withheld:
                connection.abort()
            self._upstream.release(connection)


class Upstream:
    """Pool of connections to vLLM."""

    def __init__(self) -> None:
        self._idle: dict[_Address, collections.deque[_EngineConnection]] = collections.defaultdict(collections.deque)
        """Idle connections, most recently used last."""
        self._last_body: dict[_Address, float] = {}
        """Monotonic time of the last received body part of a 200 response to a path in `GENERATING`."""

    def request(
        self,
        api: str,
        method: str,
        target: str,
        headers: Iterable[tuple[bytes, bytes]],
        body: Sequence[BodyPiece] = (),
        admitted: Callable[[], None] | None = None,
    ) -> UpstreamRequest:
        """Prepare a request; it is sent by entering the result.

        Args:
            api: `http://host:port`.
            target: path and query as sent.
            headers: headers without `Host` and without framing.
            body: parts of the body in order.
            admitted: if given, the body is sent only when vLLM asks for it (`Expect: 100-continue`, RFC 9110, 10.1.1),
                after a call of this function, and if the task is cancelled, the request stays open until `close`.

        Entering raises:
            UnreachableError: no connection could be established in time, or it broke before vLLM asked for the body.
            BrokenMessageError: the connection broke before the head of the response was received.
        """
        netloc, place = _endpoint(api)
        size = sum(map(len, body))
        framing = [(b"Content-Length", b"%d" % size)] if size or method not in _USUALLY_EMPTY else []
        if admitted is not None:
            framing.append((b"Expect", b"100-continue"))
        first = f"{method} {target} HTTP/1.1\r\nHost: {netloc}".encode("latin-1")
        request: tuple[BodyPiece, ...] = encode_head(first, [*headers, *framing]), *body
        if size < _MAX_JOINED_BYTES and admitted is None:
            request = (b"".join(request),)
        computed = target.partition("?")[0] in GENERATING
        return UpstreamRequest(self, place, request, admitted, to_head=method == "HEAD", computed=computed)

    def last_body(self, api: str) -> float:
        """Return the monotonic time of the last body part of a 200 response that the engine at `api` computed; 0 if
        there was none. vLLM's API process answers other paths also while its engine hangs.
        """
        return self._last_body.get(_endpoint(api)[1], 0.0)

    async def connection(self, place: _Address) -> _EngineConnection:
        """Return an idle or new connection; raise UnreachableError if none can be established in time."""
        begun, idle = time.monotonic(), self._idle[place]
        while True:
            now = time.monotonic()
            while idle:
                kept = idle.pop()
                if kept.alive and now - kept.idle_since < _IDLE_SECONDS:
                    return kept
                kept.abort()
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    _, made = await asyncio.get_running_loop().create_connection(
                        lambda: _EngineConnection(place, self._last_body), *place
                    )
            except TimeoutError as error:
                message = f"no connection to {place[0]}:{place[1]} within {_CONNECT_SECONDS:g} s"
                raise UnreachableError(message) from error
            except OSError as error:
                if own_shortage(error) is None or now - begun > _SHORTAGE_SECONDS:
                    raise UnreachableError(str(error)) from error
                # The engine is not to blame, and another request may leave its connection.
                await asyncio.sleep(_SHORTAGE_PAUSE_SECONDS)
            else:
                return made

    def release(self, connection: _EngineConnection) -> None:
        """Return a reusable connection to the pool; abort any other, so that vLLM stops working on an abandoned
        request.
        """
        answer, connection.answer = connection.answer, None
        if answer is None or not (answer.complete and answer.reusable and connection.alive):
            connection.abort()
            return
        connection.idle_since = time.monotonic()
        idle = self._idle[connection.place]
        idle.append(connection)
        while not idle[0].alive:
            idle.popleft()

    def close(self) -> None:
        """Abort all idle connections."""
        for idle in self._idle.values():
            while idle:
                idle.pop().abort()
