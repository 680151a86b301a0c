"""Pure rules for the head's agent (level 1) and the operator (level 2): the restart budget, and lost links.

Restart loops leak unified memory on GB10 until the machine needs a power cycle, so every level spends from one budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from dsv4_runtime.contract.base import Document

HEARD_SECONDS = 3.0
"""Maximum age of a heartbeat from a member that is present."""


def backoff(failures: int, *, first: float, longest: float) -> float:
    """Return the seconds to wait after `failures` failures in a row, from 1 on: `first`, doubled each time, at most
    `longest`."""
    # Without the limit 2.0**failures would overflow.
    return float(min(first * 2.0 ** min(failures - 1, 30), longest))


class RecoveryPolicy(Document):
    """Limits on how often a group may be restarted, and how fast. Times in seconds."""

    max_restarts: int = Field(ge=0)
    """Restarts of any level within `window_seconds`; 0 means never."""
    window_seconds: float = Field(gt=0)
    backoff_base_seconds: float = Field(ge=0)
    """Wait before the second restart in a window; the first is immediate, each further one waits twice as long."""
    backoff_max_seconds: float = Field(ge=0)


@dataclass(frozen=True, slots=True)
class Permit:
    """Time and budget of the next restart."""

    at: float | None
    """Unix time from which a restart is allowed; None: the budget is spent."""
    spent: int
    """Restarts within the window before this one."""


def permit(policy: RecoveryPolicy, restarts: Sequence[float], now: float) -> Permit:
    """Return when the next restart is allowed, given the Unix times of the earlier ones (in any order).

    The wait counts from the latest restart, not from `now`, so repeated calls do not extend it. A restart in the future
    was dated by a clock that is ahead: it counts within a window, but its time is not awaited.
    """
    recent = within(policy.window_seconds, restarts, now)
    spent = len(recent)
    if spent >= policy.max_restarts:
        return Permit(None, spent)
    if spent == 0:
        return Permit(now, spent)
    wait = backoff(spent, first=policy.backoff_base_seconds, longest=policy.backoff_max_seconds)
    latest = max((time for time in recent if time <= now), default=now - wait)
    return Permit(max(now, latest + wait), spent)


def within(window: float, times: Iterable[float], now: float) -> list[float]:
    """Return the Unix times that are less than `window` seconds from `now`, before or after it.

    A time further in the future was dated by a wrong clock, and would count for as long as that is wrong.
    """
    return [time for time in times if abs(now - time) < window]


def is_link_lost(lost: int, observer: int, silences: Mapping[int, Mapping[int, float]]) -> bool:
    """Return whether `observer` and `lost` both run and only their link is lost.

    A heartbeat takes the way there and back, so a loss in one direction silences both ends for each other. At least as
    many members have to hear `lost` as do not: otherwise its machine is at fault, or its port.

    Args:
        lost: the rank that is silent for `observer`.
        observer: another rank, which still runs.
        silences: rank to the seconds since it last heard each other rank, of the members with fresh observations.
    """
    views = [seen.get(lost) for rank, seen in silences.items() if rank not in (lost, observer)]
    hearing = sum(silence is not None and silence < HEARD_SECONDS for silence in views)
    return hearing > 0 and hearing >= len(views) - hearing + 1


def link_message(one: int, other: int) -> str:
    """Return the message about the link of two members."""
    first, second = sorted((one, other))
    return f"rank {first} and rank {second} both run and no longer reach each other: check the link between them"
