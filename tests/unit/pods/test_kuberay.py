"""Members as pods of a RayCluster: its parts, its end, and the behaviour of an operator without KubeRay."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dsv4_operator.api import DSV4Deployment, InvalidDeployment, NodeLossSpec, parse
from dsv4_operator.api.policy import ClusterPolicy, violations
from dsv4_operator.api.values import format_time
from dsv4_operator.backends.pods import Cluster, KubeRayBackend
from dsv4_operator.backends.pods import backend as backends
from dsv4_operator.backends.pods.backend import KubeRayUnavailable
from dsv4_operator.backends.pods.fencing import RayClusterFencer
from dsv4_operator.backends.pods.scheduling import Snapshot, facts
from dsv4_operator.builders import member, names
from dsv4_operator.controller.operator import Operator, OperatorOptions
from dsv4_operator.kube import PODS, Access, Invalid, Listing, NotFound, PodCache
from dsv4_operator.lifecycle.observed import GroupKey
from dsv4_operator.planning import plan_group
from dsv4_runtime.agent.ray import with_command
from dsv4_runtime.contract import GroupPlan
from dsv4_testkit.fake_kube import FakeKube
from dsv4_testkit.pod_objects import EXAMPLES, node

POLICY = ClusterPolicy(backends=("KubeRay",))
UID = "uid-d"
KEY = GroupKey("team", "d", 0, UID)
REPLACE = NodeLossSpec(after=10.0)


def deployed(name: str = "d", **spec: Any) -> DSV4Deployment:
    data = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())
    data["metadata"] = {"name": name, "namespace": "team", "uid": UID, "generation": 1}
    data["spec"] |= spec
    return parse(data)


def planned(deployment: DSV4Deployment, incarnation: int = 1) -> GroupPlan:
    nodes = (node("a"), node("b"))
    return plan_group(deployment, facts(deployment, Snapshot.of_pods(nodes, ())), group=0, incarnation=incarnation)


def ray_cluster(deployment: DSV4Deployment, incarnation: int = 1) -> dict[str, Any]:
    plan = planned(deployment, incarnation)
    host = member.Host(POLICY, "runtime:1")
    pods = [member.member_pod(deployment, plan, rank, host=host) for rank in range(len(plan.members))]
    return member.ray_cluster(deployment, plan, pods)


def made_by_kuberay(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pods of a RayCluster as KubeRay creates them."""
    spec, name = cluster["spec"], cluster["metadata"]["name"]
    groups = [("head", spec["headGroupSpec"])]
    groups += [(f"{one['groupName']}-worker", one) for one in spec["workerGroupSpecs"]]
    owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": name, "uid": cluster["metadata"]["uid"]}
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **group["template"]["metadata"],
                "name": f"{name}-{kind}-x7k2p",
                "namespace": "team",
                "ownerReferences": [owner | {"controller": True}],
            },
            "spec": group["template"]["spec"],
        }
        for kind, group in groups
    ]


class Kube(FakeKube):
    """An API server that keeps pods until their finalizers are removed."""

    async def delete(self, resource: Any, namespace: Any, name: str, **options: Any) -> None:
        where = (resource.kind, namespace or "", name)
        held = self.objects.get(where)
        before = held["metadata"].get("deletionGracePeriodSeconds") if held is not None else None
        await super().delete(resource, namespace, name, **options)
        if held is not None and held["metadata"].get("finalizers"):
            held["metadata"] |= {"deletionTimestamp": "2026-11-23T00:00:00Z"}
            grace = options.get("grace_seconds") or 0
            # A later deletion can only shorten the grace period.
            held["metadata"]["deletionGracePeriodSeconds"] = grace if before is None else min(before, grace)
            self.objects[where] = held

    async def patch(self, resource: Any, namespace: Any, name: str, changes: Any, **options: Any) -> Any:
        found = await super().patch(resource, namespace, name, changes, **options)
        about = found["metadata"]
        if about.get("deletionTimestamp") and not about.get("finalizers"):
            del self.objects[resource.kind, namespace or "", name]
        return found

    def confirm(self) -> None:
        """Confirm the end of all containers, as a kubelet does."""
        for (kind, _, _), one in self.objects.items():
            if kind == "Pod" and one["metadata"].get("deletionTimestamp"):
                one["metadata"]["deletionGracePeriodSeconds"] = 0

    def names(self, kind: str) -> list[str]:
        return sorted(name for of, _, name in self.objects if of == kind)


