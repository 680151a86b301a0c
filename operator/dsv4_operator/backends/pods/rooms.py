"""The nodes of a cluster with what is left of them: pure functions over what the API server lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
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


@dataclass(frozen=True)
class Snapshot:
    """A cluster at one moment. What is on each node is worked out once, however many groups ask."""

    nodes: tuple[Manifest, ...]
    pods: tuple[Manifest, ...]
    """Of all namespaces, also of other programs: they take from the same nodes."""
    expected: tuple[Share, ...] = ()
    """What pods take that are about to be there."""

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """What the pods take that are there."""
        return tuple(share for pod in self.pods if (share := share_of(pod)) is not None)

    def expecting(self, expected: Iterable[Share]) -> Snapshot:
        """The same moment with other pods about to be there."""
        changed = Snapshot(self.nodes, self.pods, tuple(expected))
        # Found already, and the same.
        changed.__dict__.update(shares=self.shares, _listed=self._listed)
        return changed

    def of(self, owner: Owner) -> Sequence[Manifest]:
        """The members of one group, those about to be there included."""
        return [share.pod for share in self._members.get(owner, ())]

    @cached_property
    def _members(self) -> Mapping[Owner, Sequence[Share]]:
        found: dict[Owner, list[Share]] = defaultdict(list)
        for share in (*self.shares, *self.expected):
            if share.owner is not None:
                found[share.owner].append(share)
        return dict(found)

    @cached_property
    def _listed(self) -> Mapping[str, Room]:
        """Every node with what is left beside the pods that are there."""
        found = {}
        for node in self.nodes:
            room = Room(node, _numbers((node.get("status") or {}).get("allocatable") or {}))
            found[room.name] = room
        return _beside(found, self.shares)

    @cached_property
    def _rooms(self) -> Mapping[str, Room]:
        """Every node with what is left beside all pods."""
        return _beside({name: room.copy() for name, room in self._listed.items()}, self.expected)

    def rooms_for(self, owner: Owner) -> list[Room]:
        """Every node with what is left beside all pods but those of the group `owner`, which end before new ones come.

        The caller's own: it may take from them.
        """
        found = {name: room.copy() for name, room in self._rooms.items()}
        for share in self._members.get(owner, ()):
            if share.node in found:
                found[share.node].take_away(share)
        return list(found.values())


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one pod takes of its node."""

    pod: Manifest
    node: str
    owner: Owner | None
    """None: it is no member of a group."""
    requests: Mapping[str, int]
    """In the units of `Room.free`."""


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

    def copy(self) -> Room:
        """Another one, to be taken from."""
        return Room(self.node, dict(self.free), list(self.members))

    def put(self, share: Share) -> None:
        """Count a pod that is on this node."""
        for resource, number in share.requests.items():
            self.free[resource] = self.free.get(resource, 0) - number
        if share.owner is not None:
            self.members.append(share.pod)

    def take_away(self, share: Share) -> None:
        """Count it no more."""
        for resource, number in share.requests.items():
            self.free[resource] += number
        self.members.remove(share.pod)


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


def _beside(rooms: dict[str, Room], shares: Iterable[Share]) -> dict[str, Room]:
    for share in shares:
        if share.node in rooms:
            rooms[share.node].put(share)
    return rooms


def share_of(pod: Manifest) -> Share | None:
    """What `pod` takes of its node; None if it has none, or has ended."""
    name = node_of(pod)
    if name is None or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return None
    return Share(pod, name, owner_of(pod) if is_member(pod) else None, _requests(pod))


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
