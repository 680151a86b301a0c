"""Foreign objects with the name of a wanted object are never written or deleted, and reported with their owner."""

from __future__ import annotations

import ast
import asyncio
import base64
import copy
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, GroupPhase, GroupStatus, MemberStatus, NodeLossSpec
from dsv4_operator.backends import pods
from dsv4_operator.backends.base import Backend
from dsv4_operator.backends.pods import PodsBackend
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.backends.pods.fencing import FenceError, Fencer
from dsv4_operator.backends.pods.frontend import Superseded, TokenKeys, move_head
from dsv4_operator.backends.pods.observe import KEPT_EVIDENCE
from dsv4_operator.backends.pods.ownership import ForeignObject, ObjectTerminating, OwnedObjects, managed_by_apply
from dsv4_operator.builders import frontend, member, names
from dsv4_operator.kube import CONFIG_MAPS, Client, Conflict, Forbidden, Invalid, Unavailable
from dsv4_operator.lifecycle.observed import GroupKey
from dsv4_operator.planning import plan_group
from dsv4_runtime.contract import Role
from dsv4_runtime.contract.token import token_of
from dsv4_testkit.fake_kube import FakeKube
from dsv4_testkit.pod_objects import ALLOWED, Manifest, deployment, owners, sparks

NAME, UID = "flash", "uid-of-it"
_Object = tuple[str, str, str]
WRITES = {"create", "apply", "patch", "replace", "delete"}


class View:
    """A cache without delay."""

    def __init__(self, kube: FakeKube) -> None:
        self._kube = kube

    def pods(self, *_: object) -> list[Manifest]:
        return self.all()

    def all(self) -> list[Manifest]:
        found = [copy.deepcopy(one) for (kind, _, _), one in self._kube.objects.items() if kind == "Pod"]
        for one in found:
            one["metadata"]["creationTimestamp"] = "2026-11-25T00:00:00Z"
        return found


def backend_of(kube: Any) -> PodsBackend:
    cluster = Cluster(kube, View(kube), runtime_image="runtime", policy=ALLOWED)
    return PodsBackend(cluster, changed=lambda *_: None)


def server(*objects: Manifest) -> FakeKube:
    nodes = [{"apiVersion": "v1", "kind": "Node", **one} for one in sparks(4)]
    return FakeKube([*nodes, *objects])


def version_of(replicas: int, generation: int) -> DSV4Deployment:
    wanted = deployment(replicas=replicas)
    return wanted.model_copy(update={"metadata": wanted.metadata.model_copy(update={"generation": generation})})


def end_pods(kube: FakeKube) -> None:
    """Remove the pods that the operator deleted, as kubelets do."""
    deleted = [
        name
        for name, one in kube.objects.items()
        if name[0] == "Pod" and names.belongs(one, UID) and "deletionTimestamp" in one["metadata"]
    ]
    for name in deleted:
        del kube.objects[name]


def serving(incarnation: int) -> DeploymentStatus:
    members = tuple(
        MemberStatus(rank=rank, role=Role.WORKER if rank else Role.HEAD, node="n", address="a") for rank in (0, 1)
    )
    return DeploymentStatus(
        groups=(GroupStatus(index=0, phase=GroupPhase.SERVING, incarnation=incarnation, members=members),)
    )


async def life(kube: FakeKube) -> tuple[list[Exception], set[str]]:
    """Call every writing method of the backend, as for a deployment that is formed twice, scaled and stopped.

    Returns the errors and the names of the called methods. The other calls are made even if one fails.
    """
    backend, errors, called = backend_of(kube), list[Exception](), set[str]()
    two, one = version_of(2, 1), version_of(1, 2)

    async def call(name: str, *arguments: Any) -> Any:
        called.add(name)
        try:
            found = getattr(backend, name)(*arguments)
            return await found if inspect.isawaitable(found) else found
        except (ForeignObject, ObjectTerminating, FenceError) as error:
            errors.append(error)
            return None

    for incarnation in (1, 2):
        listed = await call("facts", two)
        plan = plan_group(two, await call("refresh", two, listed), group=0, incarnation=incarnation)
        await call("reserve", two, plan)
        await call("hold", two, plan)
        await call("ensure", two, plan)
        await call("observe", two, 0)
        await call("ensure_frontend", two, serving(incarnation))
        # A client has deleted one of the Services that lead to members.
        service = ("Service", "team", names.incarnation_name(NAME, 0, incarnation))
        if names.belongs(kube.objects.get(service, {"metadata": {}}), UID):
            del kube.objects[service]
        fresh = backend_of(kube)
        await collected(errors, fresh.ensure_frontend(two, serving(incarnation)))
        await fresh.close()
        for number in range(incarnation, incarnation + 1 + KEPT_EVIDENCE):
            await call("collect_evidence", two, 0, number)
        await call("drain", two, 0, incarnation, 0.1)
        if incarnation == 1:
            # An operator that was killed here left the remaining work to its successor.
            kube.objects = {
                name: one for name, one in kube.objects.items() if name[0] != "Pod" or not names.belongs(one, UID)
            }
    await call("fence", two, 0, 2)
    end_pods(kube)
    await call("fence", two, 0, 2)
    await call("forget", two, 0, 2)
    await call("ensure_frontend", one, DeploymentStatus())
    await call("release", "team", NAME)
    await call("close")
    return errors, called


