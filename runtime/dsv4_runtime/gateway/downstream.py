"""The clients' side: a server for HTTP/1.1, and a request as its handler sees it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import email.utils
import http
import logging
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

import httptools

from dsv4_runtime.gateway import errors, http1
from dsv4_runtime.gateway.http1 import BODILESS, BrokenMessageError, Fields, Headers

_log = logging.getLogger("dsv4.gateway")

_KEEPALIVE_SECONDS = 75.0
"""How long a connection may take to begin a request, and to end its head."""
_MAX_HEAD_BYTES = 2**16
_MAX_QUEUED = 16
"""Requests of one connection that wait for the one before them."""
_LINGER_SECONDS = 2.0
"""How long what is left of a refused body is read: a connection broken at once would take the answer with it."""
_PHRASES = {status.value: status.phrase.encode() for status in http.HTTPStatus}


class Request(http1.Message):
    """One request, and the way back to whoever asked it. An answer is one `send`, or `begin`, `write`s and `end`."""

    def __init__(self, connection: _Connection, remote: str) -> None:
        super().__init__(connection)
        self._client = connection
        self.method = ""
        self.target = ""
        """Path and query as they came over the wire."""
        self.path = ""
        """Decoded."""
        self.remote = remote
        """The client's address."""
        self.upgrade = False
        """Whether another protocol is wanted."""
        self.keep_alive = False
        """Whether another request may follow on the connection; may be taken back until the answer begins."""
        self.chunks = True
        """Whether the client can read an answer whose length is not known: not before HTTP/1.1."""
        self.begun = False
        """Whether the client has anything of an answer."""
        self.ended = False
        self._unsent = b""
        self._chunked = self._bodiless = False

    async def go_on(self) -> None:
        """Tell a client that waits for it (`Expect: 100-continue`) to send the body."""
        if not self.complete and self.header(b"expect").lower() == "100-continue":
            await self._client.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer.

        Raises:
            ConnectionError: nobody is left to read it.
        """
        self._prepare(status, headers, len(body))
        self.begun = self.ended = True
        await self._client.send(self._unsent if self._bodiless else self._unsent + body)

    def begin(self, status: int, headers: Headers) -> None:
        """The head of an answer whose length is not known; it is sent with what comes next, in one packet.

        Until then another may take its place.
        """
        self._prepare(status, headers, None)

    async def write(self, data: bytes) -> None:
        """A part of the answer; waits for a client that does not read.

        Raises:
            ConnectionError: nobody is left to read it.
        """
        self.begun = True
        unsent, self._unsent = self._unsent, b""
        if self._chunked and data:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        await self._client.send(unsent if self._bodiless else unsent + data)

    async def end(self) -> None:
        """The end of it.

        Raises:
            ConnectionError: nobody is left to read it.
        """
        self.begun = self.ended = True
        await self._client.send(self._unsent + (b"0\r\n\r\n" if self._chunked else b""))

    @property
    def is_read(self) -> bool:
        """Whether the client takes what it is sent, as far as it is there."""
        return self._client.is_read

    def abort(self) -> None:
        """Break the connection: whoever reads knows that the answer is not whole."""
        self._client.abort()

    def _prepare(self, status: int, headers: Headers, length: int | None) -> None:
        if self.begun:
            raise RuntimeError("the answer has begun already")
        self._chunked = False
        self._bodiless = self.method == "HEAD" or status in BODILESS
        framing: Headers = []
        if length is not None and not self._bodiless:
            framing.append((b"Content-Length", b"%d" % length))
        elif length is None and self.chunks and not self._bodiless:
            self._chunked = True
            framing.append((b"Transfer-Encoding", b"chunked"))
        # What is left of the request would be taken for the next one. Without a length, the end says what the end is.
        self.keep_alive &= self.complete and (length is not None or self._chunked or self._bodiless)
        if not self.keep_alive:
            framing.append((b"Connection", b"close"))
        elif not self.chunks:
            framing.append((b"Connection", b"keep-alive"))
        if not any(name.lower() == b"date" for name, _ in headers):
            framing.append((b"Date", email.utils.formatdate(usegmt=True).encode()))
        first = b"HTTP/1.1 %d %b" % (status, _PHRASES.get(status, b""))
        self._unsent = http1.head(first, [*headers, *framing])


Handler = Callable[[Request], Awaitable[None]]


class _Connection(http1.Connection):
    """One client's connection, and the receiver of its parser's calls, the methods with `on_`.

    Requests are handled one after another in their order. A client that leaves ends the handling of its request: what
    nobody waits for must not go on costing tokens.
    """

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._arriving: Request | None = None
        """Whose body is not complete."""
        self._queue: collections.deque[Request] = collections.deque()
        self._task: asyncio.Task[None] | None = None
        self._target = b""
        self._headers: Fields = []
        self._remote = ""
        self._in_head = False
        self._head_bytes = 0
        """Received since the head began that has no end yet."""
        self._deaf = False
        """Whether what is received is of no interest any more."""
        self._timer: asyncio.TimerHandle | None = None
        self._drained: asyncio.Future[None] | None = None
        """Pending while the client does not read."""

    @property
    def is_read(self) -> bool:
        if self.transport is None:
            return True
        low, _ = self.transport.get_write_buffer_limits()
        return self.transport.get_write_buffer_size() <= low

    async def send(self, data: bytes) -> None:
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError("the client is gone")
        if data:
            self.transport.write(data)
        if self._drained is not None:
            # Who is cancelled here may have last words to send.
            await asyncio.shield(self._drained)

    def retire(self) -> None:
        """Close as soon as the present request is answered; at once if there is none."""
        if self._task is None:
            self._hang_up()

    async def end(self) -> None:
        """Break it, and wait for its handler."""
        self.abort()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._remote = str(peer[0]) if peer else ""
        self._server.connections.add(self)
        self._arm(_KEEPALIVE_SECONDS, self._hang_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._server.forget(self)
        self._disarm()
        self._queue.clear()
        if self._arriving is not None:
            self._arriving.fail(BrokenMessageError("the client is gone"))
        self.resume_writing()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # What follows is in the other protocol, which nobody here speaks.
            self._deaf = True
        except httptools.HttpParserError as error:
            self._refuse(errors.malformed(str(error)))
        self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
        if self._head_bytes > _MAX_HEAD_BYTES and not self._deaf:
            self._refuse(errors.head_too_large(_MAX_HEAD_BYTES))

    def _refuse(self, refusal: errors.Refusal) -> None:
        """There is no sense to be made of this connection any more."""
        self._deaf = True
        if self._arriving is not None:
            self._arriving.fail(BrokenMessageError(refusal.message))
            self._arriving.keep_alive = False
        elif self._task is None and self.transport is not None:
            request = Request(self, self._remote)
            self._task = asyncio.get_running_loop().create_task(self._serve(request, refusal))

    def on_message_begin(self) -> None:
        self._target, self._headers, self._in_head = b"", [], True

    def on_url(self, data: bytes) -> None:
        self._target += data

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._arriving is None:
            self._headers.append((name.lower(), name, value))

    def on_headers_complete(self) -> None:
        request = Request(self, self._remote)
        target = self._target if self._target[:1] in b"/*" else _relative(self._target)
        request.target, request.headers = target.decode("latin-1"), self._headers
        path = request.target.partition("?")[0]
        request.path = unquote(path) if "%" in path else path
        request.method = self._parser.get_method().decode()
        request.upgrade, request.keep_alive = self._parser.should_upgrade(), self._parser.should_keep_alive()
        request.chunks = self._parser.get_http_version() != "1.0"
        self._arriving, self._in_head = request, False
        self._queue.append(request)
        if self._task is None:
            self._next()
        elif len(self._queue) >= _MAX_QUEUED:
            self.pause()

    def on_body(self, data: bytes) -> None:
        if self._arriving is not None:
            self._arriving.put(data)

    def on_message_complete(self) -> None:
        if self._arriving is not None:
            self._arriving.finish()
        self._arriving = None

    def _next(self) -> None:
        self._disarm()
        self._task = asyncio.get_running_loop().create_task(self._serve(self._queue.popleft()))

    async def _serve(self, request: Request, refusal: errors.Refusal | None = None) -> None:
        try:
            if refusal is None:
                await self._server.handler(request)
        except ConnectionError:
            pass
        except Exception:
            _log.exception("%s %s", request.method, request.path[:100])
            refusal = errors.internal()
        if refusal is not None and not request.begun:
            with contextlib.suppress(ConnectionError):
                await request.send(refusal.status, [(b"Content-Type", b"application/json")], refusal.body())
        self._task = None
        if not request.ended:
            self.abort()
        elif not request.keep_alive or self._deaf or self._server.closing:
            self._close(request)
        elif self._queue:
            self._next()
            self.resume()
        else:
            self._arm(_KEEPALIVE_SECONDS, self._hang_up)

    def _close(self, request: Request) -> None:
        """Once everything is sent, and what the client still sends was given a while to come."""
        self._deaf = True
        if request.complete or self.transport is None:
            self._hang_up()
        else:
            self.transport.write_eof()
            self.resume()
            self._arm(_LINGER_SECONDS, self.abort)

    def _hang_up(self) -> None:
        """Close, with or without a client that reads the last of what it was sent."""
        if self.transport is not None:
            self.transport.close()
            self._arm(_KEEPALIVE_SECONDS, self.abort)

    def _arm(self, seconds: float, what: Callable[[], None]) -> None:
        self._disarm()
        self._timer = asyncio.get_running_loop().call_later(seconds, what)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _relative(target: bytes) -> bytes:
    """Path and query of a target that has scheme and host (RFC 9112, 3.2.2)."""
    try:
        parsed = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return target
    return (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")


class Server:
    """Hands every request to `handler`, which answers it."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.connections: set[_Connection] = set()
        self.closing = False
        """Whether connections end with the request that they have."""
        self._listening: asyncio.Server | None = None
        self._empty = asyncio.Event()

    async def start(self, listener: socket.socket) -> None:
        """Accept connections."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(lambda: _Connection(self), sock=listener, backlog=4096)

    def forget(self, connection: _Connection) -> None:
        """It is over."""
        self.connections.discard(connection)
        if self.closing and not self.connections:
            self._empty.set()

    async def close(self, seconds: float) -> None:
        """Accept no more, let what is being answered end within so many seconds, and break what is left."""
        self.closing = True
        if self._listening is not None:
            self._listening.close()
        for connection in tuple(self.connections):
            connection.retire()
        if self.connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._empty.wait()
        await asyncio.gather(*(connection.end() for connection in tuple(self.connections)))
