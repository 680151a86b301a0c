"""Caches of pods and owned objects, kept up to date by watches, so that reads cost no request."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import orjson

from dsv4_operator.api import KIND
from dsv4_operator.builders import names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube.client import Client
from dsv4_operator.kube.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    NETWORK_POLICIES,
    NODES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    RAY_CLUSTERS,
    SERVICES,
    Forbidden,
    Gone,
    KubeError,
    Resource,
)
from dsv4_runtime.contract.recovery import backoff

_log = logging.getLogger("dsv4")

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 8.0
"""Seconds between attempts to open a watch; the longest one delays the news after an outage."""
_STABLE_SECONDS = 30.0
"""Duration after which an ended watch is opened again immediately; servers end watches after minutes."""
# Contains only the resource version to continue from.
_BOOKMARK = "BOOKMARK"

CacheKeyT = TypeVar("CacheKeyT")
_NamespacedName = tuple[str, str]


class Cache(Generic[CacheKeyT]):
    """All objects of one resource that a label selector matches, indexed by a key of each object.

    The cache lags behind the server by milliseconds or, while the server is unreachable, by minutes (`silence`). Before
    an action based on the absence of an object, read it from the server.
    """

    def __init__(
        self,
        kube: Client,
        resource: Resource,
        key: Callable[[Manifest], CacheKeyT],
        *,
        namespaces: Sequence[str] = (),
        labels: str | None = None,
        changed: Callable[[CacheKeyT], None] | None = None,
        keep: Callable[[Manifest], Manifest | None] | None = None,
        managed: bool = False,
        version: Callable[[Manifest], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        kube: the API server.
        resource: kind of the objects.
        key: returns the index key of an object; several objects may share one.
        namespaces: watched namespaces; empty: all.
        labels: label selector, applied by the server.
        changed: called with the key of every added, changed or deleted object.
        keep: returns the part of an object to keep, None to drop it; default: all of it.
        version: returns what must differ for a call of `changed`; default: the resource version.
        managed: whether `keep` gets `metadata.managedFields`, which are half of an object's bytes.
        clock: seconds, only for `silence`.
        """
        self._kube = kube
        self._resource = resource
        self._key = key
        self._labels = labels
        self._changed = changed
        self._keep = keep
        self._managed = managed
        self._version = version or (lambda item: item["metadata"].get("resourceVersion"))
        self._clock = clock
        self._objects: dict[CacheKeyT, dict[_NamespacedName, Manifest]] = defaultdict(dict)
        self._keys: dict[_NamespacedName, CacheKeyT] = {}
        self._last_data: dict[str | None, float] = {}
        places: Sequence[str | None] = namespaces or (None,)
        self._listed = {namespace: asyncio.Event() for namespace in places}
        """Set after the first complete list of a namespace."""

    def objects(self, key: CacheKeyT) -> list[Manifest]:
        """Return the objects with `key`, in no order. They are shared and must not be modified."""
        found = self._objects.get(key)
        return list(found.values()) if found else []

    def named(self, namespace: str, name: str) -> Manifest | None:
        """Return the object of that name; None if there is none. It is shared and must not be modified."""
        key = self._keys.get((namespace, name))
        return self._objects[key].get((namespace, name)) if key is not None else None

    def all(self) -> Iterable[Manifest]:
        """Return every object. They are shared and must not be modified."""
        for found in self._objects.values():
            yield from found.values()

    async def synced(self) -> None:
        """Wait for the first complete list of every namespace."""
        for listed in self._listed.values():
            await listed.wait()

    async def listed(self, namespace: str | None) -> None:
        """Wait for the first complete list of one of the namespaces; None: of all, if none are given."""
        await self._listed[namespace].wait()

    @property
    def silence(self) -> float:
        """Return the seconds since the last data from the server, of the namespace with the longest silence."""
        if len(self._last_data) < len(self._listed):
            return float("inf")
        return self._clock() - min(self._last_data.values())

    async def run(self) -> None:
        """Keep the cache up to date until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for namespace in self._listed:
                tasks.create_task(self._follow(namespace))

    async def _follow(self, namespace: str | None) -> None:
        """Follow one namespace: list, then watch, and list again when the resource version has expired."""
        version: str | None = None
        failures = 0
        while True:
            problem = "it ended"
            begun = self._clock()
            try:
                if version is None:
                    version = await self._list(namespace)
                async for event in self._kube.watch(
                    self._resource, namespace, labels=self._labels, resource_version=version
                ):
                    self._last_data[namespace] = self._clock()
                    version = event.resource_version
                    if event.type == "DELETED":
                        self._drop(_name(event.object))
                    elif event.type != _BOOKMARK:
                        self._put(event.object)
            except Gone:
                version, problem = None, "the server forgot where it was"
            except Forbidden as error:
                # Who may list and not watch has the state of each attempt.
                version, problem = None, str(error)
            except KubeError as error:
                problem = str(error)
            except Exception as error:
                # An invalid answer or object must not end the watch of the others.
                version, problem = None, f"{type(error).__name__}: {error}"
                _log.error("watching %s failed", self._resource.plural, exc_info=error)
            # Backoff for a server or proxy that ends streams immediately.
            failures = 1 if self._clock() - begun > _STABLE_SECONDS else failures + 1
            if failures == 1:
                continue
            pause = backoff(failures - 1, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE) * random.uniform(0.8, 1.2)  # noqa: S311
            _log.warning("watching %s is broken, again in %.1f s: %s", self._resource.plural, pause, problem)
            await asyncio.sleep(pause)

    async def _list(self, namespace: str | None) -> str:
        listing = await self._kube.listing(self._resource, namespace, labels=self._labels)
        self._last_data[namespace] = self._clock()
        present = set(map(_name, listing.items))
        for name in [name for name in self._keys if namespace in (None, name[0]) and name not in present]:
            self._drop(name)
        for item in listing.items:
            self._put(item)
        self._listed[namespace].set()
        return listing.resource_version

    def _put(self, item: Manifest) -> None:
        if not self._managed:
            item["metadata"].pop("managedFields", None)
        kept = self._keep(item) if self._keep is not None else item
        if kept is None:
            self._drop(_name(item))
            return
        item = kept
        name, key = _name(item), self._key(item)
        known = self._keys.get(name)
        if known is not None and known != key:
            self._drop(name)
        before = self._objects[key].get(name)
        self._keys[name] = key
        self._objects[key][name] = item
        if before is None or self._version(before) != self._version(item):
            self._notify(key)

    def _drop(self, name: _NamespacedName) -> None:
        key = self._keys.pop(name, None)
        if key is None:
            return
        self._objects[key].pop(name, None)
        if not self._objects[key]:
            del self._objects[key]
        self._notify(key)

    def _notify(self, key: CacheKeyT) -> None:
        if self._changed is not None:
            self._changed(key)


PodKey = tuple[str, str, int]
"""Namespace, deployment, group."""

GATEWAYS = -2
"""Value of the group in the key of gateways, for all groups of a deployment."""
_OTHERS: PodKey = ("", "", -1)


class PodCache(Cache[PodKey]):
    """Pods of a cluster: members and gateways by their labels, and the resource requests of all other pods."""

    def __init__(
        self, kube: Client, *, namespaces: Sequence[str] = (), changed: Callable[[PodKey], None] | None = None
    ) -> None:
        """See `Cache`. `changed` is called for members and gateways only."""

        def notify(key: PodKey) -> None:
            if changed is not None and key != _OTHERS:
                changed(key)

        super().__init__(kube, PODS, _pod_key, namespaces=namespaces, changed=notify, keep=_kept_of_pod)

    def pods(self, namespace: str, deployment: str, group: int) -> list[Manifest]:
        """Return the members of one group, of every incarnation, or the `GATEWAYS`.

        They are shared and must not be modified.
        """
        return self.objects((namespace, deployment, group))

    def groups(self, namespace: str, deployment: str) -> list[PodKey]:
        """Return the keys of the deployment's groups that have members."""
        return [key for key in self._objects if key[:2] == (namespace, deployment) and key[2] >= 0]

    def deployments_on(self, node: str) -> set[tuple[str, str]]:
        """Return namespace and name of the deployments with members on `node`."""
        return {
            key[:2]
            for key, pods in self._objects.items()
            if key[2] >= 0 and any(names.part(pod, "spec").get("nodeName") == node for pod in pods.values())
        }


