"""Actions of an agent, as `step` returns them; `agent.member` and, on rank 0, `agent.engine` run them."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_runtime.agent.decide.events import Task
from dsv4_runtime.contract import Failure, Phase
from dsv4_runtime.engine.completion import KnownAnswer


@dataclass(frozen=True, slots=True)
class StartTask:
    """Start a task that needs no argument."""

    task: Task


@dataclass(frozen=True, slots=True)
class Stop:
    """Cancel these tasks; what they would still have said is not heard."""

    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Enter:
    """Report a phase; the present one again only changes what it is busy with."""

    phase: Phase
    stage: str | None = None


@dataclass(frozen=True, slots=True)
class ReportJoined:
    """Report whether this member's Ray node is part of the cluster."""

    joined: bool


@dataclass(frozen=True, slots=True)
class ReportSuspicion:
    """Report what the engine will be dead of unless it shows life soon; None: of nothing."""

    failure: Failure | None


@dataclass(frozen=True, slots=True)
class ReportDead:
    """Report that the engine is dead; of what exactly may still be found out."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class RecordFailure:
    """Keep a failure in the status, as the present verdict too."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class RecordRepair:
    """Replace the latest failure by the same one with the level that repairs it."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class RecordRestart:
    """Count a restart in place against the budget."""

    time: float
    """Unix time."""


@dataclass(frozen=True, slots=True)
class ReportServing:
    """Report that a checked completion came back: all failures so far are over."""


@dataclass(frozen=True, slots=True)
class FollowGeneration:
    """Not rank 0: report the engine generation that the head speaks of; what was seen of the last one is over."""

    generation: int


@dataclass(frozen=True, slots=True)
class FindProcesses:
    """Look for processes to watch that were not there at the last look."""


@dataclass(frozen=True, slots=True)
class KillEngine:
    """Kill the watched processes of a dead engine on this member."""


@dataclass(frozen=True, slots=True)
class SweepSharedMemory:
    """Remove shared memory that an engine's death left behind."""


@dataclass(frozen=True, slots=True)
class DoubtWeights:
    """Note that the checkpoint's files are to be read again before the next start."""

    why: str


@dataclass(frozen=True, slots=True)
class ReportVerified:
    """Report whether the content of the weights' files is right; True ends the doubt about them."""

    right: bool | None
    """As `AgentStatus.weights_verified`."""


@dataclass(frozen=True, slots=True)
class KeepAnswer:
    """Keep the answer to the known question, for later starts to be compared with."""

    answer: KnownAnswer


@dataclass(frozen=True, slots=True)
class StopChildren:
    """End the child processes, the latest first."""


@dataclass(frozen=True, slots=True)
class Exit:
    """End the agent with an error."""

    message: str


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Start vLLM, the next generation, and ask it until it answers."""

    load_seconds: float
    """The time that it has for that."""


@dataclass(frozen=True, slots=True)
class AskFirstCompletion:
    """Ask for the first completion of a generation."""


@dataclass(frozen=True, slots=True)
class WatchEngine:
    """Sample the serving engine and have the health rules judge it."""


@dataclass(frozen=True, slots=True)
class SaveEvidence:
    """Save what every member and Ray know of a death."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class BeginDrain:
    """Wait for the open requests of the serving engine."""

    seconds: float


AgentAction = (
    StartTask
    | Stop
    | Enter
    | ReportJoined
    | ReportSuspicion
    | ReportDead
    | RecordFailure
    | RecordRepair
    | RecordRestart
    | ReportServing
    | FollowGeneration
    | FindProcesses
    | KillEngine
    | SweepSharedMemory
    | DoubtWeights
    | ReportVerified
    | KeepAnswer
    | StopChildren
    | Exit
    | StartEngine
    | AskFirstCompletion
    | WatchEngine
    | SaveEvidence
    | BeginDrain
)
