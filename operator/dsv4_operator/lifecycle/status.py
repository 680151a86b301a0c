"""The deployment's status, made from its groups'."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    Reason,
    RejectedStatus,
    RolloutStatus,
)
from dsv4_operator.api.annotations import PAUSED, is_paused
from dsv4_operator.api.values import format_duration
from dsv4_operator.lifecycle.canary import UNREACHED
from dsv4_operator.lifecycle.problems import Problem, joined
from dsv4_operator.lifecycle.watch import ALIVE
from dsv4_operator.planning import PlanRefused, revision
from dsv4_runtime.contract import Phase

_UNDER_WAY = {
    GroupPhase.FORMING: (Reason.GROUP_FORMING, "its members are being created"),
    GroupPhase.STARTING: (Reason.GROUP_STARTING, "its engine is starting"),
    GroupPhase.RESTARTING: (Reason.ENGINE_RESTARTING, "its engine is being restarted in place"),
    GroupPhase.RECOVERING: (Reason.GROUP_RECOVERING, "it died and is being formed again"),
    GroupPhase.UPDATING: (Reason.UPDATE_STARTED, "it is being ended because the specification changed"),
    GroupPhase.DRAINING: (Reason.GROUP_STOPPING, "it is being stopped"),
}
_ENDS = frozenset({GroupPhase.UPDATING, GroupPhase.DRAINING})
_GONE = frozenset({GroupPhase.SUSPENDED, GroupPhase.STOPPED})

FORMING_SECONDS = 300.0
"""From the number of an incarnation to its last member; a group that takes longer is reported as down.

