"""A namespace with an operator's process, from a user's view; KWOK simulates the nodes, and agents are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from clusterkit.client import Cluster as ControlPlane
from operator_process import OperatorProcess

from dsv4_operator.api import parse
from dsv4_operator.builders import names
from dsv4_operator.kube import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    DSV4_DEPLOYMENTS,
    EVENTS,
    PODS,
    SECRETS,
    SERVICES,
    Client,
    Manifest,
    find_access,
)
from dsv4_operator.planning import revision
from dsv4_testkit.scripted_agent import ScriptedAgents, routed

NAME = "kept"


def manifest(namespace: str, name: str = NAME, **spec: object) -> dict[str, Any]:
    return {
        "apiVersion": "dsv4.dev/v1alpha1",
        "kind": "DSV4Deployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"variant": "Nano", "source": {"nano": {"seed": 0}}},
            "topology": {
                "hardware": "CPU",
                "nodesPerGroup": 2,
                "nodeSelector": {"type": "kwok"},
                "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
            },
            "engine": {"timeouts": {"drain": "1s"}},
            "recovery": {"maxRestarts": 100, "backoff": {"base": "1s", "max": "2s"}, "nodeLoss": {"after": "1s"}},
            **spec,
        },
    }


class World:
    """A namespace with its operator, from a user's view."""

    def __init__(self, kube: Client, namespace: str, operator: OperatorProcess) -> None:
        self.kube, self.namespace, self.operator = kube, namespace, operator

    async def live(self, name: str = NAME) -> Manifest:
        found = await self.kube.get(DSV4_DEPLOYMENTS, self.namespace, name)
        assert found is not None, f"{name} is gone"
        return found

    async def until(
        self, what: str, true: Callable[[Manifest], bool], name: str = NAME, seconds: float = 60.0
    ) -> Manifest:
        """Wait until a deployment meets a condition."""
        deadline = time.monotonic() + seconds
        while True:
            found = await self.live(name)
            if true(found):
                return found
            if time.monotonic() > deadline:
                said = self.operator.log.read_text()[-3000:]
                raise AssertionError(f"{what}: not so after {seconds:.0f} s: {found.get('status')}\n{said}")
            await asyncio.sleep(0.1)

    async def serving(self, incarnation: int, name: str = NAME) -> Manifest:
        return await self.until(
            f"incarnation {incarnation} serves",
            lambda found: phase(found) == "Serving" and group(found).get("incarnation") == incarnation,
            name,
        )

    async def at_rest(self) -> dict[str, str]:
        """Wait until the present specification is served, and return its pods."""
        deadline = time.monotonic() + 90
        while True:
            found, pods = await self.live(), await self.pods()
            served = group(found)
            stem = f"{NAME}-0-i{served.get('incarnation')}"
            current = served.get("revision") == revision(parse(found))
            if phase(found) == "Serving" and current and set(pods) == {f"{stem}-r0", f"{stem}-r1"}:
                return pods
            if time.monotonic() > deadline:
                said = self.operator.log.read_text()[-3000:]
                raise AssertionError(f"no rest: {found.get('status')}, {sorted(pods)}\n{said}")
            await asyncio.sleep(0.2)

    async def change(
        self, name: str = NAME, *, annotations: dict[str, str | None] | None = None, **spec: object
    ) -> None:
        changes: Manifest = {"spec": spec} if spec else {}
        if annotations:
            changes["metadata"] = {"annotations": annotations}
        await self.kube.patch(DSV4_DEPLOYMENTS, self.namespace, name, changes)

    async def pods(self, name: str = NAME) -> dict[str, str]:
        """Return members by name with their uid, without those that are being deleted."""
        chosen = names.selector(names.labels(name, component=names.MEMBER))
        found = await self.kube.list(PODS, self.namespace, labels=chosen)
        return {
            pod["metadata"]["name"]: pod["metadata"]["uid"]
            for pod in found
            if "deletionTimestamp" not in pod["metadata"]
        }

    async def owned(self) -> set[tuple[str, str]]:
        """Return all objects that the operator created in this namespace, by kind and name."""
        chosen = f"{names.MANAGED_BY}={names.MANAGER}"
        kinds = (PODS, SERVICES, CONFIG_MAPS, SECRETS, DEPLOYMENTS)
        listed = [(kind, await self.kube.list(kind, self.namespace, labels=chosen)) for kind in kinds]
        return {(kind.kind, one["metadata"]["name"]) for kind, found in listed for one in found}

    async def versions(self) -> dict[str, str]:
        """Return the versions of the operator's objects, except gateways' pods: kubelets report their missing image."""
        found = {}
        for kind in (PODS, SERVICES, CONFIG_MAPS, SECRETS, DSV4_DEPLOYMENTS, EVENTS):
            for one in await self.kube.list(kind, self.namespace):
                if kind is PODS and one["metadata"]["labels"][names.COMPONENT] != names.MEMBER:
                    continue
                if kind is EVENTS and not str(one.get("reportingController")).startswith("dsv4"):
                    continue
                found[f"{kind.kind}/{one['metadata']['name']}"] = one["metadata"]["resourceVersion"]
        return found

    async def event(self, reason: str) -> Manifest:
        """Return the only event with that reason, which is created shortly after its cause."""
        deadline = time.monotonic() + 60
        while True:
            found = [one for one in await self.kube.list(EVENTS, self.namespace) if one["reason"] == reason]
            assert len(found) <= 1, found
            if found:
                return found[0]
            assert time.monotonic() < deadline, self.operator.log.read_text()[-2000:]
            await asyncio.sleep(0.2)


