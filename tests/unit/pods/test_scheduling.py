"""Assignment of nodes to groups, from objects in the API server's format."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_operator.api import ClusterPolicy, DSV4Deployment, Reason
from dsv4_operator.backends.pods.scheduling import Snapshot, facts, shortage
from dsv4_operator.builders.member import Host, member_pod
from dsv4_operator.kube.cache import _kept_of_pod
from dsv4_operator.planning import PlanRefused, plan_group
from dsv4_runtime.contract import GroupPlan
from dsv4_runtime.util.peer_copies import UNSAFE_COPIES
from dsv4_testkit.pod_objects import (
    PLAIN_ROOM,
    SPARK,
    SPARK_ROOM,
    Manifest,
    deployment,
    made,
    node,
    nodes_of,
    program,
    sparks,
)


def planned(wanted: DSV4Deployment, snapshot: Snapshot, group: int = 0, incarnation: int = 1) -> GroupPlan:
    return plan_group(wanted, facts(wanted, snapshot), group=group, incarnation=incarnation)


def refused(wanted: DSV4Deployment, *nodes: Manifest, pods: tuple[Manifest, ...] = ()) -> str:
    with pytest.raises(PlanRefused) as caught:
        planned(wanted, Snapshot.of_pods(nodes, pods))
    assert caught.value.reason is Reason.NODES_MISSING
    return caught.value.message.partition("; ")[2]


def test_a_group_of_sparks_sits_on_the_nodes_own_network() -> None:
    plan = planned(deployment(), Snapshot.of_pods(tuple(sparks()), ()))
    assert nodes_of(plan) == ["spark-1", "spark-2"]
    assert [member.address for member in plan.members] == ["192.168.0.1", "192.168.0.2"]
    assert plan.fabric is not None
    assert plan.fabric.require_rdma


def test_on_the_pod_network_addresses_are_names_of_the_incarnation() -> None:
    wanted = deployment("nano.yaml")
    snapshot = Snapshot.of_pods((node("a"), node("b")), ())
    for incarnation in (1, 12):
        service = f"nano-0-i{incarnation}"
        plan = planned(wanted, snapshot, incarnation=incarnation)
        names = [f"{service}-r{rank}.{service}.team.svc" for rank in range(2)]
        assert [member.address for member in plan.members] == names
        assert f"--node-ip-address={names[1]}" in plan.members[1].ray_args
        assert f"--address={names[0]}:6379" in plan.members[1].ray_args
        assert plan.members[1].env["VLLM_HOST_IP"] == names[1]
        assert plan.members[0].env["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_group_of_cpus_spreads_and_shares_a_node_only_if_it_must() -> None:
    wanted = deployment("nano.yaml")
    spread = facts(wanted, Snapshot.of_pods((node("a"), node("b")), ())).of_group(0, 2)
    assert [one.name for one in spread] == ["a", "b"]
    assert [one.memory_bytes for one in spread] == [32 << 30, 32 << 30]
    shared = facts(wanted, Snapshot.of_pods((node("a"),), ())).of_group(0, 2)
    assert [one.name for one in shared] == ["a", "a"]
    assert [(one.memory_bytes, one.cpus) for one in shared] == [(16 << 30, 4), (16 << 30, 4)]


def test_nodes_that_are_containers_of_one_machine_share_its_processors() -> None:
    nodes = (node("a", boot="one"), node("b", boot="one"), node("c", boot="other"))
    wanted = deployment("nano.yaml")
    assert [one.cpus for one in facts(wanted, Snapshot.of_pods(nodes[:2], ())).of_group(0, 2)] == [4, 4]
    assert [one.cpus for one in facts(wanted, Snapshot.of_pods(nodes[1:], ())).of_group(0, 2)] == [8, 8]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"ready": "Unknown"}, "spark-2 is not ready since 2026-11-21T10:00:00Z"),
        ({"cordoned": True}, "spark-2 is cordoned"),
        (
            {"taints": [{"key": "gpu", "value": "true", "effect": "NoSchedule"}]},
            "spark-2 has the taint gpu=true:NoSchedule",
        ),
        ({"taints": [{"key": "gpu", "effect": "PreferNoSchedule"}]}, None),
        ({"room": {**SPARK_ROOM, "nvidia.com/gpu": "0"}}, "spark-2 has 0 of 1 nvidia.com/gpu free"),
        ({"room": PLAIN_ROOM}, "spark-2 has 0 of 1 nvidia.com/gpu free"),
        (
            {"room": {**SPARK_ROOM, "rdma/hca_shared_devices_a": "0"}},
            "spark-2 has 0 of 1 rdma/hca_shared_devices_a free",
        ),
        (
            {"labels": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}},
            "spark-2 has NVIDIA-H100-80GB-HBM3, not GB10",
        ),
    ],
)
def test_a_node_that_does_not_fit_is_named_with_its_reason(second: dict[str, Any], reason: str | None) -> None:
    other = node("spark-2", address="192.168.0.2", **{"labels": SPARK, "room": SPARK_ROOM, **second})
    if reason is None:
        assert nodes_of(planned(deployment(), Snapshot.of_pods((*sparks(1), other), ()))) == ["spark-1", "spark-2"]
    else:
        assert refused(deployment(), *sparks(1), other) == reason


@pytest.mark.parametrize(
    ("value", "reason"),
    [(None, ""), ("the copies hang\n\x1b", "the copies hang  "), ("x" * 4000, "x" * 300), (7, ""), ("", "")],
)
def test_an_annotation_of_a_node_disables_copies_between_its_gpus(value: object, reason: str) -> None:
    second = node("spark-2", address="192.168.0.2", labels=SPARK, room=SPARK_ROOM)
    second["metadata"]["annotations"] = {} if value is None else {UNSAFE_COPIES: value}
    placed = facts(deployment(), Snapshot.of_pods((*sparks(1), second), ())).placed
    assert placed is not None
    assert [one.unsafe_copies for one in placed[0]] == ["", reason]


def test_missing_nodes_are_reported_too() -> None:
    assert refused(deployment()) == "the cluster has no nodes"
    told = refused(deployment(), *sparks(6, cordoned=True))
    assert told == "spark-1 is cordoned; spark-2 is cordoned; spark-3 is cordoned; spark-4 is cordoned, and 2 more"


def test_running_pods_take_resources_and_ended_pods_do_not() -> None:
    takes = {"nvidia.com/gpu": "1"}
    told = refused(deployment(), *sparks(), pods=(program("trainer", "spark-1", **takes),))
    assert told == "spark-1 has 0 of 1 nvidia.com/gpu free"
    ended = program("trainer", "spark-1", phase="Succeeded", **takes)
    assert nodes_of(planned(deployment(), Snapshot.of_pods(tuple(sparks()), (ended,)))) == ["spark-1", "spark-2"]


def test_tolerations_and_labels_choose() -> None:
    tainted = sparks(taints=[{"key": "pool", "value": "ai", "effect": "NoSchedule"}])
    wanted = deployment(
        tolerations=[{"key": "pool", "value": "ai"}], nodeSelector={"kubernetes.io/hostname": "spark-1"}
    )
    assert refused(wanted, *tainted) == "spark-2 has not the label kubernetes.io/hostname=spark-1"
    assert nodes_of(planned(deployment(tolerations=[{"operator": "Exists"}]), Snapshot.of_pods(tuple(tainted), ())))


def test_named_nodes_are_taken_in_their_order_and_no_others() -> None:
    wanted = deployment(nodes=["spark-3", "spark-1"])
    assert nodes_of(planned(wanted, Snapshot.of_pods(tuple(sparks(3)), ()))) == ["spark-3", "spark-1"]
    assert refused(deployment(nodes=["spark-1", "spark-9"]), *sparks(3)) == "spark-9 is not in the cluster"
    short = deployment(nodes=["spark-1", "spark-2"], replicas=2)
    assert nodes_of(planned(short, Snapshot.of_pods(tuple(sparks(4)), ()))) == ["spark-1", "spark-2"]
    with pytest.raises(PlanRefused, match="names 2, and group 1 begins after 2"):
        planned(short, Snapshot.of_pods(tuple(sparks(4)), ()), group=1)


def test_a_claim_replaces_the_resource_of_the_device_plugin() -> None:
    none = {key: value for key, value in SPARK_ROOM.items() if key != "nvidia.com/gpu"}
    nodes = tuple(node(f"n{n}", address=f"10.0.0.{n}", labels=SPARK, room=none) for n in (1, 2))
    assert "nvidia.com/gpu free" in refused(deployment(), *nodes)
    wanted = deployment(resourceClaimTemplate="gpus")
    plan = planned(wanted, Snapshot.of_pods(nodes, ()))
    spec = member_pod(wanted, plan, 0, host=Host(ClusterPolicy(), "runtime"))["spec"]
    (claim,), (agent,) = spec["resourceClaims"], spec["containers"]
    assert claim == {"name": agent["resources"]["claims"][0]["name"], "resourceClaimTemplateName": "gpus"}
    assert not any("nvidia.com/gpu" in agent["resources"][kind] for kind in ("requests", "limits"))
    assert agent["resources"]["limits"]["rdma/hca_shared_devices_a"] == "1"


CABLES = "dsv4.dev/cabled"


def cabled(**values: str) -> tuple[Manifest, ...]:
    """Return a Spark for each value of the label `CABLES`; `""`: without the label."""
    found = sparks(len(values))
    for one, value in zip(found, values.values(), strict=True):
        one["metadata"]["labels"] = {**SPARK, **({CABLES: value} if value else {})}
    return tuple(found)


def test_a_group_stays_within_one_value_of_its_topology_key() -> None:
    wanted = deployment(topologyKey=CABLES, replicas=2)
    nodes = cabled(a="x", b="y", c="y", d="x")
    snapshot = Snapshot.of_pods(nodes, ())
    first = planned(wanted, snapshot, group=0)
    assert nodes_of(first) == ["spark-1", "spark-4"]
    assert nodes_of(planned(wanted, snapshot, group=1)) == ["spark-2", "spark-3"]
    # The next incarnation keeps the pair, also where the other one is free.
    pair = planned(deployment(topologyKey=CABLES, nodes=["spark-2", "spark-3"]), snapshot)
    alone = deployment(topologyKey=CABLES)
    kept = Snapshot.of_pods(nodes, made(alone, pair))
    assert nodes_of(planned(alone, kept, incarnation=2)) == ["spark-2", "spark-3"]


def test_nodes_of_several_values_are_no_group() -> None:
    wanted = deployment(topologyKey=CABLES)
    assert refused(wanted, *cabled(a="x", b="y", c="")) == (
        f"spec.topology.topologyKey {CABLES} has no value with 2 nodes that fit; x has 1; "
        f"spark-3 has not the label {CABLES} (spec.topology.topologyKey)"
    )
    pinned = deployment(topologyKey=CABLES, nodes=["spark-1", "spark-2"])
    assert "no value with 2 nodes" in refused(pinned, *cabled(a="x", b="y"))
    # A label that changes between the plan and the pods.
    plan = planned(wanted, Snapshot.of_pods(cabled(a="x", b="x"), ()))
    assert shortage(wanted, plan, Snapshot.of_pods(cabled(a="x", b="x"), ())) is None
    changed = shortage(wanted, plan, Snapshot.of_pods(cabled(a="x", b="y"), ()))
    assert changed == f"the nodes spark-1, spark-2 have different values of the label {CABLES}"


def test_a_group_that_is_short_takes_nothing_from_the_other() -> None:
    wanted = deployment(replicas=2)
    snapshot = Snapshot.of_pods(tuple(sparks(3)), ())
    assert nodes_of(planned(wanted, snapshot, group=0)) == ["spark-1", "spark-2"]
    with pytest.raises(PlanRefused) as caught:
        planned(wanted, snapshot, group=1)
    (found,) = caught.value.findings
    assert (caught.value.reason, found.field, found.value) == (Reason.NODES_MISSING, "spec.topology.nodesPerGroup", 2)
    assert {"group 1", "1 are available"} <= set(re.findall(r"group \d+|\d+ are available", found.message))


def test_a_group_keeps_its_nodes_in_the_next_incarnation() -> None:
    wanted = deployment()
    first = planned(deployment(nodes=["spark-4", "spark-2"]), Snapshot.of_pods(tuple(sparks(4)), ()))
    snapshot = Snapshot.of_pods(tuple(sparks(4)), made(wanted, first))
    assert nodes_of(planned(wanted, snapshot, incarnation=2)) == ["spark-4", "spark-2"]
    lost = [one for one in sparks(4) if one["metadata"]["name"] != "spark-4"]
    assert nodes_of(planned(wanted, Snapshot(tuple(lost), snapshot.requests), incarnation=2)) == ["spark-1", "spark-2"]


def test_no_member_shares_an_exclusive_node() -> None:
    wanted, other = deployment(), deployment()
    other = other.model_copy(update={"metadata": other.metadata.model_copy(update={"name": "other"})})
    room = {**SPARK_ROOM, "nvidia.com/gpu": "8"}
    big = tuple(node(f"n{n}", address=f"10.0.0.{n}", labels=SPARK, room=room) for n in range(1, 4))
    plan = planned(other, Snapshot.of_pods(big, ()))
    pods = made(other, plan)
    assert refused(wanted, *big, pods=pods) == "n1 holds a member of team/other; n2 holds a member of team/other"
    assert shortage(wanted, planned(wanted, Snapshot.of_pods(big, ())), Snapshot.of_pods(big, pods)) == (
        "the node n1 holds a member of team/other"
    )


def test_a_plan_does_not_fit_after_its_memory_was_taken() -> None:
    wanted = deployment("nano.yaml")
    nodes = (node("a"), node("b"))
    plan = planned(wanted, Snapshot.of_pods(nodes, ()))
    assert shortage(wanted, plan, Snapshot.of_pods(nodes, ())) is None
    full = Snapshot.of_pods(nodes, (program("cache", "b", memory="31Gi"),))
    assert shortage(wanted, plan, full) == "the node b has 1.0 of 3.5 GiB of memory free"
    assert shortage(wanted, plan, Snapshot.of_pods(nodes[:1], ())) == "the node b is gone"


def test_members_that_share_a_node_need_room_together() -> None:
    wanted = deployment("nano.yaml")
    both = (node("a", room={"cpu": "2", "memory": "8Gi"}),)
    plan = planned(wanted, Snapshot.of_pods(both, ()))
    small = (node("a", room={"cpu": "2", "memory": "6Gi"}),)
    assert shortage(wanted, plan, Snapshot.of_pods(both, ())) is None
    assert shortage(wanted, plan, Snapshot.of_pods(small, ())) == "the node a has 2.5 of 3.5 GiB of memory free"


@pytest.mark.parametrize("text", ["1Pi", "1E", "100u", "5n", "12e6", "3Ei"])
def test_every_quantity_in_requests_of_foreign_pods_is_accepted(text: str) -> None:
    greedy = program("greedy", "a", **{"memory": text, "cpu": text, "example.com/fpga": text})
    wanted = deployment("nano.yaml")
    nodes = (node("a"), node("b"), node("c"))
    assert len(nodes_of(planned(wanted, Snapshot.of_pods(nodes, (greedy,))))) == 2


def test_fractions_are_rounded_as_the_scheduler_does() -> None:
    (one,) = Snapshot.of_pods((), (program("tiny", "a", cpu="100u", memory="1500m"),)).requests
    assert one.requests == {"cpu": 1, "memory": 2, "pods": 1}


CONTAINERS = st.lists(
    st.integers(0, 8).map(lambda number: {"resources": {"requests": {"memory": f"{number}Gi"}}}), max_size=4
)
INITIAL = st.lists(
    st.tuples(st.integers(0, 8), st.booleans()).map(
        lambda one: {
            "resources": {"requests": {"memory": f"{one[0]}Gi"}},
            **({"restartPolicy": "Always"} if one[1] else {}),
        }
    ),
    max_size=5,
)


@given(CONTAINERS, INITIAL, st.none() | st.integers(0, 8), st.integers(0, 2))
def test_requests_are_the_most_that_runs_at_once(
    containers: list[Manifest], initial: list[Manifest], own: int | None, overhead: int
) -> None:
    """Compares with a simulation that runs the containers of a pod in their order."""

    def size(container: Manifest) -> int:
        return int(container["resources"]["requests"]["memory"].removesuffix("Gi"))

    sidecars = most = 0
    for container in initial:
        if container.get("restartPolicy") == "Always":
            sidecars += size(container)
            most = max(most, sidecars)
        else:
            most = max(most, sidecars + size(container))
    most = max(most, sidecars + sum(map(size, containers)))
    spec: Manifest = {"nodeName": "a", "containers": containers, "initContainers": initial}
    spec["overhead"] = {"memory": f"{overhead}Gi"}
    if own is not None:
        spec["resources"] = {"requests": {"memory": f"{own}Gi"}}
    pod: Manifest = {"metadata": {"name": "x", "namespace": "a"}, "spec": spec}
    expected = (most if own is None else own) + overhead
    (found,) = Snapshot.of_pods((), (pod,)).requests
    assert found.requests.get("memory", 0) == expected << 30
    slim = _kept_of_pod(pod)
    assert slim is not None
    (kept,) = Snapshot.of_pods((), (slim,)).requests
    assert dict(kept.requests) == dict(found.requests)


def test_a_node_takes_no_more_pods_than_it_allows() -> None:
    wanted = deployment("nano.yaml")
    nodes = (node("a", room={**PLAIN_ROOM, "pods": "2"}), node("b"), node("c"))
    others = [program(f"p{number}", "a", cpu="1m", memory="1Mi") for number in range(2)]
    facts = planned(wanted, Snapshot.of_pods(nodes, others))
    assert nodes_of(facts) == ["b", "c"]


def test_reservations_for_one_group_do_not_reduce_the_capacity_of_another() -> None:
    snapshot = Snapshot.of_pods((node("a"),), (program("p", "a", cpu="1", memory="1Gi"),))
    before = dict(snapshot.capacity_for(("x", "x", "0", "u"))[0].free)
    (mine,) = snapshot.capacity_for(("x", "x", "0", "u"))
    mine.take({"cpu": 1000, "pods": 1})
    mine.reserve(snapshot.requests[0])
    assert snapshot.capacity_for(("x", "x", "1", "u"))[0].free == before
