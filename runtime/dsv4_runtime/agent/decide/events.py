"""Events that `step` handles, as frozen dataclasses, and the other members as they appear in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dsv4_runtime.contract import AgentStatus, Cause, Failure, Health, HealthPolicy, Phase, Signals
from dsv4_runtime.engine.completion import KnownAnswer
from dsv4_runtime.health.rules import Judgement, agent_hung


@dataclass(frozen=True, slots=True)
class Peer:
    """Latest answer and heartbeat of another member."""

    status: AgentStatus | None = None
    heard: float | None = None
    """Monotonic time of that answer."""
    asked: float | None = None
    """Monotonic time at which the latest request was sent."""
    error: str | None = None
    """Error of the latest request; None if it was answered."""
    refused: bool = False
    """Its node refused the connection: the agent has ended."""
    beat: float | None = None
    """Monotonic time of its latest heartbeat."""
    round_trip: float | None = None
    """Seconds of that heartbeat, there and back."""
    accepting: float | None = None
    """Monotonic time since which its machine accepts connections that the agent does not answer; None: it does not, or
    the agent answers."""
    behind: float = 0.0
    """Seconds by which its clock lags behind this member's; 0 if its latest answer is consistent with it."""

    @property
    def death(self) -> Failure | None:
        """Return the failure of a dead engine in its status, by this member's clock; None otherwise."""
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
        """Return the seconds since the last sign of life, not before `awake`, the end of this agent's latest pause;
        None if there was none. Both times are monotonic."""
        return None if self.alive is None else max(0.0, now - max(self.alive, awake))

    def lost(self, now: float, awake: float, policy: HealthPolicy) -> Cause | None:
        """Return the cause of its loss, `AgentHung` or `NodeLost`; None while it is not lost."""
        silence = self.silence(now, awake)
        if silence is None:
            return None
        if agent_hung(silence, self.accepting, policy, now):
            return Cause.AGENT_HUNG
        return Cause.NODE_LOST if silence >= policy.link_lost else None

    @property
    def reachable(self) -> bool:
        """Return whether it answered the latest request."""
        return self.asked is not None and self.error is None

    @property
    def usable(self) -> bool:
        """Return whether it is present and its Ray node is part of the cluster."""
        return (
            self.reachable and self.status is not None and self.status.joined and self.status.phase is not Phase.FAILED
        )


@dataclass(frozen=True, slots=True)
class Now:
    """The moment at which an event is handled."""

    clock: float
    """Monotonic time."""
    unix: float
    """The same moment as Unix time."""
    awake: float = 0.0
    """End of this agent's latest pause, in monotonic time."""


class Task(StrEnum):
    """Work of the agent that takes time; at most one of each runs."""

    PREFLIGHT = "preflight"
    LISTEN = "listen"
    STAGE = "stage"
    PROVE = "prove"
    READ_AHEAD = "read-ahead"
    JOIN = "join"
    ENGINE = "engine"
    """vLLM's processes and their log."""
    PROBE = "probe"
    """Requests to vLLM's API: until it answers, the first completion, and the watch over a serving engine."""
    SCRUB = "scrub"
    """Reading the weights' files again while the engine serves."""
    VERIFY = "verify"
    """Reading them at full speed, because an engine's first answer is wrong or its loader failed."""
    STANDBY = "standby"
    """Starting standby processes for the next engine."""
    EVIDENCE = "evidence"
    CLEAR = "clear"


class AgentEvent:
    """Base of the events."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Started(AgentEvent):
    """The agent runs."""


@dataclass(frozen=True, slots=True)
class Done(AgentEvent):
    """A task has done its work."""

    task: Task


@dataclass(frozen=True, slots=True)
class Staged(AgentEvent):
    """The weights are on this member."""

    verified: bool = False
    """Whether the content of every file was read, and is right."""


@dataclass(frozen=True, slots=True)
class WeightsRead(AgentEvent):
    """Every file of the weights was read to its end, and none is wrong."""

    task: Task
    """Task that read them."""
    right: bool = True
    """Whether they are known to be right; otherwise there is no reference to compare with."""


@dataclass(frozen=True, slots=True)
class TaskFailed(AgentEvent):
    """A task ended with an error that ends the member."""

    task: Task
    cause: Cause
    message: str
    detected_by: str
    culprit_rank: int | None = None
    """None: this member."""


@dataclass(frozen=True, slots=True)
class Crashed(AgentEvent):
    """Unhandled exception in the agent."""

    message: str


@dataclass(frozen=True, slots=True)
class RayLost(AgentEvent):
    """The Ray node of this member ended, or no longer answers."""

    cause: Cause
    message: str
    detected_by: str
    culprit_rank: int | None = None
    """None: this member."""


@dataclass(frozen=True, slots=True)
class ProcessEnded(AgentEvent):
    """A watched process of the engine ended, reported by the kernel."""

    role: str
    """`engine-core` or `worker`."""
    ordered: bool | None = None
    """Whether Ray ordered this worker to end; None if Ray's logs do not mention it, or there is no Ray."""
    explained: tuple[Cause, str] | None = None
    """Cause and evidence, if an observation on this member explains the end."""


