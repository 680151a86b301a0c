"""Fencing of members: deletion by uid, and without the kubelet's confirmation only if the node is known to be lost."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from dsv4_operator.api import NodeLossSpec
from dsv4_operator.backends.pods import fencing
from dsv4_operator.backends.pods.fencing import FenceError, Fencer
from dsv4_operator.builders import names
from dsv4_operator.kube import CONFIG_MAPS, SECRETS, KubeError, Resource
from dsv4_operator.lifecycle.observed import GroupKey
from dsv4_testkit.errors import raises_naming
from dsv4_testkit.fake_kube import FakeKube
from dsv4_testkit.pod_objects import deployment, node, owners
from dsv4_testkit.waiting import until

KEY = GroupKey("team", "d", 0, "uid-d")
POLICY = NodeLossSpec(after=10.0)


def pod(incarnation: int = 1, rank: int = 0, on: str = "a") -> dict[str, Any]:
    labels = names.labels("d", component=names.MEMBER, group=0, incarnation=incarnation, rank=rank)
    name = names.member_name("d", 0, incarnation, rank)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "team", "name": name, "labels": labels, "ownerReferences": owners("d", "uid-d")},
        "spec": {"nodeName": on, "containers": []},
    }


class Clock:
    """Monotonic clock that the test advances."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def machine(ready: str, since: float) -> dict[str, Any]:
    found = node("a", ready=ready)
    when = datetime.fromtimestamp(since, UTC).isoformat()
    found["status"]["conditions"] = [{"type": "Ready", "status": ready, "lastTransitionTime": when}]
    return {"apiVersion": "v1", "kind": "Node", **found}


def deleted(kube: FakeKube) -> list[dict[str, Any]]:
    return [options for verb, what, options in kube.requests if verb == "delete" and what.startswith("Pod")]


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube([pod(rank=0), pod(rank=1), machine("True", time.time() - 3600)])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fencer(kube: FakeKube, clock: Clock) -> Fencer:
    return Fencer(kube, clock)


def end(kube: FakeKube) -> None:
    """Remove the deleted pods, as kubelets do."""
    kube.objects = {
        name: one for name, one in kube.objects.items() if "deletionTimestamp" not in one.get("metadata", {})
    }


async def test_each_pod_is_deleted_once_under_its_own_uid(kube: FakeKube, fencer: Fencer) -> None:
    uids = {one["metadata"]["uid"] for (kind, _, _), one in kube.objects.items() if kind == "Pod"}
    for _ in range(3):
        assert not await fencer.fence(KEY, 1, POLICY)
    assert {one["uid"] for one in deleted(kube)} == uids
    assert len(deleted(kube)) == 2
    end(kube)
    assert await fencer.fence(KEY, 1, POLICY)


async def test_another_pod_of_its_name_is_left_alone(kube: FakeKube, fencer: Fencer) -> None:
    real = kube.list

    async def late(*arguments: Any, **options: Any) -> Any:
        found = await real(*arguments, **options)
        # Deleted and created again by another client, between the list and the delete.
        for name in [name for name in kube.objects if name[0] == "Pod"]:
            kube._put(name, kube.objects.pop(name))
        return found

    kube.list = late  # type: ignore[method-assign]
    assert not await fencer.fence(KEY, 1, POLICY)
    assert len([name for name in kube.objects if name[0] == "Pod"]) == 2
    assert not any("deletionTimestamp" in one["metadata"] for one in kube.objects.values())


DAY = 86_400.0


@pytest.mark.parametrize("offset", [-DAY, 0.0, DAY])
async def test_pods_of_a_lost_node_are_removed_by_force_at_any_clock_offset(
    kube: FakeKube, fencer: Fencer, clock: Clock, offset: float
) -> None:
    """The API server's clock is behind the operator's, equal to it, or ahead of it."""
    kube.objects.update(FakeKube([machine("Unknown", time.time() + offset)]).objects)
    assert not await fencer.fence(KEY, 1, POLICY)
    assert [one["grace_seconds"] for one in deleted(kube)] == [2, 2], "its kubelet is asked first"
    kube.requests.clear()
    clock.seconds += 30.0
    for _ in range(2):
        # No error although the pods are overdue: after errors, the loop retries with increasing delays.
        assert not await fencer.fence(KEY, 1, POLICY)
        assert deleted(kube) == []
        clock.seconds += 9.0
    assert not await fencer.fence(KEY, 1, POLICY)
    assert [one["grace_seconds"] for one in deleted(kube)] == [0, 0]
    assert await fencer.fence(KEY, 1, POLICY)


