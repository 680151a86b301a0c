"""What an agent says about its member: phases, verdicts and their causes."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from dsv4_runtime.contract.base import Report


class Phase(StrEnum):
    """Where a member is in its life, in this order; the last four can follow any other."""

    PREFLIGHT = "Preflight"
    STAGING = "Staging"
    JOINING = "Joining"
    LOADING = "Loading"
    WARMING = "Warming"
    SERVING = "Serving"
    RESTARTING = "Restarting"
    """Level 1: the engine is being restarted in place; Ray and the member stay."""
    FAILED = "Failed"
    DRAINING = "Draining"
    STOPPED = "Stopped"


class Cause(StrEnum):
    """Why an engine or a member is dead. Closed: a new cause is a change of this contract."""

    ENGINE_CORE_DIED = "EngineCoreDied"
    API_SERVER_DIED = "APIServerDied"
    ENGINE_EXITED = "EngineExited"
    """vLLM ended by itself with exit code 0."""
    RAY_WORKER_DIED = "RayWorkerDied"
    RAYLET_DIED = "RayletDied"
    RAY_HEAD_LOST = "RayHeadLost"
    MEMBER_LOST = "MemberLost"
    """A member's agent ended or can no longer be reached."""
    PREFLIGHT_FAILED = "PreflightFailed"
    STAGING_FAILED = "StagingFailed"
    FORMATION_TIMEOUT = "FormationTimeout"
    STARTUP_TIMEOUT = "StartupTimeout"
    CANARY_FAILED = "CanaryFailed"
    """The checked completion did not come, or was not a completion."""
    OUT_OF_MEMORY_HOST = "OutOfMemoryHost"
    PORT_CONFLICT = "PortConflict"
    CONFIG_ERROR = "ConfigError"
    """vLLM refused its arguments or its configuration."""
    UNKNOWN = "Unknown"

    @property
    def deterministic(self) -> bool:
        """Whether trying again cannot help: two of the same in a row end the recovery."""
        return self in _DETERMINISTIC


_DETERMINISTIC = frozenset({Cause.CONFIG_ERROR, Cause.PORT_CONFLICT, Cause.PREFLIGHT_FAILED, Cause.STAGING_FAILED})


class Health(StrEnum):
    """The verdict's first word."""

    STARTING = "Starting"
    HEALTHY = "Healthy"
    SUSPECT = "Suspect"
    DEAD = "Dead"


class Failure(Report):
    """One death: what died, where, how it was noticed, and what was done about it."""

    time: float
    """Unix time at which it was noticed."""
    cause: Cause
    culprit_rank: int | None = None
    message: str
    """The first fatal line, or what was seen; at most 1 KiB."""
    detected_by: str
    """The signal that showed it: `exit`, `process`, `peer`, `timeout`, `log`, `completion`, `preflight`, `staging`."""
    generation: int | None = None
    """The engine generation that died; None if it was not an engine's death."""
    level: int | None = None
    """1: engine restart in place; 2: new incarnation; 3: given up. None until decided."""
    recover_seconds: float | None = None
    """From `time` until the next checked completion. None until then."""


class Verdict(Report):
    """What the evidence says about the engine; a dead one has a cause."""

    health: Health
    failure: Failure | None = None


class Process(Report):
    """A process that the agent watches."""

    name: str
    """`agent`, `ray`, `raylet`, `gcs`, `api`, `engine-core` or `worker`."""
    pid: int


class Progress(Report):
    """How far the present phase has come."""

    stage: str
    """In a few words, for people: `loading shards 2/4`."""
    percent: float | None = Field(default=None, ge=0, le=100)


class EngineStatus(Report):
    """Rank 0 only: the engine's life in this incarnation."""

    generation: int
    """Lives of the engine in this incarnation, the present one included; 0 before the first start."""
    ready_time: float | None = None
    """Unix time of this generation's first checked completion; None until then."""
    restarts: tuple[float, ...] = ()
    """Unix times of the level 1 restarts in this incarnation, oldest first."""
    failures: tuple[Failure, ...] = ()
    """The engine's deaths in this incarnation, oldest first, at most 20."""


class AgentStatus(Report):
    """`GET /v1/status` of an agent."""

    deployment: str
    group: int
    incarnation: int
    rank: int
    phase: Phase
    phase_time: float
    """Unix time at which the phase began."""
    time: float
    """Unix time at which this was written, by the member's clock."""
    progress: Progress | None = None
    verdict: Verdict
    processes: tuple[Process, ...] = ()
    joined: bool = False
    """Whether this member's Ray node is part of the cluster."""
    phase_seconds: dict[str, float] = Field(default_factory=dict)
    """Time spent in each earlier phase of the present start."""
    engine: EngineStatus | None = None
