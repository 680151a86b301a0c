"""One reconcile of one deployment, the same for every backend."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
from dsv4_operator.lifecycle.decide import QUIET_SECONDS
from dsv4_operator.lifecycle.observed import Observed
from dsv4_operator.lifecycle.watch import ALIVE, FRESH_SECONDS
from dsv4_operator.planning import plan_group, revision
from dsv4_operator.planning.facts import Facts
from dsv4_operator.planning.memory.measured import measured_of
from dsv4_runtime.contract import GroupPlan
from dsv4_runtime.contract.clock import unix_time

_log = logging.getLogger("dsv4")

_PROGRESS: Mapping[str, object] = {
    "address": "",
    "phase": None,
    "phase_time": None,
    "message": "",
    "processes": (),
}
"""Fields of a member's status that tell its progress."""

AGAIN_SECONDS = 0.5
"""Between looks while members are being ended, or their evidence is collected; news make it earlier."""
_EVIDENCE_SECONDS = 15.0
_EVIDENCE_WAIT_SECONDS = 1.0
"""For which a turn waits for evidence: mostly it is there by then."""

_REPEATING = frozenset({ConditionType.PROGRESSING, ConditionType.READY})


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Endpoints at which users reach the deployment."""

    api: str
    dashboard: str


@dataclass(frozen=True, slots=True)
class _Executed:
    """Result of a decision's actions."""

    status: GroupStatus
    error: Exception | None = None
    """Exception of the first action that failed."""
    waits: bool = False
    """Whether members are still being ended, or their evidence is being collected: ask again soon."""


