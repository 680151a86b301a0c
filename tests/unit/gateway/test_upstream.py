"""The client side of HTTP/1.1, byte by byte: vLLM's responses in arbitrary pieces, and reuse of connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn

from dsv4_runtime.engine import token_auth
from dsv4_runtime.gateway import http_client
from dsv4_runtime.gateway.http_client import BrokenMessageError, UnreachableError, Upstream
from dsv4_testkit.waiting import until

SECONDS = 60.0
OK = b"HTTP/1.1 200 OK\r\nX-Kind: y\r\n"
ANSWERS = {
    "length": (OK + b"Content-Length: 3\r\n\r\nabc", True),
    "chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n2;x=y\r\nbc\r\n0\r\nX-Late: t\r\n\r\n", True),
    "until the end": (OK + b"\r\nabc", False),
    "told to close": (OK + b"Connection: close\r\nContent-Length: 3\r\n\r\nabc", False),
    "after hints": (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK + b"Content-Length: 3\r\n\r\nabc", True),
    "with more than was asked for": (OK + b"Content-Length: 3\r\n\r\nabc" + OK + b"Content-Length: 0\r\n\r\n", False),
}


class Scripted:
    """A server that sends the same response to every request, in pieces of `step` bytes."""

    def __init__(self, answer: bytes, step: int, *, closes: bool = False) -> None:
        self._answer, self._step, self._closes = answer, step, closes
        self.asked: list[bytes] = []
        self.sent = 0
        """Number of complete responses."""
        self.handlers: list[asyncio.Task[None]] = []
        """One per connection."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.handlers.append(task)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self.asked.append(await reader.readuntil(b"\r\n\r\n"))
                for at in range(0, len(self._answer), self._step):
                    writer.write(self._answer[at : at + self._step])
                    await writer.drain()
                    await asyncio.sleep(0)
                self.sent += 1
                if self._closes:
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def scripted(answer: bytes, step: int = 2**16, *, closes: bool = False) -> AsyncIterator[tuple[Scripted, str]]:
    found = Scripted(answer, step, closes=closes)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    async with asyncio.timeout(SECONDS):
        try:
            yield found, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            await asyncio.gather(*found.handlers)


@contextlib.asynccontextmanager
async def asking() -> AsyncIterator[Upstream]:
    found = Upstream()
    try:
        yield found
    finally:
        found.close()
        await asyncio.sleep(0)


@pytest.mark.parametrize("step", [1, 7, 2**16])
@pytest.mark.parametrize("name", ANSWERS)
async def test_responses_are_read_and_connections_reused_where_permitted(name, step):
    answer, kept = ANSWERS[name]
    async with scripted(answer, step, closes=name == "until the end") as (server, api), asking() as client:
        for number in range(3):
            async with client.request(api, "GET", "/x", [(b"A", b"b")]) as given:
                assert (given.status, given.header(b"x-kind")) == (200, "y")
                assert await given.read() == b"abc"
                # Unsolicited bytes may arrive slightly later.
                await until(lambda number=number: server.sent > number)
                await asyncio.sleep(0.02)
    assert server.asked[0] == b"GET /x HTTP/1.1\r\nHost: " + api[7:].encode() + b"\r\nA: b\r\n\r\n"
    assert len(server.handlers) == (1 if kept else 3)


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_an_answer_without_a_body(status):
    async with scripted(b"HTTP/1.1 " + status + b"\r\n\r\n") as (server, api), asking() as client:
        for _ in range(2):
            async with client.request(api, "GET", "/x", []) as given:
                assert await given.read() == b""
    assert len(server.handlers) == 1


async def test_the_length_of_an_answer_to_head_is_that_of_another():
    answer = OK + b"Content-Length: 1000\r\n\r\n"
    async with scripted(answer) as (_, api), asking() as client, client.request(api, "HEAD", "/x", []) as given:
        assert await given.read() == b""


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b"", "without an answer"),
        (b"HTTP/1.1 200 OK\r\nX: ", "without an answer"),
        (OK + b"Content-Length: 4\r\n\r\nabc", "in the middle of its answer"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", "in the middle of its answer"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcdefgh", "not HTTP/1.1"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not HTTP/1.1"),
    ],
)
async def test_an_incomplete_answer_is_an_error(answer, what):
    async with scripted(answer, closes=True) as (_, api), asking() as client:
        got = bytearray()

        async def read() -> None:
            async with client.request(api, "GET", "/x", []) as given:
                while part := await given.part():
                    got.extend(part)

        with pytest.raises(BrokenMessageError, match=what):
            await read()
        assert got == (b"abc" if OK in answer else b"")


async def test_a_closed_port_is_an_error(unused_tcp_port):
    async with asking() as client:
        with pytest.raises(UnreachableError, match=str(unused_tcp_port)):
            async with client.request(f"http://127.0.0.1:{unused_tcp_port}", "GET", "/x", []):
                pass


