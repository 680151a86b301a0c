"""Status, conditions and events of a deployment, computed from the statuses of its groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dsv4_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    DeploymentPhase,
    DeploymentStatus,
    DSV4Deployment,
    FailureStatus,
    GroupPhase,
    GroupStatus,
    MemberStatus,
    MoveStatus,
    Reason,
    RejectedStatus,
    RolloutStatus,
)
from dsv4_operator.api.deployment import PAUSED, is_paused
from dsv4_operator.api.findings import Finding
from dsv4_operator.api.values import format_duration, format_time
from dsv4_operator.lifecycle.observed import UNREACHED, UNTRIED
from dsv4_operator.lifecycle.watch import ALIVE, same_death
from dsv4_operator.planning import PlanRefused, revision
from dsv4_runtime.contract import Phase
from dsv4_runtime.contract.gateway import PageFailure

_LONGEST = 1000


@dataclass(frozen=True, slots=True)
class Problem:
    """A lasting failure; the operation is repeated."""

    message: str
    group: int | None = None
    """Index of the affected group; None: the whole deployment."""
    reason: Reason = Reason.ACTION_FAILED

    def __str__(self) -> str:
        return self.message if self.group is None else f"group {self.group}: {self.message}"


def joined(problems: Iterable[object]) -> str:
    """Return all problems as one text of at most 1,000 characters."""
    text = "; ".join(map(str, problems))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


_UNDER_WAY = {
    GroupPhase.FORMING: (Reason.GROUP_FORMING, "its members are being created"),
    GroupPhase.QUEUED: (Reason.GROUP_QUEUED, "its members wait for nodes"),
    GroupPhase.STARTING: (Reason.GROUP_STARTING, "its engine is starting"),
    GroupPhase.RESTARTING: (Reason.ENGINE_RESTARTING, "its engine is being restarted in place"),
    GroupPhase.RECOVERING: (Reason.GROUP_RECOVERING, "it died and is being formed again"),
    GroupPhase.UPDATING: (Reason.UPDATE_STARTED, "it is being ended because the specification changed"),
    GroupPhase.DRAINING: (Reason.GROUP_STOPPING, "it is being stopped"),
}
_OF_GROUPS = frozenset(
    (Reason.STEADY, Reason.PAUSED, Reason.MOVE_BLOCKED, Reason.GROUP_MOVING, *(one for one, _ in _UNDER_WAY.values()))
)
"""Reasons of the condition Progressing that follow from the groups alone."""
_ENDS = frozenset({GroupPhase.UPDATING, GroupPhase.DRAINING})
_GONE = frozenset({GroupPhase.SUSPENDED, GroupPhase.STOPPED})

FORMING_SECONDS = 300.0
"""Time from the claim of an incarnation to its last member; a group that takes longer is reported as down.

