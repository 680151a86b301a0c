"""Gateways that share a node are spread once another node is available, and never while anything is unhealthy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_operator.api import Condition, ConditionStatus, ConditionType, DeploymentStatus, DSV4Deployment, Reason
from dsv4_operator.backends.pods import cluster, gateways
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.backends.pods.gateways import CHECK_SECONDS, Balance, surplus_gateway
from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube import Unavailable
from dsv4_testkit.fake_kube import FakeKube
from dsv4_testkit.pod_objects import deployment, node, program


def gateway(name: str, on: str, *, ready: bool = True, created: str = "2026-11-25T10:00:00Z", **about: Any) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": "team",
            "name": name,
            "uid": f"uid-{name}",
            "creationTimestamp": created,
            "labels": {"dsv4.dev/group": "0"},
            "ownerReferences": [{"kind": "ReplicaSet", "name": "nano-0-gateway-5d8f", "controller": True}],
            **about,
        },
        "spec": {"nodeName": on, "containers": []},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }


def status(value: ConditionStatus = ConditionStatus.TRUE) -> DeploymentStatus:
    about = {"reason": Reason.ALL_GROUPS_READY, "message": "", "last_transition_time": 1.0, "observed_generation": 1}
    return DeploymentStatus(conditions=(Condition(type=ConditionType.READY, status=value, **about),))


class Server(FakeKube):
    """Evicts pods on request, unless a disruption budget forbids it."""

    allows = True

    async def evict(self, namespace: str, name: str, *, uid: str) -> None:
        self.requests.append(("evict", f"Pod {name}", {"uid": uid}))
        if not self.allows:
            raise Unavailable("Cannot evict pod as it would violate the pod's disruption budget.")


class World:
    """Two gateways of one group on one of two nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *nodes: Manifest, replicas: int = 1) -> None:
        self.server = Server()
        self.nodes(*(nodes or (node("n1"), node("n2"))))
        self.pods = [gateway("a", "n1"), gateway("b", "n1", created="2026-11-25T11:00:00Z")]
        self.others: list[Manifest] = []
        self.now = 1000.0
        self.status = status()
        self.deployment: DSV4Deployment = deployment("nano.yaml", replicas=replicas)
        kube: Any = self.server
        view: Any = self
        self.balance = Balance(Cluster(kube, view, runtime_image="r"), lambda *_: self.pods)
        # Not that of the event loop and of other threads.
        for module in (cluster, gateways):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def nodes(self, *nodes: Manifest) -> None:
        self.server.objects.clear()
        for one in nodes:
            self.server._put(("Node", "", one["metadata"]["name"]), {"apiVersion": "v1", "kind": "Node", **one})

    def all(self) -> list[Manifest]:
        return [{**one, "metadata": {"uid": "u", "resourceVersion": "1", **one["metadata"]}} for one in self.others]

    async def looks(self, seconds: float) -> list[str]:
        """Rebalance once a second for `seconds`; return the pods that were evicted."""
        self.server.requests.clear()
        end = self.now + seconds
        while self.now < end:
            await self.balance.rebalance(self.deployment, self.status)
            self.now += 1
        return [what for verb, what, _ in self.server.requests if verb == "evict"]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_the_youngest_gateway_moves_after_the_other_node_was_there_for_a_minute(world: World) -> None:
    assert await world.looks(CHECK_SECONDS) == []
    assert await world.looks(2) == ["Pod b"]
    assert world.server.requests[-1][2] == {"uid": "uid-b"}


async def test_at_most_one_a_minute_and_ever_more_seldom_where_it_does_not_help(world: World) -> None:
    moves = [len(await world.looks(60)) for _ in range(120)]
    assert max(moves) == 1
    assert 3 <= sum(moves) <= 9


async def test_a_node_that_was_just_there_has_to_last(world: World) -> None:
    for _ in range(5):
        world.nodes(node("n1"), node("n2"))
        assert await world.looks(CHECK_SECONDS / 2) == []
        world.nodes(node("n1"), node("n2", ready="False"))
        assert await world.looks(CHECK_SECONDS) == []


