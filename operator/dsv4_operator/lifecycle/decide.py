"""Decision about one group: a pure step from status and observation to actions.

```
PENDING ──claim──▶ FORMING ──all members seen──▶ STARTING ──▶ SERVING ◀──▶ RESTARTING (level 1, by the head's agent)
   ▲                  └──────────────┬──────────────┴────────────┴──────────────┘
   │                               death                     │ revision changed │ not wanted
   │          budget spent ┌─────────┴────────┐              ▼                  ▼
   └── generation ─────── FAILED          RECOVERING      UPDATING           DRAINING ──▶ SUSPENDED, STOPPED
       changed                                └──── claim ────┴───── claim, when wanted again ─────┘
```

UPDATING and DRAINING are planned ends: a healthy engine finishes its open requests first (`Drain`).

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

from dsv4_operator.api import DSV4Deployment, FailureStatus, GroupPhase, GroupStatus
from dsv4_operator.api.deployment import is_paused
from dsv4_operator.lifecycle.diagnosis import diagnose
from dsv4_operator.lifecycle.observed import GroupKey, Observed
from dsv4_operator.lifecycle.watch import (
    ALIVE,
    answer,
    failure_status,
    same_death,
    watch,
    with_failure,
    with_members,
    with_restarts,
)
from dsv4_operator.planning import PlanRefused, revision
from dsv4_runtime.contract import Failure, GroupPlan, Health, Phase, permit
from dsv4_runtime.contract.recovery import within


@dataclass(frozen=True, slots=True)
class Form:
    """Create the members of `plan` that do not exist (`Backend.ensure`)."""

    plan: GroupPlan
    deployment: DSV4Deployment
    """Deployment that the plan was made from."""


@dataclass(frozen=True, slots=True)
class CollectEvidence:
    """Save what the members left, then `record_evidence`. If it fails, go on: evidence never delays a recovery."""

    key: GroupKey
    incarnation: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Have a healthy engine finish its open requests; until it says that it has, do none of the actions after it."""

    key: GroupKey
    incarnation: int
    seconds: float
    """The longest that they get, from the first time that the engine is asked."""


@dataclass(frozen=True, slots=True)
class Fence:
    """End every member; until it has failed or is over, do none of the actions after it."""

    key: GroupKey
    incarnation: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove what fencing left."""

    key: GroupKey
    incarnation: int


Action = Form | CollectEvidence | Drain | Fence | Forget

Planner = Callable[[int, Sequence[float]], GroupPlan]
"""Makes the plan of an incarnation from its number and the restarts that are used; raises `PlanRefused`."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision about one group now."""

    actions: tuple[Action, ...]
    """In this order; one that fails ends the list, except `CollectEvidence`, and so does one that is not over yet."""
    next_look: float
    """Unix time at which to decide again at the latest; any news is a reason to do so earlier."""
    status: GroupStatus
    """To be kept, also when an action failed. The next decision must be given the status as it was last kept."""
    completed: GroupStatus | None = None
    """To be kept in the place of `status` once every action is over; None: `status`."""
    refusal: PlanRefused | None = None
    """Reason why the specification could not be planned, if it had to be."""
    error: Exception | None = None
    """Exception of a decision or a plan that failed because of a defect; the group stays as it is."""


LOOK_SECONDS = 1.0
"""Between looks at a group that runs or changes."""
REFUSED_SECONDS = 15.0
"""Between attempts to plan on machines that were refused; they may change without saying so."""
QUIET_SECONDS = 300.0
"""Between looks at a group that waits for its specification to change."""
DRAIN_GRACE_SECONDS = 60.0
"""Beyond the time that open requests get, until an agent is not asked any more that should have called it over.

So much that clocks which differ cut nobody off.
"""
DRAIN_SILENCE_SECONDS = 5.0
"""Without a word of the head's agent, until its engine is not waited for any more."""

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
) -> Decision:
    """Return what to do about one group now.

    Args:
        deployment: the version of the specification that this group is to have (`rollout`).
        observed: the group's members, of every incarnation.
        previous: the status as it was last kept, from an earlier decision; None before the first.
        plan: makes the plan of an incarnation of this group.
        now: Unix time.
        deleting: the deployment is being deleted. It is done when a decision says `STOPPED` and its actions succeeded.
        held: a group that serves from another specification goes on doing so.
    """
    return _Step(deployment, observed, plan, round(now, 3), held=held).decide(previous, deleting)


def record_evidence(status: GroupStatus, incarnation: int, where: str | None) -> GroupStatus:
    """Return `status` with the place of the evidence that `CollectEvidence` saved of `incarnation`'s latest death."""
    history = list(status.history)
    for index in reversed(range(len(history))):
        if where is not None and history[index].incarnation == incarnation:
            history[index] = history[index].model_copy(update={"evidence": where})
            break
    return status.model_copy(update={"history": tuple(history), "last_failure": history[-1] if history else None})


