"""Remains of a cluster: found, removed and counted."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

from clusterkit import cgroups
from clusterkit.layout import Settings
from clusterkit.processes import run
from clusterkit.waiting import ClusterError, until

SUPERVISOR = "clusterkit.supervisor"


@dataclass(frozen=True)
class Found:
    """The remains of a cluster."""

    processes: list[int]
    mounts: list[str]
    interfaces: list[str]
    cgroups: list[Path]

    def __bool__(self) -> bool:
        return bool(self.processes or self.mounts or self.interfaces or self.cgroups)

    def __str__(self) -> str:
        return (
            f"{len(self.processes)} processes, {len(self.mounts)} mounts, "
            f"{len(self.interfaces)} network interfaces, {len(self.cgroups)} control groups"
        )


def find(settings: Settings) -> Found:
    """Inspect the machine itself, independent of the cluster's own state.

    Network, mount and process namespaces have no names here: the kernel drops each with its last process.
    """
    interface = Path("/sys/class/net") / settings.cable
    return Found(
        processes=sorted(_processes(settings) | cgroups.processes(settings.cgroup)),
        mounts=_mounts(settings.directory),
        interfaces=[interface.name] if interface.exists() else [],
        cgroups=cgroups.remaining(settings.cgroup),
    )


def _processes(settings: Settings) -> set[int]:
    """Return the supervisor, and programs started by their full path from this cluster's folder."""
    folder = f"{settings.directory}/bin/".encode()
    name = f'"name": "{settings.name}"'.encode()
    ours: set[int] = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        supervises = SUPERVISOR.encode() in words and any(name in word for word in words)
        if supervises or words[0].startswith(folder):
            ours.add(int(process.name))
    return ours - {os.getpid()}


def _mounts(directory: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4] for line in lines]
    return [point for point in points if point.startswith(f"{directory}/")]


def sweep(settings: Settings) -> None:
    """Remove the remains of a cluster whose supervisor has ended or is about to end; its logs stay.

    Raises:
        ClusterError: something cannot be removed.
    """
    # Only containers and their shims are in these groups. All other processes have a death signal, so waiting suffices:
    # a name on a command line is no reason to end a foreign process.
    for pid in cgroups.processes(settings.cgroup):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        until("the end of the cluster's processes", lambda: not find(settings).processes, seconds=10)
    except ClusterError as error:
        raise ClusterError(f"{error}; end them yourself: {find(settings).processes}") from None
    for point in reversed(_mounts(settings.directory)):
        run("umount", "--lazy", point)
    cable = Path("/sys/class/net") / settings.cable
    if cable.exists():
        try:
            run("ip", "link", "delete", settings.cable)
        except ClusterError:
            # The kernel removes it together with the network at its other end, which ends at about this time.
            if cable.exists():
                raise
    cgroups.remove(settings.cgroup)
    if settings.directory.exists():
        for path in settings.directory.iterdir():
            if path.name != "logs":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