async def collected(errors: list[Exception], work: Awaitable[object]) -> None:
    try:
        await work
    except (ForeignObject, ObjectTerminating) as error:
        errors.append(error)


async def written() -> dict[_Object, set[str]]:
    """Return every object that a deployment's life writes, with the verbs, from the recorded requests."""
    kube, found = server(), dict[_Object, set[str]]()
    errors, _ = await life(kube)
    assert errors == []
    for verb, what, _ in kube.requests:
        if verb in WRITES:
            kind, name = what.split(" ")
            found.setdefault((kind, "team", name), set()).add(verb)
    return found


FOREIGN: dict[str, Callable[[], Manifest]] = {
    "no owner": dict,
    "another owner": lambda: {"ownerReferences": owners("web", "uid-web", "Deployment")},
    "another deployment": lambda: {"ownerReferences": owners("other", "uid-other")},
    "an earlier deployment of the same name": lambda: {"ownerReferences": owners(NAME, "uid-earlier")},
    "our UID, but no controller": lambda: {"ownerReferences": owners(NAME, UID, controller=False)},
    "being deleted": lambda: {
        "ownerReferences": owners(NAME, "uid-earlier"),
        "deletionTimestamp": "2026-11-25T00:00:00Z",
    },
}


def foreign(name: _Object, about: Manifest) -> Manifest:
    """Return an object of another owner with all labels that the operator selects by."""
    kind, namespace, called = name
    api = {"Deployment": "apps/v1", "NetworkPolicy": "networking.k8s.io/v1", "PodDisruptionBudget": "policy/v1"}
    labels = names.labels(NAME, component=names.MEMBER, group=0, incarnation=1, rank=0)
    if kind == "Deployment":
        labels |= {names.COMPONENT: names.GATEWAY, names.GROUP: called.split("-")[-2]}
    if kind == "ConfigMap":
        labels[names.COMPONENT] = names.EVIDENCE
    metadata = {"namespace": namespace, "name": called, "labels": labels, **about}
    spec = {"containers": [], "nodeName": "spark-9"} if kind == "Pod" else {"type": "ExternalName"}
    return {"apiVersion": api.get(kind, "v1"), "kind": kind, "metadata": metadata, "spec": spec}


