"""Table of faults: the action of each fault and the expected verdict of dsv4."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from signal import SIGKILL, SIGSTOP, SIGTERM

from dsv4_testkit.faults.actions import (
    Action,
    AtStart,
    CorruptWeights,
    Frozen,
    FullSharedMemory,
    How,
    InStep,
    KillAuxiliary,
    Latency,
    LinkDown,
    Loss,
    OneWayLoss,
    OutOfMemory,
    RemovedDirectory,
    Signal,
    StoppedStandby,
)


class Kind(StrEnum):
    """Class of a fault; each class has a bound for detection."""

    CERTAIN = "certain death"
    HANG = "hang"
    PARTITION = "partition"
    ANSWER = "wrong answer"
    START = "failed start"
    OWN = "process of dsv4"
    """The engine must be unaffected; the process is replaced."""
    NONE = "no death"
    """The engine must survive: any verdict but `Healthy` is false."""


BOUND = {Kind.CERTAIN: 3.0, Kind.HANG: 6.0, Kind.PARTITION: 20.0, Kind.ANSWER: 60.0, Kind.START: 120.0, Kind.OWN: 5.0}
"""Seconds from the fault to the verdict, p95, on an otherwise idle machine.

A link that recovers within 8 s must not lead to a verdict, so a partition cannot be detected sooner. A wrong answer is
detected by the next canary, a failed start only after the start.
"""


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    name: str
    kind: Kind
    action: Action
    causes: tuple[str, ...] = ()
    """Acceptable causes; one of them must be reported."""
    rank: int | None = None
    """Rank in which the fault begins; None if it cannot be determined."""
    level: int | None = None
    idle: bool = False
    """The fault is caused while no client sends requests."""
    bare: bool = False
    """The fault applies without an agent, so it is also caused in the peer."""
    nth: int = 0
    """Index of the assessed death after the fault; 1 if the action itself ends the engine first."""

    @property
    def cause(self) -> str:
        """The acceptable cause, or the first of several."""
        return self.causes[0]


def _dies(name: str, process: str, rank: int, cause: str, level: int, *, bare: bool = False) -> Fault:
    return Fault(f"kill -9 {name}", Kind.CERTAIN, Signal(process, rank, SIGKILL), (cause,), rank, level, bare=bare)


def _stops(name: str, process: str, rank: int, cause: str, level: int = 1, *, bare: bool = True) -> Fault:
    return Fault(f"SIGSTOP {name}", Kind.HANG, Signal(process, rank, SIGSTOP), (cause,), rank, level, bare=bare)


FAULTS = (
    _dies("EngineCore", "engine-core", 0, "EngineCoreDied", 1, bare=True),
    _dies("Ray worker of rank 0", "worker", 0, "RayWorkerDied", 1),
    _dies("Ray worker of rank 1", "worker", 1, "RayWorkerDied", 1, bare=True),
    _dies("API process", "api", 0, "APIServerDied", 1, bare=True),
    Fault("vLLM exits with code 0", Kind.CERTAIN, Signal("api", 0, SIGTERM), ("EngineExited",), 0, 1, bare=True),
    _dies("raylet of rank 0", "raylet", 0, "RayletDied", 2),
    _dies("raylet of rank 1", "raylet", 1, "RayletDied", 2, bare=True),
    _dies("GCS", "gcs", 0, "RayHeadLost", 2, bare=True),
    _dies("agent of rank 0", "agent", 0, "MemberLost", 2),
    _dies("agent of rank 1", "agent", 1, "MemberLost", 2),
    _dies("whole member 1", "member", 1, "MemberLost", 2, bare=True),
    Fault("member 1 exits with code 0", Kind.CERTAIN, Signal("agent", 1, SIGTERM), ("MemberLost",), 1, 2),
    _stops("EngineCore", "engine-core", 0, "EngineHung"),
    _stops("worker of rank 0", "worker", 0, "EngineHung"),
    _stops("worker of rank 1", "worker", 1, "EngineHung"),
    _stops("API process", "api", 0, "APIServerHung"),
    _stops("raylet of rank 0", "raylet", 0, "RayletHung", 2, bare=False),
    _stops("raylet of rank 1", "raylet", 1, "RayletHung", 2),
    _stops("GCS", "gcs", 0, "RayHeadHung", 2),
    _stops("agent of rank 0", "agent", 0, "AgentHung", 2, bare=False),
    _stops("agent of rank 1", "agent", 1, "AgentHung", 2, bare=False),
    Fault("GCS frozen", Kind.HANG, Frozen("gcs", 0), ("RayHeadHung",), 0, 2),
    # Ray's raylet detects the death of its agent within a second and exits.
    Fault(
        "kill -9 runtime-env agent of rank 1",
        Kind.CERTAIN,
        KillAuxiliary("RuntimeEnvAgent", 1),
        ("RayletDied",),
        1,
        2,
    ),
    Fault(
        "SIGSTOP standby server, then kill -9 EngineCore",
        Kind.CERTAIN,
        StoppedStandby(),
        ("EngineCoreDied",),
        0,
        1,
        idle=True,
    ),
    Fault("SIGSTOP API process of a start", Kind.START, AtStart("api", 0, How.STOP), ("EngineHung",), 0, 1, nth=1),
    Fault(
        "directory of member 1 removed, then kill -9 EngineCore",
        Kind.START,
        RemovedDirectory(1),
        ("PreflightFailed",),
        1,
        2,
        nth=1,
    ),
    Fault("API process frozen", Kind.HANG, Frozen("api", 0), ("APIServerHung",), 0, 1, bare=True),
    # No worker receives a step; the symptoms equal those of steps that hang on the devices of all workers.
    Fault("EngineCore frozen", Kind.HANG, Frozen("engine-core", 0), ("EngineHung",), None, 1, bare=True),
    Fault(
        "SIGSTOP worker of rank 1, idle",
        Kind.ANSWER,
        Signal("worker", 1, SIGSTOP),
        ("EngineHung", "CanaryFailed"),
        1,
        1,
        idle=True,
    ),
    Fault("link of member 1 down", Kind.PARTITION, LinkDown(1), ("NodeLost",), 1, 2, bare=True),
    Fault("packets from member 0 to member 1 lost", Kind.PARTITION, OneWayLoss(0, 1), ("LinkLost",), None, 2),
    Fault("all frames of member 1 lost for 8 s", Kind.NONE, Loss(1, 8.0), bare=True),
    Fault("300 ms latency to member 1 for 30 s", Kind.NONE, Latency(1, 0.3, 30.0), bare=True),
    Fault("exception in a step of rank 0", Kind.CERTAIN, InStep("raise", 0), ("EngineCoreDied",), 0, 1, bare=True),
    # vLLM 0.32 propagates exceptions only of the rank that returns the output (`multiproc_executor.py`); with an
    # exception in any other rank, the remaining ranks wait for data that is never sent.
    Fault("exception in a step of rank 1", Kind.HANG, InStep("raise", 1), ("EngineHung",), 1, 1, bare=True),
    Fault("hang in a step of rank 1", Kind.HANG, InStep("hang", 1, hold=3600.0), ("EngineHung",), 1, 1, bare=True),
    Fault("70 s of work in a step of rank 1", Kind.NONE, InStep("spin", 1, seconds=70.0), bare=True),
    Fault("logits of rank 1 are not numbers", Kind.ANSWER, InStep("nan", 1), ("CanaryFailed",), None, 1, idle=True),
    Fault("member 1 out of memory", Kind.CERTAIN, OutOfMemory(1), ("OutOfMemoryHost",), 1, 1),
    Fault("/dev/shm of member 0 full", Kind.START, FullSharedMemory(0), ("SharedMemoryFull",), 0, 2, nth=1),
    # Members on one machine share the file, so either of them may detect the damage first.
    Fault(
        "NaN in a weight file, at the next start",
        Kind.START,
        CorruptWeights("norm.weight", b"\xc0\x7f"),
        ("WeightsCorrupt",),
        None,
        2,
        nth=1,
    ),
    Fault(
        "64 KiB of zeros in a weight file, at the next start",
        Kind.START,
        CorruptWeights("attn.wkv.weight", b"\0\0", 64 << 10),
        ("WeightsCorrupt",),
        None,
        2,
        nth=1,
    ),
)

BY_NAME = {fault.name: fault for fault in FAULTS}

PROCESS_DEATHS = tuple(
    BY_NAME[name]
    for name in (
        "kill -9 EngineCore",
        "kill -9 Ray worker of rank 1",
        "kill -9 API process",
        "vLLM exits with code 0",
        "kill -9 raylet of rank 1",
        "kill -9 agent of rank 1",
    )
)
"""One kind of death per process and recovery level, used by the main job's test and `recovery.py`."""
