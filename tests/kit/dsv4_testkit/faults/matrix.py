"""Fault matrix: the table of faults, and further cells by process, phase and environment.

docs/faults.md lists the cells without a row, each with its reason.
"""

from __future__ import annotations

from signal import SIGKILL, SIGSTOP, Signals

from dsv4_testkit.faults.actions import Action, AtStart, Frozen, Signal
from dsv4_testkit.faults.own import AtFormation, How, NoDescriptors, Own, OwnProcess, RemovedFiles, Together
from dsv4_testkit.faults.table import FAULTS, Fault, Kind

_CORE = Signal("engine-core", 0, SIGKILL)
_DESCRIPTOR_SECONDS = 20.0
_STARTING_SECONDS = 3.0
"""Delay between the death of an engine and the start of the next one."""


def _replaced(process: Own) -> list[Fault]:
    # The engine works without a dashboard, so a stopped dashboard is not replaced.
    hows = [How.KILL] if process is Own.DASHBOARD else list(How)
    return [Fault(f"{how} {process}", Kind.OWN, OwnProcess(process, how)) for how in hows]


def _own() -> list[Fault]:
    found = [fault for process in Own if process is not Own.WORKER for fault in _replaced(process)]
    for process in (Own.GATEWAY, Own.LOOP):
        for how in How:
            own = OwnProcess(process, how)
            name = f"{how} {process} and kill -9 EngineCore"
            found.append(Fault(name, Kind.CERTAIN, Together((own, _CORE)), ("EngineCoreDied",), 0, 1))
            action = Together((_CORE, OwnProcess(process, how)), pause=_STARTING_SECONDS)
            found.append(Fault(f"{how} {process} of a start", Kind.CERTAIN, action, ("EngineCoreDied",), 0, 1))
    both = Together((OwnProcess(Own.GATEWAY, How.STOP), OwnProcess(Own.LOOP, How.STOP)))
    found.append(Fault("SIGSTOP gateway and loop", Kind.OWN, both))
    for how in (How.KILL, How.FREEZE):
        action = Together((OwnProcess(Own.STANDBY, how), _CORE))
        name = f"{how} standby server, then kill -9 EngineCore"
        found.append(Fault(name, Kind.CERTAIN, action, ("EngineCoreDied",), 0, 1, idle=True))
    stopped = Together((OwnProcess(Own.WORKER, How.STOP), _CORE))
    name = "SIGSTOP waiting worker, then kill -9 EngineCore"
    found.append(Fault(name, Kind.CERTAIN, stopped, ("EngineCoreDied",), 0, 1, idle=True))
    # After other deaths: an agent replaces at most five standby processes in a row for one engine.
    return found + _replaced(Own.WORKER)


def _starting() -> list[Fault]:
    """Return faults of an engine's processes during its start; the action itself causes the first death."""
    died = {"api": "APIServerDied", "engine-core": "EngineCoreDied", "worker": "RayWorkerDied"}
    names = {"api": "API process", "engine-core": "EngineCore", "worker": "Ray worker of rank 1"}
    found = []
    for process, cause in died.items():
        rank = 1 if process == "worker" else 0
        for how in How:
            if (process, how) == ("api", How.STOP):
                continue  # in `FAULTS`
            causes = (cause,) if how is How.KILL else ("EngineHung",)
            action = AtStart(process, rank, how)
            found.append(Fault(f"{how} {names[process]} of a start", Kind.START, action, causes, rank, 1, nth=1))
    for process, causes in {
        "gcs": ("RayHeadLost", "RayHeadHung", "FormationTimeout"),
        "raylet": ("RayletDied", "RayletHung", "FormationTimeout"),
    }.items():
        for how in (How.KILL, How.STOP):
            rank = 0 if process == "gcs" else 1
            name = f"{how} {'GCS' if process == 'gcs' else 'raylet of rank 1'} during `ray start`"
            found.append(Fault(name, Kind.START, AtFormation(process, rank, how), causes, None, 2, nth=1))
    return found


def _simultaneous() -> list[Fault]:
    def both(process: str, number: Signals) -> Action:
        return Together(tuple(Signal(process, rank, number) for rank in (0, 1)))

    return [
        Fault("kill -9 workers of both ranks", Kind.CERTAIN, both("worker", SIGKILL), ("RayWorkerDied",), None, 1),
        Fault("SIGSTOP workers of both ranks", Kind.HANG, both("worker", SIGSTOP), ("EngineHung",), None, 1),
        Fault("kill -9 raylets of both ranks", Kind.CERTAIN, both("raylet", SIGKILL), ("RayletDied",), None, 2),
        Fault("kill -9 agents of both ranks", Kind.CERTAIN, both("agent", SIGKILL), ("MemberLost",), None, 2),
    ]


def _frozen() -> list[Fault]:
    found = [Fault("worker of rank 1 frozen", Kind.HANG, Frozen("worker", 1), ("EngineHung",), None, 1)]
    for rank in (0, 1):
        found.append(Fault(f"agent of rank {rank} frozen", Kind.HANG, Frozen("agent", rank), ("AgentHung",), rank, 2))
        found.append(
            Fault(f"raylet of rank {rank} frozen", Kind.HANG, Frozen("raylet", rank), ("RayletHung",), rank, 2)
        )
    return found


def _environment() -> list[Fault]:
    found = [
        Fault(
            f"no free descriptor for {name}, {_DESCRIPTOR_SECONDS:.0f} s",
            Kind.NONE,
            NoDescriptors(process, rank, _DESCRIPTOR_SECONDS),
        )
        for name, process, rank in (
            ("a gateway", Own.GATEWAY, 0),
            ("the loop", Own.LOOP, 0),
            ("the agent of rank 0", "agent", 0),
            ("the agent of rank 1", "agent", 1),
        )
    ]
    gateway, loop = OwnProcess(Own.GATEWAY, How.KILL), OwnProcess(Own.LOOP, How.KILL)
    found.append(
        Fault("files of the gateways removed, then kill -9 gateway", Kind.OWN, RemovedFiles("gateway*.json", gateway))
    )
    found.append(Fault("status files removed, then kill -9 loop", Kind.OWN, RemovedFiles("object.json", loop)))
    return found


MATRIX = (*FAULTS, *_own(), *_starting(), *_simultaneous(), *_frozen(), *_environment())
BY_NAME = {fault.name: fault for fault in MATRIX}
