"""Events of rank 0 after each fault of docs/faults.md, and the interval after the fault in which each arrives."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_runtime.agent.decide.events import (
    AgentEvent,
    ApiEnded,
    CoreFailed,
    CoreLost,
    FabricFellBack,
    FirstCompletion,
    FirstError,
    Judged,
    PluginFailed,
    ProcessEnded,
    RayLost,
    ShuttingDown,
    Task,
    TaskFailed,
)
from dsv4_runtime.contract import Cause, Health
from dsv4_runtime.health.rules import Judgement

Span = tuple[float, float]
"""Earliest and latest arrival of an event, in seconds after the fault."""

CORE = ProcessEnded("engine-core")
SHM = (Cause.SHARED_MEMORY_FULL, "shared memory (/dev/shm) has 0 bytes free")
OOM = (Cause.OUT_OF_MEMORY_HOST, "the kernel ended it because of a lack of memory")


def worker(told: bool | None, explained: tuple[Cause, str] | None = None) -> ProcessEnded:
    return ProcessEnded("worker", told, explained)


def dead(cause: Cause, rank: int | None, rule: str = "process") -> Judged:
    return Judged(Judgement(Health.DEAD, cause, rank, rule, "it is dead", 0.0))


@dataclass(frozen=True)
class Told:
    """Report by rank 1 of a death on its machine."""

    cause: Cause
    of_member: bool = False
    late: float = 0.0
    """Seconds after the fault at which rank 1's agent detects it."""


@dataclass(frozen=True)
class Refused:
    """Connections to rank 1's port are refused."""


@dataclass(frozen=True)
class Leaving:
    """Rank 1 announces its exit."""


@dataclass(frozen=True)
class Fault:
    name: str
    events: tuple[tuple[Span, AgentEvent | Told | Refused | Leaving], ...]
    outcome: tuple[str, int | None, int]
    xids: tuple[int | None, int | None] = (None, None)
    """XIDs reported by the drivers of both ranks."""
    silent: bool = False
    """Rank 1 sends no more reports."""
    accepts: bool = False
    """Rank 1's machine still accepts connections."""
    starting: bool = False
    """The engine is starting and not yet serving."""


