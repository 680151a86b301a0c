"""An API server in memory with the features used by leases, fences and formations: versions, uids and preconditions."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Iterable
from typing import Any

from dsv4_operator.api import KIND, STORED_VERSION
from dsv4_operator.kube import AlreadyExists, Conflict, Invalid, Resource, Unavailable, resource_of

Manifest = dict[str, Any]
_Name = tuple[str, str, str]
_KEYS = (("port", "protocol"), ("containerPort", "protocol"), ("mountPath",), ("uid",), ("name",))
"""Keys of lists: items with equal values are the same item."""


class FakeKube:
    """Stores objects by kind, namespace and name. Every write has a new version, every object its own uid."""

    def __init__(self, objects: Iterable[Manifest] = ()) -> None:
        self.objects: dict[_Name, Manifest] = {}
        self.requests: list[tuple[str, str, dict[str, Any]]] = []
        """Verb, kind and name, options."""
        self.broken = False
        self._version = 0
        for one in objects:
            self._put(_name(one), one)

    def _asked(self, verb: str, name: _Name, **options: Any) -> None:
        self.requests.append((verb, f"{name[0]} {name[2]}", options))
        if self.broken:
            raise Unavailable("the API server is away")

    def _put(self, name: _Name, manifest: Manifest) -> Manifest:
        self._version += 1
        known = self.objects.get(name)
        kept = copied(_stored(manifest))
        uid = known["metadata"]["uid"] if known else f"uid-{self._version}"
        kept["metadata"] |= {"resourceVersion": str(self._version), "uid": uid}
        if "stringData" in kept:
            text = kept.pop("stringData")
            kept["data"] = {key: base64.b64encode(value.encode()).decode() for key, value in text.items()}
        self.objects[name] = kept
        return copied(kept)

    def asked(self) -> list[str]:
        """Return verb, kind and name of every request since `requests` was emptied."""
        return [f"{verb} {what}".rstrip() for verb, what, _ in self.requests]

    def writes(self) -> list[str]:
        """Return verb, kind and name of every request other than reads."""
        return [f"{verb} {what}" for verb, what, _ in self.requests if verb not in ("get", "list")]

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest | None:
        where = (resource.kind, namespace or "", name)
        self._asked("get", where)
        return copied(self.objects.get(where))

    async def list(
        self, resource: Resource, namespace: str | None = None, *, labels: str | None = None, fields: str | None = None
    ) -> list[Manifest]:
        self._asked("list", (resource.kind, namespace or "", ""), labels=labels)
        wanted = list(filter(None, (labels or "").split(",")))
        found = []
        for (kind, where, name), one in self.objects.items():
            if kind != resource.kind or namespace not in (None, where) or fields not in (None, f"metadata.name={name}"):
                continue
            has = one["metadata"].get("labels") or {}
            if all(_chooses(term, has) for term in wanted):
                found.append(copied(one))
        return found

    async def create(self, manifest: Manifest, *, strict: bool = False) -> Manifest:
        name = _name(manifest)
        self._asked("create", name)
        if name in self.objects:
            raise AlreadyExists(f"{name} is there")
        return self._put(name, manifest)

    async def apply(self, manifest: Manifest, **_: object) -> Manifest:
        name = _name(manifest)
        self._asked("apply", name)
        self._compare(name, manifest)
        return self._put(name, manifest)

    async def replace(self, manifest: Manifest, *, subresource: str | None = None) -> Manifest:
        name = _name(manifest)
        self._asked("replace", name)
        self._compare(name, manifest)
        if subresource is not None:
            manifest = {**self.objects[name], subresource: manifest[subresource]}
        return self._put(name, manifest)

    async def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        grace_seconds: int | None = None,
    ) -> None:
        where = (resource.kind, namespace or "", name)
        self._asked("delete", where, uid=uid, grace_seconds=grace_seconds)
        known = self.objects.get(where)
        if known is not None and uid not in (None, known["metadata"]["uid"]):
            raise Conflict("there is another one of its name")
        if known is not None and resource.kind == "Pod" and grace_seconds:
            # The pod remains until its kubelet ends it.
            known["metadata"] |= {
                "deletionTimestamp": "2026-11-23T00:00:00Z",
                "deletionGracePeriodSeconds": grace_seconds,
            }
        else:
            self.objects.pop(where, None)

    async def patch(
        self, resource: Resource, namespace: str | None, name: str, changes: Manifest, *, subresource: str | None = None
    ) -> Manifest:
        where = (resource.kind, namespace or "", name)
        self._asked("patch", where, changes=changes)
        self._compare(where, changes if "metadata" in changes else {"metadata": {}})
        return self._put(where, merged(self.objects[where], changes))

    async def evict(self, namespace: str, name: str, *, uid: str) -> None:
        self._asked("evict", ("Pod", namespace, name), uid=uid)
        self.objects.pop(("Pod", namespace, name), None)

    def _compare(self, name: _Name, manifest: Manifest) -> None:
        known = self.objects.get(name)
        for field in ("uid", "resourceVersion"):
            wanted = manifest["metadata"].get(field)
            if wanted is not None and (known is None or known["metadata"][field] != wanted):
                # The API server uses the same errors.
                kind = Invalid if field == "uid" and known is not None else Conflict
                raise kind(f"{name} has another {field}")


def copied(value: Any) -> Any:
    """Return a deep copy of JSON values, in a quarter of the time of `copy.deepcopy`."""
    if type(value) is dict:
        return {name: copied(part) for name, part in value.items()}
    if type(value) is list:
        return [copied(part) for part in value]
    return value if value is None or isinstance(value, (str, int, float)) else copy.deepcopy(value)


def merged(document: Any, changes: Any) -> Any:
    """Return `document` after the JSON merge patch `changes` (RFC 7386)."""
    if not isinstance(changes, dict):
        return copied(changes)
    found = copied(document) if isinstance(document, dict) else {}
    for name, value in changes.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), value)
    return found


def fields(value: Any) -> dict[str, Any]:
    """Return the fields that an applier of `value` owns, as the API server writes them; lists without keys are
    atomic."""
    if isinstance(value, dict):
        return {f"f:{name}": fields(part) for name, part in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        keys = next((keys for keys in _KEYS if all(key in one for one in value for key in keys)), ())
        if keys:
            return {f"k:{json.dumps({key: one[key] for key in keys})}": {".": {}, **fields(one)} for one in value}
    return {}


def _chooses(term: str, labels: dict[str, str]) -> bool:
    """Return whether `labels` satisfy one term of a label selector."""
    if term.startswith("!"):
        return term[1:] not in labels
    if "!=" in term:
        name, _, value = term.partition("!=")
        return labels.get(name) != value
    name, equals, value = term.partition("=")
    return labels.get(name) == value if equals else name in labels


def _stored(manifest: Manifest) -> Manifest:
    """Return `manifest` in the version in which an API server stores it."""
    return {**manifest, "apiVersion": STORED_VERSION} if manifest.get("kind") == KIND else manifest


def _name(manifest: Manifest) -> _Name:
    return resource_of(_stored(manifest)).kind, manifest["metadata"].get("namespace", ""), manifest["metadata"]["name"]
