"""Drain requests of both backends to a head's agent."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from dsv4_operator.api import DSV4Deployment, Metadata
from dsv4_operator.backends.base import CALL_SECONDS, Backend, BackendError
from dsv4_operator.backends.local import backend as local
from dsv4_operator.backends.local.backend import LocalBackend
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.backends.pods import PodsBackend
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.builders import names
from dsv4_operator.kube import AlreadyExists
from dsv4_runtime import client
from dsv4_runtime.contract import MemberPorts
from dsv4_runtime.contract.token import CHALLENGE, challenge, new_token
from dsv4_testkit.descriptors import no_descriptors
from dsv4_testkit.documents import member_plan
from dsv4_testkit.pod_objects import owners
from dsv4_testkit.waiting import Pauses

METADATA = Metadata(namespace="team", name="d", uid="uid-d")
DEPLOYMENT = DSV4Deployment.model_construct(metadata=METADATA)
INCARNATION = 3
DRAIN_SECONDS = client._DRAIN_SECONDS


class Agent:
    """Head's agent with a configurable response."""

    def __init__(self) -> None:
        self.token = new_token("secret")
        self.answer: web.Response | dict[str, object] | None = {"over": False, "open": 2}
        """With None the agent accepts the request and does not respond."""
        self.asked: list[float] = []

    async def drain(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401, headers={CHALLENGE: challenge(self.token)})
        self.asked.append(float(request.query["seconds"]))
        if self.answer is None:
            await asyncio.sleep(600)
        if isinstance(self.answer, dict):
            return web.json_response(self.answer)
        assert self.answer is not None
        return self.answer


class Pods:
    """Cache with one pod."""

    def __init__(self, pod: dict[str, Any]) -> None:
        self._pod = pod

    def pods(self, *_: object) -> list[dict[str, Any]]:
        return [self._pod]

    def all(self) -> list[dict[str, Any]]:
        return [self._pod]


def pods_backend(port: int) -> PodsBackend:
    more = {"component": names.MEMBER, "group": 0, "incarnation": INCARNATION, "rank": 0}
    pod = {
        "metadata": {**names.metadata(DEPLOYMENT, names.member_name("d", 0, INCARNATION, 0), **more), "uid": "pod"},
        "spec": {"containers": [{"name": "agent", "ports": [{"name": "agent", "containerPort": port}]}]},
        "status": {"podIP": "127.0.0.1"},
    }
    return PodsBackend(Cluster(Secrets(), Pods(pod), runtime_image="none"), changed=lambda *_: None)


class Secrets:
    """API server that has only the deployment's token key."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    async def get(self, *_: object) -> dict[str, Any]:
        about = {"namespace": "team", "name": "d", "ownerReferences": owners("d", "uid-d")}
        return {"metadata": about, "data": {"key": base64.b64encode(b"secret").decode()}}

    async def create(self, *_: object, **_options: object) -> None:
        raise AlreadyExists("the Secret is there")


def local_backend(port: int, root: Path) -> LocalBackend:
    state = DeploymentState(root, "d")
    state.directory.mkdir()
    nothing: Any = SimpleNamespace(children={})
    found = LocalBackend(state, nothing, isolated=False, changed=lambda: None)
    ports = MemberPorts(agent=port, gcs=1, dashboard=2, api=3)
    head = member_plan(ports=ports)
    nobody: Any = None
    found._members[0, INCARNATION, 0] = local._RunningMember(nobody, head, nobody, 0, 0.0)
    return found


@pytest.fixture(params=["local", "pods"])
async def asked(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Backend, Agent]]:
    # A busy machine may be slow, and a drain does not end with a late answer.
    monkeypatch.setattr(client, "_DRAIN_SECONDS", 60.0)
    agent, app = Agent(), web.Application()
    app.router.add_post("/v1/drain", agent.drain)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    if request.param == "local":
        backend = local_backend(port, tmp_path)
        agent.token = new_token(backend._token_key)
        yield backend, agent
        await backend.close()
    else:
        pods = pods_backend(port)
        yield pods, agent
        await pods.close()
    await runner.cleanup()


async def test_a_drain_lasts_until_the_agent_reports_its_end(asked: tuple[Backend, Agent]) -> None:
    backend, agent = asked
    assert not await backend.drain(DEPLOYMENT, 0, INCARNATION, 7.5)
    assert not await backend.drain(DEPLOYMENT, 0, INCARNATION, 7.5)
    agent.answer = {"over": True, "open": 0, "whatALaterVersionKnows": 1}
    assert await backend.drain(DEPLOYMENT, 0, INCARNATION, 7.5)
    assert agent.asked == [7.5] * 3


@pytest.mark.parametrize("status", [401, 404, 405, 500])
async def test_an_agent_that_refuses_the_drain_ends_it(asked: tuple[Backend, Agent], status: int) -> None:
    backend, agent = asked
    agent.answer = web.Response(status=status)
    assert await backend.drain(DEPLOYMENT, 0, INCARNATION, 7.5)


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"over": "perhaps"})])
async def test_an_invalid_answer_ends_the_drain(asked: tuple[Backend, Agent], text: str) -> None:
    backend, agent = asked
    agent.answer = web.Response(text=text)
    assert await backend.drain(DEPLOYMENT, 0, INCARNATION, 7.5)


async def test_a_request_to_a_slow_agent_is_repeated_and_delays_no_reconciliation(
    asked: tuple[Backend, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, agent = asked
    agent.answer = None
    with monkeypatch.context() as patched, Pauses() as pauses:
        patched.setattr(client, "_DRAIN_SECONDS", DRAIN_SECONDS)
        assert not await backend.drain(DEPLOYMENT, 0, INCARNATION, 600.0)
    assert pauses.ran < CALL_SECONDS + 5.0
    agent.answer = {"over": True, "open": 0}
    assert await backend.drain(DEPLOYMENT, 0, INCARNATION, 600.0)


async def test_concurrent_first_requests_drain_an_agent(asked: tuple[Backend, Agent]) -> None:
    backend, _ = asked
    calls = (backend.drain(DEPLOYMENT, 0, INCARNATION, 7.5) for _ in range(3))
    assert await asyncio.gather(*calls) == [False] * 3


async def test_an_absent_member_gets_no_request(asked: tuple[Backend, Agent]) -> None:
    backend, agent = asked
    assert await backend.drain(DEPLOYMENT, 0, INCARNATION + 1, 7.5)
    assert agent.asked == []


async def test_members_that_cannot_be_asked_are_not_observed(asked: tuple[Backend, Agent]) -> None:
    """Otherwise a process without a free file descriptor would take them for silent, and their nodes for lost."""
    backend, _ = asked
    if isinstance(backend, LocalBackend):
        plan: Any = SimpleNamespace(incarnation=INCARNATION)
        backend._members[0, INCARNATION, 0].plan = plan

    async def observes() -> bool:
        try:
            return len((await backend.observe(DEPLOYMENT, 0)).members) == 1
        except (OSError, BackendError) as error:
            return "Too many open files" not in str(error)

    with no_descriptors():
        async with asyncio.timeout(60):
            while await observes():
                await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        while not await observes():
            await asyncio.sleep(0.05)
