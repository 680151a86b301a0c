"""How members end: under their own uid, and without their kubelet's word only where its node is known to be lost."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from dsv4_operator.api import NodeLossSpec
from dsv4_operator.backends.pods.fencing import FenceError, Fencer
from dsv4_operator.builders import names
from dsv4_operator.kube import CONFIG_MAPS
from dsv4_operator.lifecycle import GroupKey
from dsv4_testkit.fake_kube import FakeKube
from dsv4_testkit.pod_objects import node

KEY = GroupKey("team", "d", 0)
POLICY = NodeLossSpec(after=10.0)


def pod(incarnation: int = 1, rank: int = 0, on: str = "a") -> dict[str, Any]:
    labels = names.labels("d", component=names.MEMBER, group=0, incarnation=incarnation, rank=rank)
    name = names.member_name("d", 0, incarnation, rank)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "team", "name": name, "labels": labels},
        "spec": {"nodeName": on, "containers": []},
    }


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


def fencer(kube: Any) -> Fencer:
    return Fencer(kube)


def end(kube: FakeKube) -> None:
    """The kubelet ends what was deleted."""
    kube.objects = {
        name: one for name, one in kube.objects.items() if "deletionTimestamp" not in one.get("metadata", {})
    }


async def test_each_pod_is_deleted_once_under_its_own_uid(kube: FakeKube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_operator.backends.pods.fencing._OVERDUE_SECONDS", float("inf"))
    uids = {one["metadata"]["uid"] for (kind, _, _), one in kube.objects.items() if kind == "Pod"}
    for _ in range(3):
        assert not await fencer(kube).fence(KEY, 1, POLICY)
    assert {one["uid"] for one in deleted(kube)} == uids
    assert len(deleted(kube)) == 2
    end(kube)
    assert await fencer(kube).fence(KEY, 1, POLICY)


async def test_another_pod_of_its_name_is_left_alone(kube: FakeKube) -> None:
    real = kube.list

    async def late(*arguments: Any, **options: Any) -> Any:
        found = await real(*arguments, **options)
        # Deleted and made again by somebody else, between the list and the delete.
        for name in [name for name in kube.objects if name[0] == "Pod"]:
            kube._put(name, kube.objects.pop(name))
        return found

    kube.list = late  # type: ignore[method-assign]
    assert not await fencer(kube).fence(KEY, 1, POLICY)
    assert len([name for name in kube.objects if name[0] == "Pod"]) == 2
    assert not any("deletionTimestamp" in one["metadata"] for one in kube.objects.values())


@pytest.mark.parametrize(
    ("ready", "seconds", "forced"), [("True", 99, False), ("Unknown", 5, False), ("Unknown", 15, True)]
)
async def test_a_pod_is_removed_by_force_when_its_node_was_lost_for_as_long_as_asked(
    kube: FakeKube, ready: str, seconds: float, forced: bool
) -> None:
    kube.objects.update(FakeKube([machine(ready, time.time() - seconds)]).objects)
    assert not await fencer(kube).fence(KEY, 1, POLICY)
    assert [one["grace_seconds"] for one in deleted(kube)] == [2, 2], "its kubelet is asked first"
    kube.requests.clear()
    if forced:
        assert not await fencer(kube).fence(KEY, 1, POLICY)
        assert [one["grace_seconds"] for one in deleted(kube)] == [0, 0]
        assert await fencer(kube).fence(KEY, 1, POLICY)
    else:
        with pytest.raises(FenceError, match=r"d-0-i1-r0 on a, pod team/d-0-i1-r1 on a; if a node is gone"):
            await fencer(kube).fence(KEY, 1, POLICY)
        assert deleted(kube) == []


async def test_with_the_policy_to_wait_nothing_is_removed_by_force(kube: FakeKube) -> None:
    kube.objects.update(FakeKube([machine("Unknown", 0.0)]).objects)
    wait = NodeLossSpec(policy="Wait", after=10.0)
    await fencer(kube).fence(KEY, 1, wait)
    with pytest.raises(FenceError):
        await fencer(kube).fence(KEY, 1, wait)
    assert 0 not in [one["grace_seconds"] for one in deleted(kube)]


async def test_names_and_plan_go_after_the_last_member(kube: FakeKube) -> None:
    plan = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "team", "name": "d-0-i1"}}
    await kube.create(plan)
    await fencer(kube).fence(KEY, 1, POLICY)
    assert await kube.get(CONFIG_MAPS, "team", "d-0-i1")
    end(kube)
    assert await fencer(kube).fence(KEY, 1, POLICY)
    assert await kube.get(CONFIG_MAPS, "team", "d-0-i1") is None
