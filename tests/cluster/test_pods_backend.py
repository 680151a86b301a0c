"""The Pods backend on a real control plane; nodes and agents are stand-ins, everything else is real."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from clusterkit.client import Cluster as ControlPlane
from pods_world import NAME, POLICY, Loop, PodsWorld, manifest

from dsv4_operator.api import DeploymentStatus, GroupPhase, GroupStatus, parse
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods import Cluster, PodsBackend
from dsv4_operator.backends.pods.backend import NodesTaken
from dsv4_operator.backends.pods.fencing import FenceError
from dsv4_operator.backends.pods.ownership import ForeignObject, ObjectTerminating, OwnedObjects
from dsv4_operator.backends.pods.podgroups import SchedulerMissing
from dsv4_operator.builders import frontend, names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    DSV4_DEPLOYMENTS,
    PODS,
    SECRETS,
    SERVICES,
    VOLCANO_POD_GROUPS,
    Client,
    Conflict,
    Invalid,
    PodCache,
    Resource,
    find_access,
    resource_of,
)
from dsv4_operator.lifecycle.observed import Observed
from dsv4_operator.planning import PlanRefused, plan_group
from dsv4_runtime.contract import Cause, Phase
from dsv4_testkit.conformance import Conformance, fenced, formed, live, of, over, planned, until
from dsv4_testkit.scripted_agent import ScriptedAgents, routed

pytestmark = pytest.mark.usefixtures("definition")


@pytest.fixture(scope="module", autouse=True)
def addresses(cluster: ControlPlane) -> Iterator[None]:
    """Make the addresses of KWOK's pods local to this machine."""
    with routed(cluster.state.addresses.fake_pods):
        yield


