"""The documents between the agent and the process that stages: one job on its way in, reports on their way out."""

from __future__ import annotations

from pydantic import Field

from dsv4_runtime.contract import Cause, Report, WeightsPlan
from dsv4_runtime.weights.offer import Stance


class Job(Report):
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


class News(Report):
    """One line of output."""

    stage: str | None = None
    """Progress for people."""
    percent: float | None = None
    stance: Stance | None = None
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