class Reconciler:
    """Brings the groups of one deployment to what its specification asks for, one look at a time."""

    def __init__(
        self,
        backend: Backend,
        endpoints: Endpoints,
        *,
        save: Callable[[DSV4Deployment], Awaitable[None]],
        tell: Callable[[Event], None] | None = None,
        progress_interval: float = 0.0,
        clock: Callable[[], float] = unix_time,
    ) -> None:
        """Args:
        backend: runs the members.
        endpoints: what the status tells users.
        save: keeps the deployment with its status; must raise if it could not, since decisions build on it.
        tell: told once of everything that happened; None: it is logged.
        progress_interval: seconds after a save in which mere news of progress are not worth another one.
        clock: Unix time.
        """
        self._backend = backend
        self._endpoints = endpoints
        self._save = save
        self._tell = tell or _log_event
        self._progress_interval = progress_interval
        self._next_progress = -math.inf
        self._clock = clock
        self._kept: DeploymentStatus | None = None
        self._saved: DeploymentStatus | None = None
        self._began: float | None = None
        """Time of the first look."""
        self._evidence: dict[tuple[int, int], asyncio.Task[str | None]] = {}
        """By group and incarnation: what is being collected. It takes up to 15 s, and no turn lasts so long."""
        self.ended = False
        """Whether the deployment was to be deleted and nothing of it is left."""

    @property
    def status(self) -> DeploymentStatus | None:
        """Return the latest one; None before the first look."""
        return self._kept

    async def close(self) -> None:
        """End what goes on between turns."""
        for task in self._evidence.values():
            task.cancel()
        await asyncio.gather(*self._evidence.values(), return_exceptions=True)
        self._evidence.clear()

    async def reconcile(self, deployment: DSV4Deployment, *, deleting: bool = False) -> float:
        """Look once; return the seconds until the next look is due.

        Raises:
            Exception: what an action raised; the status was kept all the same.
        """
        known = self._kept if self._kept is not None else deployment.status
        if self._began is None:
            self._began = self._clock()
        facts = {revision(version): await self._backend.facts(version) for version in versions(deployment, known)}
        indices = range(max(deployment.spec.replicas, len(known.groups)))
        observed = [await self._backend.observe(deployment, index) for index in indices]
        unheard = [] if deleting else [group.index for group in known.groups if self._listens(group, observed)]
        turn = decide_groups(
            deployment,
            observed,
            known,
            lambda version, index: self._planner(version, facts, known, index),
            self._clock(),
            deleting=deleting,
            unheard=frozenset(unheard),
        )
        decisions = turn.decisions
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
                unreachable=None if deleting else self._backend.endpoint_problem(deployment, groups),
            )
            await self._keep(deployment, status, deleting=deleting)

        if any(isinstance(action, CollectEvidence) for decision in decisions for action in decision.actions):
            # What died is told before it is ended, which takes long on a node that is gone.
            await keep([decision.status for decision in decisions])
        # Side by side: no group waits for another one's actions.
        executed = await asyncio.gather(*(self._execute(deployment, decision) for decision in decisions))
        await keep([one.status for one in executed])
        problem = next((one.error for one in executed if one.error is not None), None)
        if problem is not None:
            raise problem
        if not deleting and self._kept is not None:
            await self._backend.ensure_frontend(deployment, self._kept)
        waits = any(one.waits for one in executed)
        self.ended = deleting and not waits and all(one.status.phase is GroupPhase.STOPPED for one in executed)
        if waits:
            return AGAIN_SECONDS
        due = min((decision.next_look for decision in decisions), default=self._clock() + QUIET_SECONDS)
        return max(0.0, due - self._clock())

    def _planner(
        self, deployment: DSV4Deployment, facts: Mapping[str, Facts], known: DeploymentStatus, group: int
    ) -> Planner:
        def plan(incarnation: int, restarts: Sequence[float]) -> GroupPlan:
            # Only earlier incarnations: what one logs must not change its own plan.
            found = replace(facts[revision(deployment)], measured=measured_of(known, incarnation))
            made = plan_group(deployment, found, group=group, incarnation=incarnation, restarts=restarts)
            self._backend.reserve(deployment, made)
            return made

        return plan

    def _listens(self, group: GroupStatus, observed: Sequence[Observed]) -> bool:
        """Tell whether to hear first, because this process has only just begun and heard nobody yet.

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

    async def _execute(self, deployment: DSV4Deployment, decision: Decision) -> _Executed:
        """Act in order; the first action that fails or is not over yet ends the list.

        Evidence that cannot be collected is no reason to stop: it never delays a recovery beyond its time.
        """
        status, name = decision.status, deployment.metadata.name
        for action in decision.actions:
            try:
                if not isinstance(action, Form | Drain):
                    over, status = await self._collected(deployment, action, status)
                    if not over:
                        return _Executed(status, waits=True)
                match action:
                    case Form(plan, version):
                        await self._backend.ensure(version, plan)
                    case Drain(key, incarnation, seconds):
                        if not await self._backend.drain(deployment, key.group, incarnation, seconds):
                            return _Executed(status)
                    case Fence(key, incarnation):
                        if not await self._backend.fence(deployment, key.group, incarnation):
                            return _Executed(status, waits=True)
                    case Forget(key, incarnation):
                        await self._backend.forget(deployment, key.group, incarnation)
            except Exception as error:
                # Whoever called tells the rest of what ends the turn.
                _log.error("%s: %s failed: %s", name, type(action).__name__, error)
                return _Executed(status, error)
        if decision.completed is not None:
            status = decision.completed
        return _Executed(status)

    async def _collected(
        self, deployment: DSV4Deployment, action: CollectEvidence | Fence | Forget, status: GroupStatus
    ) -> tuple[bool, GroupStatus]:
        """Return whether no evidence of the action's incarnation is being collected any more, and the status with it.

        Begins to collect it if that is what `action` asks for. Whoever ends members waits for what they leave.
        """
        key, incarnation = action.key, action.incarnation
        name = key.group, incarnation
        if isinstance(action, CollectEvidence) and name not in self._evidence:
            work = self._collect(deployment, key.group, incarnation)
            self._evidence[name] = asyncio.create_task(work)
        task = self._evidence.get(name)
        if task is None:
            return True, status
        done, _ = await asyncio.wait((task,), timeout=_EVIDENCE_WAIT_SECONDS)
        if not done:
            return False, status
        del self._evidence[name]
        return True, record_evidence(status, incarnation, task.result())

    async def _collect(self, deployment: DSV4Deployment, group: int, incarnation: int) -> str | None:
        try:
            async with asyncio.timeout(_EVIDENCE_SECONDS):
                return await self._backend.collect_evidence(deployment, group, incarnation)
        except Exception as error:
            name = deployment.metadata.name
            _log.error("%s: no evidence of incarnation %d: %s", name, incarnation, error, exc_info=True)
            return None

    async def _keep(self, deployment: DSV4Deployment, status: DeploymentStatus, *, deleting: bool) -> None:
        """Save the status if it changed, and tell what happened."""
        saved = self._saved if self._saved is not None else deployment.status
        self._kept = status
        if status == saved or (
            self._clock() < self._next_progress and _but_for_progress(status) == _but_for_progress(saved)
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
        self._saved, self._next_progress = status, self._clock() + self._progress_interval
        for event in events(saved, status):
            self._tell(event)


def _but_for_progress(status: DeploymentStatus) -> DeploymentStatus:
    """Return `status` without how far its members have come, which changes from second to second."""
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
