"""Exact ownership on a real API server: every change of a frontend object by another field manager is undone."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from clusterkit.client import Cluster as ControlPlane
from pods_world import NAME, POLICY, manifest

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, GroupPhase, GroupStatus, parse
from dsv4_operator.backends.pods import Cluster, PodsBackend, frontend
from dsv4_operator.builders import names
from dsv4_operator.kube import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    DSV4_DEPLOYMENTS,
    SERVICES,
    Client,
    Manifest,
    OwnedCache,
    PodCache,
    Resource,
    find_access,
)
from dsv4_operator.kube.resources import NETWORK_POLICIES, POD_DISRUPTION_BUDGETS

pytestmark = pytest.mark.usefixtures("definition")

KINDS = (SERVICES, CONFIG_MAPS, DEPLOYMENTS, NETWORK_POLICIES, POD_DISRUPTION_BUDGETS)
PLACED = DeploymentStatus(groups=(GroupStatus(index=0, phase=GroupPhase.FORMING, incarnation=1),))
SERVER_FIELDS = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields")
ADDED: dict[str, list[Manifest]] = {
    "Service": [
        {"externalIPs": ["192.0.2.1"]},
        {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}}},
        {"publishNotReadyAddresses": True},
        {"internalTrafficPolicy": "Local"},
        {"type": "NodePort"},
    ],
    "Deployment": [
        {"paused": True},
        {"minReadySeconds": 5},
        {"progressDeadlineSeconds": 30},
        {"template": {"spec": {"hostNetwork": True}}},
        {"template": {"spec": {"initContainers": [{"name": "in", "image": "intruder"}]}}},
        {"template": {"spec": {"priorityClassName": "system-node-critical"}}},
        {"template": {"spec": {"serviceAccountName": "intruder"}}},
        {"template": {"spec": {"nodeSelector": {"in": "truder"}}}},
        {"template": {"spec": {"affinity": {"nodeAffinity": {}}}}},
        {"template": {"metadata": {"annotations": {"in": "truder"}}}},
        {"template": {"metadata": {"labels": {"in": "truder"}}}},
    ],
    "NetworkPolicy": [{"egress": [{}], "policyTypes": ["Ingress", "Egress"]}, {"ingress": [{}]}],
    "PodDisruptionBudget": [{"unhealthyPodEvictionPolicy": "AlwaysAllow"}],
}


def mutations(found: Manifest) -> Iterator[Manifest]:
    """Yield JSON merge patches: each field of the object changed, removed or extended, and fields that were not set."""
    for part in ("spec", "data"):
        for path, value in _below(found.get(part), (part,)):
            for changed in _changed(value):
                yield _nested(path, changed)
    for added in ADDED.get(found["kind"], ()):
        yield {"spec": added}
    yield {"metadata": {"labels": {names.DEPLOYMENT: "another"}}}
    yield {"metadata": {"labels": {names.MANAGED_BY: None}}}
    yield {"metadata": {"labels": {f"{names.DOMAIN}/in": "truder"}}}
    if found["kind"] == "ConfigMap":
        yield {"binaryData": {"in": "dHJ1ZGVy"}}
        yield {"immutable": True}


def _below(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if value is None:
        return
    yield path, value
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _below(part, (*path, name))


def _changed(value: Any) -> Iterator[Any]:
    match value:
        case bool():
            yield not value
        case int():
            yield value + 1
        case str():
            yield value + "x"
        case [dict(), *_]:
            yield [*value, {**value[0], "name": "intruder"}]
            yield [{**value[0], "name": "intruder"}]
            for key, text in value[0].items():
                for other in _changed(text):
                    yield [{**value[0], key: other}, *value[1:]]
        case [*_]:
            yield [*value, "intruder"]
        case dict():
            yield {"intruder": "intruder"}


def _nested(path: tuple[str, ...], value: Any) -> Manifest:
    for name in reversed(path):
        value = {name: value}
    found: Manifest = value
    return found


def plain(found: Manifest) -> Manifest:
    """Return the object without the fields that the API server and Kubernetes' controllers write."""
    kept = copy.deepcopy({key: value for key, value in found.items() if key not in ("status", "apiVersion", "kind")})
    kept["metadata"] = {key: value for key, value in kept["metadata"].items() if key not in SERVER_FIELDS}
    kept["metadata"].pop("annotations", None)
    return kept


