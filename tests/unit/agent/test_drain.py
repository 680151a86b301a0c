"""Drain of a healthy engine: a real head with its HTTP API, and a stand-in for vLLM that serves only metrics."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from dsv4_runtime.agent import http
from dsv4_runtime.agent.decide.events import AgentEvent, EvidenceSaved, ProcessEnded
from dsv4_runtime.agent.decide.head import next_step
from dsv4_runtime.agent.decide.state import EngineState, Restart
from dsv4_runtime.agent.member import Member
from dsv4_runtime.contract import (
    AgentStatus,
    Cause,
    DrainReport,
    Failure,
    GroupPlan,
    Health,
    MemberPorts,
    Phase,
)
from dsv4_runtime.engine import token_auth
from dsv4_testkit.documents import member_plan
from dsv4_testkit.waiting import until

MakePlan = Callable[..., GroupPlan]
TOKEN = {"Authorization": "Bearer secret"}
SECONDS = 120.0


@dataclass
class Vllm:
    """Values of vLLM's metrics."""

    running: int = 0
    waiting: int = 0
    silent: bool = False
    looks: list[float] = field(default_factory=list)

    async def metrics(self, request: web.Request) -> web.Response:
        assert request.headers[token_auth.HEADER] == "secret"
        self.looks.append(time.monotonic())
        if self.silent:
            return web.Response(status=500)
        text = "\nvllm:iteration_tokens_total_count{} 5.0\n"
        text += f"vllm:num_requests_running{{}} {self.running}.0\nvllm:num_requests_waiting{{}} {self.waiting}.0\n"
        return web.Response(text=text)


@dataclass
class Lab:
    vllm: Vllm
    head: Member
    client: aiohttp.ClientSession

    async def drain(self, seconds: float = SECONDS) -> DrainReport:
        async with self.client.post(f"/v1/drain?seconds={seconds}", headers=TOKEN) as answer:
            assert answer.status == 200
            return DrainReport.model_validate_json(await answer.read())

    async def over(self, seconds: float = 60.0) -> DrainReport:
        async with asyncio.timeout(seconds):
            while not (report := await self.drain()).over:
                await asyncio.sleep(0.02)
        return report

    @property
    def stage(self) -> str:
        return self.head.context.record.progress.stage if self.head.context.record.progress else ""


@contextlib.asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[int]:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@pytest.fixture
async def lab(make_plan: MakePlan, tmp_path: Path) -> AsyncIterator[Lab]:
    vllm, app = Vllm(), web.Application()
    app.router.add_get("/metrics", vllm.metrics)
    async with listening(app) as port:
        ports = MemberPorts(agent=18090, gcs=16379, dashboard=18265, api=port)
        head = Member(make_plan(["127.0.0.1"], members=(member_plan(ports=ports),)), 0, tmp_path, "secret")
        serves(head)
        async with (
            listening(http.application(head, "secret")) as agent,
            aiohttp.ClientSession(f"http://127.0.0.1:{agent}") as client,
        ):
            yield Lab(vllm, head, client)
        head.loop.close()
        await head.context.tasks.close()


def serves(head: Member) -> None:
    """Set the state of a head after its start, with an engine that is not watched."""
    engine = EngineState(generation=1, started=0.0, load_seconds=math.inf)
    fields = {"formed": True, "joined": True, "phase": Phase.SERVING, "generation": 1, "engine": engine}
    head.loop.state = dataclasses.replace(head.loop.state, **fields)
    head.context.record.begin_generation()
    head.context.record.served()
    head.context.record.enter(Phase.SERVING)


