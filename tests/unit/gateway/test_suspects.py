"""A request that kills its engines costs three engines and no other request."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis.strategies import booleans, data, floats, lists, sampled_from, tuples

from dsv4_operator.cli.diagnostics import fatal_requests
from dsv4_operator.cli.sources.base import ServiceAccess
from dsv4_runtime.contract import AgentStatus
from dsv4_runtime.contract.gateway import FatalRequests
from dsv4_runtime.engine import token_auth
from dsv4_runtime.gateway import proxy, suspects
from dsv4_runtime.gateway.errors import RefusedError
from dsv4_runtime.gateway.routing import EngineView, Exposures
from dsv4_testkit.waiting import until

COMPLETIONS = "/v1/completions"
ASK = {"model": "nano", "prompt": "Once", "max_tokens": 5}
POISON = {**ASK, "prompt": "the text of the poison"}


class Behind:
    """A source whose gateway is at `url`."""

    def __init__(self, url):
        self._url = url

    @contextlib.contextmanager
    def api(self, item):
        yield ServiceAccess(lambda: self._url + "/v1", "", permanent=True)


def poisonous(lab, after=0.05):
    """Script an engine that dies shortly after it receives the poison, together with all its requests."""

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


async def test_a_fatal_request_costs_three_engines_and_no_harmless_request(kit, caplog):
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
        # `dsv4 why` also finds it.
        found = await asyncio.to_thread(fatal_requests, Behind(lab.url), None)
        assert found.requests == (known,)
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
                # The engine dies once it has both requests.
                had.append(lab.engine.generation)
                if had.count(lab.engine.generation) == 1:
                    await asyncio.sleep(600)
                await lab.engine.die(0.05)
                await asyncio.sleep(600)
            open_now += 1
            most = max(most, open_now)
            try:
                await asyncio.sleep(0.3)
            finally:
                open_now -= 1
            return None

        lab.engine.script = script
        asked = [asyncio.ensure_future(lab.post(COMPLETIONS, ASK)) for _ in range(2)]
        async with asyncio.timeout(60):
            while not most:
                await asyncio.sleep(0.01)
        assert (await lab.post(COMPLETIONS, {**ASK, "max_tokens": 6}))[0] == 200
        assert not any(one.done() for one in asked)
        assert [status for status, _ in await asyncio.gather(*asked)] == [200, 200]
        assert most == 1


async def test_a_hang_longer_than_a_trial_clears_no_suspect(kit, monkeypatch):
    """Elapsed time is no proof: the engine hangs for longer than a trial lasts."""
    monkeypatch.setattr(suspects, "TRIAL_SECONDS", 0.05)
    monkeypatch.setattr(suspects, "PROBE_SECONDS", 0.1)
    async with kit.Lab() as lab:
        deaths = 0

        async def script(request, body):
            nonlocal deaths
            await asyncio.sleep(0.6)
            if body["prompt"] == POISON["prompt"]:
                deaths += 1
                await lab.engine.die(0.05)
            await asyncio.sleep(600)

        lab.engine.script = script
        status, body = await lab.post(COMPLETIONS, POISON)
        assert (status, json.loads(body)["error"]["code"]) == (422, "engine_fatal")
        assert deaths == 3


async def test_a_late_fatal_request_gets_a_longer_next_trial(kit, monkeypatch):
    """A trial ends with the first output, so the third death proves nothing; the fourth death does."""
    monkeypatch.setattr(suspects, "TRIAL_SECONDS", 0.1)
    # The fourth death is 1.5 s before the end of its trial, for a busy machine.
    async with kit.Lab(engine=kit.Engine(pause=0.12)) as lab:
        lab.engine.faults = [kit.Fault(after=2), kit.Fault(after=2), kit.Fault(after=15), kit.Fault(after=17)]
        _, broken = await lab.post(COMPLETIONS, {**ASK, "stream": True, "max_tokens": 40})
        assert "4 engines died" in kit.chunks(broken)[-1]["error"]["message"]


async def test_a_client_that_leaves_and_comes_back_is_the_same_request(kit):
    """Three innocent requests wait meanwhile. If each attempt counted as a new request, each would kill an engine."""
    async with kit.Lab(request_timeout_seconds=60.0) as lab:

        async def script(request, body):
            if body["prompt"] == POISON["prompt"]:
                await asyncio.sleep(0.2)
                await lab.engine.die(0.1)
                request.transport.abort()
                return web.Response()
            await asyncio.sleep(1.0)
            return web.json_response({"choices": []})

        lab.engine.script = script
        innocent = [asyncio.ensure_future(lab.post(COMPLETIONS, ASK)) for _ in range(3)]
        await asyncio.sleep(0.05)
        status = None
        async with asyncio.timeout(60):
            patience = 0.35
            while status is None:
                # A request whose client leaves before its trial begins is not sent.
                with contextlib.suppress(TimeoutError):
                    status = (await asyncio.wait_for(lab.post(COMPLETIONS, POISON), patience))[0]
                patience *= 1.3
        assert status == 422
        assert [(await one)[0] for one in innocent] == [200, 200, 200]
        assert lab.engine.generation <= 5


async def test_two_gateways_refuse_no_harmless_request(kit):
    engine = kit.Engine()
    async with kit.Lab(engine=engine) as first, kit.Lab(engine=engine) as second:

        async def script(request, body):
            if body["prompt"] == POISON["prompt"]:
                await asyncio.sleep(0.1)
                await engine.die(0.05)
            else:
                await asyncio.sleep(0.4)
                if engine.alive:
                    return web.json_response({"choices": []})
            request.transport.abort()
            return web.Response()

        engine.script = script
        innocent = asyncio.ensure_future(first.post(COMPLETIONS, ASK))
        poison = await second.post(COMPLETIONS, POISON)
        assert (poison[0], (await innocent)[0]) == (422, 200)


class Deadly:
    """Script of an engine that dies of an innocent request twice by chance, and of each poison."""

    def __init__(self, engine):
        self._engine = engine

    async def __call__(self, request, body):
        if body["prompt"] == POISON["prompt"] or (body["prompt"] == ASK["prompt"] and self._engine.generation < 3):
            await asyncio.sleep(0.05)
            await self._engine.die(0.05)
            await asyncio.sleep(600)
        if body["prompt"] == ASK["prompt"] and self._engine.generation == 3:
            await asyncio.sleep(600)


async def test_a_trial_that_vllm_has_not_admitted_is_not_in_an_engine_that_dies(kit):
    """The engine dies of another gateway's request before vLLM's API process rejects the trial."""

    class Late(kit.Engine):
        async def handle(self, request):
            turn = request.headers.get(token_auth.TURN_HEADER, "")
            if turn.endswith(token_auth.Kind.ALONE) and self.generation == 3:
                await self.die(0.1)
                await asyncio.sleep(0.05)
                return web.Response(status=503, headers={token_auth.TURN_HEADER: token_auth.Refused.TAKEN})
            return await super().handle(request)

    async with kit.Lab(engine=Late()) as lab:
        lab.engine.script = Deadly(lab.engine)
        assert (await lab.post(COMPLETIONS, ASK))[0] == 200
        assert lab.engine.generation == 4
        assert lab.gateway._proxy.suspects.found.requests == ()


async def test_a_trial_whose_client_left_excludes_others_until_its_proof(kit):
    engine = kit.Engine()
    async with kit.Lab(engine=engine) as first, kit.Lab(engine=engine) as second:
        engine.script = Deadly(engine)
        asked = asyncio.ensure_future(first.post(COMPLETIONS, ASK))
        await until(lambda: [body["prompt"] for _, body, _ in engine.requests].count(ASK["prompt"]) == 3)
        asked.cancel()
        poison = asyncio.ensure_future(second.post(COMPLETIONS, POISON))
        assert (await first.post(COMPLETIONS, ASK))[0] == 200
        assert (await poison)[0] == 422
        assert [len(lab.gateway._proxy.suspects.found.requests) for lab in (first, second)] == [0, 1]


async def test_a_trial_that_ended_without_its_client_is_not_in_an_engine_that_dies_later(kit):
    class Slow(kit.Engine):
        """vLLM's /health is slow, so that nothing else shows soon that the engine survived the response."""

        async def handle(self, request):
            if request.path == "/health" and self.generation == 3 and self.answered:
                await asyncio.sleep(1.0)
            return await super().handle(request)

    engine = Slow()
    engine.answered = False
    async with kit.Lab(engine=engine) as first, kit.Lab(engine=engine) as second:
        deadly = Deadly(engine)

        async def script(request, body):
            if body["prompt"] != ASK["prompt"] or engine.generation != 3:
                return await deadly(request, body)
            await asyncio.sleep(0.3)
            engine.answered = True
            return web.json_response({"choices": []})

        engine.script = script
        asked = asyncio.ensure_future(first.post(COMPLETIONS, ASK))
        await until(lambda: [body["prompt"] for _, body, _ in engine.requests].count(ASK["prompt"]) == 3)
        asked.cancel()
        assert (await second.post(COMPLETIONS, POISON))[0] == 422
        assert first.gateway._proxy.suspects.found.requests == ()


