"""The deployment's status, made from its groups'."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        unreachable: why no request through the endpoint is answered, although groups answer; None: it is, or no backend
            tries it.
    """
    if rollout is None:
        rollout = previous.rollout if previous is not None else RolloutStatus()
    ordered = tuple(sorted(groups, key=lambda group: group.index))
    wanted = () if deleting or deployment.spec.suspend else ordered[: deployment.spec.replicas]
    expected = [group.expected_ready_seconds for group in wanted if group.expected_ready_seconds is not None]
    facts = (*_conditions(deployment, ordered, wanted, refusal, deleting, unreachable), _rolled_back(rollout))
    current = revision(deployment)
    return DeploymentStatus(
        conditions=tuple(_condition(*fact, deployment.metadata.generation, previous, now) for fact in facts),
        observed_generation=deployment.metadata.generation,
        phase=_phase(deployment, ordered, wanted, deleting),
        replicas=sum(group.phase not in _GONE for group in ordered),
        ready_replicas=_ready(wanted),
        updated_replicas=sum(group.revision == current and group.phase in ALIVE for group in wanted),
        endpoint=endpoint,
        ray_dashboard=dashboard,
        expected_ready_seconds=max(expected, default=None),
        rollout=rollout,
        groups=ordered,
    )


def refused_status(previous: DeploymentStatus, why: str, generation: int, now: float) -> DeploymentStatus:
    """Return `previous` for a specification that breaks a rule: what runs goes on running, and nothing else is done.

    Args:
        previous: the status as it was last kept.
        why: what is wrong and how to mend it.
        generation: the deployment's `metadata.generation`.
        now: Unix time.
    """
    facts: list[_Fact] = [(ConditionType.ACCEPTED, False, Reason.SPEC_INVALID, why)]
    if not previous.ready_replicas:
        facts.append((ConditionType.READY, False, Reason.SPEC_INVALID, why))
    changed = {fact[0]: _condition(*fact, generation, previous, now) for fact in facts}
    kept = tuple(condition for condition in previous.conditions if condition.type not in changed)
    return previous.model_copy(
        update={"conditions": (*changed.values(), *kept), "observed_generation": generation},
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


_Fact = tuple[ConditionType, bool, Reason, str]


def _conditions(
    deployment: DSV4Deployment,
    groups: Sequence[GroupStatus],
    wanted: Sequence[GroupStatus],
    refusal: PlanRefused | None,
    deleting: bool,
    unreachable: str | None,
) -> tuple[_Fact, ...]:
    suspended = deployment.spec.suspend and all(group.phase in _GONE for group in groups)
    down = next(filter(is_down, wanted), None)
    failed = next((group for group in wanted if group.phase is GroupPhase.FAILED), None)
    moving = next((group for group in groups if group.phase in _UNDER_WAY), None)
    return (
        (ConditionType.READY, *_readiness(deployment, wanted, refusal, deleting, unreachable)),
        (ConditionType.ACCEPTED, True, Reason.PLAN_ACCEPTED, "the specification fits the machines")
        if refusal is None
        else (ConditionType.ACCEPTED, False, refusal.reason, refusal.message),
        (ConditionType.PROGRESSING, False, Reason.PAUSED, f"nothing is done while the annotation {PAUSED} is true")
        if is_paused(deployment) and not deleting
        else (ConditionType.PROGRESSING, False, Reason.STEADY, "nothing is under way")
        if moving is None
        else (ConditionType.PROGRESSING, True, *_under_way(moving)),
        (ConditionType.DEGRADED, False, Reason.STEADY, "no group is down")
        if down is None
        else (ConditionType.DEGRADED, True, Reason.GROUP_DEAD, _down_sentence(down)),
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


def _readiness(
    deployment: DSV4Deployment,
    wanted: Sequence[GroupStatus],
    refusal: PlanRefused | None,
    deleting: bool,
    unreachable: str | None,
) -> tuple[bool, Reason, str]:
    replicas, ready = deployment.spec.replicas, _ready(wanted)
    if deleting:
        return False, Reason.TERMINATING, "the deployment is being deleted"
    if deployment.spec.suspend:
        return False, Reason.SUSPENDED, "spec.suspend is true"
    if replicas == 0:
        return False, Reason.SCALED_TO_ZERO, "spec.replicas is 0"
    current = revision(deployment)
    if refusal is not None and any(group.revision != current for group in wanted):
        return False, refusal.reason, refusal.message
    if ready == replicas and unreachable is not None:
        return (
            False,
            Reason.ENDPOINT_NOT_READY,
            f"{ready} of {replicas} groups answer, {UNREACHED}{unreachable}",
        )
    if ready == replicas:
        return True, Reason.ALL_GROUPS_READY, f"{ready} of {replicas} groups answer"
    waiting = next((group for group in wanted if group.phase is not GroupPhase.SERVING), None)
    detail = ""
    if waiting is not None:
        detail = f"; {_down_sentence(waiting) if is_down(waiting) else _under_way(waiting)[1]}"
    return False, Reason.GROUPS_NOT_READY, f"{ready} of {replicas} groups answer{detail}"


def _phase(
    deployment: DSV4Deployment, groups: Sequence[GroupStatus], wanted: Sequence[GroupStatus], deleting: bool
) -> DeploymentPhase:
    if deleting:
        return DeploymentPhase.TERMINATING
    if not wanted and (deployment.spec.suspend or deployment.spec.replicas == 0):
        stopped = all(group.phase in _GONE for group in groups)
        return DeploymentPhase.SUSPENDED if stopped else DeploymentPhase.DRAINING
    phases = {group.phase for group in wanted}
    if wanted and phases == {GroupPhase.SERVING} and len(wanted) == deployment.spec.replicas:
        return DeploymentPhase.SERVING
    if any(map(is_down, wanted)):
        if _ready(wanted):
            return DeploymentPhase.DEGRADED
        return DeploymentPhase.FAILED if GroupPhase.FAILED in phases else DeploymentPhase.RECOVERING
    if GroupPhase.UPDATING in phases:
        return DeploymentPhase.UPDATING
    under_way = phases & {GroupPhase.FORMING, GroupPhase.STARTING, GroupPhase.SERVING}
    return DeploymentPhase.STARTING if under_way else DeploymentPhase.PENDING


def _ready(groups: Iterable[GroupStatus]) -> int:
    return sum(group.phase is GroupPhase.SERVING for group in groups)


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
    value: bool,
    reason: Reason,
    message: str,
    generation: int,
    previous: DeploymentStatus | None,
    now: float,
) -> Condition:
    status = ConditionStatus.TRUE if value else ConditionStatus.FALSE
    known = previous.condition(kind) if previous else None
    return Condition(
        type=kind,
        status=status,
        observed_generation=generation,
        last_transition_time=known.last_transition_time if known and known.status is status else now,
        reason=reason,
        message=message,
    )