@dataclass(frozen=True, slots=True)
class ApiEnded(AgentEvent):
    """The API process of vLLM has ended; on other ranks than 0 the executor process, the parent of their workers."""

    code: int
    """Exit code; negative signal number."""
    explained: tuple[Cause, str] | None = None
    """As in `ProcessEnded`."""


@dataclass(frozen=True, slots=True)
class CoreFailed(AgentEvent):
    """Log line of vLLM: EngineCore cannot continue. It may take seconds to end."""

    explained: tuple[Cause, str] | None = None
    """As in `ProcessEnded`."""


@dataclass(frozen=True, slots=True)
class CoreLost(AgentEvent):
    """Log line of vLLM: EngineCore ended. The API process then shuts down regularly."""


@dataclass(frozen=True, slots=True)
class WorkerLost(AgentEvent):
    """Log line of vLLM: a worker of this machine ended although its executor runs. EngineCore then fails."""


@dataclass(frozen=True, slots=True)
class ShuttingDown(AgentEvent):
    """Log line of vLLM: regular shutdown."""


@dataclass(frozen=True, slots=True)
class FabricFellBack(AgentEvent):
    """Log line of vLLM: NCCL does not use the network that the plan requires."""

    message: str


@dataclass(frozen=True, slots=True)
class PluginFailed(AgentEvent):
    """Log line of vLLM: it continues without dsv4's plugin."""


@dataclass(frozen=True, slots=True)
class EngineGone(AgentEvent):
    """No process of the engine that was to be killed is left on this member."""


@dataclass(frozen=True, slots=True)
class Loading(AgentEvent):
    """Log line of vLLM with the progress of its start."""

    stage: str


@dataclass(frozen=True, slots=True)
class FirstError(AgentEvent):
    """The first line of vLLM's log that announces a death, and the cause that it names, if any."""

    line: str
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class ApiAnswered(AgentEvent):
    """The API of vLLM answers for the first time in this generation."""


@dataclass(frozen=True, slots=True)
class FirstCompletion(AgentEvent):
    """The first completion of a generation came back, and was checked."""

    error: str | None = None
    """Reason why there was none; None: it is right."""
    wrong: bool = False
    """Whether there was an answer that differs from a working engine's, or from the stored one."""
    verified: bool = False
    """Whether every member's files of the weights are verified as right."""
    unknown: KnownAnswer | None = None
    """The answer to the known question, if no stored one exists."""


@dataclass(frozen=True, slots=True)
class Judged(AgentEvent):
    """The health rules judged the serving engine."""

    judgement: Judgement


@dataclass(frozen=True, slots=True)
class GroupSeen(AgentEvent):
    """Latest observation of the other members, and this member's own signals."""

    peers: Mapping[int, Peer]
    signals: Signals | None = None
    disk_rate: float | None = None
    """Bytes a second at which this member's disk gave the checkpoint; None: not measured."""
    gcs_answered: float | None = None
    """Monotonic time of the latest answer of Ray's GCS to this member; None before the first."""
    weights_place: str = ""
    """As `AgentStatus.weights_place` of this member."""


@dataclass(frozen=True, slots=True)
class EvidenceSaved(AgentEvent):
    """The evidence of the latest death is written."""

    path: Path | None
    """None: it could not be written."""


@dataclass(frozen=True, slots=True)
class DrainAsked(AgentEvent):
    """A drain of open requests was requested, for a planned end of the group."""

    seconds: float


@dataclass(frozen=True, slots=True)
class TimerFired(AgentEvent):
    """The time returned by `due` has come."""


@dataclass(frozen=True, slots=True)
class StopAsked(AgentEvent):
    """The member is to end."""