@pytest.mark.parametrize("end", ["reset", "status", "event", "event, then the client leaves", "silence"])
async def test_an_engine_that_dies_of_a_trial_whose_client_left_convicts_it(kit, end):
    late, end = "," in end, end.partition(",")[0]
    wrote, left = asyncio.Event(), asyncio.Event()
    async with kit.Lab() as lab:

        async def reported():
            if late and lab.engine.generation == 3:
                await left.wait()
            await asyncio.sleep(0.2)
            await lab.engine.die(0.1)

        async def script(request, body):
            if body["prompt"] != POISON["prompt"]:
                return None
            response = None
            if end == "event":
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
            await asyncio.sleep(0.4)
            # An error arrives before the agent's report of the death.
            lab.engine.alive = False
            if end in ("status", "event"):
                lab.engine.spawn(reported())
            else:
                await lab.engine.die(0.1)
            if response is not None:
                await response.write(b'data: {"error":{"message":"EngineCore died","code":500}}\n\ndata: [DONE]\n\n')
                if lab.engine.generation == 3:
                    wrote.set()
            elif end == "status":
                return web.Response(status=500, text='{"error":{"message":"EngineCore died"}}')
            elif end == "reset":
                request.transport.abort()
            else:
                await asyncio.sleep(600)
            return response or web.Response()

        lab.engine.script = script
        poison = {**POISON, "stream": end == "event"}
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, poison))
        await until(lambda: lab.engine.generation == 3 and len(lab.engine.requests) >= 3)
        if late:
            await wrote.wait()
        await asyncio.sleep(0.1)
        asked.cancel()
        left.set()
        await until(lambda: lab.engine.generation == 4)
        status, body = await lab.post(COMPLETIONS, poison)
        assert [body["prompt"] for _, body, _ in lab.engine.requests].count(POISON["prompt"]) == 3
        assert (status, json.loads(body)["error"]["code"]) == (422, "engine_fatal")
        assert lab.gateway._proxy.suspects._trial is None