@pytest.fixture
def kube() -> Kube:
    found = Kube()
    cluster = found._put(("RayCluster", "team", "d-0-i1"), ray_cluster(deployed()))
    for pod in made_by_kuberay(cluster):
        found._put(("Pod", "team", pod["metadata"]["name"]), pod)
    return found


def fencer(kube: Kube) -> RayClusterFencer:
    any_kube: Any = kube
    return RayClusterFencer(any_kube)


def backend(kube: Kube) -> KubeRayBackend:
    any_kube: Any = kube
    pods = PodCache(any_kube)
    for (kind, _, _), one in kube.objects.items():
        if kind == "Pod":
            pods._put(one)
    cluster = Cluster(any_kube, pods, runtime_image="runtime:1", policy=POLICY)
    return KubeRayBackend(cluster, changed=lambda *_: None, ray_clusters=None)


# Names.


@pytest.mark.parametrize(
    ("name", "member_of"),
    [
        ("d-0-i1-r3", ("d", 0, 1, 3)),
        ("d-0-i1-head-x7k2p", ("d", 0, 1, 0)),
        ("d-0-i1-head", ("d", 0, 1, 0)),
        ("my-model-2-i14-r11-worker-x7k2p", ("my-model", 2, 14, 11)),
        ("d-0-i1-r3-worker", None),
        ("d-0-i1-r3-x7k2p", None),
        ("d-0-i1-worker-x7k2p", None),
        ("d-0-i1-head-x7k2pq", None),
    ],
)
def test_the_member_in_the_name_of_a_pod(name: str, member_of: tuple[str, int, int, int] | None) -> None:
    assert names.parse_member_name(name) == member_of
    assert names.planned_name(name) == (names.member_name(*member_of) if member_of else name)


def test_a_pod_of_kuberay_belongs_to_the_deployment_that_its_template_names(kube: Kube) -> None:
    pod = next(one for (kind, _, _), one in kube.objects.items() if kind == "Pod")
    assert names.belongs(pod, UID)
    assert not names.belongs(pod, "uid-other")
    assert not names.belongs(pod, pod["metadata"]["ownerReferences"][0]["uid"])
    # The annotation alone is not sufficient.
    assert not names.belongs({"metadata": {**pod["metadata"], "ownerReferences": []}}, UID)
    other = [{**pod["metadata"]["ownerReferences"][0], "kind": "ReplicaSet"}]
    assert not names.belongs({"metadata": {**pod["metadata"], "ownerReferences": other}}, UID)


# The command.