It uses no restart: the same incarnation is tried again until the API server takes its members.
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
    blind: frozenset[int] = frozenset(),
    unreachable: str | None = None,
) -> DeploymentStatus:
    """Return the status of `deployment`.

    Args:
        deployment: the specification that the groups were decided by.
        groups: the statuses of its groups, those no longer wanted included.
        refusal: why a group could not be planned, if one could not.
        endpoint: base URL of the API, where known.
        dashboard: URL of the Ray dashboard, where known.
        previous: the status as it was last kept; gives the times of conditions that stay as they are.
        now: Unix time.
        deleting: the deployment is being deleted.
        rollout: which specification served, and which was given up; None: as in `previous`.
        refused_generation: `metadata.generation` of the present specification if it breaks a rule (`refusal`), so that
            `deployment` has the last valid one; None: it breaks none.
        problems: parts of the reconcile that fail.
        blind: indices of groups whose members cannot be observed.
        unreachable: why no request through the endpoint is answered, although groups answer; None: it is, or no backend
            tries it.
    """
    if rollout is None:
        rollout = previous.rollout if previous is not None else RolloutStatus()
    ordered = tuple(sorted(groups, key=lambda group: group.index))
    ordered, removed = _without_removed(ordered, deployment, deleting=deleting)
    wanted = () if deleting or deployment.spec.suspend else ordered[: deployment.spec.replicas]
    expected = [group.expected_ready_seconds for group in wanted if group.expected_ready_seconds is not None]
    view = _View(deployment, ordered, wanted, refusal, tuple(problems), blind, unreachable, now, previous, deleting)
    facts = (*_conditions(view), _rolled_back(rollout))
    current = revision(deployment) if refused_generation is None else None
    generation = deployment.metadata.generation if refused_generation is None else refused_generation
    return DeploymentStatus(
        conditions=tuple(_condition(*fact, generation, previous, now) for fact in facts),
        observed_generation=generation,
        phase=_phase(view),
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


def _without_removed(
    groups: tuple[GroupStatus, ...], deployment: DSV4Deployment, *, deleting: bool
) -> tuple[tuple[GroupStatus, ...], int]:
    """Return the groups without those that ended because fewer are wanted, and the highest incarnation of these."""
    kept = len(groups)
    while kept > deployment.spec.replicas and groups[kept - 1].phase is GroupPhase.STOPPED and not deleting:
        kept -= 1
    removed = (max(group.incarnation, group.fenced_below) for group in groups[kept:])
    return groups[:kept], max(removed, default=0)


def refused_status(previous: DeploymentStatus, why: str, generation: int, now: float) -> DeploymentStatus:
    """Return `previous` for a specification that breaks a rule, of a deployment whose groups cannot be supervised.

    They go on running, if there are any, but nothing is known of them.

    Args:
        previous: the status as it was last kept.
        why: what is wrong and how to mend it.
        generation: the deployment's `metadata.generation`.
        now: Unix time.
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
    """Tell whether the group died and does not serve again yet."""
    if group.phase in (GroupPhase.RESTARTING, GroupPhase.RECOVERING, GroupPhase.FAILED):
        return True
    unrecovered = group.last_failure is not None and group.last_failure.recover_seconds is None
    return unrecovered and group.phase in (GroupPhase.FORMING, GroupPhase.STARTING)


def exhausted_sentence(deployment: DSV4Deployment, group: GroupStatus) -> str:
    """Return why recovery of `group` was given up, and what to do."""
    recovery = deployment.spec.recovery
    last = group.last_failure
    if last is not None and last.deterministic and len(group.restarts) < recovery.max_restarts:
        why = f"group {group.index} died of {last.cause} twice in a row, which trying again cannot mend"
    else:
        why = (
            f"group {group.index} used up its {recovery.max_restarts} restarts "
            f"within {format_duration(recovery.window)} (spec.recovery.maxRestarts)"
        )
    detail = f"; last: {death_sentence(last)}" if last else ""
    return f"{why}{detail}; mend that, then apply a changed specification (or `dsv4 down` and `dsv4 up`) to try again"


def given_up(deployment: DSV4Deployment, status: DeploymentStatus, group: int) -> str | None:
    """Return why `group` will not come back by itself, for its clients; None if it may."""
    known = next((one for one in status.groups if one.index == group), None)
    return exhausted_sentence(deployment, known) if known is not None and known.phase is GroupPhase.FAILED else None


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
    blind: frozenset[int]
    unreachable: str | None
    now: float
    previous: DeploymentStatus | None
    deleting: bool

    @property
    def ready(self) -> int:
        """Return how many wanted groups are observed to serve."""
        return sum(group.phase is GroupPhase.SERVING for group in self.wanted if group.index not in self.blind)

    @property
    def down(self) -> GroupStatus | None:
        """Return the first wanted group that is down."""
        return next((group for group in self.wanted if is_down(group) or self.is_stuck(group)), None)

    def is_stuck(self, group: GroupStatus) -> bool:
        """Return whether members of `group` should exist for long and do not."""
        since = group.formed_time
        return group.phase is GroupPhase.FORMING and since is not None and self.now - since > FORMING_SECONDS

    def told(self, group: GroupStatus, text: str) -> str:
        """Return `text` with what fails of `group`."""
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
        (ConditionType.SUSPENDED, True, Reason.SUSPENDED, "nothing runs, as spec.suspend asks")
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
    # Nothing was found out about the specification: what is known of it stays.
    known = view.previous.condition(ConditionType.ACCEPTED) if view.previous is not None else None
    if known is not None and known.observed_generation == view.deployment.metadata.generation:
        value = None if known.status is ConditionStatus.UNKNOWN else known.status is ConditionStatus.TRUE
        return value, known.reason, known.message
    return None, refusal.reason, refusal.message


def _progress(view: _View) -> tuple[bool, Reason, str]:
    if is_paused(view.deployment) and not view.deleting:
        return False, Reason.PAUSED, f"nothing is done while the annotation {PAUSED} is true"
    moving = next((group for group in view.groups if group.phase in _UNDER_WAY), None)
    reason, text = _under_way(moving) if moving is not None else (Reason.STEADY, "nothing is under way")
    if not view.problems:
        return moving is not None, reason, text
    cause = next((one.reason for one in view.problems if one.reason is not Reason.ACTION_FAILED), Reason.ACTION_FAILED)
    if moving is None:
        return True, cause, joined(view.problems)
    others = [one for one in view.problems if one.group not in (None, moving.index)]
    return True, cause, joined((view.told(moving, text), *others))


def _rolled_back(rollout: RolloutStatus) -> _Fact:
    if rollout.rejected is None:
        return ConditionType.ROLLED_BACK, False, Reason.NOT_ROLLED_BACK, "the specification was not given up"
    return ConditionType.ROLLED_BACK, True, Reason.ROLLED_BACK, rollback_sentence(rollout.rejected)


def rollback_sentence(rejected: RejectedStatus) -> str:
    """Return why a specification was given up, and what to do."""
    return (
        f"the specification was given up: {rejected.message}; groups go back to the last one that all of them answered "
        "with; mend that, then apply a changed specification to try again"
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
        hidden = next((group for group in wanted if group.index in view.blind), None)
        if hidden is None:
            return False, Reason.GROUPS_NOT_READY, count
        return None, Reason.ACTION_FAILED, f"{count}; " + view.told(hidden, f"group {hidden.index} is not observed")
    detail = _down_sentence(waiting) if is_down(waiting) else _under_way(waiting)[1]
    return False, Reason.GROUPS_NOT_READY, f"{count}; {view.told(waiting, detail)}"


def _phase(view: _View) -> DeploymentPhase:
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
    """Return why `group` is down."""
    if not view.is_stuck(group):
        return Reason.GROUP_DEAD, view.told(group, _down_sentence(group))
    bound = format_duration(FORMING_SECONDS)
    text = f"group {group.index} has not all its members {bound} after incarnation {group.incarnation} was begun"
    return Reason.FORMING_FAILED, view.told(group, text)


def _under_way(group: GroupStatus) -> tuple[Reason, str]:
    reason, what = _UNDER_WAY.get(group.phase, (Reason.PENDING, "it has not been formed"))
    head = next((member for member in group.members if member.rank == 0), None)
    if group.phase in _ENDS and head is not None and head.phase is Phase.DRAINING and head.message:
        what = f"{what}; {head.message}"
    return reason, f"group {group.index}: {what}"


def _down_sentence(group: GroupStatus) -> str:
    if group.last_failure is None:
        return _under_way(group)[1]
    return f"group {group.index} is down after {death_sentence(group.last_failure)}"


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
