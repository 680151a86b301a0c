"""Control groups of the nodes: a kubelet takes every pod that it does not know for an orphan and kills it, so that each
needs a group of its own. cgroup v1 and v2 are looked for where they are mounted; v1 is what this was tried on.
"""

from __future__ import annotations

import os
from pathlib import Path

from clusterkit.waiting import ClusterError, until


def hierarchies() -> list[Path]:
    """Where the kernel shows its control groups."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [Path(line.split()[4]) for line in lines if line.split(" - ")[1].split()[0] in {"cgroup", "cgroup2"}]


_TIMES_THE_USUAL = 4
_WEIGHTS = {"cpu.shares": 1024, "cpu.weight": 100}
"""What a group has of the processors in comparison with others, by default: cgroup v1 and v2."""


def make(group: str) -> None:
    """Make the group everywhere, with the processors and memories that its parent has.

    All that runs on a node shares what a single thread outside of any group gets. A node that starts an engine would
    wait for the control planes, so it gets more.
    """
    for hierarchy in hierarchies():
        made = hierarchy
        for part in Path(group).parts:
            made = made / part
            made.mkdir(exist_ok=True)
            for setting in ("cpuset.cpus", "cpuset.mems"):
                file, above = made / setting, made.parent / setting
                # cgroup v1 wants them set before a process may enter; v2 takes the parent's by itself.
                if file.exists() and above.exists() and not file.read_text().strip():
                    file.write_text(above.read_text())
        for setting, usual in _WEIGHTS.items():
            if (made / setting).exists():
                (made / setting).write_text(str(usual * _TIMES_THE_USUAL))


def remaining(group: str) -> list[Path]:
    """The folders of this group and of those below, deepest first."""
    tops = [hierarchy / group for hierarchy in hierarchies()]
    found = [Path(folder) for top in tops for folder, _, _ in os.walk(top, topdown=False)]
    return [folder for folder in found if folder.is_dir()]


def processes(group: str) -> set[int]:
    """All processes in the group and below."""
    pids: set[int] = set()
    for folder in remaining(group):
        try:
            pids |= {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}
        except FileNotFoundError:
            continue
    return pids


def remove(group: str, *, seconds: float = 10.0) -> None:
    """Remove the group; its last processes may take a moment to be gone."""

    def gone() -> bool:
        for folder in remaining(group):
            try:
                folder.rmdir()
            except OSError:
                return False
        return True

    try:
        until(f"the end of control group {group}", gone, seconds=seconds)
    except ClusterError as error:
        held = sorted(processes(group))
        raise ClusterError(f"{error}; processes in it: {held or 'none'}") from None