@pytest.fixture
async def world(cluster: ControlPlane, namespace: str) -> AsyncIterator[PodsWorld]:
    writes: list[float] = []
    kube = Client(find_access(kubeconfig=cluster.kubeconfig), guard=lambda: writes.append(time.monotonic()))
    pods = PodCache(kube)
    created = await kube.create(manifest(namespace))
    deployment = parse(created)

    task = asyncio.create_task(pods.run())
    await asyncio.wait_for(pods.synced(), 60)
    async with ScriptedAgents(kube) as agents:
        world = PodsWorld(kube, pods, deployment, agents=agents, writes=writes)
        yield world
        await world.backend.close()
        await kube.delete(DSV4_DEPLOYMENTS, namespace, NAME)
        # Nodes that are used exclusively must be free for the next test.
        for pod in await kube.list(PODS, namespace):
            await kube.delete(PODS, namespace, pod["metadata"]["name"], grace_seconds=0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await kube.close()


class TestPods(Conformance):
    """See `Conformance`."""


async def test_a_groups_objects_exist_exactly_as_long_as_the_group(world: PodsWorld) -> None:
    await formed(world, 1)
    assert await world.all(PODS) == {f"{NAME}-0-i1-r0", f"{NAME}-0-i1-r1"}
    assert await world.all(SERVICES) == {f"{NAME}-0-i1", f"{NAME}-0-head"}
    uid = world.deployment.metadata.uid
    first, second = (names.mounted_name(NAME, uid, 0, number) for number in (1, 2))
    assert await world.all(CONFIG_MAPS) == {first}
    assert await world.all(SECRETS) == {names.token_key_name(NAME, uid), first}
    await fenced(world, 1)
    await formed(world, 2)
    assert await world.all(SERVICES) == {f"{NAME}-0-i2", f"{NAME}-0-head"}
    assert await world.all(CONFIG_MAPS) == {second}
    assert await world.all(SECRETS) == {names.token_key_name(NAME, uid), second}
    head = await world.kube.get(SERVICES, world.namespace, f"{NAME}-0-head")
    assert head is not None
    assert head["spec"]["selector"]["dsv4.dev/incarnation"] == "2"
    for resource in (PODS, SERVICES, CONFIG_MAPS, SECRETS):
        for one in await world.kube.list(resource, world.namespace, labels=names.selector(names.labels(NAME))):
            assert one["metadata"]["ownerReferences"][0]["uid"] == world.deployment.metadata.uid


async def test_remains_of_an_operator_killed_between_two_steps_are_removed(world: PodsWorld) -> None:
    await formed(world, 1)
    for pod in await world.kube.list(PODS, world.namespace):
        await world.kube.delete(PODS, world.namespace, pod["metadata"]["name"], grace_seconds=0)
    await until(world, "the pods are gone", lambda seen: not seen.members)
    assert f"{NAME}-0-i1" in await world.all(SERVICES)
    await world.restart_operator()
    await formed(world, 2)
    left = await asyncio.gather(*(world.all(kind) for kind in (SERVICES, CONFIG_MAPS, SECRETS)))
    assert not [name for name in frozenset[str]().union(*left) if name.startswith(f"{NAME}-0-i1")]


async def test_another_operator_adopts_all_objects_without_writing(world: PodsWorld) -> None:
    plan = await formed(world, 1)
    await until(world, "all are heard", lambda seen: all(one.status for one in live(seen)))
    before = {one["metadata"]["uid"]: one["metadata"]["resourceVersion"] for one in await _objects(world)}
    await world.restart_operator()
    assert await planned(world, 1) == plan
    await world.backend.ensure(world.deployment, plan)
    seen = await until(world, "all are heard again", lambda seen: all(one.status for one in live(seen)))
    assert sorted(of(seen, 1)) == [0, 1]
    assert {one["metadata"]["uid"]: one["metadata"]["resourceVersion"] for one in await _objects(world)} == before


async def test_the_plan_that_was_written_first_holds(world: PodsWorld) -> None:
    """An operator was killed after one of two pods; its successor chooses other nodes."""
    plan = await planned(world, 1)
    await world.backend.ensure(world.deployment, plan)
    await world.kube.delete(PODS, world.namespace, f"{NAME}-0-i1-r1", grace_seconds=0)
    elsewhere = tuple(one.model_copy(update={"node": "fake7"}) for one in plan.members)
    await world.restart_operator()
    await world.backend.ensure(world.deployment, plan.model_copy(update={"members": elsewhere}))
    found = await until(world, "both are there", lambda seen: len(live(seen)) == 2)
    assert [of(found, 1)[rank].node for rank in (0, 1)] == [one.node for one in plan.members]


async def test_two_deployments_do_not_take_the_same_nodes(world: PodsWorld, cluster: ControlPlane) -> None:
    """Both are planned before either has pods."""
    other = manifest(world.namespace)
    other["metadata"]["name"] = "other"
    deployment = parse(await world.kube.create(other))
    rival = world.backend
    mine = await planned(world, 1)
    theirs = plan_group(deployment, await rival.facts(deployment), group=0, incarnation=1)
    assert [one.node for one in mine.members] == [one.node for one in theirs.members]
    await world.backend.ensure(world.deployment, mine)
    with pytest.raises(NodesTaken, match=f"holds a member of {world.namespace}/{NAME}"):
        await rival.ensure(deployment, theirs)
    again = plan_group(deployment, await rival.facts(deployment), group=0, incarnation=1)
    assert not {one.node for one in again.members} & {one.node for one in mine.members}
    await rival.ensure(deployment, again)
    await over(lambda: rival.fence(deployment, 0, 1))


async def test_nodes_that_are_missing_are_named_and_nothing_is_made(world: PodsWorld) -> None:
    await world.change(topology={"nodes": ["fake1", "nowhere"]})
    with pytest.raises(PlanRefused, match="nowhere is not in the cluster"):
        await planned(world, 1)
    assert await world.all(PODS) == set()


async def test_the_schedulers_message_about_a_changed_node_is_reported(world: PodsWorld, cluster: ControlPlane) -> None:
    plan = await planned(world, 1)
    node = plan.members[1].node
    assert node is not None
    cluster.kubectl("taint", "node", node, "dsv4.test/closed=yes:NoSchedule")

    def told(seen: Observed) -> bool:
        # The watch may not have received the pod yet.
        member = of(seen, 1).get(1)
        return member is not None and "taint" in (member.waiting or "")

    try:
        await world.backend.ensure(world.deployment, plan)
        seen = await until(world, "the scheduler speaks", told)
        assert of(seen, 1)[1].ended is None
        await fenced(world, 1)
        assert await world.all(PODS) == set()
    finally:
        cluster.kubectl("taint", "node", node, "dsv4.test/closed:NoSchedule-")


async def test_a_group_stays_within_one_value_of_a_label(world: PodsWorld, cluster: ControlPlane) -> None:
    key = "dsv4.test/cabled"
    try:
        cluster.kubectl("label", "node", "fake3", "fake5", f"{key}=x")
        cluster.kubectl("label", "node", "fake1", f"{key}=y")
        await world.change(topology={"topologyKey": key})
        plan = await formed(world, 1)
        assert {one.node for one in plan.members} == {"fake3", "fake5"}
        before = await planned(world, 2)
        cluster.kubectl("label", "node", "--overwrite", "fake5", f"{key}=y")
        await asyncio.sleep(1)
        assert len(live(await world.backend.observe(world.deployment, 0))) == 2, "a change of labels ends nothing"
        await fenced(world, 1)
        with pytest.raises(NodesTaken, match=f"the nodes fake3, fake5 have different values of the label {key}"):
            await world.backend.ensure(world.deployment, before)
        assert {one.node for one in (await formed(world, 2)).members} == {"fake1", "fake5"}
        await fenced(world, 2)
    finally:
        cluster.kubectl("label", "node", "fake1", "fake3", "fake5", f"{key}-")


_DRIVER = "gpu.dsv4.test"
_CLAIMS = Resource("resource.k8s.io/v1", "ResourceClaim", "resourceclaims")


@pytest.fixture
def devices(cluster: ControlPlane, namespace: str) -> Iterator[tuple[str, ...]]:
    """Publish a device on each of two nodes, as a driver does, and a template that claims one; yield the nodes."""
    nodes = ("fake2", "fake4")
    api = {"apiVersion": "resource.k8s.io/v1"}
    selector = {"cel": {"expression": f"device.driver == '{_DRIVER}'"}}
    request = {"name": "gpu", "exactly": {"deviceClassName": _DRIVER, "count": 1}}
    template = {
        "metadata": {"name": "gpus", "namespace": namespace},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }
    slices = [
        {
            "metadata": {"name": f"{node}-{_DRIVER}"},
            "spec": {
                "driver": _DRIVER,
                "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "gpu-0"}],
            },
        }
        for node in nodes
    ]
    cluster.apply(
        {**api, "kind": "DeviceClass", "metadata": {"name": _DRIVER}, "spec": {"selectors": [selector]}},
        {**api, "kind": "ResourceClaimTemplate", **template},
        *({**api, "kind": "ResourceSlice", **one} for one in slices),
    )
    yield nodes
    cluster.kubectl("delete", "resourceslice", *(one["metadata"]["name"] for one in slices))
    cluster.kubectl("delete", "deviceclass", _DRIVER)


async def test_members_claim_devices_of_a_driver_instead_of_a_device_plugin(
    world: PodsWorld, devices: tuple[str, ...]
) -> None:
    await world.change(topology={"resourceClaimTemplate": "gpus", "nodes": list(devices)})
    await formed(world, 1)
    async with asyncio.timeout(60):
        while len(claims := await world.kube.list(_CLAIMS, world.namespace)) < len(devices) or not all(
            "allocation" in (one.get("status") or {}) for one in claims
        ):
            await asyncio.sleep(0.2)
    found = {
        one["metadata"]["ownerReferences"][0]["name"]: one["status"]["allocation"]["devices"]["results"][0]
        for one in claims
    }
    assert {name: (one["driver"], one["pool"]) for name, one in found.items()} == {
        f"{NAME}-0-i1-r{rank}": (_DRIVER, node) for rank, node in enumerate(devices)
    }
    await fenced(world, 1)
    # The claims of the first incarnation would keep the only devices of these nodes.
    await formed(world, 2)
    await fenced(world, 2)
    await until(world, "no member is left", lambda seen: not live(seen))


async def test_a_claim_without_devices_has_the_schedulers_message(world: PodsWorld, devices: tuple[str, ...]) -> None:
    await world.change(topology={"resourceClaimTemplate": "gpus", "nodes": ["fake6", devices[0]]})
    plan = await planned(world, 1)
    await world.backend.ensure(world.deployment, plan)

    def told(seen: Observed) -> bool:
        member = of(seen, 1).get(0)
        return member is not None and "claim" in (member.waiting or "")

    await until(world, "the scheduler speaks", told)
    await fenced(world, 1)


@pytest.fixture
def pod_groups(cluster: ControlPlane) -> Iterator[str]:
    """Define a `PodGroup` kind like Volcano's, without a scheduler."""
    name = "podgroups.scheduling.volcano.sh"
    open_schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    spec = {
        "type": "object",
        "properties": {
            "minMember": {"type": "integer"},
            "minResources": {"type": "object", "additionalProperties": {"x-kubernetes-int-or-string": True}},
            "queue": {"type": "string", "default": "default"},
        },
    }
    schema = {"type": "object", "properties": {"spec": spec, "status": open_schema}}
    version = {"name": "v1beta1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    cluster.apply(
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": name},
            "spec": {
                "group": "scheduling.volcano.sh",
                "scope": "Namespaced",
                "names": {
                    "kind": "PodGroup",
                    "listKind": "PodGroupList",
                    "plural": "podgroups",
                    "singular": "podgroup",
                },
                "versions": [version],
            },
        }
    )
    cluster.until_served(name)
    # API servers delay the creation of objects by 2 s while their kind is younger than that.
    time.sleep(2.1)
    yield name
    cluster.kubectl("delete", "crd", name, "--ignore-not-found", "--timeout=60s")


