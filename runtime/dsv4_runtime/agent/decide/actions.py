"""Actions of an agent, as `step` returns them; `agent.member` and, on rank 0, `agent.engine` run them."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_runtime.agent.decide.events import Task
from dsv4_runtime.contract import Cause, Failure, Phase
from dsv4_runtime.engine.completion import KnownAnswer


class AgentAction:
    """Base of the actions."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class StartTask(AgentAction):
    """Start a task that needs no argument."""

    task: Task


@dataclass(frozen=True, slots=True)
class Stop(AgentAction):
    """Cancel these tasks and drop their results."""

    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Enter(AgentAction):
    """Report a phase; for the present phase only its stage changes."""

    phase: Phase
    stage: str | None = None


@dataclass(frozen=True, slots=True)
class ReportJoined(AgentAction):
    """Report whether this member's Ray node is part of the cluster."""

    joined: bool


@dataclass(frozen=True, slots=True)
class ReportSuspicion(AgentAction):
    """Report the failure that a suspect engine is about to have; None: it is not suspect."""

    failure: Failure | None


@dataclass(frozen=True, slots=True)
class ReportDead(AgentAction):
    """Report that the engine is dead; the final cause may follow."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class RecordFailure(AgentAction):
    """Record a failure in the status and as the present verdict."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class RecordRepair(AgentAction):
    """Replace the latest failure by a copy with the level of its repair."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class RecordRestart(AgentAction):
    """Count a restart in place against the budget."""

    time: float
    """Unix time."""


@dataclass(frozen=True, slots=True)
class ReportServing(AgentAction):
    """Report a checked completion, on rank 0 or in the head's status: all failures up to now are recovered."""


@dataclass(frozen=True, slots=True)
class FollowGeneration(AgentAction):
    """Not rank 0: report the head's new engine generation, and discard observations of the last one."""

    generation: int


@dataclass(frozen=True, slots=True)
class FindProcesses(AgentAction):
    """Watch engine and Ray processes that started since the last scan."""


@dataclass(frozen=True, slots=True)
class KillEngine(AgentAction):
    """Kill the watched processes of a dead engine on this member."""


@dataclass(frozen=True, slots=True)
class SweepSharedMemory(AgentAction):
    """Remove shared memory that a dead engine left behind."""


@dataclass(frozen=True, slots=True)
class ReleaseWeights(AgentAction):
    """Release the weights that were to outlive the engine."""

    cause: Cause
    """Of the engine's death."""


@dataclass(frozen=True, slots=True)
class DoubtWeights(AgentAction):
    """Request a new verification of the checkpoint's files before the next start."""

    why: str


@dataclass(frozen=True, slots=True)
class ReportVerified(AgentAction):
    """Report whether the content of the weights' files is right; True ends the doubt."""

    right: bool | None
    """As `AgentStatus.weights_verified`."""


@dataclass(frozen=True, slots=True)
class KeepAnswer(AgentAction):
    """Store the answer to the known question for the comparison at later starts."""

    answer: KnownAnswer


@dataclass(frozen=True, slots=True)
class StopChildren(AgentAction):
    """End the child processes, the latest first."""


@dataclass(frozen=True, slots=True)
class Exit(AgentAction):
    """End the agent with an error."""

    message: str


@dataclass(frozen=True, slots=True)
class StartEngine(AgentAction):
    """Start vLLM as the next generation, and on rank 0 poll it until it answers."""

    load_seconds: float
    """Bound of the start."""


@dataclass(frozen=True, slots=True)
class AskFirstCompletion(AgentAction):
    """Request the first completion of a generation."""


@dataclass(frozen=True, slots=True)
class WatchEngine(AgentAction):
    """Sample the serving engine and apply the health rules."""


@dataclass(frozen=True, slots=True)
class SaveEvidence(AgentAction):
    """Save the evidence of a death from all members and Ray."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class BeginDrain(AgentAction):
    """Wait for the open requests of the serving engine."""

    seconds: float
