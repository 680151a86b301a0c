"""Samples that every member takes of itself: its engine's processes, its memory, its accelerators."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from dsv4_runtime.contract import Cause, GpuSignals, ProcessSignals, Signals
from dsv4_runtime.engine.logs import LogTail
from dsv4_runtime.health.gpu import GpuWatch, Throttling
from dsv4_runtime.health.samples import ENGINE_ROLES, GPU_FRESH_SECONDS
from dsv4_runtime.util.files import LedgerReader, read_ledger
from dsv4_runtime.util.procfs import FROZEN, Work, below, command_of, entry, is_frozen, meminfo, trees

SAMPLE_SECONDS = 0.5
"""Interval of the samples."""
ROLES = ENGINE_ROLES | {"api", "raylet", "gcs"}
_GPU_GROWTH_BYTES = 1 << 20
_SLOW_SECONDS = 2.0
_SHM = "/dev/shm"  # noqa: S108  (shared memory's place)
_CGROUP_EVENTS = Path("/sys/fs/cgroup/memory.events")
_VMSTAT = Path("/proc/vmstat")


class Vitals:
    """The sampler of one member."""

    def __init__(self, *, gpus: bool = True, uuids: tuple[str, ...] | None = None) -> None:
        """Args:
        gpus: whether the engine computes on GPUs; otherwise they are ignored.
        uuids: of the member's own; None: all that it sees.
        """
        self._gpus = GpuWatch(uuids) if gpus else None
        self._throttling = Throttling()
        self.warnings: tuple[str, ...] = ()
        """Of the latest sample (`AgentStatus.warnings`)."""
        self._trees: dict[int, tuple[int, ...]] = {}
        self._measured = 0.0
        self._slow: dict[str, int | None] = {}
        self._ledgers: dict[int, LedgerReader] = {}
        self._starting: set[int] = set()
        self._work: tuple[Work, Work, int] | None = None
        self._worked = self._grew = 0.0

    def sample(self, roles: Mapping[int, str], silent: Mapping[int, float]) -> Signals:
        """Sample the member now. Of `roles`, process id to role, only processes of the engine and of Ray are sampled;
        `silent` maps ranks to the seconds since their last sign of life."""
        now = time.monotonic()
        watched = {pid: role for pid, role in roles.items() if role in ROLES}
        # Each time: the parts of a compiler are processes that live for a second.
        self._trees = trees(below(os.getpid()), watched) if watched else {}
        rays = (pid for root, role in watched.items() if role == "raylet" for pid in self._trees.get(root, ()))
        self._starting = {pid for pid in rays if _is_worker(command_of(pid))}
        if now - self._measured >= _SLOW_SECONDS:
            self._slow = {
                "memory_available": meminfo().get("MemAvailable"),
                "shm_free": shm_free(),
                "oom_kills": oom_kills(),
            }
            self._measured = now
        gpus, age = self._gpus.latest() if self._gpus is not None else ((), 0.0)
        if age <= GPU_FRESH_SECONDS:
            self.warnings = self._throttling.update(gpus, now)
        return Signals(
            time=now,
            processes=tuple(filter(None, (self._process(pid, role) for pid, role in watched.items()))),
            gpus=gpus,
            gpus_age=round(age, 3),
            collectives=self._collectives({pid for pid, role in watched.items() if role == "worker"}),
            silent={rank: round(seconds, 3) for rank, seconds in silent.items()},
            **self._measure_work(watched, gpus, now),
            **self._slow,
        )

    def forget(self) -> None:
        """Discard observations of an ended engine."""
        self._work = None
        if self._gpus is not None:
            self._gpus.forget()

    def close(self) -> None:
        """Stop sampling the accelerators."""
        if self._gpus is not None:
            self._gpus.close()

    def _process(self, pid: int, role: str) -> ProcessSignals | None:
        own = entry(pid)
        if own is None:
            return None
        others = [entry(other) for other in self._trees.get(pid, ()) if other != pid]
        # A process that ends adds its time to its parent's when that one collects it, so the sum stays continuous.
        below = own.ended_seconds + sum(other.cpu_seconds + other.ended_seconds for other in others if other)
        state = FROZEN if own.state in "SD" and is_frozen(pid) else own.state
        return ProcessSignals(
            name=role,
            pid=pid,
            state=state,
            cpu_seconds=round(own.cpu_seconds + below, 2),
            below_seconds=round(below, 2),
        )

    def _measure_work(self, watched: Mapping[int, str], gpus: Sequence[GpuSignals], now: float) -> dict[str, float]:
        """Return `idle` and `stagnant` of `Signals`."""
        roots = {pid for pid, role in watched.items() if role in ENGINE_ROLES | {"api"}}
        # A worker of Ray imports vLLM before it is the engine's.
        others = {pid for root in roots for pid in self._trees.get(root, ())} | self._starting
        own, below = (Work.of(filter(None, map(entry, pids)), now) for pids in (roots, others - roots))
        before, self._work = self._work, (own, below, sum(gpu.memory_used or 0 for gpu in gpus))
        if before is None:
            self._worked = self._grew = now
        else:
            loaded = abs(self._work[2] - before[2]) >= _GPU_GROWTH_BYTES
            if loaded or own.grew(before[0]) or below.beyond(before[1]):
                self._worked = self._grew = now
            elif own.beyond(before[0]):
                self._worked = now
        return {"idle": round(now - self._worked, 3), "stagnant": round(now - self._grew, 3)}

    def _collectives(self, workers: set[int]) -> int | None:
        """Return the lowest count of the member's workers: the others wait for that one."""
        for gone in self._ledgers.keys() - workers:
            self._ledgers.pop(gone).close()
        for pid in sorted(workers):
            if pid not in self._ledgers and (reader := read_ledger(pid)) is not None:
                self._ledgers[pid] = reader
        counts = [reader.count for reader in self._ledgers.values()]
        return min(counts, default=None)