async def test_without_the_kind_of_the_scheduler_nothing_is_made_and_it_is_named(world: PodsWorld) -> None:
    await world.change(topology={"scheduler": {"type": "Volcano"}})
    plan = await planned(world, 1)
    with pytest.raises(SchedulerMissing, match=r"no PodGroup of Volcano \(scheduling.volcano.sh/v1beta1\); install"):
        await world.backend.ensure(world.deployment, plan)
    assert await world.all(PODS) == set()
    # Fencing works without it.
    await fenced(world, 1)


async def test_another_scheduler_gets_a_pod_group_and_chooses_the_nodes(
    world: PodsWorld, cluster: ControlPlane, pod_groups: str
) -> None:
    await world.change(topology={"scheduler": {"type": "Volcano", "queue": "models"}})
    plan = await formed(world, 1)
    assert [one.node for one in plan.members] == [None, None]
    (group,) = await world.kube.list(VOLCANO_POD_GROUPS, world.namespace)
    assert group["metadata"]["name"] == f"{NAME}-0-i1"
    assert names.belongs(group, world.deployment.metadata.uid)
    assert (group["spec"]["minMember"], group["spec"]["queue"]) == (2, "models")
    for pod in await world.objects(PODS):
        assert pod["spec"]["schedulerName"] == "volcano"
        assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == f"{NAME}-0-i1"
        assert "nodeName" not in pod["spec"]
    # The scheduler has no capacity.
    full = {"type": "Unschedulable", "status": "True", "message": "queue resource quota insufficient"}
    await world.kube.patch(VOLCANO_POD_GROUPS, world.namespace, f"{NAME}-0-i1", {"status": {"conditions": [full]}})
    seen = await until(
        world, "the reason is read", lambda seen: all("quota" in (one.waiting or "") for one in live(seen))
    )
    assert all(one.queued for one in live(seen))
    # It places both members, in an order of its choice.
    for rank, node in ((0, "fake6"), (1, "fake2")):
        name = f"{NAME}-0-i1-r{rank}"
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        path = f"/api/v1/namespaces/{world.namespace}/pods/{name}/binding"
        cluster.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(binding))
    seen = await until(world, "both are placed", lambda seen: not any(one.queued for one in live(seen)))
    assert [of(seen, 1)[rank].node for rank in (0, 1)] == ["fake6", "fake2"]
    await fenced(world, 1)
    assert await world.all(PODS) == set()
    assert await world.kube.list(VOLCANO_POD_GROUPS, world.namespace) == []


