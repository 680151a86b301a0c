"""Status of a group from the reports of the present incarnation's members, and the diagnosis of a dead incarnation."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dsv4_operator.api import (
    HISTORY_LENGTH,
    FailureStatus,
    GroupPhase,
    GroupStatus,
    KvCacheStatus,
    MeasuredItem,
    MeasuredStatus,
    MemberStatus,
)
from dsv4_operator.lifecycle.observed import GroupKey, Observed, ObservedMember
from dsv4_runtime.contract import AgentStatus, Cause, EngineStatus, Failure, Health, Phase, Process, Role
from dsv4_runtime.contract.recovery import HEARD_SECONDS, is_link_lost, link_message, within

ALIVE = frozenset(
    {GroupPhase.FORMING, GroupPhase.QUEUED, GroupPhase.STARTING, GroupPhase.SERVING, GroupPhase.RESTARTING}
)
"""Phases in which the incarnation of the status should have members."""

_EARLIEST_TIME, _LATEST_TIME = -1e9, 1e11
"""Range of Unix times that can be formatted: the years 1938 to 5138."""
_LARGEST_INTEGER = 2**53
_checked: dict[int, tuple[weakref.ref[AgentStatus], AgentStatus | None]] = {}
"""Replacement of each live report, by its id; None if it needs none."""

FRESH_SECONDS = 3.0
"""A status older than this counts as silence."""


def agent_status(member: ObservedMember, key: GroupKey) -> AgentStatus | None:
    """Return the status of `member`'s agent; None if it is about another member, with the same address before."""
    status = member.status
    if status is None:
        return None
    about = (status.deployment, status.group, status.incarnation, status.rank)
    return _storable(status) if about == (key.deployment, key.group, member.incarnation, member.rank) else None


def _storable(status: AgentStatus) -> AgentStatus:
    """Return `status` with numbers that the API server can store: a defect of one agent must not block all writes."""
    known = _checked.get(id(status))
    if known is not None and known[0]() is status:
        return known[1] or status
    document = status.model_dump()
    cleaned = _clean(document)
    key = id(status)
    replacement = AgentStatus.model_validate(cleaned) if cleaned != document else None
    _checked[key] = weakref.ref(status, lambda _: _checked.pop(key, None)), replacement
    return replacement or status


def _clean(value: Any) -> Any:
    """Return `value` with each number clamped to the range of times and counters."""
    if isinstance(value, dict):
        return {name: _clean(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_clean, value))
    if isinstance(value, float) and not math.isfinite(value):
        return 0.0
    if isinstance(value, float):
        return max(_EARLIEST_TIME, min(value, _LATEST_TIME))
    if isinstance(value, int) and not isinstance(value, bool):
        return max(-_LARGEST_INTEGER, min(value, _LARGEST_INTEGER))
    return value


def with_restarts(group: GroupStatus, observed: Observed, window: float, now: float) -> GroupStatus:
    """Return `group` with the restarts that the head's agent made itself: level 1 uses the same budget.

    Also for a group that is being ended, because its agent may restart the engine until it is fenced.
    """
    head = _head(group, observed)
    made = head.engine.restarts if head is not None and head.engine is not None else ()
    known = {round(time, 3) for time in group.restarts}
    new = {round(time, 3) for time in within(window, made, now)} - known
    if not new:
        return group
    restarts, total = tuple(sorted(known | new)), group.total_restarts + len(new)
    return group.model_copy(update={"restarts": restarts, "total_restarts": total})


def watch(group: GroupStatus, observed: Observed, *, generation: int, now: float) -> GroupStatus:
    """Return `group`, in a phase of `ALIVE`, updated with the reports of its present incarnation."""
    group = with_members(group, observed, now)
    if group.phase in (GroupPhase.QUEUED, GroupPhase.STARTING):
        group = with_placement(group, observed, now)
    head = _head(group, observed)
    if head is None or group.phase is GroupPhase.QUEUED:
        return group
    if head.engine is not None:
        group = _engine(group, head.engine, generation, now)
    # A group is FORMING until every member was observed, whatever the head reports.
    return group if group.phase is GroupPhase.FORMING else _head_phase(group, head, now)


def with_placement(group: GroupStatus, observed: Observed, now: float) -> GroupStatus:
    """Return `group`, all of whose members were created, in the phase that follows from their nodes."""
    present = [member for member in observed.members if member.incarnation == group.incarnation]
    gone = {member.rank for member in group.members} - {member.rank for member in present}
    if any(member.queued for member in present) or (gone and group.phase is GroupPhase.QUEUED):
        return group.model_copy(update={"phase": GroupPhase.QUEUED})
    return without_queue_time(group, now).model_copy(update={"phase": GroupPhase.STARTING})


def without_queue_time(group: GroupStatus, now: float) -> GroupStatus:
    """Return `group`, which leaves its phase, with time in a queue excluded from `spec.rollout.progressDeadline`."""
    if group.phase is not GroupPhase.QUEUED or group.phase_time is None:
        return group
    # `with_pause` excludes the rest.
    until = now if group.paused_time is None else min(now, group.paused_time)
    return _excluding(group, until - group.phase_time)


