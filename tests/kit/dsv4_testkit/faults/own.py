"""Faults of dsv4's own processes, which are not required by a running engine, and detection of their replacement."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from dsv4_operator.backends.local.network import outside_ids
from dsv4_operator.backends.local.supervisor import read_report
from dsv4_testkit.faults.actions import Action, How, Scene, Undo, inside, strike

_THERE_SECONDS = 120.0
"""Limit of waiting for a process that starts only when the engine is idle."""
_GATEWAY = "dsv4_runtime.gateway.main"
_DASHBOARD = "dashboard/dashboard.py"
_IDLE_WORKER = "ray::IDLE"
_STANDBY_LOG = "standby.log"
_GATEWAYS = 2


class Own(StrEnum):
    """Processes of dsv4 and of Ray beside the engine."""

    GATEWAY = "gateway"
    LOOP = "loop"
    STANDBY = "standby server"
    WORKER = "waiting worker"
    DASHBOARD = "dashboard"

    def find(self, scene: Scene) -> list[int]:
        """Return the running processes of this kind."""
        with contextlib.suppress(RuntimeError, psutil.Error, OSError):
            match self:
                case Own.GATEWAY:
                    children = psutil.Process(scene.network).children()
                    return [child.pid for child in children if _GATEWAY in child.cmdline()]
                case Own.LOOP:
                    report = read_report(scene.network)
                    # The supervisor may be in a process namespace of its machine.
                    loop = None if report is None else outside_ids(scene.network).get(report.loop or 0)
                    return [] if loop is None else [loop]
                case Own.STANDBY:
                    server = "dsv4_runtime.vllm_plugin.warm_pool"
                    found = _below(scene, lambda words: server in words and "server" in words)
                    # After becoming the API server, the process writes to vLLM's log.
                    return [pid for pid in found if Path(f"/proc/{pid}/fd/1").readlink().name == _STANDBY_LOG]
                case Own.WORKER:
                    # The library is mapped after the import of vLLM.
                    found = _below(scene, lambda words: words[0] == _IDLE_WORKER)
                    return [pid for pid in found if b"/libtorch" in Path(f"/proc/{pid}/maps").read_bytes()]
                case Own.DASHBOARD:
                    raylets = ("raylet", "gcs_server")
                    found = _below(scene, lambda words: any(word.endswith(_DASHBOARD) for word in words))
                    return [pid for pid in found if Path(psutil.Process(pid).cmdline()[0]).name not in raylets]
        return []


def _below(scene: Scene, matches: Callable[[list[str]], bool]) -> list[int]:
    """Return the processes of member 0 with a matching command line."""
    found = []
    for pid in inside(scene.init(0)):
        with contextlib.suppress(psutil.Error):
            words = psutil.Process(pid).cmdline()
            if words and matches(words):
                found.append(pid)
    return found


@dataclass
class OwnProcess:
    """Kill, stop or freeze one of dsv4's own processes; `repaired` detects its replacement."""

    process: Own
    how: How
    seconds: float = 0.0
    _struck: int = 0
    _at: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        deadline = time.monotonic() + _THERE_SECONDS
        while not (found := self.process.find(scene)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {self.process} within {_THERE_SECONDS:.0f} s")
            time.sleep(0.25)
        self._struck, self._at = found[0], time.time()
        return strike(self._struck, self.how)

    def repaired(self, scene: Scene) -> bool:
        """Return whether the process was continued or replaced."""
        found = self.process.find(scene)
        with contextlib.suppress(psutil.Error):
            if self.how is How.STOP and psutil.Process(self._struck).status() == psutil.STATUS_STOPPED:
                return False
        if self.process is Own.GATEWAY:
            # A frozen process exits when it thaws; its successor runs in parallel.
            working = [pid for pid in found if pid != self._struck or self.how is How.STOP]
            return len(working) >= _GATEWAYS and _answers(scene)
        if self.process is Own.LOOP:
            report = read_report(scene.network)
            replaced = bool(found) and (found[0] != self._struck or self.how is How.STOP)
            return replaced and report is not None and report.beat is not None and report.beat > self._at
        return any(pid != self._struck for pid in found)


def _answers(scene: Scene) -> bool:
    port = getattr(scene, "api", None)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@dataclass
class Together:
    """Several actions at the same moment, or each `pause` seconds after the previous one; reverted in reverse order."""

    actions: tuple[Action, ...]
    pause: float = 0.0
    seconds: float = 0.0
    struck: float = 0.0
    """Unix time of the first action."""

    def strike(self, scene: Scene) -> Undo:
        undos: list[Undo] = []
        try:
            for number, action in enumerate(self.actions):
                if number and self.pause:
                    time.sleep(self.pause)
                undos.append(action.strike(scene))
                if number == 0:
                    self.struck = time.time()
        except BaseException:
            for undo in reversed(undos):
                undo()
            raise

        def undo() -> None:
            for one in reversed(undos):
                one()

        return undo

    def repaired(self, scene: Scene) -> bool:
        """Return whether all struck processes of dsv4 were replaced."""
        return all(action.repaired(scene) for action in self.actions if isinstance(action, OwnProcess))


@dataclass
class AtFormation:
    """kill -9 the agent of rank 1, then apply a fault to a process of Ray while the next incarnation forms."""

    process: str
    rank: int
    how: How
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        before = scene.init(1)
        port = scene.port(1)
        os.kill(before, signal.SIGKILL)
        deadline = time.monotonic() + _THERE_SECONDS
        name = {"gcs": "gcs_server"}.get(self.process, self.process)
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError, psutil.Error, OSError):
                if scene.port(1) != port:
                    for pid in inside(scene.init(self.rank)):
                        with contextlib.suppress(psutil.Error, IndexError):
                            if Path(psutil.Process(pid).cmdline()[0]).name == name:
                                return strike(pid, self.how)
            time.sleep(0.05)
        raise RuntimeError(f"no {self.process} of a new incarnation within {_THERE_SECONDS:.0f} s")


@dataclass
class NoDescriptors:
    """Prevent a process from opening files for `seconds`: its limit becomes its highest open descriptor."""

    process: Own | str
    rank: int
    seconds: float

    def strike(self, scene: Scene) -> Undo:
        pid = self.process.find(scene)[0] if isinstance(self.process, Own) else scene.pid(self.rank, self.process)
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        # The limit applies to descriptor numbers, not to the number of open files.
        most = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, before[1]))

        def restore() -> None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

        timer = threading.Timer(self.seconds, restore)
        timer.start()
        return timer.join


@dataclass
class RemovedFiles:
    """Remove files of the deployment's directory, then kill the process that reads them at its start."""

    pattern: str
    then: OwnProcess
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        found = [path for path in scene.hook.parent.glob(f"*/{self.pattern}") if path.is_file()]
        if not found:
            raise RuntimeError(f"no file {self.pattern} in the deployment's directory")
        for path in found:
            path.unlink()
        return self.then.strike(scene)

    def repaired(self, scene: Scene) -> bool:
        """Return whether the process was replaced."""
        return self.then.repaired(scene)
