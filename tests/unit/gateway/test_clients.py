"""Clients: deadlines, keys, limits, logs and metrics, and the shutdown of the gateway."""

from __future__ import annotations

import asyncio
import json
import socket

import aiohttp
import psutil
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from dsv4_runtime.gateway import proxy, server
from dsv4_testkit.waiting import until

COMPLETIONS = "/v1/completions"
ASK = {"model": "nano", "prompt": "Once", "max_tokens": 5}


def error(body):
    return json.loads(body)["error"]


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_client_that_leaves_cancels_the_engines_work(kit, streaming):
    async with kit.Lab(engine=kit.Engine(pause=0.2 if streaming else 600.0)) as lab:
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, {**ASK, "stream": streaming, "max_tokens": 50}))
        await until(lambda: lab.engine.requests)
        await asyncio.sleep(0.05)
        asked.cancel()
        await until(lambda: lab.engine.cancelled)
        await until(lambda: lab.gateway._proxy.active == 0)
        assert await lab.metric('dsv4_gateway_requests_total{outcome="cancelled"}') == 1


async def test_a_client_that_leaves_while_it_waits_frees_its_place(kit):
    async with kit.Lab(engine=kit.Engine(phase="Loading")) as lab:
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
        await lab.holds(1)
        asked.cancel()
        await lab.holds(0)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_request_has_a_deadline(kit, streaming):
    async with kit.Lab(engine=kit.Engine(pause=0.1), request_timeout_seconds=2.0 if streaming else 0.35) as lab:
        lab.engine.pause = 0.1 if streaming else 600.0
        status, body = await lab.post(COMPLETIONS, {**ASK, "stream": streaming, "max_tokens": 50})
        if streaming:
            found = kit.chunks(body)
            assert status == 200
            assert found[0]["choices"]
            assert found[-1]["error"]["code"] == "request_timeout"
        else:
            assert (status, error(body)["code"]) == (504, "request_timeout")
        await until(lambda: lab.engine.cancelled)


async def test_a_client_may_set_a_nearer_deadline(kit):
    async with kit.Lab(engine=kit.Engine(phase="Loading")) as lab:
        assert (await lab.post(COMPLETIONS, ASK, headers={"X-Request-Timeout": "0.2"}))[0] == 504
        for bad in ("soon", "-1", "nan", "0"):
            status, body = await lab.post(COMPLETIONS, ASK, headers={"X-Request-Timeout": bad})
            assert (status, error(body)["code"]) == (400, "bad_timeout")


async def test_keys(kit):
    async with kit.Lab(keys="# ours\nfirst\n\nsecond\n") as lab:
        for headers in ({}, {"Authorization": "Bearer third"}, {"Authorization": "first"}, {"x-api-key": ""}):
            async with lab.client.post(lab.url + COMPLETIONS, json=ASK, headers=headers) as answer:
                assert answer.status == 401
                assert (await answer.json())["error"]["code"] == "invalid_api_key"
        assert lab.engine.requests == []
        for headers in ({"Authorization": "Bearer first"}, {"authorization": "bearer second"}, {"x-api-key": "second"}):
            assert (await lab.post(COMPLETIONS, ASK, headers=headers))[0] == 200
        assert not {"authorization", "x-api-key"} & set(lab.engine.requests[-1][2])
        for path in ("/healthz", "/readyz", "/metrics"):
            async with lab.client.get(lab.url + path) as answer:
                assert answer.status == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rsplit(":", 1)[1]))
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()
        (lab.route.parent / "keys").write_text("third\n")
        await asyncio.sleep(1.1)
        assert (await lab.post(COMPLETIONS, ASK, headers={"x-api-key": "third"}))[0] == 200
        assert (await lab.post(COMPLETIONS, ASK, headers={"x-api-key": "first"}))[0] == 401


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_has_a_limit(kit, declared):
    async with kit.Lab(max_body_bytes=1000) as lab:
        assert (await lab.post(COMPLETIONS, json.dumps({**ASK, "user": "x" * 800}).encode()))[0] == 200

        async def parts():
            for _ in range(20):
                yield b"x" * 100

        data = b"x" * 2000 if declared else parts()
        async with lab.client.post(lab.url + COMPLETIONS, data=data) as answer:
            assert answer.status == 413
            assert (await answer.json())["error"]["code"] == "body_too_large"
        assert len(lab.engine.requests) == 1