async def test_without_any_image_no_object_is_created_and_the_error_names_the_field(world: PodsWorld) -> None:
    cluster = Cluster(world.kube, world.pods, runtime_image="", policy=POLICY)
    backend = PodsBackend(cluster, changed=lambda *_: None)
    plan = plan_group(world.deployment, await backend.facts(world.deployment), group=0, incarnation=1)
    with pytest.raises(BackendError, match=r"spec\.engine\.image: is required, because the operator runs without"):
        await backend.ensure(world.deployment, plan)
    with pytest.raises(BackendError, match=r"spec\.engine\.image"):
        await backend.ensure_frontend(world.deployment, DeploymentStatus())
    assert await world.all(PODS) | await world.all(DEPLOYMENTS) == set()
    await backend.close()


async def test_workers_are_polled_while_the_head_is_silent_and_false_statuses_are_ignored(world: PodsWorld) -> None:
    world.script(1).lies = True
    await formed(world, 1)
    await until(world, "the head is heard", lambda seen: of(seen, 1)[0].status is not None)
    assert of(await world.backend.observe(world.deployment, 0), 1)[1].status is None
    world.script(1).lies = False
    await until(world, "the worker is heard", lambda seen: of(seen, 1)[1].status is not None)
    world.script(0).silent = True
    world.script(0).lost_seconds = world.script(1).lost_seconds = 60
    begun = time.time()

    def worker_alone(seen: Any) -> bool:
        head, worker = of(seen, 1)[0], of(seen, 1)[1]
        return (head.heard or 0) < begun + 1 and (worker.heard or 0) > begun + 4

    await until(world, "the worker is heard without the head", worker_alone, 60)