def generated(deployment: DSV4Deployment, rank: int) -> str:
    """Return `ray start` in the form of KubeRay 1.6 (`generateRayStartCommand`, `convertParamMap`)."""
    spec = ray_cluster(deployment)["spec"]
    params = spec["headGroupSpec" if rank == 0 else "workerGroupSpecs"]
    params = dict((params if rank == 0 else params[rank - 1])["rayStartParams"])
    params |= {"block": "true", "metrics-export-port": "8080", "dashboard-agent-listen-port": "52365"}
    params.setdefault("memory", "8078845952")
    text = ""
    for name in sorted(params):
        value = params[name]
        if value in ("true", "false") and name not in ("log-color", "include-dashboard"):
            text += f" --{name} " if value == "true" else ""
        else:
            text += f" --{name}={value} "
    return f"ray start {'--head ' if rank == 0 else ''}{text}"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_agent_starts_ray_by_the_command_of_kuberay(rank: int) -> None:
    plan = planned(deployed())
    command = generated(deployed(), rank)
    found = with_command(plan, rank, command)
    assert found.members[rank].ray_args == tuple(shlex.split(command)[1:])
    assert set(found.members[rank].ray_args) >= {"start", "--block", "--metrics-export-port=8080"}
    assert found.members[1 - rank] == plan.members[1 - rank]
    # All arguments of the plan remain.
    wanted = {word.replace("=false", "=no") for word in plan.members[rank].ray_args}
    assert wanted <= set(found.members[rank].ray_args)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("--port=6379", "--port=6380", "lacks --port=6379"),
        ("--no-monitor", "", "lacks --no-monitor"),
        ("--include-log-monitor=no", "", "lacks --include-log-monitor=false"),
        ("ray start", "ray stop", "is no `ray start`"),
        ("ray start", "sleep", "is no `ray start`"),
    ],
)
def test_a_command_that_lacks_a_part_of_the_plan_is_refused(old: str, new: str, problem: str) -> None:
    command = generated(deployed(), 0)
    assert old in command
    with pytest.raises(ValueError, match=f"KUBERAY_GEN_RAY_START_CMD: the command of KubeRay {problem}"):
        with_command(planned(deployed()), 0, command.replace(old, new))


# The end.


async def test_kuberay_stops_before_the_pods_are_ended_and_they_are_let_go_last(kube: Kube) -> None:
    ends = fencer(kube)
    assert not await ends.fence(KEY, 1, REPLACE)
    assert [line.partition("-x7k2p")[0] for line in kube.writes()] == [
        "patch RayCluster d-0-i1",
        "delete Pod d-0-i1-head",
        "delete Pod d-0-i1-r1-worker",
    ]
    assert kube.objects["RayCluster", "team", "d-0-i1"]["spec"]["suspend"] is True
    # A second call does not repeat the requests.
    kube.requests.clear()
    assert not await ends.fence(KEY, 1, REPLACE)
    assert kube.writes() == []
    kube.confirm()
    assert await ends.fence(KEY, 1, REPLACE)
    kinds = [line.split()[1] for line in kube.writes()]
    assert kinds.index("RayCluster") < kinds.index("Pod")
    assert kube.names("Pod") == kube.names("RayCluster") == []
    assert await ends.fence(KEY, 1, REPLACE)


async def test_others_objects_of_the_same_name_are_left_alone(kube: Kube) -> None:
    for (kind, _, _), one in kube.objects.items():
        if kind == "Pod":
            one["metadata"]["annotations"][names.OWNER_UID] = "uid-other"
        else:
            one["metadata"]["ownerReferences"][0]["uid"] = "uid-other"
    assert await fencer(kube).fence(KEY, 1, REPLACE)
    await fencer(kube).forget(KEY, 1)
    assert kube.writes() == []


async def test_an_end_that_was_interrupted_before_the_pods_were_let_go_is_finished(kube: Kube) -> None:
    ends = fencer(kube)
    await ends.fence(KEY, 1, REPLACE)
    kube.confirm()
    del kube.objects["RayCluster", "team", "d-0-i1"]
    await ends.forget(KEY, 1)
    assert kube.names("Pod") == []


async def test_finalizers_of_others_stay(kube: Kube) -> None:
    for (kind, _, _), one in kube.objects.items():
        if kind == "Pod":
            one["metadata"]["finalizers"] = ["other.example/hold", names.HELD]
    ends = fencer(kube)
    await ends.fence(KEY, 1, REPLACE)
    kube.confirm()
    assert await ends.fence(KEY, 1, REPLACE)
    pods = [one for (kind, _, _), one in kube.objects.items() if kind == "Pod"]
    assert [one["metadata"]["finalizers"] for one in pods] == [["other.example/hold"]] * 2


