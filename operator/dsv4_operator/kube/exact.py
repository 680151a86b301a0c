"""Exact ownership of applied objects: removal of fields of other field managers.

Server-side apply sets the fields of its own manager and keeps all others, so a port, a container or a selector key that
another manager added would stay. The operator owns the objects of a deployment as a whole.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsv4_operator.builders.names import DOMAIN, MANAGER, Manifest
from dsv4_operator.kube.client import Client
from dsv4_operator.kube.resources import Conflict, Invalid, Resource, resource_of

_log = logging.getLogger("dsv4")

_TRIES = 3
_CLOSED: tuple[tuple[str, ...], ...] = (
    ("data",),
    ("spec", "selector"),
    ("spec", "selector", "matchLabels"),
    ("spec", "podSelector", "matchLabels"),
    ("spec", "template", "metadata", "labels"),
)
"""Maps in which every key has an effect. They are compared by value, because any client can use our manager's name."""
_ALLOWED_ANNOTATIONS = frozenset({"kubectl.kubernetes.io/restartedAt"})
"""On a pod template: set by `kubectl rollout restart`."""

_DEFAULTS: Mapping[str, Any] = {
    "dnsPolicy": "ClusterFirst",
    "failureThreshold": 3,
    "defaultMode": 420,
    "imagePullPolicy": "IfNotPresent",
    "internalTrafficPolicy": "Cluster",
    "progressDeadlineSeconds": 600,
    "restartPolicy": "Always",
    "scheme": "HTTP",
    "schedulerName": "default-scheduler",
    "sessionAffinity": "None",
    "successThreshold": 1,
    "terminationMessagePath": "/dev/termination-log",
    "terminationMessagePolicy": "File",
    "timeoutSeconds": 1,
    "type": "ClusterIP",
}
"""Fields that API servers add to new objects, with their values: the creator owns them too."""

_FieldSet = Mapping[str, Any]
"""A node of `fieldsV1`: `f:NAME` is a field, `k:{...}`, `v:...` and `i:...` are list items, `.` is itself."""


async def apply_exactly(kube: Client, manifest: Manifest) -> Manifest:
    """Apply `manifest`, and remove additions of other managers; return the resulting object.

    Fields that the API server, its admission or Kubernetes' own controllers set are kept.

    Raises:
        KubeError: the API server refused it; `Conflict` if the object was changed at each try.
    """
    metadata = manifest["metadata"]
    namespace, name, resource = metadata.get("namespace"), metadata["name"], resource_of(manifest)
    try:
        live = await kube.apply(manifest)
    except Invalid:
        # An addition of another manager may conflict with it, such as a port of the same name.
        found = await _live(kube, resource, namespace, name)
        if found is None or not _is_own(manifest, found):
            raise
        live = found
        if not _frozen(manifest, found):
            cleaned = await _clean(kube, manifest, found)
            if cleaned is found:
                raise
            about = dict(metadata)
            if about.get("resourceVersion") == found["metadata"]["resourceVersion"]:
                # The requested version, after the removal.
                about["resourceVersion"] = cleaned["metadata"]["resourceVersion"]
            live = await kube.apply({**manifest, "metadata": about})
    if _frozen(manifest, live):
        # Immutability cannot be undone.
        _log.warning(
            "%s %s/%s was made immutable by another client: it is created again", resource.kind, namespace, name
        )
        await kube.delete(resource, namespace, name, uid=live["metadata"]["uid"])
        anew = {field: value for field, value in metadata.items() if field not in ("uid", "resourceVersion")}
        live = await kube.apply({**manifest, "metadata": anew})
    return await _clean(kube, manifest, live)


