"""Fencing, which ends incarnations: pods first, each under its own `uid`, then names, plans and tokens."""

from __future__ import annotations

import asyncio
import logging
import time

from dsv4_operator.api import NodeLossPolicy, NodeLossSpec
from dsv4_operator.api.values import parse_time
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods.capacity import node_of
from dsv4_operator.backends.pods.observe import incarnation_of, lost_since
from dsv4_operator.builders import names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube import CONFIG_MAPS, NODES, PODS, SECRETS, SERVICES, Conflict, Kube, Resource
from dsv4_operator.lifecycle.observed import GroupKey

_log = logging.getLogger("dsv4")

_GRACE_SECONDS = 2
"""Shorter than the pod's own: nothing is worth waiting for. What its agent has not ended by then, the kubelet kills
with it; evidence was kept before, and a healthy engine had its time for open requests."""
_OVERDUE_SECONDS = 15.0
"""Beyond its grace period, until the kubelet has removed a pod and said so."""


class FenceError(BackendError):
    """Members were not ended in time; the text says which, where, and what helps."""


class Fencer:
    """Ends incarnations, and removes what was theirs."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    async def live(self, key: GroupKey, incarnation: int) -> list[Manifest]:
        """Return the members' pods that the API server has."""
        chosen = names.labels(key.deployment, component=names.MEMBER, group=key.group, incarnation=incarnation)
        return await self._kube.list(PODS, key.namespace, labels=names.selector(chosen))

    async def fence(self, key: GroupKey, incarnation: int, policy: NodeLossSpec) -> bool:
        """End an incarnation, its members first, then its names and its plan; return whether all of it is gone.

        A pod is gone when its kubelet has ended its processes and said so. A node that is lost says nothing, so its
        pods are removed by force once Kubernetes has called it not ready for `spec.recovery.nodeLoss.after`. Their
        processes may still run there, but they cannot join what comes next: its names, its plan and its Ray cluster
        are others than theirs, agents answer to their own incarnation only, a worker that is cut off from its head
        gives up after `HealthPolicy.link_lost`, and a kubelet that returns ends pods that the API server no longer has.

        Raises:
            FenceError: a pod is still there 15 s after its grace period.
            KubeError: the API server could not be asked.
        """
        pods = await self.live(key, incarnation)
        if not pods:
            await self._remove(key, incarnation)
            return True
        await asyncio.gather(*(self._end(pod, policy) for pod in pods))
        now = time.time()
        overdue = [pod for pod in pods if _deleted_for(pod, now) > _OVERDUE_SECONDS]
        # Those that were removed by force just now are gone.
        overdue = [pod for pod in overdue if not await self._on_lost_node(pod, policy)]
        if overdue:
            where = ", ".join(f"{_name(pod)} on {node_of(pod) or 'no node'}" for pod in overdue)
            raise FenceError(
                f"incarnation {incarnation} of group {key.group} did not end within "
                f"{_GRACE_SECONDS + _OVERDUE_SECONDS:.0f} s: {where}; if a node is gone, remove it from the cluster "
                "(kubectl delete node), or let spec.recovery.nodeLoss replace it"
            )
        return False

    async def forget(self, key: GroupKey, incarnation: int) -> None:
        """Delete what is left of an incarnation."""
        for pod in await self.live(key, incarnation):
            await self._delete(pod, grace_seconds=_GRACE_SECONDS)
        await self._remove(key, incarnation)

    async def sweep(self, key: GroupKey, incarnation: int) -> None:
        """Remove what earlier incarnations left, whose ends were cut short by the end of an operator."""
        chosen = names.labels(key.deployment, group=key.group)
        query = f"{names.selector(chosen)},{names.INCARNATION},{names.COMPONENT}!={names.EVIDENCE}"
        for resource in (SERVICES, CONFIG_MAPS):
            await self._sweep_of(resource, key, query, incarnation)

    async def _end(self, pod: Manifest, policy: NodeLossSpec) -> None:
        """Delete `pod`; by force if it was deleted before and its node is lost."""
        if not pod["metadata"].get("deletionTimestamp") or _grace(pod) > _GRACE_SECONDS:
            await self._delete(pod, grace_seconds=_GRACE_SECONDS)
        elif await self._on_lost_node(pod, policy):
            _log.warning("%s: its node %s is lost, so it is removed by force", _name(pod), node_of(pod))
            await self._delete(pod, grace_seconds=0)

    async def _on_lost_node(self, pod: Manifest, policy: NodeLossSpec) -> bool:
        """Tell whether `policy` allows to remove `pod` without its kubelet's word."""
        name = pod["spec"].get("nodeName")
        if policy.policy is not NodeLossPolicy.REPLACE or name is None:
            return False
        now = time.time()
        since = lost_since(await self._kube.get(NODES, None, str(name)), now)
        return since is not None and now - since >= policy.after

    async def _delete(self, pod: Manifest, *, grace_seconds: int) -> None:
        metadata = pod["metadata"]
        try:
            await self._kube.delete(
                PODS, metadata["namespace"], metadata["name"], uid=metadata["uid"], grace_seconds=grace_seconds
            )
        except Conflict:
            # Another pod of that name: this one is gone.
            return

    async def _remove(self, key: GroupKey, incarnation: int) -> None:
        """Remove the names, the plan and the token of an incarnation that has ended."""
        name = names.incarnation_name(key.deployment, key.group, incarnation)
        kinds = SERVICES, CONFIG_MAPS, SECRETS
        await asyncio.gather(*(self._kube.delete(kind, key.namespace, name) for kind in kinds))

    async def _sweep_of(self, resource: Resource, key: GroupKey, query: str, incarnation: int) -> None:
        for one in await self._kube.list(resource, key.namespace, labels=query):
            if incarnation_of(one) < incarnation:
                metadata = one["metadata"]
                await self._kube.delete(resource, key.namespace, metadata["name"], uid=metadata["uid"])
                if resource is CONFIG_MAPS:
                    # Secrets are not listed; the token has the plan's name.
                    await self._kube.delete(SECRETS, key.namespace, metadata["name"])


def _grace(pod: Manifest) -> int:
    """Return the seconds that the pod's processes have from the request to delete it on."""
    return int(pod["metadata"].get("deletionGracePeriodSeconds") or 0)


def _deleted_for(pod: Manifest, now: float) -> float:
    """Return the seconds since the pod's grace period ended, by the API server's clock; negative before that."""
    ended = pod["metadata"].get("deletionTimestamp")
    return now - parse_time(ended) if ended else -1.0


def _name(pod: Manifest) -> str:
    return f"pod {pod['metadata']['namespace']}/{pod['metadata']['name']}"