class FrontendWorld:
    """A backend that maintains the frontend of one deployment, and watches it."""

    def __init__(self, kube: Client, backend: PodsBackend, deployment: DSV4Deployment) -> None:
        self.kube, self.backend, self.deployment = kube, backend, deployment

    async def objects(self) -> dict[tuple[str, str], Manifest]:
        chosen = names.selector(names.labels(NAME))
        found = {}
        for resource in KINDS:
            for one in await self.kube.list(resource, self.deployment.metadata.namespace, labels=chosen):
                found[resource.kind, one["metadata"]["name"]] = {**one, "kind": resource.kind}
        return found

    async def look(self) -> None:
        await self.backend.ensure_frontend(self.deployment, PLACED)

    async def repaired(self, resource: Resource, name: str, before: Manifest, what: str) -> None:
        for _ in range(100):
            await self.look()
            live = await self.kube.get(resource, self.deployment.metadata.namespace, name)
            if live is not None and plain(live) == plain(before):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{resource.kind} {name} is not repaired after {what}:\n{plain(live or {'metadata': {}})}")


@pytest.fixture
async def world(cluster: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FrontendWorld]:
    monkeypatch.setattr(frontend, "_SETTLE_SECONDS", 0.0)
    async with Client(find_access(kubeconfig=cluster.kubeconfig)) as kube:
        deployment = parse(await kube.create(manifest(namespace)))
        pods = PodCache(kube, namespaces=(namespace,))
        owned = OwnedCache(kube, namespaces=(namespace,))
        tasks = [asyncio.create_task(pods.run()), asyncio.create_task(owned.run())]
        backend = PodsBackend(
            Cluster(kube, pods, runtime_image="dsv4.test/none:1", policy=POLICY, owned=owned), changed=lambda *_: None
        )
        found = FrontendWorld(kube, backend, deployment)
        for _ in range(20):
            await found.look()
            await asyncio.sleep(0.05)
        yield found
        await backend.close()
        await kube.delete(DSV4_DEPLOYMENTS, namespace, NAME)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def intruded(cluster: ControlPlane, path: str, change: str) -> bool:
    """Apply a JSON merge patch as another field manager; return whether the API server accepted it."""
    answer = cluster.http.patch(
        path,
        params={"fieldManager": "intruder"},
        content=change,
        headers={"Content-Type": "application/merge-patch+json"},
    )
    if not answer.is_client_error:
        answer.raise_for_status()
    return answer.is_success


@pytest.mark.parametrize("resource", KINDS, ids=lambda resource: resource.kind)
async def test_any_change_by_another_field_manager_is_undone(
    world: FrontendWorld, cluster: ControlPlane, resource: Resource
) -> None:
    namespace = world.deployment.metadata.namespace
    taken = 0
    for (kind, name), before in (await world.objects()).items():
        if kind != resource.kind:
            continue
        for change in mutations(before):
            what = json.dumps(change)
            if not await asyncio.to_thread(intruded, cluster, resource.path(namespace, name), what):
                continue
            taken += 1
            await world.repaired(resource, name, before, what)
    print(f"{resource.kind}: {taken} changes undone")
    assert taken >= 4


async def test_a_selector_key_of_another_applier_is_removed(world: FrontendWorld) -> None:
    before = (await world.objects())["Service", NAME]
    namespace = world.deployment.metadata.namespace
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME, "namespace": namespace},
        "spec": {
            "selector": {**before["spec"]["selector"], "in": "truder"},
            "ports": [{"name": "more", "port": 9, "protocol": "TCP"}],
        },
    }
    await world.kube.apply(foreign, manager="intruder")
    await world.repaired(SERVICES, NAME, before, "a foreign apply")


async def test_permitted_additions_of_other_clients_stay_without_repeated_writes(
    world: FrontendWorld, cluster: ControlPlane
) -> None:
    namespace, gateway = world.deployment.metadata.namespace, f"{NAME}-0-gateway"
    cluster.kubectl("rollout", "restart", f"deployment/{gateway}", "-n", namespace)
    cluster.kubectl("label", "service", NAME, "team=models", "-n", namespace)
    cluster.kubectl("annotate", "service", NAME, "example.com/owner=me", "-n", namespace)
    for _ in range(20):
        await world.look()
        await asyncio.sleep(0.05)
    at_rest = await world.objects()
    template = at_rest["Deployment", gateway]["spec"]["template"]["metadata"]["annotations"]
    assert "kubectl.kubernetes.io/restartedAt" in template
    about = at_rest["Service", NAME]["metadata"]
    assert (about["labels"]["team"], about["annotations"]["example.com/owner"]) == ("models", "me")
    for _ in range(5):
        await world.look()
        await asyncio.sleep(0.05)
    assert {key: plain(one) for key, one in (await world.objects()).items()} == {
        key: plain(one) for key, one in at_rest.items()
    }
    versions = [one["metadata"]["resourceVersion"] for key, one in at_rest.items() if key[0] == "Service"]
    again = [one["metadata"]["resourceVersion"] for key, one in (await world.objects()).items() if key[0] == "Service"]
    assert again == versions, "nothing is written at rest"