def shm_free() -> int | None:
    """Return the bytes free in /dev/shm."""
    try:
        found = os.statvfs(_SHM)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def oom_kills() -> int | None:
    """Return the number of out-of-memory kills in this container, otherwise on this machine."""
    for path in (_CGROUP_EVENTS, _VMSTAT):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


# The raylet's log lines about kills by its memory monitor (Ray 2.56 and later; the second one also earlier).
_RAY_KILLED = re.compile(r"Ray killed \d+ worker\(s\)|killed due to the node running low on memory|OOM kill reason")
# The raylet's log line about a worker's exit; 1, INTENDED_SYSTEM_EXIT of Ray's `WorkerExitType`: Ray ordered it.
_RAY_ORDERED = r"disconnect_type=1\b.*\bworker_id="
# The raylet's log line before it ends because one of its agents has.
_RAY_AGENT = re.compile(r"because one Ray agent failed, agent_name = (\w+)")
# The raylet logs some 20 KB about itself each minute, and about a worker just before its end.
_LOG_TAIL_BYTES = 256 << 10
# A file in shared memory that cannot grow ends its writer with SIGBUS, without a log line.
_SHM_FULL_BYTES = 1 << 20


class ExitCauses:
    """Explanations for the end of engine processes, from changes on this member since the engine's start."""

    def __init__(self, ray_logs: Path) -> None:
        """Take the log directory of Ray's session; it need not exist yet."""
        self._logs = ray_logs
        self._tails = [LogTail(ray_logs / name) for name in ("raylet.out", "raylet.err")]
        self._oom_kills = oom_kills()

    def forget(self) -> None:
        """Discard earlier observations: they do not explain the end of the engine that starts now."""
        for tail in self._tails:
            tail.read()
        self._oom_kills = oom_kills()

    def explain(self) -> tuple[Cause, str] | None:
        """Return cause and evidence for an engine process that has just ended; None without an explanation on this
        member."""
        for tail in self._tails:
            for line in tail.read():
                if _RAY_KILLED.search(line):
                    return Cause.RAY_MEMORY_KILL, line
        now = oom_kills()
        if now is not None and self._oom_kills is not None and now > self._oom_kills:
            self._oom_kills = now
            return Cause.OUT_OF_MEMORY_HOST, "the kernel ended it because of a lack of memory"
        free = shm_free()
        if free is not None and free < _SHM_FULL_BYTES:
            return Cause.SHARED_MEMORY_FULL, f"shared memory (/dev/shm) has {free} bytes free"
        return None

    def raylet_origin(self) -> str | None:
        """Return the name of the process whose end made the raylet end; None if its log names none."""
        try:
            found = _RAY_AGENT.findall(_log_end(self._logs / "raylet.out"))
        except OSError:
            return None
        return str(found[-1]).replace("_", " ") if found else None

    def ordered_to_end(self, pid: int) -> bool | None:
        """Return whether Ray ordered the worker `pid`, which has just ended, to end.

        It does so when vLLM's executor gives the worker up, and when the EngineCore that made it is gone. Either way
        the worker died of another death, and may have been seen to end before that one, for an EngineCore that fails
        ends last. None if Ray's logs do not know that worker.
        """
        try:
            # The name contains both ids of the worker; a process id may have been an earlier worker's too.
            log = max(self._logs.glob(f"python-core-worker-*_{pid}.log"), key=lambda log: log.stat().st_mtime)
            worker = log.name.removeprefix("python-core-worker-").partition("_")[0]
            said = _log_end(self._logs / "raylet.out")
        except (OSError, ValueError):
            return None
        return re.search(_RAY_ORDERED + re.escape(worker), said) is not None

    def close(self) -> None:
        """Close the logs."""
        for tail in self._tails:
            tail.close()


def _is_worker(command: Sequence[str]) -> bool:
    """Return whether a process below a raylet is a worker: Ray's agents there use a processor while nothing starts."""
    return any(word.startswith("ray::IDLE") or word.endswith("/default_worker.py") for word in command)


def _log_end(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")


def memory_usage() -> dict[str, int]:
    """Return total and available memory and shared memory of this member in bytes; empty if they cannot be read."""
    try:
        memory, shm = psutil.virtual_memory(), shutil.disk_usage(_SHM)
    except OSError:
        return {}
    return {"total": memory.total, "available": memory.available, "shmTotal": shm.total, "shmFree": shm.free}
