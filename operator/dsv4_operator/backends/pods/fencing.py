"""Fencing, which ends incarnations: pods first, each under its own `uid`, then names, plans and tokens.

How long a node is lost, or an end takes, is counted by this process' monotonic clock from when it saw it first. The API
server's times say only whether it is the same loss: they are of another clock, and one that is behind would have pods
removed by force at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable

from dsv4_operator.api import NodeLossPolicy, NodeLossSpec
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods.observe import not_ready_since
from dsv4_operator.backends.pods.ownership import OwnedObjects, all_done
from dsv4_operator.backends.pods.scheduling import node_of
from dsv4_operator.builders import names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube import CONFIG_MAPS, NODES, PODS, SECRETS, SERVICES, Client, KubeReader, Resource
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

    def __init__(self, kube: Client, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._kube: KubeReader = kube
        self._objects = OwnedObjects(kube)
        self._monotonic = monotonic
        self._begun: dict[tuple[GroupKey, int], float] = {}
        """When the end of an incarnation was asked for first."""
        self._lost: dict[str, tuple[str, float]] = {}
        """By name of a node: which loss it is, and when it was seen first."""

    def release(self, namespace: str, deployment: str) -> None:
        """Drop what is remembered of one deployment."""
        self._begun = {
            (key, incarnation): begun
            for (key, incarnation), begun in self._begun.items()
            if (key.namespace, key.deployment) != (namespace, deployment)
        }

    async def live(self, key: GroupKey, incarnation: int, seen: Iterable[str] = ()) -> list[Manifest]:
        """Return the members' pods that the API server has, but none of another owner.

        Args:
            key: their group.
            incarnation: its number.
            seen: names of pods that were seen elsewhere: one whose labels were removed is found by its name.
        """
        # By as few labels as possible: a pod is a member by its name, which nobody can change.
        query = names.selector({names.DEPLOYMENT: key.deployment})
        wanted = key.deployment, key.group, incarnation
        found = {
            one["metadata"]["name"]: one
            for one in await self._kube.list(PODS, key.namespace, labels=query)
            if (names.parse_member_name(one["metadata"]["name"]) or ())[:3] == wanted
        }
        for name in set(seen) - found.keys():
            pod = await self._kube.get(PODS, key.namespace, name)
            if pod is not None:
                found[name] = pod
        return [pod for pod in found.values() if names.belongs(pod, key.uid)]

    async def fence(self, key: GroupKey, incarnation: int, policy: NodeLossSpec, seen: Iterable[str] = ()) -> bool:
        """End an incarnation, its members first, then its names and its plan; return whether all of it is gone.

        A pod is gone when its kubelet has ended its processes and said so. A node that is lost says nothing, so its
        pods are removed by force once this process has seen it not ready for `spec.recovery.nodeLoss.after`. Their
        processes may still run there, but they cannot join what comes next: its names, its plan and its Ray cluster
        are others than theirs, agents answer to their own incarnation only, a worker that is cut off from its head
        gives up after `HealthPolicy.link_lost`, and a kubelet that returns ends pods that the API server no longer has.

        `seen` is as in `live`.

        Raises:
            FenceError: a pod is still there 15 s after its grace period.
            KubeError: the API server could not be asked.
        """
        pods = await self.live(key, incarnation, seen)
        if not pods:
            await self._remove(key, incarnation)
            self._begun.pop((key, incarnation), None)
            return True
        await asyncio.gather(*(self._end(key, pod, policy) for pod in pods))
        now = self._monotonic()
        begun = self._begun.setdefault((key, incarnation), now)
        late = now - begun > _GRACE_SECONDS + _OVERDUE_SECONDS
        overdue = [pod for pod in pods if late and pod["metadata"].get("deletionTimestamp")]
        # Those of a lost node were removed by force just now, or will be soon.
        overdue = [pod for pod in overdue if await self._lost_for(pod, policy) is None]
        if overdue:
            where = ", ".join(f"{_name(pod)} on {node_of(pod) or 'no node'}" for pod in overdue)
            raise FenceError(
                f"incarnation {incarnation} of group {key.group} did not end within "
                f"{_GRACE_SECONDS + _OVERDUE_SECONDS:.0f} s: {where}; if a node is gone, remove it from the cluster "
                "(kubectl delete node), or let spec.recovery.nodeLoss replace it"
            )
        return False

    async def forget(self, key: GroupKey, incarnation: int, seen: Iterable[str] = ()) -> None:
        """Delete what is left of an incarnation; `seen` is as in `live`."""
        for pod in await self.live(key, incarnation, seen):
            await self._delete(key, pod, grace_seconds=_GRACE_SECONDS)
        await self._remove(key, incarnation)

    async def sweep(self, key: GroupKey, incarnation: int) -> None:
        """Remove what earlier incarnations left, whose ends were cut short by the end of an operator."""
        chosen = names.labels(key.deployment, group=key.group)
        query = f"{names.selector(chosen)},{names.INCARNATION},{names.COMPONENT}!={names.EVIDENCE}"
        for resource in (SERVICES, CONFIG_MAPS):
            await self._sweep_of(resource, key, query, incarnation)

    async def _end(self, key: GroupKey, pod: Manifest, policy: NodeLossSpec) -> None:
        """Delete `pod`; by force if it was deleted before and its node is lost."""
        if not pod["metadata"].get("deletionTimestamp") or _grace(pod) > _GRACE_SECONDS:
            await self._delete(key, pod, grace_seconds=_GRACE_SECONDS)
        elif (lost := await self._lost_for(pod, policy)) is not None and lost >= policy.after:
            _log.warning("%s: its node %s is lost, so it is removed by force", _name(pod), node_of(pod))
            await self._delete(key, pod, grace_seconds=0)

    async def _lost_for(self, pod: Manifest, policy: NodeLossSpec) -> float | None:
        """Return for how long `pod`'s node was seen lost; None: it is not, or `policy` is to wait for it."""
        name = pod["spec"].get("nodeName")
        if policy.policy is not NodeLossPolicy.REPLACE or name is None:
            return None
        node = await self._kube.get(NODES, None, str(name))
        if node is None:
            return math.inf
        since = not_ready_since(node)
        if since is None:
            self._lost.pop(name, None)
            return None
        loss, seen = self._lost.get(name, ("", 0.0))
        if loss != since:
            seen = self._monotonic()
            self._lost[name] = since, seen
        return self._monotonic() - seen

    async def _delete(self, key: GroupKey, pod: Manifest, *, grace_seconds: int) -> None:
        await self._objects.delete(PODS, pod, key.uid, grace_seconds=grace_seconds)

    async def _remove(self, key: GroupKey, incarnation: int) -> None:
        """Remove the names, the plan and the token of an incarnation that has ended."""
        name = names.incarnation_name(key.deployment, key.group, incarnation)
        mounted = names.mounted_name(key.deployment, key.uid, key.group, incarnation)
        # Before names contained the UID, all three had the Service's name.
        wanted = (SERVICES, name), *((kind, one) for kind in (CONFIG_MAPS, SECRETS) for one in (mounted, name))
        await all_done(*(self._objects.delete_named(kind, key.namespace, one, key.uid) for kind, one in wanted))

    async def _sweep_of(self, resource: Resource, key: GroupKey, query: str, incarnation: int) -> None:
        for one in await self._kube.list(resource, key.namespace, labels=query):
            number = names.number(one, names.INCARNATION)
            if number is None or number >= incarnation or not names.belongs(one, key.uid):
                continue
            await self._objects.delete(resource, one, key.uid)
            if resource is CONFIG_MAPS:
                # Secrets are not listed; the token has the plan's name.
                await self._objects.delete_named(SECRETS, key.namespace, one["metadata"]["name"], key.uid)


def _grace(pod: Manifest) -> int:
    """Return the seconds that the pod's processes have from the request to delete it on."""
    return int(pod["metadata"].get("deletionGracePeriodSeconds") or 0)


def _name(pod: Manifest) -> str:
    return f"pod {pod['metadata']['namespace']}/{pod['metadata']['name']}"
