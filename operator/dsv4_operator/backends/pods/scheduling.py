"""Node capacity and the choice of a node for each member: pure functions over the nodes and pods of a cluster.

Either all members of a group get nodes or none does, so two groups never block each other with half of their nodes. The
pods name their nodes, and the scheduler still checks that they fit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from dsv4_operator.api import DSV4Deployment, Hardware, NetworkMode, StorageType, TolerationOperator
from dsv4_operator.api.values import quantity
from dsv4_operator.builders import member, names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.planning.catalog import GIB, machine, machine_named, product_machine
from dsv4_operator.planning.facts import Facts, NodeFacts
from dsv4_runtime.contract import GroupPlan
from dsv4_runtime.util.peer_copies import UNSAFE_COPIES

_GROUP_KEY = (names.DEPLOYMENT, names.GROUP)

_REASON = 300
"""Characters of an annotation that are shown."""

PODS = "pods"
"""Resource of which each pod uses one; nodes allow 110 by default."""

Owner = tuple[str, str, str, str]
"""Namespace, deployment and group of a member, and the UID of the deployment."""


@dataclass(frozen=True)
class Snapshot:
    """Snapshot of a cluster. The free resources of each node are computed once for all groups."""

    nodes: tuple[Manifest, ...]
    requests: tuple[PodRequests, ...]
    """Requests of the pods of all namespaces, including other programs on the same nodes."""
    expected: tuple[PodRequests, ...] = ()
    """Requests of pods that are being created."""

    @classmethod
    def of_pods(cls, nodes: Iterable[Manifest], pods: Iterable[Manifest]) -> Snapshot:
        """Return the snapshot of the listed `nodes` and `pods`."""
        return cls(tuple(nodes), tuple(found for pod in pods if (found := pod_requests(pod)) is not None))

    def expecting(self, expected: Iterable[PodRequests]) -> Snapshot:
        """Return the same snapshot with other expected pods."""
        changed = Snapshot(self.nodes, self.requests, tuple(expected))
        # Unchanged, so the computed values are reused.
        changed.__dict__.update(_listed=self._listed, _existing=self._existing)
        return changed

    def of(self, owner: Owner) -> Sequence[Manifest]:
        """Return the members of one group, including expected ones."""
        return [one.pod for one in self._members(owner)]

    def names_of(self, owner: Owner) -> frozenset[str]:
        """Return the names of the existing members of one group, as planned."""
        return frozenset(names.planned_name(str(one.pod["metadata"]["name"])) for one in self._existing.get(owner, ()))

    def nodes_of(self, owner: Owner) -> frozenset[str]:
        """Return the nodes of the existing members of one group."""
        return frozenset(one.node for one in self._existing.get(owner, ()))

    def _members(self, owner: Owner) -> Sequence[PodRequests]:
        return (*self._existing.get(owner, ()), *self._coming.get(owner, ()))

    @cached_property
    def _existing(self) -> Mapping[Owner, Sequence[PodRequests]]:
        return _by_owner(self.requests)

    @cached_property
    def _coming(self) -> Mapping[Owner, Sequence[PodRequests]]:
        return _by_owner(self.expected)

    @cached_property
    def _listed(self) -> Mapping[str, NodeCapacity]:
        """Return every node with its free resources beside the existing pods."""
        found = {}
        for node in self.nodes:
            allocatable = names.part(node, "status", "allocatable")
            capacity = NodeCapacity(node, {name: math.floor(_scaled(name, text)) for name, text in allocatable.items()})
            found[capacity.name] = capacity
        return _with_reserved(found, self.requests)

    @cached_property
    def _left(self) -> Mapping[str, NodeCapacity]:
        """Return every node with its free resources beside all pods."""
        return _with_reserved({name: node.copy() for name, node in self._listed.items()}, self.expected)

    def capacity_for(self, owner: Owner) -> list[NodeCapacity]:
        """Return every node with its free resources beside all pods except those of the group `owner`.

        These end before new ones are created. The caller owns the list and may reserve on it.
        """
        found = {name: node.copy() for name, node in self._left.items()}
        for one in self._members(owner):
            if one.node in found:
                found[one.node].release(one)
        return list(found.values())


@dataclass(frozen=True, slots=True, eq=False)
class PodRequests:
    """Resource requests of one pod on its node."""

    pod: Manifest
    node: str
    owner: Owner | None
    """None: the pod is no member of a group."""
    requests: Mapping[str, int]
    """In the units of `NodeCapacity.free`."""


@dataclass(slots=True, eq=False)
class NodeCapacity:
    """One node with its free resources for one group."""

    manifest: Manifest
    free: dict[str, int]
    """CPUs in thousandths, memory in bytes, devices by count."""
    members: list[Manifest] = field(default_factory=list)
    """Pods of other groups' members."""

    @property
    def name(self) -> str:
        """Return the node's name."""
        return str(self.manifest["metadata"]["name"])

    def copy(self) -> NodeCapacity:
        """Return a copy to reserve on. Both share their fields until one replaces its own."""
        return NodeCapacity(self.manifest, self.free, self.members)

    def reserve(self, pod: PodRequests) -> None:
        """Subtract the requests of a pod on this node."""
        self.take(pod.requests)
        if pod.owner is not None:
            self.members = [*self.members, pod.pod]

    def release(self, pod: PodRequests) -> None:
        """Add the requests of a pod that ends before others are created."""
        self.take({resource: -number for resource, number in pod.requests.items()})
        self.members = [member for member in self.members if member is not pod.pod]

    def take(self, requests: Mapping[str, int]) -> None:
        """Subtract `requests` from the free resources."""
        free = dict(self.free)
        for resource, number in requests.items():
            free[resource] = free.get(resource, 0) - number
        self.free = free


