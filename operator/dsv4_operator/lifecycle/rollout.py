"""Rollout of the groups of a deployment from one specification to another, and back. Pure.

A group is decided by one version of the deployment: as it is now, or with members as in the last specification that all
groups answered with (`RolloutStatus.served`). The version that groups are brought to is the present one until it is
rejected. A group that is not there yet stays what it is until its turn, and when it dies before, it comes back as it
was: a specification that nobody has tried costs no more groups than `spec.rollout.maxUnavailable`.

All that is needed to go on is in the kept status, so an interruption anywhere is harmless.
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
from dsv4_operator.lifecycle.decide import LOOK_SECONDS, Decision, Planner, decide
from dsv4_operator.lifecycle.observed import Observed
from dsv4_operator.lifecycle.status import death_sentence
from dsv4_operator.lifecycle.watch import ALIVE
from dsv4_operator.planning.accepted import accepted_text, read_accepted
from dsv4_operator.planning.revision import as_formed_from, formed_from, revision, revision_of, same_specification

Planners = Callable[[DSV4Deployment, int], Planner]
"""Makes the planner of one group, by its index, for one of `versions`."""

LISTEN_SECONDS = 0.25
"""Until the next look at a group that was not heard yet."""

_RUNS = ALIVE | {GroupPhase.RECOVERING}
"""The phases of a group that has something to lose; in any other it needs a new incarnation to do anything."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Decisions about all groups now."""

    decisions: tuple[Decision, ...]
    """One a group, in order."""
    rollout: RolloutStatus
    """To be kept with the groups' statuses."""


