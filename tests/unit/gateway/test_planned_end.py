"""Planned end of a healthy engine: it completes its open requests, and new requests wait for its successor."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from aiohttp import web

from dsv4_runtime.contract.token import canary_token
from dsv4_runtime.gateway import server
from dsv4_testkit.waiting import free_port, until

COMPLETIONS = "/v1/completions"
ASK = {"model": "nano", "prompt": "Once", "max_tokens": 20}
# Such a stream cannot be continued: random draws are counted from the seed on.
SEEDED = {**ASK, "stream": True, "temperature": 1.0, "seed": 7}


async def _drains(lab, health="Healthy"):
    await lab.engine.change(phase="Draining", health=health)
    await lab.ready(503)


@pytest.mark.parametrize("health", ["Healthy", "Suspect"])
async def test_open_requests_are_completed_by_their_engine(kit, health):
    async with kit.Lab(engine=kit.Engine(pause=0.05)) as lab:
        stream = asyncio.ensure_future(lab.post(COMPLETIONS, SEEDED))
        whole = asyncio.ensure_future(lab.post("/v1/responses/resp_1/cancel", {"prompt": "x"}))
        await until(lambda: len(lab.engine.requests) == 2)
        await _drains(lab, health)
        later = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
        assert (await whole)[0] == 200, "not even asked again where that might be felt twice"
        status, body = await stream
        assert (status, kit.chunks(body)[-1]) == (200, "[DONE]")
        assert len(lab.engine.requests) == 2, "nobody else was let in"
        assert not later.done()
        lab.engine.pause = 0.0
        await lab.engine.change(phase="Stopped", health="Starting")
        await lab.engine.change(phase="Serving", health="Healthy", incarnation=2)
        assert (await later)[0] == 200
        assert await lab.metric("dsv4_gateway_replayed_total") == 0
        assert await lab.metric("dsv4_gateway_cut_total") == 0


async def test_a_stream_that_outlasts_the_drain_continues_in_the_next_engine(kit):
    greedy = {**ASK, "stream": True, "temperature": 0.0}
    async with kit.Lab(engine=kit.Engine(model="the same")) as lab:
        _, whole = await lab.post(COMPLETIONS, greedy)
        lab.engine.pause = 0.05
        stream = asyncio.ensure_future(lab.post(COMPLETIONS, greedy))
        await until(lambda: len(lab.engine.requests) == 2)
        await asyncio.sleep(0.2)
        await _drains(lab)
        await lab.engine.change(phase="Serving", incarnation=2)
        lab.engine.pause = 0.0
        _, body = await stream
        text = [chunk["choices"][0]["text"] for chunk in kit.chunks(whole)[:-1]]
        assert "".join(chunk["choices"][0]["text"] for chunk in kit.chunks(body)[:-1]) == "".join(text)
        assert await lab.metric("dsv4_gateway_continued_total") == 1


async def test_all_requests_that_a_planned_end_cuts_off_are_sent_again(kit):
    """Not within the budget for connections that break without a reason."""
    async with kit.Lab(engine=kit.Engine(pause=60.0, model="the same")) as lab:
        kinds = [{}, {"stream": True, "temperature": 0.0}]
        asked = [
            asyncio.ensure_future(lab.post(COMPLETIONS, {**ASK, **kinds[n % 2], "user": str(n)})) for n in range(12)
        ]
        await until(lambda: len(lab.engine.requests) == 12)
        await _drains(lab)
        lab.engine.pause = 0.02
        await lab.engine.change(phase="Serving", incarnation=2)
        answers = await asyncio.gather(*asked)
        assert {status for status, _ in answers} == {200}
        assert all(kit.chunks(body)[-1] == "[DONE]" for _, body in answers[1::2])


async def test_a_connection_that_breaks_meanwhile_waits_for_the_next_engine(kit):
    async with kit.Lab() as lab:
        hold = asyncio.Event()

        async def script(request, body):
            if hold.is_set():
                return None
            await hold.wait()
            request.transport.abort()
            return web.Response()

        lab.engine.script = script
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
        await until(lambda: len(lab.engine.requests) == 1)
        await _drains(lab)
        hold.set()
        await asyncio.sleep(0.3)
        assert len(lab.engine.requests) == 1
        assert not asked.done()
        await lab.engine.change(phase="Serving", incarnation=2)
        assert (await asked)[0] == 200


async def test_an_engines_own_error_is_still_its_answer(kit):
    async with kit.Lab() as lab:
        hold = asyncio.Event()

        async def script(request, body):
            await hold.wait()
            return web.json_response({"error": {"message": "a bug"}}, status=500)

        lab.engine.script = script
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
        await until(lambda: len(lab.engine.requests) == 1)
        await _drains(lab)
        hold.set()
        assert (await asked)[0] == 500
        assert len(lab.engine.requests) == 1


@pytest.mark.parametrize("health", ["Starting", "Dead"])
async def test_an_agent_that_ends_is_no_planned_end(kit, health):
    async with kit.Lab() as lab:
        hold = asyncio.Event()

        async def script(request, body):
            if len(lab.engine.requests) == 1:
                await hold.wait()

        lab.engine.script = script
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
        await until(lambda: len(lab.engine.requests) == 1)
        await _drains(lab, health)
        await lab.engine.change(phase="Serving", health="Healthy", incarnation=2)
        status, body = await asked
        assert (status, len(lab.engine.requests)) == (200, 2)
        assert json.loads(body)["choices"]
        assert await lab.metric("dsv4_gateway_replayed_total") == 1


async def test_a_gateway_that_starts_during_a_drain_forwards_no_request(kit):
    async with kit.Lab(engine=kit.Engine(phase="Draining"), hold_timeout_seconds=0.5) as lab:
        status, body = await lab.post(COMPLETIONS, ASK)
        assert (status, json.loads(body)["error"]["code"]) == (503, "engine_unavailable")
        assert lab.engine.requests == []


@pytest.fixture
def brief(monkeypatch):
    """Let a gateway without a peer end open requests after 0.6 s."""
    monkeypatch.setattr(server, "ALONE_SECONDS", 0.6)
    monkeypatch.setattr(server, "_PEER_CHECK_SECONDS", 0.1)


async def test_a_terminating_gateway_keeps_held_requests_while_another_one_answers(kit, brief):
    async with kit.Lab() as other:
        settings = {"drain_seconds": 120.0, "hold_timeout_seconds": 120.0, "service_url": other.url}
        async with kit.Lab(engine=kit.Engine(phase="Loading"), **settings) as lab:
            held = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
            await lab.holds(1)
            lab.stop.set()
            await asyncio.sleep(2.0)
            assert not held.done()
            await lab.engine.change(phase="Serving", health="Healthy")
            assert (await held)[0] == 200
            await asyncio.wait_for(asyncio.shield(lab.serving), 60)
        assert other.engine.requests == [], "the check costs no completion"


@pytest.mark.parametrize("case", ["nobody listens", "another deployment of the name", "no gateway"])
async def test_a_terminating_gateway_ends_held_requests_once_no_other_one_answers(kit, brief, case):
    async with kit.Lab() as other:
        agent = json.loads(other.route.read_text())["agent"]
        url = {"nobody listens": f"http://127.0.0.1:{free_port()}", "no gateway": agent}
        settings = {"drain_seconds": 120.0, "hold_timeout_seconds": 120.0, "service_url": url.get(case, other.url)}
        if case == "another deployment of the name":
            other.route.with_name("token-key").write_text("the key of the next deployment")
        async with kit.Lab(engine=kit.Engine(phase="Loading"), **settings) as lab:
            held = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
            await lab.holds(1)
            begun = time.monotonic()
            lab.stop.set()
            status, body = await held
            assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
            assert 0.5 < time.monotonic() - begun < 60
            await asyncio.wait_for(asyncio.shield(lab.serving), 60)


async def test_the_token_is_checked_without_a_completion(kit):
    async with kit.Lab() as lab:
        for key, status in (("the key", 200), ("another key", 401)):
            headers = {"Authorization": f"Bearer {canary_token(key)}"}
            async with lab.client.head(lab.url + "/dsv4/canary", headers=headers) as answer:
                assert (answer.status, await answer.read()) == (status, b"")
        assert lab.engine.requests == []