async def test_the_life_that_the_tests_take_calls_every_method_of_a_backend() -> None:
    kube = server()
    _, called = await life(kube)
    methods = {name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")}
    # The canary only reads.
    assert called == methods - {"endpoint_problem"}


async def test_the_kinds_that_are_written() -> None:
    kinds = {kind for kind, _, _ in await written()}
    assert kinds == {"ConfigMap", "Deployment", "NetworkPolicy", "Pod", "PodDisruptionBudget", "Secret", "Service"}


@pytest.mark.parametrize("owner", FOREIGN)
async def test_no_write_path_changes_a_foreign_object(owner: str) -> None:
    for name, verbs in (await written()).items():
        kube = server()
        kept = kube._put(name, foreign(name, FOREIGN[owner]()))
        errors, _ = await life(kube)
        assert kube.objects.get(name) == kept, f"{name} of {owner} was written"
        asked = [what for verb, what, _ in kube.requests if verb in WRITES - {"create"}]
        assert f"{name[0]} {name[2]}" not in asked, f"a write of {name} of {owner} was tried"
        if verbs & {"create", "apply"}:
            told = [str(error) for error in errors if f"{name[0]} team/{name[2]} " in str(error)]
            assert told, f"nothing was reported of {name} of {owner}: {errors}"
            kind = ObjectTerminating if "earlier" in str(FOREIGN[owner]()) else ForeignObject
            assert {type(error) for error in errors} == {kind}


@pytest.mark.parametrize("existed", [False, True])
async def test_a_foreign_object_created_between_read_and_write_is_not_adopted(existed: bool) -> None:
    """The operator read no object of that name, or its own one, which was then deleted."""
    replaced = 0
    for name, verbs in (await written()).items():
        if not verbs & {"create", "apply"}:
            continue
        kube, made = server(), list[Manifest]()
        real = kube.get

        async def late(resource: Any, namespace: str | None, called: str) -> Manifest | None:
            found = await real(resource, namespace, called)  # noqa: B023
            where = (resource.kind, namespace or "", called)
            if where == name and not made and (found is not None) is existed:  # noqa: B023
                kube.objects.pop(name, None)  # noqa: B023
                made.append(kube._put(name, foreign(name, {})))  # noqa: B023
            return found

        kube.get = late  # type: ignore[method-assign]
        await life(kube)
        if made:
            replaced += 1
            assert kube.objects.get(name) == made[0], f"{name} was adopted"
    assert replaced >= 5


def test_nothing_else_of_the_backend_writes_to_the_api_server() -> None:
    folder = Path(inspect.getfile(pods)).parent
    found = []
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITES:
                on = ast.unparse(node.func.value)
                if on.endswith(("kube", "client")):
                    found.append((file.name, on))
    assert {name for name, _ in found} == {"ownership.py"}
    assert {name for name, _ in inspect.getmembers(Client, inspect.isfunction)} >= WRITES


async def test_the_text_names_the_object_its_owner_and_the_remedy() -> None:
    wanted = deployment()
    service = frontend.public_service(wanted)
    for about, said in (
        ({}, "Service team/flash belongs to another client (it has no owner); rename one of them, or delete it"),
        (
            {"ownerReferences": owners("x-0-head", "u", "DSV4Deployment")},
            "Service team/flash belongs to DSV4Deployment x-0-head; rename one of them, or delete it",
        ),
    ):
        kube: Any = server(foreign(("Service", "team", "flash"), about))
        with pytest.raises(ForeignObject) as error:
            await OwnedObjects(kube).apply(service)
        assert (str(error.value), error.value.reason) == (said, "ForeignObject")
    kube = server(foreign(("Service", "team", "flash"), {"ownerReferences": owners("flash", "uid-earlier")}))
    with pytest.raises(ObjectTerminating, match="an earlier DSV4Deployment of this name") as waits:
        await OwnedObjects(kube).apply(service)
    assert waits.value.retry_seconds == 2.0
    mine = {"ownerReferences": owners("flash", UID), "deletionTimestamp": "2026-11-25T00:00:00Z"}
    kube = server(foreign(("Service", "team", "flash"), mine))
    with pytest.raises(ObjectTerminating, match="Service team/flash is being deleted"):
        await OwnedObjects(kube).apply(service)


class Contended(FakeKube):
    """An API server on which another object of the name appears or disappears before every write."""

    async def apply(self, manifest: Manifest, **_: object) -> Manifest:
        raise Conflict("there is another one")


async def test_an_object_that_is_replaced_repeatedly_is_an_error_after_six_attempts() -> None:
    wanted = deployment()
    kube: Any = Contended([frontend.public_service(wanted)])
    with pytest.raises(Conflict, match="was another object each time"):
        await OwnedObjects(kube).apply(frontend.public_service(wanted))
    assert kube.asked() == ["get Service flash"] * 6


class Elsewhere(FakeKube):
    """An API server that rejects every apply."""

    async def apply(self, manifest: Manifest, **_: object) -> Manifest:
        raise Invalid("spec.ports: Required value")


async def test_an_object_that_the_api_server_refuses_is_not_tried_again() -> None:
    wanted = deployment()
    kube: Any = Elsewhere()
    await kube.create(frontend.public_service(wanted))
    for _ in range(2):
        with pytest.raises(Invalid, match="spec"):
            await OwnedObjects(kube).apply(frontend.public_service(wanted))
    assert kube.asked().count("create Service flash") == 1


def test_fields_set_by_the_creation_count_as_applied() -> None:
    other = {"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:spec": {"f:x": {}}}}
    status = {"manager": "dsv4-operator", "operation": "Update", "subresource": "status", "fieldsV1": {"f:status": {}}}
    created = {"manager": "dsv4-operator", "operation": "Update", "fieldsV1": {"f:spec": {"f:a": {}, "f:b": {}}}}
    applied = {"manager": "dsv4-operator", "operation": "Apply", "fieldsV1": {"f:spec": {"f:b": {}, "f:c": {}}}}

    def of(*entries: Manifest) -> Manifest | None:
        return managed_by_apply({"metadata": {"managedFields": list(entries)}})

    assert of() is of(other, status) is of(other, status, applied) is None
    assert of(other, status, created) == {"managedFields": [other, status, {**created, "operation": "Apply"}]}
    both = of(created, other, applied)
    assert both is not None
    assert both["managedFields"][0] == other
    assert both["managedFields"][1] == {**applied, "fieldsV1": {"f:spec": {"f:a": {}, "f:b": {}, "f:c": {}}}}


