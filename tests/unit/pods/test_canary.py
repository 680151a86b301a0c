"""Requests of the operator to the endpoint of a deployment, over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from dsv4_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    DeploymentStatus,
    DSV4Deployment,
    GroupPhase,
    GroupStatus,
    Reason,
)
from dsv4_operator.backends.pods import gateways
from dsv4_operator.backends.pods.gateways import CANARY_PATH, Canaries, problem_of
from dsv4_operator.builders import names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.lifecycle.observed import UNTRIED
from dsv4_runtime.contract.gateway import CanaryReport
from dsv4_runtime.contract.token import canary_token
from dsv4_testkit.pod_objects import deployment
from dsv4_testkit.waiting import until

KEY = "0" * 64
SERVING = (GroupStatus(index=0, phase=GroupPhase.SERVING, incarnation=1, engine_generation=1),)
LATER = (GroupStatus(index=0, phase=GroupPhase.SERVING, incarnation=1, engine_generation=2),)
AWAY = (GroupStatus(index=0, phase=GroupPhase.RECOVERING, incarnation=1),)
GOOD = CanaryReport(ok=True, gateway="g").to_json().encode()


def pod(name: str, *, ready: bool = True, address: str = "127.0.0.1", **status: Any) -> Manifest:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {"name": name, "uid": name},
        "spec": {"nodeName": "n"},
        "status": {"phase": "Running", "podIP": address, "conditions": conditions, **status},
    }


class World:
    """Canaries of one deployment; `answer` is the response to their requests."""

    def __init__(self, *, through_service: bool = False, key: str | None = KEY, real: bool = False) -> None:
        self.pods: list[Manifest] = [pod("a"), pod("b")]
        self.asked: list[tuple[str, str]] = []
        self.changed: list[tuple[str, str]] = []
        self.answer: str | Exception | None = None
        self.report: CanaryReport | None = None
        self.reports: list[tuple[str, str, CanaryReport]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.deployment: DSV4Deployment = deployment("nano.yaml")

        async def token_key(_: DSV4Deployment) -> str | None:
            return key

        async def ask(url: str, token: str) -> tuple[str | None, CanaryReport | None]:
            self.asked.append((url, token))
            await self.gate.wait()
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer, self.report

        self.canaries = Canaries(
            token_key,
            lambda *_: self.pods,
            through_service=through_service,
            changed=lambda *name: self.changed.append(name),
            ask=None if real else ask,
            reported=lambda *found: self.reports.append(found),
        )

    def problem(self, groups: tuple[GroupStatus, ...] = SERVING) -> str | None:
        return self.canaries.problem(self.deployment, groups)

    async def settled(self, groups: tuple[GroupStatus, ...] = SERVING) -> str | None:
        """Check once the next request is due, wait until it is complete, and return the result of a second check."""
        for known in self.canaries._known.values():
            known.canary = replace(known.canary, due=0.0)
        self.problem(groups)
        for known in self.canaries._known.values():
            if known.task is not None:
                await asyncio.wait({known.task}, timeout=60)
        return self.problem(groups)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    found = World()
    yield found
    await found.canaries.close()


async def test_no_canary_is_sent_while_no_group_serves(world: World) -> None:
    assert world.problem(AWAY) == UNTRIED
    await asyncio.sleep(0)
    assert world.asked == []


async def test_the_caller_never_waits_and_is_notified_of_changed_results(world: World) -> None:
    world.gate.clear()
    began = time.monotonic()
    for _ in range(5):
        assert world.problem() == UNTRIED
        await asyncio.sleep(0)
    assert time.monotonic() - began < 60
    assert len(world.asked) == 1, "at most one request is under way"
    world.gate.set()
    assert await world.settled() is None
    assert world.changed == [("team", "nano")]
    assert world.asked[0][1] == canary_token(KEY)


async def test_canaries_go_to_the_service_in_a_pod_and_to_a_ready_gateway_elsewhere(world: World) -> None:
    inside = World(through_service=True)
    assert await inside.settled() is None
    assert inside.asked[0][0] == "http://nano.team.svc:8000"
    await inside.canaries.close()
    world.pods = [pod("a", ready=False, address="10.0.0.1"), pod("b", address="fd00::1")]
    assert await world.settled() is None
    assert world.asked[0][0] == "http://[fd00::1]:8000"


async def test_a_gateway_that_is_not_ready_never_counts_and_its_reason_is_reported(world: World) -> None:
    world.pods = [pod("a", ready=False)]
    world.answer = "agent credentials rejected by group 0 (401)"
    assert await world.settled() == "no gateway is ready: a: agent credentials rejected by group 0 (401)"
    other = World()
    other.pods = world.pods
    assert await other.settled() == "no gateway is ready: a: not ready"
    await other.canaries.close()


@pytest.mark.parametrize(
    ("pods", "told"),
    [
        ([], "there is none yet"),
        (
            [
                pod(
                    "a",
                    phase="Pending",
                    conditions=[],
                    containerStatuses=[
                        {"image": "r:1", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such"}}}
                    ],
                )
            ],
            "a is Pending; ImagePullBackOff of r:1",
        ),
        (
            [
                pod(
                    "a",
                    phase="Pending",
                    conditions=[{"type": "PodScheduled", "reason": "Unschedulable", "message": "0/2 nodes"}],
                )
            ],
            "a is Pending; Unschedulable: 0/2 nodes",
        ),
    ],
)
async def test_reasons_of_gateways_that_do_not_run_are_those_of_kubernetes(
    world: World, pods: list[Manifest], told: str
) -> None:
    world.pods = pods
    assert await world.settled() == f"no gateway is ready: {told}"
    assert world.asked == []


async def test_one_failure_is_confirmed_before_it_counts(world: World) -> None:
    assert await world.settled() is None
    world.answer = "no healthy engine"
    known = world.canaries._known["team", "nano"]
    known.canary = gateways.adopted(None, known.canary.lives, known.canary.gateways, 0.0)
    assert await world.settled() is None
    assert await world.settled() == "no healthy engine"
    world.answer = None
    assert await world.settled() is None


async def test_a_new_engine_has_to_answer(world: World) -> None:
    assert await world.settled() is None
    assert world.problem(LATER) == UNTRIED
    assert await world.settled(LATER) is None


@pytest.mark.parametrize("answer", [None, "no healthy engine"])
async def test_requests_are_sent_when_they_are_due_until_no_group_serves(
    world: World, monkeypatch: pytest.MonkeyPatch, answer: str | None
) -> None:
    """Without a further check: at rest a deployment is reconciled less often."""
    for name in ("PERIOD_SECONDS", "AGAIN_SECONDS"):
        monkeypatch.setattr(f"dsv4_operator.lifecycle.observed.{name}", 0.05)
    world.answer = answer
    assert world.problem() == UNTRIED
    await until(lambda: len(world.asked) >= 4)
    assert world.changed == [("team", "nano")]
    assert world.problem(AWAY) == answer
    (known,) = world.canaries._known.values()
    if known.task is not None:
        await known.task
    asked = len(world.asked)
    await asyncio.sleep(0.3)
    assert len(world.asked) == asked
    world.problem()
    await until(lambda: len(world.asked) > asked)
    world.canaries.release("team", "nano")
    asked = len(world.asked)
    await asyncio.sleep(0.3)
    assert len(world.asked) == asked


async def test_an_exception_is_a_problem_and_ends_nothing(world: World) -> None:
    world.answer = RuntimeError("a mistake")
    assert await world.settled() == "RuntimeError: a mistake"
    world.answer = None
    assert await world.settled() is None


async def test_no_canary_is_sent_without_a_token_key() -> None:
    world = World(key=None)
    assert await world.settled() == "the operator has no token key of the deployment"
    assert world.asked == []
    await world.canaries.close()


async def test_a_deployment_of_the_same_name_is_another_one(world: World) -> None:
    assert await world.settled() is None
    other = world.deployment.metadata.model_copy(update={"uid": "another"})
    world.deployment = world.deployment.model_copy(update={"metadata": other})
    assert world.problem() == UNTRIED


async def test_an_operator_that_takes_over_a_ready_deployment_takes_nothing_back(world: World) -> None:
    ready = Condition(
        type=ConditionType.READY,
        status=ConditionStatus.TRUE,
        observed_generation=1,
        last_transition_time=1.0,
        reason=Reason.ALL_GROUPS_READY,
        message="",
    )
    world.deployment = world.deployment.model_copy(
        update={"status": DeploymentStatus(groups=SERVING, conditions=(ready,))}
    )
    assert world.problem() is None
    world.canaries.release("team", "nano")
    lost = ready.model_copy(
        update={
            "status": ConditionStatus.FALSE,
            "reason": Reason.ENDPOINT_NOT_READY,
            "message": "1 of 1 groups answer, the endpoint does not: a 401",
        }
    )
    world.deployment = world.deployment.model_copy(
        update={"status": DeploymentStatus(groups=SERVING, conditions=(lost,))}
    )
    assert world.problem() == "a 401"
    world.canaries.release("team", "nano")
    assert world.problem(LATER) == UNTRIED, "the engine is another one"


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def served(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> tuple[web.AppRunner, int]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = int(runner.addresses[0][1])
    monkeypatch.setattr(names, "GATEWAY_PORT", port)
    return runner, port


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (200, GOOD, None),
        (503, CanaryReport(ok=False, reason="no healthy engine", gateway="g").to_json().encode(), "no healthy engine"),
        (401, CanaryReport(ok=False, reason="wrong canary token").to_json().encode(), "wrong canary token"),
        (500, GOOD, "HTTP 500"),
        (200, CanaryReport(ok=False, reason="no answer within 10 s").to_json().encode(), "no answer within 10 s"),
        (404, b'{"error": "not found"}', "differs from that of the operator"),
        (200, b"hello", "differs from that of the operator"),
        (200, b"", "differs from that of the operator"),
        (200, b"[" * 100_000, "differs from that of the operator"),
        (302, b"", "differs from that of the operator"),
        (200, b'{"ok": true, "reason": "' + b"x" * 10**6 + b'"}', "differs from that of the operator"),
        (503, b'{"ok": false, "reason": "' + b"x\\n" * 5000 + b'"}', "x x x"),
    ],
)
async def test_every_response_is_judged(
    status: int, body: bytes, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers: list[tuple[str, str | None]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        headers.append((request.path, request.headers.get("Authorization")))
        return web.Response(status=status, body=body, headers={"Location": "http://127.0.0.1:1/"})

    runner, _ = await served(answer, monkeypatch)
    world = World(real=True)
    try:
        told = await world.settled()
    finally:
        await world.canaries.close()
        await runner.cleanup()
    assert headers[0] == (CANARY_PATH, f"Bearer {canary_token(KEY)}")
    assert (told is None) == (problem is None)
    assert (problem or "") in (told or "")
    assert len(told or "") < 600


async def test_a_silent_gateway_is_a_problem_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(600)
        return web.Response()

    monkeypatch.setattr(gateways, "_SECONDS", 0.2)
    runner, _ = await served(answer, monkeypatch)
    world = World(real=True)
    try:
        assert "no answer within" in (await world.settled() or "")
    finally:
        await world.canaries.close()
        await runner.cleanup()


async def test_a_refused_connection_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "GATEWAY_PORT", 9)
    world = World(real=True)
    try:
        assert "http://127.0.0.1:9: Cannot connect" in (await world.settled() or "")
    finally:
        await world.canaries.close()


async def test_close_ends_requests_that_are_under_way(world: World) -> None:
    world.gate.clear()
    world.problem()
    await asyncio.sleep(0)
    await asyncio.wait_for(world.canaries.close(), 60)
    assert world.changed == []


def test_a_report_of_a_later_version_is_read() -> None:
    assert problem_of(200, b'{"ok": true, "gateway": "g", "more": [1]}') is None


async def test_reports_of_gateways_are_passed_on(world: World) -> None:
    world.report = CanaryReport(ok=True, gateway="a")
    assert await world.settled() is None
    assert world.reports == [("team", "nano", world.report)]
