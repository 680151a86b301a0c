"""Independent checker: watches the API server directly and records every violation of an invariant.

Order is that of resource versions, which all objects of one etcd share, so two watches cannot disagree about it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from dsv4_operator.api import DeploymentStatus, Reason
from dsv4_operator.api.status import read_status
from dsv4_operator.builders import names
from dsv4_operator.controller.observability import event_manifest
from dsv4_operator.kube import (
    CONFIG_MAPS,
    DSV4_DEPLOYMENTS,
    EVENTS,
    LEASES,
    PODS,
    Client,
    KubeError,
    Manifest,
    Resource,
)
from dsv4_operator.lifecycle import events
from dsv4_testkit.chaos.proxy import Arrival

_OF_ATTEMPTS = frozenset(
    {Reason.ACTION_FAILED, Reason.OBJECT_IGNORED, Reason.FOREIGN_OBJECT, Reason.OBJECT_TERMINATING}
)
"""Reasons of events about failed attempts, which need no status."""
_LEASE_LAG_SECONDS = 1.0
_PLAN_LAG_SECONDS = 10
"""Longest time between two watches."""

GroupId = tuple[str, str, int]
"""UID and name of the deployment, index of the group."""


@dataclass
class History:
    """All versions of one deployment that the API server had."""

    status: DeploymentStatus | None = None
    told: list[tuple[int, str, str]] = field(default_factory=list)
    """Version, reason and note of every event that follows from its statuses."""
    incarnations: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By group: numbers in its statuses."""
    serving: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By group: numbers with which it served."""


class Witness:
    """Follows one namespace with a connection of its own."""

    def __init__(self, kube: Client, namespace: str) -> None:
        self._kube, self._namespace = kube, namespace
        self.wrong: list[str] = []
        self.histories: dict[str, History] = defaultdict(History)
        """By UID of the deployment."""
        self.pods: dict[GroupId, dict[str, int]] = defaultdict(dict)
        """Present members by name, with their incarnation."""
        self._made: dict[str, int] = {}
        """Version in which each of them was first seen."""
        self._plan_ends: dict[str, int] = {}
        """Version of the deletion of each plan."""
        self.uids: dict[str, set[str]] = defaultdict(set)
        """Of members by name: every UID that a pod of that name had."""
        self.holders: list[tuple[float, str]] = []
        """Monotonic time and holder of the lease at each change of it."""
        self._posted: dict[str, tuple[int, Manifest]] = {}
        """Events by UID, with the version of their creation."""
        self._earlier: set[str] = set()

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch during the block."""
        kinds = (
            (DSV4_DEPLOYMENTS, self._deployment),
            (PODS, self._pod),
            (CONFIG_MAPS, self._plan),
            (LEASES, self._lease),
            (EVENTS, self._event),
        )
        started = [(kind, take, await self._kube.listing(kind, self._namespace)) for kind, take in kinds]
        tasks = []
        for kind, take, listing in started:
            for one in listing.items:
                if kind is EVENTS:
                    # Of a deployment before.
                    self._earlier.add(one["metadata"]["uid"])
                else:
                    await take("ADDED", one)
            tasks.append(asyncio.create_task(self._follow(kind, take, listing.resource_version)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for found in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(found, Exception):
                    raise found

    async def _follow(self, kind: Resource, take, version: str) -> None:  # type: ignore[no-untyped-def]
        while True:
            with contextlib.suppress(KubeError):
                async for event in self._kube.watch(kind, self._namespace, resource_version=version):
                    version = event.resource_version
                    if event.type != "BOOKMARK":
                        await take(event.type, event.object)
            await asyncio.sleep(0.1)

    # Statuses: they never go back.

    async def _deployment(self, kind: str, found: Manifest) -> None:
        about = found["metadata"]
        history = self.histories[about["uid"]]
        if kind == "DELETED" or not found.get("status"):
            return
        status = read_status(found["status"])
        if status is None:
            self.wrong.append(f"{about['name']}: the status cannot be read: {found['status']}")
            return
        before = history.status
        if before is not None and before != status:
            self.wrong += [f"{about['name']}: {one}" for one in _steps_back(before, status)]
        for event in events(before, status) if status != before else ():
            made = event_manifest(found, event, "", "")
            history.told.append((int(about["resourceVersion"]), made["reason"], made["note"]))
        for group in status.groups:
            if group.incarnation:
                history.incarnations[group.index].add(group.incarnation)
            if group.ready_time:
                history.serving[group.index].add(group.incarnation)
        history.status = status

    # Members: two incarnations of one group never coexist.

    async def _pod(self, kind: str, pod: Manifest) -> None:
        about = pod["metadata"]
        parsed = names.parse_member_name(about["name"])
        owner = names.owner_uid(pod)
        if parsed is None or owner is None:
            return
        deployment, index, incarnation, _ = parsed
        present = self.pods[owner, deployment, index]
        if kind == "DELETED":
            present.pop(about["name"], None)
            self._made.pop(about["name"], None)
            return
        self.uids[about["name"]].add(about["uid"])
        others = {name: number for name, number in present.items() if number != incarnation}
        if about["name"] not in present:
            self._made[about["name"]] = int(about.get("resourceVersion") or 0)
            if others and await self._can_start(owner, deployment, index, incarnation):
                late = [await self._is_late(owner, deployment, index, *other) for other in others.items()]
                if not all(late):
                    self.wrong.append(f"{about['name']} was made while {sorted(present)} were there")
        present[about["name"]] = incarnation

    async def _can_start(self, owner: str, deployment: str, index: int, incarnation: int) -> bool:
        """Return whether its plan exists: a request that arrives late can make a pod that no kubelet can start."""
        plan = names.mounted_name(deployment, owner, index, incarnation)
        return await self._kube.get(CONFIG_MAPS, self._namespace, plan) is not None

    async def _is_late(self, owner: str, deployment: str, index: int, name: str, incarnation: int) -> bool:
        """Return whether a present member was made after the end of its plan, so that no kubelet can start it."""
        plan = names.mounted_name(deployment, owner, index, incarnation)
        if await self._kube.get(CONFIG_MAPS, self._namespace, plan) is not None:
            return False
        for _ in range(_PLAN_LAG_SECONDS * 10):
            if plan in self._plan_ends:
                return self._plan_ends[plan] < self._made[name]
            await asyncio.sleep(0.1)
        return False

    async def _plan(self, kind: str, plan: Manifest) -> None:
        if kind == "DELETED":
            self._plan_ends[plan["metadata"]["name"]] = int(plan["metadata"]["resourceVersion"])

    # Lease and events.

    async def _lease(self, kind: str, lease: Manifest) -> None:
        holder = "" if kind == "DELETED" else str((lease.get("spec") or {}).get("holderIdentity") or "")
        if not self.holders or self.holders[-1][1] != holder:
            self.holders.append((time.monotonic(), holder))

    async def _event(self, kind: str, event: Manifest) -> None:
        about = event["metadata"]
        ours = str(event.get("reportingController", "")).startswith("dsv4")
        if ours and kind != "DELETED" and about["uid"] not in {*self._posted, *self._earlier}:
            self._posted[about["uid"]] = int(about["resourceVersion"]), event

    def check_events(self) -> None:
        """Each event follows from a status that the API server had before it."""
        for version, event in self._posted.values():
            told = self.histories[event["regarding"]["uid"]].told
            if event["reason"] in _OF_ATTEMPTS:
                continue
            same = [one for one, reason, note in told if (reason, note) == (event["reason"], event["note"])]
            if not any(one < version for one in same):
                late = f"; a status follows {min(same) - version} versions later" if same else ""
                name = event["regarding"]["name"]
                self.wrong.append(f"{name}: event {event['reason']} ({event['note']}) before its status{late}")

    def check_writes(self, identity: str, writes: Iterable[Arrival]) -> None:
        """Only the holder of the lease writes, except the lease itself."""
        for write in writes:
            if "/leases" in write.path:
                continue
            if identity not in self._holders_around(write.time):
                self.wrong.append(f"{identity} wrote without the lease: {write.method} {write.path}")

    def _holders_around(self, moment: float) -> set[str]:
        found = set()
        for index, (begun, holder) in enumerate(self.holders):
            end = self.holders[index + 1][0] if index + 1 < len(self.holders) else float("inf")
            if begun - _LEASE_LAG_SECONDS <= moment <= end + _LEASE_LAG_SECONDS:
                found.add(holder)
        return found


def _steps_back(before: DeploymentStatus, now: DeploymentStatus) -> list[str]:
    found = []
    if (now.observed_generation or 0) < (before.observed_generation or 0):
        found.append(f"observedGeneration {before.observed_generation} became {now.observed_generation}")
    known = {group.index: group for group in before.groups}
    for group in now.groups:
        earlier = known.get(group.index)
        if earlier is None:
            continue
        for name in ("incarnation", "fenced_below", "total_restarts"):
            if getattr(group, name) < getattr(earlier, name):
                found.append(f"group {group.index}: {name} {getattr(earlier, name)} became {getattr(group, name)}")
        same = group.incarnation == earlier.incarnation
        if same and group.engine_generation and group.engine_generation < earlier.engine_generation:
            found.append(
                f"group {group.index}: engine generation {earlier.engine_generation} became {group.engine_generation}"
            )
    return found