# Names.

NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,12}[a-z0-9])?", fullmatch=True)
PARTS = st.sampled_from(["a", "x", "0", "1", "7", "i1", "i7", "head", "gateway", "r0", "token", "key", "evidence"])
ENDS = st.lists(PARTS, max_size=5).map(lambda parts: "-".join(["a", *parts]))


def accepted(name: str) -> DSV4Deployment | None:
    data = deployment().to_dict() | {"status": {}}
    data["metadata"] |= {"name": name}
    try:
        return DSV4Deployment.model_validate(data)
    except ValueError:
        return None


def objects_of(wanted: DSV4Deployment) -> set[tuple[str, str]]:
    """Return kind and name of all objects of a few groups and incarnations."""
    name, uid = wanted.metadata.name, wanted.metadata.uid
    found = {("Service", name), ("PodDisruptionBudget", f"{name}-gateways"), ("NetworkPolicy", f"{name}-members")}
    found |= {("Secret", names.token_key_name(name, uid))}
    for index in (0, 1, 7):
        found |= {("Service", names.head_name(name, index))}
        found |= {(kind, names.gateway_name(name, index)) for kind in ("Deployment", "ConfigMap")}
        for incarnation in (1, 7):
            found |= {("Pod", names.member_name(name, index, incarnation, rank)) for rank in (0, 1)}
            found |= {("ConfigMap", names.evidence_name(name, index, incarnation))}
            called = names.incarnation_name(name, index, incarnation)
            found |= {(kind, called) for kind in ("Service", "ConfigMap", "Secret")}
            found |= {(kind, names.mounted_name(name, uid, index, incarnation)) for kind in ("ConfigMap", "Secret")}
    return found


@given(st.one_of(NAMES, ENDS), ENDS, st.sampled_from(["", "-0-head", "-7-i1", "-1-gateway", "-token-key", "-0-i7-r0"]))
def test_no_two_deployments_share_an_object(one: str, other: str, end: str) -> None:
    first = accepted(one)
    for second in (accepted(other), accepted(one + end)):
        if first is not None and second is not None and first.metadata.name != second.metadata.name:
            assert not objects_of(first) & objects_of(second)


@pytest.mark.parametrize("name", ["x-0-head", "x-0-i1", "x-12-i345", "x--0-head"])
def test_names_of_other_deployments_services_are_refused(name: str) -> None:
    assert accepted(name) is None
    data = deployment().to_dict()
    data["metadata"] |= {"name": name}
    # A deployment from before the rule has a status and stays valid.
    data["status"] = {"phase": "Serving"}
    assert DSV4Deployment.model_validate(data).metadata.name == name


@pytest.mark.parametrize(
    "name", ["x-head", "x-0", "x-i1", "head", "x-0-heads", "x-0-gateway", "v4-0-instruct", "a-0-ix"]
)
def test_names_that_are_only_similar_are_accepted(name: str) -> None:
    assert accepted(name) is not None


# Secrets and plans.


def again(uid: str) -> DSV4Deployment:
    wanted = deployment()
    return wanted.model_copy(update={"metadata": wanted.metadata.model_copy(update={"uid": uid})})