async def test_a_body_whose_declared_length_is_too_long_is_refused_before_it_is_read(kit):
    async with kit.Lab(max_body_bytes=1000) as lab:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rsplit(":", 1)[1]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 413 ")
        writer.close()


async def test_a_client_that_waits_for_100_continue_gets_it(kit):
    async with kit.Lab() as lab, lab.client.post(lab.url + COMPLETIONS, json=ASK, expect100=True) as answer:
        assert answer.status == 200


async def test_an_upgrade_is_refused(kit):
    async with kit.Lab() as lab:
        with pytest.raises(aiohttp.WSServerHandshakeError, match="501"):
            await lab.client.ws_connect(lab.url + "/v1/realtime")


async def test_ids(kit):
    async with kit.Lab() as lab:
        for given, kept in (("abc-1", True), ("", False), ("x" * 200, False), ("a b", False)):
            async with lab.client.post(lab.url + COMPLETIONS, json=ASK, headers={"X-Request-Id": given}) as answer:
                told = answer.headers["X-Request-Id"]
                assert (told == given) is kept
                assert lab.engine.requests[-1][2]["x-request-id"] == told


async def test_a_line_for_each_request_and_never_a_prompt(kit, caplog):
    caplog.set_level("INFO")
    async with kit.Lab(keys="k3y-of-mine\n") as lab:
        ask = {**ASK, "prompt": "my secret", "stream": True}
        lab.engine.faults = [kit.Fault(after=2, kind="error")]
        await lab.post(COMPLETIONS + "?q=secret", ask, headers={"x-api-key": "k3y-of-mine"})
        await lab.post(COMPLETIONS, ask)
        await lab.client.get(URL(lab.url + "/a%0Aforged%20line", encoded=True))
    lines = [record.getMessage() for record in caplog.records if record.name == "dsv4.gateway.access"]
    assert [("status=200" in line, "outcome=ok" in line, "continued=1" in line) for line in lines] == [
        (True, True, True),
        (False, False, False),
        (False, False, False),
    ]
    assert "/a%0Aforged%20line status=401" in lines[2]
    assert "secret" not in caplog.text
    assert "k3y" not in caplog.text


async def test_metrics_of_both(kit):
    async with kit.Lab() as lab:
        async with lab.client.get(lab.url + "/metrics") as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            families = [family.name for family in text_string_to_metric_families(await answer.text())]
            assert len(families) == len(set(families))
        assert await lab.metric("vllm:num_requests_waiting") == 3
        lab.engine.alive = False
        async with asyncio.timeout(60):
            while await lab.metric("vllm:num_requests_waiting") != 0:
                await asyncio.sleep(0.1)
        assert await lab.metric('dsv4_gateway_engine_state{group="0",state="healthy"}') == 1