async def test_a_planned_end_creates_no_suspects(kit):
    async with kit.Lab(engine=kit.Engine(pause=0.05)) as lab:
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, {**ASK, "stream": True, "max_tokens": 60}))
        for generation in range(2, 6):
            await asyncio.sleep(0.15)
            await lab.engine.change(phase="Draining")
            await asyncio.sleep(0.05)
            await lab.engine.change(phase="Restarting", health="Dead")
            await asyncio.sleep(0.05)
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


async def test_fatal_requests_are_listed_only_with_a_key(kit):
    async with kit.Lab(keys="key\n") as lab:
        for headers, status in (({}, 401), ({"x-api-key": "key"}, 200)):
            async with lab.client.get(lab.url + "/dsv4/fatal-requests", headers=headers) as answer:
                assert answer.status == status
    assert await asyncio.to_thread(fatal_requests, Behind("http://127.0.0.1:9"), None) == FatalRequests()


def died(found, generation, *names, alone=(), reported=True):
    """End a generation with open requests; those in `alone` were sent as trials."""
    exposures = Exposures()
    for name in names:
        exposure = exposures.enter(name.encode(), name, 1, 0.0)
        exposure.alone = exposure.trial = name in alone
    found.died(generation, exposures, reported=reported)


def convicted(found):
    return [known.id for known in found.found.requests]