def phase(found: Manifest) -> str:
    return str((found.get("status") or {}).get("phase", ""))


def group(found: Manifest, index: int = 0) -> Manifest:
    groups = (found.get("status") or {}).get("groups") or []
    return next((one for one in groups if one["index"] == index), {})


def condition(found: Manifest, kind: str) -> Manifest:
    conditions = (found.get("status") or {}).get("conditions") or []
    return next((one for one in conditions if one["type"] == kind), {})


@pytest.fixture(scope="module", autouse=True)
def addresses(cluster: ControlPlane) -> Iterator[None]:
    """Make the addresses of KWOK's pods local to this machine."""
    with routed(cluster.state.addresses.fake_pods):
        yield


@pytest.fixture
async def kube(cluster: ControlPlane) -> AsyncIterator[Client]:
    async with Client(find_access(kubeconfig=cluster.kubeconfig)) as found:
        yield found


@contextlib.asynccontextmanager
async def operated(
    kubeconfig: Path, kube: Client, namespace: str, log: Path, more: Sequence[str] = ()
) -> AsyncIterator[World]:
    """Run a leading operator in the namespace; delete all its deployments and pods at the end of the block."""
    operator = OperatorProcess(kubeconfig, namespace, log, identity="always-the-same", more=more)
    operator.start()
    try:
        await operator.until_leading()
        yield World(kube, namespace, operator)
    finally:
        operator.kill()
        for one in await kube.list(DSV4_DEPLOYMENTS, namespace):
            await kube.delete(DSV4_DEPLOYMENTS, namespace, one["metadata"]["name"])
        for pod in await kube.list(PODS, namespace):
            await kube.delete(PODS, namespace, pod["metadata"]["name"], grace_seconds=0)


@pytest.fixture
async def agents(kube: Client) -> AsyncIterator[ScriptedAgents]:
    """Run agents of every member that is created, with scripts that a test may change."""
    async with ScriptedAgents(kube) as running:
        yield running


@pytest.fixture
async def world(
    operator_kubeconfig: Path, kube: Client, agents: ScriptedAgents, namespace: str, tmp_path: Path
) -> AsyncIterator[World]:
    """Yield the namespace with `agents`."""
    async with operated(operator_kubeconfig, kube, namespace, tmp_path / "operator.log") as found:
        yield found