async def test_a_connection_that_is_not_accepted_in_time_is_an_error(monkeypatch):
    monkeypatch.setattr(http_client, "_CONNECT_SECONDS", 0.1)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        async with asyncio.timeout(SECONDS), asking() as client:
            # With a queue of length 0 the kernel accepts one connection, and the next one waits.
            kept = [client.request(f"http://127.0.0.1:{deaf.getsockname()[1]}", "GET", "/x", []) for _ in range(3)]
            asked = [asyncio.ensure_future(one.__aenter__()) for one in kept]
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
    for one in done:
        with pytest.raises(UnreachableError, match=r"within 0\.1 s"):
            one.result()


async def test_a_connection_that_was_closed_meanwhile_is_not_taken():
    async with scripted(ANSWERS["length"][0], closes=True) as (server, api), asking() as client:
        for _ in range(2):
            async with client.request(api, "GET", "/x", []) as given:
                await given.read()
            await asyncio.gather(*server.handlers)
            await asyncio.sleep(0.05)
    assert len(server.handlers) == 2


async def test_an_old_connection_is_not_taken(monkeypatch):
    monkeypatch.setattr(http_client, "_IDLE_SECONDS", 0.0)
    async with scripted(ANSWERS["length"][0]) as (server, api), asking() as client:
        for _ in range(2):
            async with client.request(api, "GET", "/x", []) as given:
                await given.read()
    assert len(server.handlers) == 2


async def test_a_response_that_is_not_read_completely_closes_its_connection():
    async with scripted(OK + b"Content-Length: 4\r\n\r\nabc") as (server, api), asking() as client:
        async with client.request(api, "GET", "/x", []) as given:
            assert await given.part() == b"abc"
        async with client.request(api, "GET", "/x", []):
            pass
    assert len(server.handlers) == 2


async def test_unread_bytes_are_not_buffered():
    size, sent = 2**26, 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"Content-Length: %d\r\n\r\n" % size)
        with contextlib.suppress(ConnectionError):
            while sent < size:
                writer.write(b"x" * 2**16)
                await writer.drain()
                sent += 2**16
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    api = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with asyncio.timeout(SECONDS), asking() as client, client.request(api, "GET", "/x", []) as given:
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.2)
        assert sent < size / 2
        assert given._waiting < 2 * http_client.MAX_WAITING_BYTES
        assert len(await given.read()) == size
    server.close()
    await asyncio.sleep(0.05)


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_the_body_of_a_trial_is_sent_when_vllms_port_has_admitted_it(tmp_path, monkeypatch, http):
    """uvicorn as in vLLM, with the middleware of `engine.token_auth`."""
    (tmp_path / "token").write_text("c0ffee")
    monkeypatch.setenv(token_auth.TOKEN_VARIABLE, str(tmp_path / "token"))
    bodies, go = [], asyncio.Event()

    async def app(scope, receive, send):
        if scope["path"] != "/without-body":
            bodies.append((await receive())["body"])
            await go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    config = uvicorn.Config(token_auth.TokenAuth(app), http=http, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    api, events = f"http://127.0.0.1:{listener.getsockname()[1]}", []

    async def send(client, owner, path="/v1/completions"):
        headers = [
            (token_auth.HEADER.encode(), b"c0ffee"),
            (token_auth.TURN_HEADER.encode(), token_auth.turn_header(owner, token_auth.Kind.ALONE).encode()),
        ]
        async with client.request(api, "POST", path, headers, (b"body",), lambda: events.append(owner)) as given:
            return given.status, await given.read()

    async with asyncio.timeout(SECONDS), asking() as client:
        first = asyncio.ensure_future(send(client, "a"))
        await until(lambda: bodies == [b"body"])
        assert events == ["a"]
        assert await send(client, "b") == (503, b"")
        assert (events, bodies) == (["a"], [b"body"])
        go.set()
        assert await first == (200, b"ok")
        assert await send(client, "b", "/without-body") == (200, b"ok")
        assert await send(client, "b") == (200, b"ok")
        assert (events, bodies) == (["a", "b"], [b"body"] * 2)
        server.should_exit = True
        await serving


async def test_a_cancelled_request_stays_open_and_its_connection_is_not_used_again_without_its_body():
    answer = OK + b"Content-Length: 3\r\n\r\nabc"
    async with scripted(answer) as (server, api), asking() as client:
        request = client.request(api, "POST", "/x", [], (b"body",), lambda: None)
        sending = asyncio.ensure_future(request.__aenter__())
        while request.answer is None:
            await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        found = request.answer
        assert found is not None
        await until(lambda: found.complete)
        request.close()
        async with client.request(api, "GET", "/y", []) as given:
            assert await given.read() == b"abc"
    assert len(server.handlers) == 2


async def test_a_connection_that_breaks_before_vllm_asks_for_the_body_was_no_request():
    async with scripted(b"", closes=True) as (server, api), asking() as client:
        with pytest.raises(UnreachableError, match="without an answer"):
            async with client.request(api, "POST", "/x", [], (b"body",), lambda: None):
                pass
    assert server.asked == [
        b"POST /x HTTP/1.1\r\nHost: " + api[7:].encode() + b"\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
    ]