def versions(deployment: DSV4Deployment, known: DeploymentStatus) -> tuple[DSV4Deployment, ...]:
    """Return what groups may be formed from in the next turn: `deployment`, and what last served if it is another one.

    `deployment` is not among them once it was given up and no group has it any more.
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
    unheard: frozenset[int] = frozenset(),
    blind: frozenset[int] = frozenset(),
) -> Turn:
    """Return what to do about every group now.

    Args:
        deployment: the specification as it stands.
        observed: the members of every group, by its index; as many as are wanted or known.
        known: the status as it was last kept.
        planner: makes planners for `versions(deployment, known)`.
        now: Unix time.
        deleting: the deployment is being deleted.
        unheard: groups about which nothing can be said yet; they are left alone, and no group is ended for another
            specification meanwhile.
        blind: groups whose members cannot be observed now; the same holds for them.
    """
    groups = {group.index: group for group in known.groups}
    if known.removed_incarnation:
        # A number is never used twice, nor by a group that has the index of one that was removed.
        for index in set(range(len(observed))) - groups.keys():
            groups[index] = GroupStatus(index=index, fenced_below=known.removed_incarnation, phase_time=round(now, 3))
    served = _served(deployment, known.rollout)
    rollout = _still(known.rollout, deployment, served)

    def step(index: int, version: _Version) -> Decision:
        previous = groups.get(index)
        if index in blind:
            return Decision((), now + LOOK_SECONDS, previous or GroupStatus(index=index))
        if index in unheard and previous is not None:
            return Decision((), now + LISTEN_SECONDS, previous)
        plan = planner(version.deployment, index)
        try:
            return decide(
                version.deployment, observed[index], previous, plan, now, deleting=deleting, held=version.held
            )
        except Exception as error:
            # A defect that one group shows must not take supervision from the others.
            return Decision((), now + LOOK_SECONDS, previous or GroupStatus(index=index), error=error)

    # First as if it were nobody's turn: that says how the groups are at this moment.
    chosen = [_version(deployment, served, rollout, groups.get(index)) for index in range(len(observed))]
    decisions = [step(index, version) for index, version in enumerate(chosen)]
    if deleting or deployment.spec.suspend or is_paused(deployment) or unheard or blind:
        return Turn(tuple(decisions), rollout)

    wanted = [decision.status for decision in decisions[: deployment.spec.replicas]]
    rollout = _judged(rollout, deployment, served, wanted, now)
    target = _target(deployment, served, rollout)
    turns = _turns(wanted, revision(target), deployment.spec.rollout.max_unavailable, back=target is served)
    for index, group in enumerate(wanted):
        version = _version(deployment, served, rollout, group, turn=index in turns)
        if version == chosen[index]:
            continue
        changed = step(index, version)
        # What cannot be planned keeps no group from what it was.
        kept = changed.refusal is None or group.phase not in _RUNS
        decisions[index] = changed if kept else replace(decisions[index], refusal=changed.refusal)
    return Turn(tuple(decisions), rollout)


@dataclass(frozen=True, slots=True)
class _Version:
    """Version of the deployment that a group is decided by."""

    deployment: DSV4Deployment
    held: bool = False
    """It runs from another specification, which nobody knows any more, and stays so if it serves at this moment."""


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
    if at_once or group is None or group.phase not in _RUNS:
        return _Version(target)
    for version in (deployment, served):
        if version is not None and group.revision == revision(version):
            return _Version(version)
    return _Version(target, held=True)


def with_accepted(rollout: RolloutStatus, deployment: DSV4Deployment, groups: Sequence[GroupStatus]) -> RolloutStatus:
    """Return `rollout` with the last valid specification, for as long as a later one is refused.

    Its members are those of `deployment` once a group was formed from it: until then it may still be refused when it is
    planned.
    """
    known = read_accepted(rollout.accepted)
    formed = formed_from(deployment)
    current = revision_of(formed)
    if known is not None and known.formed != formed and all(group.revision != current for group in groups):
        formed = known.formed
    return rollout.model_copy(update={"accepted": accepted_text(deployment, formed)})


def _served(deployment: DSV4Deployment, rollout: RolloutStatus) -> DSV4Deployment | None:
    """Return the version that all groups last answered with; None if it is the present one, or not known.

    Before all of them have answered once, it is the version that groups were last formed from.
    """
    accepted = None if rollout.served else read_accepted(rollout.accepted)
    formed = rollout.served if accepted is None else accepted.formed
    if not formed or revision_of(formed) == revision(deployment):
        return None
    return as_formed_from(deployment, formed)


def _target(deployment: DSV4Deployment, served: DSV4Deployment | None, rollout: RolloutStatus) -> DSV4Deployment:
    """Return the version that groups are brought to."""
    return served if rollout.rejected is not None and served is not None else deployment


def _still(rollout: RolloutStatus, deployment: DSV4Deployment, served: DSV4Deployment | None) -> RolloutStatus:
    """Return `rollout` without a rejection that the specification left behind, or that there is no way back from."""
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
    """Return `rollout` after what the groups show of the present specification."""
    formed = formed_from(deployment)
    current = revision_of(formed)
    if wanted and all(group.phase is GroupPhase.SERVING and group.revision == current for group in wanted):
        return RolloutStatus(served=formed, accepted=rollout.accepted)
    if rollout.rejected is not None or served is None or not deployment.spec.rollout.auto_rollback:
        return rollout
    if same_specification(formed, rollout.served):
        # Only a restart was asked for: what failed now is what served before.
        return rollout
    deadline = deployment.spec.rollout.progress_deadline
    why = next((text for group in wanted if (text := _failed(group, current, deadline, now))), None)
    if why is None:
        return rollout
    rejected = RejectedStatus(revision=current, time=round(now, 3), message=why)
    return rollout.model_copy(update={"rejected": rejected})


def _failed(group: GroupStatus, current: str, deadline: float, now: float) -> str | None:
    """Return why the present specification, of fingerprint `current`, does not work in `group`; None while it may."""
    if group.revision != current:
        return None
    death = group.last_failure
    told = f"group {group.index}: {death_sentence(death)}" if death is not None else f"group {group.index}"
    if group.phase is GroupPhase.FAILED:
        return f"recovery was given up in {told}"
    if group.served_revision == current or group.phase not in _RUNS:
        return None
    if death is not None and death.incarnation == group.incarnation and death.recover_seconds is None:
        if death.cause.deterministic:
            return told
    elif death is None or death.incarnation < group.incarnation:
        told = f"group {group.index}"
    if group.revision_time is not None and now - group.revision_time > deadline:
        return f"{told} did not answer within {format_duration(deadline)} (spec.rollout.progressDeadline)"
    return None


def _turns(wanted: Sequence[GroupStatus], target: str, limit: int, *, back: bool) -> frozenset[int]:
    """Return the groups that may leave what they run from for another version.

    Those that do not answer come first, since they lose nothing; among the others the highest index, as in a
    StatefulSet.

    Args:
        wanted: the groups as they are at this moment.
        target: the fingerprint of the version that they go to.
        limit: groups that may be down.
        back: the version is known to serve, so no group that does not answer has to wait for the others.
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


def _answers(group: GroupStatus) -> bool:
    """Tell whether the group answers for all that is known; one whose agents were not heard lately may not."""
    silent = any(member.silent_since is not None for member in group.members)
    return group.phase is GroupPhase.SERVING and not silent