It uses no restart: the same incarnation is tried again until the API server accepts its members.
"""


def compute_status(
    deployment: DSV4Deployment,
    groups: Iterable[GroupStatus],
    refusal: PlanRefused | None,
    endpoint: str | None,
    dashboard: str | None,
    previous: DeploymentStatus | None,
    now: float,
    *,
    deleting: bool = False,
    rollout: RolloutStatus | None = None,
    refused_generation: int | None = None,
    problems: Sequence[Problem] = (),
    unobserved: frozenset[int] = frozenset(),
    unreachable: str | None = None,
) -> DeploymentStatus:
    """Return the status of `deployment`.

    Args:
        deployment: the specification used for the decisions about the groups.
        groups: the statuses of its groups, including those that are no longer wanted.
        refusal: the refusal of a group's plan, if there was one.
        endpoint: base URL of the API, where known.
        dashboard: URL of the Ray dashboard, where known.
        previous: the last saved status; source of the times of unchanged conditions.
        now: Unix time.
        deleting: the deployment is being deleted.
        rollout: the specification that served and the one that was given up; None: as in `previous`.
        refused_generation: `metadata.generation` of the present specification if it breaks a rule (`refusal`), so that
            `deployment` has the last valid one; None: it breaks none.
        problems: failing parts of the reconcile.
        unobserved: indices of groups whose members cannot be observed.
        unreachable: reason why no request through the endpoint is answered, although groups answer; None: requests are
            answered, or the backend sends none.
    """
    if rollout is None:
        rollout = previous.rollout if previous is not None else RolloutStatus()
    ordered = tuple(sorted(groups, key=lambda group: group.index))
    ordered, removed = _without_removed(ordered, deployment, deleting=deleting)
    wanted = () if deleting or deployment.spec.suspend else ordered[: deployment.spec.replicas]
    expected = [group.expected_ready_seconds for group in wanted if group.expected_ready_seconds is not None]
    view = _View(
        deployment, ordered, wanted, refusal, tuple(problems), unobserved, unreachable, now, previous, deleting
    )
    facts = (*_conditions(view), _rolled_back(rollout))
    current = revision(deployment) if refused_generation is None else None
    generation = deployment.metadata.generation if refused_generation is None else refused_generation
    return DeploymentStatus(
        conditions=tuple(_condition(*fact, generation, previous, now) for fact in facts),
        observed_generation=generation,
        phase=_deployment_phase(view),
        replicas=sum(group.phase not in _GONE for group in ordered),
        ready_replicas=view.ready,
        updated_replicas=sum(group.revision == current and group.phase in ALIVE for group in wanted),
        endpoint=endpoint,
        ray_dashboard=dashboard,
        expected_ready_seconds=max(expected, default=None),
        rollout=rollout,
        removed_incarnation=max(previous.removed_incarnation if previous is not None else 0, removed),
        groups=ordered,
    )


def update_status(deployment: DSV4Deployment, groups: Iterable[GroupStatus], now: float) -> DeploymentStatus:
    """Return the saved status of `deployment` with newer reports of its members, for a loop that does not respond.

    A refusal and failing parts of its reconciles stay: members know nothing about them.
    """
    saved, refusal = deployment.status, None
    accepted, progress = saved.condition(ConditionType.ACCEPTED), saved.condition(ConditionType.PROGRESSING)
    if accepted is not None and accepted.status is not ConditionStatus.TRUE:
        refusal = PlanRefused(accepted.reason, Finding("", accepted.reason, accepted.message))
    status = compute_status(deployment, groups, refusal, saved.endpoint, saved.ray_dashboard, saved, now)
    if progress is None or not has_problem(saved):
        return status
    conditions = [progress if each.type is progress.type else each for each in status.conditions]
    return status.model_copy(update={"conditions": tuple(conditions)})


def has_problem(status: DeploymentStatus) -> bool:
    """Return whether a part of the reconcile failed when `status` was saved."""
    progress = status.condition(ConditionType.PROGRESSING)
    return progress is not None and progress.reason not in _OF_GROUPS


def _without_removed(
    groups: tuple[GroupStatus, ...], deployment: DSV4Deployment, *, deleting: bool
) -> tuple[tuple[GroupStatus, ...], int]:
    """Return the groups without those removed by a lower `spec.replicas`, and the highest incarnation of these."""
    kept = len(groups)
    while kept > deployment.spec.replicas and groups[kept - 1].phase is GroupPhase.STOPPED and not deleting:
        kept -= 1
    removed = (max(group.incarnation, group.fenced_below) for group in groups[kept:])
    return groups[:kept], max(removed, default=0)


def refused_status(previous: DeploymentStatus, why: str, generation: int, now: float) -> DeploymentStatus:
    """Return `previous` for a specification that breaks a rule, of a deployment whose groups cannot be supervised.

    Running groups continue, but their state is unknown. `why` is the broken rule and the remedy.
    """
    runs = any(group.phase not in _GONE and group.incarnation for group in previous.groups)
    ready = (None, f"its groups are not supervised: {why}") if runs else (False, why)
    facts: list[_Fact] = [
        (ConditionType.ACCEPTED, False, Reason.SPEC_INVALID, why),
        (ConditionType.READY, ready[0], Reason.SPEC_INVALID, ready[1]),
    ]
    changed = {fact[0]: _condition(*fact, generation, previous, now) for fact in facts}
    kept = tuple(condition for condition in previous.conditions if condition.type not in changed)
    return previous.model_copy(
        update={
            "conditions": (*changed.values(), *kept),
            "observed_generation": generation,
            "ready_replicas": 0,
            "updated_replicas": 0,
        },
    )


def death_sentence(failure: FailureStatus) -> str:
    """Return one line about a death: cause, member, machine, and the first fatal line."""
    where = "" if failure.culprit_rank is None else f" on member {failure.culprit_rank}"
    node = "" if failure.culprit_node is None else f" ({failure.culprit_node})"
    return f"{failure.cause}{where}{node}: {failure.message}".rstrip(": ")


def is_down(group: GroupStatus) -> bool:
    """Return whether the group died and does not serve again yet."""
    if group.phase in (GroupPhase.RESTARTING, GroupPhase.RECOVERING, GroupPhase.FAILED):
        return True
    unrecovered = group.last_failure is not None and group.last_failure.recover_seconds is None
    return unrecovered and group.phase in (GroupPhase.FORMING, GroupPhase.QUEUED, GroupPhase.STARTING)


def exhausted_sentence(deployment: DSV4Deployment, group: GroupStatus) -> str:
    """Return the reason why recovery of `group` was given up, and the remedy."""
    recovery = deployment.spec.recovery
    last = group.last_failure
    if last is not None and last.deterministic and len(group.restarts) < recovery.max_restarts:
        why = f"group {group.index} died of {last.cause} twice in a row, which a retry cannot correct"
    else:
        why = (
            f"group {group.index} used up its {recovery.max_restarts} restarts "
            f"within {format_duration(recovery.window)} (spec.recovery.maxRestarts)"
        )
    detail = f"; last: {death_sentence(last)}" if last else ""
    return (
        f"{why}{detail}; correct that, then apply a changed specification (or `dsv4 down` and `dsv4 up`) to try again"
    )


def given_up(deployment: DSV4Deployment, status: DeploymentStatus, group: int) -> str | None:
    """Return the reason why `group` will not recover by itself, for its clients; None if it may."""
    known = next((one for one in status.groups if one.index == group), None)
    return exhausted_sentence(deployment, known) if known is not None and known.phase is GroupPhase.FAILED else None


def page_failures(group: GroupStatus) -> tuple[PageFailure, ...]:
    """Return the deaths in the status of a group for the status page, oldest first."""
    return tuple(
        PageFailure(
            time=one.time,
            cause=one.cause,
            incarnation=one.incarnation,
            generation=one.engine_generation,
            level=one.level,
            rank=one.culprit_rank,
            node=one.culprit_node or "",
            message=one.message,
            detected_by=one.detected_by,
            recover_seconds=one.recover_seconds,
            evidence=one.evidence or "",
        )
        for one in group.history
    )


_Fact = tuple[ConditionType, bool | None, Reason, str]
"""Type, status (None: Unknown), reason and message of a condition."""


@dataclass(frozen=True, slots=True)
class _View:
    """Inputs of the conditions; see `compute_status`."""

    deployment: DSV4Deployment
    groups: tuple[GroupStatus, ...]
    wanted: tuple[GroupStatus, ...]
    refusal: PlanRefused | None
    problems: tuple[Problem, ...]
    unobserved: frozenset[int]
    unreachable: str | None
    now: float
    previous: DeploymentStatus | None
    deleting: bool

    @property
    def ready(self) -> int:
        """Return the number of wanted groups that are observed to serve."""
        return sum(group.phase is GroupPhase.SERVING for group in self.wanted if group.index not in self.unobserved)

    @property
    def down(self) -> GroupStatus | None:
        """Return the first wanted group that is down."""
        return next((group for group in self.wanted if is_down(group) or self.is_stuck(group)), None)

    def is_stuck(self, group: GroupStatus) -> bool:
        """Return whether members of `group` are missing longer than `FORMING_SECONDS`, without a pause."""
        since, until = group.formed_time, self.now if group.paused_time is None else group.paused_time
        return group.phase is GroupPhase.FORMING and since is not None and until - since > FORMING_SECONDS

    def with_problems(self, group: GroupStatus, text: str) -> str:
        """Return `text` with the problems of `group`."""
        return joined((text, *(one.message for one in self.problems if one.group in (None, group.index))))


def _conditions(view: _View) -> tuple[_Fact, ...]:
    deployment, groups = view.deployment, view.groups
    suspended = deployment.spec.suspend and all(group.phase in _GONE for group in groups)
    down = view.down
    failed = next((group for group in view.wanted if group.phase is GroupPhase.FAILED), None)
    return (
        (ConditionType.READY, *_readiness(view)),
        (ConditionType.ACCEPTED, *_acceptance(view)),
        (ConditionType.PROGRESSING, *_progress(view)),
        (ConditionType.DEGRADED, False, Reason.STEADY, "no group is down")
        if down is None
        else (ConditionType.DEGRADED, True, *_down(view, down)),
        (ConditionType.RECOVERY_EXHAUSTED, False, Reason.RECOVERY_AVAILABLE, "no recovery was given up")
        if failed is None
        else (
            ConditionType.RECOVERY_EXHAUSTED,
            True,
            Reason.RECOVERY_EXHAUSTED,
            exhausted_sentence(deployment, failed),
        ),
        (ConditionType.SUSPENDED, True, Reason.SUSPENDED, "nothing runs, because spec.suspend is true")
        if suspended
        else (
            ConditionType.SUSPENDED,
            False,
            Reason.SUSPENDING if deployment.spec.suspend else Reason.NOT_SUSPENDED,
            "groups are being stopped" if deployment.spec.suspend else "spec.suspend is false",
        ),
    )


def _acceptance(view: _View) -> tuple[bool | None, Reason, str]:
    refusal = view.refusal
    if refusal is None:
        return True, Reason.PLAN_ACCEPTED, "the specification fits the machines"
    if refusal.reason is not Reason.ACTION_FAILED:
        return False, refusal.reason, refusal.message
    # There is no result about the specification; the last one stays.
    known = view.previous.condition(ConditionType.ACCEPTED) if view.previous is not None else None
    if known is not None and known.observed_generation == view.deployment.metadata.generation:
        value = None if known.status is ConditionStatus.UNKNOWN else known.status is ConditionStatus.TRUE
        return value, known.reason, known.message
    return None, refusal.reason, refusal.message


def _progress(view: _View) -> tuple[bool, Reason, str]:
    if is_paused(view.deployment) and not view.deleting:
        return False, Reason.PAUSED, f"nothing is done while the annotation {PAUSED} is true"
    moving = next((group for group in view.groups if group.phase in _UNDER_WAY), None)
    stays = next((group for group in view.wanted if _stays(group)), None)
    reason, text = Reason.STEADY, "nothing is under way"
    if moving is not None:
        reason, text = _under_way(moving)
    elif stays is not None:
        reason, text = Reason.MOVE_BLOCKED, f"group {stays.index}: {_stays(stays)}"
    if not view.problems:
        return moving is not None, reason, text
    cause = next((one.reason for one in view.problems if one.reason is not Reason.ACTION_FAILED), Reason.ACTION_FAILED)
    if moving is None:
        return True, cause, joined(view.problems)
    others = [one for one in view.problems if one.group not in (None, moving.index)]
    return True, cause, joined((view.with_problems(moving, text), *others))


def _rolled_back(rollout: RolloutStatus) -> _Fact:
    if rollout.rejected is None:
        return ConditionType.ROLLED_BACK, False, Reason.NOT_ROLLED_BACK, "the specification was not given up"
    return ConditionType.ROLLED_BACK, True, Reason.ROLLED_BACK, rollback_sentence(rollout.rejected)


def rollback_sentence(rejected: RejectedStatus) -> str:
    """Return the reason why a specification was given up, and the remedy."""
    return (
        f"the specification was given up: {rejected.message}; groups go back to the last one that all of them answered "
        "with; correct that, then apply a changed specification to try again"
    )


def _readiness(view: _View) -> tuple[bool | None, Reason, str]:
    deployment, wanted, refusal = view.deployment, view.wanted, view.refusal
    replicas, ready = deployment.spec.replicas, view.ready
    if view.deleting:
        return False, Reason.TERMINATING, "the deployment is being deleted"
    if deployment.spec.suspend:
        return False, Reason.SUSPENDED, "spec.suspend is true"
    if replicas == 0:
        return False, Reason.SCALED_TO_ZERO, "spec.replicas is 0"
    current = revision(deployment)
    unplanned = refusal is not None and refusal.reason is not Reason.ACTION_FAILED
    if refusal is not None and unplanned and any(group.revision != current for group in wanted):
        return False, refusal.reason, refusal.message
    count = f"{ready} of {replicas} groups answer"
    if ready == replicas and view.unreachable is not None:
        return False, Reason.ENDPOINT_NOT_READY, f"{count}, {UNREACHED}{view.unreachable}"
    if ready == replicas:
        return True, Reason.ALL_GROUPS_READY, count
    waiting = next((group for group in wanted if group.phase is not GroupPhase.SERVING), None)
    if waiting is None:
        hidden = next((group for group in wanted if group.index in view.unobserved), None)
        if hidden is None:
            return False, Reason.GROUPS_NOT_READY, count
        return (
            None,
            Reason.ACTION_FAILED,
            f"{count}; " + view.with_problems(hidden, f"group {hidden.index} is not observed"),
        )
    detail = _down_sentence(waiting) if is_down(waiting) else _under_way(waiting)[1]
    return False, Reason.GROUPS_NOT_READY, f"{count}; {view.with_problems(waiting, detail)}"


def _deployment_phase(view: _View) -> DeploymentPhase:
    deployment, wanted = view.deployment, view.wanted
    if view.deleting:
        return DeploymentPhase.TERMINATING
    if not wanted and (deployment.spec.suspend or deployment.spec.replicas == 0):
        stopped = all(group.phase in _GONE for group in view.groups)
        return DeploymentPhase.SUSPENDED if stopped else DeploymentPhase.DRAINING
    phases = {group.phase for group in wanted}
    if wanted and phases == {GroupPhase.SERVING} and len(wanted) == deployment.spec.replicas:
        return DeploymentPhase.SERVING
    if view.down is not None:
        if view.ready:
            return DeploymentPhase.DEGRADED
        lost = GroupPhase.FAILED in phases or any(map(view.is_stuck, wanted))
        return DeploymentPhase.FAILED if lost else DeploymentPhase.RECOVERING
    if GroupPhase.UPDATING in phases:
        return DeploymentPhase.UPDATING
    under_way = phases & {GroupPhase.FORMING, GroupPhase.STARTING, GroupPhase.SERVING}
    return DeploymentPhase.STARTING if under_way else DeploymentPhase.PENDING


def _down(view: _View, group: GroupStatus) -> tuple[Reason, str]:
    if not view.is_stuck(group):
        return Reason.GROUP_DEAD, view.with_problems(group, _down_sentence(group))
    bound = format_duration(FORMING_SECONDS)
    text = f"group {group.index} has not all its members {bound} after incarnation {group.incarnation} was begun"
    return Reason.FORMING_FAILED, view.with_problems(group, text)


def _under_way(group: GroupStatus) -> tuple[Reason, str]:
    reason, what = _UNDER_WAY.get(group.phase, (Reason.PENDING, "it has not been formed"))
    head = next((member for member in group.members if member.rank == 0), None)
    if group.phase is GroupPhase.QUEUED:
        what = _queue_text(group)
    if group.phase is GroupPhase.UPDATING and group.move is not None:
        reason, what = Reason.GROUP_MOVING, f"it is being ended because {_cordoned(group.move)}"
    if group.phase in _ENDS and head is not None and head.phase is Phase.DRAINING and head.message:
        what = f"{what}; {head.message}"
    return reason, f"group {group.index}: {what}"


def _cordoned(move: MoveStatus) -> str:
    what = ("the node", "is") if len(move.nodes) == 1 else ("the nodes", "are")
    return f"{what[0]} {', '.join(move.nodes)} {what[1]} cordoned"


def _stays(group: GroupStatus) -> str:
    """Return the reason why a group stays on cordoned nodes; empty if it does not."""
    if group.phase is not GroupPhase.SERVING or group.move is None:
        return ""
    return f"{_cordoned(group.move)}, and the group stays: {group.move.blocked}"


def _queue_text(group: GroupStatus) -> str:
    """Return the state of a queued group with the message of its scheduler."""
    waiting, message = sum(not member.node for member in group.members), _queue_message(group)
    return f"{waiting} of {len(group.members)} members wait for nodes{f': {message}' if message else ''}"


def _queue_message(group: GroupStatus) -> str:
    return next((member.message for member in group.members if member.message and not member.node), "")


def _down_sentence(group: GroupStatus) -> str:
    if group.last_failure is None:
        return _under_way(group)[1]
    queue = f"; {_queue_text(group)}" if group.phase is GroupPhase.QUEUED else ""
    return f"group {group.index} is down after {death_sentence(group.last_failure)}{queue}"


def _condition(
    kind: ConditionType,
    value: bool | None,
    reason: Reason,
    message: str,
    generation: int,
    previous: DeploymentStatus | None,
    now: float,
) -> Condition:
    status = ConditionStatus.UNKNOWN if value is None else ConditionStatus.TRUE if value else ConditionStatus.FALSE
    known = previous.condition(kind) if previous else None
    return Condition(
        type=kind,
        status=status,
        observed_generation=generation,
        last_transition_time=known.last_transition_time if known and known.status is status else now,
        reason=reason,
        message=message,
    )


class EventType(StrEnum):
    """Event types of Kubernetes."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a deployment."""

    type: EventType
    reason: Reason
    message: str
    group: int | None = None
    """Affected group; None for the whole deployment."""


