"""Control groups of the nodes, in the mounted hierarchies of cgroup v1 and v2; tested with v1.

Each kubelet needs its own group, because it treats every unknown pod as an orphan and kills it.
"""

from __future__ import annotations

import os
from pathlib import Path

from clusterkit.waiting import ClusterError, until


def hierarchies() -> list[Path]:
    """Return the mount points of the kernel's control groups."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [Path(line.split()[4]) for line in lines if line.split(" - ")[1].split()[0] in {"cgroup", "cgroup2"}]


_TIMES_THE_USUAL = 4
_WEIGHTS = {"cpu.shares": 1024, "cpu.weight": 100}
"""Default weight of a group for processors: cgroup v1 and v2."""


def make(group: str) -> None:
    """Create the group in every hierarchy, with the processors and memories of its parent.

    All processes of a node share the default weight, which is that of a single thread outside of any group. A node that
    starts an engine would wait for the control planes, so it gets more.
    """
    for hierarchy in hierarchies():
        made = hierarchy
        for part in Path(group).parts:
            made = made / part
            made.mkdir(exist_ok=True)
            for setting in ("cpuset.cpus", "cpuset.mems"):
                file, above = made / setting, made.parent / setting
                # cgroup v1 requires these values before a process may enter; v2 inherits them.
                if file.exists() and above.exists() and not file.read_text().strip():
                    file.write_text(above.read_text())
        for setting, usual in _WEIGHTS.items():
            if (made / setting).exists():
                (made / setting).write_text(str(usual * _TIMES_THE_USUAL))


def remaining(group: str) -> list[Path]:
    """Return the folders of this group and of its subgroups, deepest first."""
    tops = [hierarchy / group for hierarchy in hierarchies()]
    found = [Path(folder) for top in tops for folder, _, _ in os.walk(top, topdown=False)]
    return [folder for folder in found if folder.is_dir()]


def processes(group: str) -> set[int]:
    """Return all processes in the group and its subgroups."""
    pids: set[int] = set()
    for folder in remaining(group):
        try:
            pids |= {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}
        except FileNotFoundError:
            continue
    return pids


def remove(group: str, *, seconds: float = 10.0) -> None:
    """Remove the group; its last processes may take a moment to end."""

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