async def test_a_node_that_was_ready_between_is_lost_anew(kube: FakeKube, fencer: Fencer, clock: Clock) -> None:
    await fencer.fence(KEY, 1, POLICY)
    # The second loss follows one whose end was not observed.
    for since in (10.0, 20.0):
        kube.objects.update(FakeKube([machine("Unknown", since)]).objects)
        clock.seconds += 8.0
        kube.requests.clear()
        assert not await fencer.fence(KEY, 1, POLICY)
        assert deleted(kube) == []
    clock.seconds += 10.0
    assert not await fencer.fence(KEY, 1, POLICY)
    assert [one["grace_seconds"] for one in deleted(kube)] == [0, 0]


async def test_a_node_removed_from_the_cluster_does_not_delay_the_fence(kube: FakeKube, fencer: Fencer) -> None:
    await fencer.fence(KEY, 1, POLICY)
    kube.objects = {name: one for name, one in kube.objects.items() if name[0] != "Node"}
    await fencer.fence(KEY, 1, POLICY)
    assert await fencer.fence(KEY, 1, POLICY)


@pytest.mark.parametrize(("ready", "policy"), [("True", "Replace"), ("Unknown", "Wait")])
async def test_a_pod_that_does_not_end_is_reported_with_its_node_and_not_removed(
    kube: FakeKube, fencer: Fencer, clock: Clock, ready: str, policy: str
) -> None:
    kube.objects.update(FakeKube([machine(ready, 0.0)]).objects)
    asked = NodeLossSpec(policy=policy, after=10.0)
    for _ in range(2):
        assert not await fencer.fence(KEY, 1, asked)
        clock.seconds += 10.0
    with raises_naming(FenceError, "team/d-0-i1-r0 on a", "team/d-0-i1-r1 on a", "if a node is gone"):
        await fencer.fence(KEY, 1, asked)
    assert 0 not in [one["grace_seconds"] for one in deleted(kube)]


async def test_names_and_plan_go_after_the_last_member(kube: FakeKube, fencer: Fencer) -> None:
    # The second name is the one that plans had before names contained the UID.
    plans = names.mounted_name("d", "uid-d", 0, 1), "d-0-i1"
    for name in plans:
        about = {"namespace": "team", "name": name, "ownerReferences": owners("d", "uid-d")}
        await kube.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": about})
    await fencer.fence(KEY, 1, POLICY)
    assert all([await kube.get(CONFIG_MAPS, "team", name) for name in plans])
    end(kube)
    assert await fencer.fence(KEY, 1, POLICY)
    assert not any([await kube.get(CONFIG_MAPS, "team", name) for name in plans])