async def test_evidence_is_bounded_and_only_the_newest_is_kept(world: PodsWorld) -> None:
    for incarnation in range(1, 8):
        await formed(world, incarnation)
        await until(world, "all are heard", lambda seen: all(one.status for one in live(seen)))
        place = await world.backend.collect_evidence(world.deployment, 0, incarnation)
        assert place == f"configmap {world.namespace}/{NAME}-0-evidence-{incarnation}"
        await fenced(world, incarnation)
    kept = {name for name in await world.all(CONFIG_MAPS) if "evidence" in name}
    assert kept == {f"{NAME}-0-evidence-{number}" for number in range(3, 8)}
    config = await world.kube.get(CONFIG_MAPS, world.namespace, f"{NAME}-0-evidence-7")
    assert config is not None
    assert sum(map(len, config["data"].values())) < 64 * 1024
    assert "EngineCore died" in config["data"]["m0.json"]


@pytest.mark.long
async def test_a_pod_that_cannot_be_deleted_is_reported_with_its_node(world: PodsWorld) -> None:
    await formed(world, 1)
    name = f"{NAME}-0-i1-r1"
    await world.kube.patch(PODS, world.namespace, name, {"metadata": {"finalizers": ["dsv4.test/hold"]}})
    with pytest.raises(FenceError, match=rf"{name} on fake\d"):
        await fenced(world, 1)
    await world.kube.patch(PODS, world.namespace, name, {"metadata": {"finalizers": None}})
    await fenced(world, 1)


async def test_the_front_is_written_once_and_follows_the_number_of_groups(world: PodsWorld) -> None:
    status = DeploymentStatus()
    await world.change(replicas=2)
    await world.backend.ensure_frontend(world.deployment, status)
    assert await world.all(DEPLOYMENTS) == {f"{NAME}-0-gateway", f"{NAME}-1-gateway"}
    assert NAME in await world.all(SERVICES)
    # Versions prove nothing here: the Deployment controller updates the gateways' status meanwhile.
    written = len(world.writes)
    await world.backend.ensure_frontend(world.deployment, status)
    assert 0 < written == len(world.writes)
    failed = DeploymentStatus(groups=(GroupStatus(index=1, phase=GroupPhase.FAILED),))
    await world.backend.ensure_frontend(world.deployment, failed)
    route = await world.kube.get(CONFIG_MAPS, world.namespace, f"{NAME}-1-gateway")
    assert route is not None
    assert '"givenUp": "group 1 used up its ' in route["data"]["route.json"]
    await world.change(replicas=1)
    await world.backend.ensure_frontend(world.deployment, status)
    assert await world.all(DEPLOYMENTS) == {f"{NAME}-0-gateway"}


