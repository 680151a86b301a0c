"""Fencing: it ends incarnations, pods first, each under its own `uid`, then names, plans and tokens.

The durations of a node loss and of an end are measured with this process' monotonic clock from the first observation.
The API server's times only identify a loss: its clock may differ, and a wrong one would cause forced removals at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping

from dsv4_operator.api import DSV4Deployment, NodeLossPolicy, NodeLossSpec
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods.observe import is_finalizing, not_ready_since
from dsv4_operator.backends.pods.ownership import OwnedObjects, gather_all
from dsv4_operator.backends.pods.scheduling import node_of
from dsv4_operator.builders import names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube import (
    CONFIG_MAPS,
    NODES,
    PODS,
    RAY_CLUSTERS,
    SECRETS,
    SERVICES,
    Client,
    KubeError,
    KubeReader,
    NotFound,
    Resource,
)
from dsv4_operator.lifecycle.observed import GroupKey

_log = logging.getLogger("dsv4")

_GRACE_SECONDS = 2
"""Shorter than the pod's own grace period: after it the kubelet kills the processes that the agent has not ended.
Evidence was collected before, and a healthy engine was drained."""
_OVERDUE_SECONDS = 15.0
"""Time beyond the grace period in which the kubelet should have removed a pod."""
_LATE_SECONDS = 30.0
"""Time in which the API server may still execute a request whose connection broke: that of the longest request."""
_LATE_ATTEMPTS = 4
"""Attempts of the removal of such an object, each after twice the time of the one before: 7.5 minutes in all."""


class FenceError(BackendError):
    """Members did not end in time; the text contains their names, nodes and the remedy."""


class Fencer:
    """Ends incarnations, and removes their objects."""

    def __init__(
        self, kube: Client, monotonic: Callable[[], float] = time.monotonic, pod_groups: Iterable[Resource] = ()
    ) -> None:
        """Args:
        kube: the API server.
        monotonic: clock.
        pod_groups: kinds of the schedulers' objects that incarnations may have.
        """
        self._pod_groups = tuple(pod_groups)
        self._kube: KubeReader = kube
        self._objects = OwnedObjects(kube)
        self._monotonic = monotonic
        self._begun: dict[tuple[GroupKey, int], float] = {}
        """Time of the first request to end each incarnation."""
        self._lost: dict[str, tuple[str, float]] = {}
        """By name of the node: identity of its loss, and the time of its first observation."""
        self._late: dict[GroupKey, int] = {}
        """Latest incarnation of each group whose token is removed again."""
        self._removals: dict[asyncio.Task[None], GroupKey] = {}

    async def close(self) -> None:
        """Stop all tasks."""
        tasks = list(self._removals)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def release(self, namespace: str, deployment: str) -> None:
        """Drop the data of one deployment."""
        about = namespace, deployment
        self._late = {key: number for key, number in self._late.items() if (key.namespace, key.deployment) != about}
        for task in [task for task, key in self._removals.items() if (key.namespace, key.deployment) == about]:
            task.cancel()
        self._begun = {
            (key, incarnation): begun
            for (key, incarnation), begun in self._begun.items()
            if (key.namespace, key.deployment) != (namespace, deployment)
        }

    async def live(self, key: GroupKey, incarnation: int, seen: Iterable[str] = ()) -> list[Manifest]:
        """Return the members' pods on the API server, except those of other owners.

        `seen` are names of pods in the cache; it finds a pod whose labels were removed.
        """
        # With as few labels as possible: the name identifies a member, and is immutable.
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
        """End an incarnation: members, then names and plan, then late members; return whether all objects are gone.

        A pod is gone when its kubelet has ended its processes and confirmed it, even if another controller keeps the
        object by a finalizer. A lost node confirms nothing, so its pods are removed by force after this process has
        seen the node not ready for `spec.recovery.nodeLoss.after`. Their processes may still run, but cannot join the
        next incarnation: it has other names, another plan and another Ray cluster, agents accept requests for their own
        incarnation only, a worker without connection to its head gives up after `HealthPolicy.link_lost`, and a
        returning kubelet ends pods that the API server no longer has.

        `seen` is as in `live`.

        Raises:
            FenceError: a pod still exists 15 s after its grace period.
            KubeError: a request to the API server failed.
        """
        seen = tuple(seen)
        pods = [pod for pod in await self.live(key, incarnation, seen) if not is_finalizing(pod)]
        if not pods:
            await self._remove(key, incarnation)
            # The API server may have executed a creation whose connection broke. A later pod cannot start: no plan.
            pods = [pod for pod in await self.live(key, incarnation, seen) if not is_finalizing(pod)]
        if not pods:
            self._begun.pop((key, incarnation), None)
            self._remove_late(key, incarnation)
            return True
        await asyncio.gather(*(self._end(key, pod, policy) for pod in pods))
        now = self._monotonic()
        begun = self._begun.setdefault((key, incarnation), now)
        late = now - begun > _GRACE_SECONDS + _OVERDUE_SECONDS
        overdue = [pod for pod in pods if late and pod["metadata"].get("deletionTimestamp")]
        # Pods of a lost node were removed by force, or will be soon.
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
        """Delete the remaining objects of an incarnation; `seen` is as in `live`."""
        for pod in await self.live(key, incarnation, seen):
            await self._delete(key, pod, grace_seconds=_GRACE_SECONDS)
        await self._remove(key, incarnation)
        self._remove_late(key, incarnation)

    async def sweep(self, key: GroupKey, incarnation: int) -> None:
        """Remove objects of earlier incarnations whose fencing was interrupted by the end of an operator."""
        chosen = names.labels(key.deployment, group=key.group)
        await self._sweep(key, chosen, lambda _, number: number < incarnation)

    async def sweep_ended(self, deployment: DSV4Deployment, last: Callable[[int], int]) -> None:
        """Remove objects of the incarnations of each group up to `last`, which have all ended.

        Groups that are created again with the index of a removed one have later incarnations.
        """
        key = GroupKey.of(deployment, 0)
        await self._sweep(key, names.labels(key.deployment), lambda group, number: number <= last(group))
        for group in range(deployment.spec.replicas):
            if ended := last(group):
                self._remove_late(GroupKey.of(deployment, group), ended)

    def _remove_late(self, key: GroupKey, incarnation: int) -> None:
        """Remove the token of an ended incarnation again after `_LATE_SECONDS`, once for each incarnation.

        The API server may execute a creation whose connection broke after the removal. Secrets are not listed, so a
        sweep finds a token only beside its plan.
        """
        if incarnation <= self._late.get(key, 0):
            return
        self._late[key] = incarnation
        task = asyncio.create_task(self._late_removal(key, incarnation))
        self._removals[task] = key
        task.add_done_callback(self._removals.pop)

    async def _late_removal(self, key: GroupKey, incarnation: int) -> None:
        wanted = _mounted_names(key, incarnation)
        for attempt in range(_LATE_ATTEMPTS):
            await asyncio.sleep(_LATE_SECONDS * 2**attempt)
            try:
                await gather_all(*(self._objects.delete_named(SECRETS, key.namespace, one, key.uid) for one in wanted))
            except (KubeError, BackendError) as error:
                _log.warning(
                    "attempt %s of %s to remove the Secrets %s of namespace %s failed; delete them if they remain: %s",
                    attempt + 1,
                    _LATE_ATTEMPTS,
                    " and ".join(wanted),
                    key.namespace,
                    error,
                )
            else:
                return

    async def _sweep(self, key: GroupKey, chosen: Mapping[str, str], is_left: Callable[[int, int], bool]) -> None:
        """Remove the objects of incarnations, except evidence, with the labels `chosen`, for whose group and
        incarnation `is_left` is true."""
        query = f"{names.selector(chosen)},{names.INCARNATION},{names.COMPONENT}!={names.EVIDENCE}"
        for resource in (SERVICES, CONFIG_MAPS, *self._pod_groups):
            try:
                found = await self._kube.list(resource, key.namespace, labels=query)
            except NotFound:
                # The scheduler is not installed.
                continue
            for one in found:
                group, number = names.number(one, names.GROUP), names.number(one, names.INCARNATION)
                if group is None or number is None or not is_left(group, number) or not names.belongs(one, key.uid):
                    continue
                if resource in (CONFIG_MAPS, SERVICES):
                    # Secrets are not listed; the token has the plan's name, or with KubeRay the Service's. First, so
                    # that an interrupted removal finds it again.
                    await self._objects.delete_named(SECRETS, key.namespace, one["metadata"]["name"], key.uid)
                await self._objects.delete(resource, one, key.uid)

    async def _end(self, key: GroupKey, pod: Manifest, policy: NodeLossSpec) -> None:
        """Delete `pod`; by force if it was deleted before and its node is lost."""
        if (
            not pod["metadata"].get("deletionTimestamp")
            or int(pod["metadata"].get("deletionGracePeriodSeconds") or 0) > _GRACE_SECONDS
        ):
            await self._delete(key, pod, grace_seconds=_GRACE_SECONDS)
        elif (lost := await self._lost_for(pod, policy)) is not None and lost >= policy.after:
            _log.warning("%s: its node %s is lost, so it is removed by force", _name(pod), node_of(pod))
            await self._delete(key, pod, grace_seconds=0)

    async def _lost_for(self, pod: Manifest, policy: NodeLossSpec) -> float | None:
        """Return the seconds since `pod`'s node was first seen lost; None if not lost, or `policy` is to wait."""
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
        """Remove the names, the plan and the token of an ended incarnation."""
        mounted, name = _mounted_names(key, incarnation)
        wanted = (
            (SERVICES, name),
            *((kind, one) for kind in (CONFIG_MAPS, SECRETS) for one in (mounted, name)),
            *((kind, name) for kind in self._pod_groups),
        )
        await gather_all(*(self._objects.delete_named(kind, key.namespace, one, key.uid) for kind, one in wanted))


