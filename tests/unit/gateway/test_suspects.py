"""A request that kills its engines costs three of them and no other request."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from aiohttp import web

from dsv4_operator.cli.source import Api
from dsv4_operator.cli.why import fatal_requests
from dsv4_runtime.contract.gateway import FatalRequests
from dsv4_runtime.gateway import proxy, suspects
from dsv4_runtime.gateway.errors import RefusedError

COMPLETIONS = "/v1/completions"
ASK = {"model": "nano", "prompt": "Once", "max_tokens": 5}
POISON = {**ASK, "prompt": "the text of the poison"}


class Behind:
    """A source whose gateway is at `url`."""

    def __init__(self, url):
        self._url = url

    @contextlib.contextmanager
    def api(self, item):
        yield Api(lambda: self._url + "/v1", "")


def poisonous(lab, after=0.05):
    """An engine that dies a moment after it gets the poison, with everything that it has."""

    async def script(request, body):
        if body.get("prompt") == POISON["prompt"]:
            await asyncio.sleep(after)
            await lab.engine.die(0.05)
        elif lab.engine.poisoned:
            await asyncio.sleep(0.2)
            if lab.engine.alive:
                return None
        else:
            return None
        request.transport.abort()
        return web.Response()

    lab.engine.poisoned = True
    lab.engine.script = script


async def test_three_engines_die_of_it_and_no_innocent_request_is_lost(kit, caplog):
    async with kit.Lab(max_held_requests=100) as lab:
        poisonous(lab)
        innocent = [asyncio.ensure_future(lab.post(COMPLETIONS, ASK)) for _ in range(20)]
        status, body = await lab.post(COMPLETIONS, POISON, headers={"X-Request-Id": "the-poison"})
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (422, "engine_fatal")
        assert [status for status, _ in await asyncio.gather(*innocent)] == [200] * 20
        assert lab.engine.generation <= 4
        assert await lab.metric('dsv4_gateway_requests_total{outcome="fatal"}') == 1
        async with lab.client.get(lab.url + "/dsv4/fatal-requests") as answer:
            (known,) = FatalRequests.model_validate_json(await answer.read()).requests
        assert (known.id, known.size, known.engines) == ("the-poison", len(json.dumps(POISON)), 3)
        # And `dsv4 why` finds it.
        found = await asyncio.to_thread(fatal_requests, Behind(lab.url), None)
        assert found == (known,)
        assert await lab.metric('dsv4_gateway_requests_total{outcome="lost"}') == 0
    size = len(json.dumps(POISON))
    assert f"request the-poison ({size} bytes) is refused: 3 engines died while they had it" in caplog.text
    assert POISON["prompt"] not in caplog.text


async def test_a_stream_that_kills_its_engine_after_a_few_tokens_is_one_too(kit):
    async with kit.Lab() as lab:
        lab.engine.faults = [kit.Fault(after=3) for _ in range(60)]
        _, broken = await lab.post(COMPLETIONS, {**ASK, "stream": True, "max_tokens": 40})
        assert kit.chunks(broken)[-1]["error"]["code"] == "engine_fatal"
        assert len([body for path, body, _ in lab.engine.requests if path == COMPLETIONS]) == 3


async def test_one_suspect_at_a_time_and_others_beside_it(kit):
    async with kit.Lab() as lab:
        open_now, most, had = 0, 0, []

        async def script(request, body):
            nonlocal open_now, most
            if body["max_tokens"] == 6:
                return None
            if lab.engine.generation < 3:
                # It dies once it has both.
                had.append(lab.engine.generation)
                if had.count(lab.engine.generation) == 1:
                    await asyncio.sleep(30)
                await lab.engine.die(0.05)
                await asyncio.sleep(30)
            open_now += 1
            most = max(most, open_now)
            try:
                await asyncio.sleep(0.3)
            finally:
                open_now -= 1
            return None

        lab.engine.script = script
        asked = [asyncio.ensure_future(lab.post(COMPLETIONS, ASK)) for _ in range(2)]
        async with asyncio.timeout(5):
            while not most:
                await asyncio.sleep(0.01)
        assert (await lab.post(COMPLETIONS, {**ASK, "max_tokens": 6}))[0] == 200
        assert not any(one.done() for one in asked)
        assert [status for status, _ in await asyncio.gather(*asked)] == [200, 200]
        assert most == 1


async def test_who_is_answered_for_long_is_no_longer_suspected(kit, monkeypatch):
    monkeypatch.setattr(suspects, "TRIAL_SECONDS", 0.1)
    async with kit.Lab(engine=kit.Engine(pause=0.02)) as lab:
        lab.engine.faults = [kit.Fault(after=2), kit.Fault(after=2), kit.Fault(after=15), kit.Fault(after=2)]
        _, broken = await lab.post(COMPLETIONS, {**ASK, "stream": True, "max_tokens": 40})
        assert kit.chunks(broken)[-1] == "[DONE]"


async def test_a_planned_end_makes_nobody_suspected(kit):
    async with kit.Lab(engine=kit.Engine(pause=0.05)) as lab:
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, {**ASK, "stream": True, "max_tokens": 60}))
        for generation in range(2, 6):
            await asyncio.sleep(0.15)
            await lab.engine.change(phase="Draining")
            await asyncio.sleep(0.05)
            await lab.engine.change(phase="Restarting", health="Dead")
            await lab.engine.change(phase="Serving", health="Healthy", generation=generation)
        assert kit.chunks((await asked)[1])[-1] == "[DONE]"


async def test_retries_have_a_budget_while_the_engine_lives(kit, monkeypatch):
    monkeypatch.setattr(proxy, "_MAX_LOSSES", 1000)
    async with kit.Lab() as lab:

        async def script(request, body):
            await asyncio.sleep(0.02)
            if len(lab.engine.requests) < 200:
                request.transport.abort()
                return web.Response()
            return None

        lab.engine.script = script
        found = await asyncio.gather(*(lab.post(COMPLETIONS, ASK) for _ in range(10)))
        statuses = [status for status, _ in found]
        assert statuses.count(200) >= 2
        refused = [json.loads(body)["error"] for status, body in found if status == 502]
        assert refused
        assert all("being sent again already" in error["message"] for error in refused)


async def test_who_has_no_key_is_not_told(kit):
    async with kit.Lab(keys="key\n") as lab:
        for headers, status in (({}, 401), ({"x-api-key": "key"}, 200)):
            async with lab.client.get(lab.url + "/dsv4/fatal-requests", headers=headers) as answer:
                assert answer.status == status
    assert fatal_requests(Behind("http://127.0.0.1:9"), None) == ()


class Open:
    """A request as `Suspects` sees it."""

    def __init__(self, name):
        self.id, self.body, self.deaths = name, b"x", 0


async def test_those_that_were_suspected_with_it_go_on_together():
    found, guilty, innocent = suspects.Suspects(), Open("guilty"), Open("innocent")
    for engine in ("1-g1", "1-g2"):
        found.record(guilty, engine)
        found.record(innocent, engine)
    async with found.alone(guilty):
        waiting = asyncio.ensure_future(found.alone(innocent).__aenter__())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        with pytest.raises(RefusedError, match="3 engines died"):
            found.record(guilty, "1-g3")
        assert innocent.deaths == 0
    await asyncio.wait_for(waiting, 1)
    # It left its turn to others.
    async with asyncio.timeout(1), found.alone(Open("third")):
        pass
