"""What is done to a group: each action on real processes, links, memory, by its own means and from outside dsv4."""

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
"""Enough for a member of the nano model, restarted engine included (1.6 GiB)."""
_FILLER = "left-behind"
_KEPT_SECONDS = 60.0
_STANDBY_SECONDS = 90.0


class Scene(Protocol):
    """Where to find the parts of the system under test; all process ids are the machine's."""

    @property
    def network(self) -> int:
        """A process in the network namespace that holds the bridge."""

    @property
    def hook(self) -> Path:
        """The file with orders for the workers (`tests/kit/dsv4_faults`)."""

    def pid(self, rank: int, process: str) -> int:
        """`agent`, `raylet`, `gcs`, `api`, `engine-core` or `worker` of a member; `member`: what holds all of it."""

    def init(self, rank: int) -> int:
        """Process 1 of a member."""

    def port(self, rank: int) -> str:
        """A member's port of the bridge."""


class Action(Protocol):
    """Something that can be done to a scene."""

    @property
    def seconds(self) -> float:
        """How long it lasts; 0 if it is done at once or lasts for good."""

    def strike(self, scene: Scene) -> Undo:
        """Do it, and return when it is done; the result takes back what would otherwise stay on the machine."""


def _nothing() -> None:
    return


class How(StrEnum):
    """Kind of fault of one process."""

    KILL = "kill -9"
    STOP = "SIGSTOP"
    FREEZE = "freeze"


def strike(pid: int, how: How) -> Undo:
    """Do it to one process; the result takes it back."""
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
                # The raylet's own command line has those of its agents.
                if any(self.word in word for word in command) and Path(command[0]).name != "raylet":
                    os.kill(pid, signal.SIGKILL)
                    return _nothing
        raise RuntimeError(f"rank {self.rank} has no process with {self.word} in its command line")


@dataclass(frozen=True)
class StoppedStandby:
    """SIGSTOP the standby server once it waits, then the engine must start again."""

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
    """Remove a member's directory, then the engine must start again."""

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
    """kill -9 EngineCore, and strike a process of the next engine while it starts."""

    process: str
    rank: int
    how: How
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        before = scene.pid(self.rank, self.process)
        os.kill(scene.pid(0, "engine-core"), signal.SIGKILL)
        deadline = time.monotonic() + _STANDBY_SECONDS
        while True:
            # Between two engines there is none.
            with contextlib.suppress(RuntimeError):
                if (pid := scene.pid(self.rank, self.process)) != before:
                    return strike(pid, self.how)
            if time.monotonic() > deadline:
                raise RuntimeError(f"no new {self.process} within {_STANDBY_SECONDS:.0f} s")
            time.sleep(0.1)


@dataclass(frozen=True)
class Frozen:
    """One process runs no more, and no signal did it."""

    process: str
    rank: int
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        return groups.freeze(scene.pid(self.rank, self.process)).end


@dataclass(frozen=True)
class LinkDown:
    """Pull a member's cable."""

    rank: int
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        links.cut(scene.network, scene.port(self.rank))
        return _nothing


@dataclass(frozen=True)
class OneWayLoss:
    """Every packet from one member to another one is lost; the other direction, and both to the loop, stay."""

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
        network, port = scene.network, scene.port(self.rank)
        links.lose(network, port)
        timer = threading.Timer(self.seconds, links.restore, (network, port))
        timer.start()
        return timer.join


@dataclass(frozen=True)
class Latency:
    """Each round trip to a member takes `delay` seconds more, for `seconds`."""

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
    """An order to a worker, obeyed inside its next step."""

    kind: str
    rank: int
    seconds: float = 0.0
    hold: float = 0.0
    """What the order says; `seconds` is for faults that end by themselves."""

    def strike(self, scene: Scene) -> Undo:
        order(scene.hook, self.kind, self.rank, seconds=self.seconds or self.hold)
        return lambda: scene.hook.unlink(missing_ok=True)


@dataclass(frozen=True)
class OutOfMemory:
    """The member's processes get a memory limit, as a container has, and the worker's memory grows beyond it."""

    rank: int
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        limit = groups.confine(inside(scene.init(self.rank)), _MEMBER_MEMORY)
        order(scene.hook, "eat", self.rank, mebibytes=2 * _MEMBER_MEMORY // 2**20)

        def undo() -> None:
            scene.hook.unlink(missing_ok=True)
            limit.end()

        try:
            # To fill gigabytes takes seconds, and nothing has died before.
            limit.wait()
        except RuntimeError:
            undo()
            raise
        return undo


@dataclass(frozen=True)
class FullSharedMemory:
    """A stranger's file fills the member's /dev/shm, then the engine must start again."""

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
    """Part of the checkpoint becomes wrong, with the file's size and times as before; then the engine starts again."""

    tensor: str
    """The shortest name that ends so."""
    value: bytes
    """Two bytes that are repeated."""
    most: int = 1 << 30
    """Bytes."""
    seconds: float = 0.0

    def strike(self, scene: Scene) -> Undo:
        (folder,) = (scene.hook.parent / "weights").glob("nano-*")
        # Kept once every member has read its files beside the first engine.
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
    """Overwrite the begin of a tensor of a checkpoint, `most` bytes of it; return the file that has it."""
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
    """Write an order for the workers' hook, as a whole."""
    partial = hook.with_suffix(".partial")
    partial.write_text(json.dumps({"kind": kind, "rank": rank, **more}))
    partial.rename(hook)


def inside(init: int) -> list[int]:
    """All processes of the process namespace of `init`."""
    space = os.readlink(f"/proc/{init}/ns/pid")
    found = []
    for pid in psutil.pids():
        try:
            if os.readlink(f"/proc/{pid}/ns/pid") == space:
                found.append(pid)
        except OSError:
            continue
    return found
