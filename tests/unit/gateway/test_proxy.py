"""Requests during the death of an engine."""

from __future__ import annotations

import asyncio
import json
import logging
import time

import pytest
from aiohttp import web

from dsv4_runtime.contract.token import new_token
from dsv4_runtime.engine import token_auth
from dsv4_runtime.gateway.routing import RoutedGroup
from dsv4_testkit.waiting import until

COMPLETIONS = "/v1/completions"
ASK = {"model": "nano", "prompt": "Once", "max_tokens": 5}


def error(body):
    return json.loads(body)["error"]


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/embeddings", "/tokenize", "/v1/messages?beta=true", "/v1/path%2Fof?its=own&x=%20"],
)
async def test_forwarded_requests_and_responses_are_not_changed(kit, path):
    seen = []

    async def script(request, body):
        seen.append((request.method, request.raw_path, request.headers, await request.read()))
        told = {"X-Own": "1", "Content-Type": "application/json"}
        return web.Response(status=203, body=b'{"a" : "\xc3\xa9"}\n', headers=told)

    async with kit.Lab() as lab:
        lab.engine.script = script
        headers = {"X-Request-Id": "mine-1", "Authorization": "Bearer x", "X-Other": "y"}
        headers |= {"Connection": "X-Hop", "X-Hop": "z"}
        data = b'{"b":  [1, 2.50 ,"\\u00e9"]}'
        async with lab.client.post(lab.url + path, data=data, headers=headers) as answer:
            assert (answer.status, await answer.read()) == (203, b'{"a" : "\xc3\xa9"}\n')
            assert (answer.headers["X-Own"], answer.headers["X-Request-Id"]) == ("1", "mine-1")
        method, raw_path, given, read = seen[0]
        assert (method, raw_path, read) == ("POST", path, data)
        assert (given["X-Request-Id"], given["Authorization"], given["X-Other"]) == ("mine-1", "Bearer x", "y")
        assert "X-Hop" not in given
        assert "Accept-Encoding" in given  # the client's, not the gateway's
        assert given["Host"] == lab.upstream.removeprefix("http://")


@pytest.mark.parametrize("kind", ["reset", "error", "hang", "glitch"])
async def test_a_request_without_a_begun_answer_is_repeated(kit, kind):
    async with kit.Lab() as lab:
        _, whole = await lab.post(COMPLETIONS, ASK)
        lab.engine.faults = [kit.Fault(kind=kind)]
        assert await lab.post(COMPLETIONS, ASK) == (200, whole)
        assert len(lab.engine.requests) == 3
        assert await lab.metric("dsv4_gateway_replayed_total") == 1
        assert await lab.metric('dsv4_gateway_requests_total{outcome="ok"}') == 2


async def test_a_request_whose_answer_was_cut_is_repeated(kit):
    async def script(request, body):
        if len(lab.engine.requests) > 1:
            return None
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"choices"')
        await asyncio.sleep(0.02)
        await lab.engine.die(0.02)
        request.transport.abort()
        return response

    async with kit.Lab() as lab:
        lab.engine.script = script
        status, body = await lab.post(COMPLETIONS, ASK)
        assert status == 200
        assert json.loads(body)["choices"]


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429])
async def test_a_clients_error_is_never_sent_again(kit, status):
    async def script(request, body):
        return web.json_response({"error": {"message": "no"}}, status=status)

    async with kit.Lab() as lab:
        lab.engine.script = script
        assert (await lab.post(COMPLETIONS, ASK))[0] == status
        assert len(lab.engine.requests) == 1


async def test_a_5xx_of_a_living_engine_is_passed_on(kit):
    async def script(request, body):
        return web.json_response({"error": {"message": "a bug"}}, status=500)

    async with kit.Lab() as lab:
        lab.engine.script = script
        assert (await lab.post(COMPLETIONS, ASK))[0] == 500
        assert len(lab.engine.requests) == 1
        assert await lab.metric('dsv4_gateway_requests_total{outcome="engine_error"}') == 1