class RayClusterFencer(Fencer):
    """Ends incarnations whose pods KubeRay makes from a RayCluster.

    The RayCluster is suspended before the pods are ended, and deleted after them: KubeRay makes no pods while it is
    suspended. Each ended pod is held by a finalizer until then.
    """

    def __init__(self, kube: Client, monotonic: Callable[[], float] = time.monotonic) -> None:
        """See `Fencer`."""
        super().__init__(kube, monotonic, (RAY_CLUSTERS,))

    async def fence(self, key: GroupKey, incarnation: int, policy: NodeLossSpec, seen: Iterable[str] = ()) -> bool:
        """See `Fencer.fence`."""
        seen = tuple(seen)
        name = names.incarnation_name(key.deployment, key.group, incarnation)
        cluster = await self._kube.get(RAY_CLUSTERS, key.namespace, name)
        if cluster is not None and makes_pods(cluster):
            await self._objects.change(RAY_CLUSTERS, cluster, key.uid, {"spec": {"suspend": True}})
        over = await super().fence(key, incarnation, policy, seen)
        if over:
            await self._let_go(key, incarnation, seen)
        return over

    async def forget(self, key: GroupKey, incarnation: int, seen: Iterable[str] = ()) -> None:
        """See `Fencer.forget`."""
        seen = tuple(seen)
        await super().forget(key, incarnation, seen)
        await self._let_go(key, incarnation, seen)

    async def let_go_orphan(self, pod: Manifest) -> None:
        """Remove the finalizer from a deleted pod whose deployment no longer exists, unless KubeRay would replace it.

        Also before it has ended: nothing waits for its end, and the operator may be removed soon.
        """
        controller = names.controller_of(pod) or {}
        cluster = await self._kube.get(RAY_CLUSTERS, pod["metadata"]["namespace"], str(controller.get("name")))
        same = cluster is not None and cluster["metadata"]["uid"] == controller.get("uid")
        if cluster is None or not same or not makes_pods(cluster):
            await self._release(pod, names.owner_uid(pod) or "")

    async def _let_go(self, key: GroupKey, incarnation: int, seen: Iterable[str]) -> None:
        held = [pod for pod in await self.live(key, incarnation, seen) if is_held(pod) and is_finalizing(pod)]
        await gather_all(*(self._release(pod, key.uid) for pod in held))

    async def _release(self, pod: Manifest, owner_uid: str) -> None:
        metadata = pod["metadata"]
        others = [one for one in metadata["finalizers"] if one != names.HELD]
        about = {"finalizers": others, "resourceVersion": metadata["resourceVersion"]}
        await self._objects.change(PODS, pod, owner_uid, {"metadata": about})


def _mounted_names(key: GroupKey, incarnation: int) -> tuple[str, str]:
    """Return the names that the plan and the token of an incarnation may have.

    With KubeRay, and before names contained the UID, the token has the name of the Service.
    """
    mounted = names.mounted_name(key.deployment, key.uid, key.group, incarnation)
    return mounted, names.incarnation_name(key.deployment, key.group, incarnation)


def makes_pods(cluster: Manifest) -> bool:
    """Return whether KubeRay makes pods of a RayCluster."""
    return not cluster["metadata"].get("deletionTimestamp") and not names.part(cluster, "spec").get("suspend")


def is_held(pod: Manifest) -> bool:
    """Return whether `pod` was deleted and dsv4 holds its object."""
    metadata = names.part(pod, "metadata")
    return bool(metadata.get("deletionTimestamp")) and names.HELD in (metadata.get("finalizers") or ())


def _name(pod: Manifest) -> str:
    return f"pod {pod['metadata']['namespace']}/{pod['metadata']['name']}"
