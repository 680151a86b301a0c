"""Requests to vLLM, over connections that are kept."""

from __future__ import annotations

import asyncio
import collections
import functools
import socket
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from urllib.parse import urlsplit

import httptools

from dsv4_runtime.gateway import http1
from dsv4_runtime.gateway.http1 import BODILESS

_CONNECT_SECONDS = 2.0
_IDLE_SECONDS = 4.0
"""vLLM closes a connection on which nothing was asked for 5 s."""
# A machine that is gone acknowledges nothing. Only its kernel's silence counts here: vLLM may take as long as it likes.
_SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000),
)
# Without a body they have no Content-Length either (RFC 9110, 8.6).
_USUALLY_EMPTY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "DELETE"})

_MAX_JOINED_BYTES = 2**16
"""From here on a copy of a body costs more than writing its pieces."""

_Address = tuple[str, int]
BodyPiece = bytes | bytearray | memoryview
"""Of a body. A body is sent in pieces where joining them would double the memory that it takes."""


@functools.lru_cache(maxsize=4)
def _endpoint(api: str) -> tuple[str, _Address]:
    """Return what `Host` says, and where to connect to."""
    parts = urlsplit(api)
    return parts.netloc, (parts.hostname or "", parts.port or 80)


class UnreachableError(ConnectionError):
    """No connection came about: vLLM has not seen the request."""


class UpstreamResponse(http1.Message):
    """Answer of vLLM to one request. It is the receiver of the parser's calls too, the methods with `on_`."""

    def __init__(self, connection: _EngineConnection, *, to_head: bool) -> None:
        super().__init__(connection)
        self._last_body, self._place = connection.last_body, connection.place
        self.status = 0
        self.reusable = False
        """Whether another request may follow on the connection, once it is complete."""
        self._to_head = to_head
        self._parser = httptools.HttpResponseParser(self)
        self._until_closed = False

    async def read(self) -> bytes:
        """Return the whole body.

        Raises:
            BrokenMessageError: it broke off.
        """
        parts = []
        while part := await self.part():
            parts.append(part)
        return b"".join(parts)

    def feed(self, data: bytes) -> None:
        """Take what the connection received."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.reusable = False
            self.fail(f"what vLLM answered is no HTTP/1.1 ({type(error).__name__}: {error})")

    def closed(self, error: Exception | None) -> None:
        """Note that the connection is over."""
        self.reusable = False
        if self._until_closed and error is None:
            self.finish()
        what = "in the middle of its answer" if self.status else "without an answer"
        self.fail(f"vLLM closed the connection {what}" + (f" ({error})" if error else ""))

    def on_message_begin(self) -> None:
        """Give the connection up if nobody asked for this answer: it is no longer to be understood."""
        if self.complete:
            self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; those that follow a body are dropped."""
        if not self.status:
            self.headers.append((name.lower(), name, value))

    def on_headers_complete(self) -> None:
        """Take the status, but not of interim answers (1xx), which have a head and nothing else."""
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()
            return
        self.status = status
        framed = {name for name, _, _ in self.headers} & {b"content-length", b"transfer-encoding"}
        self._until_closed = not framed and status not in BODILESS
        if self._to_head:
            # Its length is that of another answer, and the parser would wait for the body.
            self.finish()
        self.wake()

    def on_body(self, data: bytes) -> None:
        """Take a piece of it."""
        if not self.complete:
            if self.status == 200:
                self._last_body[self._place] = time.monotonic()
            self.put(data)

    def on_message_complete(self) -> None:
        """Note the end of it, or of an interim answer."""
        if self.status and not self.complete:
            self.reusable = self._parser.should_keep_alive()
            self.finish()


class _EngineConnection(http1.BaseConnection, asyncio.Protocol):
    """One connection, which has one answer at a time."""

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

    def ask(self, request: Sequence[BodyPiece], *, to_head: bool) -> UpstreamResponse:
        self.answer = UpstreamResponse(self, to_head=to_head)
        if self.transport is None:
            self.answer.closed(None)
        else:
            for piece in filter(len, request):
                self.transport.write(piece)
        return self.answer


class UpstreamRequest:
    """`async with` sends the request, gives the answer once its head has come, and lets go of the connection."""

    def __init__(self, upstream: Upstream, place: _Address, request: Sequence[BodyPiece], *, to_head: bool) -> None:
        self._upstream, self._place = upstream, place
        self._request, self._to_head = request, to_head
        self._connection: _EngineConnection | None = None

    async def __aenter__(self) -> UpstreamResponse:
        self._connection = await self._upstream.connection(self._place)
        try:
            answer = self._connection.ask(self._request, to_head=self._to_head)
            self._request = ()
            while not answer.status:
                await answer.news()
        except BaseException:
            self._connection.abort()
            raise
        return answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            self._upstream.release(self._connection)


class Upstream:
    """Connections to vLLM, kept for the next request."""

    def __init__(self) -> None:
        self._idle: dict[_Address, collections.deque[_EngineConnection]] = collections.defaultdict(collections.deque)
        """The one that was used last is at the end."""
        self._last_body: dict[_Address, float] = {}
        """Time at which vLLM sent a piece of a good answer last."""

    def ask(
        self, api: str, method: str, target: str, headers: Iterable[tuple[bytes, bytes]], body: Sequence[BodyPiece] = ()
    ) -> UpstreamRequest:
        """Return a request, which is sent when the result is entered.

        Args:
            api: `http://host:port`.
            target: path and query as they go over the wire.
            headers: all but `Host` and those that frame the body.
            body: its pieces, in their order.

        Entering raises:
            UnreachableError: nobody listens there, or not in time.
            BrokenMessageError: the connection broke before the head of the answer came.
        """
        netloc, place = _endpoint(api)
        size = sum(map(len, body))
        framing = [(b"Content-Length", b"%d" % size)] if size or method not in _USUALLY_EMPTY else []
        first = f"{method} {target} HTTP/1.1\r\nHost: {netloc}".encode("latin-1")
        request: tuple[BodyPiece, ...] = http1.encode_head(first, [*headers, *framing]), *body
        if size < _MAX_JOINED_BYTES:
            request = (b"".join(request),)
        return UpstreamRequest(self, place, request, to_head=method == "HEAD")

    def last_body(self, api: str) -> float:
        """Return the monotonic time at which the vLLM at `api` last sent a piece of an answer 200; 0: never."""
        return self._last_body.get(_endpoint(api)[1], 0.0)

    async def connection(self, place: _Address) -> _EngineConnection:
        """Return one on which nothing is asked.

        Raises:
            UnreachableError: there is none.
        """
        now = time.monotonic()
        idle = self._idle[place]
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
            raise UnreachableError(f"no connection to {place[0]}:{place[1]} within {_CONNECT_SECONDS:g} s") from error
        except OSError as error:
            raise UnreachableError(str(error)) from error
        return made

    def release(self, connection: _EngineConnection) -> None:
        """Keep it if another request may follow on it, else break it: vLLM must not work on for nobody."""
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
        """Let go of all that are kept."""
        for idle in self._idle.values():
            while idle:
                idle.pop().abort()
