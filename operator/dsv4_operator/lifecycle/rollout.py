"""Rollout of the groups of a deployment from one specification to another, and rollback. Pure.

Each group is decided with one version of the deployment: the present specification, or that of the last specification
with which all groups served (`RolloutStatus.served`). The target version is the present one until it is rejected.
Before its turn, a group keeps its version and, if it dies, recovers with that version: an untested specification
affects at most `spec.rollout.maxUnavailable` groups.

The saved status contains the complete state, so an interruption at any point does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dsv4_operator.api import (
    DeploymentStatus,
    DSV4Deployment,
    GroupPhase,
    GroupStatus,
    RejectedStatus,
    RolloutStatus,
    RolloutStrategy,
)
from dsv4_operator.api.deployment import is_paused
from dsv4_operator.api.values import format_duration
from dsv4_operator.lifecycle.decide import POLL_SECONDS, Decision, Planner, decide
from dsv4_operator.lifecycle.observed import Observed
from dsv4_operator.lifecycle.status import death_sentence
from dsv4_operator.lifecycle.watch import ALIVE
from dsv4_operator.planning.revision import (
    accepted_text,
    as_formed_from,
    formed_from,
    read_accepted,
    revision,
    revision_of,
    same_specification,
)

Planners = Callable[[DSV4Deployment, int], Planner]
"""Returns the planner of one group, by its index, for one of `versions`."""

LISTEN_SECONDS = 0.25
"""Interval between decisions about a group whose agents have not reported yet."""

_RUNS = ALIVE | {GroupPhase.RECOVERING}
"""Phases of a group that has running members or recovers; in any other phase it needs a new incarnation."""


@dataclass(frozen=True, slots=True)
class GroupDecisions:
    """Decisions about all groups at one moment."""

    decisions: tuple[Decision, ...]
    """One decision per group, in order."""
    rollout: RolloutStatus
    """To be saved with the statuses of the groups."""


def versions(deployment: DSV4Deployment, known: DeploymentStatus) -> tuple[DSV4Deployment, ...]:
    """Return the versions that groups may be formed from: `deployment`, and the served version if it differs.

    `deployment` is omitted after it was given up and no group uses it.
    """
    served = _served(deployment, known.rollout)
    if served is None:
        return (deployment,)
    rejected = _still(known.rollout, deployment, served).rejected
    if rejected is not None and all(group.revision != rejected.revision for group in known.groups):
        return (served,)
    return deployment, served


def decide_groups(
    deployment: DSV4Deployment,
    observed: Sequence[Observed],
    known: DeploymentStatus,
    planner: Planners,
    now: float,
    *,
    deleting: bool = False,
    unreported: frozenset[int] = frozenset(),
    unobserved: frozenset[int] = frozenset(),
) -> GroupDecisions:
    """Return the decisions about all groups.

    Args:
        deployment: the present specification.
        observed: the members of every group, by its index; as many as are wanted or known.
        known: the last saved status.
        planner: returns planners for `versions(deployment, known)`.
        now: Unix time.
        deleting: the deployment is being deleted.
        unreported: groups without a report since the start of this process; they stay unchanged, and meanwhile no
            group is ended for another specification.
        unobserved: groups whose members cannot be observed now; treated like `unreported`.
    """
    groups = {group.index: group for group in known.groups}
    if known.removed_incarnation:
        # A number is never used twice, also not by a new group with the index of a removed one.
        for index in set(range(len(observed))) - groups.keys():
            groups[index] = GroupStatus(index=index, fenced_below=known.removed_incarnation, phase_time=round(now, 3))
    served = _served(deployment, known.rollout)
    rollout = _still(known.rollout, deployment, served)

    def step(index: int, version: _Version, *, moves: bool | None = None) -> Decision:
        previous = groups.get(index)
        if index in unobserved:
            return Decision((), now + POLL_SECONDS, previous or GroupStatus(index=index))
        if index in unreported and previous is not None:
            return Decision((), now + LISTEN_SECONDS, previous)
        plan = planner(version.deployment, index)
        try:
            return decide(
                version.deployment,
                observed[index],
                previous,
                plan,
                now,
                deleting=deleting,
                held=version.held,
                moves=moves,
            )
        except Exception as error:
            # A defect in one group must not stop the supervision of the others.
            return Decision((), now + POLL_SECONDS, previous or GroupStatus(index=index), error=error)

    # First without any turn: this gives the present state of the groups.
    chosen = [_version(deployment, served, rollout, groups.get(index)) for index in range(len(observed))]
    decisions = [step(index, version) for index, version in enumerate(chosen)]
    if deleting or deployment.spec.suspend or is_paused(deployment) or unreported or unobserved:
        return GroupDecisions(tuple(decisions), rollout)

    wanted = [decision.status for decision in decisions[: deployment.spec.replicas]]
    rollout = _judged(rollout, deployment, served, wanted, now)
    target = _target(deployment, served, rollout)
    turns = _turns(wanted, revision(target), deployment.spec.rollout.max_unavailable, back=target is served)
    for index, group in enumerate(wanted):
        version = _version(deployment, served, rollout, group, turn=index in turns)
        if version == chosen[index]:
            continue
        changed = step(index, version)
        # A refused plan leaves a running group unchanged.
        kept = changed.refusal is None or group.phase not in _RUNS
        decisions[index] = changed if kept else replace(decisions[index], refusal=changed.refusal)
    for index in _movers(decisions[: len(wanted)]):
        others = [decision.status for decision in decisions[: len(wanted)] if decision.status.index != index]
        alone = all(map(_answers, others)) and not any(decision.completed for decision in decisions)
        moved = step(index, chosen[index], moves=alone)
        decisions[index] = replace(moved, refusal=decisions[index].refusal)
    return GroupDecisions(tuple(decisions), rollout)


@dataclass(frozen=True, slots=True)
class _Version:
    """Version of the deployment used for a group."""

    deployment: DSV4Deployment
    held: bool = False
    """The group runs from an unknown specification and keeps it while it serves."""


def _version(
    deployment: DSV4Deployment,
    served: DSV4Deployment | None,
    rollout: RolloutStatus,
    group: GroupStatus | None,
    *,
    turn: bool = False,
) -> _Version:
    target = _target(deployment, served, rollout)
    at_once = turn or deployment.spec.rollout.strategy is RolloutStrategy.RECREATE
    # A group that moves is formed again from its version: the plan of another one may be refused.
    moves = group is not None and group.phase is GroupPhase.UPDATING and group.move is not None
    if group is None or (not moves and (at_once or group.phase not in _RUNS)):
        return _Version(target)
    for version in (deployment, served):
        if version is not None and group.revision == revision(version):
            return _Version(version)
    return _Version(target, held=not moves)


def with_accepted(rollout: RolloutStatus, deployment: DSV4Deployment, groups: Sequence[GroupStatus]) -> RolloutStatus:
    """Return `rollout` with the last valid specification, for use while a later one is refused.

    Its member part is that of `deployment` once a group was formed from it; until then its plan may still be refused.
    """
    known = read_accepted(rollout.accepted)
    formed = formed_from(deployment)
    current = revision_of(formed)
    if known is not None and known.formed != formed and all(group.revision != current for group in groups):
        formed = known.formed
    return rollout.model_copy(update={"accepted": accepted_text(deployment, formed)})


def _served(deployment: DSV4Deployment, rollout: RolloutStatus) -> DSV4Deployment | None:
    """Return the version with which all groups last served; None if it is the present one, or unknown.

    Before all groups have served once, it is the version from which groups were last formed.
    """
    accepted = None if rollout.served else read_accepted(rollout.accepted)
    formed = rollout.served if accepted is None else accepted.formed
    if not formed or revision_of(formed) == revision(deployment):
        return None
    return as_formed_from(deployment, formed)


def _target(deployment: DSV4Deployment, served: DSV4Deployment | None, rollout: RolloutStatus) -> DSV4Deployment:
    return served if rollout.rejected is not None and served is not None else deployment


def _still(rollout: RolloutStatus, deployment: DSV4Deployment, served: DSV4Deployment | None) -> RolloutStatus:
    """Return `rollout` without a rejection that is obsolete, or from which no rollback is possible."""
    rejected = rollout.rejected
    if rejected is None or (served is not None and rejected.revision == revision(deployment)):
        return rollout
    return rollout.model_copy(update={"rejected": None})


def _judged(
    rollout: RolloutStatus,
    deployment: DSV4Deployment,
    served: DSV4Deployment | None,
    wanted: Sequence[GroupStatus],
    now: float,
) -> RolloutStatus:
    """Return `rollout` updated with the results of the present specification."""
    formed = formed_from(deployment)
    current = revision_of(formed)
    if wanted and all(group.phase is GroupPhase.SERVING and group.revision == current for group in wanted):
        return RolloutStatus(served=formed, accepted=rollout.accepted)
    if rollout.rejected is not None or served is None or not deployment.spec.rollout.auto_rollback:
        return rollout
    if same_specification(formed, rollout.served):
        # Only a restart was requested: the same specification served before.
        return rollout
    deadline = deployment.spec.rollout.progress_deadline
    why = next((text for group in wanted if (text := _failed(group, current, deadline, now))), None)
    if why is None:
        return rollout
    rejected = RejectedStatus(revision=current, time=round(now, 3), message=why)
    return rollout.model_copy(update={"rejected": rejected})


def _failed(group: GroupStatus, current: str, deadline: float, now: float) -> str | None:
    """Return the reason why the specification with fingerprint `current` failed in `group`; None if not."""
    if group.revision != current:
        return None
    death = group.last_failure
    subject = f"group {group.index}: {death_sentence(death)}" if death is not None else f"group {group.index}"
    if group.phase is GroupPhase.FAILED:
        return f"recovery was given up in {subject}"
    if group.served_revision == current or group.phase not in _RUNS:
        return None
    if death is not None and death.incarnation == group.incarnation and death.recover_seconds is None:
        if death.cause.deterministic:
            return subject
    elif death is None or death.incarnation < group.incarnation:
        subject = f"group {group.index}"
    late = group.revision_time is not None and now - group.revision_time > deadline
    if late and group.phase is not GroupPhase.QUEUED:
        return f"{subject} did not answer within {format_duration(deadline)} (spec.rollout.progressDeadline)"
    return None


def _turns(wanted: Sequence[GroupStatus], target: str, limit: int, *, back: bool) -> frozenset[int]:
    """Return the groups that may change to the target version now.

    Groups that do not serve come first, since they lose nothing; then the highest index, as in a StatefulSet.

    Args:
        wanted: the present statuses of the groups.
        target: the fingerprint of the target version.
        limit: number of groups that may be down.
        back: the target version has served before, so groups that do not serve need not wait for the others.
    """
    outdated = [group for group in wanted if group.phase in _RUNS and group.revision != target]
    down = {group.index for group in wanted if not _answers(group)}
    trying = len(down - {group.index for group in outdated})
    turns: set[int] = set()
    for group in sorted(outdated, key=lambda group: (group.phase is GroupPhase.SERVING, -group.index)):
        if group.phase is GroupPhase.SERVING:
            if len(down - {group.index}) >= limit:
                continue
            down.add(group.index)
        elif trying >= limit and not back:
            continue
        trying += 1
        turns.add(group.index)
    return frozenset(turns)


def _movers(decisions: Sequence[Decision]) -> list[int]:
    """Return the groups that serve on cordoned nodes, with the highest index first, as in `_turns`."""
    statuses = (decision.status for decision in reversed(decisions))
    return [group.index for group in statuses if group.phase is GroupPhase.SERVING and group.move is not None]


def _answers(group: GroupStatus) -> bool:
    """Return whether the group serves and all of its agents have reported recently."""
    silent = any(member.silent_since is not None for member in group.members)
    return group.phase is GroupPhase.SERVING and not silent
