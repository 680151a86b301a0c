"""Nodes of successive incarnations: groups keep theirs, move away from cordoned ones, and stay without free ones."""

from __future__ import annotations

import copy
import logging
from collections.abc import AsyncIterator

import pytest

from dsv4_operator.api import Reason, SchedulerType, parse
from dsv4_operator.backends.pods import backend as pods_backend
from dsv4_operator.backends.pods import cluster
from dsv4_operator.backends.pods.scheduling import Snapshot, facts
from dsv4_operator.builders import member
from dsv4_operator.kube.cache import NodeCache
from dsv4_testkit.fake_kube import FakeKube
from dsv4_testkit.pod_objects import deployment, node, program
from dsv4_testkit.pods_world import Manifest, World

TOPOLOGY = {"hardware": "CPU", "nodesPerGroup": 2}


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    logging.disable(logging.CRITICAL)
    # The world's clock is not that of the ages.
    monkeypatch.setattr(pods_backend, "_CORDONED_SECONDS", 0.0)
    monkeypatch.setattr(pods_backend, "_FRESH_SECONDS", 0.0)
    found = World(monkeypatch, topology=TOPOLOGY)
    await found.serve()
    yield found
    await found.close()
    logging.disable(logging.NOTSET)


def group(world: World) -> Manifest:
    found: Manifest = world.status["groups"][0]
    return found


def told(world: World, reason: Reason) -> list[str]:
    return [event.message for event in world.events if event.reason is reason]


def fill(world: World, *nodes: str, cpu: str = "8") -> None:
    """Use all or some processors of `nodes`."""
    for name in nodes:
        pod = program(f"on-{name}", name, cpu=cpu, memory="1Gi")
        world.kube._put(("Pod", "other", f"on-{name}"), {"apiVersion": "v1", "kind": "Pod", **pod})
    world.kubelet()


