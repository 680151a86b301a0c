"""HTTP/1.1 server for clients: a bounded number of connections, whose requests are handled in order."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import fcntl
import functools
import logging
import socket
import struct
import sys
import termios
from collections.abc import Awaitable, Callable
from typing import cast

import httptools

from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.errors import ClientGoneError, Refusal
from dsv4_runtime.gateway.handover import UNKNOWN, Acceptor, Guard, Guarded
from dsv4_runtime.gateway.http_client import Fields, encode_head
from dsv4_runtime.gateway.request import (
    CONNECTION_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    REQUEST_BYTES,
    SLOW_CLIENT_BYTES,
    Account,
    Charge,
    ClientConnection,
    Request,
    wrong_head,
)

_log = logging.getLogger("dsv4.gateway")

_KEEPALIVE_SECONDS = 75.0
"""Limit for starting a request and for completing its head."""
_MAX_QUEUED = 16
"""Limit of pipelined requests per connection."""
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"expect"})
_LINGER_SECONDS = 2.0
"""Time to read the rest of a refused body: closing at once would reset the connection and lose the response."""
_MAX_JOINED_BYTES = 2**16
"""Above this size, joining head and body costs more than a second packet."""
_PARSE_BYTES = 2**12
"""Bytes per parser call: all requests in them are created before the first is handled."""
_RESERVED_SECONDS = 1.0
"""Limit for completing the head on a reserved connection."""
_READ_SECONDS = 0.01
"""Time in which the event loop reads once what has arrived."""
PACE_SECONDS = 30.0
PACE_BYTES = 15_000
"""Minimum progress per `PACE_SECONDS` of an arriving body and of a response that waits for the client: 500 bytes per
second, the default `MinRate` of Apache's RequestReadTimeout."""


