"""The nodes of a cluster with what is left of them: pure functions over what the API server lists."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from dsv4_operator.api.values import quantity
from dsv4_operator.builders import names
from dsv4_operator.builders.names import Manifest

_GROUP_KEY = (names.DEPLOYMENT, names.GROUP)

PODS = "pods"
"""The resource of which each pod takes one; nodes allow 110 by default."""

Owner = tuple[str, str, str, str]
"""Namespace, deployment and group of a member, and the UID of the deployment."""


@dataclass(frozen=True)
class Snapshot:
    """A cluster at one moment. What is on each node is worked out once, however many groups ask."""

    nodes: tuple[Manifest, ...]
    requests: tuple[PodRequests, ...]
    """Of the pods of all namespaces, also of other programs: they take from the same nodes."""
    expected: tuple[PodRequests, ...] = ()
    """Resources of pods that are about to be there."""

    @classmethod
    def of_pods(cls, nodes: Iterable[Manifest], pods: Iterable[Manifest]) -> Snapshot:
        """Return the moment at which `nodes` and `pods` were listed."""
        return cls(tuple(nodes), tuple(found for pod in pods if (found := pod_requests(pod)) is not None))

    def expecting(self, expected: Iterable[PodRequests]) -> Snapshot:
        """Return the same moment with other pods about to be there."""
        changed = Snapshot(self.nodes, self.requests, tuple(expected))
        # Found already, and the same.
        changed.__dict__.update(_listed=self._listed)
        return changed

    def of(self, owner: Owner) -> Sequence[Manifest]:
        """Return the members of one group, those about to be there included."""
        return [one.pod for one in self._members.get(owner, ())]

    @cached_property
    def _members(self) -> Mapping[Owner, Sequence[PodRequests]]:
        found: dict[Owner, list[PodRequests]] = defaultdict(list)
        for one in (*self.requests, *self.expected):
            if one.owner is not None:
                found[one.owner].append(one)
        return dict(found)

    @cached_property
    def _listed(self) -> Mapping[str, NodeCapacity]:
        """Return every node with what is left beside the pods that are there."""
        found = {}
        for node in self.nodes:
            allocatable = names.part(node, "status", "allocatable")
            capacity = NodeCapacity(node, {name: math.floor(_scaled(name, text)) for name, text in allocatable.items()})
            found[capacity.name] = capacity
        return _with_reserved(found, self.requests)

    @cached_property
    def _left(self) -> Mapping[str, NodeCapacity]:
        """Return every node with what is left beside all pods."""
        return _with_reserved({name: node.copy() for name, node in self._listed.items()}, self.expected)

    def capacity_for(self, owner: Owner) -> list[NodeCapacity]:
        """Return every node with what is left beside all pods but those of the group `owner`.

        These end before new ones come. The list is the caller's own: it may reserve on it.
        """
        found = {name: node.copy() for name, node in self._left.items()}
        for one in self._members.get(owner, ()):
            if one.node in found:
                found[one.node].release(one)
        return list(found.values())


@dataclass(frozen=True, slots=True, eq=False)
class PodRequests:
    """Resources that one pod takes of its node."""

    pod: Manifest
    node: str
    owner: Owner | None
    """None: it is no member of a group."""
    requests: Mapping[str, int]
    """In the units of `NodeCapacity.free`."""


@dataclass(slots=True, eq=False)
class NodeCapacity:
    """One node with what is left of it for one group."""

    manifest: Manifest
    free: dict[str, int]
    """Processors in thousandths, memory in bytes, devices by count."""
    members: list[Manifest] = field(default_factory=list)
    """Pods of members of other groups."""

    @property
    def name(self) -> str:
        """Return the node's name."""
        return str(self.manifest["metadata"]["name"])

    def copy(self) -> NodeCapacity:
        """Return another one, to reserve on. Both share the fields until one replaces its own."""
        return NodeCapacity(self.manifest, self.free, self.members)

    def reserve(self, pod: PodRequests) -> None:
        """Subtract the requests of a pod on this node."""
        self.take(pod.requests)
        if pod.owner is not None:
            self.members = [*self.members, pod.pod]

    def release(self, pod: PodRequests) -> None:
        """Add the requests of a pod that ends before others come."""
        self.take({resource: -number for resource, number in pod.requests.items()})
        self.members = [member for member in self.members if member is not pod.pod]

    def take(self, requests: Mapping[str, int]) -> None:
        """Subtract `requests` from the free resources."""
        free = dict(self.free)
        for resource, number in requests.items():
            free[resource] = free.get(resource, 0) - number
        self.free = free