class NodeCache(Cache[str]):
    """Cordoned nodes of a cluster, by name, without their content."""

    def __init__(self, kube: Client, *, changed: Callable[[str], None] | None = None) -> None:
        """See `Cache`. `changed` is called with every node that was cordoned or uncordoned."""
        super().__init__(kube, NODES, _node_name, changed=changed, keep=_cordoned, version=_node_name)


def _node_name(node: Manifest) -> str:
    return str(node["metadata"]["name"])


def _cordoned(node: Manifest) -> Manifest | None:
    if not names.part(node, "spec").get("unschedulable"):
        return None
    metadata = node["metadata"]
    return {"metadata": {"name": metadata["name"], "resourceVersion": metadata.get("resourceVersion")}}


def _name(item: Manifest) -> _NamespacedName:
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _pod_key(pod: Manifest) -> PodKey:
    """Return the group of a member pod: by owner and name, which are immutable, else by its labels."""
    owners = names.parts(pod, "metadata", "ownerReferences")
    member = names.parse_member_name(str(pod["metadata"].get("name")))
    makers = {(KIND, member[0]), (names.RAY_CLUSTER, names.incarnation_name(*member[:3]))} if member is not None else ()
    if member is not None and any((one.get("kind"), one.get("name")) in makers for one in owners):
        return pod["metadata"].get("namespace", ""), member[0], member[1]
    labels = names.part(pod, "metadata", "labels")
    if labels.get(names.MANAGED_BY) != names.MANAGER:
        return _OTHERS
    if labels.get(names.COMPONENT) == names.GATEWAY:
        return pod["metadata"].get("namespace", ""), labels.get(names.DEPLOYMENT, ""), GATEWAYS
    if labels.get(names.COMPONENT) != names.MEMBER:
        return _OTHERS
    group = str(labels.get(names.GROUP, ""))
    number = int(group) if group.isascii() and group.isdigit() and len(group) < 10 else -1
    return pod["metadata"].get("namespace", ""), labels.get(names.DEPLOYMENT, ""), number