async def test_a_deployment_that_is_created_again_mounts_nothing_of_its_predecessor() -> None:
    """Kubelets keep immutable objects by name while a pod mounts them, independent of the API server."""

    def mounted(wanted: DSV4Deployment, kube: FakeKube) -> set[str]:
        found = set()
        for (kind, _, name), one in kube.objects.items():
            spec = one.get("spec") or {}
            spec = spec["template"]["spec"] if kind == "Deployment" else spec
            if names.belongs(one, wanted.metadata.uid) and name.startswith(NAME):
                for volume in spec.get("volumes") or []:
                    found |= {(volume.get("secret") or {}).get("secretName")} - {None}
                    source = (volume.get("configMap") or {}).get("name")
                    if source and kube.objects["ConfigMap", "team", source].get("immutable"):
                        found.add(source)
        return found

    both = []
    for uid in ("uid-1", "uid-2"):
        kube, wanted = server(), again(uid)
        backend = backend_of(kube)
        await backend.ensure(wanted, plan_group(wanted, await backend.facts(wanted), group=0, incarnation=1))
        await backend.ensure_frontend(wanted, DeploymentStatus())
        both.append(mounted(wanted, kube))
        assert len(both[-1]) == 2
        for name in both[-1]:
            assert ("Secret", "team", name) in kube.objects
    assert not both[0] & both[1]


async def test_secrets_of_an_earlier_deployment_are_not_taken_over() -> None:
    older, newer = again("uid-1"), again("uid-2")
    kube: Any = FakeKube([member.token_key_secret(older, "OLD"), member.token_secret(older, 0, 1, "OLDTOKEN")])
    before = copy.deepcopy(kube.objects)
    keys = TokenKeys(kube)
    key = await keys.ensure(newer)
    await keys.make_token(newer, 0, 1)
    assert key != "OLD"
    assert {name: kube.objects[name] for name in before} == before
    # The garbage collector removes the objects of the older one.
    kube.objects = {name: one for name, one in kube.objects.items() if name not in before}
    assert await keys.ensure(newer, -1.0) == key
    assert len(kube.objects) == 2


async def test_the_token_of_an_incarnation_is_of_the_key_that_gateways_have() -> None:
    wanted = deployment()
    kube: Any = FakeKube([])
    keys = TokenKeys(kube)
    await keys.make_token(wanted, 0, 1)
    # As by `kubectl edit`, just after the operator has read it.
    secret = kube.objects["Secret", "team", names.token_key_name(NAME, UID)]
    secret["data"] = {"key": base64.b64encode(b"another").decode()}
    await keys.make_token(wanted, 0, 2)
    made = kube.objects["Secret", "team", names.mounted_name(NAME, UID, 0, 2)]
    token = base64.b64decode(made["data"]["token"]).decode()
    assert token == token_of("another", token[:32])


async def test_the_key_is_read_once_for_all_that_wait_for_it() -> None:
    wanted = deployment().model_copy(update={"status": serving(1)})
    kube: Any = FakeKube([member.token_key_secret(wanted, "KEY")])
    real = kube.get

    async def slow(*arguments: Any) -> Any:
        await asyncio.sleep(0)
        return await real(*arguments)

    kube.get = slow
    keys = TokenKeys(kube)
    assert await asyncio.gather(*(keys.ensure(wanted) for _ in range(4))) == ["KEY"] * 4
    assert kube.asked() == [f"get Secret {names.token_key_name(NAME, UID)}"]


# Fencing.


async def test_times_of_an_end_are_of_one_deployment_and_are_dropped_with_it() -> None:
    seconds = [0.0]
    kube: Any = server()
    fencer = Fencer(kube, lambda: seconds[0])
    for uid in ("uid-1", "uid-2"):
        about = names.metadata(again(uid), "flash-0-i1-r0", component="member", group=0, incarnation=1, rank=0)
        kube._put(("Pod", "team", "flash-0-i1-r0"), {"metadata": about, "spec": {"nodeName": "spark-1"}})
        key = GroupKey("team", NAME, 0, uid)
        # A day after the first one, whose end was not observed.
        seconds[0] += 86_400.0
        for _ in range(2):
            assert not await fencer.fence(key, 1, NodeLossSpec())
            seconds[0] += 0.5
        del kube.objects["Pod", "team", "flash-0-i1-r0"]
    assert len(fencer._begun) == 2
    fencer.release("team", "other")
    assert len(fencer._begun) == 2
    fencer.release("team", NAME)
    assert not fencer._begun