DAMAGED = TaskFailed(Task.VERIFY, Cause.WEIGHTS_CORRUPT, "model-1 differs from its source", "staging")
SPOILED = (((0.0, 0.5), FirstCompletion("status 400", wrong=True)), ((0.6, 9.0), DAMAGED))
# After a failure, EngineCore reports it and ends its workers, itself and the API process.
AFTERMATH: tuple[tuple[Span, AgentEvent], ...] = (
    ((0.15, 0.6), CoreFailed()),
    ((0.6, 1.6), CORE),
    ((0.6, 1.9), worker(True)),
    ((0.6, 2.5), ApiEnded(1)),
)
FAULTS = (
    Fault(
        "kill -9 EngineCore",
        (((0.0, 0.05), CORE), ((0.0, 0.05), worker(True)), ((0.3, 1.0), ApiEnded(1))),
        ("EngineCoreDied", 0, 1),
    ),
    Fault(
        "kill -9 EngineCore, seen when vLLM has ended itself for it",
        (
            ((0.0, 0.0), CoreLost()),
            ((0.0, 0.6), ShuttingDown()),
            ((0.0, 1.0), CORE),
            ((0.0, 1.0), worker(True)),
            ((0.0, 1.0), ApiEnded(0)),
        ),
        ("EngineCoreDied", 0, 1),
    ),
    Fault(
        "kill -9 EngineCore, of which Ray's logs say nothing yet",
        (((0.0, 0.045), CORE), ((0.0, 0.045), worker(None)), ((0.3, 1.0), ApiEnded(1))),
        ("EngineCoreDied", 0, 1),
    ),
    Fault("kill -9 Ray worker of rank 0", (((0.0, 0.04), worker(False)), *AFTERMATH), ("RayWorkerDied", 0, 1)),
    Fault(
        "kill -9 Ray worker of rank 1",
        (((0.05, 2.9), Told(Cause.RAY_WORKER_DIED)), *AFTERMATH),
        ("RayWorkerDied", 1, 1),
    ),
    Fault("kill -9 API process", (((0.0, 0.04), ApiEnded(-9)), ((0.0, 0.09), CORE)), ("APIServerDied", 0, 1)),
    Fault(
        "vLLM exits with code 0",
        (((0.0, 0.05), ShuttingDown()), ((0.0, 0.09), CORE), ((0.0, 0.09), worker(True)), ((0.0, 0.3), ApiEnded(0))),
        ("EngineExited", 0, 1),
    ),
    Fault(
        "kill -9 raylet of rank 0",
        (
            ((0.0, 0.04), RayLost(Cause.RAYLET_DIED, "the raylet ended", "process")),
            ((0.0, 0.04), worker(None)),
            *AFTERMATH,
        ),
        ("RayletDied", 0, 2),
    ),
    Fault(
        "kill -9 raylet of rank 1",
        (((0.05, 2.9), Told(Cause.RAYLET_DIED, of_member=True)), *AFTERMATH),
        ("RayletDied", 1, 2),
    ),
    Fault(
        "kill -9 GCS",
        (((0.0, 0.04), RayLost(Cause.RAY_HEAD_LOST, "the gcs ended", "process")), *AFTERMATH),
        ("RayHeadLost", 0, 2),
    ),
    Fault("kill -9 agent of rank 1", (((0.05, 0.9), Refused()), *AFTERMATH), ("MemberLost", 1, 2)),
    Fault("kill -9 whole member 1", (((0.05, 2.9), Refused()), *AFTERMATH), ("MemberLost", 1, 2)),
    Fault(
        "member 1 exits with code 0",
        (((0.0, 0.9), Leaving()), ((0.3, 2.9), Refused()), *AFTERMATH),
        ("MemberLost", 1, 2),
    ),
    Fault("SIGSTOP worker of rank 0", (((2.0, 2.5), dead(Cause.ENGINE_HUNG, 0)),), ("EngineHung", 0, 1)),
    Fault("API process frozen", (((3.0, 4.0), dead(Cause.API_SERVER_HUNG, 0, "api")),), ("APIServerHung", 0, 1)),
    Fault("SIGSTOP worker of rank 1, idle", (((2.0, 5.0), dead(Cause.ENGINE_HUNG, 1)),), ("EngineHung", 1, 1)),
    Fault(
        "SIGSTOP GCS", (((2.0, 2.6), RayLost(Cause.RAY_HEAD_HUNG, "it is stopped", "process")),), ("RayHeadHung", 0, 2)
    ),
    Fault("GCS frozen", (((4.0, 6.0), RayLost(Cause.RAY_HEAD_HUNG, "no answer", "api", 0)),), ("RayHeadHung", 0, 2)),
    Fault(
        "kill -9 runtime-env agent of rank 1",
        (((0.05, 2.9), Told(Cause.RAYLET_DIED, of_member=True)), *AFTERMATH),
        ("RayletDied", 1, 2),
    ),
    Fault(
        "SIGSTOP standby server, then kill -9 EngineCore",
        (((0.0, 0.05), CORE), ((0.0, 0.05), worker(True)), ((0.3, 1.0), ApiEnded(1))),
        ("EngineCoreDied", 0, 1),
    ),
    Fault(
        "SIGSTOP API process of a start",
        (((2.0, 3.0), dead(Cause.ENGINE_HUNG, 0, "start")),),
        ("EngineHung", 0, 1),
        starting=True,
    ),
    Fault(
        "directory of member 1 removed, then kill -9 EngineCore",
        (((0.0, 0.05), TaskFailed(Task.CLEAR, Cause.PREFLIGHT_FAILED, "it was removed", "preflight", 1)),),
        ("PreflightFailed", 1, 2),
    ),
    Fault(
        "SIGSTOP agent of rank 1", (((4.0, 4.5), dead(Cause.AGENT_HUNG, 1, "link")),), ("AgentHung", 1, 2), accepts=True
    ),
    Fault("exception in a step of rank 1", (((3.0, 5.0), dead(Cause.ENGINE_HUNG, 1, "steps")),), ("EngineHung", 1, 1)),
    Fault("hang in a step of rank 1", (((3.0, 5.0), dead(Cause.ENGINE_HUNG, 1, "steps")),), ("EngineHung", 1, 1)),
    Fault(
        "/dev/shm of member 0 full",
        (((0.0, 0.04), ProcessEnded("engine-core", None, SHM)), ((0.1, 1.0), ApiEnded(1, SHM))),
        ("SharedMemoryFull", 0, 1),
    ),
    Fault("NaN in a weight file, at the next start", SPOILED, ("WeightsCorrupt", 0, 2), starting=True),
    Fault("64 KiB of zeros in a weight file, at the next start", SPOILED, ("WeightsCorrupt", 0, 2), starting=True),
    Fault("SIGSTOP EngineCore", (((2.0, 2.5), dead(Cause.ENGINE_HUNG, 0)),), ("EngineHung", 0, 1)),
    Fault("SIGSTOP worker of rank 1", (((2.0, 2.5), dead(Cause.ENGINE_HUNG, 1)),), ("EngineHung", 1, 1)),
    Fault("SIGSTOP API process", (((2.0, 2.5), dead(Cause.API_SERVER_HUNG, 0)),), ("APIServerHung", 0, 1)),
    Fault("EngineCore frozen", (((3.5, 4.0), dead(Cause.ENGINE_HUNG, None, "steps")),), ("EngineHung", None, 1)),
    Fault(
        # The loop, which still reaches both members, changes this cause to LinkLost.
        "packets from member 0 to member 1 lost",
        (((9.0, 9.5), dead(Cause.NODE_LOST, 1, "link")),),
        ("NodeLost", 1, 2),
        silent=True,
    ),
    Fault("link of member 1 down", (((9.0, 9.5), dead(Cause.NODE_LOST, 1, "link")),), ("NodeLost", 1, 2), silent=True),
    Fault(
        "SIGSTOP raylet of rank 0",
        (((2.0, 2.6), RayLost(Cause.RAYLET_HUNG, "the raylet is stopped", "process")),),
        ("RayletHung", 0, 2),
    ),
    Fault(
        "SIGSTOP raylet of rank 1",
        (((2.0, 4.5), Told(Cause.RAYLET_HUNG, of_member=True)),),
        ("RayletHung", 1, 2),
    ),
    Fault(
        "exception in a step of rank 0, the worker told to end",
        (((0.0, 0.3), worker(True)), ((0.0, 0.3), CoreFailed()), ((1.0, 1.5), CORE), ((0.5, 1.5), ApiEnded(1))),
        ("EngineCoreDied", 0, 1),
    ),
    Fault(
        "exception in a step of rank 0, of which Ray's logs say nothing",
        (((0.0, 0.04), worker(None)), ((0.0, 0.04), CoreFailed()), ((0.0, 0.09), ApiEnded(1)), ((1.0, 1.5), CORE)),
        ("EngineCoreDied", 0, 1),
    ),
    Fault(
        "exception in a step of rank 0, its API process ends first",
        (((0.0, 0.05), ApiEnded(1)), ((0.0, 0.05), CoreFailed()), ((0.5, 1.5), CORE)),
        ("EngineCoreDied", 0, 1),
    ),
    Fault(
        "logits of rank 1 are not numbers", (((3.0, 4.0), dead(Cause.CANARY_FAILED, None)),), ("CanaryFailed", None, 1)
    ),
    Fault(
        "member 0 out of memory",
        (((0.0, 0.04), worker(False, OOM)), *AFTERMATH),
        ("OutOfMemoryHost", 0, 1),
    ),
    Fault(
        "member 1 out of memory",
        (((0.05, 2.9), Told(Cause.OUT_OF_MEMORY_HOST)), *AFTERMATH),
        ("OutOfMemoryHost", 1, 1),
    ),
    Fault(
        "member 1 out of memory, on the machine of rank 0, and its agent sees it late",
        (
            ((0.0, 0.3), CoreFailed(OOM)),
            ((0.05, 0.9), Told(Cause.OUT_OF_MEMORY_HOST, late=0.9)),
            ((0.6, 1.6), CORE),
            ((0.6, 1.9), worker(True)),
        ),
        ("OutOfMemoryHost", 1, 1),
    ),
    Fault(
        "the GPU has no memory left",
        (
            ((0.0, 0.1), FirstError("torch.OutOfMemoryError: CUDA out of memory", Cause.OUT_OF_MEMORY_GPU)),
            ((0.0, 0.3), CoreFailed()),
            ((0.5, 1.5), CORE),
            ((0.5, 2.5), ApiEnded(1)),
        ),
        ("OutOfMemoryGPU", 0, 1),
    ),
    Fault(
        "a fatal error of rank 1's accelerator",
        (((0.0, 2.0), Told(Cause.RAY_WORKER_DIED)), ((0.0, 0.04), worker(False)), *AFTERMATH),
        ("XidError", 1, 1),
        xids=(None, 79),
    ),
    Fault(
        "NCCL falls back to sockets",
        (((0.0, 0.05), FabricFellBack("NCCL uses TCP sockets")), ((0.02, 0.09), CORE)),
        ("NCCLSocketFallback", 0, 1),
    ),
    Fault(
        "vLLM cannot load dsv4's plugin",
        (((0.0, 0.1), FirstError("Failed to load plugin dsv4", Cause.PLUGIN_NOT_LOADED)), ((0.1, 0.2), PluginFailed())),
        ("PluginNotLoaded", 0, 1),
        starting=True,
    ),
)
