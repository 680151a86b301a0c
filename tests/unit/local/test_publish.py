from __future__ import annotations

import asyncio
import socket

import pytest

from dsv4_operator.backends.local.gateway import Publisher, bind_loopback
from dsv4_operator.backends.local.state import StateError
from dsv4_testkit.waiting import free_port


async def test_bytes_pass_both_ways_and_an_end_passes_on() -> None:
    async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Responds only after the other side has closed its direction.
        writer.write((await reader.read(-1)).upper())
        writer.close()

    server = await asyncio.start_server(upper, "127.0.0.1", 0)
    listeners = bind_loopback({"api": free_port()})
    publisher = Publisher("127.0.0.1", server.sockets[0].getsockname()[1])
    await publisher.start(listeners["api"])
    reader, writer = await asyncio.open_connection(*listeners["api"].getsockname())
    payload = b"abc" * 100_000
    writer.write(payload)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(-1), 60) == payload.upper()
    writer.close()
    publisher.close()
    server.close()


async def test_a_published_port_without_a_server_closes_connections() -> None:
    listeners = bind_loopback({"api": free_port()})
    publisher = Publisher("127.0.0.1", free_port())
    await publisher.start(listeners["api"])
    reader, writer = await asyncio.open_connection(*listeners["api"].getsockname())
    assert await asyncio.wait_for(reader.read(-1), 60) == b""
    writer.close()
    publisher.close()


def test_a_taken_port_is_named_with_its_field_and_leaves_the_other_free() -> None:
    first = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StateError, match=rf"spec\.network\.ports\.dashboard: port {port} of 127\.0\.0\.1"):
            bind_loopback({"api": first, "dashboard": port})
    for listener in bind_loopback({"api": first}).values():
        listener.close()
