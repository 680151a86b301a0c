"""Report of the head's agent on its whole group, so that one connection is enough to watch it."""

from __future__ import annotations

from dsv4_runtime.contract.base import Report
from dsv4_runtime.contract.status import AgentStatus


class GroupReport(Report):
    """One line of `GET /v1/watch?group=1`: how old the head's news of each member are, and the news if there are any.

    Most lines have ages alone and cost next to nothing to read.
    """

    ages: dict[int, float]
    """Rank to the seconds since the head last had an answer from it; its own is 0, ranks never heard are missing."""
    members: tuple[AgentStatus, ...] | None = None
    """The latest status of every member that was heard, without `signals`; None: as in an earlier line."""
