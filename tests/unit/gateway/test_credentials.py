"""A gateway with invalid credentials is not ready and reports the reason until they are corrected."""

from __future__ import annotations

import asyncio
import logging
import os
import time

import pytest

from dsv4_runtime.contract.token import canary_token, token_of
from dsv4_runtime.gateway import routing
from dsv4_testkit.waiting import free_port, until

COMPLETIONS = "/v1/completions"
ASK = {"model": "nano", "prompt": "Once", "max_tokens": 5}
OTHER = token_of("another key", "1" * 32)


async def ready(lab):
    async with lab.client.get(lab.url + "/readyz") as answer:
        return answer.status, await answer.text()


async def until_ready(lab, status):
    async with asyncio.timeout(60):
        while (found := await ready(lab))[0] != status:
            await asyncio.sleep(0.05)
    return found[1]


def set_key(lab, text):
    path = lab.route.with_name("token-key")
    if text is None:
        path.unlink()
    else:
        path.with_name("next").write_text(text)
        path.with_name("next").replace(path)


async def lose_agent(lab, token=None):
    """End the streams of the agent and change its token; new streams require `token`."""
    await lab.engine.change(token=token or token_of("the key", os.urandom(16).hex()))


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("a stale key", "answers 401"),
        ("", "is empty"),
        (None, "cannot be read (No such file or directory)"),
        ("\n \n", "is empty"),
    ],
)
async def test_without_valid_credentials_it_is_not_ready_until_the_file_is_corrected(kit, key, reason, caplog):
    caplog.set_level(logging.INFO, "dsv4.gateway")
    async with kit.Lab() as lab:
        assert await ready(lab) == (200, "healthy\n")
        set_key(lab, key)
        await lose_agent(lab)
        text = await until_ready(lab, 503)
        assert text.startswith("agent credentials rejected: ")
        assert reason in text
        assert text.count("\n") == 1
        assert str(lab.route.with_name("token-key")) in text
        assert "the key\n" not in text
        assert lab.engine.token not in text + caplog.text
        assert await lab.metric("dsv4_gateway_credentials_rejected") == 1
        async with lab.client.get(lab.url + "/healthz") as answer:
            assert answer.status == 200
        await asyncio.sleep(1.0)
        assert sum("credentials rejected" in line for line in caplog.messages) == 1
        # Requests are held and do not fail: the file may be corrected.
        held = asyncio.ensure_future(lab.post(COMPLETIONS, ASK))
        await asyncio.sleep(0.2)
        assert not held.done()
        set_key(lab, "the key")
        assert (await held)[0] == 200
        assert await until_ready(lab, 200) == "healthy\n"
        assert await lab.metric("dsv4_gateway_credentials_rejected") == 0


async def test_a_gateway_that_starts_with_a_stale_key_is_not_ready(kit):
    async with kit.Lab(engine=kit.Engine(phase="Loading")) as lab:
        lab.engine.phase, lab.engine.health = "Serving", "Healthy"
        await lose_agent(lab, OTHER)
        assert "answers 401" in await until_ready(lab, 503)
        await asyncio.sleep(0.5)
        assert (await ready(lab))[0] == 503


async def test_one_group_that_accepts_the_gateway_is_enough(kit):
    good, bad = kit.Engine(), kit.Engine(token=OTHER)
    async with kit.Lab(engine=good) as lab, kit.Lab(engine=kit.Engine()) as second:
        second.engine.token = OTHER
        lab.point(second.upstream, others={lab.upstream: None})
        assert bad.token == second.engine.token
        async with asyncio.timeout(60):
            while await ready(lab) != (200, "healthy\n"):
                await asyncio.sleep(0.05)
        await good.change(phase="Loading", health="Starting")
        await lab.ready(503)
        # The key belongs to the deployment: requests wait for the group that accepts it.
        assert (await ready(lab))[0] == 200


