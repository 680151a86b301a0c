"""Hostile clients of a gateway, each as a coroutine that attacks a port of loopback (see attacks.py)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable

MIB = 2**20
CLIENTS = 1300
"""Clients of `connections`: a thousand of them are connected at any time, the others were refused and wait."""
TINY = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
MUTATIONS_A_SECOND = 200
_MUTATION_SECONDS = 1.0
SPLINTERS = (
    *(b"\r\n", b"\n", b"\0", b"\r\n\r\n", b": ", b"chunked", b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n"),
    *(
        b"Content-Length: 7\r\n",
        b"Content-Length: -1\r\n",
        b"Host: y\r\n",
        b"HTTP/2.0",
        b"\xff\xfe",
        b"%00",
        b"[" * 300,
    ),
    *(b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\nConnection: upgrade\r\n", b"/" * 500, b"9" * 30),
)
"""Texts inserted into mutated requests."""
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{}\r\n\r\n"
PARTIAL = 4200
"""Connections of `partial`: more than a gateway keeps."""
SCRAPES_A_SECOND = 200


def show(key: str) -> None:
    """Add an API key to all later requests."""
    global HEAD, TINY
    HEAD = HEAD.replace("Host: x\r\n", f"Host: x\r\nx-api-key: {key}\r\n")
    TINY = TINY.replace(b"Host: x\r\n", f"Host: x\r\nx-api-key: {key}\r\n".encode())


@contextlib.asynccontextmanager
async def _open(port: int) -> asyncio.StreamWriter:  # type: ignore[misc]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reading = asyncio.create_task(_discard(reader))
    try:
        yield writer
    finally:
        reading.cancel()
        writer.transport.abort()


async def _discard(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(2**16):
            pass


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def pipelining(port: int) -> None:
    """Send requests on one connection without end."""
    async with _open(port) as writer:
        while True:
            await _write(writer, TINY * 1000)


async def trailers(port: int) -> None:
    """Send 100 MiB of trailers after a body."""
    async with _open(port) as writer:
        await _write(writer, HEAD.format("Transfer-Encoding: chunked").encode() + b"2\r\n{}\r\n0\r\nX-T: ")
        for _ in range(100):
            await _write(writer, b"x" * MIB)
        await asyncio.sleep(1)


async def unfinished(port: int) -> None:
    """Send sixteen bodies of 64 MiB without their last byte."""

    async def one() -> None:
        async with _open(port) as writer:
            await _write(writer, HEAD.format(f"Content-Length: {64 * MIB}").encode())
            for _ in range(63):
                await _write(writer, b"x" * MIB)
            await asyncio.sleep(60)

    await asyncio.gather(*(one() for _ in range(16)), return_exceptions=True)


async def cancelled(port: int) -> None:
    """Send complete bodies of 32 MiB and disconnect before the response."""
    body = json.dumps({"prompt": "x" * 32 * MIB, "stream": True, "think": 60}).encode()
    async with _open(port) as writer:
        await _write(writer, HEAD.format(f"Content-Length: {len(body)}").encode() + body)
        await asyncio.sleep(0.1)


async def structure(port: int) -> None:
    """Send 60 MiB of JSON that consists of empty arrays."""
    body = b'{"prompt":[' + b"[]," * (20 * MIB) + b'[]],"stream":true}'
    async with _open(port) as writer:
        await _write(writer, HEAD.format(f"Content-Length: {len(body)}").encode() + body)
        await asyncio.sleep(2)


async def connections(port: int) -> None:
    """Keep a thousand connections that send garbage, half a head or half a body, or do not read a stream."""
    chance = random.Random(0)
    stream = json.dumps({"prompt": "x", "stream": True, "tokens": 200}).encode()
    kinds = (
        lambda: chance.randbytes(200),
        lambda: b"GET /x HTTP/1.1\r\nHost: x\r\nX-Y: " + b"z" * chance.randrange(60_000),
        lambda: HEAD.format("Content-Length: 200000").encode() + b"{" + b"x" * chance.randrange(100_000),
        lambda: HEAD.format(f"Content-Length: {len(stream)}").encode() + stream,
    )

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
                await _write(writer, chance.choice(kinds)())
                await asyncio.sleep(chance.random() * 20)
                writer.transport.abort()
            await asyncio.sleep(0.1)

    # A thousand connections opened at once would measure this process.
    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(one())
            await asyncio.sleep(0.002)


def mutated(chance: random.Random) -> bytes:
    """Return a request with one to four mistakes: bytes changed, removed, doubled or inserted, or the rest missing."""
    body = json.dumps({"prompt": "x" * chance.randrange(400), "stream": chance.random() < 0.3, "max_tokens": 4})
    head = HEAD.format(f"Content-Length: {len(body)}\r\nX-Request-Id: {chance.randrange(2**32)}")
    data = bytearray((head + body).encode() if chance.random() < 0.8 else TINY)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        length = chance.choice((1, 2, 8, 64))
        match chance.randrange(5):
            case 0:
                data[at : at + length] = chance.randbytes(length)
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = data[at : at + length]
            case 3:
                data[at:at] = chance.choice(SPLINTERS)
            case 4 if at:
                del data[at:]
    return bytes(data)


async def mutations(port: int) -> None:
    """Send mutated requests, at most 200 a second on 16 connections; print the number of responses by status."""
    chance, found = random.Random(time.time_ns()), Counter[str]()

    async def one() -> None:
        while True:
            begun = time.monotonic()
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    async with asyncio.timeout(_MUTATION_SECONDS):
                        await _write(writer, mutated(chance))
                        status = (await reader.readline())[9:12].decode("latin-1")
                    found[status or "closed"] += 1
                finally:
                    writer.transport.abort()
            except TimeoutError:
                found["waits"] += 1
            except OSError:
                found["closed"] += 1
            await asyncio.sleep(max(0.0, 16 / MUTATIONS_A_SECOND - (time.monotonic() - begun)))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(one())
    finally:
        print(json.dumps(found), flush=True)


async def partial(port: int) -> None:
    """Send an incomplete body on every connection that the gateway keeps; closed connections are opened again."""
    data = HEAD.format("Content-Length: 10").encode() + b"{"

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
                with contextlib.suppress(ConnectionError):
                    await _write(writer, data)
                    await reader.read()
                writer.transport.abort()
            await asyncio.sleep(5.0)

    async with asyncio.TaskGroup() as group:
        for _ in range(PARTIAL):
            group.create_task(one())
            await asyncio.sleep(0.0005)


async def scrapes(port: int) -> None:
    """Request `/metrics` 200 times a second."""
    async with _open(port) as writer:
        while True:
            await _write(writer, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(1 / SCRAPES_A_SECOND)


async def together(port: int) -> None:
    """Run mutated requests, scrapes, and hostile connections of all kinds beyond the available places."""

    async def always(attack: Callable[[int], Awaitable[None]]) -> None:
        while True:
            with contextlib.suppress(ConnectionError):
                await attack(port)
            await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as group:
        group.create_task(mutations(port))
        group.create_task(connections(port))
        group.create_task(partial(port))
        group.create_task(always(scrapes))


async def quiet(port: int) -> None:
    """Send nothing."""
    await asyncio.sleep(3600)


ATTACKS: dict[str, Callable[[int], Awaitable[None]]] = {
    attack.__name__: attack
    for attack in (
        *(quiet, pipelining, trailers, unfinished, cancelled, structure, connections, mutations),
        *(partial, scrapes, together),
    )
}


async def repeat(attack: Callable[[int], Awaitable[None]], port: int, seconds: float) -> None:
    """Repeat the attack until the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(ConnectionError):
                    await attack(port)
                await asyncio.sleep(0.05)
