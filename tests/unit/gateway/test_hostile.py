"""The gateway's own paths and other clients get responses, however clients use their connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_runtime.gateway import http_server, server
from dsv4_runtime.gateway.request import CONNECTION_BYTES, Charge
from dsv4_runtime.gateway.server import Gateway
from dsv4_testkit.waiting import until

PLACES = 20
ASK = json.dumps({"model": "nano", "prompt": "Once", "max_tokens": 2}).encode()
OWN = ("/healthz", "/readyz", "/health", "/metrics")


def post(body, *headers):
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


WHOLE = {
    "length": post(ASK, f"Content-Length: {len(ASK)}"),
    "chunked": post(b"%x\r\n%b\r\n0\r\nX-T: y\r\n\r\n" % (len(ASK), ASK), "Transfer-Encoding: chunked"),
    "expect": post(ASK, f"Content-Length: {len(ASK)}", "Expect: 100-continue"),
    "get with a body": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n0123456789",
    "own path with a body": b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n0123456789",
    "two at once": b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" + post(ASK, f"Content-Length: {len(ASK)}"),
}
CUTS = (0.0, 0.02, 0.3, 0.6, 0.8, 0.99)
"""Shares of a request that a client sends before it sends no more."""


@pytest.fixture
def few_places(monkeypatch):
    monkeypatch.setitem(Gateway.__init__.__kwdefaults__, "max_connections", PLACES)


@contextlib.asynccontextmanager
async def crowd(lab, count, data=b""):
    """Open `count` connections that send `data` and then neither read nor send."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as all_of_them:
        for _ in range(count):
            client = all_of_them.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", int(lab.url.rsplit(":", 1)[1])))
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(client, data)
        await asyncio.sleep(0.1)
        yield


