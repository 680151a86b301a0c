"""Clients can only make the gateway store and compute a limited amount."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import time

import pytest
from aiohttp import web

from dsv4_runtime.gateway import http_server, main
from dsv4_runtime.gateway import request as request_module
from dsv4_runtime.gateway.admission import parse_object
from dsv4_runtime.gateway.exchange import Exchange
from dsv4_runtime.gateway.request import Account, Charge, Request
from dsv4_testkit.waiting import until

COMPLETIONS = "/v1/completions"
ASK = {"model": "nano", "prompt": "Once", "max_tokens": 5}
TINY = b"GET /v1/x HTTP/1.1\r\nHost:x\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


async def _send(lab, *pieces, seconds=5.0):
    """Return all bytes received on a new connection until it is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rsplit(":", 1)[1]))
    try:
        async with asyncio.timeout(seconds):
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
            return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def _used(lab):
    return lab.gateway._account.used


def _objects(*classes):
    """Return all objects of these classes. Compares `type`: reading `__class__` may run code of foreign objects."""
    return [one for one in gc.get_objects() if type(one) in classes]


async def test_reading_stops_while_the_queue_of_pipelined_requests_is_full(kit):
    most = http_server._MAX_QUEUED + http_server._PARSE_BYTES // len(TINY)
    seen = []

    async def script(request, body):
        seen.append(max(len(one._queue) for one in gateway_connections))
        return web.Response(text="x")

    async with kit.Lab() as lab:
        lab.engine.script = script
        reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rsplit(":", 1)[1]))
        gateway_connections = _objects(http_server._Connection)
        assert gateway_connections
        gateway_connections = [one for one in gateway_connections if one.transport is not None]
        writer.write(TINY * 2000 + TINY.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        async with asyncio.timeout(60):
            answered = await reader.read()
        assert answered.count(b"HTTP/1.1 200 OK") == 2001
        assert max(seen) >= http_server._MAX_QUEUED
        assert max(seen) <= most
        writer.close()


async def test_a_flood_behind_a_request_that_takes_long_is_not_kept(kit):
    async with kit.Lab(engine=kit.Engine(phase="Loading")) as lab:
        with socket.create_connection(("127.0.0.1", int(lab.url.rsplit(":", 1)[1]))) as client:
            client.setblocking(False)
            loop, sent = asyncio.get_running_loop(), 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    while True:
                        await loop.sock_sendall(client, TINY * 1000)
                        sent += 1000
            # The rest stays with the client: the buffers of the kernel hold some tens of thousands of requests.
            assert _used(lab) < 300 * (request_module.REQUEST_BYTES + len(TINY)) + 2 * request_module.CONNECTION_BYTES
            assert len(_objects(Request)) < 300
        await lab.engine.change(phase="Serving")
        await until(lambda: _used(lab) <= 2 * request_module.CONNECTION_BYTES)


@pytest.mark.parametrize("trailer", [b"X-T: " + b"y" * 2**20 + b"\r\n", b"X-T: y\r\n" * 2**17])
async def test_trailers_are_bounded(kit, trailer):
    async with kit.Lab() as lab:
        used = _used(lab)
        answered = await _send(lab, CHUNKED + b"2\r\n{}\r\n0\r\n" + trailer, b"\r\n")
        assert answered.startswith(b"HTTP/1.1 431 ")
        assert lab.engine.requests == []
        await until(lambda: _used(lab) <= used)


async def test_a_chunk_extension_is_bounded(kit):
    async with kit.Lab() as lab:
        assert (await _send(lab, CHUNKED + b"2;" + b"x" * 2**20)).startswith(b"HTTP/1.1 431 ")


async def test_trailers_within_the_bound_pass(kit):
    async with kit.Lab() as lab:
        text = json.dumps(ASK).encode()
        body = b"%x\r\n%b\r\n0\r\nX-T: %b\r\n\r\n" % (len(text), text, b"y" * 2000)
        answered = await _send(lab, CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + body)
        assert answered.startswith(b"HTTP/1.1 200 ")


@pytest.fixture
def without_collector():
    """Disable the garbage collector: its next full collection may be minutes away."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_bodies_of_requests_that_were_refused_are_freed_at_once(kit, without_collector):
    async with kit.Lab(engine=kit.Engine(phase="Loading"), max_client_bytes=2**20, max_body_bytes=2**24) as lab:
        answered = await _send(lab, CHUNKED + b"%x\r\n" % 2**21 + b"x" * 2**21)
        assert answered.startswith(b"HTTP/1.1 503 ")
        assert (await lab.post(COMPLETIONS, b"{}", headers={"X-Request-Timeout": "0.05"}))[0] == 504
        kept = _objects(Request, Exchange)
        assert kept == []


async def test_bodies_of_requests_that_were_cancelled_are_freed_at_once(kit, without_collector):
    async with kit.Lab(engine=kit.Engine(phase="Loading"), max_body_bytes=2**23, max_held_bytes=2**26) as lab:
        body = json.dumps({**ASK, "prompt": "x" * 2**20}).encode()
        asked = [asyncio.ensure_future(lab.post(COMPLETIONS, body)) for _ in range(8)]
        await until(lambda: _used(lab) > 8 * 2**20)
        assert await lab.metric("dsv4_gateway_client_bytes") > 8 * 2**20
        for one in asked:
            one.cancel()
        await asyncio.wait(asked)
        await until(lambda: _used(lab) < 2**18)
        # Many short waits: a machine that stalls for the whole time leaves the loop its turns.
        for _ in range(50):
            await asyncio.sleep(0.001)
        kept = _objects(Request, Exchange)
        assert kept == []


async def test_a_body_that_is_still_arriving_is_counted_and_given_back(kit):
    async with kit.Lab(max_body_bytes=2**20) as lab:
        before = _used(lab)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rsplit(":", 1)[1]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 900_000)
        await until(lambda: _used(lab) - before > 900_000)
        writer.close()
        await until(lambda: _used(lab) <= before)
        assert reader


async def test_requests_beyond_the_buffer_limit_are_refused_and_others_are_answered(kit):
    room = 4 * 2**20
    async with kit.Lab(max_body_bytes=2**22, max_client_bytes=room) as lab:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n"
        port = int(lab.url.rsplit(":", 1)[1])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"x" * 3_500_000)
        await until(lambda: _used(lab) > 3_500_000)
        answered = await _send(lab, head + b"x" * 2_000_000)
        assert answered.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answered.partition(b"\r\n\r\n")[2])["error"]["code"] == "overloaded"
        assert b"Retry-After: 10" in answered
        assert _used(lab) <= room
        assert (await lab.post(COMPLETIONS, ASK))[0] == 200
        writer.close()
        await until(lambda: _used(lab) < 2**18)
        assert (await lab.post(COMPLETIONS, {**ASK, "user": "x" * 3_000_000}))[0] == 200


async def test_bodies_that_do_not_go_on_make_room_for_others(kit, monkeypatch):
    monkeypatch.setattr(request_module, "GRACE_SECONDS", 0.2)
    async with kit.Lab(max_body_bytes=2**22, max_client_bytes=4 * 2**20) as lab:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rsplit(":", 1)[1]))
        writer.write(head + b"x" * 3_500_000)
        await until(lambda: _used(lab) > 3_500_000)
        await asyncio.sleep(0.25)
        assert (await lab.post(COMPLETIONS, {**ASK, "user": "x" * 3_000_000}))[0] == 200
        assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
        writer.close()


async def test_a_client_that_does_not_read_is_charged_for_buffered_bytes(kit):
    async def script(request, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(400):
            await response.write(b"data: " + b"x" * 50_000 + b"\n\n")
        return response

    async with kit.Lab() as lab:
        lab.engine.script = script
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(lab.url.rsplit(":", 1)[1])))
            client.sendall(b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            await until(lambda: _used(lab) > request_module.SLOW_CLIENT_BYTES)
        await until(lambda: _used(lab) < request_module.SLOW_CLIENT_BYTES)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b",".join([b"[]"] * 2**18) + b"]}",
        b'{"a":[' + b",".join([b'{"a":{}}'] * 2**16) + b"]}",
        b"{" + b",".join(b'"%x":{}' % at for at in range(2**16)) + b"}",
        b'{"a":"' + b"\\u00e9" * 2**21 + b'"}',
        b'{"a":"' + b"x" * 2**24 + b'"}',
    ],
)
async def test_a_body_that_takes_long_to_parse_is_passed_on_unparsed(kit, body):
    assert parse_object(body) is None
    async with kit.Lab(max_body_bytes=2**25) as lab:
        seen = []

        async def script(request, parsed):
            seen.append(len(await request.read()))
            return web.Response(text="ok")

        lab.engine.script = script
        assert (await lab.post(COMPLETIONS, body))[0] == 200
        assert seen == [len(body)]


@pytest.mark.parametrize(
    "value",
    [
        [12345] * 400_000,
        [[]] * 60_000,
        [{"a": 1}] * 20_000,
        {f"{at:x}": 1 for at in range(50_000)},
        "hello, world. " * 400_000,
        "\n" * 600_000,
        ["abc"] * 100_000,
    ],
)
def test_parsed_bodies_take_less_than_50_ms(value):
    body = json.dumps({"messages": [], "x": value}, separators=(",", ":")).encode()
    took = [1.0]
    while len(took) < 20 and min(took) >= 0.05:
        begun = time.thread_time()
        found = parse_object(body)
        took.append(time.thread_time() - begun)
    assert found is not None
    assert min(took) < 0.05


def test_long_prompts_are_understood():
    words = {"prompt": "The quick brown fox, as they say, jumps.\n" * 100_000, "stream": True}
    tokens = {"prompt": list(range(100_000, 228_000)), "stream": True}
    for body in (words, tokens):
        assert parse_object(json.dumps(body).encode()) == body


async def test_a_request_behind_a_long_body_is_answered(kit):
    async with kit.Lab(max_body_bytes=2**20) as lab:
        body = json.dumps({**ASK, "user": "x" * 200_000}).encode()
        first = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        second = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        answered = await _send(lab, first + second[:40], second[40:])
        assert answered.count(b"HTTP/1.1 200 OK") == 2
        assert answered.endswith(b"ok\n")


LONG = b"GET /x HTTP/1.1\r\nHost: x\r\nX-Y: " + b"z" * 70_000 + b"\r\n\r\n"
WRONG = {
    "70 KB head": (LONG, 431),
    "70 KB head in many headers": (b"GET /x HTTP/1.1\r\nHost: x\r\n" + b"X-Y: zzz\r\n" * 7000 + b"\r\n", 431),
    "101 headers": (b"GET /x HTTP/1.1\r\nHost: x\r\n" + b"X:\r\n" * 100 + b"\r\n", 431),
    "101 headers and no end": (b"GET /x HTTP/1.1\r\nHost: x\r\n" + b"X:\r\n" * 101, 431),
    "no Host": (b"GET /x HTTP/1.1\r\nX: y\r\n\r\n", 400),
    "two Hosts": (b"GET /x HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", 400),
    "HTTP/2.0": (b"GET /x HTTP/2.0\r\nHost: x\r\n\r\n", 400),
    "chunked on 1.0": (b"POST /x HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "gzip in chunks": (b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01", 400),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_head_is_refused_logged_and_counted(kit, name, caplog):
    caplog.set_level("INFO", "dsv4.gateway.access")
    sent, status = WRONG[name]
    code = {400: "malformed_request", 431: "head_too_large"}[status]
    async with kit.Lab() as lab:
        answered = await _send(lab, sent)
        assert answered.startswith(b"HTTP/1.1 %d " % status)
        assert json.loads(answered.partition(b"\r\n\r\n")[2])["error"]["code"] == code
        assert lab.engine.requests == []
        assert await lab.metric(f'dsv4_gateway_refused_total{{code="{code}"}}') == 1
        assert f"- 127.0.0.1 - - status={status} outcome=client_error refused={code}" in caplog.messages


async def test_a_head_of_60_kb_passes(kit):
    async with kit.Lab() as lab:
        head = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Y: " + b"z" * 60_000 + b"\r\n\r\n"
        assert (await _send(lab, head)).startswith(b"HTTP/1.1 200 ")


async def test_100_headers_pass(kit):
    async with kit.Lab() as lab:
        head = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + b"X:\r\n" * 98 + b"\r\n"
        assert (await _send(lab, head)).startswith(b"HTTP/1.1 200 ")


async def test_an_idle_connection_keeps_nothing_of_its_last_request(kit):
    async with kit.Lab(keys="key\n") as lab:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rpartition(":")[2]))
        writer.write(b"GET /v1/x HTTP/1.1\r\nHost: x\r\nX-Y: " + b"z" * 60_000 + b"\r\n\r\n")
        assert b" 401 " in await asyncio.wait_for(reader.readline(), 60)
        account = lab.gateway._account
        found = [one for one in _objects(http_server._Connection) if one._server.account is account and one.transport]
        assert found
        assert [(one._headers, one._target) for one in found] == [([], b"")] * len(found)
        writer.close()


async def test_answers_that_are_not_read_are_charged_before_they_take_more_than_a_connection_is_charged_for(kit):
    listener = socket.create_server(("127.0.0.1", 0))
    # Inherited by connections, so that few answers fill the kernel's buffer.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    async with kit.Lab(listener=listener) as lab:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            address = "127.0.0.1", int(lab.url.rpartition(":")[2])
            await asyncio.get_running_loop().sock_connect(client, address)
            account, port = lab.gateway._account, client.getsockname()[1]
            most = 0
            for _ in range(1000):
                client.send(b"GET /v1/models/nano HTTP/1.1\r\nHost: x\r\nX-Request-Id: %b\r\n\r\n" % (b"x" * 120))
                await asyncio.sleep(0.002)
                if not most:
                    (one,) = [
                        one
                        for one in _objects(http_server._Connection)
                        if one._server.account is account and one.transport.get_extra_info("peername")[1] == port
                    ]
                if one._unsent.size:
                    break
                most = max(most, one.transport.get_write_buffer_size(), 1)
            assert 1 < most <= request_module.CONNECTION_BYTES


async def test_a_decoded_path_is_charged(kit):
    """One character beyond the Basic Multilingual Plane makes four bytes of each."""
    async with kit.Lab() as lab:
        path = b"/v1/embeddings/%F0%9F%98%80" + b"x" * 50_000
        before = _used(lab)
        head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        _, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rpartition(":")[2]))
        writer.write(head)
        await until(lambda: _used(lab) - before > 250_000)
        writer.close()
        await until(lambda: _used(lab) <= before)


@pytest.mark.parametrize("header", [b"Authorization: Bearer \xff\xfe", b"x-api-key: \xff", b"Authorization: \xc3\x28"])
async def test_a_key_that_is_no_text_is_refused(kit, header):
    async with kit.Lab(keys="key\n") as lab:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n%b\r\n\r\n{}"
        assert (await _send(lab, head % header)).startswith(b"HTTP/1.1 401 ")


async def test_an_emptied_file_of_keys_admits_no_client(kit, caplog):
    async with kit.Lab(keys="first\n") as lab:
        assert (await lab.post(COMPLETIONS, ASK, headers={"x-api-key": "first"}))[0] == 200
        (lab.route.parent / "keys").write_text("# nobody\n")
        await asyncio.sleep(1.1)
        for headers in ({"x-api-key": "first"}, {}, {"x-api-key": ""}):
            assert (await lab.post(COMPLETIONS, ASK, headers=headers))[0] == 401
        assert f"spec.gateway.apiKeys: the file {lab.route.parent / 'keys'} contains no key any more" in caplog.text
        (lab.route.parent / "keys").write_text("second\n")
        await asyncio.sleep(1.1)
        assert (await lab.post(COMPLETIONS, ASK, headers={"x-api-key": "second"}))[0] == 200


@pytest.mark.parametrize("each", [2, 3])
def test_connections_are_limited_by_the_files_that_the_process_may_open(monkeypatch, each):
    kept = []
    monkeypatch.setattr(main.resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(main.resource, "setrlimit", lambda _, limits: kept.append(limits))
    assert main._max_connections(each) == (1024 - main._OWN_FILES) // each
    assert kept == [(1024, 1024)]
    monkeypatch.setattr(main.resource, "getrlimit", lambda _: (256, main.resource.RLIM_INFINITY))
    assert main._max_connections(each) == main.MAX_CONNECTIONS


def test_a_charge_is_released_once():
    account = Account(100)
    first, second = Charge(account), Charge(account)
    assert first.take(60)
    assert not second.take(50)
    assert second.take(40)
    first.shrink(10)
    assert account.used == 50
    first.release()
    first.release()
    assert (account.used, first.size) == (40, 0)
