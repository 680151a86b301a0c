"""Documents between agent and staging process (job, reports) and between members (`GET /v1/weights`)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field

from dsv4_runtime.contract import Cause, Report, WeightsPlan

ROUTE = "/v1/weights"
"""Path prefix of the weights in an agent's HTTP API."""


class StagingState(StrEnum):
    """State of a member's staging."""

    AWAY = "Away"
    """Staging has not started."""
    BLOCKED = "Blocked"
    """Another process stages into the same directory; this member waits for it."""
    ACTIVE = "Active"
    COMPLETE = "Complete"


class MemberWeights(Report):
    """Response to `GET /v1/weights`: the checkpoint files of a member."""

    stance: StagingState = StagingState.AWAY
    claimed: bool = False
    """Whether the member fetches from the origin."""
    held: int = 0
    """Bytes present, including unfinished files."""
    files: dict[str, str] = Field(default_factory=dict)
    """Finished files offered to other members, with SHA-256."""


def fetches_from_origin(me: int, held: int, claimed: bool, others: Mapping[int, MemberWeights]) -> bool:
    """Return whether this member fetches the files from the origin that no member has.

    Members with the same information choose the same one: of those that have begun, the lowest rank; else the one with
    the most bytes, the lowest rank on a tie.

    Args:
        me: rank of this member.
        held: bytes of this member.
        claimed: whether this member has begun.
        others: latest responses of reachable members.
    """
    active = {rank: offer for rank, offer in others.items() if offer.stance is StagingState.ACTIVE}
    begun = [rank for rank, offer in active.items() if offer.claimed] + ([me] if claimed else [])
    if begun:
        return min(begun) == me
    return all((offer.held, -rank) < (held, -me) for rank, offer in active.items())


class StagingJob(Report):
    """Staging job, sent as the first line of stdin. The process ends with its stdin."""

    weights: WeightsPlan
    rank: int = 0
    members: dict[int, str] = Field(default_factory=dict)
    """Agent URLs of the other members by rank."""
    token: str = ""
    """Token of those agents."""
    resident_bytes: int = 0
    """Memory of this member's engine."""
    stages: tuple[int, int, int] | None = None
    """First and last pipeline stage of this member's ranks, and the number of stages."""


class StagingReport(Report):
    """Report of the staging process, one per output line."""

    stage: str | None = None
    """Progress text."""
    percent: float | None = None
    stance: StagingState | None = None
    claimed: bool = False
    held: int = 0
    fetched: int = 0
    """Bytes received over the network so far."""
    disk_bytes_per_second: float | None = None
    """Disk throughput, once enough bytes were read."""
    verified: bool = False
    """Whether the content of all files was verified."""
    wrong: tuple[str, ...] = ()
    """Files with wrong content, which were fetched again."""
    error: str | None = None
    """Reason of the failure, in the last line."""
    cause: Cause | None = None
    """Of `error`."""