async def test_a_connection_that_does_not_read_its_metrics_is_closed(kit, monkeypatch):
    aborted, abort = asyncio.Event(), server.Request.abort

    def note(request: server.Request) -> None:
        abort(request)
        aborted.set()

    monkeypatch.setattr(server, "_ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(server.Request, "abort", note)
    lines = 4_000_000
    async with kit.Lab(engine=kit.Engine(more_metrics=lines)) as lab:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", URL(lab.url).port))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            mine = client.getsockname()
            # Before the connection is accepted, no process has it.
            async with asyncio.timeout(60):
                await aborted.wait()
            await until(lambda: not [one for one in psutil.Process().net_connections("tcp4") if one.raddr == mine])
            client.settimeout(60)

            def read() -> int:
                size = 0
                while part := client.recv(1 << 20):
                    size += len(part)
                return size

            assert 0 < await asyncio.to_thread(read) < lines * len("# more")
        monkeypatch.undo()
        assert await lab.metric("vllm:num_requests_waiting") == 3


async def test_an_event_is_passed_on_when_it_comes(kit):
    gate = asyncio.Event()

    async def script(request, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": hello\n\n")
        await gate.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async with kit.Lab() as lab:
        lab.engine.script = script
        async with lab.client.post(lab.url + COMPLETIONS, json={**ASK, "stream": True}) as answer:
            assert await asyncio.wait_for(answer.content.readany(), 60) == b": hello\n\n"
            gate.set()
            assert await answer.content.read() == b"data: [DONE]\n\n"


async def test_an_answer_too_long_to_keep_is_passed_on_as_it_comes(kit):
    size = 20 * 2**20

    async def script(request, body):
        return web.Response(body=b"x" * size)

    async with kit.Lab() as lab:
        lab.engine.script = script
        status, body = await lab.post(COMPLETIONS, ASK)
        assert (status, len(body)) == (200, size)


async def test_after_sigterm_requests_are_answered_until_the_lame_duck_ends(kit):
    """Endpoints and load balancers still send requests to a gateway for a while after its SIGTERM."""
    # A busy machine may need seconds for the requests, and the stream is longer than the lame duck.
    async with kit.Lab(engine=kit.Engine(pause=0.2), lame_duck_seconds=6.0, drain_seconds=60.0) as lab:
        streaming = asyncio.ensure_future(lab.post(COMPLETIONS, {**ASK, "stream": True, "max_tokens": 90}))
        await until(lambda: lab.engine.requests)
        lab.stop.set()
        for path in ("/readyz", "/health"):
            async with lab.client.get(lab.url + path) as answer:
                assert (answer.status, await answer.text()) == (503, "shutting down\n")
        async with lab.client.get(lab.url + "/healthz") as answer:
            assert answer.status == 200
        for _ in range(3):
            async with lab.client.post(lab.url + COMPLETIONS, json=ASK) as answer:
                assert (answer.status, answer.headers["Connection"]) == (200, "close")
        idle, writer = await asyncio.open_connection("127.0.0.1", URL(lab.url).port)
        assert await asyncio.wait_for(idle.read(), 60) == b""
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", URL(lab.url).port)
        assert not streaming.done()
        lab.engine.pause = 0.0
        assert kit.chunks((await streaming)[1])[-1] == "[DONE]"
        await asyncio.wait_for(asyncio.shield(lab.serving), 60)


async def test_a_request_that_is_held_at_the_end_of_the_drain_gets_an_error(kit):
    async with kit.Lab(engine=kit.Engine(phase="Loading"), lame_duck_seconds=1.0, drain_seconds=0.3) as lab:
        held = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
        await lab.holds(1)
        lab.stop.set()
        late = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
        for status, body in await asyncio.gather(held, late):
            assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
        await asyncio.wait_for(asyncio.shield(lab.serving), 60)


async def test_a_stream_has_all_of_the_drain_to_finish(kit):
    async with kit.Lab(engine=kit.Engine(pause=0.05), drain_seconds=60.0) as lab:
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, {**ASK, "stream": True, "max_tokens": 60}))
        await until(lambda: lab.engine.requests)
        lab.stop.set()
        assert kit.chunks((await asked)[1])[-1] == "[DONE]"
        await asyncio.wait_for(asyncio.shield(lab.serving), 60)


async def test_a_stream_that_outlasts_the_drain_ends_with_an_error(kit):
    async with kit.Lab(engine=kit.Engine(pause=2.0), drain_seconds=0.3) as lab:
        streaming = asyncio.ensure_future(lab.post(COMPLETIONS, {**ASK, "stream": True, "max_tokens": 90}))
        await until(lambda: lab.engine.requests)
        lab.engine.phase = "Loading"
        lab.stop.set()
        assert kit.chunks((await streaming)[1])[-1]["error"]["code"] == "shutting_down"
        await asyncio.wait_for(asyncio.shield(lab.serving), 60)


def _read_all(client):
    whole = b""
    while part := client.recv(2**20):
        whole += part
    return whole


@pytest.mark.parametrize("flooded", [True, False])
async def test_a_client_that_reads_nothing_does_not_keep_its_request_for_ever(kit, monkeypatch, flooded):
    exchanges = []

    class Seen(proxy.Exchange):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            exchanges.append(self)

    monkeypatch.setattr(proxy, "Exchange", Seen)

    def waiting():
        return bool(exchanges) and not exchanges[0].request.is_read

    async def script(request, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        # A flooded connection blocks the gateway's own writes; otherwise only bytes in the buffers wait.
        while flooded or not waiting():
            await response.write(b"data: {}" + b" " * 2**12 + b"\n\n")
            await asyncio.sleep(0)
        await asyncio.sleep(600)

    async with kit.Lab() as lab:
        lab.engine.script = script
        url = URL(lab.url)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((url.host, url.port))
        body = json.dumps({**ASK, "stream": True})
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall((head + body).encode())
        await until(waiting)
        await asyncio.sleep(0.2)
        lab.gateway._proxy.end_all()
        await until(lambda: lab.gateway._proxy.active == 0)
        assert await lab.metric('dsv4_gateway_requests_total{outcome="unavailable"}') == 1
        client.settimeout(60)
        with client:
            assert not (await asyncio.to_thread(_read_all, client)).endswith(b"0\r\n\r\n"), "it looks complete"
