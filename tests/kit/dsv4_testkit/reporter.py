"""State read by an agent's HTTP API: a member's record, and reports of other members set by a test."""

from __future__ import annotations

from dsv4_runtime.agent.decide.events import Peer
from dsv4_runtime.agent.record import Changes, MemberRecord
from dsv4_runtime.contract import AgentStatus, DrainReport, GroupPlan


class Reporter:
    """The agent of one member without its actions."""

    def __init__(self, plan: GroupPlan, rank: int = 0) -> None:
        self.state = MemberRecord(plan, rank)
        self.peers: dict[int, Peer] = {}

    @property
    def changes(self) -> Changes:
        return self.state.changes

    def status(self) -> AgentStatus:
        return self.state.status()

    def others(self) -> dict[int, Peer]:
        return self.peers

    def evidence(self) -> dict[str, object]:
        return {"lastLines": {}}

    def drain(self, seconds: float) -> DrainReport:
        return DrainReport(over=True)