class _Connection(ClientConnection, asyncio.BufferedProtocol):
    """One client connection, and the parser's callback object (`on_*`).

    Requests are handled sequentially. When a client disconnects, the handler of its request is cancelled, so that
    abandoned requests consume no tokens.
    """

    def __init__(
        self,
        server: HttpServer,
        guard: Guard | None = None,
        *,
        scarce: bool = False,
        sent: int = 0,
        received: int = 0,
        repeats: bool = False,
    ) -> None:
        """Args:
        server: owner of the connection.
        guard: informs another process of this connection.
        scarce: whether it has the last file descriptor.
        sent: bytes that another process has sent on it before.
        received: bytes that another process has received on it before.
        repeats: whether its request is repeated after the end of another process.
        """
        super().__init__()
        self._server = server
        self._guard = guard
        self._guarded: Guarded | None = None
        self._repeats = repeats
        self.scarce = scarce
        self._parser = httptools.HttpRequestParser(self)
        self._arriving: Request | None = None
        """Request whose body is incomplete."""
        self._queue: collections.deque[Request] = collections.deque()
        self._task: asyncio.Task[None] | None = None
        self._target = b""
        self._headers: Fields = []
        self._remote = ""
        self._in_head = False
        self._ignored_upgrade: bytes | None = None
        """Head with the framing of a request whose `Upgrade` is ignored, else None."""
        self._reparsing = False
        """Whether the parser is processing that head for the second time."""
        self._head_bytes = 0
        """Bytes of the current head reported by the parser."""
        self._unsettled = 0
        """Bytes received since the parser's last message start, message end or body part."""
        self._unread = b""
        """Received bytes that are not parsed because the queue is full."""
        self.charge = Charge(server.account)
        self._unsent = Charge(server.account)
        self._discarding = False
        """Whether further received bytes are discarded."""
        self._timer: asyncio.TimerHandle | None = None
        self._drained: asyncio.Future[None] | None = None
        """Pending while the client does not read."""
        self._restriction: Refusal | None = None
        """On a reserved connection: the response to all requests outside the server's own paths."""
        self._received = 0
        """Received bytes of bodies."""
        self._taken = received
        """Received bytes."""
        self._written = sent
        """Sent bytes of responses, delivered or not."""
        self._pace: tuple[object, float, int] | None = None
        """Body or response being timed, with start time and progress of the current period."""

    @property
    def is_read(self) -> bool:
        if self.transport is None:
            return True
        low, _ = self.transport.get_write_buffer_limits()
        return self.transport.get_write_buffer_size() <= low

    @property
    def ending(self) -> bool:
        return self._server.ending

    async def send(self, data: bytes, body: bytes | bytearray = b"") -> None:
        if self.transport is None or self.transport.is_closing():
            raise ClientGoneError("the client is gone")
        self._written += len(data) + len(body)
        if len(body) < _MAX_JOINED_BYTES:
            # One packet.
            data, body = data + body, b""
        if data:
            self.transport.write(data)
        if body:
            self.transport.write(body)
        if self._drained is not None:
            # A cancelled handler may still send a final event.
            await asyncio.shield(self._drained)

    def retire(self) -> None:
        """Close after the current request, or at once if there is none. Its response announces the close if
        possible.
        """
        if self._task is None:
            self.close_gracefully()

    async def end(self) -> None:
        """Abort the connection and wait for its handler."""
        self.abort()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # More is charged (`pause_writing`), also on a connection without a further request.
        cast(asyncio.Transport, transport).set_write_buffer_limits(CONNECTION_BYTES, CONNECTION_BYTES)
        peer = transport.get_extra_info("peername")
        self._remote = str(peer[0]) if peer else ""
        self._arm(_KEEPALIVE_SECONDS, self.close_gracefully)
        self._server.admit(self)

    def protect(self, received: int) -> None:
        """Inform another process of this connection; `received` bytes, or `UNKNOWN` in the middle of a request."""
        if self._guard is not None and self._guarded is None and self.transport is not None:
            descriptor = self.transport.get_extra_info("socket").fileno()
            self._guarded = self._guard.open(descriptor, self._written, received, adopted=self._repeats)

    def repeat(self, request: bytes) -> None:
        """Handle a request that another process has read."""
        self._parse(memoryview(request))

    def record(self, request: Request, body: bytearray, *, repeatable: bool) -> None:
        # Not before: connections without a valid request are many in an attack.
        self.protect(UNKNOWN)
        if self._guard is not None and self._guarded is not None:
            self._guard.request(self._guarded, request, body, self._written, repeatable=repeatable)

    def record_stream(self, *, chunked: bool) -> None:
        if self._guard is not None and self._guarded is not None:
            self._guard.stream(self._guarded, chunked=chunked)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._guard is not None and self._guarded is not None:
            self._guard.close(self._guarded)
            self._guarded = None
        self.transport = None
        self._server.forget(self)
        self._disarm()
        self._discarding, self._unread = True, b""
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
        self._drained = asyncio.get_running_loop().create_future()
        self._server.wait(self)
        if not self._unsent.take(SLOW_CLIENT_BYTES):
            self.abort()

    def resume_writing(self) -> None:
        self._unsent.release()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None
        if self._task is not None and not self._body_arrives:
            self._server.work(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._server.buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = self._server.buffer[:nbytes]
        self._taken += nbytes
        if self._unread:
            self._unread += data
        elif nbytes <= _PARSE_BYTES and not self._discarding and len(self._queue) < _MAX_QUEUED:
            self._feed(data)
        else:
            self._parse(data)
        if self._arriving is not None:
            self._arriving.charge.arriving(self._evict)
            if self._body_arrives:
                self._server.wait(self)

    def resume(self) -> None:
        """Parse pending bytes, then resume reading."""
        unread, self._unread = self._unread, b""
        if unread:
            self._parse(memoryview(unread))
        if not self._unread and (self._discarding or self._arriving is None or not self._arriving.is_full):
            super().resume()

    def _parse(self, data: memoryview) -> None:
        for start in range(0, len(data), _PARSE_BYTES):
            if self._discarding:
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
                # The following bytes belong to another protocol.
                self._discarding = True
            else:
                self._continue_without_upgrade(data[upgrade.args[0] :])
                return
        except httptools.HttpParserError as error:
            if not self._discarding:
                self.refuse(errors.malformed(str(error)))
        if self._discarding:
            return
        if self._unsettled > MAX_HEAD_BYTES + _PARSE_BYTES or len(self._headers) > MAX_HEADERS:
            self.refuse(errors.head_too_large(MAX_HEAD_BYTES, MAX_HEADERS))
        elif self._in_head and not self.charge.take(len(data)):
            self.refuse(errors.NO_MEMORY)

    def _continue_without_upgrade(self, rest: memoryview) -> None:
        """Parse the body of a request whose `Upgrade` is ignored (RFC 9110, 7.8).

        llhttp ends such a message after its head, so a new parser receives the framing headers and the remaining bytes.
        """
        framing, self._ignored_upgrade = self._ignored_upgrade, None
        self._parser = httptools.HttpRequestParser(self)
        self._reparsing = True
        self._feed(memoryview(framing or b""))
        self._reparsing = False
        if rest and not self._discarding:
            self._feed(rest)

    def refuse(self, refusal: Refusal) -> None:
        """Stop parsing this connection; refuse the arriving request, or respond to the invalid head."""
        self._discarding = True
        request, self._arriving = self._arriving, None
        if request is not None:
            request.refuse(refusal)
        elif self._task is None and self.transport is not None:
            request = Request(self, self._remote, Charge(self.charge.account))
            request.refusal = refusal
            self._queue.append(request)
            self._next()
        else:
            self._server.refused(self._remote, refusal, None)

    def _evict(self) -> None:
        self.refuse(errors.NO_MEMORY)

    @property
    def _body_arrives(self) -> bool:
        """Return whether the body of the request being handled is incomplete."""
        return self._arriving is not None and not self._queue

    def restrict(self, refusal: Refusal) -> None:
        """Serve one request to one of the server's own paths: the connection exceeds the limit."""
        self._restriction = refusal
        self.charge = Charge(self._server.reserve)
        self.charge.take(CONNECTION_BYTES)
        self._arm(_RESERVED_SECONDS, lambda: self.refuse(refusal))

    def release_place(self, refusal: Refusal) -> None:
        """Free the place of this connection: with a response if a body is arriving, at once otherwise."""
        if self._body_arrives and self._drained is None and not self._discarding:
            self.refuse(refusal)
            self._server.leave(self)
            self._arm(_LINGER_SECONDS, self.abort)
        else:
            self._server.forget(self)
            self.charge.release()
            self.abort()

    def check_pace(self, now: float) -> None:
        """End a request whose body arrives too slowly, or a connection whose client reads too slowly.

        Args:
            now: event loop time; called about once per second.
        """
        timed: object
        if self._arriving is not None and self._body_arrives and not self._arriving.is_full:
            timed, progress = self._arriving, self._received
        elif self._drained is not None:
            timed, progress = self._drained, self._delivered()
        else:
            self._pace = None
            return
        if self._pace is None or self._pace[0] is not timed:
            self._pace = timed, now, progress
            return
        _, began, before = self._pace
        if now - began < PACE_SECONDS:
            return
        self._pace = timed, now, progress
        if progress - before >= PACE_BYTES:
            return
        if timed is self._arriving:
            self.refuse(errors.too_slow(round(PACE_BYTES / PACE_SECONDS)))
        else:
            self.abort()

    def _delivered(self) -> int:
        """Return the response bytes acknowledged by the client."""
        if self.transport is None or (found := self.transport.get_extra_info("socket")) is None:
            return 0
        unacknowledged = bytearray(4)
        with contextlib.suppress(OSError):
            fcntl.ioctl(found.fileno(), termios.TIOCOUTQ, unacknowledged)
        return self._written - self.transport.get_write_buffer_size() - int(struct.unpack("i", unacknowledged)[0])

    def on_message_begin(self) -> None:
        if self._reparsing:
            return
        self._target, self._headers, self._in_head = b"", [], True
        self._head_bytes = self._unsettled = 0

    def on_url(self, data: bytes) -> None:
        self._target += data
        self._head_bytes += len(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; trailers are dropped."""
        if self._in_head and len(self._headers) <= MAX_HEADERS:
            self._head_bytes += len(name) + len(value) + 4
            # White space around a value does not belong to it (RFC 9110, 5.5); llhttp removes that before it only.
            self._headers.append((name.lower(), name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        if self._reparsing:
            return
        self._in_head, self._unsettled = False, 0
        self.charge.shrink(CONNECTION_BYTES)
        version = self._parser.get_http_version()
        # An idle connection keeps none of them.
        headers, self._headers = self._headers, []
        target, self._target = self._target, b""
        wrong = wrong_head(version, headers, self._head_bytes)
        if self._discarding or wrong is not None:
            if wrong is not None and not self._discarding:
                self.refuse(wrong)
            return
        request = Request(self, self._remote, Charge(self.charge.account))
        request.headers = headers
        request.set_target(target)
        request.method = self._parser.get_method().decode()
        request.upgrade, request.keep_alive = self._parser.should_upgrade(), self._parser.should_keep_alive()
        if request.upgrade and request.method != "CONNECT" and "websocket" not in request.header(b"upgrade").lower():
            request.upgrade = False
            framing = [(name, value) for name, _, value in headers if name in _FRAMING]
            self._ignored_upgrade = encode_head(
                f"{request.method} / HTTP/{version}".encode(), [(b"Host", b"x"), *framing]
            )
        request.chunks = version != "1.0"
        self._arriving = request
        self._queue.append(request)
        own = request.path in self._server.own_paths
        # A decoded path takes up to four bytes for each character.
        size = REQUEST_BYTES + self._head_bytes + sys.getsizeof(request.path)
        if own and not request.charge.take(size):
            request.charge = Charge(self._server.reserve)
        if self._restriction is not None and not own:
            self.refuse(self._restriction)
        elif request.charge.size < size and not request.charge.take(size):
            self.refuse(errors.NO_MEMORY)
        if self._restriction is not None:
            self._discarding, request.keep_alive = True, False
        if self._task is None:
            self._next()

    def on_body(self, data: bytes) -> None:
        self._unsettled = 0
        self._received += len(data)
        if self._arriving is not None:
            self._arriving.put(data)

    def on_message_complete(self) -> None:
        if self._ignored_upgrade is not None:
            return
        self._unsettled = 0
        if self._arriving is not None:
            self._arriving.finish()
            if self._body_arrives and self._drained is None:
                self._server.work(self)
        self._arriving = None

    def _next(self) -> None:
        self._disarm()
        self._server.work(self)
        self._task = asyncio.get_running_loop().create_task(self._serve(self._queue.popleft()))

    async def _serve(self, request: Request) -> None:
        # A task that ends with an exception references its frames, which reference the task: the request would stay in
        # memory until the next full garbage collection. Only `end` awaits this task.
        with contextlib.suppress(asyncio.CancelledError):
            await self._answer(request)
        self._task = None
        request.release()
        if self._guard is not None and self._guarded is not None:
            begun = self._queue or self._arriving is not None or self._in_head or self._unread
            # Another process cannot continue in the middle of a request.
            self._guard.idle(self._guarded, self._written, UNKNOWN if begun else self._taken)
        if not request.ended:
            self.abort()
        elif not request.keep_alive or self._server.closing:
            self._close(request)
        elif self._queue:
            self._next()
            if self._body_arrives:
                self._server.wait(self)
            self.resume()
        elif self._discarding:
            self._close(request)
        elif self.transport is not None:
            self._server.wait(self)
            self._arm(_KEEPALIVE_SECONDS, self.close_gracefully)

    async def _answer(self, request: Request) -> None:
        refusal = request.refusal or self._server.check(request)
        try:
            if refusal is None:
                await self._server.handler(request)
            else:
                self._server.refused(self._remote, refusal, request)
        except ConnectionError:
            pass
        except Exception:
            _log.exception("%s %s", request.method, request.path[:100])
            refusal = errors.INTERNAL
        if refusal is not None and not request.begun:
            with contextlib.suppress(ConnectionError):
                await request.send(refusal.status, refusal.headers(request.id), refusal.body)

    def _close(self, request: Request) -> None:
        """Close after all data is sent and the client had time to finish sending."""
        self._discarding = True
        self._server.wait(self)
        if request.complete or self.transport is None:
            self.close_gracefully()
        else:
            self.transport.write_eof()
            self.resume()
            self._arm(_LINGER_SECONDS, self.abort)

    def close_gracefully(self) -> None:
        """Close after the buffered data is sent; abort if the client does not read it."""
        if self.transport is not None:
            self.transport.close()
            self._arm(_KEEPALIVE_SECONDS, self.abort)

    def _arm(self, seconds: float, what: Callable[[], None]) -> None:
        """Call `what` in `seconds`, unless disarmed: also by a request that arrived before, while this process was
        paused and read nothing.
        """
        self._disarm()
        loop = asyncio.get_running_loop()

        def expire() -> None:
            self._timer = loop.call_later(_READ_SECONDS, what)

        self._timer = loop.call_later(seconds, expire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_READ_BYTES = 2**14
"""Size of the receive buffer shared by all connections; unparsed bytes are copied for each of them."""
RESERVED_CONNECTIONS = 64
"""Connections beyond `max_connections` for the server's own paths."""
_RESERVED_BYTES = RESERVED_CONNECTIONS * (CONNECTION_BYTES + REQUEST_BYTES + 2**16)
_CHECK_SECONDS = 1.0
# Close connections to unreachable clients within two minutes.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))

Handler = Callable[[Request], Awaitable[None]]


class HttpServer:
    """HTTP server that passes every request to `handler`."""

    def __init__(
        self,
        handler: Handler,
        account: Account,
        *,
        max_connections: int,
        check: Callable[[Request], Refusal | None] = lambda request: None,
        refused: Callable[[str, Refusal, Request | None], None] = lambda remote, refusal, request: None,
        own_paths: frozenset[str] = frozenset(),
        guard: Guard | None = None,
    ) -> None:
        """Args:
        handler: answers a request.
        account: account for connections and requests.
        max_connections: beyond it, a new connection replaces the one that has waited longest for its client, or
            uses a reserved place.
        check: returns the refusal of a request that must not reach the handler; called once the head is received.
        refused: called with client address, refusal and request, if there is one, for every head that reaches no
            handler.
        own_paths: paths that are also served on reserved connections and beyond the account's limit.
        guard: informs another process of the connections of the first listener.
        """
        self._guard = guard
        self.handler = handler
        self.account = account
        self.reserve = Account(_RESERVED_BYTES)
        """Account of the reserved connections, and of own paths when `account` is full."""
        self.check = check
        self.refused = refused
        self.own_paths = own_paths
        self.buffer = memoryview(bytearray(_READ_BYTES))
        """Receive buffer; parsed or copied before the next connection receives."""
        self.connections: set[_Connection] = set()
        self.waiting: dict[_Connection, None] = {}
        """Connections waiting for their clients (next request, rest of a body, reading a response), longest wait
        first."""
        self.reserved: dict[_Connection, None] = {}
        """Reserved connections, oldest first."""
        self.leaving: dict[_Connection, None] = {}
        """Connections that lost their place and still send a refusal, oldest first."""
        self.ending = False
        """Whether every response is the last one of its connection."""
        self.closing = False
        """Whether connections close after their current request."""
        self.max_connections = max_connections
        self._listening: list[Acceptor] = []
        self._checking: asyncio.Task[None] | None = None
        self._connecting: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()

    async def start(self, *listeners: socket.socket) -> None:
        """Start accepting connections. Those of all listeners but the first one are probes."""
        # The first one is last: it leaves a descriptor to the probes.
        for number, listener in reversed(list(enumerate(listeners))):
            guard = self._guard if number == 0 else None
            if listener.family in (socket.AF_INET, socket.AF_INET6):
                # Inherited by accepted connections.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEPALIVE:
                    listener.setsockopt(socket.IPPROTO_TCP, option, value)
            take = functools.partial(self._take, guard)
            self._listening.append(Acceptor(listener, take, probed=number > 0, first=tuple(self._listening)))
        self._checking = asyncio.get_running_loop().create_task(self._check())

    def _take(self, guard: Guard | None, connection: socket.socket, scarce: bool) -> None:
        self._connect(_Connection(self, guard, scarce=scarce), connection)

    def adopt(self, connection: socket.socket, request: bytes, sent: int, received: int) -> None:
        """Serve a connection of another process, beginning with a `request` that it has read, unless that is empty."""
        made = _Connection(self, self._guard, sent=sent, received=received, repeats=bool(request))

        def begin() -> None:
            made.protect(UNKNOWN if request else received)
            if request:
                made.repeat(request)

        self._connect(made, connection, begin)

    def _connect(self, made: _Connection, connection: socket.socket, begin: Callable[[], None] | None = None) -> None:
        """Serve `connection` with `made`; then call `begin`."""
        task = asyncio.get_running_loop().create_task(self._connected(made, connection, begin))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connected(self, made: _Connection, connection: socket.socket, begin: Callable[[], None] | None) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: made, connection)
        except OSError as error:
            _log.warning("a client connection cannot be served: %s", error)
            connection.close()
            return
        if begin is not None:
            begin()
        if self.closing:
            made.retire()

    def admit(self, connection: _Connection) -> None:
        """Register a new connection; at the limit, replace another one or use a reserved place."""
        if connection.scarce:
            # It must end soon.
            self._reserve(connection)
            return
        self.connections.add(connection)
        while len(self.connections) > self.max_connections or not connection.charge.take(CONNECTION_BYTES):
            if not self._replace_oldest():
                self._reserve(connection)
                return
        self.wait(connection)

    def wait(self, connection: _Connection) -> None:
        """Mark a connection as waiting for its client."""
        if connection in self.connections:
            self.waiting.setdefault(connection)

    def work(self, connection: _Connection) -> None:
        """Mark a connection as not waiting for its client."""
        self.waiting.pop(connection, None)

    def leave(self, connection: _Connection) -> None:
        """Free the place of a connection that still sends its refusal."""
        self.forget(connection)
        self.leaving[connection] = None
        if len(self.leaving) > RESERVED_CONNECTIONS:
            self._break_oldest(self.leaving)

    def forget(self, connection: _Connection) -> None:
        self.connections.discard(connection)
        self.waiting.pop(connection, None)
        self.reserved.pop(connection, None)
        self.leaving.pop(connection, None)
        for listening in self._listening:
            # Its descriptor is closed after this call.
            asyncio.get_running_loop().call_soon(listening.keep_spare)
        if self.closing and not (self.connections or self.reserved or self.leaving):
            self._empty.set()

    def retire(self) -> None:
        """Stop accepting, and close every connection as soon as it has no request in progress."""
        self.ending = self.closing = True
        for listening in self._listening:
            listening.close()
        for connection in self._all():
            connection.retire()

    async def close(self, seconds: float) -> None:
        """Stop accepting, wait up to `seconds` for requests in progress, and abort the rest."""
        self.retire()
        if self._checking is not None:
            self._checking.cancel()
        if self._connecting:
            await asyncio.wait(self._connecting)
        if self._all():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._empty.wait()
        await asyncio.gather(*(connection.end() for connection in self._all()))

    def _all(self) -> tuple[_Connection, ...]:
        return (*self.connections, *self.reserved, *self.leaving)

    def _replace_oldest(self) -> bool:
        """Return whether the connection that has waited longest for its client could be replaced."""
        oldest = next(iter(self.waiting), None)
        if oldest is None:
            return False
        oldest.release_place(errors.too_many_connections(self.max_connections))
        return True

    def _reserve(self, connection: _Connection) -> None:
        self.connections.discard(connection)
        self.reserved[connection] = None
        if len(self.reserved) > RESERVED_CONNECTIONS:
            self._break_oldest(self.reserved)
        connection.restrict(errors.too_many_connections(self.max_connections))

    def _break_oldest(self, kind: dict[_Connection, None]) -> None:
        oldest = next(iter(kind))
        self.forget(oldest)
        oldest.abort()

    async def _check(self) -> None:
        """Check the pace of all waiting connections periodically."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            now = asyncio.get_running_loop().time()
            for connection in tuple(self.waiting):
                connection.check_pace(now)
