"""Objects that lead to members are restored after deletion or change, and nothing is written at rest."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, GroupPhase, GroupStatus, MemberStatus
from dsv4_operator.backends.pods import PodsBackend, frontend
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.builders import names
from dsv4_operator.kube import Resource
from dsv4_operator.kube.cache import _version
from dsv4_operator.planning import plan_group
from dsv4_runtime.contract import Role
from dsv4_testkit.fake_kube import FakeKube, fields
from dsv4_testkit.pod_objects import ALLOWED, deployment, sparks

MEMBERS = tuple(
    MemberStatus(rank=rank, role=Role.WORKER if rank else Role.HEAD, node="n", address="a") for rank in (0, 1)
)
STATUS = DeploymentStatus(groups=(GroupStatus(index=0, phase=GroupPhase.SERVING, incarnation=1, members=MEMBERS),))


KINDS = {"Service", "ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Secret"}


class View:
    """A cache without delay that contains no pods."""

    def __init__(self, kube: FakeKube) -> None:
        self._kube = kube

    def pods(self, *_: object) -> list[Any]:
        return []

    def all(self) -> list[Any]:
        return []

    def find(self, resource: Resource, namespace: str, name: str) -> Any:
        return copy.deepcopy(self._kube.objects.get((resource.kind, namespace, name)))

    def versions(self, namespace: str, deployment: str) -> frozenset[tuple[str, str, str]]:
        return frozenset(
            (kind, name, one["metadata"]["resourceVersion"])
            for (kind, where, name), one in self._kube.objects.items()
            if kind in KINDS - {"Secret"} and where == namespace
        )


class Applied(FakeKube):
    """Server-side apply that writes nothing if nothing differs."""

    async def apply(self, manifest: Any, **options: object) -> Any:
        about = manifest["metadata"]
        known = self.objects.get((manifest["kind"], about["namespace"], about["name"]))
        if known is not None:
            given = {field: known["metadata"][field] for field in ("uid", "resourceVersion")}
            if {**manifest, "metadata": {**about, **given}} == known:
                return known
        return await super().apply(manifest, **options)


class Managing(FakeKube):
    """An API server that notes the fields of the operator, as that of Kubernetes does."""

    async def create(self, manifest: Any, **options: Any) -> Any:
        return self._managed(manifest, "Update", await super().create(manifest, **options))

    async def apply(self, manifest: Any, **options: object) -> Any:
        return self._managed(manifest, "Apply", await super().apply(manifest, **options))

    def _managed(self, manifest: Any, operation: str, stored: Any) -> Any:
        about = {key: value for key, value in manifest["metadata"].items() if key in ("labels", "ownerReferences")}
        owned = {**{key: manifest[key] for key in ("spec", "data") if key in manifest}, "metadata": about}
        entry = {"manager": names.MANAGER, "operation": operation, "fieldsV1": fields(owned)}
        stored["metadata"]["managedFields"] = [entry]
        kept = self.objects[manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"]]
        kept["metadata"]["managedFields"] = [entry]
        return stored


async def test_a_restarted_operator_reads_only_the_key_and_writes_only_what_differs() -> None:
    kube: Any = Managing({"apiVersion": "v1", "kind": "Node", **one} for one in sparks())
    view, wanted = View(kube), deployment()

    def another() -> PodsBackend:
        kube.requests.clear()
        cluster = Cluster(kube, view, runtime_image="runtime", policy=ALLOWED, owned=view)
        return PodsBackend(cluster, changed=lambda *_: None)

    backend = another()
    await backend.ensure(wanted, plan_group(wanted, await backend.facts(wanted), group=0, incarnation=1))
    await backend.ensure_frontend(wanted, STATUS)
    made = kube.asked()
    assert {one.split()[0] for one in made} == {"list", "create"}
    assert len(made) == len(set(made)), "one request for each object"
    wanted = wanted.model_copy(update={"status": STATUS})
    key = f"get Secret {names.token_key_name(wanted.metadata.name, wanted.metadata.uid)}"
    await another().ensure_frontend(wanted, STATUS)
    assert kube.asked() == [key]
    owned = [name for name in kube.objects if name[0] in KINDS - {"Secret"}]
    owned.remove(
        ("ConfigMap", wanted.metadata.namespace, names.mounted_name(wanted.metadata.name, wanted.metadata.uid, 0, 1))
    )
    assert len(owned) == 7
    for name in owned:
        before = copy.deepcopy(kube.objects[name])
        changed = copy.deepcopy(before)
        part = next(part for part in ("spec", "data") if part in changed)
        changed[part] = {**changed[part], next(iter(changed[part])): "another"}
        kube._put(name, changed)
        await another().ensure_frontend(wanted, STATUS)
        assert [one for one in kube.writes() if one.startswith("apply")] == [f"apply {name[0]} {name[2]}"]
        assert kube.objects[name][part] == before[part]


@pytest.fixture
async def running(monkeypatch: pytest.MonkeyPatch) -> tuple[Applied, PodsBackend, DSV4Deployment]:
    monkeypatch.setattr(frontend, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(frontend, "_SECRET_SECONDS", -1.0)
    kube: Any = Applied({"apiVersion": "v1", "kind": "Node", **one} for one in sparks())
    view = View(kube)
    backend = PodsBackend(
        Cluster(kube, view, runtime_image="runtime", policy=ALLOWED, owned=view), changed=lambda *_: None
    )
    wanted = deployment()
    await backend.ensure(wanted, plan_group(wanted, await backend.facts(wanted), group=0, incarnation=1))
    for _ in range(3):
        await backend.ensure_frontend(wanted, STATUS)
    return kube, backend, wanted


async def test_at_rest_nothing_is_written(running: tuple[Applied, PodsBackend, DSV4Deployment]) -> None:
    kube, backend, wanted = running
    kube.requests.clear()
    for _ in range(5):
        await backend.ensure_frontend(wanted, STATUS)
    assert kube.writes() == []


async def test_every_removed_object_is_restored_at_the_next_reconciliation(
    running: tuple[Applied, PodsBackend, DSV4Deployment],
) -> None:
    kube, backend, wanted = running
    # Members have already read their plan and token; neither can be created again with the same content.
    read = names.mounted_name(wanted.metadata.name, wanted.metadata.uid, 0, 1)
    owned = [
        name
        for name in kube.objects
        if name[0] in ("Service", "ConfigMap", "Deployment", "NetworkPolicy", "Secret")
        and name[::2] not in (("ConfigMap", read), ("Secret", read))
    ]
    assert {kind for kind, _, _ in owned} == {"Service", "ConfigMap", "Deployment", "NetworkPolicy", "Secret"}
    assert len(owned) >= 6
    for name in owned:
        before = kube.objects.pop(name)
        await backend.ensure_frontend(wanted, STATUS)
        assert name in kube.objects, f"{name} is still gone"
        for part in ("spec", "data"):
            assert kube.objects[name].get(part) == before.get(part)


async def test_changed_services_are_restored(running: tuple[Applied, PodsBackend, DSV4Deployment]) -> None:
    kube, backend, wanted = running
    for name in [name for name in kube.objects if name[0] == "Service"]:
        before = copy.deepcopy(kube.objects[name])
        changed = copy.deepcopy(before)
        changed["spec"]["selector"] = {"app": "else"}
        kube._put(name, changed)
        await backend.ensure_frontend(wanted, STATUS)
        assert kube.objects[name]["spec"] == before["spec"]


async def test_slow_writes_of_this_process_are_no_changes_of_other_clients(
    running: tuple[Applied, PodsBackend, DSV4Deployment],
) -> None:
    """While members are created, their Services change; at a high load that takes longer than a change settles."""
    kube, backend, wanted = running
    name = ("Service", wanted.metadata.namespace, names.head_name(wanted.metadata.name, 0))
    kube.requests.clear()
    with backend._frontends.writing(wanted.metadata.namespace, wanted.metadata.name):
        kube._put(name, copy.deepcopy(kube.objects[name]))
        await backend.ensure_frontend(wanted, STATUS)
    await backend.ensure_frontend(wanted, STATUS)
    assert {one.split()[1] for one in kube.asked()} == {"Secret"}, "no object is applied again"
    before = copy.deepcopy(kube.objects[name])
    kube._put(name, {**before, "spec": {**before["spec"], "selector": {"app": "else"}}})
    await backend.ensure_frontend(wanted, STATUS)
    assert kube.objects[name]["spec"] == before["spec"], "changes of other clients are still undone"


async def test_an_object_removed_again_before_the_watch_shows_it_is_restored_again(
    running: tuple[Applied, PodsBackend, DSV4Deployment],
) -> None:
    kube, backend, wanted = running
    name = ("NetworkPolicy", wanted.metadata.namespace, f"{wanted.metadata.name}-members")
    for _ in range(3):
        # The watch shows the same state each time: the policy is absent.
        kube.objects.pop(name)
        await backend.ensure_frontend(wanted, STATUS)
        assert name in kube.objects


def test_a_label_or_an_owner_that_changed_is_another_version() -> None:
    about = {"namespace": "n", "name": "x", "generation": 1, "resourceVersion": "5", "labels": {"a": "b"}}
    versions = {
        _version({"metadata": about}),
        _version({"metadata": {**about, "labels": {}}}),
        _version({"metadata": {**about, "ownerReferences": [{"uid": "u"}]}}),
        _version({"metadata": {**about, "generation": 2}}),
    }
    assert len(versions) == 4
    # A change of the status only changes the resource version.
    assert _version({"metadata": {**about, "resourceVersion": "6"}}) in versions
