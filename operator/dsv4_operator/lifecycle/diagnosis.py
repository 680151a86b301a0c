"""Diagnosis of a dead incarnation, with the first death."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsv4_operator.api import GroupPhase, GroupStatus, MemberStatus
from dsv4_operator.lifecycle.observed import Observed, ObservedMember
from dsv4_operator.lifecycle.watch import agent_status
from dsv4_runtime.contract import Cause, Failure, Health, Phase
from dsv4_runtime.contract.recovery import HEARD_SECONDS, is_link_lost, link_message

SILENT_SECONDS = 12.0
"""A member that had answered and is silent for this long is lost, unless another member receives its heartbeats.

Longer than the time in which members detect a lost member (`HealthPolicy.link_lost`) and report it. Members send
heartbeats every 0.5 s, and 8 s without a packet must not end a working group.
"""
BOOT_SECONDS = 90.0
"""Timeout of an agent that has not answered yet: its container or interpreter may start slowly."""
GONE_SECONDS = 3.0
"""Timeout of a member that was observed and has disappeared; listings may lag behind."""

_NO_CULPRIT = frozenset({Cause.LINK_LOST, Cause.WEIGHTS_CORRUPT})
"""Causes that a member reports without a culprit only if no single member is at fault."""
_UNASKED = frozenset({Phase.DRAINING, Phase.STOPPED})


@dataclass(frozen=True, slots=True)
class _MemberFailure:
    """Failure reported by or about one member."""

    rank: int
    failure: Failure


def diagnose(group: GroupStatus, observed: Observed, now: float) -> Failure | None:
    """Return the failure that ended the group's present incarnation; None while it may live.

    A report of the member takes precedence over the fact of its end. Of several members the earliest death wins. If it
    names another dead member as the culprit, that member's report wins, unless it names a different culprit. `group`
    must be the status after `watch` with the same arguments.
    """
    found = {one.rank: one for one in _member_failures(group, observed, now)}
    if not found:
        return None
    # The others die of it, possibly before its own end.
    placement = next((one for one in found.values() if one.failure.cause is Cause.PLACEMENT_LOST), None)
    if placement is not None:
        return placement.failure
    first = min(found.values(), key=lambda one: (one.failure.time, one.rank))
    blamed = first.failure.culprit_rank
    if blamed in found and found[blamed].failure.culprit_rank == blamed:
        return found[blamed].failure
    return _with_lost_link(first, group, observed, now)


def _with_lost_link(first: _MemberFailure, group: GroupStatus, observed: Observed, now: float) -> Failure:
    """Return the loss of a node as the loss of a link if that node still answers here, unless most members lost it.

    The member that reports it must answer too: both ends run.
    """
    failure, lost = first.failure, first.failure.culprit_rank
    if failure.cause is not Cause.NODE_LOST or lost is None or lost == first.rank:
        return failure
    silences = {
        member.rank: status.signals.silent if status.signals is not None else {}
        for member in observed.members
        if member.incarnation == group.incarnation
        and member.heard is not None
        and now - member.heard <= HEARD_SECONDS
        and (status := agent_status(member, observed.key)) is not None
    }
    if not {lost, first.rank} <= silences.keys():
        return failure
    others = silences.keys() - {lost, first.rank}
    if others and not is_link_lost(lost, first.rank, silences):
        return failure
    message = f"{link_message(first.rank, lost)}; {failure.message}"[:1024]
    return failure.model_copy(update={"cause": Cause.LINK_LOST, "culprit_rank": None, "message": message})


def _member_failures(group: GroupStatus, observed: Observed, now: float) -> Iterator[_MemberFailure]:
    present = {member.rank: member for member in observed.members if member.incarnation == group.incarnation}
    for member in group.members:
        failure = _failure(group, member, present.get(member.rank), observed, now)
        if failure is not None:
            yield _MemberFailure(member.rank, failure)


def _failure(
    group: GroupStatus, member: MemberStatus, seen: ObservedMember | None, observed: Observed, now: float
) -> Failure | None:
    status = agent_status(seen, observed.key) if seen else None
    # A queued group has no engine. Its pods may be deleted, and an agent gives up if a scheduler places only some.
    unknown = Cause.PLACEMENT_LOST if group.phase is GroupPhase.QUEUED else Cause.MEMBER_LOST
    if seen is not None and seen.removal is not None:
        what = f"its scheduler removes it: {seen.removal}"
        return _lost(member.rank, now, what, "exit", Cause.PLACEMENT_LOST)
    if status is not None and status.phase is Phase.FAILED:
        reported = status.verdict.failure if status.verdict.health is Health.DEAD else None
        if reported is None:
            return _lost(member.rank, now, "its agent failed and gave no cause", "health", Cause.UNKNOWN)
        blames_none = reported.culprit_rank is None and reported.cause not in _NO_CULPRIT
        rank = member.rank if blames_none else reported.culprit_rank
        return reported.model_copy(update={"culprit_rank": rank})
    if seen is not None and seen.ended is not None:
        cause = seen.cause or unknown
        return _lost(member.rank, seen.ended_time or now, f"its agent ended: {seen.ended}", "exit", cause)
    if status is not None and status.phase in _UNASKED:
        return _lost(member.rank, now, "its agent is stopping without a request of the controller", "health")
    silent = 0.0 if member.silent_since is None else now - member.silent_since
    if seen is None:
        return _lost(member.rank, now, "it is gone", "exit", unknown) if silent > GONE_SECONDS else None
    if member.phase is None and seen.waiting is not None:
        return None
    if member.phase is None:
        what = f"its agent has not answered for {silent:.0f} s"
        return _lost(member.rank, now, what, "timeout") if silent > BOOT_SECONDS else None
    if silent > SILENT_SECONDS and not _heard_by_others(member.rank, observed, now):
        what = f"it has not answered for {silent:.0f} s, and no other member receives its messages"
        return _lost(member.rank, now, what, "timeout", Cause.NODE_LOST)
    return None


def _heard_by_others(rank: int, observed: Observed, now: float) -> bool:
    """Return whether another member, which was heard recently itself, receives heartbeats of `rank`."""
    for other in observed.members:
        status = agent_status(other, observed.key) if other.rank != rank else None
        if status is None or status.signals is None or other.heard is None or now - other.heard > HEARD_SECONDS:
            continue
        if status.signals.silent.get(rank, HEARD_SECONDS) < HEARD_SECONDS:
            return True
    return False


def _lost(rank: int, time: float, what: str, signal: str, cause: Cause = Cause.MEMBER_LOST) -> Failure:
    return Failure(time=time, cause=cause, culprit_rank=rank, message=f"member {rank}: {what}", detected_by=signal)
