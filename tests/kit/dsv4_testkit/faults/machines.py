"""dsv4 on two machines of systemd-nspawn as a system under test, its faults, and a time without ssh under load."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dsv4_operator.backends.local.network import outside_ids
from dsv4_testkit.faults.actions import Scene, Undo
from dsv4_testkit.faults.judge import Result
from dsv4_testkit.faults.load import Load, Outcome, Shape, counts
from dsv4_testkit.faults.matrix import BY_NAME
from dsv4_testkit.faults.report import markdown
from dsv4_testkit.faults.store import Store
from dsv4_testkit.faults.system import DSV4, MODEL, answers
from dsv4_testkit.faults.table import Fault, Kind
from dsv4_testkit.harness import MANIFEST
from dsv4_testkit.nspawn import Nspawn, World, until

STATE = "var/lib/dsv4"
_API, _DASHBOARD = 8000, 8265
_PROGRAM = (sys.executable, "-m", "dsv4_operator.cli.main")
_START_SECONDS = 1600.0
"""Only a bound."""
_READY_SECONDS = 240.0
_PROCESS_SECONDS = 15.0
_CLIENTS = 8
LEVEL_SECONDS = {1: 2.0, 2: 15.0}
"""Most seconds of a recovery beyond that on one machine, by level."""
# The gateways listen on the loopback address of the first machine. The listener is in the network of this process.
_RELAY = """
import asyncio, socket, sys