async def test_a_pod_that_is_created_late_ends_before_the_next_incarnation(
    kube: FakeKube, fencer: Fencer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a request whose connection broke, between the list of pods and the deletion of the plan."""
    name = names.mounted_name("d", "uid-d", 0, 1)
    about = {"namespace": "team", "name": name, "ownerReferences": owners("d", "uid-d")}
    await kube.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": about})
    kube.objects = {key: one for key, one in kube.objects.items() if key[0] != "Pod"}
    real = kube.delete

    async def delete(resource: Resource, *where: Any, **options: Any) -> Any:
        if resource == CONFIG_MAPS:
            kube._put(("Pod", "team", pod()["metadata"]["name"]), pod())
        return await real(resource, *where, **options)

    with monkeypatch.context() as patched:
        patched.setattr(kube, "delete", delete)
        assert not await fencer.fence(KEY, 1, POLICY)
    assert await kube.get(CONFIG_MAPS, "team", name) is None
    assert len(deleted(kube)) == 1
    assert not await fencer.fence(KEY, 1, POLICY)
    end(kube)
    assert await fencer.fence(KEY, 1, POLICY)


async def test_only_incarnations_of_removed_groups_are_swept(kube: FakeKube, fencer: Fencer) -> None:
    """A group that is created again has a later incarnation, and may be forming."""

    def of(kind: str, name: str, group: int, incarnation: int, owner: str = "uid-d", **more: object) -> None:
        labels = names.labels("d", group=group, incarnation=incarnation, **more)
        about = {"namespace": "team", "name": name, "labels": labels, "ownerReferences": owners("d", owner)}
        kube._put((kind, "team", name), {"apiVersion": "v1", "kind": kind, "metadata": about})

    for kind in ("ConfigMap", "Secret"):
        for group, incarnation in ((0, 3), (1, 2), (1, 3), (1, 4), (2, 1)):
            of(kind, f"d-{group}-i{incarnation}-12345678", group, incarnation)
    of("Service", "d-1-i3", 1, 3)
    of("Service", "d-1-i2", 1, 2, "another")
    of("ConfigMap", "d-1-evidence-3", 1, 3, component=names.EVIDENCE)
    kept = {name for kind, _, name in kube.objects if kind in ("ConfigMap", "Secret", "Service")}
    kept -= {"d-1-i2-12345678", "d-1-i3-12345678", "d-1-i3", "d-2-i1-12345678"}
    wanted = deployment("nano.yaml", replicas=1)
    metadata = wanted.metadata.model_copy(update={"namespace": "team", "name": "d", "uid": "uid-d"})
    await fencer.sweep_ended(wanted.model_copy(update={"metadata": metadata}), lambda group: 3 if group else 0)
    assert {name for kind, _, name in kube.objects if kind in ("ConfigMap", "Secret", "Service")} == kept
    assert [kind for kind, _, name in kube.objects if name == "d-1-i4-12345678"] == ["ConfigMap", "Secret"]


TOKENS = {"pods": names.mounted_name("d", "uid-d", 0, 1), "KubeRay": names.incarnation_name("d", 0, 1)}


def put_token(kube: FakeKube, name: str, uid: str = "uid-d") -> tuple[str, str, str]:
    about = {"namespace": "team", "name": name, "ownerReferences": owners("d", uid)}
    kube._put(("Secret", "team", name), {"apiVersion": "v1", "kind": "Secret", "metadata": about})
    return "Secret", "team", name


@pytest.mark.parametrize("name", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("ended_by", ["this operator", "an earlier operator", "removal"])
async def test_a_token_that_is_created_after_the_end_of_its_incarnation_is_removed(
    kube: FakeKube, monkeypatch: pytest.MonkeyPatch, ended_by: str, name: str
) -> None:
    """As by a request whose connection broke before."""
    monkeypatch.setattr(fencing, "_LATE_SECONDS", 0.05)
    real, failures = kube.get, [KubeError("the API server does not answer")]

    async def get(resource: Resource, *where: Any) -> Any:
        if resource == SECRETS and failures and ("Secret", "team", name) in kube.objects:
            raise failures.pop()
        return await real(resource, *where)

    kube.get = get  # type: ignore[method-assign]
    fencer = Fencer(kube)
    kube.objects = {}
    if ended_by == "this operator":
        assert await fencer.fence(KEY, 1, POLICY)
    elif ended_by == "removal":
        await fencer.forget(KEY, 1)
    else:
        wanted = deployment("nano.yaml", replicas=2)
        metadata = wanted.metadata.model_copy(update={"namespace": "team", "name": "d", "uid": "uid-d"})
        await fencer.sweep_ended(wanted.model_copy(update={"metadata": metadata}), lambda group: 0 if group else 1)
    token, foreign = put_token(kube, name), put_token(kube, names.mounted_name("d", "uid-d", 1, 1))
    later = put_token(kube, names.mounted_name("d", "uid-d", 0, 2))
    await until(lambda: token not in kube.objects)
    assert not failures
    await asyncio.sleep(0.3)
    assert {foreign, later} <= kube.objects.keys()
    assert not fencer._removals
    await fencer.close()


async def test_nothing_is_removed_late_for_a_released_deployment(
    kube: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "_LATE_SECONDS", 0.05)
    fencer = Fencer(kube)
    kube.objects = {}
    for key in (KEY, GroupKey("team", "other", 0, "uid-other")):
        assert await fencer.fence(key, 1, POLICY)
    kept, removed = put_token(kube, TOKENS["pods"]), names.mounted_name("other", "uid-other", 0, 1)
    about = {"namespace": "team", "name": removed, "ownerReferences": owners("other", "uid-other")}
    kube._put(("Secret", "team", removed), {"apiVersion": "v1", "kind": "Secret", "metadata": about})
    fencer.release("team", "d")
    await until(lambda: ("Secret", "team", removed) not in kube.objects)
    assert kept in kube.objects
    # Created again with the same name, it has the incarnations of its own UID.
    assert await fencer.fence(KEY, 1, POLICY)
    await fencer.close()
    await asyncio.sleep(0.1)
    assert not fencer._removals