@pytest.fixture
async def loop(world: PodsWorld) -> AsyncIterator[Loop]:
    loop = Loop(world)
    yield loop
    await loop.close()


async def test_a_deleted_pod_ends_the_group_and_it_forms_again_on_its_nodes(world: PodsWorld, loop: Loop) -> None:
    first = await loop.serving(1)
    begun = time.monotonic()
    await world.kube.delete(PODS, world.namespace, f"{NAME}-0-i1-r1", grace_seconds=0)
    second = await loop.serving(2)
    print(f"worker pod deleted to serving again: {time.monotonic() - begun:.1f} s")
    assert second.last_failure is not None
    assert second.last_failure.culprit_rank == 1
    assert second.last_failure.evidence == f"configmap {world.namespace}/{NAME}-0-evidence-1"
    assert [one.node for one in second.members] == [one.node for one in first.members]
    assert await world.all(PODS) == {f"{NAME}-0-i2-r0", f"{NAME}-0-i2-r1"}
    assert await world.all(SERVICES) == {f"{NAME}-0-i2", f"{NAME}-0-head", NAME}


async def test_an_engine_that_dies_is_restarted_without_touching_a_pod(world: PodsWorld, loop: Loop) -> None:
    await loop.serving(1)
    before = {one["metadata"]["uid"] for one in await world.objects(PODS)}
    world.agents.agent(world.namespace, NAME, 0).engine_dies()
    await loop.until("the death is told", lambda group: bool(group.history), 60)
    group = await loop.until("it serves again", lambda group: group.phase is GroupPhase.SERVING, 60)
    assert (group.incarnation, group.engine_generation) == (1, 2)
    assert group.total_restarts == 1
    assert {one["metadata"]["uid"] for one in await world.objects(PODS)} == before


async def test_a_slow_load_is_no_failure(world: PodsWorld, loop: Loop) -> None:
    world.script(0).last_phase = Phase.LOADING
    await loop.until("it loads", lambda group: any(one.phase is Phase.LOADING for one in group.members), 60)
    await asyncio.sleep(3)
    assert not (await loop.until("it is there", lambda _: True)).history
    world.script(0).last_phase = Phase.SERVING
    await loop.serving(1)


async def test_a_member_that_vanishes_is_node_lost_with_its_node(world: PodsWorld, loop: Loop) -> None:
    group = await loop.serving(1)
    world.script(1).gone = True
    begun = time.monotonic()
    dead = await loop.until("it is dead", lambda group: bool(group.history), 60)
    print(f"vanished member to verdict: {time.monotonic() - begun:.1f} s")
    assert dead.history[0].cause is Cause.NODE_LOST
    assert dead.history[0].culprit_node == group.members[1].node
    world.script(1).gone = False
    await loop.serving(2)


async def test_a_deterministic_failure_ends_the_recovery(world: PodsWorld, loop: Loop) -> None:
    world.script(1).fails = Cause.STAGING_FAILED
    group = await loop.until("it is given up", lambda group: group.phase is GroupPhase.FAILED)
    assert [one.cause for one in group.history] == [Cause.STAGING_FAILED] * 2
    # The verdict is published before the members are ended.
    await until(world, "nothing of it is left", lambda seen: not seen.members)
    assert await world.all(PODS) == set()


async def test_members_on_a_lost_node_are_replaced_by_force(
    world: PodsWorld, loop: Loop, cluster: ControlPlane
) -> None:
    group = await loop.serving(1)
    lost = group.members[1].node
    with unready(cluster, lost):
        world.script(1).gone = True
        again = await loop.serving(2, 90)
        assert lost not in [one.node for one in again.members]
        assert not [name for name in await world.all(PODS) if "-i1-" in name]


