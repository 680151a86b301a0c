"""Fields that other field managers add to an applied object are removed; no other field is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_operator.builders.names import MANAGER, Manifest
from dsv4_operator.kube import Client, Invalid, Resource, apply_exactly, is_exact
from dsv4_operator.kube.exact import foreign_changes
from dsv4_testkit.fake_kube import FakeKube, fields, merged

SERVICE: Manifest = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"namespace": "team", "name": "chat", "labels": {"app": "chat"}, "ownerReferences": [{"uid": "owner"}]},
    "spec": {"selector": {"app": "chat"}, "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}]},
}
_names = st.sampled_from(["a", "b", "c", "d"])
_trees = st.recursive(
    st.integers(0, 3) | st.lists(st.integers(0, 3), min_size=1, max_size=2),
    lambda below: st.dictionaries(_names, below, min_size=1, max_size=3),
    max_leaves=8,
)
_specs = st.dictionaries(_names, _trees, min_size=1, max_size=4)


def beyond(added: Any, kept: Any) -> Any:
    """Return the part of `added` that is not in `kept`; a forced apply of `kept` took ownership of the other fields."""
    if not (isinstance(added, dict) and isinstance(kept, dict)):
        return None
    found = {name: part if name not in kept else beyond(part, kept[name]) for name, part in added.items()}
    return {name: part for name, part in found.items() if part not in (None, {})} or None


def managed(wanted: Manifest, added: Manifest, *, manager: str = "intruder", **entry: str) -> Manifest:
    """Return the object on the API server after `manager` wrote `added` and `wanted` was applied over it."""
    live = merged(added, wanted)
    live["metadata"] |= {"uid": "1", "resourceVersion": "1"}
    ours = {"manager": MANAGER, "operation": "Apply", "fieldsV1": fields(wanted)}
    theirs = {"manager": manager, "operation": "Update", "fieldsV1": fields(added), **entry}
    live["metadata"]["managedFields"] = [ours, theirs]
    found: Manifest = live
    return found


def content(found: Manifest) -> Manifest:
    kept = copy.deepcopy(found)
    for name in ("uid", "resourceVersion", "managedFields"):
        kept["metadata"].pop(name, None)
    return kept


@given(_specs, _specs)
def test_any_fields_that_another_manager_added_are_removed(own: Manifest, foreign: Manifest) -> None:
    wanted = {"metadata": {"name": "x"}, "spec": own}
    added = beyond({"spec": foreign}, {"spec": own})
    live = managed(wanted, {"metadata": {}, **(added or {})})
    assert content(merged(live, foreign_changes(wanted, live))) == wanted


@given(_specs)
def test_nothing_is_written_without_foreign_fields(own: Manifest) -> None:
    wanted = {"metadata": {"name": "x"}, "spec": own}
    defaulted = managed({**wanted, "spec": {**own, "default": 1}}, {"metadata": {}})
    defaulted["metadata"]["managedFields"][0]["fieldsV1"] = fields(wanted)
    assert foreign_changes(wanted, defaulted) == {}


@pytest.mark.parametrize("manager", ["intruder", MANAGER])
def test_a_foreign_selector_key_of_any_manager_is_removed(manager: str) -> None:
    live = managed(SERVICE, {"metadata": {}, "spec": {"selector": {"in": "truder"}}}, manager=manager)
    assert foreign_changes(SERVICE, live) == {"spec": {"selector": {"in": None}}}


def test_a_list_with_a_foreign_item_becomes_the_own_one() -> None:
    more = {"name": "more", "port": 9, "protocol": "TCP"}
    live = managed(SERVICE, {"metadata": {}, "spec": {"ports": [more]}})
    live["spec"]["ports"] = [*SERVICE["spec"]["ports"], more]
    assert foreign_changes(SERVICE, live) == {"spec": {"ports": SERVICE["spec"]["ports"]}}


@pytest.mark.parametrize(
    ("added", "stays"),
    [
        ({"metadata": {"labels": {"team": "a"}, "annotations": {"b": "c"}, "finalizers": ["d"]}}, True),
        ({"metadata": {"labels": {"dsv4.dev/group": "7"}}}, False),
        ({"metadata": {"annotations": {"dsv4.dev/x": "7"}}}, False),
        ({"metadata": {}, "status": {"a": "b"}}, True),
        ({"metadata": {}, "spec": {"template": {"metadata": {"annotations": {"x": "y"}}}}}, False),
        (
            {
                "metadata": {},
                "spec": {"template": {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}},
            },
            True,
        ),
    ],
)
def test_others_may_label_and_annotate_and_restart(added: Manifest, stays: bool) -> None:
    wanted = {
        "metadata": {"name": "x", "labels": {"app": "x"}},
        "spec": {"template": {"metadata": {"annotations": {"own": "1"}}}},
    }
    live = managed(wanted, added)
    after = content(merged(live, foreign_changes(wanted, live)))
    assert after == (content(live) if stays else wanted | ({"metadata": after["metadata"]}))
    if not stays:
        assert "dsv4.dev" not in str(after)


def test_the_entry_of_a_subresource_is_a_controllers() -> None:
    live = managed(SERVICE, {"metadata": {}, "spec": {"replicas": 3}}, subresource="scale")
    assert foreign_changes(SERVICE, live) == {}


class Managed(FakeKube):
    """Fake API server whose objects contain fields of another manager."""

    added: Manifest
    conflicts = 0
    refuses = False

    async def apply(self, manifest: Manifest, **_: object) -> Manifest:
        self._asked("apply", ("Service", "team", "chat"))
        self._compare(("Service", "team", "chat"), manifest)
        if self.refuses and self.added:
            raise Invalid("Duplicate value")
        return self._put(("Service", "team", "chat"), managed(manifest, self.added))

    async def patch(
        self, resource: Resource, namespace: str | None, name: str, changes: Manifest, *, subresource: str | None = None
    ) -> Manifest:
        if self.conflicts:
            self.conflicts -= 1
            known = self.objects[resource.kind, namespace or "", name]
            self._put((resource.kind, namespace or "", name), known)
        answer = await super().patch(resource, namespace, name, changes, subresource=subresource)
        self.added = {}
        return answer


def server(added: Manifest) -> tuple[Managed, Client]:
    found = Managed()
    found.added = added
    kube: Any = found
    return found, kube


@pytest.mark.parametrize("conflicts", [0, 2])
async def test_apply_removes_foreign_fields_despite_concurrent_writes(conflicts: int) -> None:
    found, kube = server({"metadata": {}, "spec": {"externalIPs": ["192.0.2.1"]}})
    found.conflicts = conflicts
    after = await apply_exactly(kube, SERVICE)
    assert content(after) == content(SERVICE)
    patches = [options["changes"] for verb, _, options in found.requests if verb == "patch"]
    assert len(patches) == conflicts + 1
    # The patch names the object's uid and the resource version that was read.
    assert {"uid", "resourceVersion"} <= patches[-1]["metadata"].keys()


async def test_foreign_fields_that_conflict_with_own_fields_are_removed_first() -> None:
    found, kube = server({"metadata": {}, "spec": {"externalIPs": ["192.0.2.1"]}})
    await apply_exactly(kube, SERVICE)
    found.added = {"metadata": {}, "spec": {"externalIPs": ["192.0.2.2"]}}
    found._put(("Service", "team", "chat"), managed(SERVICE, found.added))
    found.refuses = True
    version = found.objects["Service", "team", "chat"]["metadata"]["resourceVersion"]
    about = {**SERVICE["metadata"], "resourceVersion": version}
    after = await apply_exactly(kube, {**SERVICE, "metadata": about})
    assert content(after)["spec"] == SERVICE["spec"]


async def test_an_invalid_own_object_is_an_error() -> None:
    found, kube = server({})
    found._put(("Service", "team", "chat"), managed(SERVICE, {"metadata": {}}))
    found.refuses, found.added = True, {"metadata": {}}
    with pytest.raises(Invalid):
        await apply_exactly(kube, SERVICE)


async def test_an_immutable_config_map_is_recreated() -> None:
    kube: Any = FakeKube()
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"namespace": "team", "name": "route", "ownerReferences": [{"uid": "owner"}]},
        "data": {"route.json": "{}"},
    }
    name = ("ConfigMap", "team", "route")

    class Frozen(FakeKube):
        async def apply(self, manifest: Manifest, **_: object) -> Manifest:
            self._asked("apply", name)
            self._compare(name, manifest)
            known = self.objects.get(name, {})
            return self._put(name, {**manifest, **({"immutable": True} if known.get("immutable") else {})})

    kube = Frozen()
    kube._put(name, {**config, "immutable": True})
    before = kube.objects[name]["metadata"]["uid"]
    known = kube.objects[name]["metadata"]
    about = {**config["metadata"], "uid": before, "resourceVersion": known["resourceVersion"]}
    after = await apply_exactly(kube, {**config, "metadata": about})
    assert "immutable" not in after
    assert after["metadata"]["uid"] != before
    assert ("delete", "ConfigMap route", {"uid": before, "grace_seconds": None}) in kube.requests


@pytest.mark.parametrize("about", [{"ownerReferences": []}, {"ownerReferences": [{"uid": "another"}]}])
async def test_nothing_is_removed_from_an_object_of_another_owner_that_is_in_the_way(about: Manifest) -> None:
    found, kube = server({"metadata": {}, "spec": {"externalIPs": ["192.0.2.1"]}})
    found._put(
        ("Service", "team", "chat"), managed({**SERVICE, "metadata": {**SERVICE["metadata"], **about}}, found.added)
    )
    found.refuses = True
    with pytest.raises(Invalid):
        await apply_exactly(kube, SERVICE)
    assert not [verb for verb, _, _ in found.requests if verb in ("patch", "delete")]


async def test_nothing_is_removed_from_another_object_of_the_name() -> None:
    found, kube = server({"metadata": {}, "spec": {"externalIPs": ["192.0.2.1"]}})
    found._put(("Service", "team", "chat"), managed(SERVICE, found.added))
    found.refuses = True
    with pytest.raises(Invalid):
        await apply_exactly(kube, {**SERVICE, "metadata": {**SERVICE["metadata"], "uid": "gone"}})
    assert not [verb for verb, _, _ in found.requests if verb in ("patch", "delete")]


# The comparison that saves an apply.


def created(wanted: Manifest, *, operation: str = "Update", **defaults: Any) -> Manifest:
    """Return the object as the API server has it after its creation: the creator owns the defaults too."""
    live = copy.deepcopy(wanted)
    live["spec"] |= defaults
    owned = {"metadata": wanted["metadata"], "spec": {**live["spec"]}}
    owned["spec"].pop("clusterIP", None)
    owned["metadata"] = {key: value for key, value in owned["metadata"].items() if key not in ("namespace", "name")}
    own = {"manager": MANAGER, "operation": operation, "fieldsV1": fields(owned)}
    live["metadata"] |= {"uid": "1", "resourceVersion": "1", "managedFields": [own]}
    return live


def test_an_object_as_it_was_created_or_applied_is_exact() -> None:
    wanted = copy.deepcopy(SERVICE)
    wanted["spec"]["ports"][0]["targetPort"] = 8000
    live = created(wanted, sessionAffinity="None", internalTrafficPolicy="Cluster", clusterIP="192.0.2.7")
    assert is_exact(wanted, live)
    assert is_exact(wanted, created(wanted, operation="Apply"))
    live["status"] = {"loadBalancer": {}}
    live["metadata"]["managedFields"].append(
        {"manager": "kcm", "operation": "Update", "subresource": "status", "fieldsV1": {"f:status": {}}}
    )
    assert is_exact(wanted, live), "the status is a controller's"


@given(_specs, _specs)
def test_a_difference_in_any_value_is_seen(own: Manifest, other: Manifest) -> None:
    wanted = {"metadata": {"name": "x"}, "spec": own}
    assert is_exact(wanted, created(wanted))
    live = created({"metadata": {"name": "x"}, "spec": other})
    assert is_exact(wanted, live) is (own == other)


@given(_specs, _specs)
def test_any_field_of_another_manager_is_seen(own: Manifest, foreign: Manifest) -> None:
    wanted = {"metadata": {"name": "x"}, "spec": own}
    added = beyond({"spec": foreign}, {"spec": own})
    live = managed(wanted, {"metadata": {}, **(added or {})})
    assert is_exact(wanted, live) is (added is None)


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"deletionTimestamp": "2026-11-27T00:00:00Z"}},
        {"metadata": {"labels": None}},
        {"metadata": {"labels": {"app": "other"}}},
        {"metadata": {"ownerReferences": [{"uid": "another"}]}},
        {"metadata": {"managedFields": None}},
        {"spec": {"ports": [*SERVICE["spec"]["ports"], {"name": "more", "port": 9, "protocol": "TCP"}]}},
        {"spec": {"ports": [{"name": "http", "port": 8000.0, "protocol": "TCP"}]}},
        {"spec": {"selector": {"in": "truder"}}},
        {"immutable": True},
    ],
)
def test_changes_that_need_an_apply(change: Manifest) -> None:
    live = created(SERVICE)
    assert is_exact(SERVICE, live)
    assert not is_exact(SERVICE, merged(live, change))


def test_others_may_add_labels_and_owners_without_an_apply() -> None:
    more = {"labels": {"team": "a"}, "ownerReferences": [{"uid": "owner"}, {"uid": "another"}]}
    assert is_exact(SERVICE, merged(created(SERVICE), {"metadata": more}))


@pytest.mark.parametrize(
    ("field", "value"), [("externalIPs", ["192.0.2.1"]), ("sessionAffinity", "ClientIP"), ("clientConfig", {"a": 1})]
)
def test_a_field_of_our_manager_that_is_no_longer_wanted_is_seen(field: str, value: object) -> None:
    """Of an earlier version of the operator, or of a client that uses the name of our manager."""
    assert not is_exact(SERVICE, created(SERVICE, **{field: value}))
    inside = copy.deepcopy(SERVICE)
    inside["spec"]["ports"][0][field] = value
    assert not is_exact(SERVICE, created(inside))
