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
from dsv4_testkit.waiting import free_ports

NANO = Path(__file__).parents[3] / "examples" / "nano.yaml"
KEY = ("team", "nano")


class Server:
    """One deployment, as the API server has it."""

    def __init__(self) -> None:
        self.live: Manifest = yaml.safe_load(NANO.read_text())
        self.live["metadata"] |= {"name": "nano", "namespace": "team", "uid": "u", "resourceVersion": "5"}
        self.live["metadata"]["generation"] = 1
        self.writes = 0

    async def get(self, *_: object) -> Manifest:
        return copy.deepcopy(self.live)

    async def replace(self, manifest: Manifest, **_: object) -> Manifest:
        assert manifest["metadata"]["resourceVersion"] == self.live["metadata"]["resourceVersion"]
        self.writes += 1
        self.live["status"] = copy.deepcopy(manifest["status"])
        self.live["metadata"]["resourceVersion"] = str(5 + self.writes)
        return copy.deepcopy(self.live)


class NoMachines:
    """A backend that has no nodes and no members."""

    async def facts(self, _: DSV4Deployment) -> Facts:
        return Facts((), isolated=True, state_root="", weights_root="", ray_token_file="", placed={})

    async def observe(self, deployment: DSV4Deployment, group: int) -> Observed:
        return Observed(GroupKey.of(deployment, group), ())

    async def ensure_frontend(self, _: DSV4Deployment, __: DeploymentStatus) -> None:
        return

    def reserve(self, _deployment: DSV4Deployment, _plan: GroupPlan) -> None:
        raise AssertionError("nothing can be planned")

    async def release(self, namespace: str, name: str) -> None:
        return


async def test_what_was_written_here_is_no_news() -> None:
    server, backend = Server(), NoMachines()
    kube: Any = server
    found: Kube = kube
    made: Any = backend
    dependencies = Dependencies(
        found, lambda _: made, lambda _: Endpoints("", ""), lambda *_: None, clock=lambda: 1000.0
    )
    deployments = Deployments(dependencies)
    assert deployments.told(await server.get(), gone=False) == KEY
    await deployments.look(KEY)
    assert server.writes == 1
    echo = await server.get()
    assert deployments.told(echo, gone=False) is None
    # A look that finds all as it was writes nothing.
    await deployments.look(KEY)
    assert server.writes == 1
    # Somebody changed it.
    changed = await server.get()
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
                while not await backend.fence(parse(Server().live), 0, incarnation):
                    await asyncio.sleep(0.1)
        await backend.close()


def deployments_of(server: Any, told: list[Event]) -> Deployments:
    nothing: Any = object()
    backends = table.Backends(table.BackendDependencies(server, nothing, nothing, "", ClusterPolicy(), lambda *_: None))
    return Deployments(
        Dependencies(server, backends.of, lambda _: Endpoints("", ""), lambda _, event: told.append(event))
    )


async def test_a_third_backend_is_one_line_in_the_table(machine: LocalBackend) -> None:
    server, told = Server(), list[Event]()
    ports = dict(zip(("api", "dashboard", "gcs", "agent"), free_ports(4), strict=True))
    server.live["spec"] |= {"backend": "Processes", "network": {"ports": ports}}
    # Its weights are missing, so the agent gets no further than that.
    server.live["spec"]["model"]["source"] = {"path": "/missing"}
    deployments = deployments_of(server, told)
    deployments.told(await server.get(), gone=False)
    async with asyncio.timeout(30):
        while not machine._members:
            await deployments.look(KEY)
            status = server.live["status"]
            assert [group["phase"] for group in status["groups"]] == ["Forming"], status["conditions"]
    ((group, incarnation, rank), member) = next(iter(machine._members.items()))
    assert (group, incarnation, rank) == (0, server.live["status"]["groups"][0]["incarnation"], 0)
    assert Path(f"/proc/{member.agent}").exists()
    await deployments.close()


async def test_a_backend_that_the_operator_does_not_have_is_refused_with_those_that_it_has() -> None:
    server, told = Server(), list[Event]()
    server.live["spec"]["backend"] = "KubeRay"
    deployments = deployments_of(server, told)
    deployments.told(await server.get(), gone=False)
    await deployments.look(KEY)
    said = 'spec.backend: "KubeRay" is no backend of this operator; write one of Pods, or leave it out'
    (accepted,) = [one for one in server.live["status"]["conditions"] if one["type"] == "Accepted"]
    assert (accepted["status"], accepted["message"]) == ("False", said)
    assert not server.live["status"]["groups"]
    assert judge(server.live).refusal == said
    await deployments.close()