def readable(node: Manifest) -> bool:
    """Return whether `node` has the form of a node as far as it is read: one that has not must not hide the others."""
    for path in (("metadata", "labels"), ("spec",), ("status", "allocatable"), ("status", "capacity")):
        if not isinstance(_at(node, *path), dict | None):
            return False
    for path in (("spec", "taints"), ("status", "conditions"), ("status", "addresses")):
        found = _at(node, *path)
        if found is not None and not (isinstance(found, list) and all(isinstance(one, dict) for one in found)):
            return False
    amounts = names.part(node, "status", "allocatable")
    return isinstance(names.part(node, "metadata").get("name"), str) and all(map(_is_amount, amounts.values()))


def _at(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else value
    return value


def _is_amount(value: object) -> bool:
    try:
        quantity(str(value))
    except ValueError:
        return False
    return True


def node_of(pod: Manifest) -> str | None:
    """Return the node that `pod` is on, or is meant for; None while it may go anywhere."""
    name = names.part(pod, "spec").get("nodeName")
    if name:
        return str(name)
    required = names.part(pod, "spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    for term in names.parts(required, "nodeSelectorTerms"):
        for want in names.parts(term, "matchFields"):
            values = want.get("values")
            if want.get("key") == "metadata.name" and values and isinstance(values, list):
                return str(values[0])
    return None


def pod_requests(pod: Manifest) -> PodRequests | None:
    """Return what `pod` takes of its node; None if it has none, or has ended."""
    name = node_of(pod)
    if name is None or has_ended(pod):
        return None
    return PodRequests(pod, name, owner_of(pod) if is_member(pod) else None, _requests(pod))


def has_ended(pod: Manifest) -> bool:
    """Tell whether every container of `pod` has ended for good, so that it takes nothing any more."""
    return names.part(pod, "status").get("phase") in ("Succeeded", "Failed")


def is_member(pod: Manifest) -> bool:
    """Tell whether `pod` is a member of a group of some deployment."""
    labels = names.part(pod, "metadata", "labels")
    return labels.get(names.MANAGED_BY) == names.MANAGER and labels.get(names.COMPONENT) == names.MEMBER


def owner_of(pod: Manifest) -> Owner:
    """Return whose member `pod` is."""
    metadata = pod["metadata"]
    deployment, group = (str(metadata["labels"].get(key, "")) for key in _GROUP_KEY)
    return str(metadata["namespace"]), deployment, group, str((names.controller_of(pod) or {}).get("uid") or "")


def _with_reserved(nodes: dict[str, NodeCapacity], pods: Iterable[PodRequests]) -> dict[str, NodeCapacity]:
    for pod in pods:
        if pod.node in nodes:
            nodes[pod.node].reserve(pod)
    return nodes


def _requests(pod: Manifest) -> dict[str, int]:
    """Return the requests of `pod` as the scheduler counts them.

    Source: `PodRequests` of k8s.io/component-helpers/resource, without resizing in place. Containers run together with
    the sidecars, an initial container with the sidecars before it. Requests of the pod itself replace the sum.
    """
    spec = names.part(pod, "spec")
    total: dict[str, int] = defaultdict(int)
    for container in names.parts(spec, "containers"):
        _add(total, _container_requests(container))
    sidecars: dict[str, int] = defaultdict(int)
    greatest: dict[str, int] = {}
    for container in names.parts(spec, "initContainers"):
        wanted = _container_requests(container)
        if container.get("restartPolicy") == "Always":
            _add(sidecars, wanted)
            _add(total, wanted)
            wanted = {}
        for resource in {*sidecars, *wanted}:
            number = sidecars.get(resource, 0) + wanted.get(resource, 0)
            greatest[resource] = max(greatest.get(resource, 0), number)
    for resource, number in greatest.items():
        total[resource] = max(total[resource], number)
    total.update(_container_requests(spec))
    _add(total, _rounded_up(names.part(spec, "overhead")))
    total[PODS] = 1
    return total


def _add(total: dict[str, int], requests: Mapping[str, int]) -> None:
    for resource, number in requests.items():
        total[resource] += number


def _container_requests(container: Mapping[str, Any]) -> dict[str, int]:
    limits, requests = (names.part(container, "resources", name) for name in ("limits", "requests"))
    return _rounded_up({**limits, **requests})


def _rounded_up(quantities: Mapping[str, object]) -> dict[str, int]:
    return {name: math.ceil(_scaled(name, text)) for name, text in quantities.items()}


def _scaled(resource: str, text: object) -> Fraction:
    """Return an amount in the units of `NodeCapacity.free`; nothing where it cannot be read."""
    try:
        return quantity(str(text)) * (1000 if resource == "cpu" else 1)
    except ValueError:
        return Fraction(0)