async def test_open_requests_are_waited_for(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    # With this period only changes cause messages on the stream.
    monkeypatch.setattr(http, "_WATCH_SECONDS", 60.0)
    lab.vllm.running, lab.vllm.waiting = 2, 1
    async with lab.client.get("/v1/watch", headers=TOKEN) as stream:
        await stream.content.readline()
        assert await lab.drain() == DrainReport(over=False)
        async with asyncio.timeout(60):
            told = AgentStatus.model_validate_json(await stream.content.readline())
        assert (told.phase, told.verdict.health) == (Phase.DRAINING, Health.HEALTHY), "nothing is wrong with it"
    await until(lambda: lab.stage == "waiting for 3 open requests")
    assert await lab.drain() == DrainReport(over=False, open=3)
    lab.vllm.running, lab.vllm.waiting = 1, 0
    await until(lambda: lab.stage == "waiting for 1 open request")
    lab.vllm.running = 0
    emptied = time.monotonic()
    assert await lab.over() == DrainReport(over=True, open=0)
    assert time.monotonic() - emptied >= 1.0
    assert (lab.head.context.record.phase, lab.stage) == (Phase.DRAINING, "all requests are answered")


async def test_an_idle_engine_is_polled_until_no_request_can_be_in_transit(lab: Lab) -> None:
    begun = time.monotonic()
    assert not (await lab.drain()).over
    await lab.over()
    assert time.monotonic() - begun >= 1.0
    assert lab.vllm.looks[-1] - lab.vllm.looks[0] >= 0.9


async def test_a_request_that_comes_in_the_last_moment_is_waited_for(lab: Lab) -> None:
    await lab.drain()
    await until(lambda: lab.vllm.looks)
    lab.vllm.running = 1
    await asyncio.sleep(1.6)
    await until(lambda: lab.stage == "waiting for 1 open request")
    assert await lab.drain() == DrainReport(over=False, open=1)
    lab.vllm.running = 0
    await lab.over()


async def test_the_first_question_sets_the_bound(lab: Lab) -> None:
    lab.vllm.running = 2
    begun = time.monotonic()
    assert not (await lab.drain(1.5)).over
    await lab.drain(1000.0)
    assert await lab.over() == DrainReport(over=True, open=2)
    assert time.monotonic() - begun > 1.4
    assert lab.stage == "no longer waiting for 2 open requests: 1.5 s are over"


async def test_an_engine_without_metrics_is_not_taken_for_idle(lab: Lab) -> None:
    lab.vllm.silent = True
    begun = time.monotonic()
    await lab.drain(2.0)
    assert (await lab.over()).open is None
    assert time.monotonic() - begun >= 2.0


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.WARMING, Phase.RESTARTING, Phase.FAILED])
async def test_where_nothing_serves_there_is_nothing_to_wait_for(lab: Lab, phase: Phase) -> None:
    lab.vllm.running = 3
    lab.head.loop.state = dataclasses.replace(lab.head.loop.state, phase=phase)
    lab.head.context.record.enter(phase)
    assert await lab.drain() == DrainReport(over=True)
    assert lab.head.context.record.phase is phase
    assert lab.vllm.looks == []


async def test_a_dead_engine_is_not_waited_for(lab: Lab) -> None:
    lab.head.loop.feed(ProcessEnded("engine-core"))
    assert (await lab.drain()).over
    assert lab.head.context.record.phase is Phase.SERVING


async def test_an_engine_that_dies_meanwhile_ends_the_wait_and_stays_dead(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.vllm.running = 2
    head = lab.head
    assert head.engine is not None

    async def save(failure: Failure) -> AgentEvent:
        assert (await lab.drain()).over, "whoever waits is told before the evidence is saved"
        return EvidenceSaved(None)

    monkeypatch.setattr(head.engine, "_save_evidence", save)
    assert not (await lab.drain()).over
    head.loop.feed(ProcessEnded("engine-core"))
    await until(lambda: head.context.record.phase is Phase.FAILED)
    failures = head.context.record.failures
    assert isinstance(next_step(head.context.plan, {}, failures, [], 0, time.time()), Restart), "else it came back"
    assert [one.cause for one in failures] == [Cause.ENGINE_CORE_DIED]
    assert head.context.record.restarts == []
    assert head.context.record.status().verdict.health is Health.DEAD


async def test_the_end_of_a_member_ends_the_wait(lab: Lab) -> None:
    lab.vllm.running = 2
    await lab.drain()
    lab.head.context.record.enter(Phase.DRAINING, "ending everything")
    assert (await lab.drain()).over
    assert lab.head.context.record.status().verdict.health is Health.STARTING
    await asyncio.sleep(0.6)
    assert lab.stage == "ending everything"


async def test_the_death_of_a_process_is_detected_during_a_drain(lab: Lab) -> None:
    lab.vllm.running = 2
    await lab.drain()
    lab.head.process_ended("engine-core", 1)
    assert lab.head.context.record.failure is not None
    assert lab.head.context.record.failure.cause is Cause.ENGINE_CORE_DIED


async def test_other_ranks_have_nothing_to_wait_for(make_plan: MakePlan, tmp_path: Path) -> None:
    worker = Member(make_plan(), 1, tmp_path, "secret")
    worker.context.record.enter(Phase.SERVING)
    assert worker.drain(SECONDS) == DrainReport(over=True)
    assert worker.context.record.phase is Phase.SERVING


@pytest.mark.parametrize("seconds", ["", "soon", "-1", "inf", "nan"])
async def test_a_bound_must_be_a_number(lab: Lab, seconds: str) -> None:
    async with lab.client.post("/v1/drain", params={"seconds": seconds}, headers=TOKEN) as answer:
        assert answer.status == 400
        assert f"seconds: {seconds!r}" in await answer.text()
    assert lab.head.context.record.phase is Phase.SERVING


async def test_a_drain_request_without_the_token_is_refused(lab: Lab) -> None:
    async with lab.client.post("/v1/drain?seconds=1") as answer:
        assert answer.status == 401
    assert lab.head.context.record.phase is Phase.SERVING