def _kept_of_pod(pod: Manifest) -> Manifest | None:
    """Return members and gateways unchanged, and of any other running pod the fields that the scheduler reads."""
    if _pod_key(pod) != _OTHERS:
        return pod
    status, spec, metadata = pod.get("status") or {}, pod.get("spec") or {}, pod["metadata"]
    if status.get("phase") in ("Succeeded", "Failed"):
        return None
    kept_spec = {name: spec[name] for name in ("nodeName", "overhead", "resources") if spec.get(name)}
    if "nodeName" not in kept_spec and spec.get("affinity"):
        kept_spec["affinity"] = {"nodeAffinity": spec["affinity"].get("nodeAffinity")}
    for name in ("containers", "initContainers"):
        kept_spec[name] = [
            {field: container[field] for field in ("resources", "restartPolicy") if container.get(field)}
            for container in spec.get(name) or []
        ]
    kept_metadata = {name: metadata.get(name) for name in ("namespace", "name", "uid", "resourceVersion")}
    return {"metadata": kept_metadata, "spec": kept_spec, "status": {"phase": status.get("phase")}}


_KINDS = (SERVICES, CONFIG_MAPS, DEPLOYMENTS, NETWORK_POLICIES, POD_DISRUPTION_BUDGETS)

DeploymentKey = tuple[str, str]
"""Namespace and name of a deployment."""

