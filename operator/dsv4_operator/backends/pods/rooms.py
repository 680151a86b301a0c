"""The nodes of a cluster with what is left of them: pure functions over what the API server lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

from dsv4_operator.builders import names

Manifest = dict[str, Any]

_GROUP_KEY = (names.DEPLOYMENT, names.GROUP)

_SCALES = {
    "m": Fraction(1, 1000), "": Fraction(1), "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9),
    "T": Fraction(10**12), "Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30), "Ti": Fraction(2**40),
}  # fmt: skip

Owner = tuple[str, str, str]
"""Namespace, deployment and group of a member."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cluster at one moment."""

    nodes: tuple[Manifest, ...]
    pods: tuple[Manifest, ...]
    """Of all namespaces, also of other programs: they take from the same nodes."""


@dataclass(slots=True, eq=False)
class Room:
    """One node with what is left of it for one group."""

    node: Manifest
    free: dict[str, int]
    """Processors in thousandths, memory in bytes, devices by count."""
    members: list[Manifest] = field(default_factory=list)
    """Pods of members of other groups."""

    @property
    def name(self) -> str:
        """The node's."""
        return str(self.node["metadata"]["name"])


def node_of(pod: Manifest) -> str | None:
    """The node that `pod` is on, or is meant for; None while it may go anywhere."""
    spec = pod["spec"]
    if spec.get("nodeName"):
        return str(spec["nodeName"])
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or []
    for term in terms:
        for want in term.get("matchFields") or []:
            if want.get("key") == "metadata.name" and want.get("values"):
                return str(want["values"][0])
    return None


@cache
def amount(text: str) -> Fraction:
    """A quantity of Kubernetes as a number.

    Raises:
        ValueError: it is none.
    """
    text = str(text)
    number = text.rstrip("mkMGTKi")
    scale = text[len(number) :]
    if scale not in _SCALES:
        raise ValueError(f"{text!r} is not a quantity")
    return Fraction(number) * _SCALES[scale]


def rooms_for(snapshot: Snapshot, owner: Owner) -> list[Room]:
    """Every node with what is left beside all pods but those of the group `owner`, which end before new ones come."""
    pods: dict[str, list[Manifest]] = defaultdict(list)
    for pod in snapshot.pods:
        name = node_of(pod)
        if name is not None and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            pods[name].append(pod)
    found = []
    for node in snapshot.nodes:
        free = _numbers((node.get("status") or {}).get("allocatable") or {})
        room = Room(node, free)
        for pod in pods[room.name]:
            if is_member(pod) and owner_of(pod) == owner:
                continue
            for resource, number in _requests(pod).items():
                free[resource] = free.get(resource, 0) - number
            if is_member(pod):
                room.members.append(pod)
        found.append(room)
    return found


def is_member(pod: Manifest) -> bool:
    """Whether `pod` is a member of a group of some deployment."""
    labels = pod["metadata"].get("labels") or {}
    return labels.get(names.MANAGED_BY) == names.MANAGER and labels.get(names.COMPONENT) == names.MEMBER


def owner_of(pod: Manifest) -> Owner:
    """Whose member `pod` is."""
    metadata = pod["metadata"]
    deployment, group = (str(metadata["labels"].get(key, "")) for key in _GROUP_KEY)
    return str(metadata["namespace"]), deployment, group


def _requests(pod: Manifest) -> dict[str, int]:
    """What the scheduler counts for `pod`: its containers together, or its greediest initial one."""
    total: dict[str, int] = defaultdict(int)
    spec = pod["spec"]
    for container in spec.get("containers") or []:
        for resource, number in _asked(container).items():
            total[resource] += number
    for container in spec.get("initContainers") or []:
        for resource, number in _asked(container).items():
            stays = container.get("restartPolicy") == "Always"
            total[resource] = total[resource] + number if stays else max(total[resource], number)
    for resource, number in _numbers(spec.get("overhead") or {}).items():
        total[resource] += number
    return total


def _asked(container: Manifest) -> dict[str, int]:
    resources = container.get("resources") or {}
    return _numbers({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _numbers(quantities: Mapping[str, str]) -> dict[str, int]:
    return {name: int(amount(text) * 1000 if name == "cpu" else amount(text)) for name, text in quantities.items()}
