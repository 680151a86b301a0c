"""Actions on a group: real faults of processes, links and memory, caused from outside and independently of dsv4."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import psutil

from dsv4_testkit.faults import groups, links

Undo = Callable[[], None]

_MEMBER_MEMORY = 2560 * 2**20
"""Sufficient for a member of the nano model including a restarted engine (1.6 GiB)."""
_FILLER = "left-behind"
_KEPT_SECONDS = 60.0
_STANDBY_SECONDS = 90.0


class Scene(Protocol):
    """Access to the parts of the system under test; all process ids are in the machine's namespace."""

    @property
    def network(self) -> int:
        """A process in the network namespace with the bridge."""

    @property
    def hook(self) -> Path:
        """File with orders for the workers (`tests/kit/dsv4_faults`)."""

    def pid(self, rank: int, process: str) -> int:
        """Return a pid of a member: `agent`, `raylet`, `gcs`, `api`, `engine-core`, `worker`, or `member` (parent of
        all).
        """

    def init(self, rank: int) -> int:
        """Return the pid of a member's process 1."""

    def port(self, rank: int) -> str:
        """Return the member's port of the bridge."""


class Action(Protocol):
    """An action that can be applied to a scene."""

    @property
    def seconds(self) -> float:
        """Duration of the action; 0 if it is instantaneous or permanent."""

    def strike(self, scene: Scene) -> Undo:
        """Perform the action and return when it is complete; the returned function reverts its lasting effects."""


def _nothing() -> None:
    return


class How(StrEnum):
    """Kind of fault of one process."""

    KILL = "kill -9"
    STOP = "SIGSTOP"
    FREEZE = "freeze"


def strike(pid: int, how: How) -> Undo:
    """Apply the fault to one process; the returned function reverts it."""
    if how is How.FREEZE:
        return groups.freeze(pid).end
    os.kill(pid, signal.SIGKILL if how is How.KILL else signal.SIGSTOP)

    def undo() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    return undo if how is How.STOP else _nothing


@dataclass(frozen=True)
class Signal:
    """Send a signal to one process."""

    process: str
    rank: int
    number: signal.Signals
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        os.kill(scene.pid(self.rank, self.process), self.number)
        return _nothing


@dataclass(frozen=True)
class KillAuxiliary:
    """kill -9 one of Ray's processes beside the raylet, found by a part of its command line."""

    word: str
    rank: int
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        for pid in inside(scene.init(self.rank)):
            with contextlib.suppress(psutil.Error):
                command = psutil.Process(pid).cmdline()
                # The raylet's own command line contains those of its agents.
                if any(self.word in word for word in command) and Path(command[0]).name != "raylet":
                    os.kill(pid, signal.SIGKILL)
                    return _nothing
        raise RuntimeError(f"rank {self.rank} has no process with {self.word} in its command line")


@dataclass(frozen=True)
class StoppedStandby:
    """SIGSTOP the standby server once it waits, then kill EngineCore so that the engine restarts."""

    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        deadline = time.monotonic() + _STANDBY_SECONDS
        while True:
            with contextlib.suppress(RuntimeError):
                os.kill(scene.pid(0, "standby"), signal.SIGSTOP)
                os.kill(scene.pid(0, "engine-core"), signal.SIGKILL)
                return _nothing
            if time.monotonic() > deadline:
                raise RuntimeError(f"no standby server within {_STANDBY_SECONDS:.0f} s")


@dataclass(frozen=True)
class RemovedDirectory:
    """Remove a member's directory, then kill EngineCore so that the engine restarts."""

    rank: int
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        incarnation = scene.port(self.rank).removeprefix("m").partition(".")[0]
        (directory,) = scene.hook.parent.glob(f"*/i{incarnation}/m{self.rank}")
        shutil.rmtree(directory)
        os.kill(scene.pid(0, "engine-core"), signal.SIGKILL)
        return _nothing


@dataclass(frozen=True)
class AtStart:
    """kill -9 EngineCore, then apply a fault to a process of the next engine during its start."""

    process: str
    rank: int
    how: How
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        before = scene.pid(self.rank, self.process)
        os.kill(scene.pid(0, "engine-core"), signal.SIGKILL)
        deadline = time.monotonic() + _STANDBY_SECONDS
        while True:
            # There is no such process between two engines.
            with contextlib.suppress(RuntimeError):
                if (pid := scene.pid(self.rank, self.process)) != before:
                    return strike(pid, self.how)
            if time.monotonic() > deadline:
                raise RuntimeError(f"no new {self.process} within {_STANDBY_SECONDS:.0f} s")
            time.sleep(0.1)


@dataclass(frozen=True)
class Frozen:
    """Stop a process by its control group, without a signal."""

    process: str
    rank: int
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        return groups.freeze(scene.pid(self.rank, self.process)).end


