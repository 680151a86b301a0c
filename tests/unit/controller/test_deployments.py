"""What the watch of the deployments says, and whose turn it is then."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from dsv4_operator.api import DeploymentStatus, DSV4Deployment
from dsv4_operator.controller.deployments import Dependencies, Deployments
from dsv4_operator.controller.reconcile import Endpoints
from dsv4_operator.kube import Kube, Manifest
from dsv4_operator.lifecycle.observed import GroupKey, Observed
from dsv4_operator.planning.facts import Facts
from dsv4_runtime.contract import GroupPlan

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
        return Facts((), isolated=True, state_root="", weights_root="", ray_token_file="", seated={})

    async def observe(self, deployment: DSV4Deployment, group: int) -> Observed:
        return Observed(GroupKey.of(deployment, group), ())

    async def ensure_front(self, _: DSV4Deployment, __: DeploymentStatus) -> None:
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
