"""Many groups choose nodes at once: reservations do not overlap, and no request is repeated."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dsv4_operator.api import DSV4Deployment, Reason
from dsv4_operator.backends.pods import PodsBackend, cluster
from dsv4_operator.backends.pods import backend as pods_backend
from dsv4_operator.backends.pods.backend import NodesTaken
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.backends.pods.scheduling import facts, group_owner, stand_ins
from dsv4_operator.builders import names
from dsv4_operator.kube import Client, Forbidden, Resource
from dsv4_operator.planning import PlanRefused, plan_group
from dsv4_runtime.contract import GroupPlan
from dsv4_testkit.fake_kube import FakeKube
from dsv4_testkit.pod_objects import ALLOWED, Manifest, deployment, made, node, nodes_of, program, sparks


class Seen:
    """A cache that shows the pods of `shown`."""

    def __init__(self) -> None:
        self.shown: list[Manifest] = []

    def pods(self, *_: object) -> list[Manifest]:
        return self.shown

    def all(self) -> list[Manifest]:
        return self.shown


def shown(pods: Iterable[Manifest], version: str = "1") -> list[Manifest]:
    """Return `pods` as the API server stores them."""
    named = []
    for pod in pods:
        metadata = pod["metadata"]
        named.append({**pod, "metadata": {**metadata, "uid": metadata["name"], "resourceVersion": version}})
    return named


def named(name: str, file: str = "nano.yaml", **topology: Any) -> DSV4Deployment:
    wanted = deployment(file, **topology)
    return wanted.model_copy(update={"metadata": wanted.metadata.model_copy(update={"name": name})})


class Watched(FakeKube):
    """An API server that fails on a list of all pods."""

    async def list(self, resource: Resource, *where: Any, **options: Any) -> list[Manifest]:
        assert resource.kind != "Pod" or "labels" in options, "all pods of a cluster are watched, not listed"
        return await super().list(resource, *where, **options)


def server_of(nodes: Iterable[Manifest]) -> FakeKube:
    return Watched({"apiVersion": "v1", "kind": "Node", **one} for one in nodes)


def pods_of(server: FakeKube) -> list[Manifest]:
    return [one for (kind, _, _), one in server.objects.items() if kind == "Pod"]


class Nothing:
    """A cache of owned objects that shows none yet."""

    def find(self, *_: object) -> None:
        return None

    def versions(self, *_: object) -> frozenset[tuple[str, str, str]]:
        return frozenset()


def cluster_of(server: Any, pods: Seen | None = None, owned: Any = None) -> Cluster:
    kube: Client = server
    return Cluster(kube, pods or Seen(), runtime_image="runtime", policy=ALLOWED, owned=owned)


async def found(shared: Cluster, wanted: DSV4Deployment, seconds: float = 60.0) -> GroupPlan:
    async with shared.scheduling:
        seen = facts(wanted, await shared.snapshot(seconds))
    plan = plan_group(wanted, seen, group=0, incarnation=1)
    shared.reserve(group_owner(wanted, 0), stand_ins(wanted, plan))
    return plan


async def test_nodes_chosen_by_one_group_are_not_chosen_by_the_next() -> None:
    shared = cluster_of(server_of(sparks(4)))
    one, other = deployment(), deployment()
    other = other.model_copy(update={"metadata": other.metadata.model_copy(update={"name": "other"})})
    assert nodes_of(await found(shared, one)) == ["spark-1", "spark-2"]
    assert nodes_of(await found(shared, other)) == ["spark-3", "spark-4"]
    # A group that chooses again finds its own reservation.
    assert nodes_of(await found(shared, one)) == ["spark-1", "spark-2"]


async def test_unused_reservations_expire(monkeypatch: Any) -> None:
    shared = cluster_of(server_of(sparks(2)))
    one, other = deployment(), deployment()
    other = other.model_copy(update={"metadata": other.metadata.model_copy(update={"name": "other"})})
    monkeypatch.setattr(cluster, "_RESERVED_SECONDS", 0.0)
    await found(shared, one)
    assert nodes_of(await found(shared, other, seconds=-1.0)) == ["spark-1", "spark-2"]


async def test_pods_that_no_listing_shows_yet_keep_their_room() -> None:
    room = {"cpu": "8", "memory": "8Gi"}
    seen = Seen()
    shared = cluster_of(server_of([node(name, room=room) for name in ("a", "b")]), seen)
    one, two, three = named("one"), named("two"), named("three")
    # Each group reads a new snapshot, and the API server has no pods yet.
    first = await found(shared, one, seconds=-1.0)
    shared.reserve_made(made(one, first))
    shared.reserve_made(made(two, await found(shared, two, seconds=-1.0)))
    with pytest.raises(PlanRefused) as caught:
        await found(shared, three, seconds=-1.0)
    assert caught.value.reason is Reason.MEMORY_SHORT
    assert re.findall(r"[\d.]+ GiB", caught.value.message) == ["1.0 GiB", "3.5 GiB"]
    # A pod that is both observed and expected counts once.
    seen.shown = shown(made(one, first))
    snapshot = await shared.snapshot(-1.0)
    assert (len(snapshot.requests), len(snapshot.expected)) == (2, 2)
    with pytest.raises(PlanRefused):
        await found(shared, three, seconds=-1.0)
    shared.release(("team", "two", "0", "uid-of-it"))
    assert await found(shared, three)


async def test_groups_without_devices_are_spread_before_they_are_made() -> None:
    shared = cluster_of(server_of([node(name) for name in "abcdefgh"]))
    nodes = [name for number in range(4) for name in nodes_of(await found(shared, named(f"n{number}")))]
    assert sorted(nodes) == list("abcdefgh")


async def test_groups_that_choose_at_once_get_nodes_of_their_own() -> None:
    """All of them list the free nodes before the first one is planned, as under load."""
    server, groups = server_of(sparks(12)), 6
    wanted = [named(f"n{number}", "flash-2x-spark.yaml") for number in range(groups)]
    backend = PodsBackend(cluster_of(server), changed=lambda *_: None)
    listed = await asyncio.gather(*(backend.facts(one) for one in wanted))
    assert {tuple(node.name for node in seen.of_group(0, 2)) for seen in listed} == {("spark-1", "spark-10")}
    plans = []
    for one, seen in zip(wanted, listed, strict=True):
        plan = plan_group(one, backend.refresh(one, seen), group=0, incarnation=1)
        backend.reserve(one, plan)
        plans.append(plan)
    assert sorted(node for plan in plans for node in nodes_of(plan)) == sorted(f"spark-{n + 1}" for n in range(12))
    await asyncio.gather(*(backend.ensure(one, plan) for one, plan in zip(wanted, plans, strict=True)))
    assert len(pods_of(server)) == 2 * groups
    # Its own nodes stay chosen, and one more group finds none.
    assert nodes_of(plan_group(wanted[0], backend.refresh(wanted[0], listed[0]), group=0, incarnation=1)) == nodes_of(
        plans[0]
    )
    other = named("other", "flash-2x-spark.yaml")
    with pytest.raises(PlanRefused):
        plan_group(other, backend.refresh(other, await backend.facts(other)), group=0, incarnation=1)


async def test_facts_are_the_same_until_nodes_are_reserved() -> None:
    backend = PodsBackend(cluster_of(server_of(sparks(2))), changed=lambda *_: None)
    wanted = deployment()
    seen = await backend.facts(wanted)
    assert backend.refresh(wanted, seen) is seen
    suspended = wanted.model_copy(update={"spec": wanted.spec.model_copy(update={"suspend": True})})
    backend._cluster.reserve(group_owner(named("n"), 0), [])
    nothing = replace(seen, placed={})
    assert backend.refresh(suspended, nothing) is nothing


class Refusing(FakeKube):
    """An API server whose administrator has not allowed the list of nodes."""

    async def list(self, resource: Resource, *where: Any, **options: Any) -> list[Manifest]:
        raise Forbidden("nodes is forbidden")


async def test_without_a_list_of_nodes_the_reason_stays() -> None:
    backend = PodsBackend(cluster_of(Refusing()), changed=lambda *_: None)
    wanted = deployment()
    seen = await backend.facts(wanted)
    backend._cluster.reserve(group_owner(named("n"), 0), [])
    assert "grant the operator permission" in backend.refresh(wanted, seen).unfit


async def test_a_first_group_is_made_with_one_request_for_each_object() -> None:
    server, seen = server_of(sparks()), Seen()
    wanted = deployment()
    backend = PodsBackend(cluster_of(server, seen, Nothing()), changed=lambda *_: None)
    plan = plan_group(wanted, await backend.facts(wanted), group=0, incarnation=1)
    server.requests.clear()
    await backend.ensure(wanted, plan)
    name, asked = wanted.metadata.name, server.asked()
    mounted = names.mounted_name(name, "uid-of-it", 0, 1)
    assert sorted(asked) == sorted(
        [
            f"create ConfigMap {mounted}",
            f"create Secret {names.token_key_name(name, 'uid-of-it')}",
            f"create Secret {mounted}",
            f"create Service {name}-0-i1",
            f"create Service {name}-0-head",
            f"create Pod {name}-0-i1-r0",
            f"create Pod {name}-0-i1-r1",
        ]
    )
    assert max(map(asked.index, (f"create Service {name}-0-head", f"create Service {name}-0-i1"))) < min(
        asked.index(f"create Pod {name}-0-i1-r{rank}") for rank in range(2)
    )
    # The cache lags behind: nothing is created twice.
    server.requests.clear()
    await backend.ensure(wanted, plan)
    assert server.asked() == []


async def test_a_node_that_was_lost_since_the_plan_gets_no_member() -> None:
    """Pods of a lost node were removed, and the nodes were read just before Kubernetes reported it as not ready."""
    server = server_of(sparks(3))
    wanted, seen = deployment(), Seen()
    backend = PodsBackend(cluster_of(server, seen), changed=lambda *_: None)
    old = plan_group(wanted, await backend.facts(wanted), group=0, incarnation=1)
    assert nodes_of(old) == ["spark-1", "spark-2"]
    server._put(("Node", "", "spark-1"), {"apiVersion": "v1", "kind": "Node", **sparks(1, ready="Unknown")[0]})
    backend._cluster.release(("team", wanted.metadata.name, "0", "uid-of-it"))
    server.requests.clear()
    with pytest.raises(NodesTaken, match="the node spark-1 is not ready since"):
        await backend.ensure(wanted, old)
    assert server.asked() == ["list Node"]
    plan = plan_group(wanted, await backend.facts(wanted), group=0, incarnation=1)
    assert "spark-1" not in nodes_of(plan)
    await backend.ensure(wanted, plan)
    assert len(pods_of(server)) == 2


async def test_members_created_by_another_operator_are_completed() -> None:
    server, seen = server_of(sparks()), Seen()
    wanted = deployment()
    first = PodsBackend(cluster_of(server, seen), changed=lambda *_: None)
    plan = plan_group(wanted, await first.facts(wanted), group=0, incarnation=1)
    await first.ensure(wanted, plan)
    kept, lost = pods_of(server)
    del server.objects["Pod", "team", lost["metadata"]["name"]]
    seen.shown = [kept]
    second = PodsBackend(cluster_of(server, seen), changed=lambda *_: None)
    server.requests.clear()
    await second.ensure(wanted, plan)
    assert [one for one in server.asked() if one.startswith("create Pod")] == [f"create Pod {lost['metadata']['name']}"]


async def test_pods_are_taken_from_the_watch_and_read_again_when_they_change() -> None:
    server, seen = server_of([node("a")]), Seen()
    shared = cluster_of(server, seen)
    seen.shown = shown([program("x", "a", memory="1Gi")])
    for version, size in (("1", 1), ("1", 1), ("2", 3)):
        seen.shown = shown([program("x", "a", memory=f"{size}Gi")], version)
        snapshot = await shared.snapshot(-1.0)
        assert [one.requests["memory"] for one in snapshot.requests] == [size << 30]
    seen.shown = []
    assert (await shared.snapshot(-1.0)).requests == ()
    assert set(server.asked()) == {"list Node"}


class Slow(Watched):
    """An API server that takes longer for a list of nodes than the list may be old."""

    now = 100.0
    """Time, which only its lists take."""

    async def list(self, resource: Resource, *where: Any, **options: Any) -> list[Manifest]:
        found = await super().list(resource, *where, **options)
        if resource.kind == "Node":
            # All others ask before it passes.
            await asyncio.sleep(0)
            self.now += 0.6
        return found


async def test_one_slow_list_of_nodes_answers_all_that_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pods_backend, "_FRESH_SECONDS", 0.3)
    kube: Any = Slow({"apiVersion": "v1", "kind": "Node", **one} for one in sparks())
    for module in (pods_backend, cluster):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: kube.now))
    backend = PodsBackend(
        Cluster(kube, cast("Any", Seen()), runtime_image="runtime", policy=ALLOWED), changed=lambda *_: None
    )
    await asyncio.gather(*(backend.facts(named(f"d{number}")) for number in range(20)))
    assert kube.asked().count("list Node") == 1
    kube.now += 0.4
    await backend.facts(named("later"))
    assert kube.asked().count("list Node") == 2
