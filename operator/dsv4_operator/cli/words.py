"""Small texts that several commands share: times, ages, places."""

from __future__ import annotations

import time
from pathlib import Path

from dsv4_operator.api.status import FailureStatus, GroupPhase, GroupStatus, MemberStatus
from dsv4_operator.backends.local.state import default_root

LEVELS = {
    1: "the engine is restarted in place",
    2: "the group is formed again",
    3: "given up",
}


def seconds(value: float) -> str:
    """Write a measured time: `3.2 s`, `41 s`, `2 min 5 s`."""
    if value < 10:
        return f"{value:.1f} s"
    whole = round(value)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60} s"


def stopwatch(value: float) -> str:
    """Write a running time: `0:07`, `12:30`, `1:00:05`."""
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def age(value: float) -> str:
    """Write an age as kubectl does: `45s`, `12m`, `3h10m`, `4d`."""
    whole = max(int(value), 0)
    if whole < 120:
        return f"{whole}s"
    minutes = whole // 60
    if minutes < 120:
        return f"{minutes}m"
    hours = minutes // 60
    if hours < 10:
        return f"{hours}h{minutes % 60}m"
    return f"{hours}h" if hours < 48 else f"{hours // 24}d"


def clock(moment: float) -> str:
    """Return the time of day on this machine."""
    return time.strftime("%H:%M:%S", time.localtime(moment))


def date(moment: float) -> str:
    """Return the day and time of day on this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def plural(count: int, word: str) -> str:
    """Return `1 restart`, `2 restarts`."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def one_line(text: str, limit: int = 200) -> str:
    """Return `text` on one line, cut where it is too long for people."""
    joined = " ".join(text.split())
    return joined if len(joined) <= limit else joined[: limit - 3] + "..."


def root_option(root: Path) -> str:
    """Return what a command needs to find a state directory that is not the usual one."""
    return "" if root == default_root().absolute() else f" --state-dir {root}"


def culprit(failure: FailureStatus) -> str:
    """Return ` on rank 1 (10.0.0.2)`, as far as it is known."""
    if failure.culprit_rank is None:
        return ""
    node = f" ({failure.culprit_node})" if failure.culprit_node else ""
    return f" on rank {failure.culprit_rank}{node}"


def cause(failure: FailureStatus) -> str:
    """Return `EngineCoreDied on rank 0: its first fatal line`."""
    message = f": {one_line(failure.message)}" if failure.message else ""
    return f"{failure.cause}{culprit(failure)}{message}"


def member_message(member: MemberStatus, now: float) -> str:
    """Return a member's progress, and that it has gone silent."""
    silence = f"no answer for {seconds(max(now - member.silent_since, 0))}" if member.silent_since else ""
    return "; ".join(part for part in (one_line(member.message), silence) if part)


def group_sentence(group: GroupStatus) -> str:
    """Return what a group is doing, for a line that is printed once."""
    match group.phase:
        case GroupPhase.FORMING:
            return f"forming incarnation {group.incarnation}"
        case GroupPhase.STARTING:
            return f"starting the engine in incarnation {group.incarnation}"
        case GroupPhase.RESTARTING:
            return "restarting the engine in place"
        case GroupPhase.RECOVERING:
            return f"ending incarnation {group.incarnation}, to form the group again"
        case GroupPhase.UPDATING:
            return "stopping, to start again with the changed specification"
        case GroupPhase.FAILED:
            return "given up; nothing runs any more"
        case _:
            return group.phase.lower()