def events(previous: DeploymentStatus | None, new: DeploymentStatus) -> tuple[Event, ...]:
    """Return the events between `previous`, None before the first status, and `new`, in order of occurrence."""
    known = {group.index: group for group in previous.groups} if previous else {}
    found = [*_accepted(previous, new)]
    for group in new.groups:
        found += _group(known.get(group.index) or GroupStatus(index=group.index), group, new)
    present = {group.index for group in new.groups}
    for group in known.values():
        if group.index not in present and group.phase is not GroupPhase.STOPPED:
            found.append(Event(EventType.NORMAL, Reason.GROUP_STOPPED, "the group is stopped", group.index))
    return (*found, *_rollout(previous, new), *_endpoint(previous, new))


def _accepted(previous: DeploymentStatus | None, new: DeploymentStatus) -> Iterator[Event]:
    now = new.condition(ConditionType.ACCEPTED)
    before = previous.condition(ConditionType.ACCEPTED) if previous else None
    if now is None or (before and (before.status, before.message) == (now.status, now.message)):
        return
    kind = EventType.NORMAL if now.status is ConditionStatus.TRUE else EventType.WARNING
    yield Event(kind, now.reason, now.message)


def _endpoint(previous: DeploymentStatus | None, new: DeploymentStatus) -> Iterator[Event]:
    """Yield one event when users get no answer although all groups answer; the next one only after a recovery."""
    before = previous.condition(ConditionType.READY) if previous else None
    now = new.condition(ConditionType.READY)
    if now is not None and _fails(now) and not (before is not None and _fails(before)):
        yield Event(EventType.WARNING, Reason.ENDPOINT_NOT_READY, now.message)


