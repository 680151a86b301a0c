"""Choice of a node for each member: pure functions over the nodes and pods of a cluster, as the API server lists them.

All members of a group get their nodes at once or none does, so two groups never wait for each other's second half. The
pods name their nodes, and the scheduler still checks that they fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from dsv4_operator.api import DSV4Deployment, Hardware, NetworkMode, StorageType, TolerationOperator
from dsv4_operator.api.values import quantity
from dsv4_operator.backends.pods.capacity import (
    PODS,
    NodeCapacity,
    Owner,
    PodRequests,
    Snapshot,
    node_of,
    owner_of,
)
from dsv4_operator.builders import member, names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.planning.catalog import GIB, machine_named, product_machine
from dsv4_operator.planning.facts import Facts, NodeFacts
from dsv4_runtime.contract import GroupPlan

_NAMED = 4
"""Nodes that a refusal names."""
_SPARK_64GB = 80 * GIB


def facts(deployment: DSV4Deployment, snapshot: Snapshot) -> Facts:
    """Return the machines of every group of `deployment`, and why the others cannot be used.

    A group keeps the nodes that it has or had: its weights and compiled kernels are there.
    """
    topology, namespace, name = deployment.spec.topology, deployment.metadata.namespace, deployment.metadata.name
    size = topology.nodes_per_group
    placed: dict[int, tuple[NodeFacts, ...]] = {}
    reasons: dict[str, str] = {}
    unfit = {node["metadata"]["name"]: _unfit(deployment, node) for node in snapshot.nodes}
    for group in range(deployment.spec.replicas):
        owner = group_owner(deployment, group)
        present = snapshot.of(owner)
        nodes = snapshot.capacity_for(owner)
        chosen = _choose(deployment, group, nodes, unfit, _nodes(deployment, group, present), reasons)
        placed[group] = tuple(_node_facts(deployment, group, rank, node, chosen) for rank, node in enumerate(chosen))
        if len(chosen) == size and not present and group + 1 < deployment.spec.replicas:
            taken = (_stand_in(deployment, group, rank, node.name, 0) for rank, node in enumerate(chosen))
            snapshot = snapshot.expecting((*snapshot.expected, *taken))
    storage = deployment.spec.storage.path
    own = names.own_folder(storage, namespace, name)
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
        unfit=_told(reasons, bool(snapshot.nodes)),
    )


def group_owner(deployment: DSV4Deployment, group: int) -> Owner:
    """Return the owner of the members of one group."""
    metadata = deployment.metadata
    return metadata.namespace, metadata.name, str(group), metadata.uid or ""


def stand_ins(deployment: DSV4Deployment, plan: GroupPlan) -> list[PodRequests]:
    """Return what the members of `plan` will take, before their pods are there."""
    memory = plan.expectations.memory_bytes
    return [_stand_in(deployment, plan.group, member.rank, member.node or "", memory) for member in plan.members]


def shortage(deployment: DSV4Deployment, plan: GroupPlan, snapshot: Snapshot) -> str | None:
    """Return why the members of `plan` do not fit on the nodes that it names, for people; None if they do.

    The plan may be older than `snapshot`: a node may have been lost, cordoned or filled since.
    """
    owner = group_owner(deployment, plan.group)
    nodes = {node.name: node for node in snapshot.capacity_for(owner)}
    for planned in plan.members:
        node = nodes.get(planned.node or "")
        if node is None:
            return f"the node {planned.node} is gone"
        wanted = _requests(deployment, plan.expectations.memory_bytes)
        problem = _unfit(deployment, node.manifest) or _crowded(deployment, node) or _short(node, wanted)
        if problem is not None:
            return f"the node {planned.node} {problem}"
        node.take(wanted)
    return None


def _choose(
    deployment: DSV4Deployment,
    group: int,
    nodes: Sequence[NodeCapacity],
    unfit: Mapping[str, str | None],
    present: Mapping[int, str],
    reasons: dict[str, str],
) -> list[NodeCapacity]:
    """Return the nodes of the group's ranks in order, as many as there are; why others do not fit goes to `reasons`."""
    topology = deployment.spec.topology
    size = topology.nodes_per_group
    pins: Sequence[str] = topology.nodes[group * size : (group + 1) * size] if topology.nodes else ()
    wanted = _requests(deployment, 0)
    fitting = []
    for node in nodes:
        if topology.nodes and node.name not in pins:
            continue
        problem = unfit[node.name] or _crowded(deployment, node) or _short(node, wanted)
        if problem is None:
            fitting.append(node)
        else:
            reasons[node.name] = problem
    for name in sorted(set(pins) - {node.name for node in nodes}):
        reasons[name] = "is not in the cluster"
    if topology.nodes and len(pins) < size:
        reasons["spec.topology.nodes"] = f"names {len(topology.nodes)}, and group {group} begins after {group * size}"
    alone = topology.exclusive or deployment.spec.network_mode is NetworkMode.HOST_NETWORK
    chosen: list[NodeCapacity] = []
    for rank in range(size):
        options = [node for node in fitting if _short(node, wanted) is None and not (alone and node in chosen)]
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
    """Return why no member of `deployment` may go to `node`, whatever else is there."""
    spec, metadata = node.get("spec") or {}, node["metadata"]
    labels: Mapping[str, str] = metadata.get("labels") or {}
    ready = next((one for one in _conditions(node) if one.get("type") == "Ready"), {})
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