async def ask(lab, data):
    """Return the whole response to one request on a new connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rsplit(":", 1)[1]))
    try:
        async with asyncio.timeout(60):
            writer.write(data)
            return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def get(path):
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()


LAST = post(ASK, f"Content-Length: {len(ASK)}", "Connection: close")


async def others_are_answered(lab):
    for _ in range(3):
        assert (await ask(lab, LAST)).startswith(b"HTTP/1.1 200 ")
    for path in OWN:
        begun = time.monotonic()
        assert (await ask(lab, get(path))).startswith(b"HTTP/1.1 200 "), path
        assert time.monotonic() - begun < 25


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", WHOLE)
async def test_a_part_of_a_request_on_every_connection(kit, few_places, kind, cut):
    async with kit.Lab() as lab, crowd(lab, 2 * PLACES, WHOLE[kind][: int(len(WHOLE[kind]) * cut)]):
        await others_are_answered(lab)


@given(
    kinds=st.lists(st.tuples(st.sampled_from(sorted(WHOLE)), st.floats(0.0, 0.999)), min_size=1, max_size=5),
)
@settings(max_examples=15, deadline=None)
def test_parts_of_different_requests_at_once(kinds):
    from tests.unit.gateway.conftest import Lab

    async def run():
        async with Lab() as lab, contextlib.AsyncExitStack() as all_of_them:
            for kind, cut in kinds:
                part = WHOLE[kind][: int(len(WHOLE[kind]) * cut)]
                await all_of_them.enter_async_context(crowd(lab, PLACES, part))
            await others_are_answered(lab)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Gateway.__init__.__kwdefaults__, "max_connections", PLACES)
        asyncio.run(run())


async def test_unread_answers_on_every_connection_do_not_block_other_clients(kit, few_places):
    async def script(request, body):
        return web.Response(body=b"x" * (6 << 20 if request.path == "/v1/large" else 1))

    large = b"GET /v1/large HTTP/1.1\r\nHost: x\r\n\r\n"
    async with kit.Lab(engine=kit.Engine(script=script)) as lab, crowd(lab, 2 * PLACES, large):
        await asyncio.sleep(0.5)
        await others_are_answered(lab)


async def test_idle_connections_on_every_place(kit, few_places):
    async with kit.Lab() as lab, crowd(lab, 2 * PLACES, WHOLE["length"]):
        await others_are_answered(lab)


@pytest.mark.parametrize("more", [0, 10, 3 * http_server.RESERVED_CONNECTIONS])
async def test_own_paths_are_answered_while_every_connection_has_a_request_with_the_engine(kit, few_places, more):
    gate = asyncio.Event()

    async def script(request, body):
        await gate.wait()

    async with kit.Lab(engine=kit.Engine(script=script), max_held_requests=100) as lab:
        async with crowd(lab, PLACES, WHOLE["length"]), crowd(lab, more):
            await until(lambda: len(lab.engine.requests) == PLACES)
            for path in OWN:
                assert (await ask(lab, get(path))).startswith(b"HTTP/1.1 200 "), path
            refused = [await ask(lab, LAST) for _ in range(2)]
            assert all(one.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 10\r\n" in one for one in refused)
            assert json.loads(refused[1].partition(b"\r\n\r\n")[2])["error"]["code"] == "overloaded"
            gate.set()
        await others_are_answered(lab)


@pytest.mark.parametrize("room", [0, CONNECTION_BYTES + 100])
async def test_own_paths_are_answered_without_memory_for_clients(kit, room):
    body = json.dumps({"model": "nano", "prompt": "x" * 300_000}).encode()
    limits = {"max_client_bytes": 2**20, "max_body_bytes": 2**20, "max_held_bytes": 2**22}
    held = post(body, f"Content-Length: {len(body)}")
    async with kit.Lab(engine=kit.Engine(phase="Loading"), **limits) as lab, crowd(lab, 3, held):
        account = lab.gateway._account
        # The requests would otherwise need memory that is taken below.
        await until(lambda: account.used >= 3 * len(body))
        rest = Charge(account)
        assert rest.take(account.limit - account.used - room)
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await ask(lab, get(path))).startswith(b"HTTP/1.1 200 "), path
        assert (await ask(lab, LAST)).startswith(b"HTTP/1.1 503 ")
        rest.release()


@pytest.fixture
def fast(monkeypatch):
    """Reduce the minimum pace to 1000 bytes in half a second."""
    monkeypatch.setattr(http_server, "PACE_SECONDS", 0.5)
    monkeypatch.setattr(http_server, "PACE_BYTES", 1000)
    monkeypatch.setattr(http_server, "_CHECK_SECONDS", 0.05)


@pytest.mark.parametrize("framing", ["Content-Length: 100000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("drip", [b"", b"1", b"1\r\nx\r\n"])
async def test_a_body_that_hardly_arrives_is_refused(kit, fast, framing, drip):
    async with kit.Lab() as lab:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rsplit(":", 1)[1]))
        writer.write(post(b"", framing))

        async def send():
            while True:
                writer.write(drip)
                await asyncio.sleep(0.05)

        sending = asyncio.ensure_future(send())
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
        sending.cancel()
        assert head.startswith(b"HTTP/1.1 408 " if drip != b"1" or "Length" in framing else b"HTTP/1.1 4")
        assert b"Connection: close" in head
        writer.close()


async def test_a_large_slow_body_is_taken(kit, fast, monkeypatch):
    # A busy machine may stop the client for some seconds.
    monkeypatch.setattr(http_server, "PACE_SECONDS", 4.0)
    body = json.dumps({"model": "nano", "prompt": "Once", "max_tokens": 2, "user": "x" * 45_000}).encode()
    async with kit.Lab() as lab:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rsplit(":", 1)[1]))
        writer.write(post(b"", f"Content-Length: {len(body)}", "Connection: close"))
        for at in range(0, len(body), 500):
            writer.write(body[at : at + 500])
            await asyncio.sleep(0.1)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_body_whose_turn_has_not_come_is_not_timed(kit, fast):
    async def script(request, body):
        await asyncio.sleep(1.5)

    async with kit.Lab(engine=kit.Engine(script=script)) as lab:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rsplit(":", 1)[1]))
        writer.write(WHOLE["length"] + LAST[:-1])
        await asyncio.sleep(1.2)
        writer.write(LAST[-1:])
        async with asyncio.timeout(60):
            assert (await reader.read()).count(b"HTTP/1.1 200 ") == 2
        writer.close()


async def _read(lab, step, pause, seconds=2.5):
    """Return the number of bytes of a large response that a client received by reading in steps."""

    async def script(request, body):
        return web.Response(body=b"x" * (6 << 20))

    lab.engine.script = script
    loop, got = asyncio.get_running_loop(), 0
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", int(lab.url.rsplit(":", 1)[1])))
        await loop.sock_sendall(client, b"GET /v1/x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            got += len(await loop.sock_recv(client, step) if step else b"")
            await asyncio.sleep(pause)
        with contextlib.suppress(ConnectionError):
            while part := await loop.sock_recv(client, 2**20):
                got += len(part)
    return got


async def test_an_answer_that_is_not_read_is_broken_off(kit, fast):
    async with kit.Lab() as lab:
        assert await _read(lab, 0, 0.1) < 6 << 20


async def test_an_answer_that_is_read_slowly_is_delivered(kit, fast, monkeypatch):
    """The client reads so slowly that the kernel's buffers stay full and the gateway sees no progress for seconds."""
    # A busy machine may stop the client for some seconds.
    monkeypatch.setattr(http_server, "PACE_SECONDS", 4.0)
    async with kit.Lab() as lab:
        assert await _read(lab, 2000, 0.1, 6.5) > 6 << 20


