"""One reconcile of one deployment, the same for every backend."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from dsv4_operator.api import ConditionType, DeploymentStatus, DSV4Deployment, GroupPhase, GroupStatus
from dsv4_operator.backends.base import Backend
from dsv4_operator.lifecycle import (
    CollectEvidence,
    Decision,
    Drain,
    Event,
    Fence,
    Forget,
    Form,
    Planner,
    compute_status,
    decide_groups,
    events,
    record_evidence,
    versions,
)
from dsv4_operator.lifecycle.observed import GroupKey, Observed
from dsv4_operator.lifecycle.watch import ALIVE, FRESH_SECONDS
from dsv4_operator.planning import plan_group, revision
from dsv4_operator.planning.facts import Facts
from dsv4_runtime.contract import GroupPlan

_log = logging.getLogger("dsv4")

_PROGRESS: Mapping[str, object] = {
    "address": "",
    "phase": None,
    "phase_time": None,
    "message": "",
    "processes": (),
}
"""What tells of a member how far it has come."""

_REPEATING = frozenset({ConditionType.PROGRESSING, ConditionType.READY})


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where users reach the deployment."""

    api: str
    dashboard: str


class Reconciler:
    """Brings the groups of one deployment to what its specification asks for, one look at a time."""

    def __init__(
        self,
        backend: Backend,
        endpoints: Endpoints,
        *,
        save: Callable[[DSV4Deployment], Awaitable[None]],
        tell: Callable[[Event], None] | None = None,
        planned: Callable[[DSV4Deployment, GroupPlan], None] | None = None,
        trifle_seconds: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Args:
        backend: runs the members.
        endpoints: what the status tells users.
        save: keeps the deployment with its status; must raise if it could not, since decisions build on it.
        tell: told once of everything that happened; None: it is logged.
        planned: told of every plan that was found possible, and of the version it was made from, before it is formed.
        trifle_seconds: how long after a save mere news of progress are not worth another one.
        clock: Unix time.
        """
        self._backend = backend
        self._endpoints = endpoints
        self._save = save
        self._tell = tell or _log_event
        self._planned = planned
        self._trifle_seconds = trifle_seconds
        self._next_trifle = -math.inf
        self._clock = clock
        self._kept: DeploymentStatus | None = None
        self._saved: DeploymentStatus | None = None
        self._began: float | None = None
        """When the first look was."""
        self.ended = False
        """Whether the deployment was to be deleted and nothing of it is left."""

    @property
    def status(self) -> DeploymentStatus | None:
        """The latest one; None before the first look."""
        return self._kept

    async def reconcile(self, deployment: DSV4Deployment, *, deleting: bool = False) -> float:
        """One look. Returns the seconds until the next one is due.

        Raises:
            Exception: what an action raised; the status was kept all the same.
        """
        known = self._kept if self._kept is not None else deployment.status
        if self._began is None:
            self._began = self._clock()
        # The present specification last: it is the one that the backend goes on with.
        facts: dict[str, Facts] = {}
        for version in reversed(versions(deployment, known)):
            facts[revision(version)] = await self._backend.facts(version)
        observed: list[Observed] = []
        for index in range(max(deployment.spec.replicas, len(known.groups))):
            key = GroupKey(deployment.metadata.namespace, deployment.metadata.name, index)
            observed.append(await self._backend.observe(key))
        unheard = [] if deleting else [group.index for group in known.groups if self._listens(group, observed)]
        turn = decide_groups(
            deployment,
            observed,
            known,
            lambda version, index: self._planner(version, facts, index),
            self._clock(),
            deleting=deleting,
            unheard=frozenset(unheard),
        )
        decisions = turn.decisions
        # Side by side: a group that ends slowly keeps no other one waiting longer than it must.
        name = deployment.metadata.name
        refusal = next((decision.refusal for decision in decisions if decision.refusal is not None), None)

        async def keep(groups: Sequence[GroupStatus]) -> None:
            before = self._kept if self._kept is not None else known
            api, dashboard = self._endpoints.api, self._endpoints.dashboard
            status = compute_status(
                deployment,
                groups,
                refusal,
                api,
                dashboard,
                before,
                self._clock(),
                deleting=deleting,
                rollout=turn.rollout,
            )
            await self._keep(deployment, status, deleting=deleting)

        if any(isinstance(action, CollectEvidence) for decision in decisions for action in decision.actions):
            # What died is told before it is ended, which takes long on a node that is gone.
            await keep([decision.status for decision in decisions])
        executed = await asyncio.gather(*(self._execute(name, decision) for decision in decisions))
        groups = [status for status, _ in executed]
        problems = [problem for _, problem in executed if problem is not None]
        await keep(groups)
        if problems:
            raise problems[0]
        self.ended = deleting and all(group.phase is GroupPhase.STOPPED for group in groups)
        return max(0.0, min((decision.next_look for decision in decisions), default=0.0) - self._clock())

    def _planner(self, deployment: DSV4Deployment, facts: Mapping[str, Facts], group: int) -> Planner:
        def plan(incarnation: int, restarts: Sequence[float]) -> GroupPlan:
            found = facts[revision(deployment)]
            made = plan_group(deployment, found, group=group, incarnation=incarnation, restarts=restarts)
            if self._planned is not None:
                self._planned(deployment, made)
            return made

        return plan

    def _listens(self, group: GroupStatus, observed: Sequence[Observed]) -> bool:
        """Whether to hear first, because this process has only just begun and heard nobody yet.

        Members that answered its predecessor are not silent because nobody listened.
        """
        if self._began is None or self._clock() - self._began >= FRESH_SECONDS or group.phase not in ALIVE:
            return False
        if group.index >= len(observed):
            return False
        answered = {member.rank for member in group.members if member.phase is not None and not member.silent_since}
        mine = [member for member in observed[group.index].members if member.incarnation == group.incarnation]
        if {member.rank for member in mine if member.ended is None} != {member.rank for member in group.members}:
            return False
        return any(member.heard is None and member.rank in answered for member in mine)

    async def _execute(self, deployment: str, decision: Decision) -> tuple[GroupStatus, Exception | None]:
        """Act in order; the first action that fails ends the list, except evidence, which never delays a recovery.

        So does a drain that is not over: the next turn asks again, and no other group has waited for it.
        """
        status = decision.status
        for action in decision.actions:
            try:
                if isinstance(action, Drain):
                    if await self._backend.drain(action.key, action.incarnation, action.seconds):
                        break
                    continue
                status = await self._act(action, status)
            except Exception as error:
                # Whoever called tells the rest of what ends the turn.
                swallowed = isinstance(action, CollectEvidence)
                _log.error("%s: %s failed: %s", deployment, type(action).__name__, error, exc_info=swallowed)
                if not isinstance(action, CollectEvidence):
                    return status, error
        return status, None

    async def _act(self, action: Form | CollectEvidence | Fence | Forget, status: GroupStatus) -> GroupStatus:
        match action:
            case Form(plan, deployment):
                await self._backend.ensure(plan, deployment)
            case Fence(key, incarnation):
                await self._backend.fence(key, incarnation)
            case Forget(key, incarnation):
                await self._backend.forget(key, incarnation)
            case CollectEvidence(key, incarnation):
                return record_evidence(status, incarnation, await self._backend.collect_evidence(key, incarnation))
        return status

    async def _keep(self, deployment: DSV4Deployment, status: DeploymentStatus, *, deleting: bool) -> None:
        """Save the status if it changed, and tell what happened."""
        saved = self._saved if self._saved is not None else deployment.status
        self._kept = status
        if status == saved or (
            self._clock() < self._next_trifle and _but_for_progress(status) == _but_for_progress(saved)
        ):
            return
        try:
            await self._save(deployment.model_copy(update={"status": status}))
        except OSError as error:
            # Nothing may be formed on a status that was not kept; to end what runs needs none.
            if not deleting:
                self._kept = saved
                raise
            _log.error("the status cannot be saved: %s", error)
        except Exception:
            self._kept = saved
            raise
        self._saved, self._next_trifle = status, self._clock() + self._trifle_seconds
        for event in events(saved, status):
            self._tell(event)


def _but_for_progress(status: DeploymentStatus) -> DeploymentStatus:
    """`status` without how far its members have come, which changes from second to second."""
    groups = []
    for group in status.groups:
        # An agent that never answered yet has not fallen silent: it starts.
        starts = [{**_PROGRESS, "silent_since": None} if one.phase is None else _PROGRESS for one in group.members]
        members = tuple(one.model_copy(update=update) for one, update in zip(group.members, starts, strict=True))
        groups.append(group.model_copy(update={"members": members}))
    # These repeat it for a group that drains; whatever else they say is in the groups' phases too.
    conditions = tuple(
        one.model_copy(update={"message": ""}) if one.type in _REPEATING else one for one in status.conditions
    )
    return status.model_copy(update={"groups": tuple(groups), "conditions": conditions})


def _log_event(event: Event) -> None:
    _log.info("%s %s: %s", event.type, event.reason, event.message)
