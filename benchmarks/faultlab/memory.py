"""A memory limit for processes that already run: a control group of the suite's own, of either version."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_EMPTY_SECONDS = 10.0
_KILL_SECONDS = 60.0


class Limit:
    """A group of processes with a limit; `end` puts the survivors back and removes it."""

    def __init__(self, group: Path, home: Path, events: str) -> None:
        self._group, self._home, self._events = group, home, group / events

    def wait(self) -> None:
        """Return once the kernel has ended one of them.

        Raises:
            RuntimeError: it did not within a minute.
        """
        deadline = time.monotonic() + _KILL_SECONDS
        while "oom_kill 0" in self._events.read_text():
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing was killed for want of memory within {_KILL_SECONDS:.0f} s")
            time.sleep(0.01)

    def end(self) -> None:
        deadline = time.monotonic() + _EMPTY_SECONDS
        while True:
            for pid in (self._group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (self._home / "cgroup.procs").write_text(pid)
            try:
                self._group.rmdir()
            except OSError:
                # Processes that are just ending still belong to it.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return


def confine(pids: list[int], room: int) -> Limit:
    """Limit what `pids` and their children take from now on, together, to `room` bytes.

    What a process had before stays charged to the group that it comes from. Going over it has the kernel end the
    process that is worst, as in a container.

    Raises:
        OSError: this user may not make control groups with a memory limit here.
    """
    first = (_ROOT / "memory").is_dir()
    root, file, events = (
        (_ROOT / "memory", "memory.limit_in_bytes", "memory.oom_control")
        if first
        else (_ROOT, "memory.max", "memory.events")
    )
    if not first:
        (root / "cgroup.subtree_control").write_text("+memory")
    line = next(line for line in _lines(pids[0]) if (":memory:" in line if first else line.startswith("0::")))
    home = root / line.split(":", 2)[2].lstrip("/")
    group = root / f"dsv4-faults-{os.getpid()}"
    group.mkdir()
    limit = Limit(group, home, events)
    try:
        (group / file).write_text(str(room))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        limit.end()
        raise
    return limit


def _lines(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cgroup").read_text().splitlines()
