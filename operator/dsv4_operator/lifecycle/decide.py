"""Decision about one group: a pure step from status and observation to actions.

```
PENDING ──claim──▶ FORMING ──all members seen──▶ STARTING ──▶ SERVING ◀──▶ RESTARTING (level 1, by the head's agent)
   ▲                  └──────────────┬──────────────┴────────────┴──────────────┘
   │                               death                     │ revision changed │ not wanted
   │          budget spent ┌─────────┴────────┐              ▼                  ▼
   └── generation ─────── FAILED          RECOVERING      UPDATING           DRAINING ──▶ SUSPENDED, STOPPED
       changed                                └──── claim ────┴───── claim, when wanted again ─────┘
```

QUEUED, between FORMING and STARTING, lasts until the scheduler of `spec.topology.scheduler` has placed all members. The
loss of a placement (`Cause.PLACEMENT_LOST`) leads to RECOVERING without a restart of the budget, also if it occurred
during a pause, in which no action is taken.

UPDATING and DRAINING are planned ends: a healthy engine finishes its open requests first (`Drain`).

A group that serves on cordoned nodes moves: it is UPDATING too, after other nodes for its members were held (`Hold`).

Three rules make every step safe to interrupt; the next step needs only the last saved status:

* An incarnation gets its number in one decision (the claim, which also uses a restart) and its members in the next one,
  which is reached only if the claim was saved. So no number is used twice, and no restart is free.
* `Form` is always preceded, in the same list, by `Fence` of every earlier incarnation that is not known to have ended
  (`GroupStatus.fenced_below`). So a stale observation does no harm: fencing reads the live state.
* A planned end is saved before any action is taken for it. So a group that is to live never has an engine in drain, a
  requested drain is never taken for a failure, and a reverted change never forms a number that was fenced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dsv4_operator.api import DSV4Deployment, FailureStatus, GroupPhase, GroupStatus, MoveStatus, Reason
from dsv4_operator.api.deployment import is_paused
from dsv4_operator.lifecycle.observed import GroupKey, Observed, ObservedMember
from dsv4_operator.lifecycle.watch import (
    ALIVE,
    FRESH_SECONDS,
    agent_status,
    diagnose,
    failure_status,
    placement_loss,
    same_death,
    watch,
    with_failure,
    with_members,
    with_pause,
    with_placement,
    with_restarts,
    without_queue_time,
)
from dsv4_operator.planning import PlanRefused, revision
from dsv4_operator.planning.rendering import model_names
from dsv4_runtime.contract import Cause, Failure, GroupPlan, Health, Phase, permit
from dsv4_runtime.contract.recovery import within


@dataclass(frozen=True, slots=True)
class Form:
    """Create the members of `plan` that do not exist (`Backend.ensure`)."""

    plan: GroupPlan
    deployment: DSV4Deployment
    """Deployment from which the plan was made."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the nodes of `plan` free for its members (`Backend.hold`); incomplete if they were taken meanwhile."""

    plan: GroupPlan
    deployment: DSV4Deployment
    """Deployment from which the plan was made."""


@dataclass(frozen=True, slots=True)
class CollectEvidence:
    """Save the evidence of the members, then call `record_evidence`. Failures never delay a recovery."""

    key: GroupKey
    incarnation: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Let a healthy engine finish its open requests; actions after it wait until the drain is complete."""

    key: GroupKey
    incarnation: int
    seconds: float
    """Upper bound, counted from the first drain request."""


@dataclass(frozen=True, slots=True)
class Fence:
    """End every member; actions after it wait until it has failed or is complete."""

    key: GroupKey
    incarnation: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove the objects and files that remain after fencing."""

    key: GroupKey
    incarnation: int


Action = Form | Hold | CollectEvidence | Drain | Fence | Forget

Planner = Callable[[int, Sequence[float]], GroupPlan]
"""Returns the plan of an incarnation, given its number and the used restarts; raises `PlanRefused`."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision about one group at one moment."""

    actions: tuple[Action, ...]
    """Actions in order. The list ends at a failed or incomplete action, except a failed `CollectEvidence`."""
    next_time: float
    """Unix time of the next decision at the latest; any event triggers it earlier."""
    status: GroupStatus
    """Status to save, also if an action failed. The next decision must get the status as it was last saved."""
    completed: GroupStatus | None = None
    """Status to save instead of `status` once every action is complete; None: `status`."""
    refusal: PlanRefused | None = None
    """Refusal of the plan, if a plan was needed."""
    error: Exception | None = None
    """Exception of a decision or plan that failed because of a defect; the group stays unchanged."""


