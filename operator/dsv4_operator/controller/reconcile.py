"""Reconciliation of one deployment, the same for every backend."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dsv4_operator.api import ConditionType, DeploymentStatus, DSV4Deployment, Finding, GroupPhase, GroupStatus, Reason
from dsv4_operator.backends.base import Backend, BackendError
from dsv4_operator.controller.queue import REPEAT_SECONDS, Backoffs, Failure, Part, is_expected, text_of
from dsv4_operator.lifecycle import (
    Action,
    CollectEvidence,
    Decision,
    Drain,
    Event,
    EventType,
    Fence,
    Forget,
    Form,
    Hold,
    Planner,
    compute_status,
    decide_groups,
    events,
    record_evidence,
    versions,
    with_accepted,
)
from dsv4_operator.lifecycle.decide import POLL_SECONDS, RESYNC_SECONDS
from dsv4_operator.lifecycle.observed import GroupKey, Observed
from dsv4_operator.lifecycle.status import has_problem
from dsv4_operator.lifecycle.watch import ALIVE, FRESH_SECONDS
from dsv4_operator.planning import PlanRefused, plan_group, revision
from dsv4_operator.planning.facts import Facts
from dsv4_operator.planning.setup import measured_of
from dsv4_runtime.contract import GroupPlan
from dsv4_runtime.util.clock import unix_time
from dsv4_runtime.util.files import log_context

_log = logging.getLogger("dsv4")

_PROGRESS: Mapping[str, object] = {
    "address": "",
    "phase": None,
    "phase_time": None,
    "message": "",
    "processes": (),
}
"""Progress fields of a member's status."""

AGAIN_SECONDS = 0.5
"""Interval while members are being ended or their evidence is collected; events shorten it."""
_EVIDENCE_SECONDS = 15.0
_EVIDENCE_WAIT_SECONDS = 1.0
"""Time for which a reconcile waits for evidence; usually sufficient."""

_BEGINS = frozenset({GroupPhase.FORMING, GroupPhase.STARTING})
_START_REASONS = frozenset({Reason.GROUP_FORMING, Reason.GROUP_STARTING})

_REPEATING = frozenset({ConditionType.PROGRESSING, ConditionType.READY})

_WAIT_SECONDS = 1.0
"""Time for which a reconcile waits for the machines or the front end; usually sufficient."""
_ACT_SECONDS = 3.0
"""Time for which a reconcile waits for the actions of all groups; a request may take ten times as long."""
_LONGEST_SECONDS = 5.0
"""Longest backoff of a part that the handling of a death needs."""
_FORM_SECONDS = 60.0
"""Longest backoff of creating members that the API server refuses, for example because of a quota."""
_STATUS = Part("status", _LONGEST_SECONDS)
_MACHINES = Part("machines", 15.0)
_FRONTEND = Part("frontend", 300.0)
_CANNOT = {
    Form: "the members of incarnation {} cannot be created",
    Hold: "nodes for the members of incarnation {} cannot be held",
    Drain: "incarnation {} cannot be drained",
    Fence: "incarnation {} cannot be ended",
    Forget: "the remains of incarnation {} cannot be removed",
    CollectEvidence: "the evidence of incarnation {} cannot be collected",
}

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Endpoints at which users reach the deployment."""

    api: str
    dashboard: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A specification that breaks a rule; the last valid one stays in force."""

    refusal: PlanRefused
    generation: int
    """Its `metadata.generation`."""
    formable: bool = True
    """Whether members may be formed from the last valid one."""


class StatusLost(Exception):
    """The deployment or its status is not the one in the memory of this process, which must be dropped."""


@dataclass(frozen=True, slots=True)
class _Executed:
    status: GroupStatus
    failed: bool = False
    """Whether an action failed, or is in backoff."""
    waits: bool = False
    """Whether members are still being ended, or their evidence is being collected; the next reconcile comes soon."""


