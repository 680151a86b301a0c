"""Streams in pieces: each byte is processed once, and buffered bytes are charged."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis.strategies import binary, integers, lists, sampled_from

from dsv4_runtime.engine import token_auth
from dsv4_runtime.gateway import proxy
from dsv4_runtime.gateway.continuation import Transcript
from dsv4_runtime.util.sse import Splitter

COMPLETIONS = "/v1/completions"
ASK = {"model": "nano", "prompt": "Once", "max_tokens": 5}


def cut(data, sizes):
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


@settings(max_examples=300)
@given(lists(sampled_from([b"\n", b"\r", b"\r\n", b"data: ", b"a", b"\n\n", b"{}"])), lists(integers(0, 9)))
def test_the_pieces_make_no_difference(parts, sizes):
    """The boundaries of the pieces do not change the events, except for `\\r\\n\\r\\n` in two pieces."""
    data = b"".join(parts)
    splitter = Splitter()
    events = [event for piece in cut(data, sizes) for event in splitter.feed(piece)]
    whole = Splitter()
    assert events == whole.feed(data)
    assert (splitter.rest, splitter.size) == (whole.rest, len(whole.rest))


@pytest.mark.parametrize("piece", [1, 7, 4096, 65536])
def test_the_work_is_linear_for_pieces_of_any_size(piece):
    """Eight times the bytes take about eight times as long. With a copy of all bytes for each piece it was 64 times."""

    def seconds(size):
        data, splitter = b"data: " + b"1," * (size // 2) + b"\n\n", Splitter()
        begun = time.thread_time()
        for at in range(0, len(data), piece):
            splitter.feed(data[at : at + piece])
        return time.thread_time() - begun

    small = piece * (400 if piece < 10_000 else 64)
    assert min(seconds(8 * small) for _ in range(3)) < 24 * max(min(seconds(small) for _ in range(3)), 1e-4)


@given(lists(integers(0, 2**17), min_size=1), lists(integers(1, 9)), binary(max_size=5))
def test_the_prompts_tokens_are_taken_from_the_bytes(ids, sizes, noise):
    text = noise.decode("latin-1")
    choice = {"index": 0, "text": text, "prompt_token_ids": ids, "token_ids": [1]}
    event = b"data: " + json.dumps({"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"
    transcript = Transcript(COMPLETIONS, b"{}", {})
    out = b"".join(transcript.strip(piece) for piece in cut(event, sizes))
    bare = {**choice, "prompt_token_ids": []}
    assert json.loads(out[6:])["choices"] == [bare]
    given_out = json.loads(transcript.take(out, out[6:-2])[6:])
    assert given_out["choices"][0]["prompt_token_ids"] is None
    _, body = transcript.cut({"max_tokens": 9}, 1, None)
    assert json.loads(b"".join(body))["prompt"] == [*ids, 1]
    assert transcript.size == 4 + len(",".join(map(str, ids)))


async def test_the_first_event_of_a_long_prompt_is_processed_quickly(kit):
    ids = b",".join([b"100000"] * 2**20)
    event = b'data: {"choices":[{"index":0,"text":"a","prompt_token_ids":[%b],"token_ids":[5]}]}\n\n' % ids

    async def script(request, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event)
        await response.write(b"data: [DONE]\n\n")
        return response

    async with kit.Lab() as lab:
        lab.engine.script = script
        begun = time.thread_time()
        status, answer = await lab.post(COMPLETIONS, {**ASK, "stream": True})
        assert time.thread_time() - begun < 1.0
        assert status == 200
        assert len(answer) < 1000
        assert b'"prompt_token_ids":null' in answer


async def test_an_event_that_does_not_end_is_charged(kit):
    async def script(request, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + b"x" * 2**22)
        await asyncio.sleep(600)

    async with kit.Lab(max_client_bytes=2**21) as lab:
        lab.engine.script = script
        status, answer = await asyncio.wait_for(lab.post("/v1/responses", {**ASK, "stream": True}), 60)
        assert (status, json.loads(answer)["error"]["code"]) == (502, "engine_lost")
        assert await lab.metric("dsv4_gateway_client_bytes") < 2**18


async def test_a_held_stream_has_a_comment_now_and_then(kit, monkeypatch):
    monkeypatch.setattr(proxy, "COMMENT_SECONDS", 0.2)
    async with kit.Lab() as lab:
        lab.engine.faults = [kit.Fault(after=5, back=3.0)]
        begun = time.monotonic()
        async with lab.client.post(lab.url + COMPLETIONS, json={**ASK, "stream": True, "max_tokens": 9}) as answer:
            lines = (await answer.read()).split(b"\n\n")
        comments = [line for line in lines if line.startswith(b":")]
        assert 2 <= len(comments) <= (time.monotonic() - begun) / 0.2
        assert lines[-2] == b"data: [DONE]"


async def test_the_requests_id_is_in_the_answer_once(kit):
    async def script(request, body):
        return web.json_response({}, headers={"X-Request-Id": request.headers["X-Request-Id"]})

    async with kit.Lab() as lab:
        lab.engine.script = script
        async with lab.client.post(lab.url + COMPLETIONS, json=ASK, headers={"X-Request-Id": "mine"}) as answer:
            assert answer.headers.getall("X-Request-Id") == ["mine"]


async def test_a_refusal_of_vllms_port_is_not_the_clients(kit):
    """The gateway has the token of an earlier incarnation, and repeats the request with the token of the next one."""
    asked = 0

    async def script(request, body):
        nonlocal asked
        asked += 1
        if asked > 1:
            return None
        return web.Response(status=401, body=token_auth.REFUSED, content_type="application/json")

    async with kit.Lab() as lab:
        lab.engine.script = script
        assert (await lab.post(COMPLETIONS, ASK))[0] == 200
        assert asked == 2


async def test_a_refusal_of_vllms_port_does_not_end_a_stream_that_is_continued(kit):
    refused = 0

    async def script(request, body):
        nonlocal refused
        if lab.engine.generation == 1 or refused:
            return None
        refused += 1
        return web.Response(status=401, body=token_auth.REFUSED, content_type="application/json")

    async with kit.Lab() as lab:
        lab.engine.script = script
        lab.engine.faults = [kit.Fault(after=3)]
        _, body = await lab.post(COMPLETIONS, {**ASK, "stream": True, "temperature": 0.0})
        assert (refused, kit.chunks(body)[-1]) == (1, "[DONE]")


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nHost: x\r\n"


@pytest.mark.parametrize("piece", [1, 50, 10_000])
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_offer_of_http_2_is_ignored(kit, piece, chunked):
    """The JDK's client and `curl --http2` send this offer. The body arrives, and so does the next request."""
    body = json.dumps(ASK).encode()
    framing = b"Transfer-Encoding: chunked\r\n" if chunked else b"Content-Length: %d\r\n" % len(body)
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    first = b"POST /v1/completions HTTP/1.1\r\n" + UPGRADE + framing + b"\r\n" + sent
    again = b"GET /v1/models/nano HTTP/1.1\r\n" + UPGRADE + b"\r\n"
    last = b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with kit.Lab() as lab:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rsplit(":", 1)[1]))
        data = first + again + last + body
        for at in range(0, len(data), piece):
            writer.write(data[at : at + piece])
            await asyncio.sleep(0)
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert answer.count(b"HTTP/1.1 200 OK") == 3
        assert [asked for _, asked, _ in lab.engine.requests] == [ASK, ASK]
        assert not any("upgrade" in headers or "http2-settings" in headers for *_, headers in lab.engine.requests)