async def test_requests_with_possible_side_effects_are_not_repeated(kit):
    async with kit.Lab() as lab:

        async def script(request, body):
            await lab.engine.die(0.02)
            request.transport.abort()
            return web.Response()

        lab.engine.script = script
        status, body = await lab.post("/v1/responses/resp_1/cancel", {})
        assert (status, error(body)["code"]) == (502, "engine_lost")
        assert len(lab.engine.requests) == 1


async def test_a_request_that_may_be_fatal_is_sent_three_times_at_most(kit):
    async with kit.Lab() as lab:
        lab.engine.faults = [kit.Fault() for _ in range(10)]
        status, body = await lab.post(COMPLETIONS, ASK)
        assert (status, error(body)["code"]) == (422, "engine_fatal")
        assert len(lab.engine.requests) == 3


async def test_a_stream_continues_after_two_deaths(kit):
    async with kit.Lab() as lab:
        body = {**ASK, "stream": True, "max_tokens": 60}
        _, whole = await lab.post(COMPLETIONS, body)
        lab.engine.faults = [kit.Fault(after=7) for _ in range(2)]
        _, broken = await lab.post(COMPLETIONS, body)
        words = [["".join(c["choices"][0]["text"] for c in kit.chunks(s)[:-1])] for s in (whole, broken)]
        assert words[0] == words[1]
        assert await lab.metric("dsv4_gateway_continued_total") == 2


async def test_new_requests_wait_while_the_engine_is_away(kit):
    async with kit.Lab() as lab:
        for health, phase in (("Suspect", "Serving"), ("Dead", "Restarting"), ("Starting", "Loading")):
            await lab.engine.change(health=health, phase=phase)
            await lab.ready(503)
            asked = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
            await lab.holds(1)
            assert not asked.done()
            assert await lab.metric('dsv4_gateway_engine_state{group="0",state="away"}') == 1
            await lab.engine.change(health="Healthy", phase="Serving")
            assert (await asked)[0] == 200
        assert await lab.metric("dsv4_gateway_hold_seconds_count") == 3


@pytest.mark.parametrize("next_life", [{"generation": 2}, {"incarnation": 2}])
async def test_a_new_generation_ends_the_previous_one_without_a_reported_death(kit, next_life):
    """No status arrived in between, and the connections of the old engine are silent, as on a cut network."""

    async def script(request, body):
        if len(lab.engine.requests) == 1:
            await asyncio.sleep(600)
        return None

    async with kit.Lab() as lab:
        lab.engine.script = script
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
        await until(lambda: lab.engine.requests)
        await lab.engine.change(**next_life)
        assert (await asyncio.wait_for(asked, 60))[0] == 200
        assert len(lab.engine.requests) == 2


async def test_ids_of_requests_that_were_open_at_a_death_are_logged(kit, caplog):
    caplog.set_level(logging.INFO, "dsv4.gateway")

    def told():
        return [line for line in caplog.messages if line.startswith("engine 1-g")]

    async def script(request, body):
        if lab.engine.generation > 1:
            return None
        if request.headers["X-Request-Id"] in ("cut-off", "glitch"):
            request.transport.abort()
            return web.Response()
        await asyncio.sleep(600)

    async with kit.Lab() as lab:

        def ask(name):
            return asyncio.ensure_future(lab.post(COMPLETIONS, ASK, headers={"X-Request-Id": name}))

        lab.engine.script = script
        glitch = ask("glitch")
        await until(lambda: len(lab.engine.requests) > 2)  # Retried repeatedly: vLLM lives and reports so.
        glitch.cancel()
        waits = ask("waits")
        await until(lambda: any(headers["x-request-id"] == "waits" for *_, headers in lab.engine.requests))
        await asyncio.sleep(0.3)  # The last glitch is settled by then.
        lab.engine.alive = False
        cut_off = ask("cut-off")
        await until(lambda: any(headers["x-request-id"] == "cut-off" for *_, headers in lab.engine.requests))
        assert told() == []
        await lab.engine.die(0.02)
        assert [(await asked)[0] for asked in (waits, cut_off)] == [200, 200]
        assert told() == ["engine 1-g1 is over; open requests: 2", "engine 1-g1 had open: cut-off waits"]
        await lab.engine.die(0.02)
        await until(lambda: len(told()) > 2)
        assert told()[2:] == ["engine 1-g2 is over; open requests: 0"]