async def test_a_secret_that_is_swapped_takes_effect(kit, tmp_path):
    """Kubelets mount a Secret as links to a directory, and replace that directory."""
    for number, key in enumerate(("stale", "the key")):
        (tmp_path / f"v{number}").mkdir()
        (tmp_path / f"v{number}" / "token-key").write_text(key)
    (tmp_path / "data").symlink_to("v0")
    async with kit.Lab() as lab:
        path = lab.route.with_name("token-key")
        path.unlink()
        path.symlink_to(tmp_path / "data" / "token-key")
        await lose_agent(lab)
        await until_ready(lab, 503)
        (tmp_path / "next").symlink_to("v1")
        (tmp_path / "next").replace(tmp_path / "data")
        await until_ready(lab, 200)


async def test_readiness_does_not_depend_on_vllm(kit):
    async with kit.Lab() as lab:
        # There is no server at the port of vLLM.
        lab.point(lab.upstream, api=f"http://127.0.0.1:{free_port()}")
        await asyncio.sleep(1.0)
        await until_ready(lab, 200)
        async with lab.client.get(lab.url + "/healthz") as answer:
            assert answer.status == 200


async def test_an_unreachable_agent_is_logged_on_change_and_once_a_minute(kit, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "dsv4.gateway")
    monkeypatch.setattr(routing, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(routing, "_REPEAT_SECONDS", 1.0)
    async with kit.Lab() as lab:
        upstream, port = lab.upstream, free_port()
        begun = time.monotonic()
        lab.point(f"http://127.0.0.1:{port}", api=upstream)
        await until(lambda: sum("unreachable" in line for line in caplog.messages) >= 2)
        lines = [line for line in caplog.messages if "unreachable" in line]
        assert len(lines) <= 1 + time.monotonic() - begun
        assert all(f"group 0: agent at http://127.0.0.1:{port}: unreachable (" in line for line in lines)


@pytest.mark.parametrize(
    "errors", [[TimeoutError(), OSError(113, "no route"), TimeoutError("x"), ConnectionResetError()]]
)
async def test_errors_that_take_turns_are_one_state(kit, caplog, monkeypatch, errors):
    monkeypatch.setattr(routing, "_RETRY_SECONDS", 0.01)
    asked = []

    async def fail(self):
        asked.append(1)
        raise errors[len(asked) % len(errors)]

    monkeypatch.setattr(routing.RoutedGroup, "_listen", fail)
    async with kit.Lab(engine=kit.Engine(phase="Loading")):
        await until(lambda: len(asked) > 5)
    assert sum("unreachable" in line for line in caplog.messages) == 1


# The canary.


async def canary(lab, token=None):
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with lab.client.get(lab.url + "/dsv4/canary", headers=headers) as answer:
        return answer.status, await answer.json()


TOKEN = canary_token("the key")


async def test_the_canary_completes_one_token(kit):
    async with kit.Lab(keys="user\n") as lab:
        status, report = await canary(lab, TOKEN)
        assert (status, report["ok"], report["reason"]) == (200, True, "")
        assert (report["group"], report["generation"]) == (0, "1-g1")
        path, body, _ = lab.engine.requests[0]
        assert (path, body.get("model"), body["max_tokens"]) == (COMPLETIONS, None, 1), "a group may have other names"


@pytest.mark.parametrize(
    "token", [None, "", "x", "user", canary_token("another key"), token_of("the key", "0" * 32), TOKEN[:-1], TOKEN * 2]
)
async def test_only_the_token_key_opens_the_canary(kit, token):
    async with kit.Lab(keys="user\n") as lab:
        status, report = await canary(lab, token)
        assert (status, report["ok"]) == (401, False)
        assert report["reason"].startswith("wrong canary token: ")
        assert lab.engine.requests == []


async def test_a_stale_key_shows_in_the_canary(kit):
    async with kit.Lab() as lab:
        set_key(lab, "stale")
        assert (await canary(lab, TOKEN))[0] == 401
        set_key(lab, None)
        status, report = await canary(lab, TOKEN)
        assert (status, "cannot be read" in report["reason"]) == (401, True)
        set_key(lab, "the key")
        assert (await canary(lab, TOKEN))[0] == 200


@pytest.mark.parametrize(
    ("script_status", "text", "reason"),
    [(500, "broken", "vLLM answered 500: broken"), (401, "no", "vLLM answered 401"), (200, "[]", "has no choice")],
)
async def test_a_wrong_answer_fails_the_canary(kit, script_status, text, reason):
    from aiohttp import web

    async def script(request, body):
        return web.Response(status=script_status, text=text)

    async with kit.Lab(engine=kit.Engine(script=script)) as lab:
        status, report = await canary(lab, TOKEN)
        assert (status, report["ok"]) == (503, False)
        assert reason in report["reason"]


async def test_the_canary_does_not_wait_for_an_engine_that_is_away(kit):
    async with kit.Lab(engine=kit.Engine(phase="Loading")) as lab, asyncio.timeout(60):
        status, report = await canary(lab, TOKEN)
        assert (status, report.get("group"), report["reason"]) == (503, None, "no healthy engine: the state is away")


async def test_the_canary_names_rejected_credentials(kit):
    async with kit.Lab() as lab:
        await lose_agent(lab, OTHER)
        await until_ready(lab, 503)
        status, report = await canary(lab, TOKEN)
        assert status == 503
        assert "agent credentials rejected" in report["reason"]


async def test_canaries_are_made_once_at_a_time_and_shared(kit, monkeypatch):
    monkeypatch.setattr("dsv4_runtime.gateway.server._CANARY_SHARED_SECONDS", 600.0)
    async with kit.Lab(engine=kit.Engine(pause=0.2)) as lab:
        found = await asyncio.gather(*(canary(lab, TOKEN) for _ in range(50)))
        assert {status for status, _ in found} == {200}
        assert len(lab.engine.requests) == 1
        await canary(lab, TOKEN)
        assert len(lab.engine.requests) == 1
        lab.gateway._canary._seconds = 0.0
        await canary(lab, TOKEN)
        assert len(lab.engine.requests) == 2


@pytest.mark.parametrize("busy", [True, False])
async def test_the_canary_is_bounded_and_a_saturated_engine_passes(kit, monkeypatch, busy):
    # A token arrives within this time, also on a busy machine.
    monkeypatch.setattr("dsv4_runtime.gateway.server.CANARY_SECONDS", 3.0 if busy else 0.5)

    async def script(request, body):
        if body["prompt"] == "Hello":
            await asyncio.sleep(20)

    async with kit.Lab(engine=kit.Engine(script=script, pause=0.2 if busy else 0.0)) as lab:
        stream = asyncio.ensure_future(lab.post(COMPLETIONS, {**ASK, "stream": True, "max_tokens": 60}))
        if not busy:
            await stream
        await asyncio.sleep(0.2)
        status, report = await canary(lab, TOKEN)
        assert (status, report["ok"]) == ((200, True) if busy else (503, False))
        assert report["reason"] == ("" if busy else "no answer within 0.5 s")
        lab.engine.pause = 0.0
        await stream


async def test_answers_without_the_engine_do_not_pass_the_canary(kit, monkeypatch):
    """vLLM's API process answers some paths also while its engine hangs."""
    monkeypatch.setattr("dsv4_runtime.gateway.server.CANARY_SECONDS", 0.8)

    async def script(request, body):
        if body["prompt"] == "Hello":
            await asyncio.sleep(20)

    async with kit.Lab(engine=kit.Engine(script=script)) as lab:
        checking = asyncio.ensure_future(canary(lab, TOKEN))
        await asyncio.sleep(0.3)
        async with lab.client.get(lab.url + "/v1/models", headers={"Authorization": "Bearer user"}) as answer:
            assert answer.status == 200
            await answer.read()
        status, report = await checking
        assert (status, report["reason"]) == (503, "no answer within 0.8 s")
