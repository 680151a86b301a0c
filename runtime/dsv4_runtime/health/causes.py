"""Process exit causes: the kernel for want of memory, Ray's memory monitor, a full /dev/shm, or its own EngineCore."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dsv4_runtime.contract import Cause
from dsv4_runtime.engine.logs import LogTail
from dsv4_runtime.health.vitals import oom_kills, shm_free

# What the raylet says of its memory monitor's doing (Ray 2.56 and later; the second one earlier too).
_RAY_KILLED = re.compile(r"Ray killed \d+ worker\(s\)|killed due to the node running low on memory|OOM kill reason")
# What the raylet says of each worker that leaves; 1, INTENDED_SYSTEM_EXIT of Ray's `WorkerExitType`: it was told to.
_RAY_ORDERED = r"disconnect_type=1\b.*\bworker_id="
# The raylet writes some 20 KB about itself each minute, and about a worker just before that ends.
_LAST_WORDS = 256 << 10
# A file in it that cannot grow ends its writer with SIGBUS, which no log tells of.
_SHM_FULL_BYTES = 1 << 20


class ExitCauses:
    """Changes on this member since the engine began to start."""

    def __init__(self, ray_logs: Path) -> None:
        """Take `ray_logs`, where Ray's session keeps its logs; it need not be there yet."""
        self._logs = ray_logs
        self._tails = [LogTail(ray_logs / name) for name in ("raylet.out", "raylet.err")]
        self._oom_kills = oom_kills()

    def forget(self) -> None:
        """Forget what was before: it says nothing about the end of the engine that starts."""
        for tail in self._tails:
            tail.read()
        self._oom_kills = oom_kills()

    def explain(self) -> tuple[Cause, str] | None:
        """Return cause and what shows it of an engine process that has just ended; None if nothing here explains it."""
        for tail in self._tails:
            for line in tail.read():
                if _RAY_KILLED.search(line):
                    return Cause.RAY_MEMORY_KILL, line
        now = oom_kills()
        if now is not None and self._oom_kills is not None and now > self._oom_kills:
            self._oom_kills = now
            return Cause.OUT_OF_MEMORY_HOST, "the kernel ended it for want of memory"
        free = shm_free()
        if free is not None and free < _SHM_FULL_BYTES:
            return Cause.SHARED_MEMORY_FULL, f"shared memory (/dev/shm) has {free} bytes free"
        return None

    def told_to_end(self, pid: int) -> bool | None:
        """Return whether Ray told the worker `pid`, which has just ended, to end.

        It does so when vLLM's executor gives the worker up, and when the EngineCore that made it is gone. Either way
        the worker died of another death, and may have been seen to end before that one, for an EngineCore that fails
        ends last. None if Ray's logs do not know that worker.
        """
        try:
            # The name has both of the worker's ids; a process id may have been an earlier worker's too.
            log = max(self._logs.glob(f"python-core-worker-*_{pid}.log"), key=lambda log: log.stat().st_mtime)
            worker = log.name.removeprefix("python-core-worker-").partition("_")[0]
            with (self._logs / "raylet.out").open("rb") as raylet:
                raylet.seek(max(0, os.fstat(raylet.fileno()).st_size - _LAST_WORDS))
                said = raylet.read().decode(errors="replace")
        except (OSError, ValueError):
            return None
        return re.search(_RAY_ORDERED + re.escape(worker), said) is not None

    def close(self) -> None:
        """Let go of the logs."""
        for tail in self._tails:
            tail.close()
