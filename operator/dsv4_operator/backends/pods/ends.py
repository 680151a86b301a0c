"""How incarnations end: pods first, each under its own `uid`, then names and plans."""

from __future__ import annotations

import asyncio
import logging
import time

from dsv4_operator.api import NodeLossPolicy, NodeLossSpec
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.backends.pods.observe import incarnation_of, lost_since, members_of
from dsv4_operator.backends.pods.rooms import Manifest, node_of
from dsv4_operator.builders import names
from dsv4_operator.kube import CONFIG_MAPS, NODES, PODS, SERVICES, Conflict, Resource
from dsv4_operator.lifecycle.observed import GroupKey

_log = logging.getLogger("dsv4")

_FENCE_GRACE_SECONDS = 2
"""Shorter than the pod's own: nothing is worth waiting for. What its agent has not ended by then, the kubelet kills
with it; evidence was kept before, and a healthy engine had its time for open requests."""
_FENCE_SLACK_SECONDS = 15.0
"""Beyond its grace period, until the kubelet has removed a pod and said so."""
_POLL_SECONDS = 0.25
_LIVE_SECONDS = 3.0
"""Between live looks while the cache still shows a pod that is being ended."""


class FenceError(BackendError):
    """Members could not be ended in time; the text says which, where, and what helps."""


class Ends:
    """Ends members of one deployment, and removes what was theirs."""

    def __init__(self, cluster: Cluster) -> None:
        self._kube = cluster.kube
        self._pods = cluster.pods

    async def live(self, key: GroupKey, incarnation: int) -> list[Manifest]:
        """The members' pods that the API server has."""
        chosen = names.labels(key.deployment, component=names.MEMBER, group=key.group, incarnation=incarnation)
        return await self._kube.list(PODS, key.namespace, labels=names.selector(chosen))

    async def fence(self, key: GroupKey, incarnation: int, policy: NodeLossSpec) -> None:
        """End an incarnation: its members first, then its names and its plan.

        A pod is gone when its kubelet has ended its processes and said so. A node that is lost says nothing, so its
        pods are removed by force once Kubernetes has called it not ready for `spec.recovery.nodeLoss.after`. Their
        processes may still run there, but they cannot join what comes next: its names, its plan and its Ray cluster
        are others than theirs, agents answer to their own incarnation only, a worker that is cut off from its head
        gives up after `HealthPolicy.link_lost`, and a kubelet that returns ends pods that the API server no longer has.

        Raises:
            FenceError: a pod is still there after its grace period.
            KubeError: the API server could not be asked.
        """
        began = time.monotonic()
        pods = await self.live(key, incarnation)
        bound = _FENCE_GRACE_SECONDS + _FENCE_SLACK_SECONDS
        await asyncio.gather(*(self._delete(pod, grace_seconds=_FENCE_GRACE_SECONDS) for pod in pods))
        while left := await self.live(key, incarnation):
            lost = [pod for pod in left if await self._on_lost_node(pod, policy)]
            for pod in lost:
                _log.warning("%s: its node %s is lost, so it is removed by force", _name(pod), node_of(pod))
                await self._delete(pod, grace_seconds=0)
            if time.monotonic() - began > bound:
                where = ", ".join(f"{_name(pod)} on {node_of(pod) or 'no node'}" for pod in left)
                raise FenceError(
                    f"incarnation {incarnation} of group {key.group} did not end within {bound:.0f} s: {where}; "
                    "if a node is gone, remove it from the cluster (kubectl delete node), or let "
                    "spec.recovery.nodeLoss replace it"
                )
            await self._until_changed(key, incarnation, len(left), time.monotonic() + _LIVE_SECONDS)
        await self._remove(key, incarnation)

    async def forget(self, key: GroupKey, incarnation: int) -> None:
        """End what is left of an incarnation, without waiting for it."""
        for pod in await self.live(key, incarnation):
            await self._delete(pod, grace_seconds=_FENCE_GRACE_SECONDS)
        await self._remove(key, incarnation)

    async def sweep(self, key: GroupKey, incarnation: int) -> None:
        """Remove what earlier incarnations left, whose ends were cut short by the end of an operator."""
        chosen = names.labels(key.deployment, group=key.group)
        query = f"{names.selector(chosen)},{names.INCARNATION},{names.COMPONENT}!={names.EVIDENCE}"
        for resource in (SERVICES, CONFIG_MAPS):
            await self._sweep_of(resource, key, query, incarnation)

    async def _on_lost_node(self, pod: Manifest, policy: NodeLossSpec) -> bool:
        """Whether `policy` allows to remove `pod` without its kubelet's word."""
        name = pod["spec"].get("nodeName")
        if policy.policy is not NodeLossPolicy.REPLACE or name is None:
            return False
        now = time.time()
        since = lost_since(await self._kube.get(NODES, None, str(name)), now)
        return since is not None and now - since >= policy.after

    async def _until_changed(self, key: GroupKey, incarnation: int, count: int, deadline: float) -> None:
        """Wait until the cache shows fewer pods than `count`, or for the next live look."""
        while time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
            pods = members_of(self._pods.pods(key.namespace, key.deployment, key.group))
            if sum(incarnation_of(pod) == incarnation for pod in pods) < count:
                return

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
        """Remove the names and the plan of an incarnation that has ended."""
        name = names.incarnation_name(key.deployment, key.group, incarnation)
        await asyncio.gather(
            self._kube.delete(SERVICES, key.namespace, name), self._kube.delete(CONFIG_MAPS, key.namespace, name)
        )

    async def _sweep_of(self, resource: Resource, key: GroupKey, query: str, incarnation: int) -> None:
        for one in await self._kube.list(resource, key.namespace, labels=query):
            if incarnation_of(one) < incarnation:
                metadata = one["metadata"]
                await self._kube.delete(resource, key.namespace, metadata["name"], uid=metadata["uid"])


def _name(pod: Manifest) -> str:
    return f"pod {pod['metadata']['namespace']}/{pod['metadata']['name']}"
