"""Several groups behind one gateway: choice of the group while an engine is away, and readiness of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from types import SimpleNamespace

import pytest
from aiohttp import web

from dsv4_testkit.waiting import until

COMPLETIONS = "/v1/completions"
ASK = {"model": "nano", "prompt": "Once", "max_tokens": 5}


@contextlib.asynccontextmanager
async def pair(kit, first=None, second=None, **settings):
    """Yield a lab whose gateway serves two groups, and the engine of the second."""
    async with kit.Lab(engine=second) as other, kit.Lab(engine=first, **settings) as lab:
        lab.other = other.upstream
        lab.point(lab.upstream, others={other.upstream: None})
        await until(lambda: len(lab.gateway._groups.all) == 2)
        if other.engine.phase == "Serving":
            await until(lambda: lab.gateway._groups.all[1].engine.present)
        yield lab, other.engine


async def status_of(lab, path):
    async with lab.client.get(lab.url + path) as answer:
        return answer.status


async def test_new_requests_go_to_a_group_that_answers(kit):
    async with pair(kit) as (lab, other):
        await lab.engine.change(phase="Restarting", health="Dead")
        await until(lambda: not lab.gateway._groups.all[0].engine.present)
        for _ in range(5):
            assert (await lab.post(COMPLETIONS, ASK))[0] == 200
        assert (len(lab.engine.requests), len(other.requests)) == (0, 5)
        assert await lab.metric("dsv4_gateway_hold_seconds_count") == 0
        assert await lab.metric('dsv4_gateway_engine_state{group="0",state="away"}') == 1
        assert await lab.metric('dsv4_gateway_engine_state{group="1",state="healthy"}') == 1
        await lab.engine.change(phase="Serving", health="Healthy", generation=2)
        await until(lambda: lab.gateway._groups.all[0].engine.present)
        assert (await lab.post(COMPLETIONS, ASK))[0] == 200
        assert len(lab.engine.requests) == 1


async def test_the_deaths_that_an_agent_reports_are_metrics(kit):
    async with kit.Lab() as lab:
        await until(lambda: lab.gateway._groups.all[0].report)
        name = 'dsv4_gateway_engine_recent_failures{cause="EngineHung",group="0"}'
        assert await lab.metric(name) == 0
        now = time.time()
        await lab.engine.change(deaths=(now - 3700, now - 60, now))
        await until(lambda: lab.gateway._groups.all[0].report.engine.failures)
        assert await lab.metric('dsv4_gateway_engine_restarts{group="0"}') == 3
        assert await lab.metric(name) == 2


async def test_requests_go_to_the_group_that_is_less_busy(kit):
    async with pair(kit, kit.Engine(pause=0.3), kit.Engine(pause=0.3)) as (lab, other):
        found = await asyncio.gather(*(lab.post(COMPLETIONS, ASK) for _ in range(6)))
        assert [status for status, _ in found] == [200] * 6
        assert (len(lab.engine.requests), len(other.requests)) == (3, 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_of_a_dying_group_continue_in_another(kit, stream):
    async with pair(kit, kit.Engine(model="a"), kit.Engine(model="a")) as (lab, other):
        body = {**ASK, "stream": stream, "max_tokens": 40}
        _, whole = await lab.post(COMPLETIONS, body)
        lab.engine.requests.clear()
        lab.engine.faults = [kit.Fault(after=7, back=60.0)]
        _, broken = await lab.post(COMPLETIONS, body)
        if stream:
            texts = ["".join(c["choices"][0]["text"] for c in kit.chunks(s)[:-1]) for s in (whole, broken)]
            assert texts[0] == texts[1]
        else:
            assert broken == whole
        assert (len(lab.engine.requests), len(other.requests)) == (1, 1)


async def test_the_metrics_of_vllm_are_always_those_of_the_gateways_own_group(kit):
    async with pair(kit, kit.Engine(pause=0.05), kit.Engine(more_metrics=1)) as (lab, _):
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, {**ASK, "stream": True, "max_tokens": 20}))
        await until(lambda: lab.engine.requests)
        # The other group has less load, so it would receive the next request.
        async with lab.client.get(lab.url + "/metrics") as answer:
            said = await answer.text()
        assert "vllm:num_requests_waiting" in said
        assert "# more" not in said
        await asked


@pytest.mark.parametrize("model", ["b", None])
async def test_a_stream_is_not_continued_by_another_model(kit, model):
    async with pair(kit, kit.Engine(model="a"), kit.Engine(model=model)) as (lab, other):
        lab.engine.faults = [kit.Fault(after=7, back=60.0)]
        status, broken = await lab.post(COMPLETIONS, {**ASK, "stream": True, "max_tokens": 40})
        last = kit.chunks(broken)[-1]
        assert (status, last["error"]["code"]) == (200, "engine_lost")
        assert "another model or flags" in last["error"]["message"]
        assert other.requests == []


async def test_a_stream_continues_in_the_group_with_its_model(kit):
    """In a rollout of three groups, the least busy one can have another specification."""
    async with (
        kit.Lab(engine=kit.Engine(model="new")) as new,
        kit.Lab(engine=kit.Engine(model="old")) as old,
        kit.Lab(engine=kit.Engine(model="old", pause=0.02)) as lab,
    ):
        lab.point(lab.upstream, others={new.upstream: None, old.upstream: None})
        groups = lab.gateway._groups
        await until(lambda: len(groups.all) == 3 and all(group.engine.present for group in groups.all.values()))
        lab.engine.faults = [kit.Fault(after=7, back=60.0)]
        _, body = await lab.post(COMPLETIONS, {**ASK, "stream": True, "max_tokens": 40})
        assert kit.chunks(body)[-1] == "[DONE]"
        assert (len(new.engine.requests), len(old.engine.requests)) == (0, 1)


async def test_a_request_that_waits_for_a_trial_goes_to_a_group_that_comes_back(kit, monkeypatch):
    async with pair(kit) as (lab, other):
        groups = lab.gateway._groups
        await other.change(phase="Restarting", health="Dead")
        await until(lambda: not groups.all[1].engine.present)
        # As during a trial in the first group.
        monkeypatch.setattr(lab.gateway._proxy.suspects, "admits", lambda group, _: group is groups.all[1])
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
        await until(lambda: lab.gateway._proxy._hold._count)
        await other.change(phase="Serving", health="Healthy", generation=2)
        async with asyncio.timeout(60):
            assert (await asked)[0] == 200
        assert (len(lab.engine.requests), len(other.requests)) == (0, 1)


@pytest.mark.parametrize(("next_life", "goes_on"), [({"generation": 2}, True), ({"incarnation": 2}, False)])
async def test_without_a_model_digest_streams_continue_only_within_an_incarnation(kit, next_life, goes_on):
    async with kit.Lab(engine=kit.Engine(pause=0.02)) as lab:
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, {**ASK, "stream": True, "max_tokens": 40}))
        await until(lambda: lab.engine.requests)
        await asyncio.sleep(0.2)
        await lab.engine.change(**next_life)
        last = kit.chunks((await asked)[1])[-1]
        assert (last == "[DONE]") is goes_on


async def test_a_request_that_had_not_begun_may_be_answered_by_another_model(kit):
    async with pair(kit, kit.Engine(model="a"), kit.Engine(model="b")) as (lab, other):
        lab.engine.faults = [kit.Fault(back=60.0)]
        assert (await lab.post(COMPLETIONS, ASK))[0] == 200
        assert len(other.requests) == 1


async def test_a_failed_group_gets_no_requests_and_the_gateway_waits_for_the_others(kit):
    async with pair(kit, second=kit.Engine(phase="Loading", health="Starting")) as (lab, other):
        await lab.engine.change(phase="Failed", health="Dead")
        lab.point(lab.upstream, given_up="spent", others={lab.other: None})
        await until(lambda: lab.gateway._groups.all[0].engine.given_up)
        assert await status_of(lab, "/readyz") == 200
        assert await status_of(lab, "/health") == 503
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
        await asyncio.sleep(0.1)
        assert not asked.done()
        await other.change(phase="Serving", health="Healthy")
        assert (await asked)[0] == 200
        await other.change(phase="Failed", health="Dead")
        lab.point(lab.upstream, given_up="spent", others={lab.other: "too"})
        await until(lambda: lab.gateway._groups.given_up)
        assert await status_of(lab, "/readyz") == 503
        status, body = await lab.post(COMPLETIONS, ASK)
        assert (status, json.loads(body)["error"]["code"]) == (503, "engine_given_up")


@pytest.mark.parametrize(("hold", "status"), [(5.0, 200), (0.0, 503)])
async def test_a_gateway_without_an_engine_is_ready_if_it_may_hold(kit, hold, status):
    async with kit.Lab(engine=kit.Engine(phase="Loading"), hold_timeout_seconds=hold) as lab:
        assert await status_of(lab, "/readyz") == status
        await lab.engine.change(phase="Serving")
        await lab.ready(200)
        assert await status_of(lab, "/readyz") == 200


async def test_requests_of_a_removed_group_continue_in_another(kit):
    async with pair(kit, kit.Engine(pause=5.0)) as (lab, other):
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
        await until(lambda: lab.engine.requests)
        lab.point(lab.other)
        assert (await asyncio.wait_for(asked, 60))[0] == 200
        assert len(other.requests) == 1


@contextlib.asynccontextmanager
async def renamed(kit, first=("old",), second=("new",), **settings):
    """Yield a lab in the middle of a rename: two groups that serve different names, and the engine of the second."""

    def serve(engine, names):
        async def script(request, body):
            if body.get("model") in (None, *names):
                return None
            return web.json_response({"error": {"message": f"vLLM has no {body['model']}"}}, status=404)

        engine.script = script
        return engine

    engines = serve(kit.Engine(model="a"), first), serve(kit.Engine(model="a"), second)
    async with pair(kit, *engines, served_names=("old",), **settings) as (lab, other):
        lab.names = first, second
        lab.point(lab.upstream, others={lab.other: None}, names=lab.names)
        await until(lambda: set(lab.gateway._groups.names) == {*first, *second})
        yield lab, other


async def ask(lab, *names, **more):
    """Return status and code of a completion whose body has `model` as often as there are names."""
    body = json.dumps({**ASK, **more})[1:].partition(",")[2]
    given = "".join(f'"model": {json.dumps(name)},' for name in names)
    status, answer = await lab.post(COMPLETIONS, ("{" + given + body).encode())
    return status, None if status == 200 else json.loads(answer)["error"].get("code", "of vLLM")


async def away(lab, index, engine):
    await engine.change(phase="Restarting", health="Dead")
    await until(lambda: not lab.gateway._groups.all[index].engine.present)


async def test_a_name_goes_only_to_the_groups_that_serve_it(kit):
    async with renamed(kit, second=("new", "more")) as (lab, other):
        for _ in range(4):
            assert await ask(lab, "old") == (200, None)
            assert await ask(lab, "new") == (200, None)
        assert [body["model"] for _, body, _ in lab.engine.requests] == ["old"] * 4
        assert [body["model"] for _, body, _ in other.requests] == ["new"] * 4
        assert await ask(lab) == (200, None)
        assert await ask(lab, "another") == (404, 404)
        # Parsers differ in the choice of one, and no group serves both.
        assert await ask(lab, "old", "new") == (404, 404)
        assert await ask(lab, "new", "more", "new") == (200, None)
        async with lab.client.get(lab.url + "/v1/models") as answer:
            assert [model["id"] for model in (await answer.json())["data"]] == ["old", "new", "more"]
        assert await status_of(lab, "/v1/models/more") == 200
        assert await status_of(lab, "/v1/models/another") == 404


async def test_a_name_waits_for_its_only_group_while_another_one_serves(kit):
    async with renamed(kit) as (lab, other):
        await away(lab, 0, lab.engine)
        asked = asyncio.ensure_future(ask(lab, "old"))
        await lab.holds(1)
        assert await ask(lab, "new") == (200, None)
        assert await status_of(lab, "/health") == 200
        assert not asked.done()
        await lab.engine.change(phase="Serving", health="Healthy", generation=2)
        async with asyncio.timeout(60):
            assert await asked == (200, None)
        assert [len(engine.requests) for engine in (lab.engine, other)] == [1, 1]


async def test_the_wait_for_the_only_group_with_a_name_is_bounded(kit):
    async with renamed(kit, hold_timeout_seconds=0.3, max_held_requests=1) as (lab, other):
        await away(lab, 0, lab.engine)
        first = asyncio.ensure_future(ask(lab, "old"))
        await lab.holds(1)
        assert await ask(lab, "old") == (503, "engine_unavailable")
        assert await ask(lab, "another") == (404, 404)
        assert await first == (503, "engine_unavailable")
        lab.point(lab.upstream, given_up="spent", others={lab.other: None}, names=lab.names)
        await until(lambda: lab.gateway._groups.all[0].engine.given_up)
        assert await ask(lab, "old") == (503, "engine_given_up")
        assert await ask(lab, "new") == (200, None)
        assert (lab.engine.requests, len(other.requests)) == ([], 1)


async def test_a_wait_ends_when_the_only_group_with_the_name_is_given_up_or_gets_another_one(kit):
    async with renamed(kit) as (lab, _):
        await away(lab, 0, lab.engine)
        asked = asyncio.ensure_future(ask(lab, "old"))
        await lab.holds(1)
        lab.point(lab.upstream, given_up="spent", others={lab.other: None}, names=lab.names)
        async with asyncio.timeout(60):
            assert await asked == (503, "engine_given_up")
        lab.point(lab.upstream, others={lab.other: None}, names=lab.names)
        await until(lambda: not lab.gateway._groups.all[0].engine.given_up)
        asked = asyncio.ensure_future(ask(lab, "old"))
        await lab.holds(1)
        lab.point(lab.upstream, others={lab.other: None}, names=(("new",), ("new",)))
        async with asyncio.timeout(60):
            assert await asked == (404, 404)
        assert await ask(lab, "old") == (404, 404)
        assert lab.engine.requests == []
        # Once all groups serve the same names, the list is vLLM's again.
        assert not lab.gateway._serves_models(SimpleNamespace(method="GET", path="/v1/models"))


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_of_a_dying_group_continue_only_in_a_group_with_their_name(kit, stream):
    async with renamed(kit) as (lab, other):
        lab.engine.faults = [kit.Fault(after=3, back=0.3)]
        assert await ask(lab, "old", stream=stream, max_tokens=10) == (200, None)
        assert ([len(engine.requests) for engine in (lab.engine, other)]) == [2, 0]


async def test_a_suspect_does_not_block_a_group_without_its_name(kit):
    async with renamed(kit) as (lab, _):
        suspects = lab.gateway._proxy.suspects
        lab.engine.faults = [kit.Fault(back=0.05), kit.Fault(back=60.0)]
        asked = asyncio.ensure_future(ask(lab, "old", prompt="the poison"))
        await until(lambda: suspects._waiting)
        # As after a death beside other requests: while such a suspect waits, no other request enters its group.
        (record,) = suspects._records.values()
        record.deaths.append(record.deaths[-1])
        assert record.strict
        # Less than the wait of the suspect.
        async with asyncio.timeout(30):
            assert await ask(lab, "new") == (200, None)
        assert not asked.done()
        asked.cancel()


async def test_the_gateways_own_requests_have_no_name(kit):
    async with renamed(kit) as (lab, other):
        groups = lab.gateway._groups
        for index, engine in enumerate((lab.engine, other)):
            generation = groups.all[index].engine.present
            assert await lab.gateway._proxy._trials.probe(groups.all[index], generation)
            assert engine.requests[-1][1]["model"] is None
        await away(lab, 0, lab.engine)
        assert (await lab.gateway._canaries.check()).ok
        assert "model" not in other.requests[-1][1]
        assert (await lab.gateway._page.make()).deployments[0].models == ("old", "new")


async def test_a_route_without_names_has_those_of_the_settings(kit):
    """It is of an earlier operator, or its group was never formed."""
    async with renamed(kit) as (lab, _):
        lab.point(lab.upstream, others={lab.other: None}, names=((), ("new",)))
        await until(lambda: lab.gateway._groups.all[0].names == ("old",))
        assert await ask(lab, "old") == (200, None)
        assert await ask(lab, "new") == (200, None)
