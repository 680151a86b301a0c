"""Two operators form a group: one that has lost its lease without noticing must not restore an earlier state."""

from __future__ import annotations

from typing import Any, cast

import pytest

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.pods import PodsBackend
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.backends.pods.frontend import Superseded, move_head
from dsv4_operator.backends.pods.ownership import OwnedObjects
from dsv4_operator.builders import member, names
from dsv4_operator.kube import Conflict
from dsv4_operator.planning import plan_group
from dsv4_runtime.contract import GroupPlan
from dsv4_testkit.errors import raises_naming
from dsv4_testkit.fake_kube import FakeKube
from dsv4_testkit.pod_objects import ALLOWED, deployment, sparks


class Nothing:
    """A cache that is still empty."""

    def pods(self, *_: object) -> list[Any]:
        return []

    def all(self) -> list[Any]:
        return []


def operator(kube: Any) -> PodsBackend:
    return PodsBackend(Cluster(kube, Nothing(), runtime_image="runtime", policy=ALLOWED), changed=lambda *_: None)


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube({"apiVersion": "v1", "kind": "Node", **one} for one in sparks())


async def planned(backend: PodsBackend, wanted: DSV4Deployment, incarnation: int) -> GroupPlan:
    return plan_group(wanted, await backend.facts(wanted), group=0, incarnation=incarnation)


def of(kube: FakeKube, incarnation: int) -> list[str]:
    return [f"{kind} {name}" for kind, _, name in kube.objects if f"-i{incarnation}" in name]


async def test_a_deposed_operator_cannot_bring_an_older_incarnation_back(kube: FakeKube) -> None:
    wanted, deposed, leader = deployment(), operator(kube), operator(kube)
    late = await planned(deposed, wanted, 1)
    await leader.ensure(wanted, await planned(leader, wanted, 2))
    head = kube.objects["Service", "team", f"{wanted.metadata.name}-0-head"]
    with raises_naming(Superseded, "group 0", "incarnation 1", "incarnation 2"):
        await deposed.ensure(wanted, late)
    assert of(kube, 1) == []
    assert len(of(kube, 2)) == 5
    assert kube.objects["Service", "team", f"{wanted.metadata.name}-0-head"] == head


async def test_the_api_server_decides_between_two_operators_that_form_concurrently(kube: FakeKube) -> None:
    wanted, deposed, leader = deployment(), operator(kube), operator(kube)
    await leader.ensure(wanted, await planned(leader, wanted, 1))
    late, newer = await planned(deposed, wanted, 2), await planned(leader, wanted, 3)
    real = kube.get

    async def slow(resource: Any, *arguments: Any) -> Any:
        found = await real(resource, *arguments)
        if resource.kind == "Service":
            kube.get = real  # type: ignore[method-assign]
            await leader.ensure(wanted, newer)
        return found

    kube.get = slow  # type: ignore[method-assign]
    with pytest.raises(Conflict):
        await deposed.ensure(wanted, late)
    assert of(kube, 2) == []
    assert (
        kube.objects["Service", "team", f"{wanted.metadata.name}-0-head"]["spec"]["selector"]["dsv4.dev/incarnation"]
        == "3"
    )


async def test_a_late_operator_does_not_form_on_the_word_of_its_cache(kube: FakeKube) -> None:
    """Its watch is behind: it shows the head of the incarnation that was superseded."""
    wanted, api = deployment(), cast("Any", kube)
    service = member.head_service(wanted, 0, 1)
    own = {"manager": names.MANAGER, "operation": "Update", "fieldsV1": {}}
    shown = {**service, "metadata": {**service["metadata"], "uid": "u", "managedFields": [own]}}

    class Behind:
        def find(self, *_: object) -> Any:
            return shown

    owned = OwnedObjects(api, cast("Any", Behind()))
    kube._put(("Service", "team", service["metadata"]["name"]), member.head_service(wanted, 0, 2))
    assert owned.is_current(service)
    with pytest.raises(Superseded):
        await move_head(owned, wanted, 0, 1)
    kube.requests.clear()
    await move_head(owned, wanted, 0, 1, repair=True)
    assert kube.asked() == [], "a repair needs no request: the watch brings the later state"