def _requests(deployment: DSV4Deployment, memory_bytes: int) -> dict[str, int]:
    return {**member.requests(deployment, memory_bytes), PODS: 1}


def _short(node: NodeCapacity, wanted: Mapping[str, int]) -> str | None:
    """Say which resource is not there."""
    for resource, number in wanted.items():
        free = node.free.get(resource, 0)
        if free < number:
            if resource == "memory":
                return f"has {free / GIB:.1f} of {number / GIB:.1f} GiB of memory free"
            if resource == "cpu":
                return f"has {free / 1000:g} of {number / 1000:g} processors free"
            return f"has {free} of {number} {resource} free"
    return None


def _crowded(deployment: DSV4Deployment, node: NodeCapacity) -> str | None:
    """Say which member there does not go together with one of `deployment`."""
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


def _nodes(deployment: DSV4Deployment, group: int, present: Iterable[Manifest]) -> dict[int, str]:
    """Map each rank to the node that the group's latest incarnation has it on, or had it on."""
    known = next((one for one in deployment.status.groups if one.index == group), None)
    found = {one.rank: one.node for one in known.members} if known is not None else {}
    places = [(names.parse_member_name(pod["metadata"]["name"]), node_of(pod)) for pod in present]
    for (_, rank), node in sorted((one[2:], node) for one, node in places if one is not None and node is not None):
        found[rank] = node
    return found


def _node_facts(
    deployment: DSV4Deployment, group: int, rank: int, node: NodeCapacity, chosen: Sequence[NodeCapacity]
) -> NodeFacts:
    spec, namespace, name = deployment.spec, deployment.metadata.namespace, deployment.metadata.name
    shared = sum(other is node for other in chosen)
    cpus = int(quantity(node.manifest["status"]["allocatable"].get("cpu", "1")))
    # Nodes that are containers of one machine, as kind makes them, each have all of its processors.
    beside = sum(other is node or _is_same_machine(other.manifest, node.manifest) for other in chosen)
    on_host = spec.network_mode is NetworkMode.HOST_NETWORK
    address = names.member_address(namespace, name, group, "{incarnation}", rank)
    return NodeFacts(
        name=node.name,
        address=_internal_address(node.manifest) if on_host else address,
        # Every network plugin calls a pod's interface so; of a node's the agents find the ones that matter.
        interface="" if on_host else "eth0",
        cpus=max(1, cpus // beside),
        memory_bytes=max(0, node.free.get("memory", 0)) // shared,
        machine="cpu" if spec.topology.hardware is Hardware.CPU else _machine(node.manifest),
    )


def _is_same_machine(one: Manifest, other: Manifest) -> bool:
    boots = [str((node["status"].get("nodeInfo") or {}).get("bootID", "")) for node in (one, other)]
    return boots[0] == boots[1] != ""


def _machine(node: Manifest) -> str | None:
    """Return the catalog's id of what GPU feature discovery found on `node`; None: nothing, or nothing in it."""
    machine = product_machine(str((node["metadata"].get("labels") or {}).get("nvidia.com/gpu.product", "")))
    memory = quantity((node.get("status") or {}).get("capacity", {}).get("memory", "0"))
    return "gb10-64gb" if machine == "gb10" and 0 < memory < _SPARK_64GB else machine


def _internal_address(node: Manifest) -> str:
    """Return the node's own address; its name if it tells none, which the agent's check of addresses then refuses."""
    addresses = (node.get("status") or {}).get("addresses") or []
    internal = (one["address"] for one in addresses if one.get("type") == "InternalIP")
    return str(next(internal, node["metadata"]["name"]))


def _stand_in(deployment: DSV4Deployment, group: int, rank: int, node: str, memory_bytes: int) -> PodRequests:
    """Return what a member will take, before its pod is there."""
    owner = group_owner(deployment, group)
    about = names.labels(owner[1], component=names.MEMBER, group=group, incarnation=0, rank=rank)
    alone = {"podAntiAffinity": {"required": True}} if deployment.spec.topology.exclusive else {}
    pod: Manifest = {
        "metadata": names.metadata(deployment, f"{owner[1]}-{group}-r{rank}") | {"labels": about},
        "spec": {
            "nodeName": node,
            "hostNetwork": deployment.spec.network_mode is NetworkMode.HOST_NETWORK,
            "affinity": alone,
        },
    }
    return PodRequests(pod, node, owner, _requests(deployment, memory_bytes))


def _conditions(node: Manifest) -> Iterator[Mapping[str, str]]:
    yield from (node.get("status") or {}).get("conditions") or []


def _told(reasons: Mapping[str, str], nodes: bool) -> str:
    if not nodes:
        return "the cluster has no nodes"
    told = [f"{name} {reason}" for name, reason in sorted(reasons.items())]
    more = f", and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
    return "; ".join(told[:_NAMED]) + more