Versions = frozenset[tuple[str, str, str]]
"""Kind, name and version of objects."""


class OwnedCache:
    """Services, ConfigMaps, gateways, budgets and policies of all deployments, kept up to date by watches."""

    def __init__(
        self, kube: Client, *, namespaces: Sequence[str] = (), changed: Callable[[DeploymentKey], None] | None = None
    ) -> None:
        """See `Cache`. `changed` is called with the deployment of every changed object."""
        chosen = f"{names.MANAGED_BY}={names.MANAGER}"
        # Plans and evidence belong to incarnations, and plans are read only at the start of members.
        lasting = f"{chosen},!{names.INCARNATION}"
        self._caches = {
            resource.kind: Cache(
                kube,
                resource,
                _key,
                namespaces=namespaces,
                labels=lasting if resource is CONFIG_MAPS else chosen,
                changed=changed,
                keep=_packed,
                managed=True,
                # Controllers write the status of gateways and budgets often.
                version=_version,
            )
            for resource in _KINDS
        }

    async def run(self) -> None:
        """Keep the caches up to date until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for cache in self._caches.values():
                tasks.create_task(cache.run())

    async def listed(self, namespace: str | None) -> None:
        """Wait for the first complete lists of one of the namespaces; None: of all, if none are given."""
        for cache in self._caches.values():
            await cache.listed(namespace)

    def find(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        """Return the object as the watch shows it, with `managedFields` and without status; None if it shows none."""
        cache = self._caches.get(resource.kind)
        found = cache.named(namespace, name) if cache is not None else None
        if found is None:
            return None
        content: dict[str, Any] = orjson.loads(found[_PACKED])
        return {"apiVersion": resource.api_version, "kind": resource.kind, **content}

    def versions(self, namespace: str, deployment: str) -> Versions:
        """Return the versions of `deployment`'s objects, which are independent of the objects' status."""
        return frozenset(
            (kind, one["metadata"]["name"], _version(one))
            for kind, cache in self._caches.items()
            for one in cache.objects((namespace, deployment))
        )


class RayClusterCache(Cache[DeploymentKey]):
    """RayClusters of all deployments with their labels and conditions."""

    def __init__(
        self, kube: Client, *, namespaces: Sequence[str] = (), changed: Callable[[DeploymentKey], None] | None = None
    ) -> None:
        """See `Cache`."""
        chosen = f"{names.MANAGED_BY}={names.MANAGER}"
        super().__init__(
            kube, RAY_CLUSTERS, _key, namespaces=namespaces, labels=chosen, changed=changed, keep=_without_template
        )


_PACKED = "packed"
"""Field with the JSON of an object, which has a tenth of the memory of its dicts."""


def _packed(item: Manifest) -> Manifest:
    return {**_without_content(item), _PACKED: orjson.dumps({**item, "status": None})}


def _without_template(item: Manifest) -> Manifest:
    return {**_without_content(item), "status": {"conditions": names.parts(item, "status", "conditions")}}


def _key(item: Manifest) -> DeploymentKey:
    metadata = item["metadata"]
    return metadata["namespace"], (metadata.get("labels") or {}).get(names.DEPLOYMENT, "")


def _version(item: Manifest) -> str:
    """Return a version without the status: generation, labels and owners, for kinds with a generation."""
    metadata = item["metadata"]
    if not metadata.get("generation"):
        return str(metadata["resourceVersion"])
    ours = sorted((metadata.get("labels") or {}).items())
    owners = sorted(one.get("uid", "") for one in metadata.get("ownerReferences") or [])
    return f"{metadata['generation']} {ours} {owners}"


def _without_content(item: Manifest) -> Manifest:
    wanted = ("namespace", "name", "labels", "generation", "resourceVersion", "ownerReferences")
    return {"metadata": {name: item["metadata"].get(name) for name in wanted}}
