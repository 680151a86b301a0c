"""The clients' side: a server that keeps a bounded number of connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from dsv4_runtime.gateway import account, errors
from dsv4_runtime.gateway.account import Account
from dsv4_runtime.gateway.connection import Connection
from dsv4_runtime.gateway.errors import Refusal
from dsv4_runtime.gateway.request import Request

_READ_BYTES = 2**14
"""Received at once, for all connections in one buffer: what is not parsed yet is kept for each of them."""
RESERVED_CONNECTIONS = 64
"""Beside `max_connections`, for the server's own paths."""
_RESERVED_BYTES = RESERVED_CONNECTIONS * (account.CONNECTION_BYTES + account.REQUEST_BYTES + 2**16)
_CHECK_SECONDS = 1.0
# A client whose machine is gone acknowledges nothing: its connection ends after at most two minutes.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))

Handler = Callable[[Request], Awaitable[None]]


class HttpServer:
    """Hands every request to `handler`, which answers it."""

    def __init__(
        self,
        handler: Handler,
        ledger: Account,
        *,
        max_connections: int,
        refused: Callable[[str, Refusal], None] = lambda remote, refusal: None,
        own_paths: frozenset[str] = frozenset(),
    ) -> None:
        """Args:
        handler: answers a request.
        ledger: what connections and requests are charged to.
        max_connections: a further one takes the place of the connection that has waited longest for its client, or
            one of the reserved places.
        refused: called with the client's address and the refusal of every head that reaches no handler.
        own_paths: paths that are answered on the reserved places too, and beyond the ledger's limit.
        """
        self.handler = handler
        self.account = ledger
        self.reserve = Account(_RESERVED_BYTES)
        """For the reserved connections, and for the own paths when `account` is full."""
        self.refused = refused
        self.own_paths = own_paths
        self.buffer = memoryview(bytearray(_READ_BYTES))
        """Bytes that any connection receives; they are parsed, or copied, before another one receives."""
        self.connections: set[Connection] = set()
        self.waiting: dict[Connection, None] = {}
        """Those that wait for their clients (to ask, to send the rest of a body, to read an answer), the longest wait
        first."""
        self.reserved: dict[Connection, None] = {}
        """Those on the reserved places, the oldest first."""
        self.leaving: dict[Connection, None] = {}
        """Those that made room for others and still have their refusal to send, the oldest first."""
        self.ending = False
        """Whether every answer is the last one of its connection."""
        self.closing = False
        """Whether connections end with the request that they have."""
        self.max_connections = max_connections
        self._listening: asyncio.Server | None = None
        self._checking: asyncio.Task[None] | None = None
        self._empty = asyncio.Event()

    async def start(self, listener: socket.socket) -> None:
        """Accept connections."""
        loop = asyncio.get_running_loop()
        if listener.family in (socket.AF_INET, socket.AF_INET6):
            # Accepted connections inherit these options.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                listener.setsockopt(socket.IPPROTO_TCP, option, value)
        self._listening = await loop.create_server(lambda: Connection(self), sock=listener, backlog=4096)
        self._checking = loop.create_task(self._check())

    def admit(self, connection: Connection) -> None:
        """Keep a new connection: in the place of another one if there are as many as may be, or on a reserved place."""
        self.connections.add(connection)
        while len(self.connections) > self.max_connections or not connection.charge.take(account.CONNECTION_BYTES):
            if not self._make_place():
                self._reserve(connection)
                return
        self.wait(connection)

    def wait(self, connection: Connection) -> None:
        """Note that a connection waits for its client from now on, if it does not already."""
        if connection in self.connections:
            self.waiting.setdefault(connection)

    def work(self, connection: Connection) -> None:
        """Note that a connection does not wait for its client."""
        self.waiting.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """Free a connection's place while it still has its refusal to send."""
        self.forget(connection)
        self.leaving[connection] = None
        if len(self.leaving) > RESERVED_CONNECTIONS:
            self._break_oldest(self.leaving)

    def forget(self, connection: Connection) -> None:
        """Count a connection no more: it is over."""
        self.connections.discard(connection)
        self.waiting.pop(connection, None)
        self.reserved.pop(connection, None)
        self.leaving.pop(connection, None)
        if self.closing and not (self.connections or self.reserved or self.leaving):
            self._empty.set()

    def retire(self) -> None:
        """Accept no more, and close every connection as soon as it has no request to answer."""
        self.ending = self.closing = True
        if self._listening is not None:
            self._listening.close()
        for connection in self._all():
            connection.retire()

    async def close(self, seconds: float) -> None:
        """Accept no more, let what is being answered end within so many seconds, and break what is left."""
        self.retire()
        if self._checking is not None:
            self._checking.cancel()
        if self._all():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._empty.wait()
        await asyncio.gather(*(connection.end() for connection in self._all()))

    def _all(self) -> tuple[Connection, ...]:
        return (*self.connections, *self.reserved, *self.leaving)

    def _make_place(self) -> bool:
        """Return whether the connection that has waited longest for its client gave its place up."""
        oldest = next(iter(self.waiting), None)
        if oldest is None:
            return False
        oldest.give_place(errors.too_many_connections(self.max_connections))
        return True

    def _reserve(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.reserved[connection] = None
        if len(self.reserved) > RESERVED_CONNECTIONS:
            self._break_oldest(self.reserved)
        connection.restrict(errors.too_many_connections(self.max_connections))

    def _break_oldest(self, kind: dict[Connection, None]) -> None:
        oldest = next(iter(kind))
        self.forget(oldest)
        oldest.abort()

    async def _check(self) -> None:
        """End connections whose clients send a body or read an answer too slowly, for ever."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            now = asyncio.get_running_loop().time()
            for connection in tuple(self.waiting):
                connection.check_pace(now)
