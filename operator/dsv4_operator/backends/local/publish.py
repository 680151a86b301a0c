"""Ports of the machine's loopback that lead to a member's port, as a Service or a port-forward would on a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from dsv4_operator.api import PortsSpec
from dsv4_operator.backends.local.state import StateError

_CHUNK = 65536
_CONNECT_SECONDS = 5.0
LOOPBACK = "127.0.0.1"

Listeners = dict[str, socket.socket]
"""Listening sockets by the name of their field below `spec.network.ports`."""


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of a published port."""

    address: str
    port: int


def bind(ports: Mapping[str, int]) -> Listeners:
    """Return listening sockets on loopback.

    Sockets keep the network that they were made in, so these go on listening on the machine's own loopback after the
    process has moved to another network.

    Raises:
        StateError: a port is taken; no socket stays open.
    """
    sockets: Listeners = {}
    try:
        for name, port in ports.items():
            listener = socket.socket()
            sockets[name] = listener
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((LOOPBACK, port))
                listener.listen(128)
            except OSError as error:
                where = f"spec.network.ports.{name}: " if name in PortsSpec.model_fields else ""
                remedy = "end the process that has it" + (" or choose another port" if where else "")
                raise StateError(
                    f"{where}port {port} of {LOOPBACK}, which the {name} needs, cannot be used "
                    f"({error.strerror}); {remedy}"
                ) from error
    except StateError:
        for listener in sockets.values():
            listener.close()
        raise
    return sockets


class Publisher:
    """Passes connections of one listening socket on to a target, byte for byte."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Begin to accept."""
        self._server = await asyncio.start_server(self._serve, sock=listener)

    def close(self) -> None:
        """Stop listening; open connections end with the process or with their target."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    upstream_reader, upstream_writer = await asyncio.open_connection(
                        self._target.address, self._target.port
                    )
            except (OSError, TimeoutError):
                return
            with contextlib.closing(upstream_writer):
                await asyncio.gather(_copy(reader, upstream_writer), _copy(upstream_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end, then say so to the other side, which may still be sending."""
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()