async def test_an_unauthenticated_flood_of_scrapes_reaches_vllm_once(kit, monkeypatch):
    monkeypatch.setattr(server, "_SCRAPE_SHARED_SECONDS", 600.0)
    seen, answers = {"now": 0, "most": 0, "all": 0}, asyncio.Event()
    answers.set()
    engine = kit.Engine()
    handle = engine.handle

    async def counted(request):
        if request.path != "/metrics":
            return await handle(request)
        seen["now"] += 1
        seen["all"] += 1
        seen["most"] = max(seen["most"], seen["now"])
        await asyncio.sleep(0.2)
        await answers.wait()
        seen["now"] -= 1
        return await handle(request)

    engine.handle = counted
    async with kit.Lab(engine=engine, keys="key\n") as lab:
        texts = await asyncio.gather(*(ask(lab, get("/metrics")) for _ in range(200)))
        assert all(b"vllm:num_requests_waiting" in text for text in texts)
        assert (seen["most"], seen["all"]) == (1, 1)
        # A client that leaves does not cancel the response for the others.
        answers.clear()
        lab.gateway._engine_metrics._seconds = 0.0
        leaving = asyncio.ensure_future(ask(lab, get("/metrics")))
        await until(lambda: seen["now"] == 1)
        lab.gateway._engine_metrics._seconds = 600.0
        staying = asyncio.ensure_future(ask(lab, get("/metrics")))
        await asyncio.sleep(0.1)
        leaving.cancel()
        await asyncio.sleep(0.1)
        answers.set()
        assert b"vllm:num_requests_waiting" in await staying
        assert (seen["most"], seen["all"]) == (1, 2)


async def test_metrics_without_end_are_left_out(kit, monkeypatch, caplog):
    monkeypatch.setattr(server, "_MAX_METRICS_BYTES", 100_000)
    async with kit.Lab(engine=kit.Engine(more_metrics=50_000)) as lab:
        text = await ask(lab, get("/metrics"))
        assert b"dsv4_gateway_active" in text
        assert b"vllm:num_requests_waiting" not in text
        assert "more than 100000 bytes" in caplog.text


@pytest.mark.parametrize("blank", [" ", "   "])
async def test_white_space_behind_a_value_does_not_belong_to_it(kit, blank):
    """RFC 9110, 5.5."""
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(ASK), ASK)
    async with kit.Lab() as lab:
        found = await ask(lab, post(chunks, f"Transfer-Encoding: chunked{blank}", f"Connection: close{blank}"))
        assert found.startswith(b"HTTP/1.1 200 "), found
        reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rsplit(":", 1)[1]))
        async with asyncio.timeout(60):
            writer.write(post(b"", f"Content-Length: {len(ASK)}", f"Expect: 100-continue{blank}\t"))
            assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
        writer.close()