async def test_a_suspicion_does_not_interrupt_open_requests(kit):
    async with kit.Lab(engine=kit.Engine(pause=0.02)) as lab:
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, {**ASK, "stream": True}))
        await until(lambda: lab.engine.requests)
        await lab.engine.change(health="Suspect")
        assert kit.chunks((await asked)[1])[-1] == "[DONE]"
        assert len(lab.engine.requests) == 1


async def test_holding_is_bounded_in_time(kit):
    async with kit.Lab(engine=kit.Engine(phase="Loading"), hold_timeout_seconds=0.2) as lab:
        begun = time.monotonic()
        async with lab.client.post(lab.url + COMPLETIONS, json=ASK) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "10"
            assert (await answer.json())["error"]["code"] == "engine_unavailable"
        assert 0.2 <= time.monotonic() - begun < 60


async def test_requests_to_a_permanently_failed_engine_are_refused_without_a_wait(kit):
    async with kit.Lab(engine=kit.Engine(phase="Failed")) as lab:
        waits = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
        await asyncio.sleep(0.1)
        assert not waits.done()
        lab.point(lab.upstream, given_up="the restart budget is spent")
        status, body = await asyncio.wait_for(waits, 60)
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (503, "engine_given_up")
        assert error["message"] == "the engine was given up: the restart budget is spent"
        async with lab.client.post(lab.url + COMPLETIONS, json=ASK) as answer:
            assert answer.status == 503
            assert "Retry-After" not in answer.headers
        lab.point(lab.upstream)
        await lab.engine.change(phase="Serving", incarnation=2)
        await lab.ready(200)
        assert (await lab.post(COMPLETIONS, ASK))[0] == 200


async def test_a_stream_of_a_permanently_failed_engine_ends_with_an_error(kit):
    async with kit.Lab(engine=kit.Engine(pause=0.05)) as lab:
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, {**ASK, "stream": True}))
        await until(lambda: lab.engine.requests)
        await asyncio.sleep(0.12)
        await lab.engine.change(phase="Failed", health="Dead")
        lab.point(lab.upstream, given_up="spent")
        events = kit.chunks((await asyncio.wait_for(asked, 60))[1])
        assert events[-1]["error"]["code"] == "engine_given_up"


@pytest.mark.parametrize(("count", "size"), [(3, 100_000), (100, 399)])
async def test_holding_is_bounded_in_requests_and_bytes(kit, count, size):
    async with kit.Lab(engine=kit.Engine(phase="Loading"), max_held_requests=count, max_held_bytes=size) as lab:
        body = json.dumps(ASK).encode().ljust(100)
        waiting = [asyncio.ensure_future(lab.post(COMPLETIONS, body)) for _ in range(3)]
        await lab.holds(3)
        assert (await lab.post(COMPLETIONS, body))[0] == 503
        await lab.engine.change(phase="Serving")
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * len(waiting)
        assert await lab.metric("dsv4_gateway_held_bytes") == 0


async def test_requests_that_were_open_at_a_death_are_held_beyond_the_bounds(kit):
    async with kit.Lab(engine=kit.Engine(pause=0.05), max_held_requests=1) as lab:
        lab.engine.faults = [kit.Fault(back=0.3) for _ in range(6)]
        found = await asyncio.gather(*(lab.post(COMPLETIONS, ASK) for _ in range(6)))
        assert [status for status, _ in found] == [200] * 6


async def test_models_are_named_while_the_engine_is_away(kit):
    async with kit.Lab(engine=kit.Engine(phase="Loading"), served_names=("a", "b")) as lab:
        answer = await lab.client.get(lab.url + "/v1/models")
        assert [model["id"] for model in (await answer.json())["data"]] == ["a", "b"]


