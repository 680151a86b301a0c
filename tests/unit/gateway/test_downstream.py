"""The server side of HTTP/1.1, byte by byte: requests in arbitrary pieces, and the responses to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest

from dsv4_runtime.gateway import errors, http_server
from dsv4_runtime.gateway.http_server import HttpServer
from dsv4_runtime.gateway.request import Account, Request

SECONDS = 60.0


class Echo:
    """Server that responds with the parsed request and records it."""

    def __init__(self, limit: int = 2**26, connections: int = 100) -> None:
        self.refused: list[str] = []
        self.asked: list[tuple[str, str, str, bytes]] = []
        self.begun, self.left = asyncio.Event(), asyncio.Event()
        """The handling of a request has begun; its client has left."""
        self.server = HttpServer(self.handle, Account(limit), max_connections=connections, refused=self.refuse)

    def refuse(self, remote: str, refusal: errors.Refusal, request: Request | None) -> None:
        assert remote == "127.0.0.1"
        self.refused.append(refusal.code)

    async def handle(self, request: Request) -> None:
        if request.path == "/refused":
            await request.send(413, [], b"no")
            return
        if request.path == "/broken":
            raise ValueError("a mistake")
        if request.path == "/silent":
            return
        await request.send_continue()
        self.begun.set()
        try:
            body = bytearray()
            while part := await request.part():
                body += part
            if request.path == "/patient":
                await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.left.set()
            raise
        self.asked.append((request.method, request.target, request.path, bytes(body)))
        if request.path == "/stream":
            request.begin(200, [(b"X-Kind", b"stream")])
            for byte in body:
                await request.write(bytes([byte]))
            await request.end()
        else:
            await request.send(204 if request.path == "/nothing" else 200, [], body)


@contextlib.asynccontextmanager
async def echo(**limits: int) -> AsyncIterator[tuple[Echo, int]]:
    found, listener = Echo(**limits), socket.create_server(("127.0.0.1", 0))
    await found.server.start(listener)
    try:
        yield found, listener.getsockname()[1]
    finally:
        await found.server.close(0.0)
    assert not found.server.connections


@contextlib.asynccontextmanager
async def client(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def until_closed(port: int, *pieces: bytes) -> bytes:
    """Send these pieces on a connection and return all bytes received until it is closed."""
    async with asyncio.timeout(SECONDS), client(port) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        return await reader.read()


def undated(answer: bytes) -> bytes:
    return b"\r\n".join(line for line in answer.split(b"\r\n") if not line.startswith(b"Date: "))


def post(path: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


LAST = "Connection: close"
CLOSED = b"Connection: close\r\n"


@pytest.mark.parametrize(
    ("sent", "answered", "understood"),
    [
        (
            post("/x?a=%20", b"abc", LAST),
            b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc",
            ("POST", "/x?a=%20", "/x", b"abc"),
        ),
        (
            b"POST /a%2Fb%41 HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"2;of=use\r\nab\r\n1\r\nc\r\n0\r\nX-Trailer: t\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc",
            ("POST", "/a%2Fb%41", "/a/bA", b"abc"),
        ),
        (
            post("/stream", b"ab", LAST),
            b"HTTP/1.1 200 OK\r\nX-Kind: stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n",
            ("POST", "/stream", "/stream", b"ab"),
        ),
        (
            post("/stream", b"ab", "Connection: keep-alive", version="1.0"),
            b"HTTP/1.1 200 OK\r\nX-Kind: stream\r\nConnection: close\r\n\r\nab",
            ("POST", "/stream", "/stream", b"ab"),
        ),
        (
            post("/x", b"ab", version="1.0"),
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nab",
            ("POST", "/x", "/x", b"ab"),
        ),
        (
            b"HEAD /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nX-Kind: stream\r\nConnection: close\r\n\r\n",
            ("HEAD", "/stream", "/stream", b""),
        ),
        (
            b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n",
            ("GET", "/nothing", "/nothing", b""),
        ),
        (
            b"GET http://x:80/y?z=1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
            ("GET", "/y?z=1", "/y", b""),
        ),
        (
            post("/x", b"late", LAST, "Expect: 100-continue"),
            b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nlate",
            ("POST", "/x", "/x", b"late"),
        ),
    ],
)
async def test_in_one_piece_and_byte_by_byte(sent, answered, understood):
    async with echo() as (found, port):
        whole = undated(await until_closed(port, sent))
        pieces = undated(await until_closed(port, *(sent[at : at + 1] for at in range(len(sent)))))
    assert whole == answered
    assert pieces.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n") == answered
    assert found.asked == [understood, understood]


async def test_a_client_that_expects_100_continue_gets_it():
    request = post("/x", b"abc", LAST, "Expect: 100-continue")
    async with echo() as (_, port), asyncio.timeout(SECONDS), client(port) as (reader, writer):
        writer.write(request[:-3])
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(request[-3:])
        assert (await reader.read()).endswith(b"abc")


async def test_a_client_of_http_1_0_gets_no_interim_response():
    async with echo() as (_, port), client(port) as (reader, writer):
        writer.write(post("/x", b"late", "Expect: 100-continue", version="1.0")[:-4])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.2)
        writer.write(b"late")
        assert await asyncio.wait_for(reader.readline(), SECONDS) == b"HTTP/1.1 200 OK\r\n"


async def test_requests_that_come_at_once_are_answered_in_their_order():
    count = 3 * http_server._MAX_QUEUED
    sent = b"".join(post(f"/stream?{at}", b"%d" % at) for at in range(count)) + post("/x", b"last", LAST)
    async with echo() as (found, port):
        answered = await until_closed(port, sent)
    assert [body for *_, body in found.asked] == [*(b"%d" % at for at in range(count)), b"last"]
    assert answered.count(b"HTTP/1.1 200 OK\r\n") == count + 1
    assert answered.endswith(b"\r\n\r\nlast")


async def test_one_connection_serves_many_requests():
    async with echo() as (found, port), asyncio.timeout(SECONDS), client(port) as (reader, writer):
        for at in range(5):
            writer.write(post("/x", b"%d" % at))
            assert b"Connection" not in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(1) == b"%d" % at
        assert len(found.server.connections) == 1
        writer.write(post("/x", b"", "Connection: keep-alive", version="1.0"))
        assert b"Connection: keep-alive" in await reader.readuntil(b"\r\n\r\n")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET /x HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /x HTTP/9.9\r\nHost: x\r\n\r\n",
    ],
)
async def test_malformed_requests_get_status_400(sent):
    async with echo() as (found, port):
        answered = await until_closed(port, sent)
    head, _, body = answered.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert json.loads(body)["error"]["code"] == "malformed_request"
    assert found.asked == []


async def test_a_valid_request_is_answered_despite_invalid_bytes_behind_it():
    async with echo() as (found, port):
        answered = await until_closed(port, post("/x", b"good") + b"\x00garbage\r\n\r\n")
    assert answered.endswith(b"\r\n\r\ngood")
    assert len(found.asked) == 1


@pytest.mark.parametrize("sent", [b"GET /" + b"x" * 2**20, b"GET / HTTP/1.1\r\n" + b"X-Y: z\r\n" * 2**17])
async def test_a_head_without_end_is_not_gathered(sent):
    async with echo() as (_, port), asyncio.timeout(SECONDS), client(port) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(sent), 2**12):
                writer.write(sent[at : at + 2**12])
                await writer.drain()
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")


async def test_a_client_refused_before_its_body_arrived_receives_the_refusal():
    body = b"x" * 2**22
    async with echo() as (_, port):
        answered = await until_closed(port, post("/refused", body))
        assert answered.startswith(b"HTTP/1.1 413 ")
        assert CLOSED in answered
        assert answered.endswith(b"\r\n\r\nno")


@pytest.mark.parametrize("path", ["/broken", "/silent"])
async def test_an_exception_of_the_handler_ends_only_its_connection(path, caplog):
    async with echo() as (_, port):
        with contextlib.suppress(ConnectionError):
            answered = await until_closed(port, post(path, b"x" * 2**20))
            assert answered.startswith(b"HTTP/1.1 500 ") == (path == "/broken")
        assert (await until_closed(port, post("/x", b"good", LAST))).endswith(b"good")
    assert ("a mistake" in caplog.text) == (path == "/broken")


async def test_a_client_that_leaves_ends_the_handling():
    async with echo() as (found, port), asyncio.timeout(SECONDS):
        async with client(port) as (_, writer):
            writer.write(post("/patient", b"x"))
            await found.begun.wait()
        await found.left.wait()


async def test_a_body_that_breaks_off_is_none():
    async with echo() as (found, port), asyncio.timeout(SECONDS):
        async with client(port) as (_, writer):
            writer.write(post("/x", b"abc")[:-1])
            await found.begun.wait()
        await found.left.wait()
    assert found.asked == []


async def test_an_idle_connection_is_closed(monkeypatch):
    monkeypatch.setattr(http_server, "_KEEPALIVE_SECONDS", 0.2)
    async with echo() as (_, port):
        assert await until_closed(port) == b""
        assert await until_closed(port, b"GET /x HT") == b""
        assert (await until_closed(port, post("/x", b"good"))).endswith(b"good")


async def test_closing_lets_the_last_answer_end():
    request = post("/x", b"abc")
    async with asyncio.timeout(SECONDS), echo() as (found, port), client(port) as (reader, writer):
        writer.write(request[:-1])
        async with client(port) as (idle, _):
            await found.begun.wait()
            closing = asyncio.create_task(found.server.close(SECONDS))
            assert await idle.read() == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        assert not closing.done()
        writer.write(request[-1:])
        assert (await reader.read()).endswith(b"abc")
        await closing


async def test_a_connection_too_many_ends_the_one_that_is_idle_longest():
    async with echo(connections=2) as (found, port), asyncio.timeout(SECONDS):
        async with client(port) as (oldest, _), client(port) as (reader, writer):
            writer.write(post("/x", b"1"))
            await reader.readuntil(b"\r\n\r\n1")
            assert (await until_closed(port, post("/x", b"good", LAST))).endswith(b"good")
            with contextlib.suppress(ConnectionError):
                assert await oldest.read() == b""
            writer.write(post("/x", b"2", LAST))
            assert (await reader.read()).endswith(b"2")
        assert found.refused == []


async def test_beside_connections_that_are_all_at_work_a_further_one_is_turned_away():
    async with echo(connections=1) as (found, port), asyncio.timeout(SECONDS), client(port) as (_, writer):
        writer.write(post("/patient", b"x"))
        await found.begun.wait()
        answered = await until_closed(port)
        assert answered.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answered.partition(b"\r\n\r\n")[2])["error"]["code"] == "overloaded"
        assert found.refused == ["overloaded"]