@pytest.mark.parametrize(
    "other",
    [
        node("n2", ready="False"),
        node("n2", ready="Unknown"),
        node("n2", cordoned=True),
        node("n2", taints=[{"key": "a", "effect": "NoSchedule"}]),
        node("n2", room={"cpu": "50m", "memory": "32Gi"}),
        node("n2", room={"cpu": "8", "memory": "64Mi"}),
    ],
)
async def test_a_node_that_cannot_run_a_gateway_is_not_considered(
    monkeypatch: pytest.MonkeyPatch, other: Manifest
) -> None:
    world = World(monkeypatch, node("n1"), other)
    assert await world.looks(200) == []


async def test_a_node_that_is_full_is_none(world: World) -> None:
    world.others = [program("big", "n2", cpu="7950m")]
    assert await world.looks(200) == []


async def test_gateways_that_are_apart_stay_and_cost_no_request(world: World) -> None:
    world.pods = [gateway("a", "n1"), gateway("b", "n2")]
    assert await world.looks(200) == []
    assert world.server.requests == []


async def test_nodes_are_listed_once_a_minute_at_most(world: World) -> None:
    world.nodes(node("n1"))
    await world.looks(600)
    assert len(world.server.requests) <= 600 / CHECK_SECONDS + 1


@pytest.mark.parametrize("value", [ConditionStatus.FALSE, ConditionStatus.UNKNOWN])
async def test_nothing_moves_while_the_deployment_is_not_ready(world: World, value: ConditionStatus) -> None:
    world.status = status(value)
    assert await world.looks(300) == []


@pytest.mark.parametrize(
    "pods",
    [
        [gateway("a", "n1"), gateway("b", "n1", ready=False)],
        [gateway("a", "n1"), gateway("b", "n1", ownerReferences=[])],
        [gateway("a", "n1"), gateway("b", "n1", labels={"dsv4.dev/group": "x"})],
        [gateway("a", "n1"), gateway("b", "n1", deletionTimestamp="2026-11-25T10:00:00Z")],
        [gateway("a", "n1")],
        [gateway("a", "n1"), gateway("b", "n1"), gateway("c", "n1")],
    ],
    ids=["not ready", "of nobody", "of no group", "ending", "missing", "in a rollout"],
)
async def test_nothing_moves_while_gateways_come_and_go(world: World, pods: list[Manifest]) -> None:
    world.pods = pods
    assert await world.looks(300) == []


async def test_a_gateway_that_ended_long_ago_keeps_nothing_from_moving(world: World) -> None:
    ended = gateway("old", "n1", ready=False)
    ended["status"]["phase"] = "Failed"
    world.pods.append(ended)
    assert await world.looks(CHECK_SECONDS + 2) == ["Pod b"]


async def test_a_refusal_by_the_disruption_budget_is_retried_without_an_end(world: World) -> None:
    world.server.allows = False
    assert await world.looks(400) == ["Pod b"] * 6
    world.server.allows = True
    assert await world.looks(60) == ["Pod b"]


async def test_an_api_server_that_is_away_ends_nothing(world: World) -> None:
    world.server.broken = True
    assert await world.looks(200) == []


async def test_a_group_more_means_a_gateway_more(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, replicas=2)
    assert await world.looks(200) == []
    world.pods.append(gateway("c", "n2"))
    assert await world.looks(200) == [], "no node is without a gateway"
    world.nodes(node("n1"), node("n2"), node("n3"))
    assert await world.looks(CHECK_SECONDS * 2 + 2) == ["Pod b"]


def test_surplus_is_on_the_most_crowded_node() -> None:
    pods = [gateway(name, on) for name, on in zip("abcdef", ("n1", "n1", "n2", "n2", "n2", "n3"), strict=True)]
    found = surplus_gateway(pods)
    assert found is not None
    assert found["metadata"]["name"] == "e"
    assert surplus_gateway(pods[-1:]) is None