POLL_SECONDS = 1.0
"""Interval between decisions about a group that starts or changes; about one that serves up to three times as long."""
_MARGIN_SECONDS = 0.1
"""Time after the first possible silence of a member at which it is looked for."""
QUIET_SECONDS = 60.0
"""Interval between decisions about a group that serves, where every change of it is an event."""
REFUSED_SECONDS = 15.0
"""Interval between attempts to plan on machines that were refused; they may change without an event."""
RESYNC_SECONDS = 300.0
"""Interval between decisions about a group that waits for a change of its specification."""
DRAIN_GRACE_SECONDS = 60.0
"""Grace beyond the drain timeout, after which an agent that has not ended its drain is no longer waited for.

Large enough that different clocks do not shorten a drain.
"""
DRAIN_SILENCE_SECONDS = 5.0
"""Silence of the head's agent after which its engine is no longer waited for."""

WAITS_FOR_OTHERS = "groups move one at a time, while every other group answers"
SCHEDULER_CHOOSES = "its nodes are chosen by the scheduler of spec.topology.scheduler, so free ones are not known"
_BLOCKED = 500
"""Characters of a reason in the status."""

_BEGINNINGS = ("phase_time", "revision_time", "paused_time", "formed_time")
"""Fields of a group's status from which durations count."""

_PLANNED_ENDS = frozenset({GroupPhase.UPDATING, GroupPhase.DRAINING})


def decide(
    deployment: DSV4Deployment,
    observed: Observed,
    previous: GroupStatus | None,
    plan: Planner,
    now: float,
    *,
    deleting: bool = False,
    held: bool = False,
    moves: bool | None = None,
) -> Decision:
    """Return the decision about one group at `now`.

    Args:
        deployment: the version of the specification for this group (`rollout`).
        observed: the group's members, of every incarnation.
        previous: the last saved status of an earlier decision; None before the first.
        plan: returns the plan of an incarnation of this group.
        now: Unix time.
        deleting: the deployment is being deleted. Deletion is complete when a decision has the phase `STOPPED` and its
            actions succeeded.
        held: a group that serves from another specification keeps serving it.
        moves: whether the group may move away from cordoned nodes now; None: that is not decided yet.
    """
    return _Step(deployment, observed, plan, round(now, 3), held=held, moves=moves).decide(previous, deleting)


def record_evidence(status: GroupStatus, incarnation: int, location: str | None) -> GroupStatus:
    """Return `status` with the location of the evidence of `incarnation`'s latest death."""
    history = list(status.history)
    for index in reversed(range(len(history))):
        if location is not None and history[index].incarnation == incarnation:
            history[index] = history[index].model_copy(update={"evidence": location})
            break
    return status.model_copy(update={"history": tuple(history), "last_failure": history[-1] if history else None})