def readable(node: Manifest) -> bool:
    """Return whether the used fields of `node` have the expected types; a malformed node must not hide the others."""
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


def condition(manifest: Manifest, kind: str) -> Mapping[str, Any]:
    """Return the condition of type `kind` of a node or pod; empty without one."""
    return next((one for one in names.parts(manifest, "status", "conditions") if one.get("type") == kind), {})


def node_of(pod: Manifest) -> str | None:
    """Return the node of `pod`, or the one required by its affinity; None if it may run on any."""
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
    """Return the requests of `pod` on its node; None if it has no node, or has ended."""
    name = node_of(pod)
    if name is None or has_ended(pod):
        return None
    return PodRequests(pod, name, owner_of(pod) if is_member(pod) else None, _counted_requests(pod))


def has_ended(pod: Manifest) -> bool:
    """Return whether all containers of `pod` have ended permanently, so that it uses no resources."""
    return names.part(pod, "status").get("phase") in ("Succeeded", "Failed")


def is_member(pod: Manifest) -> bool:
    """Return whether `pod` is a member of a group of some deployment."""
    labels = names.part(pod, "metadata", "labels")
    return labels.get(names.MANAGED_BY) == names.MANAGER and labels.get(names.COMPONENT) == names.MEMBER


def owner_of(pod: Manifest) -> Owner:
    """Return the owner of the member `pod`."""
    metadata = pod["metadata"]
    deployment, group = (str(metadata["labels"].get(key, "")) for key in _GROUP_KEY)
    return str(metadata["namespace"]), deployment, group, str(names.owner_uid(pod) or "")


def _by_owner(pods: Iterable[PodRequests]) -> Mapping[Owner, Sequence[PodRequests]]:
    found: dict[Owner, list[PodRequests]] = defaultdict(list)
    for one in pods:
        if one.owner is not None:
            found[one.owner].append(one)
    return dict(found)


def _with_reserved(nodes: dict[str, NodeCapacity], pods: Iterable[PodRequests]) -> dict[str, NodeCapacity]:
    for pod in pods:
        if pod.node in nodes:
            nodes[pod.node].reserve(pod)
    return nodes