async def test_a_pod_without_a_deployment_is_let_go_once_kuberay_would_not_replace_it(kube: Kube) -> None:
    ends = fencer(kube)
    await kube.delete(PODS, "team", "d-0-i1-head-x7k2p", grace_seconds=30)
    await ends.let_go_orphan(kube.objects["Pod", "team", "d-0-i1-head-x7k2p"])
    assert "d-0-i1-head-x7k2p" in kube.names("Pod")
    kube.objects["RayCluster", "team", "d-0-i1"]["metadata"]["deletionTimestamp"] = "2026-11-23T00:00:00Z"
    await ends.let_go_orphan(kube.objects["Pod", "team", "d-0-i1-head-x7k2p"])
    assert kube.names("Pod") == ["d-0-i1-r1-worker-x7k2p"]


async def test_a_leftover_of_an_earlier_incarnation_goes_with_its_token(kube: Kube) -> None:
    kube._put(("Secret", "team", "d-0-i1"), member.token_secret(deployed(), 0, 1, "token"))
    kube._put(("Service", "team", "d-0-i1"), member.incarnation_service(deployed(), 0, 1))
    await fencer(kube).sweep(KEY, 2)
    assert kube.names("RayCluster") == kube.names("Secret") == kube.names("Service") == []


async def test_pods_of_an_earlier_deployment_of_the_name_are_let_go(
    kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was deleted and created again before its pods ended."""
    monkeypatch.setattr(backends, "_FIRST_PAUSE", 0.0)
    await kube.delete(PODS, "team", "d-0-i1-head-x7k2p", grace_seconds=30)
    del kube.objects["RayCluster", "team", "d-0-i1"]
    ours = backend(kube)
    ours.orphaned(("team", "d", 0), UID)
    assert not ours._orphans, "they belong to the present one"
    ours.orphaned(("team", "d", 0), "uid-later")
    for _ in range(10):
        await asyncio.sleep(0)
    assert kube.names("Pod") == ["d-0-i1-r1-worker-x7k2p"]
    await ours.close()


async def test_the_end_of_a_deployment_is_no_event_of_its_pods(kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pods may have ended before, and change no more."""
    told: list[tuple[int, str | None]] = []
    options = OperatorOptions((), "team", 0, None, Path(), "one", None, Path(), "runtime:1", POLICY)
    operator = Operator(Access("http://127.0.0.1:1"), options)
    monkeypatch.setattr(operator._queue, "add", lambda _: None)
    for (kind, _, _), one in kube.objects.items():
        if kind == "Pod":
            operator._pods._put(one)
    monkeypatch.setattr(operator._backends, "orphaned", lambda key, uid: told.append((key[2], uid)))

    def manifest(uid: str, version: int) -> dict[str, Any]:
        return {"metadata": {"namespace": "team", "name": "d", "uid": uid, "resourceVersion": str(version)}}

    operator._on_event(manifest(UID, 1), False)
    operator._on_event(manifest(UID, 2), False)
    operator._on_event(manifest(UID, 3), True)
    operator._on_event(manifest("uid-later", 4), False)
    assert told == [(0, UID), (0, None), (0, "uid-later")]
    # The watch missed the deletion.
    for key in operator._deployments.handle_listing(Listing([], "9"), None):
        operator._check_orphans(key)
    assert told[3:] == [(0, None)]
    # Other deployments of similar names have other pods.
    operator._on_event({"metadata": manifest("uid-other", 10)["metadata"] | {"name": "d-0"}}, False)
    assert len(told) == 4


# The backend.


async def test_a_group_with_existing_pods_causes_no_request(kube: Kube) -> None:
    ours = backend(kube)
    kube.requests.clear()
    await ours.ensure(deployed(), planned(deployed()))
    assert kube.requests == []
    seen = await ours.observe(deployed(), 0)
    assert {(one.incarnation, one.rank) for one in seen.members} == {(1, 0), (1, 1)}
    assert seen.anomalies == ()
    await ours.close()


async def test_a_deleted_raycluster_is_not_made_again_beside_its_pods(kube: Kube) -> None:
    del kube.objects["RayCluster", "team", "d-0-i1"], kube.objects["Pod", "team", "d-0-i1-head-x7k2p"]
    ours = backend(kube)
    await ours.ensure(deployed(), planned(deployed()))
    assert kube.writes() == []
    await ours.close()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({}, "ranks 1 of RayCluster team/d-0-i1 within 15 s: check that its operator runs"),
        ({"observedGeneration": 1}, "within 15 s: see `kubectl describe raycluster -n team d-0-i1`"),
        (
            {"conditions": [{"type": "ReplicaFailure", "status": "True", "reason": "Quota", "message": "no room"}]},
            "within 15 s: Quota: no room",
        ),
    ],
)
async def test_kuberays_conditions_are_reported_for_missing_pods(
    kube: Kube, status: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kube.objects["RayCluster", "team", "d-0-i1"]["status"] = status
    del kube.objects["Pod", "team", "d-0-i1-r1-worker-x7k2p"]
    ours = backend(kube)
    await ours.ensure(deployed(), planned(deployed()))
    now = time.monotonic()
    monkeypatch.setattr(backends, "time", SimpleNamespace(monotonic=lambda: now + 16))
    with pytest.raises(KubeRayUnavailable) as said:
        await ours.ensure(deployed(), planned(deployed()))
    assert words in str(said.value)
    await ours.close()
    # An operator that starts counts from the creation of the RayCluster.
    live = kube.objects["RayCluster", "team", "d-0-i1"]["metadata"]
    for seconds in (1.0, 600.0):
        live["creationTimestamp"] = format_time(time.time() - seconds)
        another = backend(kube)
        with pytest.raises(KubeRayUnavailable) if seconds > 15 else contextlib.nullcontext():
            await another.ensure(deployed(), planned(deployed()))
        await another.close()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NotFound("create: 404"), "the cluster has no RayCluster (ray.io/v1); install KubeRay 1.5 or later"),
        (Invalid('strict decoding error: unknown field "spec.authOptions"'), "in the cluster is too old; install"),
    ],
)
async def test_a_missing_or_old_kuberay_is_named(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"apiVersion": "v1", "kind": "Node", **node(name)} for name in "ab"]
    kube = Kube(nodes)
    real = kube.create

    async def create(manifest: Any, **options: Any) -> Any:
        if manifest["kind"] == "RayCluster":
            assert options["strict"]
            raise error
        return await real(manifest, **options)

    monkeypatch.setattr(kube, "create", create)
    ours = backend(kube)
    with pytest.raises(KubeRayUnavailable) as said:
        await ours.ensure(deployed(), planned(deployed()))
    assert words in str(said.value)
    assert str(said.value).startswith("spec.backend: ")
    await ours.close()


