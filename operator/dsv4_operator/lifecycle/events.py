"""Events: what changed between two statuses, once each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from dsv4_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    DeploymentStatus,
    FailureStatus,
    GroupPhase,
    GroupStatus,
    Reason,
    RolloutStatus,
)
from dsv4_operator.api.values import format_time
from dsv4_operator.lifecycle.canary import UNTRIED
from dsv4_operator.lifecycle.status import death_sentence, rollback_sentence
from dsv4_operator.lifecycle.watch import same_death


class EventType(StrEnum):
    """The two types that Kubernetes knows."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, for people."""

    type: EventType
    reason: Reason
    message: str
    group: int | None = None
    """The group that it happened to; None for the whole deployment."""


def events(previous: DeploymentStatus | None, new: DeploymentStatus) -> tuple[Event, ...]:
    """Return what happened between `previous`, None before the first status, and `new`, in a sensible order."""
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
    """Yield that users are not answered although all groups answer, once until they are answered again."""
    before = previous.condition(ConditionType.READY) if previous else None
    now = new.condition(ConditionType.READY)
    if now is not None and _fails(now) and not (before is not None and _fails(before)):
        yield Event(EventType.WARNING, Reason.ENDPOINT_NOT_READY, now.message)


def _fails(ready: Condition) -> bool:
    """Tell whether a request through the endpoint failed; one that was not sent yet is no news."""
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
    for failure in now.history:
        if _is_news(before, failure):
            reason = Reason.GROUP_DEAD if (failure.level or 1) > 1 else Reason.ENGINE_DEAD
            yield Event(EventType.WARNING, reason, death_sentence(failure), now.index)
    if now.phase is not before.phase or now.incarnation != before.incarnation:
        yield from _phase(now, new)
    if now.phase is GroupPhase.SERVING and _life(now) != (_life(before) if before.ready_time else None):
        yield _serving(now)


def _is_news(before: GroupStatus, failure: FailureStatus) -> bool:
    known = next((known for known in before.history if same_death(known, failure)), None)
    return known is None or (failure.level or 1) > 1 >= (known.level or 1)


def _life(group: GroupStatus) -> tuple[int, int]:
    return group.incarnation, group.engine_generation


def _phase(now: GroupStatus, new: DeploymentStatus) -> Iterator[Event]:
    match now.phase:
        case GroupPhase.FORMING:
            message = f"incarnation {now.incarnation} is being formed"
            if now.restarts:
                message += f"; {len(now.restarts)} restart{'s' * (len(now.restarts) != 1)} used"
            yield Event(EventType.NORMAL, Reason.GROUP_FORMING, message, now.index)
        case GroupPhase.STARTING:
            message = f"all {len(now.members)} members of incarnation {now.incarnation} exist"
            yield Event(EventType.NORMAL, Reason.GROUP_STARTING, message, now.index)
        case GroupPhase.RESTARTING:
            yield Event(EventType.NORMAL, Reason.ENGINE_RESTARTING, "the engine is restarted in place", now.index)
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
            message = condition.message if condition else "recovery was given up"
            yield Event(EventType.WARNING, Reason.RECOVERY_EXHAUSTED, message, now.index)
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
