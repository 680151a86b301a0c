"""Another member of the group, as it was last heard."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_runtime.contract import AgentStatus, Cause, Failure, Health, HealthPolicy, Phase
from dsv4_runtime.health.rules import agent_hung


@dataclass(frozen=True, slots=True)
class Peer:
    """One other member's latest answer."""

    status: AgentStatus | None = None
    heard: float | None = None
    """Monotonic time of that answer."""
    asked: float | None = None
    """Monotonic time at which the latest question was sent."""
    error: str | None = None
    """Reason why the latest question got no answer; None if it got one."""
    refused: bool = False
    """Its node said that nobody listens there: the agent has ended."""
    beat: float | None = None
    """Monotonic time of its latest heartbeat."""
    round_trip: float | None = None
    """Seconds of that heartbeat, there and back."""
    accepting: float | None = None
    """Monotonic time since which its machine takes connections that the agent does not answer; None: it does not, or
    the agent is heard."""
    behind: float = 0.0
    """Seconds that its clock is behind this member's; 0 if its latest answer fits between the question and its end."""

    @property
    def death(self) -> Failure | None:
        """Return what it says that its engine died of, by this member's clock; None while it says no such thing."""
        verdict = self.status.verdict if self.status is not None else None
        if verdict is None or verdict.health is not Health.DEAD or verdict.failure is None:
            return None
        return verdict.failure.model_copy(update={"time": verdict.failure.time + self.behind})

    def death_of(self, generation: int) -> Failure | None:
        """Return its `death` if that is one of this engine generation, or of the member itself."""
        death = self.death
        return death if death is not None and death.generation in (None, generation) else None

    @property
    def alive(self) -> float | None:
        """Return the monotonic time of its latest sign of life, answer or heartbeat; None if there was none."""
        return max((time for time in (self.heard, self.beat) if time is not None), default=None)

    def silence(self, now: float, awake: float) -> float | None:
        """Return the seconds since it was heard; None if it never was.

        Args:
            now: monotonic time.
            awake: monotonic time since which the agent that listens has not stood still; before, it heard nobody.
        """
        return None if self.alive is None else max(0.0, now - max(self.alive, awake))

    def lost(self, now: float, awake: float, policy: HealthPolicy) -> Cause | None:
        """Return what it is lost of, `AgentHung` or `NodeLost`; None while it may still be heard."""
        silence = self.silence(now, awake)
        if silence is None:
            return None
        if agent_hung(silence, self.accepting, policy, now):
            return Cause.AGENT_HUNG
        return Cause.NODE_LOST if silence >= policy.link_lost else None

    @property
    def reachable(self) -> bool:
        """Tell whether the latest question was answered."""
        return self.asked is not None and self.error is None

    @property
    def usable(self) -> bool:
        """Tell whether it is there and its Ray node is part of the cluster."""
        return (
            self.reachable and self.status is not None and self.status.joined and self.status.phase is not Phase.FAILED
        )
