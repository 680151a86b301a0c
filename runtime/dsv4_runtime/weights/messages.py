"""The documents between the agent and the process that stages: one job on its way in, reports on their way out."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field

from dsv4_runtime.contract import Cause, Report, WeightsPlan

ROUTE = "/v1/weights"
"""Path of an agent's HTTP API below which its member serves weights."""


class StagingState(StrEnum):
    """State of a member's work on its weights."""

    AWAY = "Away"
    """Not yet at staging."""
    BLOCKED = "Blocked"
    """Another process stages into the same directory; this member waits for it."""
    ACTIVE = "Active"
    COMPLETE = "Complete"


class MemberWeights(Report):
    """`GET /v1/weights` of an agent."""

    stance: StagingState = StagingState.AWAY
    claimed: bool = False
    """Whether it fetches from the origin."""
    held: int = 0
    """Bytes that it has, finished or not."""
    files: dict[str, str] = Field(default_factory=dict)
    """Finished files that it hands out, with their SHA-256."""


def fetches_from_origin(me: int, held: int, claimed: bool, others: Mapping[int, MemberWeights]) -> bool:
    """Tell whether this member is the one that fetches from the origin what no member has.

    Members that see the same agree on one: who has begun goes on, the lowest rank if several have; else who has the
    most bytes begins, the lowest rank among equals.

    Args:
        me: this member's rank.
        held: bytes that it has.
        claimed: whether it has begun.
        others: the latest offers of the members that can be reached.
    """
    active = {rank: offer for rank, offer in others.items() if offer.stance is StagingState.ACTIVE}
    begun = [rank for rank, offer in active.items() if offer.claimed] + ([me] if claimed else [])
    if begun:
        return min(begun) == me
    return all((offer.held, -rank) < (held, -me) for rank, offer in active.items())


class StagingJob(Report):
    """Description of what to stage; the first line of the process's input. The input's end ends the process."""

    weights: WeightsPlan
    rank: int = 0
    members: dict[int, str] = Field(default_factory=dict)
    """Rank to URL of the other members' agents."""
    token: str = ""
    """Opens those."""
    resident_bytes: int = 0
    """Memory that this member's engine will take."""
    stages: tuple[int, int, int] | None = None
    """First and last pipeline stage of this member's ranks, and how many there are."""


class StagingReport(Report):
    """One line of output."""

    stage: str | None = None
    """Progress for people."""
    percent: float | None = None
    stance: StagingState | None = None
    claimed: bool = False
    held: int = 0
    fetched: int = 0
    """Bytes that came over the network so far."""
    disk_bytes_per_second: float | None = None
    """Rate of a disk, once enough was read from it."""
    verified: bool = False
    """Whether every file's content was read again."""
    wrong: tuple[str, ...] = ()
    """Files that were not right then, and were fetched anew."""
    error: str | None = None
    """Reason why it cannot be done; the last line."""
    cause: Cause | None = None
    """Of `error`."""