def test_a_third_death_beside_another_request_proves_nothing():
    """The other request has deaths, is new, or was left by its client."""
    for other in ("old", "new"):
        found = suspects.Suspects()
        died(found, "1", "innocent")
        died(found, "2", "innocent", "old")
        died(found, "3", "innocent", other, alone=("innocent",))
        assert convicted(found) == []
    exposures = Exposures()
    exposures.leave(exposures.enter(b"left", "left", 1, 0.0), 1.0, broken=False)
    exposures.enter(b"innocent", "innocent", 1, 2.0).alone = True
    found.died("4", exposures, reported=True)
    assert convicted(found) == []
    died(found, "5", "innocent", alone=("innocent",))
    assert convicted(found) == ["innocent"]


def test_only_output_of_a_later_request_shows_that_one_that_was_left_is_gone():
    exposures = Exposures()
    before, left = exposures.enter(b"before", "before", 1, 0.0), exposures.enter(b"left", "left", 1, 0.5)
    exposures.leave(left, 1.0, broken=False)
    before.progress()
    assert exposures.unsettled
    exposures.enter(b"soon", "soon", 1, 1.5).progress()
    assert exposures.unsettled
    exposures.enter(b"later", "later", 1, 1.0 + 2 * suspects.SETTLE_SECONDS).progress()
    assert not exposures.unsettled


def test_an_unreported_end_proves_nothing():
    found = suspects.Suspects()
    for generation in range(6):
        died(found, str(generation), "one", alone=("one",), reported=False)
    assert convicted(found) == []


def test_a_proven_fatal_request_clears_requests_with_output():
    found = suspects.Suspects()
    for generation in ("1", "2"):
        exposures = Exposures()
        for name in ("poison", "silent", "stream"):
            exposure = exposures.enter(name.encode(), name, 1, 0.0)
            if name == "stream":
                exposure.progress()
        found.died(generation, exposures, reported=True)
    died(found, "3", "poison", alone=("poison",))
    assert convicted(found) == ["poison"]
    assert (found.suspected(b"silent"), found.suspected(b"stream")) == (True, False)


def test_others_wait_while_a_strict_trial_does_and_those_with_deaths_during_any():
    found, group, other = suspects.Suspects(), object(), object()
    for generation in ("1", "2"):
        died(found, generation, "one", "had a death")
    assert found.admits(group, b"had a death")
    found.wait("exchange", b"one", lambda _: True)
    assert (found.admits(group, b"had a death"), found.admits(group, b"new")) == (False, True)
    current = found.begin("exchange", group)
    assert (found.admits(group, b"had a death"), found.admits(other, b"had a death")) == (False, True)
    # An answer clears it of its deaths.
    found.answered(b"had a death")
    assert found.admits(group, b"had a death")
    found.end(current)
    died(found, "3", "one", "new")
    found.wait("exchange", b"one", lambda _: True)
    assert not found.admits(group, b"another")


