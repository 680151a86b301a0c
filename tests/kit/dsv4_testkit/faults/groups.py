"""Control groups (version 1 or 2) of the suite for running processes: memory limit and freezer."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_EMPTY_SECONDS = 10.0
_KILL_SECONDS = 60.0
_FREEZE_SECONDS = 5.0


class Group:
    """A control group; `end` moves surviving processes back and removes it."""

    def __init__(self, group: Path, home: Path) -> None:
        self.group, self._home = group, home
        group.mkdir()

    def take(self, pids: list[int]) -> None:
        """Move those of `pids` that still run into the group."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (self.group / "cgroup.procs").write_text(str(pid))

    def end(self) -> None:
        """Revert all changes to the processes."""
        deadline = time.monotonic() + _EMPTY_SECONDS
        while True:
            for pid in (self.group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (self._home / "cgroup.procs").write_text(pid)
            try:
                self.group.rmdir()
            except OSError:
                # Processes remain in the group until their exit is complete.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return


class Limit(Group):
    """A control group with a memory limit."""

    def __init__(self, group: Path, home: Path, events: str) -> None:
        super().__init__(group, home)
        self._events = events

    def wait(self) -> None:
        """Return once the kernel has killed one of the processes.

        Raises:
            RuntimeError: no process was killed within a minute.
        """
        events = self.group / self._events
        _until(lambda: "oom_kill 0" not in events.read_text(), "nothing was killed for want of memory", _KILL_SECONDS)


def lacks() -> str | None:
    """Return why control groups cannot be created here, as in most containers; None if they can.

    None also if `DSV4_TEST_REQUIRE` names the engine ring, which then fails without control groups.
    """
    if {"engine", "all"} & set(os.environ.get("DSV4_TEST_REQUIRE", "").split(",")):
        return None
    for root in {_memory_root(), _freezer_root()}:
        try:
            Group(root / f"dsv4-try-{os.getpid()}", root).end()
        except OSError as error:
            return f"no control group can be made in {root}: {error.strerror}"
    controllers = _ROOT / "cgroup.controllers"
    if controllers.exists() and "memory" not in controllers.read_text().split():
        return f"the control groups in {_ROOT} cannot limit memory"
    return None


def _memory_root() -> Path:
    return _ROOT / "memory" if (_ROOT / "memory").is_dir() else _ROOT


def _freezer_root() -> Path:
    # Only the freezer of version 2 lets SIGKILL end a frozen process. Where version 1 is in use, version 2 is mounted
    # beside it.
    return _ROOT / "unified" if (_ROOT / "unified").is_dir() else _ROOT


def confine(pids: list[int], room: int) -> Limit:
    """Limit the memory that `pids` and their children allocate from now on, together, to `room` bytes.

    Memory that a process already has stays charged to its previous group. Above the limit the kernel kills the process
    with the highest score, as in a container.

    Raises:
        OSError: this user cannot create control groups with a memory limit here.
    """
    root = _memory_root()
    first = root != _ROOT
    file, events = ("memory.limit_in_bytes", "memory.oom_control") if first else ("memory.max", "memory.events")
    if not first:
        (root / "cgroup.subtree_control").write_text("+memory")
    line = next(line for line in _lines(pids[0]) if (":memory:" in line if first else line.startswith("0::")))
    home = root / line.split(":", 2)[2].lstrip("/")
    limit = Limit(root / f"dsv4-faults-{os.getpid()}", home, events)
    try:
        (limit.group / file).write_text(str(room))
        limit.take(pids)
    except OSError:
        limit.end()
        raise
    return limit


def freeze(pid: int) -> Group:
    """Freeze `pid`, like a paused container; unlike after SIGSTOP, its state is not reported as stopped.

    Raises:
        OSError: this user cannot create control groups here.
        RuntimeError: the kernel did not freeze it, or no control groups of version 2 are mounted.
    """
    root = _freezer_root()
    line = next((line for line in _lines(pid) if line.startswith("0::")), None)
    if line is None:
        raise RuntimeError(f"process {pid} is in no control group of version 2; mount cgroup2 at {root}")
    frozen = Group(root / f"dsv4-frozen-{os.getpid()}", root / line.split(":", 2)[2].lstrip("/"))
    try:
        frozen.take([pid])
        (frozen.group / "cgroup.freeze").write_text("1")
        events = frozen.group / "cgroup.events"
        _until(lambda: "frozen 1" in events.read_text(), f"process {pid} was not frozen", _FREEZE_SECONDS)
    except (OSError, RuntimeError):
        frozen.end()
        raise
    return frozen


def _until(done: Callable[[], bool], otherwise: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{otherwise} within {seconds:.0f} s")
        time.sleep(0.01)


def _lines(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cgroup").read_text().splitlines()