async def test_a_group_keeps_the_nodes_that_it_had_since_the_start_of_the_operator(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights and compiled kernels are there. The specification was read when it had other nodes."""
    # Long after its members were created.
    monkeypatch.setattr(cluster, "_MADE_SECONDS", 0.0)
    monkeypatch.setattr(cluster, "_RESERVED_SECONDS", 0.0)
    world.cordon("n0", "n1")
    await world.until(lambda: world.formed(2), 20.0)
    await world.serve()
    assert world.nodes_of(2) == ["n2", "n3"]
    world.cordon()
    world.end(2, 0)
    await world.until(lambda: world.formed(3), 20.0)
    assert world.nodes_of(3) == ["n2", "n3"]


async def test_only_the_member_on_the_cordoned_node_gets_another_one(world: World) -> None:
    assert world.nodes_of(1) == ["n0", "n1"]
    world.cordon("n1")
    await world.until(lambda: world.formed(2), 20.0)
    await world.serve()
    assert world.nodes_of(2) == ["n0", "n2"]
    assert (group(world)["incarnation"], group(world).get("totalRestarts", 0)) == (2, 0)
    assert not group(world).get("history")
    assert told(world, Reason.GROUP_MOVING) == [
        "incarnation 1 is ended because the node n1 is cordoned; other nodes are free"
    ]


async def test_nothing_changes_until_a_node_is_free(world: World) -> None:
    fill(world, "n2", "n3")
    world.cordon("n0", "n1")
    for _ in range(5):
        await world.step()
    assert world.formed(1)
    assert world.condition("Ready")[0] == "True"
    assert world.condition("Accepted")[0] == "True"
    status, reason, message = world.condition("Progressing")
    assert (status, reason) == ("False", "MoveBlocked")
    assert "the nodes n0, n1 are cordoned, and the group stays" in message
    assert len(told(world, Reason.MOVE_BLOCKED)) == 1
    del world.kube.objects["Pod", "other", "on-n3"]
    await world.until(lambda: world.formed(2), 20.0)
    await world.serve()
    assert world.nodes_of(2) == ["n3", "n3"]


async def test_a_node_is_held_for_the_next_incarnation_until_it_is_formed(world: World) -> None:
    """Another deployment, which waits for a node, does not get the node that was found for the move."""
    fill(world, "n3")
    world.lingering = {"nano-0-i1-r0", "nano-0-i1-r1"}
    world.cordon("n1")
    await world.until(lambda: group(world)["phase"] == "Updating", 5.0)
    assert await left_for_another(world) == []
    # Now this node would be the first choice.
    del world.kube.objects["Pod", "other", "on-n3"]
    fill(world, "n2", cpu="1")
    wanted = parse(world.live())
    assert not await world.backend.fence(wanted, 0, 1), "its pods are being deleted"
    world.lingering = set()
    world.kubelet()
    assert await world.backend.fence(wanted, 0, 1)
    assert await left_for_another(world) == [], "the end of the earlier incarnation releases nothing"
    await world.until(lambda: world.formed(2), 10.0)
    assert world.nodes_of(2) == ["n0", "n2"]


async def test_an_update_holds_the_nodes_for_the_next_incarnation_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(world, "n3")
    world.lingering = {"nano-0-i1-r0", "nano-0-i1-r1"}
    world.cordon("n1")
    # A reservation of the plan alone would end before the members do.
    monkeypatch.setattr(cluster, "_RESERVED_SECONDS", 0.0)
    world.change(engine={"maxModelLen": 1024})
    await world.until(lambda: group(world)["phase"] == "Updating", 5.0)
    assert group(world).get("move") is None
    assert await left_for_another(world) == []
    world.lingering = set()
    await world.until(lambda: world.formed(2), 20.0)
    assert world.nodes_of(2) == ["n0", "n2"]


async def test_an_update_whose_nodes_are_taken_meanwhile_ends_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(world, "n3")
    reserve = world.backend.reserve

    def taken(*arguments: object) -> None:
        """Use the processors of the chosen node between plan and update."""
        reserve(*arguments)  # type: ignore[arg-type]
        fill(world, "n2")

    monkeypatch.setattr(world.backend, "reserve", taken)
    world.cordon("n0", "n1")
    world.change(engine={"maxModelLen": 1024})
    for _ in range(6):
        await world.step()
    assert world.formed(1)
    assert group(world)["phase"] == "Serving"
    assert world.condition("Accepted")[:2] == ("False", "NodesMissing")


async def test_an_update_that_waits_for_nodes_begins_once_they_are_free(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods_backend, "_SHORT_SECONDS", 0.0, raising=False)
    fill(world, "n2", "n3")
    world.change(topology={**TOPOLOGY, "nodes": ["n2", "n3"]})
    for _ in range(3):
        await world.step()
    assert world.condition("Accepted")[:2] == ("False", "NodesMissing")
    del world.kube.objects["Pod", "other", "on-n2"], world.kube.objects["Pod", "other", "on-n3"]
    await world.until(lambda: world.formed(2), 20.0)
    assert world.nodes_of(2) == ["n2", "n3"]


async def test_a_node_that_the_group_keeps_counts_once(world: World) -> None:
    fill(world, "n3")
    world.lingering = {"nano-0-i1-r0", "nano-0-i1-r1"}
    world.cordon("n1")
    await world.until(lambda: group(world)["phase"] == "Updating", 5.0)
    snapshot = await world.backend._cluster.snapshot(0.0)
    assert [one.node for one in snapshot.expected if one.owner] == ["n2"]


@pytest.mark.parametrize("change", [{"suspend": True}, {"replicas": 0}])
async def test_held_nodes_are_free_once_the_group_goes(world: World, change: dict[str, object]) -> None:
    world.lingering = {"nano-0-i1-r1"}
    world.cordon("n1")
    await world.until(lambda: group(world)["phase"] == "Updating", 5.0)
    world.change(**change)
    world.lingering = set()
    await world.until(lambda: not world.pods(), 20.0)
    await world.step()
    assert (await world.backend._cluster.snapshot(0.0)).expected == ()


async def test_held_nodes_are_free_once_the_deployment_is_forgotten(world: World) -> None:
    world.lingering = {"nano-0-i1-r1"}
    world.cordon("n1")
    await world.until(lambda: group(world)["phase"] == "Updating", 5.0)
    wanted = parse(world.live())
    await world.backend.release(wanted.metadata.namespace, wanted.metadata.name)
    assert (await world.backend._cluster.snapshot(0.0)).expected == ()


async def left_for_another(world: World) -> list[str]:
    """Return the nodes that another deployment would get if only n2 had room, for one member beside its pods."""
    other = deployment("nano.yaml", **TOPOLOGY)
    snapshot = await world.backend._cluster.snapshot(0.0)
    used = sum(one.requests["cpu"] for one in snapshot.requests if one.node == "n2")
    rest = 8000 - used - member.requests(other, 0)["cpu"]
    fillers = [program("rest", "n2", cpu=f"{rest}m"), *(program(f"all-{name}", name, cpu="8") for name in ("n0", "n3"))]
    filled = Snapshot.of_pods(snapshot.nodes, [*(one.pod for one in snapshot.requests), *fillers])
    return [one.name for one in facts(other, filled.expecting(snapshot.expected)).of_group(0, 2)]


async def test_a_node_that_is_taken_before_the_move_ends_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(world, "n3")
    plans: list[int] = []
    reserve = world.backend.reserve

    def taken(*arguments: object) -> None:
        """Use the processors of the chosen node between plan and move."""
        reserve(*arguments)  # type: ignore[arg-type]
        plans.append(1)
        fill(world, "n2")

    monkeypatch.setattr(world.backend, "reserve", taken)
    world.cordon("n0", "n1")
    for _ in range(6):
        await world.step()
    assert plans, "the move was planned"
    assert world.formed(1)
    assert group(world)["phase"] == "Serving"
    assert world.condition("Progressing")[1] == "MoveBlocked"


async def test_another_operator_moves_a_group_whose_move_had_begun(world: World) -> None:
    world.lingering = {"nano-0-i1-r1"}
    world.cordon("n1")
    await world.until(lambda: group(world)["phase"] == "Updating", 5.0)
    await world.deployments.close()
    world.deployments = world.operator()
    world.lingering = set()
    await world.until(lambda: world.formed(2), 20.0)
    await world.serve()
    assert group(world).get("totalRestarts", 0) == 0


async def test_a_group_that_another_scheduler_places_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = {**TOPOLOGY, "nodeSelector": {"pool": "a"}, "scheduler": {"type": "Coscheduling"}}
    world = World(monkeypatch, schedulers=(SchedulerType.COSCHEDULING,), topology=topology)
    await world.serve()
    world.cordon("n1")
    for _ in range(4):
        await world.step()
    assert world.formed(1)
    assert "chosen by the scheduler" in world.condition("Progressing")[2]
    await world.close()


def test_the_cache_has_cordoned_nodes_only() -> None:
    server = FakeKube()
    changed: list[str] = []
    cache = NodeCache(server, changed=changed.append)  # type: ignore[arg-type]
    one = {"apiVersion": "v1", "kind": "Node", **node("a", cordoned=True)}
    cache._put(copy.deepcopy({**one, "metadata": {**one["metadata"], "resourceVersion": "1"}}))
    assert [found["metadata"]["name"] for found in cache.all()] == ["a"]
    other = {"apiVersion": "v1", "kind": "Node", **node("a")}
    cache._put({**other, "metadata": {**other["metadata"], "resourceVersion": "2"}})
    assert list(cache.all()) == []
    assert changed == ["a", "a"]
    for version in ("3", "4", "5"):
        cache._put(copy.deepcopy({**one, "metadata": {**one["metadata"], "resourceVersion": version}}))
    assert changed == ["a"] * 3, "other changes of a cordoned node"


async def test_deployments_with_members_on_a_node_are_found(world: World) -> None:
    await world.serve()
    nodes = {str(pod["spec"]["nodeName"]) for pod in world.pods()}
    assert len(nodes) == 2
    assert all(world.cache.deployments_on(name) == {("team", "nano")} for name in nodes)
    assert world.cache.deployments_on("n9") == set()


async def test_an_eviction_while_the_deployment_is_paused_uses_no_restart(world: World) -> None:
    def annotate(**annotations: str) -> None:
        live = world.live()
        live["metadata"]["annotations"] = annotations
        world.put(live)

    annotate(**{"dsv4.dev/paused": "true"})
    evicted = world.kube.objects["Pod", "team", "nano-0-i1-r1"]
    evicted["metadata"] |= {"deletionTimestamp": "2026-11-23T00:00:00Z", "deletionGracePeriodSeconds": 30}
    reason = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "evicting"}
    evicted["status"]["conditions"].append(reason)
    world.lingering = {"nano-0-i1-r1"}
    await world.step()
    world.lingering = set()
    for _ in range(10):
        await world.step()
    assert [one["metadata"]["name"] for one in world.pods()] == ["nano-0-i1-r0"]
    annotate()
    await world.until(lambda: world.formed(2), 30.0)
    await world.serve()
    (death,) = group(world)["history"]
    assert (death["cause"], death["level"]) == ("PlacementLost", 2)
    assert group(world).get("totalRestarts", 0) == 0
    assert told(world, Reason.GROUP_DEAD) == ["PlacementLost on member 1 (n1): " + death["message"]]