def with_pause(group: GroupStatus, now: float, *, paused: bool) -> GroupStatus:
    """Return `group` with the time of a pause excluded, when the pause ends, from `spec.rollout.progressDeadline` and
    from the time in which members are created."""
    if paused:
        return group if group.paused_time is not None else group.model_copy(update={"paused_time": now})
    if group.paused_time is None:
        return group
    # `without_queue_time` excludes all time in the present queue.
    queued_since = group.phase_time if group.phase is GroupPhase.QUEUED else None
    until = now if queued_since is None else queued_since
    formed = group.formed_time
    formed = None if formed is None else round(formed + max(0.0, now - group.paused_time), 3)
    update = {"paused_time": None, "formed_time": formed}
    return _excluding(group, until - group.paused_time).model_copy(update=update)


def _excluding(group: GroupStatus, seconds: float) -> GroupStatus:
    if group.revision_time is None:
        return group
    return group.model_copy(update={"revision_time": round(group.revision_time + max(0.0, seconds), 3)})


def with_members(group: GroupStatus, observed: Observed, now: float) -> GroupStatus:
    """Return `group` with the present state of each member of its incarnation."""
    present = [member for member in observed.members if member.incarnation == group.incarnation]
    return group.model_copy(update={"members": _members(group, present, observed.key, now)})


def with_failure(group: GroupStatus, failure: FailureStatus) -> GroupStatus:
    """Return `group` with `failure` in its history; it replaces an earlier entry of the same death."""
    history = list(group.history)
    for index, known in enumerate(history):
        if same_death(known, failure):
            recovered = failure.recover_seconds if failure.recover_seconds is not None else known.recover_seconds
            history[index] = failure.model_copy(
                update={
                    "level": failure.level if failure.level is not None else known.level,
                    "recover_seconds": recovered,
                    "evidence": failure.evidence or known.evidence,
                    "generation": known.generation,
                }
            )
            break
    else:
        history.append(failure)
    # Sorted, because agents report deaths again that were dropped here.
    kept = tuple(sorted(history, key=lambda known: (known.incarnation, known.time))[-HISTORY_LENGTH:])
    return group.model_copy(update={"history": kept, "last_failure": kept[-1]})


def placement_loss(group: GroupStatus) -> FailureStatus | None:
    """Return the entry of the history by which the last incarnation lost its nodes: to a scheduler, or an eviction."""
    lost = (one for one in group.history if one.incarnation == group.incarnation)
    return next((one for one in lost if one.cause is Cause.PLACEMENT_LOST), None)


def same_death(one: FailureStatus, other: FailureStatus) -> bool:
    """Return whether both entries describe the same death."""
    if one.incarnation != other.incarnation:
        return False
    if None not in (one.engine_generation, other.engine_generation):
        return one.engine_generation == other.engine_generation
    return one.cause is other.cause and round(one.time, 3) == round(other.time, 3)


def failure_status(failure: Failure, group: GroupStatus, generation: int) -> FailureStatus:
    """Return `failure`, as reported by an agent, as an entry of the status."""
    nodes = {member.rank: member.node for member in group.members}
    return FailureStatus(
        time=failure.time,
        cause=failure.cause,
        incarnation=group.incarnation,
        engine_generation=failure.generation,
        generation=generation,
        culprit_rank=failure.culprit_rank,
        culprit_node=None if failure.culprit_rank is None else nodes.get(failure.culprit_rank),
        message=failure.message,
        detected_by=failure.detected_by,
        level=failure.level,
        recover_seconds=failure.recover_seconds,
        weights_doubted=failure.weights_doubted,
        evidence=failure.evidence,
    )


def _head(group: GroupStatus, observed: Observed) -> AgentStatus | None:
    heads = (member for member in observed.members if (member.incarnation, member.rank) == (group.incarnation, 0))
    return next((status for member in heads if (status := agent_status(member, observed.key))), None)


def _members(
    group: GroupStatus, present: Iterable[ObservedMember], key: GroupKey, now: float
) -> tuple[MemberStatus, ...]:
    known = {member.rank: member for member in group.members}
    found = {member.rank: _member(member, known.get(member.rank), key, now) for member in present}
    for rank, member in known.items():
        if rank not in found:
            since = _silent_since(member, now) or now
            gone = {"processes": (), "warnings": (), "message": "is gone", "silent_since": since}
            found[rank] = member.model_copy(update=gone)
    return tuple(found[rank] for rank in sorted(found))