def _fails(ready: Condition) -> bool:
    """Return whether a request through the endpoint failed; a request that was not sent yet is no failure."""
    return ready.reason is Reason.ENDPOINT_NOT_READY and not ready.message.endswith(UNTRIED)


def _rollout(previous: DeploymentStatus | None, new: DeploymentStatus) -> Iterator[Event]:
    before = previous.rollout if previous else RolloutStatus()
    rejected = new.rollout.rejected
    if rejected is not None and (before.rejected is None or before.rejected.revision != rejected.revision):
        yield Event(EventType.WARNING, Reason.ROLLED_BACK, rollback_sentence(rejected))
    if before.served and new.rollout.served != before.served:
        message = f"all {new.ready_replicas} groups were formed again and answer"
        yield Event(EventType.NORMAL, Reason.UPDATE_COMPLETED, message)


def _group(before: GroupStatus, now: GroupStatus, new: DeploymentStatus) -> Iterator[Event]:
    deaths = [failure for failure in now.history if _is_news(before, failure)]
    for failure in deaths:
        reason = Reason.GROUP_DEAD if (failure.level or 1) > 1 else Reason.ENGINE_DEAD
        yield Event(EventType.WARNING, reason, death_sentence(failure), now.index)
    moved = now.phase is not before.phase or now.incarnation != before.incarnation
    if now.phase is GroupPhase.RESTARTING:
        # An agent reports a death at once, and its cause when that is settled: the repair follows the cause.
        if undetermined(now) is None and (deaths or moved or undetermined(before) is not None):
            yield Event(EventType.NORMAL, Reason.ENGINE_RESTARTING, "the engine is restarted in place", now.index)
    elif moved or (now.phase is GroupPhase.QUEUED and _queue_message(now) != _queue_message(before)):
        yield from _phase_events(now, new)
    if _stays(now) not in ("", _stays(before)):
        yield Event(EventType.WARNING, Reason.MOVE_BLOCKED, _stays(now), now.index)
    known = {text for member in before.members for text in warnings(member)}
    for text in (text for member in now.members for text in warnings(member)):
        if text not in known:
            yield Event(EventType.WARNING, Reason.GPU_THROTTLED, text, now.index)
    if now.phase is GroupPhase.SERVING and _life(now) != (_life(before) if before.ready_time else None):
        yield _serving(now)