@contextlib.contextmanager
def unready(cluster: ControlPlane, node: str) -> Iterator[None]:
    """Make a node lose its kubelet: Kubernetes reports it as not ready, and its pods are not ended."""
    path = f"/api/v1/nodes/{node}"
    annotation = {"kwok.x-k8s.io/node": None}
    merge = {"content-type": "application/merge-patch+json"}
    cluster.http.patch(path, json={"metadata": {"annotations": annotation}}, headers=merge).raise_for_status()
    conditions = [{"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
    cluster.http.patch(f"{path}/status", json={"status": {"conditions": conditions}}, headers=merge).raise_for_status()
    try:
        yield
    finally:
        annotation = {"kwok.x-k8s.io/node": "fake"}
        cluster.http.patch(path, json={"metadata": {"annotations": annotation}}, headers=merge).raise_for_status()


async def _objects(world: PodsWorld) -> list[dict[str, Any]]:
    found = []
    for resource in (PODS, SERVICES, CONFIG_MAPS, SECRETS):
        found += await world.kube.list(resource, world.namespace, labels=names.selector(names.labels(NAME)))
    return found


def _foreign(namespace: str) -> list[Manifest]:
    """Return foreign objects with the names that the deployment needs first."""
    web = {"app": "web"}
    container = {"name": "web", "image": "none"}
    template = {"metadata": {"labels": web}, "spec": {"containers": [container]}}
    bodies: list[tuple[str, str, str, Manifest]] = [
        ("v1", "Service", NAME, {"spec": {"selector": web, "ports": [{"port": 80}]}}),
        ("v1", "Service", f"{NAME}-0-head", {"spec": {"type": "ExternalName", "externalName": "example.org"}}),
        ("v1", "Service", f"{NAME}-0-i1", {"spec": {"clusterIP": "None", "selector": web}}),
        ("v1", "ConfigMap", f"{NAME}-0-gateway", {"data": {"a": "b"}}),
        ("apps/v1", "Deployment", f"{NAME}-0-gateway", {
            "spec": {"replicas": 0, "selector": {"matchLabels": web}, "template": template}
        }),
        ("policy/v1", "PodDisruptionBudget", f"{NAME}-gateways", {
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": web}}
        }),
        ("networking.k8s.io/v1", "NetworkPolicy", f"{NAME}-members", {"spec": {"podSelector": {"matchLabels": web}}}),
        ("v1", "Pod", f"{NAME}-0-i1-r1", {"spec": {"containers": [container], "nodeSelector": {"is": "nowhere"}}}),
    ]  # fmt: skip
    return [
        {"apiVersion": version, "kind": kind, "metadata": {"namespace": namespace, "name": name}, **body}
        for version, kind, name, body in bodies
    ]


@pytest.mark.parametrize("number", range(8))
async def test_foreign_objects_are_reported_and_not_changed(world: PodsWorld, number: int) -> None:
    wanted = _foreign(world.namespace)[number]
    kept = await world.kube.create(wanted)
    resource, name = resource_of(wanted), wanted["metadata"]["name"]
    told = []
    plan = await planned(world, 1)
    for work in (world.backend.ensure(world.deployment, plan), world.backend.ensure_frontend(world.deployment, _NEW)):
        try:
            await work
        except ForeignObject as error:
            told.append(str(error))
    said = f"{wanted['kind']} {world.namespace}/{name} belongs to another client (it has no owner)"
    assert said in "".join(told)
    await fenced(world, 1)
    live = await world.kube.get(resource, world.namespace, name)
    assert live is not None
    assert live["metadata"]["uid"] == kept["metadata"]["uid"]
    assert "ownerReferences" not in live["metadata"]
    assert "deletionTimestamp" not in live["metadata"]
    managers = {one["manager"] for one in live["metadata"]["managedFields"]} - {"kube-scheduler"}
    assert len(managers) <= 2, managers
    assert live["metadata"].get("generation") == kept["metadata"].get("generation")
    await world.kube.delete(resource, world.namespace, name, grace_seconds=0)


_NEW = DeploymentStatus()


async def test_another_object_of_the_same_name_is_not_adopted(world: PodsWorld) -> None:
    """The server compares the UID that the operator read before."""
    service = frontend.public_service(world.deployment)
    made = await world.kube.create(service)
    await world.kube.delete(SERVICES, world.namespace, NAME)
    with pytest.raises(Conflict):
        await world.kube.apply({**service, "metadata": {**service["metadata"], "uid": made["metadata"]["uid"]}})
    assert await world.kube.get(SERVICES, world.namespace, NAME) is None
    users = await world.kube.create(_foreign(world.namespace)[0])
    with pytest.raises(Invalid, match=r"metadata\.uid"):
        await world.kube.apply({**service, "metadata": {**service["metadata"], "uid": made["metadata"]["uid"]}})
    live = await world.kube.get(SERVICES, world.namespace, NAME)
    assert live is not None
    assert live["metadata"]["resourceVersion"] == users["metadata"]["resourceVersion"]


async def test_fields_of_a_created_object_that_are_no_longer_applied_are_removed(world: PodsWorld) -> None:
    owned = OwnedObjects(world.kube)
    gateway = frontend.gateway_deployment(world.deployment, 0, image="none")
    pod = gateway["spec"]["template"]["spec"]
    more = copy.deepcopy(gateway)
    more["spec"]["template"]["spec"]["volumes"].append({"name": "keys", "secret": {"secretName": "keys"}})
    more["spec"]["template"]["spec"]["imagePullSecrets"] = [{"name": "pull"}]
    for one in (more, more, gateway, gateway):
        await owned.apply(one)
    live = await world.kube.get(DEPLOYMENTS, world.namespace, f"{NAME}-0-gateway")
    assert live is not None
    found = live["spec"]["template"]["spec"]
    assert {one["name"] for one in found["volumes"]} == {one["name"] for one in pod["volumes"]}
    assert "imagePullSecrets" not in found
    own = [one for one in live["metadata"]["managedFields"] if one["manager"] == "dsv4-operator"]
    assert [one["operation"] for one in own] == ["Apply"]


async def test_a_deployment_that_is_created_again_at_once_has_credentials_of_its_own(world: PodsWorld) -> None:
    await formed(world, 1)
    await world.backend.ensure_frontend(world.deployment, _NEW)
    before = {one["metadata"]["name"] for one in await world.objects(SECRETS)}
    await world.kube.delete(DSV4_DEPLOYMENTS, world.namespace, NAME)
    world.deployment = parse(await world.kube.create(manifest(world.namespace)))
    await world.backend.release(world.namespace, NAME)
    seen = await world.backend.observe(world.deployment, 0)
    assert seen.members == ()
    number, deadline = 0, time.monotonic() + 60
    while True:
        try:
            # As in a status, a number that was claimed stays claimed when the objects with it are gone.
            number = max(number, (await world.backend.observe(world.deployment, 0)).used_incarnation + 1)
            plan = plan_group(
                world.deployment, await world.backend.facts(world.deployment), group=0, incarnation=number
            )
            await world.backend.ensure(world.deployment, plan)
            await world.backend.ensure_frontend(world.deployment, _NEW)
            break
        except (ObjectTerminating, PlanRefused, NodesTaken):
            # Objects of the earlier one still exist.
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
    uid = world.deployment.metadata.uid
    mine = [one for one in await world.objects(SECRETS) if names.belongs(one, uid)]
    assert len(mine) == 2
    assert not {one["metadata"]["name"] for one in mine} & before
    gateway = await world.kube.get(DEPLOYMENTS, world.namespace, f"{NAME}-0-gateway")
    assert gateway is not None
    mounted = {(one.get("secret") or {}).get("secretName") for one in gateway["spec"]["template"]["spec"]["volumes"]}
    assert names.token_key_name(NAME, uid) in mounted
    await over(lambda: world.backend.fence(world.deployment, 0, plan.incarnation))


@pytest.mark.parametrize("name", ["x-0-head", "x-12-i345"])
async def test_a_name_of_another_deployments_services_is_refused(world: PodsWorld, name: str) -> None:
    other = manifest(world.namespace)
    other["metadata"]["name"] = name
    with pytest.raises(Invalid, match=r"metadata\.name: has an ending that is reserved for Services of groups"):
        await world.kube.create(other)
