"""What the watch of the deployments says, and whose turn it is then."""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4_operator.api import ClusterPolicy, DeploymentStatus, DSV4Deployment, parse
from dsv4_operator.backends import table
from dsv4_operator.backends.local.backend import LocalBackend
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.controller.admission import judge
from dsv4_operator.controller.deployments import Dependencies, Deployments
from dsv4_operator.controller.reconcile import Endpoints
from dsv4_operator.kube import Kube, Manifest
from dsv4_operator.lifecycle import Event
from dsv4_operator.lifecycle.observed import GroupKey, Observed
from dsv4_operator.planning.facts import Facts
from dsv4_runtime.contract import GroupPlan
from dsv4_testkit.fake_kube import FakeKube
from dsv4_testkit.waiting import free_ports

NANO = Path(__file__).parents[3] / "examples" / "nano.yaml"
KEY = ("team", "nano")


def server_of(**spec: object) -> FakeKube:
    """One deployment, as the API server has it."""
    live: Manifest = yaml.safe_load(NANO.read_text())
    live["metadata"] |= {"name": "nano", "namespace": "team", "generation": 1}
    live["spec"] |= spec
    return FakeKube([live])


def live(server: FakeKube) -> Manifest:
    return copy.deepcopy(server.objects["DSV4Deployment", *KEY])


class NoMachines:
    """A backend that has no nodes and no members."""

    async def facts(self, _: DSV4Deployment) -> Facts:
        return Facts((), isolated=True, state_root="", weights_root="", ray_token_file="", placed={})

    async def observe(self, deployment: DSV4Deployment, group: int) -> Observed:
        return Observed(GroupKey.of(deployment, group), ())

    async def ensure_frontend(self, _: DSV4Deployment, __: DeploymentStatus) -> None:
        return

    def endpoint_problem(self, _: DSV4Deployment, __: object) -> None:
        return

    def reserve(self, _deployment: DSV4Deployment, _plan: GroupPlan) -> None:
        raise AssertionError("nothing can be planned")

    async def release(self, namespace: str, name: str) -> None:
        return


async def test_what_was_written_here_is_no_news() -> None:
    server, backend = server_of(), NoMachines()
    kube: Any = server
    found: Kube = kube
    made: Any = backend
    dependencies = Dependencies(
        found, lambda _: made, lambda _: Endpoints("", ""), lambda *_: None, clock=lambda: 1000.0
    )
    deployments = Deployments(dependencies)
    assert deployments.told(live(server), gone=False) == KEY
    await deployments.look(KEY)
    assert len(server.writes()) == 1
    echo = live(server)
    assert deployments.told(echo, gone=False) is None
    # A look that finds all as it was writes nothing.
    await deployments.look(KEY)
    assert len(server.writes()) == 1
    # Somebody changed it.
    changed = live(server)
    changed["metadata"] |= {"resourceVersion": "9", "generation": 2}
    assert deployments.told(changed, gone=False) == KEY
    # Another one of that name.
    other = copy.deepcopy(echo)
    other["metadata"]["uid"] = "v"
    assert deployments.told(other, gone=False) == KEY
    assert deployments.told(echo, gone=True) == KEY
    assert not deployments.knows(KEY)


@pytest.fixture
async def machine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalBackend]:
    """A third backend: the operator's members as processes of this machine. Nothing else is told of it."""
    # Short, because Ray has sockets below it.
    with tempfile.TemporaryDirectory(prefix="d") as root:
        state = DeploymentState(Path(root), "nano")
        state.prepare()
        backend = LocalBackend(state, isolated=False, changed=lambda: None)
        monkeypatch.setitem(table.BACKENDS, "Processes", lambda _: backend)
        yield backend
        for _, incarnation, _ in list(backend._members):
            async with asyncio.timeout(30):
                while not await backend.fence(parse(live(server_of())), 0, incarnation):
                    await asyncio.sleep(0.1)
        await backend.close()


def deployments_of(server: Any, told: list[Event]) -> Deployments:
    nothing: Any = object()
    backends = table.Backends(table.BackendDependencies(server, nothing, nothing, "", ClusterPolicy(), lambda *_: None))
    return Deployments(
        Dependencies(server, backends.of, lambda _: Endpoints("", ""), lambda _, event: told.append(event))
    )


async def test_a_third_backend_is_one_line_in_the_table(machine: LocalBackend) -> None:
    ports = dict(zip(("api", "dashboard", "gcs", "agent"), free_ports(4), strict=True))
    server, told = server_of(backend="Processes", network={"ports": ports}), list[Event]()
    # Its weights are missing, so the agent gets no further than that.
    server.objects["DSV4Deployment", *KEY]["spec"]["model"]["source"] = {"path": "/missing"}
    deployments = deployments_of(server, told)
    deployments.told(live(server), gone=False)
    async with asyncio.timeout(30):
        while not machine._members:
            await deployments.look(KEY)
            status = live(server)["status"]
            assert [group["phase"] for group in status["groups"]] == ["Forming"], status["conditions"]
    ((group, incarnation, rank), member) = next(iter(machine._members.items()))
    assert (group, incarnation, rank) == (0, live(server)["status"]["groups"][0]["incarnation"], 0)
    assert Path(f"/proc/{member.agent}").exists()
    await deployments.close()


async def test_a_backend_that_the_operator_does_not_have_is_refused_with_those_that_it_has() -> None:
    server, told = server_of(backend="KubeRay"), list[Event]()
    deployments = deployments_of(server, told)
    deployments.told(live(server), gone=False)
    await deployments.look(KEY)
    said = 'spec.backend: "KubeRay" is no backend of this operator; write one of Pods, or leave it out'
    (accepted,) = [one for one in live(server)["status"]["conditions"] if one["type"] == "Accepted"]
    assert (accepted["status"], accepted["message"]) == ("False", said)
    assert not live(server)["status"]["groups"]
    assert judge(live(server)).refusal == said
    await deployments.close()