async def test_a_new_deployment_skips_incarnations_with_remaining_pods() -> None:
    older, newer = again("uid-1"), again("uid-2")
    kube = server()
    first = backend_of(kube)
    await first.ensure(older, plan_group(older, await first.facts(older), group=0, incarnation=3))
    second = backend_of(kube)
    seen = await second.observe(newer, 0)
    assert (seen.members, seen.used_incarnation) == ((), 3)
    # Their share of the nodes is not available to the new one.
    assert [one.name for one in (await second.facts(newer)).placed[0]] == ["spark-3", "spark-4"]


# Reservations.


class Refusing(FakeKube):
    """An API server that refuses to create the pod of rank 1."""

    error: Exception = Forbidden("quota")

    async def create(self, manifest: Manifest, *, strict: bool = False) -> Manifest:
        if manifest["kind"] == "Pod" and manifest["metadata"]["name"].endswith("r1"):
            raise self.error
        return await super().create(manifest, strict=strict)


class Blind(View):
    """A cache that lags behind."""

    def all(self) -> list[Manifest]:
        return []


@pytest.mark.parametrize(
    ("error", "free"),
    [(Forbidden("quota"), {"spark-2", "spark-3", "spark-4"}), (Unavailable("no answer"), {"spark-3", "spark-4"})],
)
async def test_nodes_of_members_that_were_made_stay_reserved(error: Exception, free: set[str]) -> None:
    kube: Any = Refusing({"apiVersion": "v1", "kind": "Node", **one} for one in sparks(4))
    kube.error = error
    wanted = deployment()
    cluster = Cluster(kube, Blind(kube), runtime_image="runtime", policy=ALLOWED)
    backend = PodsBackend(cluster, changed=lambda *_: None)
    plan = plan_group(wanted, await backend.facts(wanted), group=0, incarnation=1)
    assert [one.node for one in plan.members] == ["spark-1", "spark-2"]
    with pytest.raises(type(error)):
        await backend.ensure(wanted, plan)
    other = deployment(replicas=2)
    other = other.model_copy(update={"metadata": other.metadata.model_copy(update={"name": "o", "uid": "uid-o"})})
    placed = (await backend.facts(other)).placed
    assert {one.name for nodes in placed.values() for one in nodes} == free


async def test_nodes_are_free_again_where_no_member_could_be_made() -> None:
    kube: Any = server(foreign(("Service", "team", "flash-0-head"), {}))
    wanted = deployment()
    cluster = Cluster(kube, Blind(kube), runtime_image="runtime", policy=ALLOWED)
    backend = PodsBackend(cluster, changed=lambda *_: None)
    plan = plan_group(wanted, await backend.facts(wanted), group=0, incarnation=1)
    with pytest.raises(ForeignObject):
        await backend.ensure(wanted, plan)
    assert not cluster._reserved


# The head's Service.


async def test_a_head_service_without_a_selector_is_brought_back() -> None:
    kube, wanted = server(), deployment()
    service = member.head_service(wanted, 0, 1)
    service["spec"] = {"type": "ExternalName", "externalName": "example.org"}
    kube._put(("Service", "team", "flash-0-head"), service)
    api: Any = kube
    await move_head(OwnedObjects(api), wanted, 0, 1)
    assert kube.objects["Service", "team", "flash-0-head"]["spec"]["selector"][names.INCARNATION] == "1"


async def test_the_error_about_a_head_service_of_a_later_incarnation_has_a_remedy() -> None:
    """This is the state after the restore of a backup."""
    wanted = deployment()
    kube: Any = server(member.head_service(wanted, 0, 9))
    said = r"Service team/flash-0-head\); if no other operator runs, .* delete the Service, and it is made again"
    with pytest.raises(Superseded, match=said):
        await move_head(OwnedObjects(kube), wanted, 0, 1)
    del kube.objects["Service", "team", "flash-0-head"]
    await move_head(OwnedObjects(kube), wanted, 0, 1)


async def test_invalid_labels_do_not_prevent_the_removal_of_other_objects() -> None:
    wanted = deployment()
    one, other = (names.mounted_name(NAME, UID, 0, number) for number in (1, 2))
    configs = []
    for name, number in ((one, "1"), (other, "v2")):
        about = names.metadata(wanted, name, group=0, incarnation=number)
        configs.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": about})
    kube: Any = FakeKube(configs)
    await Fencer(kube).sweep(GroupKey.of(wanted, 0), 3)
    assert await kube.get(CONFIG_MAPS, "team", one) is None
    assert await kube.get(CONFIG_MAPS, "team", other) is not None
