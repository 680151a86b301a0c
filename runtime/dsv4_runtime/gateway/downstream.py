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
    ) -> None:
        """Args:
        handler: answers a request.
        ledger: what connections and requests are charged to.
        max_connections: further ones end the connection that has been idle longest, or are turned away.
        refused: told the client's address and the refusal of every head that reaches no handler.
        """
        self.handler = handler
        self.account = ledger
        self.refused = refused
        self.buffer = memoryview(bytearray(_READ_BYTES))
        """Bytes that any connection receives; they are parsed, or copied, before another one receives."""
        self.connections: set[Connection] = set()
        self.idle: dict[Connection, None] = {}
        """Those on which no request is being answered, the one that is it longest first."""
        self.closing = False
        """Whether connections end with the request that they have."""
        self._max_connections = max_connections
        self._listening: asyncio.Server | None = None
        self._empty = asyncio.Event()

    async def start(self, listener: socket.socket) -> None:
        """Accept connections."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(lambda: Connection(self), sock=listener, backlog=4096)

    def admit(self, connection: Connection) -> None:
        """Keep a new connection, in the place of one that is idle if there are as many as may be."""
        self.connections.add(connection)
        while len(self.connections) > self._max_connections or not connection.charge.take(account.CONNECTION_BYTES):
            oldest = next(iter(self.idle), None)
            if oldest is None:
                connection.turn_away(errors.too_many_connections(self._max_connections))
                return
            self.forget(oldest)
            oldest.charge.release()
            oldest.abort()
        self.idle[connection] = None

    def forget(self, connection: Connection) -> None:
        """Count a connection no more: it is over."""
        self.connections.discard(connection)
        self.idle.pop(connection, None)
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
