"""Changes between two looks at a deployment, and how it stands: pure, for `dsv4 up`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from dsv4_operator.api.status import (
    ConditionStatus,
    ConditionType,
    DeploymentStatus,
    FailureStatus,
    GroupPhase,
    GroupStatus,
)
from dsv4_operator.cli import words
from dsv4_operator.cli.errors import ExitCode
from dsv4_operator.cli.output import render_table
from dsv4_runtime.contract import Phase


class Stage(Enum):
    """Whether a start is still under way."""

    STARTING = auto()
    READY = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class StartOutcome:
    """State of a start; a failed one has a sentence and an exit code."""

    stage: Stage
    sentence: str = ""
    code: ExitCode = ExitCode.OK
    final: bool = True
    """False: a refusal that the loop goes on asking about."""


def outcome(status: DeploymentStatus, generation: int) -> StartOutcome:
    """Tell how the start of specification number `generation` stands; what is said of an older one does not count."""
    conditions = {item.type: item for item in status.conditions if item.observed_generation >= generation}
    if (accepted := conditions.get(ConditionType.ACCEPTED)) and accepted.status is ConditionStatus.FALSE:
        return StartOutcome(Stage.FAILED, accepted.message, ExitCode.BAD_INPUT, final=False)
    exhausted = conditions.get(ConditionType.RECOVERY_EXHAUSTED)
    if exhausted and exhausted.status is ConditionStatus.TRUE:
        return _given_up(status, exhausted.message)
    if (ready := conditions.get(ConditionType.READY)) and ready.status is ConditionStatus.TRUE:
        return StartOutcome(Stage.READY)
    return StartOutcome(Stage.STARTING)


def latest_failure(status: DeploymentStatus) -> FailureStatus | None:
    """Return the latest death of any group."""
    failures = [group.last_failure for group in status.groups if group.last_failure]
    return max(failures, key=lambda failure: failure.time, default=None)


def _given_up(status: DeploymentStatus, message: str) -> StartOutcome:
    failure = latest_failure(status)
    # What is wrong with the file or the machine cannot be mended by trying again, so it counts as bad input.
    code = ExitCode.BAD_INPUT if failure and failure.deterministic else ExitCode.FAILED
    found = words.cause(failure) if failure else ""
    if failure and failure.message and failure.message in message:
        found = ""
    return StartOutcome(Stage.FAILED, "; ".join(part.rstrip(".") for part in (message, found) if part), code)


def waiting_for(status: DeploymentStatus | None) -> str:
    """Return what a start that took too long was still waiting for."""
    if status is None:
        return "the loop has reported nothing"
    laggards = [
        f"rank {member.rank} is {member.phase or 'not started'}"
        + (f" ({words.one_line(member.message)})" if member.message else "")
        for group in status.groups
        for member in group.members
        if member.phase is not Phase.SERVING
    ]
    if laggards:
        return ", ".join(laggards)
    ready = status.condition(ConditionType.READY)
    return ready.message if ready and ready.message else f"it is {status.phase}"


def header(name: str, status: DeploymentStatus | None, elapsed: float) -> str:
    """Return `nano   Starting   0:23 of about 0:45`."""
    phase = status.phase if status else "Pending"
    expected = status.expected_ready_seconds if status else None
    about = f" of about {words.stopwatch(expected)}" if expected else ""
    return f"{name}   {phase}   {words.stopwatch(elapsed)}{about}"


def members_table(status: DeploymentStatus, now: float) -> str:
    """Return one row a member."""
    many = len(status.groups) > 1
    rows = [
        [str(group.index)] * many
        + [
            str(member.rank),
            str(member.role),
            member.address,
            str(member.phase or ""),
            words.member_message(member, now),
        ]
        for group in status.groups
        for member in group.members
    ]
    return render_table(["GROUP"] * many + ["RANK", "ROLE", "ADDRESS", "PHASE", "MESSAGE"], rows) if rows else ""


def view(name: str, status: DeploymentStatus | None, elapsed: float, now: float) -> str:
    """Return what a terminal shows while a deployment starts."""
    lines = [header(name, status, elapsed)]
    if status is not None:
        lines += members_table(status, now).splitlines()
        lines += [
            f"{_label(status, group)}{words.cause(group.last_failure)}" for group in status.groups if group.last_failure
        ]
    return "\n".join(lines)


def transitions(before: DeploymentStatus | None, after: DeploymentStatus, *, members: bool) -> list[str]:
    """Return one line for everything that changed; with `members` their phases too. The same status gives none."""
    earlier = {group.index: group for group in before.groups} if before else {}
    lines: list[str] = []
    for group in after.groups:
        lines += [
            f"{_label(after, group)}{line}"
            for line in _group_transitions(earlier.get(group.index), group, members=members)
        ]
    return lines


def _group_transitions(before: GroupStatus | None, after: GroupStatus, *, members: bool) -> list[str]:
    lines = _deaths(before, after)
    recovered = _recovered(before, after)
    moved = before is None or (before.phase, before.incarnation) != (after.phase, after.incarnation)
    # `serving again` says it better.
    if moved and not (recovered and after.phase is GroupPhase.SERVING):
        lines.append(words.group_sentence(after))
    if after.next_restart_time and (before is None or before.next_restart_time != after.next_restart_time):
        lines.append(f"the next restart waits until {words.clock(after.next_restart_time)}")
    if members:
        lines += _member_transitions(before, after)
    return lines + recovered


def _deaths(before: GroupStatus | None, after: GroupStatus) -> list[str]:
    known = {failure.time for failure in before.history} if before else set()
    # A first look finds the deaths of earlier lives; they are history, not news.
    return [f"died: {words.cause(failure)}" for failure in after.history if before and failure.time not in known]


def _recovered(before: GroupStatus | None, after: GroupStatus) -> list[str]:
    done = {failure.time for failure in before.history if failure.recover_seconds is not None} if before else set()
    return [
        f"serving again after {words.seconds(failure.recover_seconds)}"
        for failure in after.history
        if before and failure.recover_seconds is not None and failure.time not in done
    ]


def _member_transitions(before: GroupStatus | None, after: GroupStatus) -> list[str]:
    same = before is not None and before.incarnation == after.incarnation
    earlier = {member.rank: member for member in before.members} if before and same else {}
    lines = []
    for member in after.members:
        known = earlier.get(member.rank)
        if known is None:
            lines.append(f"rank {member.rank} is the {member.role.lower()} at {member.address or member.node}")
        if member.phase and (known is None or known.phase is not member.phase):
            message = f": {words.one_line(member.message)}" if member.message else ""
            lines.append(f"rank {member.rank} {member.phase}{message}")
        if member.silent_since and not (known and known.silent_since):
            lines.append(f"rank {member.rank} no longer answers")
    return lines


def _label(status: DeploymentStatus, group: GroupStatus) -> str:
    return f"group {group.index}: " if len(status.groups) > 1 else ""
