"""Pod groups in schedulers that choose the nodes of members (`spec.topology.scheduler`)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dsv4_operator.api import DSV4Deployment, Reason, SchedulerType
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods.ownership import OwnedObjects
from dsv4_operator.builders import member, names
from dsv4_operator.kube import (
    COSCHEDULING_POD_GROUPS,
    LOCAL_QUEUES,
    VOLCANO_POD_GROUPS,
    WORKLOADS,
    Client,
    KubeError,
    KubeReader,
    NotFound,
    Resource,
)
from dsv4_operator.lifecycle.observed import GroupKey
from dsv4_runtime.contract import GroupPlan

POD_GROUPS: Mapping[SchedulerType, Resource] = {
    SchedulerType.VOLCANO: VOLCANO_POD_GROUPS,
    SchedulerType.COSCHEDULING: COSCHEDULING_POD_GROUPS,
}
"""Objects of dsv4 for each scheduler that needs one."""
_READ_SECONDS = 5.0
"""Interval between reads of the reason why a group waits."""


class SchedulerMissing(BackendError):
    """The scheduler, or its queue, is not in the cluster; the text contains the remedy."""

    reason = Reason.SCHEDULER_MISSING


@dataclass(slots=True)
class _Reason:
    """Reason why one group waits, as last read."""

    incarnation: int
    text: str = ""
    time: float = -math.inf
    """Monotonic time of the last read."""
    task: asyncio.Task[None] | None = None


class PodGroups:
    """Creates the scheduler's objects of incarnations, and reads why their members wait."""

    def __init__(self, kube: Client, changed: Callable[[str, str], None]) -> None:
        """Args:
        kube: the API server.
        changed: called with namespace and name of a deployment after a new reason.
        """
        self._kube: KubeReader = kube
        self._objects = OwnedObjects(kube)
        self._changed = changed
        self._reasons: dict[GroupKey, _Reason] = {}

    async def create(self, deployment: DSV4Deployment, plan: GroupPlan) -> None:
        """Create the objects that the scheduler needs before the pods of `plan`.

        Raises:
            SchedulerMissing: the scheduler or its queue is not in the cluster.
            ForeignObject: an object with a needed name belongs to another owner.
            ObjectTerminating: an object with a needed name is still being removed.
            KubeError: the API server refused an object.
        """
        scheduler = deployment.spec.topology.scheduler
        if scheduler is None:
            return
        requests = member.requests(deployment, plan.expectations.memory_bytes)
        wanted = member.pod_group(deployment, plan.group, plan.incarnation, requests)
        if wanted is None:
            await self._check_queue(deployment.metadata.namespace, scheduler.queue or "")
            return
        try:
            await self._objects.create(wanted)
        except NotFound as error:
            raise SchedulerMissing(
                f"spec.topology.scheduler.type: the cluster has no PodGroup of {scheduler.type} "
                f"({wanted['apiVersion']}); install {scheduler.type}, or remove spec.topology.scheduler: {error}"
            ) from None

    async def _check_queue(self, namespace: str, queue: str) -> None:
        if await self._kube.get(LOCAL_QUEUES, namespace, queue) is None:
            raise SchedulerMissing(
                f"spec.topology.scheduler.queue: the namespace {namespace} has no LocalQueue {queue} "
                f"({LOCAL_QUEUES.api_version}); create it, install Kueue if it is missing, or remove "
                "spec.topology.scheduler"
            )

    def reason(self, deployment: DSV4Deployment, group: int, incarnation: int) -> str:
        """Return the reason why the group waits for nodes, as last read; empty if its scheduler gives none.

        It is read in the background: an observation never waits for the API server.
        """
        key, now = GroupKey.of(deployment, group), time.monotonic()
        known = self._reasons.get(key)
        if known is None or known.incarnation != incarnation:
            self.release(key)
            known = self._reasons[key] = _Reason(incarnation)
        if (known.task is None or known.task.done()) and now - known.time > _READ_SECONDS:
            known.time = now
            known.task = asyncio.create_task(self._read(deployment, key, known))
        return known.text

    def release(self, key: GroupKey) -> None:
        """Drop the reason of a group that does not wait."""
        known = self._reasons.pop(key, None)
        if known is not None and known.task is not None:
            known.task.cancel()

    async def close(self) -> None:
        """End all reads."""
        tasks = [known.task for known in self._reasons.values() if known.task is not None]
        for task in tasks:
            task.cancel()
        self._reasons.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, deployment: DSV4Deployment, key: GroupKey, known: _Reason) -> None:
        scheduler = deployment.spec.topology.scheduler
        if scheduler is None:
            return
        resource = POD_GROUPS.get(scheduler.type, WORKLOADS)
        name = names.incarnation_name(key.deployment, key.group, known.incarnation)
        try:
            text = member.reason_of(await self._kube.get(resource, key.namespace, name))
        except KubeError as error:
            text = f"the reason cannot be read: {error}"
        if text != known.text:
            known.text = text
            self._changed(key.namespace, key.deployment)