def warnings(member: MemberStatus) -> tuple[str, ...]:
    """Return the warnings of a member, with its rank and machine."""
    where = f"rank {member.rank}" + (f" on {member.node}" if member.node else "")
    return tuple(f"{where}: {text}" for text in member.warnings)


def undetermined(group: GroupStatus) -> str | None:
    """Return the first sign of a death whose cause is not settled yet; None without one."""
    if group.phase not in (GroupPhase.RESTARTING, GroupPhase.RECOVERING):
        return None
    if any(one.incarnation == group.incarnation and one.recover_seconds is None for one in group.history):
        return None
    return next((member.message for member in group.members if member.message), "")


def _is_news(before: GroupStatus, failure: FailureStatus) -> bool:
    known = next((known for known in before.history if same_death(known, failure)), None)
    return known is None or (failure.level or 1) > 1 >= (known.level or 1)


def _life(group: GroupStatus) -> tuple[int, int]:
    return group.incarnation, group.engine_generation


def _phase_events(now: GroupStatus, new: DeploymentStatus) -> Iterator[Event]:
    match now.phase:
        case GroupPhase.FORMING:
            message = f"incarnation {now.incarnation} is being formed"
            if now.restarts:
                message += f"; {len(now.restarts)} restart{'s' * (len(now.restarts) != 1)} used"
            yield Event(EventType.NORMAL, Reason.GROUP_FORMING, message, now.index)
        case GroupPhase.QUEUED:
            yield Event(EventType.NORMAL, Reason.GROUP_QUEUED, _queue_text(now), now.index)
        case GroupPhase.STARTING:
            message = f"all {len(now.members)} members of incarnation {now.incarnation} exist"
            yield Event(EventType.NORMAL, Reason.GROUP_STARTING, message, now.index)
        case GroupPhase.RECOVERING:
            waits = now.next_restart_time is not None and now.next_restart_time > (now.phase_time or 0.0)
            if waits and now.next_restart_time is not None:
                message = (
                    f"incarnation {now.incarnation} is ended; the next begins at {format_time(now.next_restart_time)}"
                )
                yield Event(EventType.NORMAL, Reason.RESTART_BACKOFF, message, now.index)
            else:
                message = f"incarnation {now.incarnation} is ended, another follows"
                yield Event(EventType.NORMAL, Reason.GROUP_RECOVERING, message, now.index)
        case GroupPhase.FAILED:
            condition = new.condition(ConditionType.RECOVERY_EXHAUSTED)
            message = condition.message if condition else ""
            if not message.startswith(f"group {now.index} "):
                # The condition names the first of several.
                message = "recovery was given up"
                message += f"; last: {death_sentence(now.last_failure)}" if now.last_failure else ""
            yield Event(EventType.WARNING, Reason.RECOVERY_EXHAUSTED, message, now.index)
        case GroupPhase.UPDATING if now.move is not None:
            message = f"incarnation {now.incarnation} is ended because {_cordoned(now.move)}; other nodes are free"
            yield Event(EventType.NORMAL, Reason.GROUP_MOVING, message, now.index)
        case GroupPhase.UPDATING:
            why = "the specification changed" if new.rollout.rejected is None else "the specification was given up"
            message = f"incarnation {now.incarnation} is ended because {why}"
            yield Event(EventType.NORMAL, Reason.UPDATE_STARTED, message, now.index)
        case GroupPhase.DRAINING:
            yield Event(EventType.NORMAL, Reason.GROUP_STOPPING, "the group is being stopped", now.index)
        case GroupPhase.SUSPENDED:
            yield Event(EventType.NORMAL, Reason.SUSPENDED, "the group is suspended", now.index)
        case GroupPhase.STOPPED:
            yield Event(EventType.NORMAL, Reason.GROUP_STOPPED, "the group is stopped", now.index)
        case _:
            return


def _serving(now: GroupStatus) -> Event:
    last = now.last_failure
    if last is not None and last.recover_seconds is not None and now.total_restarts:
        message = f"answers again, {last.recover_seconds:.1f} s after {last.cause}"
        return Event(EventType.NORMAL, Reason.GROUP_RECOVERED, message, now.index)
    message = f"engine generation {now.engine_generation} of incarnation {now.incarnation} answers"
    return Event(EventType.NORMAL, Reason.ENGINE_READY, message, now.index)
