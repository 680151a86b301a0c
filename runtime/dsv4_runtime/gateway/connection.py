"""One client's connection: HTTP/1.1 parsed, and its requests handed to the server's handler in their order."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import httptools

from dsv4_runtime.gateway import account, errors
from dsv4_runtime.gateway.account import Charge
from dsv4_runtime.gateway.errors import Refusal
from dsv4_runtime.gateway.http1 import Fields, head
from dsv4_runtime.gateway.request import ClientConnection, Request, wrong_head

if TYPE_CHECKING:
    from dsv4_runtime.gateway.downstream import HttpServer

_log = logging.getLogger("dsv4.gateway")

_KEEPALIVE_SECONDS = 75.0
"""Time that a connection may take to begin a request, and to end its head."""
_MAX_HEAD_BYTES = 2**16
"""Of a request line with its headers, and of what comes between two pieces of a body: chunk sizes, trailers."""
_MAX_QUEUED = 16
"""Requests of one connection that wait for the one before them."""
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"expect"})
_LINGER_SECONDS = 2.0
"""Time for which the rest of a refused body is read: a connection broken at once would take the answer with it."""
_JOINED_BYTES = 2**16
"""From here on another copy of an answer costs more than another packet."""
_PARSE_BYTES = 2**12
"""Parsed at once: the requests in it are all made before the first is looked at."""


class Connection(ClientConnection, asyncio.BufferedProtocol):
    """One client's connection, and the receiver of its parser's calls, the methods with `on_`.

    Requests are handled one after another in their order. A client that leaves ends the handling of its request: what
    nobody waits for must not go on costing tokens.
    """

    def __init__(self, server: HttpServer) -> None:
        super().__init__()
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._arriving: Request | None = None
        """Requests with a body that is not complete."""
        self._queue: collections.deque[Request] = collections.deque()
        self._task: asyncio.Task[None] | None = None
        self._target = b""
        self._headers: Fields = []
        self._remote = ""
        self._in_head = False
        self._ignored_upgrade: bytes | None = None
        """A head with the framing of a request whose `Upgrade` is ignored; None: there is none."""
        self._again = False
        """Whether the parser is given that head, of a request that is there already."""
        self._head_bytes = 0
        """Of the present head, as far as the parser has told it."""
        self._unsettled = 0
        """Received since the parser last told the beginning or the end of a message or a piece of a body."""
        self._unread = b""
        """Received and not parsed, because the queue is full."""
        self.charge = Charge(server.account)
        self._unsent = Charge(server.account)
        self._deaf = False
        """Whether what is received is of no interest any more."""
        self._timer: asyncio.TimerHandle | None = None
        self._drained: asyncio.Future[None] | None = None
        """Pending while the client does not read."""

    @property
    def is_read(self) -> bool:
        """See `ClientConnection`."""
        if self.transport is None:
            return True
        low, _ = self.transport.get_write_buffer_limits()
        return self.transport.get_write_buffer_size() <= low

    async def send(self, data: bytes, body: bytes | bytearray = b"") -> None:
        """See `ClientConnection`."""
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError("the client is gone")
        if len(body) < _JOINED_BYTES:
            # In one packet.
            data, body = data + body, b""
        if data:
            self.transport.write(data)
        if body:
            self.transport.write(body)
        if self._drained is not None:
            # Who is cancelled here may have last words to send.
            await asyncio.shield(self._drained)

    def retire(self) -> None:
        """Close as soon as the present request is answered; at once if there is none."""
        if self._task is None:
            self.hang_up()

    async def end(self) -> None:
        """Break it, and wait for its handler."""
        self.abort()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._remote = str(peer[0]) if peer else ""
        self._arm(_KEEPALIVE_SECONDS, self.hang_up)
        self._server.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self.transport = None
        self._server.forget(self)
        self._disarm()
        self._deaf, self._unread = True, b""
        self.charge.release()
        for request in self._queue:
            request.release()
        self._queue.clear()
        if self._arriving is not None:
            self._arriving.fail("the client is gone")
            self._arriving.charge.arrived()
        self.resume_writing()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._drained = asyncio.get_running_loop().create_future()
        if not self._unsent.take(account.SLOW_CLIENT_BYTES):
            self.abort()

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._unsent.release()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        return self._server.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        data = self._server.buffer[:nbytes]
        if self._unread:
            self._unread += data
        elif nbytes <= _PARSE_BYTES and not self._deaf and len(self._queue) < _MAX_QUEUED:
            self._feed(data)
        else:
            self._parse(data)
        if self._arriving is not None:
            self._arriving.charge.arriving(self._evict)

    def resume(self) -> None:
        """Parse on, and read on once all is parsed."""
        unread, self._unread = self._unread, b""
        if unread:
            self._parse(memoryview(unread))
        if not self._unread and (self._deaf or self._arriving is None or not self._arriving.is_full):
            super().resume()

    def _parse(self, data: memoryview) -> None:
        for start in range(0, len(data), _PARSE_BYTES):
            if self._deaf:
                return
            if len(self._queue) >= _MAX_QUEUED:
                self._unread = bytes(data[start:])
                self.pause()
                return
            self._feed(data[start : start + _PARSE_BYTES])

    def _feed(self, data: memoryview) -> None:
        self._unsettled += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._ignored_upgrade is None:
                # What follows is in the other protocol, which nobody here speaks.
                self._deaf = True
            else:
                self._go_on_without_upgrade(data[upgrade.args[0] :])
                return
        except httptools.HttpParserError as error:
            if not self._deaf:
                self.refuse(errors.malformed(str(error)))
        if self._deaf:
            return
        if self._unsettled > _MAX_HEAD_BYTES + _PARSE_BYTES:
            self.refuse(errors.head_too_large(_MAX_HEAD_BYTES))
        elif self._in_head and not self.charge.take(len(data)):
            self.refuse(errors.no_memory())

    def _go_on_without_upgrade(self, rest: memoryview) -> None:
        """Parse the body of a request whose `Upgrade` is ignored (RFC 9110, 7.8).

        llhttp ends such a message with its head, so another parser gets the head's framing alone, and what follows.
        """
        framing, self._ignored_upgrade = self._ignored_upgrade, None
        self._parser = httptools.HttpRequestParser(self)
        self._again = True
        self._feed(memoryview(framing or b""))
        self._again = False
        if rest and not self._deaf:
            self._feed(rest)

    def refuse(self, refusal: Refusal) -> None:
        """Make no more sense of this connection: end the body that is arriving, or answer the head that is wrong."""
        self._deaf = True
        request, self._arriving = self._arriving, None
        if request is not None:
            request.refuse(refusal)
        elif self._task is None and self.transport is not None:
            request = Request(self, self._remote, Charge(self._server.account))
            request.refusal = refusal
            self._queue.append(request)
            self._next()
        else:
            self._server.refused(self._remote, refusal)

    def _evict(self) -> None:
        self.refuse(errors.no_memory())

    def on_message_begin(self) -> None:
        """Begin a head."""
        if self._again:
            return
        self._target, self._headers, self._in_head = b"", [], True
        self._head_bytes = self._unsettled = 0

    def on_url(self, data: bytes) -> None:
        """Take a piece of the target."""
        self._target += data
        self._head_bytes += len(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; those that follow a body are dropped."""
        if self._in_head:
            self._headers.append((name.lower(), name, value))
            self._head_bytes += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        """Make the request of the head."""
        if self._again:
            return
        self._in_head, self._unsettled = False, 0
        self.charge.shrink(account.CONNECTION_BYTES)
        version = self._parser.get_http_version()
        wrong = wrong_head(version, self._headers, self._head_bytes, _MAX_HEAD_BYTES)
        if self._deaf or wrong is not None:
            if wrong is not None and not self._deaf:
                self.refuse(wrong)
            return
        request = Request(self, self._remote, Charge(self._server.account))
        request.headers = self._headers
        request.aim(self._target)
        request.method = self._parser.get_method().decode()
        request.upgrade, request.keep_alive = self._parser.should_upgrade(), self._parser.should_keep_alive()
        if request.upgrade and request.method != "CONNECT" and "websocket" not in request.header(b"upgrade").lower():
            request.upgrade = False
            framing = [(name, value) for name, _, value in self._headers if name in _FRAMING]
            self._ignored_upgrade = head(f"{request.method} / HTTP/{version}".encode(), [(b"Host", b"x"), *framing])
        request.chunks = version != "1.0"
        self._arriving = request
        self._queue.append(request)
        if not request.charge.take(account.REQUEST_BYTES + self._head_bytes):
            self.refuse(errors.no_memory())
        if self._task is None:
            self._next()

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body."""
        self._unsettled = 0
        if self._arriving is not None:
            self._arriving.put(data)

    def on_message_complete(self) -> None:
        """End the body."""
        if self._ignored_upgrade is not None:
            return
        self._unsettled = 0
        if self._arriving is not None:
            self._arriving.finish()
        self._arriving = None

    def _next(self) -> None:
        self._disarm()
        self._server.idle.pop(self, None)
        self._task = asyncio.get_running_loop().create_task(self._serve(self._queue.popleft()))

    async def _serve(self, request: Request) -> None:
        # A task that ends with an exception keeps its frames, and they the task: the request would stay until the next
        # full garbage collection. Nobody waits for this task but `end`.
        with contextlib.suppress(asyncio.CancelledError):
            await self._answer(request)
        self._task = None
        request.release()
        if not request.ended:
            self.abort()
        elif not request.keep_alive or self._server.closing:
            self._close(request)
        elif self._queue:
            self._next()
            self.resume()
        elif self._deaf:
            self._close(request)
        else:
            self._server.idle[self] = None
            self._arm(_KEEPALIVE_SECONDS, self.hang_up)

    async def _answer(self, request: Request) -> None:
        refusal = request.refusal
        try:
            if refusal is None:
                await self._server.handler(request)
            else:
                self._server.refused(self._remote, refusal)
        except ConnectionError:
            pass
        except Exception:
            _log.exception("%s %s", request.method, request.path[:100])
            refusal = errors.internal()
        if refusal is not None and not request.begun:
            with contextlib.suppress(ConnectionError):
                await request.send(refusal.status, [(b"Content-Type", b"application/json")], refusal.body())

    def _close(self, request: Request) -> None:
        """Close once everything is sent, and what the client still sends was given a while to come."""
        self._deaf = True
        if self in self._server.connections:
            self._server.idle[self] = None
        if request.complete or self.transport is None:
            self.hang_up()
        else:
            self.transport.write_eof()
            self.resume()
            self._arm(_LINGER_SECONDS, self.abort)

    def hang_up(self) -> None:
        """Close, with or without a client that reads the last of what it was sent."""
        if self.transport is not None:
            self.transport.close()
            self._arm(_KEEPALIVE_SECONDS, self.abort)

    def turn_away(self, refusal: Refusal) -> None:
        """Close a connection that is one too many, with an answer that says so."""
        self._deaf = True
        self._server.refused(self._remote, refusal)
        if self.transport is not None:
            body = refusal.body()
            headers = [(b"Content-Type", b"application/json"), (b"Content-Length", b"%d" % len(body))]
            headers += [(b"Retry-After", b"%d" % errors.RETRY_AFTER_SECONDS), (b"Connection", b"close")]
            self.transport.write(head(b"HTTP/1.1 503 Service Unavailable", headers) + body)
            self.transport.close()
            self._arm(_LINGER_SECONDS, self.abort)

    def _arm(self, seconds: float, what: Callable[[], None]) -> None:
        self._disarm()
        self._timer = asyncio.get_running_loop().call_later(seconds, what)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