class _Step:
    """Arguments of one decision; every method is pure."""

    __slots__ = ("deployment", "held", "key", "moves", "now", "observed", "plan", "policy")

    def __init__(
        self,
        deployment: DSV4Deployment,
        observed: Observed,
        plan: Planner,
        now: float,
        *,
        held: bool,
        moves: bool | None,
    ) -> None:
        self.deployment = deployment
        self.held = held
        self.moves = moves
        self.observed = observed
        self.key: GroupKey = observed.key
        self.plan = plan
        self.now = now
        self.policy = deployment.spec.recovery.policy()

    @property
    def generation(self) -> int:
        return self.deployment.metadata.generation

    def decide(self, previous: GroupStatus | None, deleting: bool) -> Decision:
        group = self._refreshed(previous or GroupStatus(index=self.key.group))
        if is_paused(self.deployment) and not deleting:
            decision = Decision((), self.now + POLL_SECONDS, self._paused(group))
        elif deleting or self.key.group >= self.deployment.spec.replicas:
            decision = self._stop(group, GroupPhase.STOPPED, at_once=deleting)
        elif self.deployment.spec.suspend:
            decision = self._stop(group, GroupPhase.SUSPENDED)
        elif group.phase in ALIVE:
            decision = self._alive(group)
        elif group.phase is GroupPhase.FAILED:
            decision = self._given_up(group)
        else:
            decision = self._next_incarnation(group)
        completed = self._dated(decision.completed, previous) if decision.completed is not None else None
        return replace(decision, status=self._dated(decision.status, previous), completed=completed)

    def _dated(self, status: GroupStatus, previous: GroupStatus | None) -> GroupStatus:
        """Return `status` with the time at which its phase began."""
        if previous is not None and status.phase is previous.phase:
            return status
        return status.model_copy(update={"phase_time": self.now})

    def _refreshed(self, group: GroupStatus) -> GroupStatus:
        """Return `group` updated from the observation and the clock alone."""
        window = self.policy.window_seconds
        # Dated by an operator whose clock was ahead: bounds that count from these times would be extended.
        ahead = [name for name in _BEGINNINGS if (getattr(group, name) or self.now) > self.now]
        group = group.model_copy(update=dict.fromkeys(ahead, self.now))
        group = with_pause(group, self.now, paused=is_paused(self.deployment))
        # Names used by other deployments matter only for the first number; later numbers are higher.
        used_incarnation = 0 if group.incarnation else self.observed.used_incarnation
        seen = max((used_incarnation, *(member.incarnation for member in self.observed.members)))
        update: dict[str, object] = {
            "restarts": tuple(within(window, group.restarts, self.now)),
            # Members of an incarnation are created only after all earlier ones were fenced.
            "fenced_below": max(group.fenced_below, seen),
        }
        if group.phase not in (GroupPhase.SERVING, GroupPhase.UPDATING):
            update["move"] = None
        retry = group.exhausted_generation != self.generation or group.revision != revision(self.deployment)
        if group.phase is GroupPhase.FAILED and retry:
            update |= {"phase": GroupPhase.PENDING, "exhausted_generation": None}
        group = with_restarts(group.model_copy(update=update), self.observed, window, self.now)
        if group.phase in ALIVE:
            group = watch(group, self.observed, generation=self.generation, now=self.now)
        if not group.served_names and group.revision == revision(self.deployment):
            # Formed by an earlier dsv4.
            group = group.model_copy(update={"served_names": model_names(self.deployment)})
        if group.phase is GroupPhase.SERVING and group.served_revision != group.revision:
            group = group.model_copy(update={"served_revision": group.revision})
        return group

    def _paused(self, group: GroupStatus) -> GroupStatus:
        """Return `group` with a loss of its placement in the history: after the pause the pod may be gone."""
        death = diagnose(group, self.observed, self.now) if group.phase in ALIVE else None
        if death is None or death.cause is not Cause.PLACEMENT_LOST:
            return group
        failure = failure_status(death, group, self.generation)
        return with_failure(group, failure.model_copy(update={"level": 2}))

    def _alive(self, group: GroupStatus) -> Decision:
        death = diagnose(group, self.observed, self.now)
        if death is not None:
            return self._handle_death(group, death)
        if group.revision != revision(self.deployment) and not (self.held and group.phase is GroupPhase.SERVING):
            return self._update(group)
        cordoned = self._cordoned(group)
        if cordoned and group.phase is GroupPhase.SERVING and not self.held:
            return self._move(group, cordoned)
        group = group.model_copy(update={"move": None})
        if group.phase is GroupPhase.FORMING:
            return self._form(group)
        return Decision(self._end_observed(keep=group.incarnation), self._next_look(group), group)

    def _next_look(self, group: GroupStatus) -> float:
        """Return the time of the next decision: for a group that serves, that at which a member may first be silent,
        unless the backend reports silence."""
        answers = [member for member in self._present(group) if member.ended is None and member.waiting is None]
        heard = [member.heard for member in answers if member.heard is not None]
        silent = any(member.silent_since is not None for member in group.members)
        if group.phase is not GroupPhase.SERVING or silent or len(heard) != len(group.members):
            return self.now + POLL_SECONDS
        if self.observed.silence_is_event:
            return self.now + QUIET_SECONDS
        first = min((*heard, self.now)) + FRESH_SECONDS + _MARGIN_SECONDS
        return max(self.now + POLL_SECONDS, first)

    def _form(self, group: GroupStatus) -> Decision:
        """Create the members of the claimed incarnation; repeated until all were observed."""
        try:
            plan = self.plan(group.incarnation, group.restarts)
        except PlanRefused as refusal:
            # Existing members are supervised like those of any other group.
            pause = POLL_SECONDS if group.members else REFUSED_SECONDS
            return Decision(self._end_observed(keep=group.incarnation), self.now + pause, group, refusal=refusal)
        group = group.model_copy(update={"expected_ready_seconds": plan.expectations.ready_seconds})
        others = self._end_observed(keep=group.incarnation)
        if {member.rank for member in group.members} >= {member.rank for member in plan.members}:
            return Decision(others, self.now + POLL_SECONDS, with_placement(group, self.observed, self.now))
        if self._live() - {group.incarnation}:
            return Decision(others, self.now, group)
        present = {member.rank for member in self.observed.members if member.incarnation == group.incarnation}
        if {member.rank for member in group.members} - present:
            # A member disappeared. Creating it again would restart a single rank.
            return Decision(others, self.now + POLL_SECONDS, group)
        form = Form(plan, self.deployment)
        return Decision((*others, *self._fence_unproven(group), form), self.now + POLL_SECONDS, group)

    def _handle_death(self, group: GroupStatus, death: Failure) -> Decision:
        """End a dead incarnation and save its evidence: levels 2 and 3."""
        failure = failure_status(death, group, self.generation)
        if failure.cause is Cause.PLACEMENT_LOST:
            # The next incarnation queues again. The pause limits the load if its pods are removed each time.
            at: float | None = self.now + self.policy.backoff_base_seconds
        else:
            at = permit(self.policy, group.restarts, self.now).at
        exhausted = at is None or _twice(group.history, failure)
        group = without_queue_time(group, self.now)
        # Several members report one cause for themselves, such as a file that all of them read: one end, one entry.
        others = tuple(known for known in group.history if not _is_same_end(known, failure))
        group = group.model_copy(update={"history": others})
        group = with_failure(group, failure.model_copy(update={"level": 3 if exhausted else 2}))
        actions: tuple[Action, ...] = (
            CollectEvidence(self.key, group.incarnation),
            Fence(self.key, group.incarnation),
            *self._end_observed(keep=group.incarnation),
        )
        update: dict[str, object] = {
            "ready_time": None,
            "members": tuple(member.model_copy(update={"processes": ()}) for member in group.members),
        }
        if exhausted:
            update |= {"phase": GroupPhase.FAILED, "exhausted_generation": self.generation, "next_restart_time": None}
            return Decision(actions, self.now + POLL_SECONDS, group.model_copy(update=update))
        update |= {"phase": GroupPhase.RECOVERING, "next_restart_time": at}
        return Decision(actions, self.now, group.model_copy(update=update))

    def _given_up(self, group: GroupStatus) -> Decision:
        """End only members that survived fencing (level 3); objects of dead members are kept for inspection."""
        fences = tuple(Fence(self.key, number) for number in sorted(self._live()))
        return Decision(fences, self.now + (POLL_SECONDS if fences else RESYNC_SECONDS), group)

    def _update(self, group: GroupStatus) -> Decision:
        """End an incarnation of an older specification, unless the new one cannot be planned.

        A group that serves ends once the nodes that the new one needs besides the present ones are held.
        """
        others = self._end_observed(keep=group.incarnation)
        try:
            plan = self.plan(max(group.incarnation, group.fenced_below) + 1, group.restarts)
        except PlanRefused as refusal:
            return Decision(others, self.now + POLL_SECONDS, group, refusal=refusal)
        group = group.model_copy(update={"move": None})
        updating = group.model_copy(update={"phase": GroupPhase.UPDATING, "ready_time": None})
        present = {member.node for member in self._present(group)}
        if group.phase is GroupPhase.SERVING and {member.node for member in plan.members} - present - {None}:
            return Decision((*others, Hold(plan, self.deployment)), self.now, group, updating)
        return Decision(others, self.now, updating)

    def _cordoned(self, group: GroupStatus) -> tuple[str, ...]:
        """Return the cordoned nodes of the present members."""
        return tuple(sorted({member.node for member in self._present(group) if member.cordoned}))

    def _present(self, group: GroupStatus) -> list[ObservedMember]:
        """Return the observed members of the present incarnation."""
        return [member for member in self.observed.members if member.incarnation == group.incarnation]

    def _move(self, group: GroupStatus, cordoned: tuple[str, ...]) -> Decision:
        """End an incarnation on cordoned nodes once other nodes are held for the next one.

        Without such nodes, or before its turn, the group continues to serve and its status has the reason.
        """
        others, later = self._end_observed(keep=group.incarnation), self.now + POLL_SECONDS

        def stays(reason: str) -> Decision:
            move = MoveStatus(nodes=cordoned, blocked=reason[:_BLOCKED])
            return Decision(others, later, group.model_copy(update={"move": move}))

        if not self.moves:
            known = group.move if group.move is not None and group.move.nodes == cordoned else None
            return stays(known.blocked if self.moves is None and known is not None else WAITS_FOR_OTHERS)
        try:
            plan = self.plan(max(group.incarnation, group.fenced_below) + 1, group.restarts)
        except PlanRefused as refusal:
            # Without a result about the machines, the last one stays.
            unknown = refusal.reason is Reason.ACTION_FAILED
            return Decision(others, later, group) if unknown else stays(refusal.message)
        chosen = {member.node for member in plan.members}
        if not all(chosen):
            return stays(SCHEDULER_CHOOSES)
        if chosen & set(cordoned):
            # The machines were listed before the node was cordoned.
            return Decision(others, later, group)
        update = {"phase": GroupPhase.UPDATING, "ready_time": None, "move": MoveStatus(nodes=cordoned)}
        moving = group.model_copy(update=update)
        return Decision((*others, Hold(plan, self.deployment)), self.now, group, moving)

    def _next_incarnation(self, group: GroupStatus) -> Decision:
        """End running members, wait for the restart budget, then claim the next number."""
        if self._drains(group):
            group = with_members(group, self.observed, self.now)
            return Decision(self._end_drained(group), self.now + POLL_SECONDS, group)
        actions = self._end_observed()
        if self._live():
            return Decision(actions, self.now + POLL_SECONDS, group)
        wanted = revision(self.deployment)
        # Trying another specification is no restart of this one.
        repeated = group.phase is GroupPhase.RECOVERING and group.revision == wanted
        charged = repeated and placement_loss(group) is None
        if repeated and not charged:
            # Bounded, because a clock that was ahead may have dated it.
            begin = min(group.next_restart_time or 0.0, self.now + self.policy.backoff_base_seconds)
            if begin > self.now:
                return Decision(actions, begin, group.model_copy(update={"next_restart_time": begin}))
        if charged:
            at = permit(self.policy, group.restarts, self.now).at
            if at is None:
                # The budget was lowered during the backoff.
                update: dict[str, object] = {
                    "phase": GroupPhase.FAILED,
                    "exhausted_generation": self.generation,
                    "next_restart_time": None,
                }
                return Decision(actions, self.now + RESYNC_SECONDS, group.model_copy(update=update))
            if at > self.now:
                return Decision(actions, at, group.model_copy(update={"next_restart_time": at}))
        restarts = (*group.restarts, self.now) if charged else group.restarts
        # `fenced_below` includes members whose owner is unknown after a status was lost.
        incarnation = max(group.incarnation, group.fenced_below) + 1
        try:
            plan = self.plan(incarnation, restarts)
        except PlanRefused as refusal:
            return Decision(actions, self.now + REFUSED_SECONDS, group, refusal=refusal)
        claimed = group.model_copy(
            update={
                "phase": GroupPhase.FORMING,
                "incarnation": incarnation,
                "revision": wanted,
                "served_names": model_names(self.deployment),
                "revision_time": group.revision_time if repeated else self.now,
                "members": (),
                "engine_generation": 0,
                "expected_ready_seconds": plan.expectations.ready_seconds,
                "formed_time": self.now,
                "ready_time": None,
                "restarts": restarts,
                "total_restarts": group.total_restarts + charged,
                "next_restart_time": None,
                "move": None,
            }
        )
        return Decision(actions, self.now, claimed)

    def _stop(self, group: GroupStatus, target: GroupPhase, *, at_once: bool = False) -> Decision:
        """End all members on request and keep the group stopped in the phase `target`.

        `at_once` skips the drain: the gateway ends as well and waits for the open requests.
        """
        quiet = GroupPhase.SUSPENDED, GroupPhase.STOPPED
        drained = not self.observed.members and group.phase in (GroupPhase.PENDING, GroupPhase.DRAINING, *quiet)
        if drained and group.phase is target:
            return Decision((), self.now + RESYNC_SECONDS, group)
        own = (Fence(self.key, group.incarnation),) if group.incarnation else ()
        ends, next_time = (*own, *self._end_observed()), self.now
        if group.phase in ALIVE:
            ends = self._end_observed(keep=group.incarnation)
        elif self._drains(group) and not at_once:
            group = with_members(group, self.observed, self.now)
            ends, next_time = self._end_drained(group), self.now + POLL_SECONDS
        actions = tuple(dict.fromkeys((*self._fence_unproven(group), *ends)))
        update: dict[str, object] = {
            "phase": GroupPhase.DRAINING,
            "members": () if drained else group.members,
            "engine_generation": 0,
            "ready_time": None,
            "next_restart_time": None,
            "exhausted_generation": None,
        }
        ending = group.model_copy(update=update)
        if not drained:
            return Decision(actions, next_time, ending)
        return Decision(actions, self.now + RESYNC_SECONDS, ending, ending.model_copy(update={"phase": target}))

    def _drains(self, group: GroupStatus) -> bool:
        """Return whether a group that is to end has a healthy engine, which may have open requests to finish.

        This holds if all members are present and the head reports only an engine that serves or drains. After a restart
        of the operator, or with an unreachable head, the head's status may be unknown; the drain call finds out.
        """
        if group.phase not in _PLANNED_ENDS:
            return False
        mine = {member.rank: member for member in self.observed.members if member.incarnation == group.incarnation}
        if 0 not in mine or {member.rank for member in group.members} - mine.keys():
            return False
        if any(member.ended is not None for member in mine.values()):
            return False
        seen = with_members(group, self.observed, self.now).members
        known = next((member for member in seen if member.rank == 0), None)
        if known is not None and known.silent_since and self.now - known.silent_since > DRAIN_SILENCE_SECONDS:
            return False
        head = agent_status(mine[0], self.key)
        if head is None:
            return True
        bound = self.deployment.spec.engine.timeouts.drain + DRAIN_GRACE_SECONDS
        # The clock of a member may be ahead; it must not delay the end.
        began = head.phase_time if head.phase_time <= self.now else group.phase_time or self.now
        finishes = head.phase is Phase.DRAINING and self.now - began < bound
        return (finishes or head.phase is Phase.SERVING) and head.verdict.health is not Health.DEAD

    def _end_drained(self, group: GroupStatus) -> tuple[Action, ...]:
        """End all observed incarnations, the present one last and only after its drain."""
        drain = Drain(self.key, group.incarnation, self.deployment.spec.engine.timeouts.drain)
        return (*self._end_observed(keep=group.incarnation), drain, *self._end(group.incarnation))

    def _fence_unproven(self, group: GroupStatus) -> tuple[Action, ...]:
        """Fence every earlier incarnation that may have members missing from the observation."""
        first = max(1, group.fenced_below)
        return tuple(Fence(self.key, number) for number in range(first, group.incarnation))

    def _end_observed(self, keep: int | None = None) -> tuple[Action, ...]:
        """End and forget every observed incarnation except number `keep`."""
        numbers = sorted({member.incarnation for member in self.observed.members} - {keep})
        return tuple(action for number in numbers for action in self._end(number))

    def _end(self, number: int) -> Iterable[Action]:
        if number in self._live():
            yield Fence(self.key, number)
        yield Forget(self.key, number)

    def _live(self) -> set[int]:
        return {member.incarnation for member in self.observed.members if member.ended is None}


def _is_same_end(known: FailureStatus, failure: FailureStatus) -> bool:
    """Return whether `known`, which nothing repaired, is another report of the end of the incarnation by `failure`."""
    same = (known.incarnation, known.cause) == (failure.incarnation, failure.cause)
    return same and known.level is None and not same_death(known, failure)


def _twice(history: Iterable[FailureStatus], failure: FailureStatus) -> bool:
    """Return whether the preceding death had the same deterministic cause.

    Members of one incarnation may report one failure separately and at different times: this counts as one death. An
    engine that died twice in one incarnation died twice.
    """
    earlier = [known for known in history if not same_death(known, failure) and not _one_attempt(known, failure)]
    if not earlier or not (failure.deterministic and earlier[-1].deterministic):
        return False
    last = earlier[-1]
    return last.cause is failure.cause and last.generation == failure.generation and last.recover_seconds is None


def _one_attempt(one: FailureStatus, other: FailureStatus) -> bool:
    """Return whether both ended the same incarnation and no engine generation distinguishes them."""
    return one.incarnation == other.incarnation and None in (one.engine_generation, other.engine_generation)
