"""The checker of `benchmarks/api_chaos.py` finds each violation."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from dsv4_operator.api import DeploymentStatus, GroupPhase, GroupStatus
from dsv4_operator.builders import names
from dsv4_operator.controller.observability import event_manifest
from dsv4_operator.kube import Manifest
from dsv4_operator.lifecycle import events
from dsv4_testkit.chaos.proxy import Arrival
from dsv4_testkit.chaos.witness import Witness
from dsv4_testkit.fake_kube import FakeKube

UID = "uid-of-it"


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube()


@pytest.fixture
def witness(kube: FakeKube) -> Witness:
    return Witness(cast("Any", kube), "team")


def pod(incarnation: int, rank: int = 0) -> Manifest:
    name = names.member_name("chat", 0, incarnation, rank)
    owner = {"kind": "DSV4Deployment", "name": "chat", "uid": UID, "controller": True}
    return {"metadata": {"name": name, "namespace": "team", "uid": f"{name}-u", "ownerReferences": [owner]}}


def plan_of(kube: FakeKube, incarnation: int) -> None:
    name = names.mounted_name("chat", UID, 0, incarnation)
    about = {"namespace": "team", "name": name}
    kube._put(("ConfigMap", "team", name), {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about})


async def test_two_incarnations_at_once(witness: Witness, kube: FakeKube) -> None:
    for number in (1, 2):
        plan_of(kube, number)
    await witness._pod("ADDED", pod(1, 0))
    await witness._pod("ADDED", pod(1, 1))
    assert witness.wrong == []
    await witness._pod("ADDED", pod(2, 0))
    assert witness.wrong == ["chat-0-i2-r0 was made while ['chat-0-i1-r0', 'chat-0-i1-r1'] were there"]


async def test_one_after_the_other_and_a_late_pod_without_a_plan(witness: Witness, kube: FakeKube) -> None:
    plan_of(kube, 1)
    await witness._pod("ADDED", pod(1))
    await witness._pod("DELETED", pod(1))
    del kube.objects["ConfigMap", "team", names.mounted_name("chat", UID, 0, 1)]
    plan_of(kube, 2)
    await witness._pod("ADDED", pod(2))
    await witness._pod("ADDED", pod(1))
    assert witness.wrong == []


@pytest.mark.parametrize(("made", "wrong"), [(7, 0), (5, 1)])
async def test_a_pod_that_was_made_after_the_end_of_its_plan_is_no_member(
    witness: Witness, kube: FakeKube, made: int, wrong: int
) -> None:
    """The watch of the plans may be behind that of the pods."""
    plan_of(kube, 2)
    early = pod(1)
    early["metadata"]["resourceVersion"] = str(made)
    await witness._pod("ADDED", early)
    later = asyncio.create_task(witness._pod("ADDED", pod(2)))
    await asyncio.sleep(0.05)
    about = {"name": names.mounted_name("chat", UID, 0, 1), "resourceVersion": "6"}
    await witness._plan("DELETED", {"metadata": about})
    await later
    assert len(witness.wrong) == wrong


def version(number: int, group: GroupStatus, generation: int = 1) -> Manifest:
    status = DeploymentStatus(groups=(group,), observed_generation=generation)
    about = {"namespace": "team", "name": "chat", "uid": UID, "resourceVersion": str(number), "generation": 1}
    return {"metadata": about, "status": status.to_dict()}


@pytest.mark.parametrize("field", ["incarnation", "fenced_below", "total_restarts", "engine_generation"])
async def test_a_status_that_goes_back(witness: Witness, field: str) -> None:
    await witness._deployment("ADDED", version(1, GroupStatus.model_validate({"index": 0, field: 3})))
    await witness._deployment("MODIFIED", version(2, GroupStatus.model_validate({"index": 0, field: 4})))
    assert witness.wrong == []
    await witness._deployment("MODIFIED", version(3, GroupStatus.model_validate({"index": 0, field: 2})))
    assert len(witness.wrong) == 1


@pytest.mark.parametrize(("posted", "wrong"), [(6, 0), (4, 1)])
async def test_an_event_before_its_status(witness: Witness, posted: int, wrong: int) -> None:
    forming = GroupStatus(index=0, incarnation=1, phase=GroupPhase.FORMING)
    found = version(5, forming)
    await witness._deployment("ADDED", found)
    (event,) = events(None, DeploymentStatus(groups=(forming,), observed_generation=1))
    made = event_manifest(found, event, "operator-0", "")
    made["metadata"] |= {"uid": "e", "resourceVersion": str(posted)}
    await witness._event("ADDED", made)
    witness.check_events()
    assert len(witness.wrong) == wrong


def test_a_write_without_the_lease(witness: Witness) -> None:
    witness.holders = [(0.0, "one"), (100.0, "two")]
    patch = "/api/v1/namespaces/team/pods/x"
    witness.check_writes("one", [Arrival(50.0, "PATCH", patch), Arrival(100.5, "PATCH", patch)])
    witness.check_writes("two", [Arrival(50.0, "PUT", "/apis/coordination.k8s.io/v1/namespaces/team/leases/x")])
    assert witness.wrong == []
    witness.check_writes("one", [Arrival(110.0, "PATCH", patch)])
    assert witness.wrong == [f"one wrote without the lease: PATCH {patch}"]