def test_a_name_that_kuberay_would_shorten_is_refused_with_the_longest() -> None:
    with pytest.raises(InvalidDeployment, match=r"metadata.name: .* is too long for the backend KubeRay; .* 36 char"):
        deployed("a" * 37)
    assert deployed("a" * 37, backend="Pods")
    # The names of its pods are not shortened, even for the last group and rank and a late incarnation.
    assert len(names.member_name(deployed("a" * 36).metadata.name, 31, 99_999, 15)) == 50


# The specification.


def test_it_needs_the_permission_of_the_administrator() -> None:
    (found,) = violations(deployed(), ClusterPolicy(), "runtime:1")
    assert (found.field, found.remedy) == (
        "spec.backend",
        "write Pods, or have the administrator of the cluster extend policy.backends",
    )
    assert violations(deployed(), POLICY, "runtime:1") == ()


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"engine": {"executor": "MP"}}, "spec.engine.executor"),
        (
            {"topology": {"hardware": "CPU", "nodesPerGroup": 2, "scheduler": {"type": "Volcano"}}},
            "spec.topology.scheduler",
        ),
    ],
)
def test_fields_that_kuberay_excludes_are_refused(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidDeployment) as said:
        deployed(**spec)
    assert [one.field for one in said.value.findings] == [field]
    assert deployed(**spec, backend="Pods").spec.backend == "Pods"