async def test_a_watch_that_breaks_is_no_death(kit):
    async with kit.Lab() as lab:
        real = lab.engine.watch

        async def deaf(request):
            return web.Response(status=500)

        lab.engine.watch = deaf
        await lab.engine.change()
        for task in asyncio.all_tasks():
            if "Lab.watch" in repr(task):
                task.cancel()
        assert (await lab.post(COMPLETIONS, ASK))[0] == 200
        lab.engine.watch = real


async def test_requests_are_held_after_a_refused_connection_until_vllm_answers(kit):
    """The last status of the agent is Healthy but outdated, and vLLM's port is closed."""
    async with kit.Lab() as lab:
        port = int(lab.upstream.rsplit(":", 1)[1])
        await lab._site.stop()
        asked = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
        await asyncio.sleep(0.3)
        assert not asked.done()
        await lab.listen(port)
        assert (await asked)[0] == 200
        assert len(lab.engine.requests) == 1


async def test_no_request_waits_for_the_file_of_the_token_key(kit):
    async with kit.Lab() as lab:
        lab.route.with_name("token-key").unlink()
        assert (await lab.post(COMPLETIONS, ASK))[0] == 200
        assert lab.engine.requests[0][2]["x-dsv4-token"] == lab.engine.token


async def test_a_new_incarnation_is_opened_with_its_own_token(kit):
    async with kit.Lab() as lab:
        first, second = lab.engine.token, new_token("the key")
        assert (await lab.post(COMPLETIONS, ASK))[0] == 200
        await lab.engine.change(token=second, incarnation=2)
        # A request between the new token and the first status with it counts as one of the lost engine.
        await until(lambda: lab.gateway._groups.all[0].report.incarnation == 2)
        assert lab.gateway._groups.all[0].auth[token_auth.HEADER] == second
        assert (await lab.post(COMPLETIONS, ASK))[0] == 200
        assert [asked[2]["x-dsv4-token"] for asked in lab.engine.requests] == [first, second]
        # The new agent receives the old token once; the key and other tokens never.
        assert lab.engine.shown == [None, *(f"Bearer {token}" for token in (first, first, second))]


async def test_an_agent_with_a_token_of_another_key_never_gets_the_valid_token(kit):
    """A foreign agent at the address of the head only obtains a token that is valid nowhere."""
    async with kit.Lab() as lab:
        await lab.engine.change(token=new_token("another key"), incarnation=2)
        await until(lambda: len(lab.engine.shown) >= 4)
        assert f"Bearer {lab.engine.token}" not in lab.engine.shown


async def test_requests_that_come_while_the_route_changes_wait_like_others(kit, monkeypatch):
    """The previous groups are still shutting down, and the new groups have no engine yet."""
    ended, end = asyncio.Event(), RoutedGroup.end

    async def slowly(group):
        await ended.wait()
        await end(group)

    nobody = "http://127.0.0.1:9"
    async with kit.Lab() as first, kit.Lab() as second:
        monkeypatch.setattr(RoutedGroup, "end", slowly)
        first.point(nobody)
        await until(lambda: first.gateway._groups.all[0].api == nobody)
        waiting = asyncio.ensure_future(first.post(COMPLETIONS, ASK))
        async with first.client.get(first.url + "/healthz") as answer:
            assert answer.status == 200
        assert not waiting.done()
        ended.set()
        first.point(second.upstream)
        assert (await waiting)[0] == 200
        assert len(second.engine.requests) == 1


async def test_the_route_is_followed(kit):
    async with kit.Lab() as first, kit.Lab() as second:
        first.point(second.upstream)
        await until(lambda: first.gateway._groups.all[0].api == second.upstream)
        assert (await first.post(COMPLETIONS, ASK))[0] == 200
        assert (len(first.engine.requests), len(second.engine.requests)) == (0, 1)
        first.route.write_text("half a")
        await asyncio.sleep(1.2)
        assert (await first.post(COMPLETIONS, ASK))[0] == 200