def _member(member: ObservedMember, known: MemberStatus | None, key: GroupKey, now: float) -> MemberStatus:
    status = agent_status(member, key)
    heard = member.heard if status is not None else None
    fresh = heard is not None and now - heard <= FRESH_SECONDS
    # Counted from the first observation of the silence: no status can arrive while no operator runs. An agent that
    # cannot have started is not silent.
    answers = fresh or member.waiting is not None
    silent_since = None if answers else _silent_since(known, now) or max(heard or now, now - FRESH_SECONDS)
    phase, phase_time = (known.phase, known.phase_time) if known else (None, None)
    if status is not None:
        phase, phase_time = status.phase, status.phase_time
    return MemberStatus(
        rank=member.rank,
        role=Role.WORKER if member.rank else Role.HEAD,
        node=member.node,
        address=member.address,
        phase=phase,
        phase_time=phase_time,
        message=_message(member, status),
        processes=() if member.ended else _processes(member, status),
        warnings=status.warnings if status is not None and not member.ended else (),
        silent_since=silent_since,
    )


def _silent_since(known: MemberStatus | None, now: float) -> float | None:
    """Return the known start of a member's silence; not later than now, because a clock that was ahead may have dated
    it."""
    since = known.silent_since if known is not None else None
    return None if since is None else min(since, now)


def _message(member: ObservedMember, status: AgentStatus | None) -> str:
    if member.ended is not None:
        return f"ended: {member.ended}"
    if status is None:
        return member.waiting or ""
    failure = status.verdict.failure
    if failure is not None and status.verdict.health is Health.DEAD:
        return failure.message
    if status.progress is None:
        return ""
    percent = status.progress.percent
    return status.progress.stage if percent is None else f"{status.progress.stage} ({percent:.0f} %)"


def _processes(member: ObservedMember, status: AgentStatus | None) -> tuple[Process, ...]:
    """Return the processes with the machine's process ids if known, else with those of the member's namespace."""
    if member.processes:
        return tuple(Process(name=process.name, pid=process.pid) for process in member.processes)
    return status.processes if status else ()


def _engine(group: GroupStatus, engine: EngineStatus, generation: int, now: float) -> GroupStatus:
    """Return `group` with the engine status of the head's agent."""
    measured = _measured(group, engine, now)
    update = {
        "engine_generation": engine.generation,
        "kv_cache": _kv_cache(engine),
        "kernels": engine.kernels,
        "measured": measured,
    }
    group = group.model_copy(update=update)
    for failure in engine.failures:
        group = with_failure(group, failure_status(failure, group, generation))
    return group


def _measured(group: GroupStatus, engine: EngineStatus, now: float) -> MeasuredStatus | None:
    """Return the memory that the engine logged; until it does, the values of the previous engine."""
    known = group.measured
    if not engine.memory or not engine.memory_of:
        return known
    items = tuple(MeasuredItem(item=name, difference=size) for name, size in sorted(engine.memory.items()))
    if known and (known.of, known.incarnation, known.items) == (engine.memory_of, group.incarnation, items):
        return known
    return MeasuredStatus(of=engine.memory_of, incarnation=group.incarnation, time=now, items=items)


def _kv_cache(engine: EngineStatus) -> KvCacheStatus | None:
    if engine.kv_cache_tokens is None:
        return None
    return KvCacheStatus(
        tokens=engine.kv_cache_tokens,
        concurrency=engine.kv_concurrency or 0.0,
        planned_tokens=engine.kv_planned_tokens,
    )


def _head_phase(group: GroupStatus, head: AgentStatus, now: float) -> GroupStatus:
    lives = head.engine.generation if head.engine else 0
    if head.phase is Phase.SERVING and head.verdict.health is not Health.DEAD:
        ready = head.engine.ready_time if head.engine else None
        update = {"ready_time": ready or group.ready_time or now, "start": head.start}
        return _recovered(group.model_copy(update=update), now)
    restarting = lives > 1 or head.phase in (Phase.RESTARTING, Phase.SERVING)
    phase = GroupPhase.RESTARTING if restarting else GroupPhase.STARTING
    return group.model_copy(update={"phase": phase, "ready_time": None})


def _recovered(group: GroupStatus, now: float) -> GroupStatus:
    """Return `group`, which serves: earlier deaths get their recovery time."""
    ready = group.ready_time or now

    def overcome(failure: FailureStatus) -> FailureStatus:
        if failure.recover_seconds is not None or failure.incarnation >= group.incarnation:
            return failure
        return failure.model_copy(update={"recover_seconds": round(max(0.0, ready - failure.time), 3)})

    history = tuple(map(overcome, group.history))
    last = history[-1] if history else None
    return group.model_copy(update={"phase": GroupPhase.SERVING, "history": history, "last_failure": last})


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
    names another dead member as the culprit, that member's report wins, unless it names a different culprit. A loss of
    the placement during a pause is read from the history. `group` must be the status after `watch` with the same
    arguments.
    """
    lost = placement_loss(group)
    if lost is not None:
        return Failure(
            time=lost.time,
            cause=lost.cause,
            culprit_rank=lost.culprit_rank,
            message=lost.message,
            detected_by=lost.detected_by,
        )
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
        what = f"it is removed from its node: {seen.removal}"
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