def test_a_trial_that_fits_another_group_delays_no_request():
    found, group, other = suspects.Suspects(), object(), object()
    for generation in ("1", "2", "3"):
        died(found, generation, "one", "two")
    found.wait("first", b"one", lambda one: one is group)
    assert (found.admits(group, b"new"), found.has_trial(group)) == (False, True)
    assert (found.admits(other, b"new"), found.has_trial(other)) == (True, False)
    found.wait("second", b"two", lambda one: one is other)
    assert not found.admits(other, b"new")
    assert (found.is_next("first", group), found.is_next("second", other)) == (True, True)
    found.end(found.begin("second", other))
    assert found.admits(other, b"new")
    # One trial at a time, also in different groups.
    found.begin("first", group)
    found.wait("second", b"two", lambda one: one is other)
    assert not found.is_next("second", other)


def test_the_likeliest_cause_is_tried_first():
    found = suspects.Suspects()
    for generation in ("1", "2"):
        exposures = Exposures()
        for name in ("stream", "first", "last"):
            exposure = exposures.enter(name.encode(), name, 1, 0.0)
            if name == "stream":
                exposure.progress()
        found.died(generation, exposures, reported=True)
    order = []
    for name in ("first", "last", "stream"):
        found.wait(name, name.encode(), lambda _: True)
    for _ in range(3):
        name = next(name for name in ("first", "last", "stream") if name not in order and found.is_next(name, None))
        found.end(found.begin(name, None))
        order.append(name)
    assert order == ["last", "first", "stream"]


@settings(max_examples=200, deadline=None)
@given(data())
def test_proof_requires_a_death_with_one_request_and_records_are_bounded(draw):
    """Deaths in any order, with clients that leave and return."""
    now = 0.0
    found = suspects.Suspects(clock=lambda: now)
    names = [f"{number}" for number in range(5)]
    lives = draw.draw(
        lists(
            tuples(
                lists(sampled_from(names), min_size=1, max_size=4, unique=True), booleans(), booleans(), floats(0, 900)
            )
        )
    )
    deaths = dict.fromkeys(names, 0)
    for index, (present, alone, reported, later) in enumerate(lives):
        before = convicted(found)
        died(found, str(index), *present, alone=present if alone else (), reported=reported)
        for name in present:
            deaths[name] += 1
        new = convicted(found)[len(before) :]
        assert len(new) <= 1
        for name in new:
            assert present == [name]
            assert alone
            assert reported
            assert deaths[name] > suspects.SUSPECTED_DEATHS
        now += later
    assert found.size <= len(names)


def test_records_of_deaths_are_dropped_oldest_first_and_expire(monkeypatch):
    monkeypatch.setattr(suspects, "MAX_RECORDS", 100)
    now = 0.0
    found = suspects.Suspects(clock=lambda: now)
    for generation in ("a", "b"):
        died(found, generation, "kept")
    died(found, "c", "kept", alone=("kept",))
    for number in range(1000):
        now += 0.1
        died(found, f"{number}", f"{number}")
        assert found.size <= 100
    with pytest.raises(RefusedError, match="3 engines died"):
        found.suspected(b"kept")
    now += suspects.MIN_KEPT_SECONDS + 1
    found.arrive(b"kept")
    assert not found.suspected(b"kept")
    died(found, "last", "another")
    assert found.size == 1


def test_a_life_that_ends_unplanned_is_a_death_and_a_planned_end_is_none():
    def status(phase, health, generation):
        now = {"deployment": "d", "group": 0, "incarnation": 1, "rank": 0, "phase_time": 0.0, "time": 0.0}
        return AgentStatus(phase=phase, verdict={"health": health}, engine={"generation": generation}, **now)

    deaths = []
    view = EngineView(lambda: None, died=lambda generation, reported: deaths.append((generation.identity[1], reported)))
    view.report(status("Serving", "Healthy", 1))
    view.report(status("Draining", "Healthy", 1))
    view.report(status("Restarting", "Dead", 1))
    assert deaths == []
    view.report(status("Serving", "Healthy", 2))
    view.report(status("Restarting", "Dead", 2))
    view.report(status("Serving", "Healthy", 3))
    view.report(status("Serving", "Healthy", 4))
    view.leave()
    assert deaths == [(2, True), (3, False)]