class _Step:
    """The arguments of one decision; every method is pure."""

    __slots__ = ("deployment", "held", "key", "now", "observed", "plan", "policy")

    def __init__(
        self, deployment: DSV4Deployment, observed: Observed, plan: Planner, now: float, *, held: bool
    ) -> None:
        self.deployment = deployment
        self.held = held
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
            decision = Decision((), self.now + LOOK_SECONDS, group)
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
        """Return `group` with what can be concluded from the observation and the clock alone."""
        window = self.policy.window_seconds
        # Names of others matter for the first number alone; later ones are higher.
        taken = 0 if group.incarnation else self.observed.taken
        seen = max((taken, *(member.incarnation for member in self.observed.members)))
        update: dict[str, object] = {
            "restarts": tuple(within(window, group.restarts, self.now)),
            # Members of an incarnation are only made after all earlier ones were fenced.
            "fenced_below": max(group.fenced_below, seen),
        }
        asked = group.exhausted_generation != self.generation or group.revision != revision(self.deployment)
        if group.phase is GroupPhase.FAILED and asked:
            update |= {"phase": GroupPhase.PENDING, "exhausted_generation": None}
        group = with_restarts(group.model_copy(update=update), self.observed, window, self.now)
        if group.phase in ALIVE:
            group = watch(group, self.observed, generation=self.generation, now=self.now)
        if group.phase is GroupPhase.SERVING and group.served_revision != group.revision:
            group = group.model_copy(update={"served_revision": group.revision})
        return group

    def _alive(self, group: GroupStatus) -> Decision:
        death = diagnose(group, self.observed, self.now)
        if death is not None:
            return self._handle_death(group, death)
        if group.revision != revision(self.deployment) and not (self.held and group.phase is GroupPhase.SERVING):
            return self._update(group)
        if group.phase is GroupPhase.FORMING:
            return self._form(group)
        return Decision(self._end_observed(keep=group.incarnation), self.now + LOOK_SECONDS, group)

    def _form(self, group: GroupStatus) -> Decision:
        """Make the members that were claimed; again and again until all were seen."""
        try:
            plan = self.plan(group.incarnation, group.restarts)
        except PlanRefused as refusal:
            # Members that exist already are supervised as those of any other group.
            pause = LOOK_SECONDS if group.members else REFUSED_SECONDS
            return Decision(self._end_observed(keep=group.incarnation), self.now + pause, group, refusal=refusal)
        group = group.model_copy(update={"expected_ready_seconds": plan.expectations.ready_seconds})
        others = self._end_observed(keep=group.incarnation)
        if {member.rank for member in group.members} >= {member.rank for member in plan.members}:
            started = group.model_copy(update={"phase": GroupPhase.STARTING})
            return Decision(others, self.now + LOOK_SECONDS, started)
        if self._live() - {group.incarnation}:
            return Decision(others, self.now, group)
        present = {member.rank for member in self.observed.members if member.incarnation == group.incarnation}
        if {member.rank for member in group.members} - present:
            # One is gone that was there. Making it again would be the restart of a single rank.
            return Decision(others, self.now + LOOK_SECONDS, group)
        form = Form(plan, self.deployment)
        return Decision((*others, *self._fence_unproven(group), form), self.now + LOOK_SECONDS, group)

    def _handle_death(self, group: GroupStatus, death: Failure) -> Decision:
        """End a dead incarnation and keep its evidence: levels 2 and 3."""
        failure = failure_status(death, group, self.generation)
        allowed = permit(self.policy, group.restarts, self.now)
        exhausted = allowed.at is None or _twice(group.history, failure)
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
            return Decision(actions, self.now + LOOK_SECONDS, group.model_copy(update=update))
        update |= {"phase": GroupPhase.RECOVERING, "next_restart_time": allowed.at}
        return Decision(actions, self.now, group.model_copy(update=update))

    def _given_up(self, group: GroupStatus) -> Decision:
        """End only what survived its fencing (level 3); what is left of the dead stays to be looked at."""
        fences = tuple(Fence(self.key, number) for number in sorted(self._live()))
        return Decision(fences, self.now + (LOOK_SECONDS if fences else QUIET_SECONDS), group)

    def _update(self, group: GroupStatus) -> Decision:
        """End an incarnation of an older specification, unless the new one cannot be planned at all."""
        try:
            self.plan(group.incarnation + 1, group.restarts)
        except PlanRefused as refusal:
            return Decision(self._end_observed(keep=group.incarnation), self.now + LOOK_SECONDS, group, refusal=refusal)
        updating = group.model_copy(update={"phase": GroupPhase.UPDATING, "ready_time": None})
        return Decision(self._end_observed(keep=group.incarnation), self.now, updating)

    def _next_incarnation(self, group: GroupStatus) -> Decision:
        """End what still runs, wait for the budget, claim the next number: nothing is meant to run now."""
        if self._drains(group):
            group = with_members(group, self.observed, self.now)
            return Decision(self._end_drained(group), self.now + LOOK_SECONDS, group)
        actions = self._end_observed()
        if self._live():
            return Decision(actions, self.now + LOOK_SECONDS, group)
        wanted = revision(self.deployment)
        # To try another specification is no restart of this one.
        charged = group.phase is GroupPhase.RECOVERING and group.revision == wanted
        if charged:
            at = permit(self.policy, group.restarts, self.now).at
            if at is None:
                # The budget was lowered while the restart waited.
                update: dict[str, object] = {
                    "phase": GroupPhase.FAILED,
                    "exhausted_generation": self.generation,
                    "next_restart_time": None,
                }
                return Decision(actions, self.now + QUIET_SECONDS, group.model_copy(update=update))
            if at > self.now:
                return Decision(actions, at, group.model_copy(update={"next_restart_time": at}))
        restarts = (*group.restarts, self.now) if charged else group.restarts
        # `fenced_below` also remembers the members of others, whom a lost status had made strangers.
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
                "revision_time": group.revision_time if charged else self.now,
                "members": (),
                "engine_generation": 0,
                "expected_ready_seconds": plan.expectations.ready_seconds,
                "formed_time": self.now,
                "ready_time": None,
                "restarts": restarts,
                "total_restarts": group.total_restarts + charged,
                "next_restart_time": None,
            }
        )
        return Decision(actions, self.now, claimed)

    def _stop(self, group: GroupStatus, target: GroupPhase, *, at_once: bool = False) -> Decision:
        """End everything on request and stay so.

        Args:
            group: as it is.
            target: what it is in the end.
            at_once: its gateway ends as well, and waits for the open requests itself: the engine need not.
        """
        quiet = GroupPhase.SUSPENDED, GroupPhase.STOPPED
        drained = not self.observed.members and group.phase in (GroupPhase.PENDING, GroupPhase.DRAINING, *quiet)
        if drained and group.phase is target:
            return Decision((), self.now + QUIET_SECONDS, group)
        own = (Fence(self.key, group.incarnation),) if group.incarnation else ()
        ends, next_look = (*own, *self._end_observed()), self.now
        if group.phase in ALIVE:
            ends = self._end_observed(keep=group.incarnation)
        elif self._drains(group) and not at_once:
            group = with_members(group, self.observed, self.now)
            ends, next_look = self._end_drained(group), self.now + LOOK_SECONDS
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
            return Decision(actions, next_look, ending)
        return Decision(actions, self.now + QUIET_SECONDS, ending, ending.model_copy(update={"phase": target}))

    def _drains(self, group: GroupStatus) -> bool:
        """Tell whether a group that is to end has a healthy engine, which may have open requests to finish.

        It has if all members are there, and the head says nothing but that its engine serves or finishes. Who has just
        begun to look has not heard the head, and one that is out of reach says no more: to ask it finds out.
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
        head = answer(mine[0], self.key)
        if head is None:
            return True
        bound = self.deployment.spec.engine.timeouts.drain + DRAIN_GRACE_SECONDS
        # A member's clock that is ahead must not hold up its end.
        began = head.phase_time if head.phase_time <= self.now else group.phase_time or self.now
        finishes = head.phase is Phase.DRAINING and self.now - began < bound
        return (finishes or head.phase is Phase.SERVING) and head.verdict.health is not Health.DEAD

    def _end_drained(self, group: GroupStatus) -> tuple[Action, ...]:
        """End all that is seen, the present incarnation last and not before its open requests."""
        drain = Drain(self.key, group.incarnation, self.deployment.spec.engine.timeouts.drain)
        return (*self._end_observed(keep=group.incarnation), drain, *self._end(group.incarnation))

    def _fence_unproven(self, group: GroupStatus) -> tuple[Action, ...]:
        """End every earlier incarnation that may have members that the observation does not show."""
        first = max(1, group.fenced_below)
        return tuple(Fence(self.key, number) for number in range(first, group.incarnation))

    def _end_observed(self, keep: int | None = None) -> tuple[Action, ...]:
        """End and forget every incarnation that is seen, but number `keep`."""
        numbers = sorted({member.incarnation for member in self.observed.members} - {keep})
        return tuple(action for number in numbers for action in self._end(number))

    def _end(self, number: int) -> Iterable[Action]:
        if number in self._live():
            yield Fence(self.key, number)
        yield Forget(self.key, number)

    def _live(self) -> set[int]:
        return {member.incarnation for member in self.observed.members if member.ended is None}


def _twice(history: Iterable[FailureStatus], failure: FailureStatus) -> bool:
    """Tell whether the death before this one had the same cause, one that trying again cannot mend.

    Members of one incarnation may each tell that they cannot go on, for one reason and at their own times: that is one
    death. An engine that died twice in one incarnation died twice.
    """
    earlier = [known for known in history if not same_death(known, failure) and not _one_attempt(known, failure)]
    if not earlier or not (failure.deterministic and earlier[-1].deterministic):
        return False
    last = earlier[-1]
    return last.cause is failure.cause and last.generation == failure.generation and last.recover_seconds is None


def _one_attempt(one: FailureStatus, other: FailureStatus) -> bool:
    """Tell whether both ended the same incarnation, without an engine's life of its own to tell them apart."""
    return one.incarnation == other.incarnation and None in (one.engine_generation, other.engine_generation)