@dataclass(frozen=True)
class LinkDown:
    """Take a member's link down, as a pulled cable does."""

    rank: int
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        links.cut(scene.network, scene.port(self.rank))
        return _nothing


@dataclass(frozen=True)
class OneWayLoss:
    """Every packet from one member to another is lost; the opposite direction and links to the loop still work."""

    sender: int
    receiver: int
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        links.blackhole(scene.init(self.sender), scene.init(self.receiver))
        return _nothing


@dataclass(frozen=True)
class Loss:
    """Every frame from and to a member is lost for `seconds`."""

    rank: int
    seconds: float

    def strike(self, scene: Scene) -> Undo:
        return links.lose_for(scene.network, scene.port(self.rank), self.seconds)


@dataclass(frozen=True)
class Latency:
    """Each round trip to a member takes `delay` seconds longer, for `seconds`."""

    rank: int
    delay: float
    seconds: float

    def strike(self, scene: Scene) -> Undo:
        slow = links.SlowLink(scene.network, scene.port(self.rank), self.delay)
        timer = threading.Timer(self.seconds, slow.end)
        timer.start()
        return timer.join


@dataclass(frozen=True)
class InStep:
    """An order to a worker, executed in its next step."""

    kind: str
    rank: int
    seconds: float = 0.0
    hold: float = 0.0
    """Duration in the order; `seconds` is for faults that end by themselves."""

    def strike(self, scene: Scene) -> Undo:
        order(scene.hook, self.kind, self.rank, seconds=self.seconds or self.hold)
        return lambda: scene.hook.unlink(missing_ok=True)


@dataclass(frozen=True)
class OutOfMemory:
    """The member's processes get a memory limit, as in a container, and the worker's memory grows beyond it."""

    rank: int
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        limit = groups.confine(inside(scene.init(self.rank)), _MEMBER_MEMORY)
        order(scene.hook, "eat", self.rank, mebibytes=2 * _MEMBER_MEMORY // 2**20)

        def undo() -> None:
            scene.hook.unlink(missing_ok=True)
            limit.end()

        try:
            # Filling gigabytes takes seconds; no process dies before that.
            limit.wait()
        except RuntimeError:
            undo()
            raise
        return undo


@dataclass(frozen=True)
class FullSharedMemory:
    """A file of another program fills the member's /dev/shm; then EngineCore is killed so that the engine restarts."""

    rank: int
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        shared = Path(f"/proc/{scene.init(self.rank)}/root/dev/shm")
        found = os.statvfs(shared)
        with (shared / _FILLER).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, found.f_bavail - 1) * found.f_frsize)
        os.kill(scene.pid(0, "engine-core"), signal.SIGKILL)
        return lambda: (shared / _FILLER).unlink(missing_ok=True)


@dataclass(frozen=True)
class CorruptWeights:
    """Part of the checkpoint is damaged, with unchanged size and times of the file; then the engine restarts."""

    tensor: str
    """End of the tensor's name; the shortest matching name is selected."""
    value: bytes
    """Two bytes, repeated over the damaged part."""
    most: int = 1 << 30
    """Maximum length of the damage in bytes."""
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        (folder,) = (scene.hook.parent / "weights").glob("nano-*")
        # Written after every member has verified its files in parallel with the first engine.
        answers = folder.with_name(f".{folder.name}.answers.json")
        deadline = time.monotonic() + _KEPT_SECONDS
        while not answers.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{answers}: no answer was kept within {_KEPT_SECONDS:.0f} s")
            time.sleep(0.25)
        spoil(folder, self.tensor, self.value, self.most)
        os.kill(scene.pid(0, "engine-core"), signal.SIGKILL)
        return _nothing


def spoil(folder: Path, tensor: str, value: bytes, most: int) -> Path:
    """Overwrite at most `most` bytes at the beginning of a tensor of a checkpoint; return the file that contains it."""
    found = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = min((name for name in found if name.endswith(tensor)), key=lambda name: (len(name), name))
    path: Path = folder / found[name]
    before = path.stat()
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
        file.seek(8 + length + begin)
        file.write(value * (min(most, end - begin) // len(value)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path


def order(hook: Path, kind: str, rank: int, **more: float) -> None:
    """Write an order for the workers' hook atomically."""
    partial = hook.with_suffix(".partial")
    partial.write_text(json.dumps({"kind": kind, "rank": rank, **more}))
    partial.rename(hook)


def inside(init: int) -> list[int]:
    """Return all processes in the process namespace of `init`."""
    space = os.readlink(f"/proc/{init}/ns/pid")
    found = []
    for pid in psutil.pids():
        try:
            if os.readlink(f"/proc/{pid}/ns/pid") == space:
                found.append(pid)
        except OSError:
            continue
    return found
