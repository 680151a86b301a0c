"""Groups whose nodes another scheduler chooses: membership, waits, removals, and absence of the scheduler."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dsv4_operator.api import InvalidDeployment, SchedulerType
from dsv4_operator.backends.pods.fencing import Fencer
from dsv4_operator.backends.pods.observe import is_finalizing
from dsv4_operator.backends.pods.scheduling import unplaced_facts
from dsv4_operator.builders import names
from dsv4_operator.builders.member import Host, is_queued, member_pod
from dsv4_operator.kube import COSCHEDULING_POD_GROUPS, PODS, VOLCANO_POD_GROUPS, NotFound
from dsv4_operator.lifecycle.observed import GroupKey
from dsv4_operator.planning import plan_group
from dsv4_runtime.contract import Cause
from dsv4_testkit.fake_kube import FakeKube
from dsv4_testkit.pod_objects import ALLOWED, deployment, owners
from dsv4_testkit.pods_world import UID, World

SPECS: dict[SchedulerType, dict[str, str]] = {
    SchedulerType.KUEUE: {"type": "Kueue", "queue": "models"},
    SchedulerType.VOLCANO: {"type": "Volcano", "queue": "models"},
    SchedulerType.COSCHEDULING: {"type": "Coscheduling"},
}
OBJECTS = {
    SchedulerType.KUEUE: ("Workload", "kueue.x-k8s.io/v1beta1", "QuotaReserved", "False"),
    SchedulerType.VOLCANO: ("PodGroup", "scheduling.volcano.sh/v1beta1", "Unschedulable", "True"),
    SchedulerType.COSCHEDULING: ("PodGroup", "scheduling.x-k8s.io/v1alpha1", "Unschedulable", "True"),
}
"""Object of a group, and its condition while the group waits."""
SHORT = "couldn't assign flavors: insufficient unused quota for nvidia.com/gpu"


@pytest.fixture(params=SchedulerType)
async def queued(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """A deployment with a scheduler in the cluster that has not placed its group."""
    kind: SchedulerType = request.param
    topology = {"hardware": "CPU", "nodesPerGroup": 2, "nodeSelector": {"pool": "a"}, "scheduler": SPECS[kind]}
    world = World(monkeypatch, schedulers=tuple(SchedulerType), topology=topology)
    queue = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "LocalQueue"}
    world.kube._put(("LocalQueue", "team", "models"), queue | {"metadata": {"name": "models", "namespace": "team"}})
    world.placing = False
    yield world
    await world.close()


def kind_of(world: World) -> SchedulerType:
    return SchedulerType(world.live()["spec"]["topology"]["scheduler"]["type"])


def group(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.status["groups"][0]
    return found


def pod_groups(world: World) -> list[str]:
    return sorted(name for kind, _, name in world.kube.objects if kind == "PodGroup")


def refuse(world: World, incarnation: int = 1) -> None:
    """Report the reason why the group waits, as the scheduler does."""
    kind, version, condition, status = OBJECTS[kind_of(world)]
    name = kind, "team", f"nano-0-i{incarnation}"
    live = copy.deepcopy(world.kube.objects.get(name)) or {
        "apiVersion": version, "kind": kind, "metadata": {"name": name[2], "namespace": "team"},
    }  # fmt: skip
    live["status"] = {"conditions": [{"type": condition, "status": status, "message": SHORT}]}
    world.kube._put(name, live)


def remove(world: World, incarnation: int, rank: int) -> None:
    """Delete a member as a preempting scheduler does, before its kubelet has ended it."""
    name = "Pod", "team", names.member_name("nano", 0, incarnation, rank)
    pod = copy.deepcopy(world.kube.objects[name])
    pod["metadata"] |= {"deletionTimestamp": "2026-11-26T00:00:00Z", "deletionGracePeriodSeconds": 30}
    reason = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "for train-1"}
    pod["status"]["conditions"] = [*pod["status"]["conditions"], reason]
    world.lingering.add(name[2])
    world.kube._put(name, pod)


async def test_members_have_a_group_and_no_node(queued: World) -> None:
    await queued.until(lambda: queued.status and group(queued)["phase"] == "Queued", 20.0)
    kind, pods = kind_of(queued), queued.pods(1)
    assert len(pods) == 2
    for pod in pods:
        about, spec = pod["metadata"], pod["spec"]
        assert about["labels"]["dsv4.dev/scheduler"] == kind
        assert "nodeName" not in spec
        assert "nodeAffinity" not in spec["affinity"]
        assert spec["nodeSelector"] == {"pool": "a"}
        assert spec["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"]["dsv4.dev/group"] == "0"
        match kind:
            case SchedulerType.KUEUE:
                assert "schedulerName" not in spec
                assert spec["schedulingGates"] == [{"name": "kueue.x-k8s.io/admission"}]
                assert about["labels"]["kueue.x-k8s.io/queue-name"] == "models"
                assert about["labels"]["kueue.x-k8s.io/pod-group-name"] == "nano-0-i1"
                assert about["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"
            case SchedulerType.VOLCANO:
                assert spec["schedulerName"] == "volcano"
                assert about["annotations"] == {"scheduling.k8s.io/group-name": "nano-0-i1"}
            case SchedulerType.COSCHEDULING:
                assert spec["schedulerName"] == "scheduler-plugins-scheduler"
                assert about["labels"]["scheduling.x-k8s.io/pod-group"] == "nano-0-i1"
    assert pod_groups(queued) == ([] if kind is SchedulerType.KUEUE else ["nano-0-i1"])
    for name in pod_groups(queued):
        live = queued.kube.objects["PodGroup", "team", name]
        assert live["apiVersion"] == OBJECTS[kind][1]
        assert names.belongs(live, UID)
        assert live["spec"]["minMember"] == 2
        assert live["spec"].get("queue") == SPECS[kind].get("queue")
        one = int(pods[0]["spec"]["containers"][0]["resources"]["requests"]["memory"])
        assert int(live["spec"]["minResources"]["memory"]) == 2 * one
    assert not queued.backend._cluster._reserved, "the scheduler reserves nodes itself"


async def test_a_wait_of_any_length_uses_no_restart_and_has_the_schedulers_reason(queued: World) -> None:
    await queued.until(lambda: queued.status and group(queued)["phase"] == "Queued", 20.0)
    refuse(queued)
    queued.backend._pod_groups._reasons.clear()
    for _ in range(5):
        await queued.step()
        await asyncio.sleep(0)
    for _ in range(50):
        queued.now += 3600.0
        await queued.step()
    assert (group(queued)["phase"], group(queued)["incarnation"], group(queued).get("restarts", [])) == (
        "Queued",
        1,
        [],
    )
    assert queued.condition("Progressing")[1] == "GroupQueued"
    assert SHORT in queued.condition("Progressing")[2]
    assert SHORT in queued.condition("Ready")[2]
    assert queued.condition("Degraded")[0] == "False"
    assert queued.status["phase"] == "Pending"
    assert any(event.reason == "GroupQueued" and SHORT in event.message for event in queued.events)
    queued.placing = True
    await queued.until(lambda: group(queued)["phase"] == "Serving", 20.0)
    assert group(queued)["incarnation"] == 1
    assert [one["node"] for one in group(queued)["members"]] == ["n0", "n1"]
    assert "history" not in group(queued) or not group(queued)["history"]


async def test_removed_members_are_no_failure_of_the_engine(queued: World) -> None:
    queued.placing = True
    await queued.serve()
    for incarnation in (1, 2, 3):
        remove(queued, incarnation, 1)
        await queued.until(lambda: group(queued)["phase"] == "Recovering", 5.0)
        failure = group(queued)["lastFailure"]
        assert (failure["cause"], failure["culpritRank"]) == (Cause.PLACEMENT_LOST, 1)
        assert "PreemptionByScheduler: for train-1" in failure["message"]
        assert not queued.formed(incarnation + 1), "the removed member has not ended"
        queued.lingering.clear()
        await queued.until(lambda: group(queued)["phase"] == "Serving", 60.0)
        assert queued.formed(incarnation + 1)
        assert group(queued)["incarnation"] == incarnation + 1
        assert group(queued).get("restarts", []) == []
        assert group(queued).get("totalRestarts", 0) == 0
        if kind_of(queued) is not SchedulerType.KUEUE:
            assert pod_groups(queued) == [f"nano-0-i{incarnation + 1}"]


async def test_a_stopped_group_leaves_nothing_in_its_scheduler(queued: World) -> None:
    queued.placing = True
    await queued.serve()
    queued.change(suspend=True)
    await queued.until(lambda: queued.status["phase"] == "Suspended", 20.0)
    assert (queued.pods(), pod_groups(queued)) == ([], [])


async def test_an_engine_that_dies_still_uses_a_restart(queued: World) -> None:
    queued.placing = True
    await queued.serve()
    queued.end(1, 1)
    await queued.until(lambda: group(queued)["incarnation"] == 2, 60.0)
    assert len(group(queued)["restarts"]) == 1


async def test_an_agent_that_fails_while_members_are_unplaced_uses_no_restart(queued: World) -> None:
    await queued.until(lambda: queued.status and group(queued)["phase"] == "Queued", 20.0)
    pod = queued.kube.objects["Pod", "team", "nano-0-i1-r0"]
    pod["spec"]["nodeName"] = "n0"
    queued.end(1, 0)
    await queued.until(lambda: group(queued)["phase"] != "Queued", 5.0)
    assert group(queued)["lastFailure"]["cause"] == Cause.PLACEMENT_LOST
    queued.placing = True
    await queued.until(lambda: group(queued)["phase"] == "Serving", 60.0)
    assert (group(queued)["incarnation"], group(queued).get("restarts", [])) == (2, [])


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
async def test_a_queued_member_that_is_deleted_uses_no_restart(queued: World, ranks: tuple[int, ...]) -> None:
    """The API server removes a pod without a node at once."""
    await queued.until(lambda: queued.status and group(queued)["phase"] == "Queued", 20.0)
    for rank in ranks:
        del queued.kube.objects["Pod", "team", f"nano-0-i1-r{rank}"]
    await queued.until(lambda: queued.formed(2), 60.0)
    assert group(queued)["lastFailure"]["cause"] == Cause.PLACEMENT_LOST
    assert group(queued).get("restarts", []) == []


async def test_a_missing_scheduler_is_one_condition_with_the_remedy(queued: World) -> None:
    if kind_of(queued) is SchedulerType.KUEUE:
        queue = queued.kube.objects.pop(("LocalQueue", "team", "models"))
    else:
        queued.kube.failing["create", "PodGroup"] = NotFound("POST /apis: 404 could not find the requested resource")
    await queued.until(lambda: queued.status and queued.condition("Progressing")[1] == "SchedulerMissing", 20.0)
    assert queued.condition("Progressing")[2].count("spec.topology.scheduler") == 2
    assert f"install {kind_of(queued)}" in queued.condition("Progressing")[2]
    assert queued.pods() == []
    queued.kube.failing.clear()
    if kind_of(queued) is SchedulerType.KUEUE:
        queued.kube.objects["LocalQueue", "team", "models"] = queue
    queued.placing = True
    await queued.until(lambda: queued.status["phase"] == "Serving", 120.0)
    assert group(queued)["incarnation"] == 1


@pytest.mark.parametrize("queued", [SchedulerType.VOLCANO, SchedulerType.COSCHEDULING], indirect=True)
async def test_a_pod_group_of_another_owner_is_not_touched(queued: World) -> None:
    about = {"name": "nano-0-i1", "namespace": "team", "ownerReferences": owners("other", "uid-other")}
    queued.kube._put(("PodGroup", "team", "nano-0-i1"), {"kind": "PodGroup", "metadata": about, "spec": {}})
    await queued.until(lambda: queued.status and queued.condition("Progressing")[1] == "ForeignObject", 20.0)
    queued.change(suspend=True)
    await queued.until(lambda: queued.status["phase"] == "Suspended", 20.0)
    assert pod_groups(queued) == ["nano-0-i1"]


async def test_a_scheduler_that_the_administrator_does_not_allow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = {"hardware": "CPU", "nodesPerGroup": 2, "scheduler": SPECS[SchedulerType.VOLCANO]}
    world = World(monkeypatch, schedulers=[SchedulerType.KUEUE], topology=topology)
    await world.until(lambda: world.status and world.condition("Accepted")[1] == "NotAllowed", 20.0)
    assert "policy.schedulers" in world.condition("Accepted")[2]
    assert world.pods() == []
    await world.close()


async def test_pods_that_only_finalizers_keep_have_ended() -> None:
    """Kueue keeps pods until it has counted them."""
    labels = names.labels("d", component=names.MEMBER, group=0, incarnation=1, rank=0)
    about = {"namespace": "team", "name": "d-0-i1-r0", "labels": labels, "ownerReferences": owners("d", "uid-d")}
    about |= {"finalizers": ["kueue.x-k8s.io/managed"], "deletionTimestamp": "2026-11-26T00:00:00Z"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": {"nodeName": "a"}}
    key = GroupKey("team", "d", 0, "uid-d")
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a"}, "status": {}}
    for grace, ended in ((2, False), (0, True)):
        about["deletionGracePeriodSeconds"] = grace
        kube: Any = FakeKube([pod, node])
        assert is_finalizing(await kube.get(PODS, "team", "d-0-i1-r0")) is ended
        fencer = Fencer(kube, pod_groups=(VOLCANO_POD_GROUPS, COSCHEDULING_POD_GROUPS))
        assert await fencer.fence(key, 1, deployment().spec.recovery.node_loss) is ended


@pytest.mark.parametrize("kind", SchedulerType)
@pytest.mark.parametrize("file", ["nano.yaml", "flash-2x-spark.yaml"])
def test_a_plan_without_nodes_has_names_for_addresses(kind: SchedulerType, file: str) -> None:
    wanted = deployment(file, scheduler=SPECS[kind])
    plan = plan_group(wanted, unplaced_facts(wanted), group=0, incarnation=4)
    name = wanted.metadata.name
    assert [member.node for member in plan.members] == [None, None]
    assert [member.address for member in plan.members] == [f"{name}-0-i4-r{n}.{name}-0-i4.team.svc" for n in (0, 1)]
    for rank in (0, 1):
        pod = member_pod(wanted, plan, rank, host=Host(ALLOWED, "runtime"))
        agent = pod["spec"]["containers"][0]
        assert "--address=$(DSV4_POD_IP)" in agent["args"]
        assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == (f"{name}-0-i4-r{rank}", f"{name}-0-i4")
        assert bool(pod["spec"]["affinity"].get("podAntiAffinity")) is wanted.spec.topology.exclusive
        assert is_queued(pod)


@pytest.mark.parametrize(
    ("topology", "field"),
    [
        ({"scheduler": {"type": "Kueue"}}, "spec.topology.scheduler.queue"),
        ({"scheduler": {"type": "Coscheduling", "queue": "q"}}, "spec.topology.scheduler.queue"),
        ({"scheduler": {"type": "Volcano"}, "nodes": ["a", "b"]}, "spec.topology.nodes"),
        ({"scheduler": {"type": "Volcano"}, "topologyKey": "a/b"}, "spec.topology.topologyKey"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(topology: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidDeployment) as refused:
        deployment(**topology)
    assert [one.field for one in refused.value.findings] == [field]