async def _clean(kube: Client, manifest: Manifest, live: Manifest) -> Manifest:
    """Remove the additions of other managers; return the resulting object, or `live` itself if there were none."""
    namespace, name, resource = live["metadata"].get("namespace"), live["metadata"]["name"], resource_of(manifest)
    for last in (*[False] * (_TRIES - 1), True):
        changes = foreign_changes(manifest, live)
        if not changes:
            return live
        text = json.dumps(changes)
        _log.warning("%s %s/%s: removing fields of other managers: %s", resource.kind, namespace, name, text)
        about = {"uid": live["metadata"]["uid"], "resourceVersion": live["metadata"]["resourceVersion"]}
        changes["metadata"] = {**changes.get("metadata", {}), **about}
        try:
            return await kube.patch(resource, namespace, name, changes)
        except Conflict:
            # Controllers may have written the status.
            found = await _live(kube, resource, namespace, name)
            if last or found is None or found["metadata"]["uid"] != live["metadata"]["uid"]:
                raise
            live = found
    raise AssertionError("the last try returns or raises")


async def _live(kube: Client, resource: Resource, namespace: str | None, name: str) -> Manifest | None:
    """Return the live object; None if there is none. The operator may list these kinds, not get them."""
    return next(iter(await kube.list(resource, namespace, fields=f"metadata.name={name}")), None)


def foreign_changes(wanted: Manifest, live: Manifest) -> Manifest:
    """Return the JSON merge patch that removes additions of other managers from `live`; empty if there are none.

    `wanted` is the object as applied, `live` the one on the API server with `metadata.managedFields`.
    """
    changes: Manifest = {}
    entries = live["metadata"].get("managedFields") or []
    ours = _merged([one.get("fieldsV1") or {} for one in entries if one.get("manager") == MANAGER])
    for entry in entries:
        # Entries of subresources belong to controllers: status, scale.
        if entry.get("manager") == MANAGER or entry.get("subresource"):
            continue
        for path in _beyond(entry.get("fieldsV1") or {}, ours):
            if not _tolerated(path):
                _remove(changes, path, wanted, live)
    for path in _CLOSED:
        known, kept = _at(live, path), _at(wanted, path)
        if isinstance(known, Mapping) and isinstance(kept, Mapping):
            for key in known.keys() - kept.keys():
                _remove(changes, (*path, key), wanted, live)
    return changes


def is_exact(wanted: Manifest, live: Manifest) -> bool:
    """Return whether an apply of `wanted` over `live` would change nothing.

    In doubt it returns False, which costs the requests of `apply_exactly`.
    """
    about = live["metadata"]
    if about.get("deletionTimestamp") or bool(live.get("immutable")) != bool(wanted.get("immutable")):
        return False
    if not (_contains(live, wanted) and _has_owners(wanted, live)) or foreign_changes(wanted, live):
        return False
    entries = [one for one in about.get("managedFields") or [] if one.get("manager") == MANAGER]
    own = [one.get("fieldsV1") or {} for one in entries if not one.get("subresource")]
    # Without its own entry, the fields of other managers cannot be told from those of this one.
    return bool(own) and not _is_obsolete(_merged(own), wanted, live)


def _contains(live: Any, wanted: Any) -> bool:
    """Return whether `live` has every value of `wanted`; API servers add fields to maps, also to those in lists."""
    if isinstance(wanted, Mapping):
        # Owners are compared by `_has_owners`: others may be added.
        return isinstance(live, Mapping) and all(
            name == "ownerReferences" or (name in live and _contains(live[name], part)) for name, part in wanted.items()
        )
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        if not isinstance(live, Sequence) or isinstance(live, str) or len(live) != len(wanted):
            return False
        return all(map(_contains, live, wanted))
    return type(live) is type(wanted) and bool(live == wanted)


def _has_owners(wanted: Manifest, live: Manifest) -> bool:
    found = live["metadata"].get("ownerReferences") or []
    return all(one in found for one in wanted["metadata"].get("ownerReferences") or [])


def _is_obsolete(ours: _FieldSet, wanted: Any, live: Any) -> bool:
    """Return whether `ours`, the fields of our manager, has one that `wanted` lacks and that is no default."""
    for key, below in ours.items():
        kind, _, name = key.partition(":")
        if kind == "f":
            if not isinstance(wanted, Mapping) or not isinstance(live, Mapping) or name not in live:
                return True
            part = live[name]
            if name in wanted:
                if name != "ownerReferences" and _is_obsolete(below, wanted[name], part):
                    return True
            elif isinstance(part, Mapping):
                # API servers add maps of defaults, also empty ones.
                if _is_obsolete(below, {}, part) or not part.keys() <= {key.partition(":")[2] for key in below}:
                    return True
            elif name not in _DEFAULTS or part != _DEFAULTS[name]:
                return True
        elif kind == "k":
            found = _item(json.loads(name), wanted, live)
            if found is None or _is_obsolete(below, *found):
                return True
        elif key != ".":
            # Elements of lists without keys are compared as values.
            continue
    return False