def _counted_requests(pod: Manifest) -> dict[str, int]:
    """Return the requests of `pod`, computed as in the scheduler.

    Source: `PodRequests` of k8s.io/component-helpers/resource, without in-place resizing. Containers run together with
    the sidecars, an init container with the sidecars before it. Requests of the pod itself replace the sum.
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
    """Return an amount in the units of `NodeCapacity.free`; 0 if it cannot be parsed."""
    try:
        return quantity(str(text)) * (1000 if resource == "cpu" else 1)
    except ValueError:
        return Fraction(0)


_NAMED = 4
_UNKNOWN_MEMORY = 2**50
"""Memory of a node that a scheduler will choose for a member without accelerators."""
_SPARK_64GB = 80 * GIB


Places = Mapping[int, Mapping[int, str]]
"""Node by group and rank."""
_NO_PLACES: Places = {}


def facts(deployment: DSV4Deployment, snapshot: Snapshot, former: Places = _NO_PLACES) -> Facts:
    """Return the machines of every group of `deployment`, and the reasons against other nodes.

    A group keeps its present or former nodes, which have its weights and compiled kernels.

    Args:
        deployment: its status is that of the first reconcile.
        snapshot: nodes and pods.
        former: the nodes of the groups' latest members that were observed since.
    """
    topology = deployment.spec.topology
    size = topology.nodes_per_group
    placed: dict[int, tuple[NodeFacts, ...]] = {}
    reasons: dict[str, str] = {}
    unfit = {node["metadata"]["name"]: _unfit(deployment, node) for node in snapshot.nodes}
    for group in range(deployment.spec.replicas):
        owner = group_owner(deployment, group)
        present = snapshot.of(owner)
        nodes = snapshot.capacity_for(owner)
        chosen = _choose(deployment, group, nodes, unfit, _nodes(deployment, group, present, former), reasons)
        placed[group] = tuple(_node_facts(deployment, group, rank, node, chosen) for rank, node in enumerate(chosen))
        if len(chosen) == size and not present and group + 1 < deployment.spec.replicas:
            taken = (_stand_in(deployment, group, 0, rank, node.name, 0) for rank, node in enumerate(chosen))
            snapshot = snapshot.expecting((*snapshot.expected, *taken))
    return _facts(deployment, placed, unfit=_summary(reasons, bool(snapshot.nodes)))


def unplaced_facts(deployment: DSV4Deployment) -> Facts:
    """Return the machines of `spec.topology` in place of those that its scheduler will choose.

    The scheduler compares requests with nodes, so memory is that of the catalog. Members have names for addresses, on
    the network of the nodes too.
    """
    spec, kind = deployment.spec, machine(deployment.spec.topology.hardware)
    on_cpu = spec.topology.hardware is Hardware.CPU
    memory = kind.memory_bytes * (1 if kind.unified_memory else spec.topology.devices_per_node)
    placed = {
        group: tuple(
            NodeFacts(
                name="",
                address=_member_name(deployment, group, rank),
                interface=_interface(deployment),
                cpus=1,
                memory_bytes=_UNKNOWN_MEMORY if on_cpu else memory,
                machine="cpu" if on_cpu else None,
            )
            for rank in range(spec.topology.nodes_per_group)
        )
        for group in range(spec.replicas)
    }
    return _facts(deployment, placed)


def _facts(deployment: DSV4Deployment, placed: Mapping[int, tuple[NodeFacts, ...]], unfit: str = "") -> Facts:
    storage = deployment.spec.storage.path
    own = names.own_folder(storage, deployment.metadata.namespace, deployment.metadata.name)
    on_node = deployment.spec.storage.type is StorageType.HOST_PATH
    return Facts(
        nodes=(),
        isolated=True,
        state_root=names.STATE_DIRECTORY,
        weights_root=f"{own}/weights",
        ray_token_file=names.TOKEN_FILE,
        cache_root=f"{own}/cache",
        shared_weights=names.shared_weights(storage) if on_node else None,
        placed=placed,
        unfit=unfit,
    )


def group_owner(deployment: DSV4Deployment, group: int) -> Owner:
    """Return the owner of the members of one group."""
    metadata = deployment.metadata
    return metadata.namespace, metadata.name, str(group), metadata.uid or ""


def stand_ins(deployment: DSV4Deployment, plan: GroupPlan) -> list[PodRequests]:
    """Return the requests of the members of `plan`, before their pods exist."""
    memory = plan.expectations.memory_bytes
    return [
        _stand_in(deployment, plan.group, plan.incarnation, one.rank, one.node or "", memory) for one in plan.members
    ]


def shortage(deployment: DSV4Deployment, plan: GroupPlan, snapshot: Snapshot) -> str | None:
    """Return the reason why the members of `plan` do not fit on its nodes; None if they do.

    The plan may be older than `snapshot`: a node may have been lost, cordoned or filled since.
    """
    owner = group_owner(deployment, plan.group)
    nodes = {node.name: node for node in snapshot.capacity_for(owner)}
    for planned in plan.members:
        node = nodes.get(planned.node or "")
        if node is None:
            return f"the node {planned.node} is gone"
        wanted = _member_requests(deployment, plan.expectations.memory_bytes)
        problem = _unfit(deployment, node.manifest) or _conflict(deployment, node) or _insufficient(node, wanted)
        if problem is not None:
            return f"the node {planned.node} {problem}"
        node.take(wanted)
    key, planned_nodes = deployment.spec.topology.topology_key, {member.node or "" for member in plan.members}
    if key is not None and len({_label(nodes[name], key) for name in planned_nodes}) > 1:
        return f"the nodes {', '.join(sorted(planned_nodes))} have different values of the label {key}"
    return None


def _choose(
    deployment: DSV4Deployment,
    group: int,
    nodes: Sequence[NodeCapacity],
    unfit: Mapping[str, str | None],
    present: Mapping[int, str],
    reasons: dict[str, str],
) -> list[NodeCapacity]:
    """Return the nodes of the group's ranks in order, as many as fit; reasons against others are added to `reasons`."""
    topology = deployment.spec.topology
    size = topology.nodes_per_group
    pins: Sequence[str] = topology.nodes[group * size : (group + 1) * size] if topology.nodes else ()
    wanted = _member_requests(deployment, 0)
    fitting = []
    for node in nodes:
        if topology.nodes and node.name not in pins:
            continue
        problem = unfit[node.name] or _conflict(deployment, node) or _insufficient(node, wanted)
        if problem is None:
            fitting.append(node)
        else:
            reasons[node.name] = problem
    for name in sorted(set(pins) - {node.name for node in nodes}):
        reasons[name] = "is not in the cluster"
    if topology.nodes and len(pins) < size:
        reasons["spec.topology.nodes"] = f"names {len(topology.nodes)}, and group {group} begins after {group * size}"
    key = topology.topology_key
    if key is None:
        return _assign(deployment, fitting, pins, present)
    domains: dict[str, list[NodeCapacity]] = defaultdict(list)
    for node in fitting:
        domains[_label(node, key)].append(node)
    kept = {value: sum(node.name in present.values() for node in each) for value, each in domains.items()}
    room = {value: sum(node.free.get("memory", 0) // GIB for node in each) for value, each in domains.items()}
    most: list[NodeCapacity] = []
    for value in sorted(domains, key=lambda value: (-kept[value], len(domains[value]), -room[value], value)):
        chosen = _assign(deployment, domains[value], pins, present)
        if len(chosen) == size:
            return chosen
        most = max(most, chosen, key=len)
    problem = f"{key} has no value with {size} nodes that fit"
    reasons["spec.topology.topologyKey"] = f"{problem}; {_label(most[0], key)} has {len(most)}" if most else problem
    return most


def _label(node: NodeCapacity, key: str) -> str:
    return str(names.part(node.manifest, "metadata", "labels").get(key, ""))


def _assign(
    deployment: DSV4Deployment, fitting: Sequence[NodeCapacity], pins: Sequence[str], present: Mapping[int, str]
) -> list[NodeCapacity]:
    """Return nodes of `fitting` for the ranks of a group in order, as many as fit; their resources are reserved."""
    wanted = _member_requests(deployment, 0)
    alone = deployment.spec.topology.exclusive or deployment.spec.network_mode is NetworkMode.HOST_NETWORK
    chosen: list[NodeCapacity] = []
    for rank in range(deployment.spec.topology.nodes_per_group):
        options = [node for node in fitting if _insufficient(node, wanted) is None and not (alone and node in chosen)]
        if pins:
            options = [node for node in options if rank < len(pins) and node.name == pins[rank]]
        if not options:
            break
        best = min(
            options,
            key=lambda node: (
                chosen.count(node),
                node.name != present.get(rank),
                node.name in present.values(),
                -(node.free.get("memory", 0) // GIB),
                node.name,
            ),
        )
        best.take(wanted)
        chosen.append(best)
    return chosen


def _unfit(deployment: DSV4Deployment, node: Manifest) -> str | None:
    """Return the reason why no member of `deployment` may run on `node`, regardless of other pods."""
    spec, metadata = node.get("spec") or {}, node["metadata"]
    labels: Mapping[str, str] = metadata.get("labels") or {}
    ready = condition(node, "Ready")
    if ready.get("status") != "True":
        return f"is not ready since {ready.get('lastTransitionTime', 'it was made')}"
    if spec.get("unschedulable"):
        return "is cordoned"
    for taint in spec.get("taints") or []:
        if taint.get("effect") != "PreferNoSchedule" and not _tolerated(deployment, taint):
            value = f"={taint['value']}" if taint.get("value") else ""
            return f"has the taint {taint.get('key')}{value}:{taint.get('effect')}"
    for key, value in deployment.spec.topology.node_selector.items():
        if labels.get(key) != value:
            return f"has not the label {key}={value}"
    domain = deployment.spec.topology.topology_key
    if domain is not None and domain not in labels:
        return f"has not the label {domain} (spec.topology.topologyKey)"
    product = labels.get("nvidia.com/gpu.product")
    hardware = deployment.spec.topology.hardware
    if product and hardware is not Hardware.CPU:
        known = _machine(node)
        if known is None or machine_named(known).hardware != hardware:
            return f"has {product}, not {hardware}"
    return None


def _tolerated(deployment: DSV4Deployment, taint: Mapping[str, str]) -> bool:
    for one in deployment.spec.topology.tolerations:
        if one.effect is not None and one.effect != taint.get("effect"):
            continue
        if one.key and one.key != taint.get("key"):
            continue
        if one.operator is TolerationOperator.EXISTS or one.value == taint.get("value", ""):
            return True
    return False


def _member_requests(deployment: DSV4Deployment, memory_bytes: int) -> dict[str, int]:
    return {**member.requests(deployment, memory_bytes), PODS: 1}


def _insufficient(node: NodeCapacity, wanted: Mapping[str, int]) -> str | None:
    """Return the first insufficient resource as text; None if all suffice."""
    for resource, number in wanted.items():
        free = node.free.get(resource, 0)
        if free < number:
            if resource == "memory":
                return f"has {free / GIB:.1f} of {number / GIB:.1f} GiB of memory free"
            if resource == "cpu":
                return f"has {free / 1000:g} of {number / 1000:g} processors free"
            return f"has {free} of {number} {resource} free"
    return None


def _conflict(deployment: DSV4Deployment, node: NodeCapacity) -> str | None:
    """Return the conflict with a member on the node as text; None if there is none."""
    on_host = deployment.spec.network_mode is NetworkMode.HOST_NETWORK
    for pod in node.members:
        alone = bool((pod["spec"].get("affinity") or {}).get("podAntiAffinity"))
        same_ports = on_host and bool(pod["spec"].get("hostNetwork"))
        if deployment.spec.topology.exclusive or alone or same_ports:
            namespace, name, _, uid = owner_of(pod)
            metadata = deployment.metadata
            earlier = (namespace, name) == (metadata.namespace, metadata.name) and uid != metadata.uid
            return f"holds a member of {'an earlier deployment ' if earlier else ''}{namespace}/{name}"
    return None


def _nodes(deployment: DSV4Deployment, group: int, present: Iterable[Manifest], former: Places) -> dict[int, str]:
    """Map each rank to the present or last node of the group's latest incarnation."""
    known = next((one for one in deployment.status.groups if one.index == group), None)
    found = {one.rank: one.node for one in known.members} if known is not None else {}
    found |= former.get(group, {})
    places = [(names.parse_member_name(pod["metadata"]["name"]), node_of(pod)) for pod in present]
    for (_, rank), node in sorted((one[2:], node) for one, node in places if one is not None and node is not None):
        found[rank] = node
    return found


def _node_facts(
    deployment: DSV4Deployment, group: int, rank: int, node: NodeCapacity, chosen: Sequence[NodeCapacity]
) -> NodeFacts:
    spec = deployment.spec
    shared = sum(other is node for other in chosen)
    cpus = int(quantity(node.manifest["status"]["allocatable"].get("cpu", "1")))
    # Nodes that are containers of one machine, as in kind, each report all of its CPUs.
    beside = sum(other is node or _is_same_machine(other.manifest, node.manifest) for other in chosen)
    on_host = spec.network_mode is NetworkMode.HOST_NETWORK
    return NodeFacts(
        name=node.name,
        address=_internal_address(node.manifest) if on_host else _member_name(deployment, group, rank),
        interface=_interface(deployment),
        cpus=max(1, cpus // beside),
        memory_bytes=max(0, node.free.get("memory", 0)) // shared,
        machine="cpu" if spec.topology.hardware is Hardware.CPU else _machine(node.manifest),
        unsafe_copies=_unsafe_copies(node.manifest),
    )


def _member_name(deployment: DSV4Deployment, group: int, rank: int) -> str:
    metadata = deployment.metadata
    return names.member_address(metadata.namespace, metadata.name, group, "{incarnation}", rank)


def _interface(deployment: DSV4Deployment) -> str:
    """Return the interface of pods in every network plugin; the agents detect the interfaces of nodes."""
    return "" if deployment.spec.network_mode is NetworkMode.HOST_NETWORK else "eth0"


def _is_same_machine(one: Manifest, other: Manifest) -> bool:
    boots = [str((node["status"].get("nodeInfo") or {}).get("bootID", "")) for node in (one, other)]
    return boots[0] == boots[1] != ""


def _machine(node: Manifest) -> str | None:
    """Return the catalog id of the GPU that GPU feature discovery found on `node`; None without one."""
    product = product_machine(str((node["metadata"].get("labels") or {}).get("nvidia.com/gpu.product", "")))
    memory = quantity((node.get("status") or {}).get("capacity", {}).get("memory", "0"))
    return "gb10-64gb" if product == "gb10" and 0 < memory < _SPARK_64GB else product


def _unsafe_copies(node: Manifest) -> str:
    """Return the reason in the node's annotation, on one line; empty without one. `dsv4 doctor` prints the command that
    sets it: a pod may not read the configuration of bridges."""
    text = names.part(node, "metadata", "annotations").get(UNSAFE_COPIES)
    return "".join(each if each.isprintable() else " " for each in text[:_REASON]) if isinstance(text, str) else ""


def _internal_address(node: Manifest) -> str:
    """Return the node's internal address; its name if there is none, which the agent's address check then refuses."""
    addresses = (node.get("status") or {}).get("addresses") or []
    internal = (one["address"] for one in addresses if one.get("type") == "InternalIP")
    return str(next(internal, node["metadata"]["name"]))


def _stand_in(
    deployment: DSV4Deployment, group: int, incarnation: int, rank: int, node: str, memory_bytes: int
) -> PodRequests:
    """Return the requests of a member, before its pod exists. By its name, a later plan prefers the same node."""
    owner = group_owner(deployment, group)
    about = names.labels(owner[1], component=names.MEMBER, group=group, incarnation=incarnation, rank=rank)
    alone = {"podAntiAffinity": {"required": True}} if deployment.spec.topology.exclusive else {}
    pod: Manifest = {
        "metadata": names.metadata(deployment, names.member_name(owner[1], group, incarnation, rank))
        | {"labels": about},
        "spec": {
            "nodeName": node,
            "hostNetwork": deployment.spec.network_mode is NetworkMode.HOST_NETWORK,
            "affinity": alone,
        },
    }
    return PodRequests(pod, node, owner, _member_requests(deployment, memory_bytes))


def _summary(reasons: Mapping[str, str], nodes: bool) -> str:
    if not nodes:
        return "the cluster has no nodes"
    # Fields of the specification first, before the names of nodes.
    named = sorted(reasons.items(), key=lambda one: (not one[0].startswith("spec."), one))
    lines = [f"{name} {reason}" for name, reason in named]
    more = f", and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
    return "; ".join(lines[:_NAMED]) + more
