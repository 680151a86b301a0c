"""Moves gateways away from a node that has several of them, once another node has been there for a while.

The scheduler spreads gateways when they are made; nothing in Kubernetes moves them when a node comes back.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dsv4_operator.api import ConditionStatus, ConditionType, DeploymentStatus, DSV4Deployment
from dsv4_operator.api.values import quantity
from dsv4_operator.backends.pods.canary import is_ready
from dsv4_operator.backends.pods.capacity import NodeCapacity, has_ended
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.builders.frontend import GATEWAY_REQUESTS, gateways_of
from dsv4_operator.builders.names import GROUP, Manifest, gateway_name
from dsv4_operator.kube import KubeError

_log = logging.getLogger("dsv4")

LOOK_SECONDS = 60.0
"""Between two looks at the nodes, and the shortest time that a node must be there before a gateway moves to it."""
_LONGEST_SECONDS = 3600.0
"""Between two moves, where the scheduler puts gateways back to the same node each time."""


@dataclass(slots=True)
class _Crowded:
    """A deployment with several gateways on one node, since it was noticed."""

    next_look: float
    """Monotonic time."""
    free: frozenset[str] = frozenset()
    """Nodes that could take a gateway at the latest look."""
    moves: int = 0


class Balance:
    """Evicts at most one gateway a minute of each deployment, and only while everything of it is ready."""

    def __init__(self, cluster: Cluster, gateways: Callable[[str, str], Sequence[Manifest]]) -> None:
        """Args:
        cluster: where.
        gateways: returns the pods of a deployment's gateways, from memory.
        """
        self._cluster = cluster
        self._gateways = gateways
        self._crowded: dict[tuple[str, str], _Crowded] = {}

    def release(self, namespace: str, name: str) -> None:
        """Drop what is remembered of one deployment."""
        self._crowded.pop((namespace, name), None)

    async def look(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        """Move one gateway if it is time. What cannot be done is logged, and tried again at a later look."""
        name, now = (deployment.metadata.namespace, deployment.metadata.name), time.monotonic()
        pods = [pod for pod in self._gateways(*name) if not has_ended(pod) and is_own(pod, name[1])]
        if not _settled(deployment, status, pods):
            return
        surplus = surplus_gateway(pods)
        if surplus is None:
            self._crowded.pop(name, None)
            return
        known = self._crowded.setdefault(name, _Crowded(now))
        if now < known.next_look:
            return
        known.next_look = now + LOOK_SECONDS
        try:
            async with self._cluster.scheduling:
                nodes = (await self._cluster.snapshot(LOOK_SECONDS / 2)).capacity_for((*name, "", ""))
            free = free_nodes(nodes, pods)
            if free & known.free:
                await self._cluster.client.evict(name[0], surplus["metadata"]["name"], uid=surplus["metadata"]["uid"])
                known.moves += 1
                known.next_look = now + min(LOOK_SECONDS * 2 ** (known.moves - 1), _LONGEST_SECONDS)
                where = surplus["spec"]["nodeName"], ", ".join(sorted(free))
                _log.info("%s/%s: moving the gateway %s from %s; free: %s", *name, surplus["metadata"]["name"], *where)
            known.free = free
        except KubeError as error:
            _log.warning("%s/%s: no gateway is moved to another node: %s", *name, error)


def is_own(pod: Manifest, deployment: str) -> bool:
    """Tell whether a ReplicaSet of the gateways of `deployment` made `pod`; anybody can give a pod their labels."""
    owners = pod["metadata"].get("ownerReferences") or []
    group = str((pod["metadata"].get("labels") or {}).get(GROUP, ""))
    stem = f"{gateway_name(deployment, int(group))}-" if group.isdigit() else ""
    sets = [str(one.get("name", "")) for one in owners if one.get("controller") and one.get("kind") == "ReplicaSet"]
    return bool(stem) and any(name.startswith(stem) for name in sets)


def surplus_gateway(pods: Iterable[Manifest]) -> Manifest | None:
    """Return the youngest gateway of the node that has most of them; None if no node has several."""
    placed = [pod for pod in pods if pod["spec"].get("nodeName")]
    count = Counter(pod["spec"]["nodeName"] for pod in placed)
    crowded = [pod for pod in placed if count[pod["spec"]["nodeName"]] > 1]
    return max(
        crowded,
        key=lambda pod: (
            count[pod["spec"]["nodeName"]],
            str(pod["metadata"].get("creationTimestamp")),
            pod["metadata"]["name"],
        ),
        default=None,
    )


def free_nodes(nodes: Iterable[NodeCapacity], pods: Iterable[Manifest]) -> frozenset[str]:
    """Return the nodes without a gateway of `pods` on which the scheduler could put one."""
    taken = {pod["spec"].get("nodeName") for pod in pods}
    wanted = {"cpu": quantity(GATEWAY_REQUESTS["cpu"]) * 1000, "memory": quantity(GATEWAY_REQUESTS["memory"])}
    return frozenset(
        node.name
        for node in nodes
        if node.name not in taken
        and _open(node.manifest)
        and all(node.free.get(resource, 0) >= number for resource, number in wanted.items())
    )


def _settled(deployment: DSV4Deployment, status: DeploymentStatus, pods: Sequence[Manifest]) -> bool:
    """Tell whether `deployment` is Ready, and all of its gateways are, and no others are there."""
    ready = status.condition(ConditionType.READY)
    if ready is None or ready.status is not ConditionStatus.TRUE:
        return False
    return len(pods) == sum(map(gateways_of, range(deployment.spec.replicas))) and all(map(is_ready, pods))


def _open(node: Manifest) -> bool:
    """Tell whether a pod without tolerations may go to `node`."""
    spec, conditions = node.get("spec") or {}, (node.get("status") or {}).get("conditions") or []
    if spec.get("unschedulable") or any(one.get("effect") != "PreferNoSchedule" for one in spec.get("taints") or []):
        return False
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