class Reconciler:
    """Reconciles the groups of one deployment with its specification."""

    def __init__(
        self,
        backend: Backend,
        endpoints: Endpoints,
        *,
        save: Callable[[DSV4Deployment], Awaitable[None]],
        record: Callable[[Event], None] | None = None,
        failed: Callable[[Part, Failure], None] | None = None,
        progress_interval: float = 0.0,
        start_interval: float = 0.0,
        clock: Callable[[], float] = unix_time,
    ) -> None:
        """Args:
        backend: runs the members.
        endpoints: URLs for the status.
        save: stores the deployment with its status; must raise on failure, since decisions build on the saved status.
        record: called once per event; None: events are logged.
        failed: called with every failure of a part.
        progress_interval: seconds after a save in which a change of progress alone is not saved.
        start_interval: the same for the members of a claimed incarnation, as they appear.
        clock: Unix time.
        """
        self._backend = backend
        self._endpoints = endpoints
        self._save = save
        self._record = record or _log_event
        self._failed = failed or (lambda _part, _failure: None)
        self._progress_interval, self._start_interval = progress_interval, start_interval
        self._next_progress = self._next_start = -math.inf
        self._save_due: float | None = None
        """Time of the next save, of a status that needed none at once."""
        self._clock = clock
        self._kept: DeploymentStatus | None = None
        self._saved: DeploymentStatus | None = None
        self._began: float | None = None
        """Time of the first reconcile."""
        self._backoffs = Backoffs()
        self._tasks: dict[tuple[Part, str], asyncio.Future[Any]] = {}
        """Running work of parts that takes longer than `_WAIT_SECONDS`, by part and identity."""
        self._acting: dict[int, tuple[GroupStatus, asyncio.Task[_Executed]]] = {}
        """Running actions that take longer than `_ACT_SECONDS`, by group, with the status at their start."""
        self._evidence: dict[tuple[int, int], asyncio.Task[str | None]] = {}
        """Running evidence collections, by group and incarnation; each takes up to 15 s."""
        self._collected_of: dict[int, int] = {}
        """By group: incarnation of the latest collection that this process began."""
        self._anomalies: dict[int, dict[str, float]] = {}
        """By group: texts of `Observed.anomalies`, with the Unix time of the latest event about each."""
        self._unplanned: dict[int, Exception] = {}
        """Defects of the planner in this reconcile, by group."""
        self._has_frontend = False
        """Whether the front end was ensured since the start of this process."""
        self.ended = False
        """Whether a deleted deployment has no members left."""

    @property
    def status(self) -> DeploymentStatus | None:
        """Return the latest status; None before the first reconcile."""
        return self._kept

    async def close(self) -> None:
        """Cancel all work that runs between reconciles."""
        acting = [task for _, task in self._acting.values()]
        tasks = [*self._evidence.values(), *self._tasks.values(), *acting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._evidence.clear()
        self._tasks.clear()
        self._acting.clear()

    def saved(self, status: DeploymentStatus) -> None:
        """Continue from `status`: its save raised, and was executed after all."""
        before, self._saved = self._saved, status
        self._kept = status
        for event in events(before, status):
            self._record(event)

    def report(self, part: Part, error: Exception | None, problem: str = "") -> None:
        """Record a failure of a part outside of the reconcile as an event and a condition; None: it succeeded."""
        if error is None:
            self._backoffs.succeeded(part)
        else:
            self._fail(part, error, problem)

    async def reconcile(
        self, deployment: DSV4Deployment, *, deleting: bool = False, refused: Refused | None = None
    ) -> float:
        """Reconcile once; return the seconds until the next reconcile is due.

        Each part (machines, observation, plan and actions of each group, front end, status) fails separately: a failure
        becomes an event and a condition, and the part is repeated after its own backoff, while the others continue.

        Args:
            deployment: the last valid specification.
            deleting: the deployment is being deleted.
            refused: refusal of the present specification; None: `deployment` is that specification.

        Raises:
            StatusLost: raised by `save`.
        """
        known = self._with_results(self._kept if self._kept is not None else deployment.status)
        first = self._began is None
        if self._began is None:
            self._began = self._clock()
            self._saved = deployment.status
        wanted = {revision(version): version for version in versions(deployment, known)}
        self._drop_tasks(wanted, deleting=deleting)
        machines = {name: await self._machines(name, version, refused) for name, version in wanted.items()}
        observed, unobserved = await self._observe(deployment, range(max(deployment.spec.replicas, len(known.groups))))
        began = self._clock()
        unreported = [] if deleting else [group.index for group in known.groups if self._listens(group, observed)]
        turn = decide_groups(
            deployment,
            observed,
            known,
            lambda version, index: self._planner(version, machines, known, index),
            began,
            deleting=deleting,
            unreported=frozenset((*unreported, *self._acting)),
            unobserved=unobserved,
        )
        decisions = turn.decisions
        self._backoffs.keep(range(len(decisions)))
        self._check_decisions(decisions)
        rollout = turn.rollout
        if refused is None:
            rollout = with_accepted(rollout, deployment, [decision.status for decision in decisions])
        refusals = [decision.refusal for decision in decisions if decision.refusal is not None]
        refusal = refused.refusal if refused is not None else next(iter(refusals), None)

        async def keep(groups: Sequence[GroupStatus]) -> bool:
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
                rollout=rollout,
                refused_generation=refused.generation if refused is not None else None,
                problems=self._backoffs.problems(),
                unobserved=unobserved,
                unreachable=None if deleting else self._backend.endpoint_problem(deployment, groups),
            )
            return await self._keep(deployment, status, deleting=deleting)

        reported = True
        if any(isinstance(action, CollectEvidence) for decision in decisions for action in decision.actions):
            # Report a death before its members are ended, which takes long on a lost node.
            reported = await keep([decision.status for decision in decisions])
        executed = await self._execute_all(deployment, decisions, reported=reported)
        if first and not deleting and has_problem(known):
            # An earlier process may have reported it, and the status is saved before the front end is updated.
            await self._ensure_frontend(deployment, known)
        saved = await keep([one.status for one in executed])
        if not deleting and (self._has_frontend or not (saved and _claims(decisions, began))):
            self._has_frontend = True
            await self._ensure_frontend(deployment, self._kept if self._kept is not None else known)
        waits = any(one.waits for one in executed)
        done = all(one.status.phase is GroupPhase.STOPPED and not one.failed for one in executed)
        self.ended = deleting and done and not waits and not unobserved
        now = self._clock()
        dues = [_due(decision, one, now, saved=saved) for decision, one in zip(decisions, executed, strict=True)]
        due = min((*dues, self._backoffs.due(now)), default=now + RESYNC_SECONDS)
        if self._tasks:
            due = min(due, now + AGAIN_SECONDS)
        if self._save_due is not None:
            due = min(due, self._save_due)
        return max(0.0, min(due, now + RESYNC_SECONDS) - now)

    def _with_results(self, known: DeploymentStatus) -> DeploymentStatus:
        """Return `known` with the results of long actions that have completed."""
        groups = list(known.groups)
        for index, (begun, task) in list(self._acting.items()):
            if not task.done():
                continue
            del self._acting[index]
            if index < len(groups) and groups[index] == begun:
                groups[index] = task.result().status
        return known.model_copy(update={"groups": tuple(groups)})

    async def _execute_all(
        self, deployment: DSV4Deployment, decisions: Sequence[Decision], *, reported: bool
    ) -> list[_Executed]:
        """Run the actions of all groups in parallel; long ones continue while other groups are decided again."""
        tasks = {
            index: asyncio.create_task(self._execute(deployment, index, decision, reported=reported))
            for index, decision in enumerate(decisions)
            if index not in self._acting
        }
        if tasks:
            await asyncio.wait(tasks.values(), timeout=_ACT_SECONDS)
        for index, task in tasks.items():
            if not task.done():
                self._acting[index] = decisions[index].status, task
        return [
            _Executed(decision.status, waits=True) if index in self._acting else tasks[index].result()
            for index, decision in enumerate(decisions)
        ]

    def _drop_tasks(self, wanted: Mapping[str, DSV4Deployment], *, deleting: bool) -> None:
        """Cancel work whose result is no longer needed."""
        for name in list(self._tasks):
            part, what = name
            if (part is _MACHINES and what not in wanted) or (part is _FRONTEND and deleting):
                self._tasks.pop(name).cancel()

    def _check_decisions(self, decisions: Sequence[Decision]) -> None:
        """Report groups that could not be decided or planned because of a defect."""
        for index, decision in enumerate(decisions):
            attempts = (("decide", decision.error, "decided"), ("plan", self._unplanned.get(index), "planned"))
            for name, error, what in attempts:
                part = Part(name, _MACHINES.longest, index)
                if error is None:
                    self._backoffs.succeeded(part)
                elif not self._backoffs.waits(part, self._clock()):
                    self._fail(part, error, f"it cannot be {what}")
        self._unplanned.clear()

    async def _machines(self, name: str, deployment: DSV4Deployment, refused: Refused | None) -> Facts | PlanRefused:
        """Return the machines for `deployment`, whose revision is `name`, or the refusal if nothing can be planned."""
        if refused is not None and not refused.formable:
            return refused.refusal
        found = await self._run(
            _MACHINES, name, lambda: self._backend.facts(deployment), "the machines cannot be listed"
        )
        if found is not None:
            return found
        message = self._backoffs.message(_MACHINES) or "the machines are being listed"
        return PlanRefused(Reason.ACTION_FAILED, Finding("", Reason.ACTION_FAILED, message))

    async def _observe(
        self, deployment: DSV4Deployment, groups: Sequence[int]
    ) -> tuple[list[Observed], frozenset[int]]:
        """Return the members of each group, and the groups whose members cannot be observed now."""
        observed, unobserved = [], set()
        for group in groups:
            part = Part("observe", _LONGEST_SECONDS, group)
            found = Observed(GroupKey.of(deployment, group), ())
            if self._backoffs.waits(part, self._clock()):
                unobserved.add(group)
            else:
                try:
                    found = await self._backend.observe(deployment, group)
                    self._backoffs.succeeded(part)
                    self._report_anomalies(group, found.anomalies)
                except Exception as error:
                    self._fail(part, error, "its members cannot be observed")
                    unobserved.add(group)
            observed.append(found)
        return observed, frozenset(unobserved)

    def _report_anomalies(self, group: int, texts: Sequence[str]) -> None:
        """Report ignored or changed objects as events: once, and again every half hour."""
        now, known = self._clock(), self._anomalies.get(group, {})
        self._anomalies[group] = reported = {text: known.get(text, -math.inf) for text in texts}
        for text in texts:
            if not 0 <= now - reported[text] < REPEAT_SECONDS:
                reported[text] = now
                self._record(Event(EventType.WARNING, Reason.OBJECT_IGNORED, text, group))

    async def _ensure_frontend(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        await self._run(
            _FRONTEND,
            "",
            lambda: self._backend.ensure_frontend(deployment, status),
            "the Services and gateways cannot be updated",
        )

    async def _run(self, part: Part, what: str, work: Callable[[], Awaitable[ResultT]], problem: str) -> ResultT | None:
        """Return the result of `work`; None while it runs longer than `_WAIT_SECONDS`, or is in backoff after a
        failure.

        The first reconcile waits for the result; later ones collect it.
        """
        task = self._tasks.get((part, what))
        if task is None:
            if self._backoffs.waits(part, self._clock()):
                return None
            task = self._tasks[part, what] = asyncio.ensure_future(work())
            task.add_done_callback(_retrieve)
            await asyncio.wait((task,), timeout=_WAIT_SECONDS)
        if not task.done():
            return None
        del self._tasks[part, what]
        try:
            result: ResultT = task.result()
        except Exception as error:
            self._fail(part, error, problem)
            return None
        self._backoffs.succeeded(part)
        return result

    @property
    def failing(self) -> tuple[Part, ...]:
        """Return the parts whose latest attempt failed."""
        return self._backoffs.parts

    def _fail(self, part: Part, error: Exception, problem: str, what: object = None) -> None:
        """Record a failure of `part`: log it, and report it as an event unless it was reported recently."""
        # Messages of a backend already name the failed operation.
        message = text_of(error) if isinstance(error, BackendError) or not problem else f"{problem}: {text_of(error)}"
        now = self._clock()
        reason = error.reason if isinstance(error, BackendError) else Reason.ACTION_FAILED
        soon = error.retry_seconds if isinstance(error, BackendError) else None
        failure, is_new = self._backoffs.failed(part, message, now, what, reason=reason, seconds=soon)
        unexpected = None if is_expected(error) else error
        where = "" if part.group is None else f"group {part.group}: "
        _log.error("%s%s; again in %.1f s", where, message, failure.until - now, exc_info=unexpected)
        self._failed(part, failure)
        if is_new:
            self._record(Event(EventType.WARNING, reason, message, part.group))

    def _planner(
        self,
        deployment: DSV4Deployment,
        machines: Mapping[str, Facts | PlanRefused],
        known: DeploymentStatus,
        group: int,
    ) -> Planner:
        def plan(incarnation: int, restarts: Sequence[float]) -> GroupPlan:
            facts = machines[revision(deployment)]
            if isinstance(facts, PlanRefused):
                raise facts
            try:
                facts = self._backend.refresh(deployment, facts)
                # Only of earlier incarnations: the measurements of an incarnation must not change its own plan.
                found = replace(facts, measured=measured_of(known, incarnation))
                made = plan_group(deployment, found, group=group, incarnation=incarnation, restarts=restarts)
                self._backend.reserve(deployment, made)
            except PlanRefused:
                raise
            except Exception as error:
                self._unplanned[group] = error
                finding = Finding("", Reason.ACTION_FAILED, f"planning failed: {text_of(error)}")
                raise PlanRefused(Reason.ACTION_FAILED, finding) from error
            return made

        return plan

    def _listens(self, group: GroupStatus, observed: Sequence[Observed]) -> bool:
        """Return whether to wait for reports because this process has just started.

        Members that answered the previous process are not silent because of its restart.
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

    async def _execute(
        self, deployment: DSV4Deployment, index: int, decision: Decision, *, reported: bool
    ) -> _Executed:
        """Execute actions in order, until one fails, is in backoff, or is not complete.

        A failed evidence collection does not stop the list, and never delays a recovery beyond its time limit.

        Args:
            deployment: the specification in force.
            index: index of the group.
            decision: the decision about the group.
            reported: whether the death of a member was saved, which must precede every action that ends it.
        """
        status = decision.status
        log_context.set({**log_context.get(), "group": index, "incarnation": status.incarnation})
        if not reported and any(isinstance(action, CollectEvidence) for action in decision.actions):
            return _Executed(status, failed=True)
        for action in decision.actions:
            what = _identity(action)
            longest = _FORM_SECONDS if isinstance(action, Form) else _LONGEST_SECONDS
            part = Part("act", longest, index)
            if self._backoffs.waits(part, self._clock(), what):
                return _Executed(status, failed=True)
            try:
                over, status = await self._act(deployment, action, status)
            except Exception as error:
                self._fail(part, error, _CANNOT[type(action)].format(what[1]), what)
                return _Executed(status, failed=True)
            if not over:
                return _Executed(status, waits=not isinstance(action, Drain))
        self._backoffs.succeeded(Part("act", _LONGEST_SECONDS, index))
        return _Executed(decision.completed if decision.completed is not None else status)

    async def _act(self, deployment: DSV4Deployment, action: Action, status: GroupStatus) -> tuple[bool, GroupStatus]:
        """Return whether `action` is complete, and the status with evidence that was collected meanwhile."""
        if isinstance(action, CollectEvidence | Fence | Forget):
            over, status = await self._collected(deployment, action, status)
            if not over:
                return False, status
        match action:
            case Form(plan, version):
                await self._backend.ensure(version, plan)
            case Hold(plan, version):
                return await self._backend.hold(version, plan), status
            case Drain(key, incarnation, seconds):
                return await self._backend.drain(deployment, key.group, incarnation, seconds), status
            case Fence(key, incarnation):
                return await self._backend.fence(deployment, key.group, incarnation), status
            case Forget(key, incarnation):
                await self._backend.forget(deployment, key.group, incarnation)
        return True, status

    async def _collected(
        self, deployment: DSV4Deployment, action: CollectEvidence | Fence | Forget, status: GroupStatus
    ) -> tuple[bool, GroupStatus]:
        """Return whether no evidence collection of the action's incarnation is running, and the status with its result.

        Starts a collection for `CollectEvidence`, and before the members are ended if an earlier process may not have
        completed it.
        """
        key, incarnation = action.key, action.incarnation
        name, last = (key.group, incarnation), status.last_failure
        dead = status.phase in (GroupPhase.RECOVERING, GroupPhase.FAILED) and isinstance(action, Fence)
        missing = dead and last is not None and last.incarnation == incarnation and last.evidence is None
        interrupted = missing and self._collected_of.get(key.group) != incarnation
        if (isinstance(action, CollectEvidence) or interrupted) and name not in self._evidence:
            self._collected_of[key.group] = incarnation
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
            unexpected = None if is_expected(error) else error
            _log.error("%s: no evidence of incarnation %d: %s", name, incarnation, text_of(error), exc_info=unexpected)
            return None

    async def _keep(self, deployment: DSV4Deployment, status: DeploymentStatus, *, deleting: bool) -> bool:
        """Save the status if it changed, and emit events; return whether decisions may build on it.

        If the status cannot be saved, the last saved one stays in force: nothing may be formed on an unsaved status. A
        deletion does not need a saved status.

        Raises:
            StatusLost: raised by `save`.
        """
        saved = self._saved if self._saved is not None else deployment.status
        self._kept = status
        self._save_due = None if status == saved else self._may_wait(saved, status)
        if status == saved or self._save_due is not None:
            self._backoffs.succeeded(_STATUS)
            return True
        if self._backoffs.waits(_STATUS, self._clock()):
            self._kept = status if deleting else saved
            return deleting
        try:
            await self._save(deployment.model_copy(update={"status": status}))
        except StatusLost:
            self._kept = saved
            raise
        except Exception as error:
            self._kept = status if deleting else self._saved
            if self._saved is saved:
                self._fail(_STATUS, error, "the status cannot be saved")
            return deleting
        self._backoffs.succeeded(_STATUS)
        now = self._clock()
        self._saved, self._next_progress, self._next_start = (
            status,
            now + self._progress_interval,
            now + self._start_interval,
        )
        for event in events(saved, status):
            self._record(event)
        return True

    def _may_wait(self, saved: DeploymentStatus, status: DeploymentStatus) -> float | None:
        """Return the time at which `status` is saved if it differs from the saved one only in what need not be saved
        at once; else None.

        An incarnation is claimed by a save of its own. Until its members serve or fail, an operator that begins from
        the claim finds them by observation.
        """
        now = self._clock()
        if now < self._next_progress and _but_for_progress(status) == _but_for_progress(saved):
            return self._next_progress
        return self._next_start if now < self._next_start and _but_for_start(status) == _but_for_start(saved) else None


def _claims(decisions: Sequence[Decision], now: float) -> bool:
    """Return whether a decision at `now` claimed an incarnation that the next one, which follows at once, forms.

    Members are made before the front end of a new deployment: they take longer to start.
    """
    return any(
        decision.status.phase is GroupPhase.FORMING and not decision.actions and decision.next_time <= round(now, 3)
        for decision in decisions
    )


def _due(decision: Decision, executed: _Executed, now: float, *, saved: bool) -> float:
    """Return the Unix time of the next decision: immediately only if all actions were completed."""
    if executed.waits:
        return now + AGAIN_SECONDS
    return max(decision.next_time, now + POLL_SECONDS if executed.failed or not saved else now)


def _identity(action: Action) -> tuple[str, int]:
    """Return kind and incarnation of `action`; the backoff applies only to the same kind and incarnation."""
    return type(action).__name__, action.plan.incarnation if isinstance(action, Form | Hold) else action.incarnation


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of work that was cancelled after it failed."""
    if not task.cancelled():
        task.exception()


def _but_for_progress(status: DeploymentStatus) -> DeploymentStatus:
    """Return `status` without the progress of its members, which changes every second."""
    groups = []
    for group in status.groups:
        # An agent that has never answered is starting, not silent.
        starts = [{**_PROGRESS, "silent_since": None} if one.phase is None else _PROGRESS for one in group.members]
        members = tuple(one.model_copy(update=update) for one, update in zip(group.members, starts, strict=True))
        groups.append(group.model_copy(update={"members": members}))
    # Their messages repeat the progress of a group in drain; the phases of the groups contain the rest.
    conditions = tuple(
        one.model_copy(update={"message": ""}) if one.type in _REPEATING else one for one in status.conditions
    )
    return status.model_copy(update={"groups": tuple(groups), "conditions": conditions})


def _but_for_start(status: DeploymentStatus) -> DeploymentStatus:
    """Return `status` without the members of starting groups, which appear one after the other."""
    status = _but_for_progress(status)
    groups = tuple(
        group.model_copy(update={"phase": GroupPhase.FORMING, "phase_time": None, "members": (), "fenced_below": 0})
        if group.phase in _BEGINS
        else group
        for group in status.groups
    )
    conditions = tuple(
        one.model_copy(update={"reason": Reason.GROUP_FORMING}) if one.reason in _START_REASONS else one
        for one in status.conditions
    )
    return status.model_copy(update={"groups": groups, "conditions": conditions})


def _log_event(event: Event) -> None:
    where, extra = ("", {}) if event.group is None else (f"group {event.group}: ", {"group": event.group})
    _log.info("%s %s: %s%s", event.type, event.reason, where, event.message, extra=extra)