async def pump(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()

async def serve(reader, writer):
    try:
        back, forth = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    except OSError:
        writer.close()
        return
    await asyncio.gather(pump(reader, forth), pump(back, writer))

async def main():
    server = await asyncio.start_server(serve, sock=socket.socket(fileno=int(sys.argv[1])))
    await server.serve_forever()

asyncio.run(main())
"""


class OnMachines(DSV4):
    """A deployment of two members, each on a machine of its own. Processes are found and struck from outside."""

    name = "dsv4 on two machines"

    def __init__(self, folder: Path) -> None:
        """`folder` keeps the base system and the machines."""
        super().__init__()
        self.world = World(folder, linked=True)
        self._relay: subprocess.Popen[bytes] | None = None
        self._port = 0

    def start(self) -> None:
        self.world.start()
        ports = {"api": _API, "dashboard": _DASHBOARD}
        file = self.world.folder / "nano.yaml"
        file.write_text(MANIFEST.format(name=MODEL, nodes=2, replicas=1, seqs=4, **self._budget, **ports))
        targets = ",".join(machine.address for machine in self.world.machines)
        words = ["up", str(file), "--hosts", targets, "--timeout", "25m"]
        done = self.world.dsv4(*words, program=_PROGRAM, seconds=_START_SECONDS)
        if done.returncode:
            raise RuntimeError(f"up failed:\n{done.stdout}\n{done.stderr}")
        print(done.stdout, flush=True)
        self._open()

    def _open(self) -> None:
        """Make the port of the gateways available here."""
        with socket.create_server(("127.0.0.1", self._port)) as listener:
            self._port = listener.getsockname()[1]
            number = listener.fileno()
            network = f"--net=/proc/{self.world.machines[0].leader}/ns/net"
            command = ["nsenter", network, sys.executable, "-c", _RELAY, str(number), str(_API)]
            self._relay = subprocess.Popen(command, pass_fds=[number])

    @property
    def api(self) -> int:
        return self._port

    @property
    def hook(self) -> Path:
        raise LookupError("members on machines have no hook for faults inside of the worker; use faults of processes")

    @property
    def network(self) -> int:
        """The supervisor of the loop, which is the parent of the gateways."""
        first = self.world.machines[0]
        inside = int((first.root / STATE / MODEL / "lock").read_text())
        return outside_ids(first.leader)[inside]

    def status(self) -> dict[str, Any]:
        """Return the status from its file."""
        file = self.world.machines[0].root / STATE / MODEL / "object.json"
        return dict(json.loads(file.read_text())["status"])

    def group(self) -> dict[str, Any]:
        return dict(self.status()["groups"][0])

    def settled(self) -> bool:
        return bool(self.status()["phase"] == "Serving")

    def pid(self, rank: int, process: str) -> int:
        deadline = time.monotonic() + _PROCESS_SECONDS
        while True:
            if (found := self._find(rank, process)) is not None:
                return found
            if time.monotonic() > deadline:
                raise RuntimeError(f"the status names no running {process} of rank {rank}")
            time.sleep(0.25)

    def _find(self, rank: int, process: str) -> int | None:
        group = self.group()
        agent = _agent(self.world.machines[rank], group["incarnation"], rank)
        if agent is None or process == "agent":
            return agent
        # The status has the ids in the process namespace of the member.
        member = next((one for one in group["members"] if one["rank"] == rank), {})
        inside = next((int(one["pid"]) for one in member.get("processes", ()) if one["name"] == process), 0)
        return outside_ids(agent).get(inside)

    def port(self, rank: int) -> str:
        raise LookupError("network ports of machines belong to the test; use faults of processes")

    def ready(self) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while not (self.settled() and answers(self.api)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"it does not serve after {_READY_SECONDS:.0f} s: {self.group()}")
            time.sleep(0.5)

    def disorder(self, since: float) -> str:
        return ""

    def close(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait(10)
            self._relay = None
        self.world.close()


def _agent(machine: Nspawn, incarnation: int, rank: int) -> int | None:
    """Return the id, here, of the first process of a member; None without one."""
    record = machine.root / STATE / "_m" / MODEL / f"i{incarnation}" / f"m{rank}" / "member.json"
    try:
        init = json.loads(record.read_text()).get("init")
        assert machine.process is not None
        below = psutil.Process(machine.process.pid).children(recursive=True)
    except (OSError, ValueError, psutil.Error):
        return None
    for process in below if init else ():
        try:
            ids = [line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "NSpid:" in line]
        except OSError:
            continue
        if ids and [int(word) for word in ids[0].split()[2:]] == [init[0], 1]:
            return process.pid
    return None


@dataclass
class PowerCut:
    """Cut the power of a machine and switch it on again."""

    rank: int
    seconds: float = 0.0
    struck: float = 0.0
    booted: float = 0.0
    """Unix time at which it answered to ssh."""

    def strike(self, scene: Scene) -> Undo:
        assert isinstance(scene, OnMachines)
        machine = scene.world.machines[self.rank]
        self.struck = time.time()
        machine.cut()
        machine.boot()
        self.booted = time.time()
        print(f"  ssh answers {self.booted - self.struck:.1f} s after the cut", flush=True)
        return lambda: None


FAULTS = (
    *(
        BY_NAME[name]
        for name in (
            "kill -9 EngineCore",
            "SIGSTOP EngineCore",
            "kill -9 Ray worker of rank 1",
            "SIGSTOP worker of rank 1",
            "kill -9 raylet of rank 1",
            "SIGSTOP raylet of rank 1",
            "kill -9 agent of rank 1",
            "kill -9 gateway",
            "kill -9 loop",
        )
    ),
    Fault("power cut of machine 2", Kind.PARTITION, PowerCut(1), ("NodeLost", "MemberLost"), 1, 2),
)
"""Faults of a deployment on machines: those of one machine without its bridge, and a machine's own."""


def beside(local: Sequence[Result], machines: Sequence[Result]) -> str:
    """Return the results on machines beside those on one, with the bounds of the recoveries."""
    rows = []
    for fault in FAULTS:
        mine = [run for run in machines if run.fault == fault.name]
        other = [run for run in local if run.fault == fault.name]
        if not mine:
            continue
        bound = "-"
        if fault.level and other and (recovered := _median(other, "recovered")) is not None:
            bound = f"{recovered + LEVEL_SECONDS[fault.level]:.1f}"
        figures = [_text(_median(runs, what)) for what in ("detected", "recovered", "back") for runs in (other, mine)]
        level = "-" if fault.level is None else str(fault.level)
        requests = f"{sum(run.failed + run.silent for run in mine)} of {sum(run.sent for run in mine)}"
        rows.append([fault.name, level, *figures[:4], bound, *figures[4:], requests])
    heads = ["fault", "level", "noticed s: one machine", "two", "recovered s: one machine", "two", "bound"]
    return markdown([*heads, "clients back s: one machine", "two", "lost requests, two"], rows)


def _median(runs: Sequence[Result], what: str) -> float | None:
    values = sorted(value for run in runs if (value := getattr(run, what)) is not None)
    return values[len(values) // 2] if values else None


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def blocked(system: OnMachines, minutes: float, seed: int, store: Store) -> int:
    """Stop ssh on both machines for a time under the load of eight clients; return 1 after a lost request or a restart
    of anything."""
    try:
        system.start()
        system.ready()
        entry = _without_ssh(system, minutes, seed)
    finally:
        system.close()
    store.note("blocked", entry)
    print(json.dumps(entry, indent=1))
    return int(bool(entry["failed"] or entry["ended"] or entry["silent"] or entry["changed"]))


def _without_ssh(system: OnMachines, minutes: float, seed: int) -> dict[str, Any]:
    machines = system.world.machines
    before, begun = _generations(system), time.time()
    with Load(system.api, MODEL, Shape(clients=_CLIENTS), str(seed)) as load:
        for machine in machines:
            subprocess.run(machine.inside("systemctl", "stop", "ssh.service", "ssh.socket"), check=True, timeout=60)
            assert machine.run("true").returncode == 255, "ssh is stopped"
        deadline = time.monotonic() + minutes * 60.0
        while time.monotonic() < deadline:
            time.sleep(min(30.0, deadline - time.monotonic() + 0.1))
            print(f"{time.time() - begun:.0f} s without ssh: {counts(load.done)}", flush=True)
        requests = load.stop()
    for machine in machines:
        subprocess.run(machine.inside("systemctl", "start", "ssh.service"), check=True, timeout=60)
        until(lambda machine=machine: machine.run("true").returncode == 0, f"ssh of {machine.name}", 60.0)
    after, found = _generations(system), counts(requests)
    return {
        "struck": begun,
        "minutes": minutes,
        "clients": _CLIENTS,
        "sent": len(requests),
        "answered": found[Outcome.ANSWERED],
        "failed": found[Outcome.FAILED],
        "ended": found[Outcome.ENDED],
        "silent": found[Outcome.SILENT],
        "changed": {name: [before[name], after[name]] for name in before if before[name] != after[name]},
        "errors": list(dict.fromkeys(r.detail[:200] for r in requests if r.outcome is not Outcome.ANSWERED))[:5],
    }


def _generations(system: OnMachines) -> dict[str, Any]:
    """Return everything that a restart changes: of members, engine, loop and gateways."""
    group, supervisor = system.group(), system.network
    names = ("incarnation", "engineGeneration", "totalRestarts")
    children = sorted(child.pid for child in psutil.Process(supervisor).children())
    return {name: group.get(name, 0) for name in names} | {"loop and gateways": children}