def _item(keys: Mapping[str, Any], wanted: Any, live: Any) -> tuple[Any, Any] | None:
    """Return the item with `keys` of `live`, and the one at its place in `wanted`; both lists have the same length."""
    if not isinstance(wanted, Sequence) or not isinstance(live, Sequence):
        return None
    for one, other in zip(wanted, live, strict=True):
        if isinstance(other, Mapping) and all(other.get(key) == value for key, value in keys.items()):
            return one, other
    return None


def _is_own(wanted: Manifest, live: Manifest) -> bool:
    """Return whether `live` is the object of `wanted` with the same owner; objects of other owners are not changed."""
    uid = wanted["metadata"].get("uid")
    owners = [{one.get("uid") for one in found["metadata"].get("ownerReferences") or []} for found in (wanted, live)]
    return uid in (None, live["metadata"]["uid"]) and bool(owners[0]) and owners[0] <= owners[1]


def _frozen(wanted: Manifest, live: Manifest) -> bool:
    """Return whether another client made a ConfigMap immutable."""
    return bool(live.get("immutable")) and not wanted.get("immutable") and _is_own(wanted, live)


def _tolerated(path: Sequence[str]) -> bool:
    """Return whether other managers may own the field: labels, annotations, finalizers and owners of the object."""
    if path[0] == "status":
        return True
    if path[:4] == ("spec", "template", "metadata", "annotations"):
        return path[4:5] != () and path[4] in _ALLOWED_ANNOTATIONS
    return path[0] == "metadata" and not path[-1].startswith(f"{DOMAIN}/")


def _merged(sets: Sequence[_FieldSet]) -> _FieldSet:
    found: dict[str, Any] = {}
    for one in sets:
        for key, below in one.items():
            found[key] = _merged([found[key], below]) if key in found else below
    return found


def _beyond(theirs: _FieldSet, ours: _FieldSet, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every field in `theirs` that is missing from `ours`, up to the first list in the path."""
    for key, below in theirs.items():
        if key == ".":
            continue
        kind, _, name = key.partition(":")
        if kind != "f":
            # An item of a list: lists are replaced as a whole.
            if key not in ours or any(True for _ in _beyond(below, ours[key])):
                yield path
            continue
        if key in ours and not ours[key]:
            # Owned as a whole.
            continue
        deeper = [part for part in below if part != "."]
        if deeper and key in ours:
            yield from _beyond(below, ours[key], (*path, name))
        elif key not in ours:
            # Each key of a map separately: some of them may stay.
            named = deeper and all(part.startswith("f:") for part in deeper)
            yield from _beyond(below, {}, (*path, name)) if named else [(*path, name)]


def _remove(changes: Manifest, path: Sequence[str], wanted: Manifest, live: Manifest) -> None:
    """Add to `changes` the value of `path` in `wanted`, or its removal, with as few other fields as possible."""
    part: Manifest = changes
    there: Any = live
    kept: Any = wanted
    for depth, name in enumerate(path):
        last = depth == len(path) - 1
        if not isinstance(there, Mapping) or name not in there:
            return
        there = there[name]
        has = isinstance(kept, Mapping) and name in kept
        kept = kept[name] if has else None
        # An empty map would be a change itself; only metadata contains fields of other managers.
        if last or (not has and path[0] != "metadata"):
            part[name] = kept
            return
        if name in part and part[name] is None:
            return
        part = part.setdefault(name, {})


def _at(manifest: Any, path: Sequence[str]) -> Any:
    for name in path:
        if not isinstance(manifest, Mapping):
            return None
        manifest = manifest.get(name)
    return manifest
