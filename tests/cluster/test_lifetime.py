"""A cluster leaves no remains, after a regular end and after a kill of its supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from clusterkit import leftovers, lifetime
from clusterkit.layout import Settings
from clusterkit.waiting import ClusterError, until

SETTINGS = Settings("gone", nodes=1, fake=1)


KINDS = ("net", "mnt", "pid", "ipc", "uts")


def namespaces(pids: set[int]) -> set[str]:
    """Return the namespaces of these processes, without those of this test."""
    found = set()
    for pid in pids:
        for kind in KINDS:
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
    return found - {os.readlink(f"/proc/self/ns/{kind}") for kind in KINDS}


def processes() -> dict[int, int]:
    """Return the parents of all processes, by process id."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
    return parents


def descendants(pid: int) -> set[int]:
    found, parents = {pid}, processes()
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def clusterkit(*words: str) -> str:
    """Run the command that `make cluster-up` and `make cluster-down` call."""
    command = [sys.executable, "-m", "clusterkit", "--name", SETTINGS.name, *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
def test_nothing_is_left(killed: bool) -> None:
    lifetime.prepare(SETTINGS)
    clusterkit("up", f"--nodes={SETTINGS.nodes}", f"--fake={SETTINGS.fake}")
    try:
        cluster = lifetime.running(SETTINGS.name)
        assert cluster
        there = leftovers.find(SETTINGS)
        assert there.interfaces == [SETTINGS.cable]
        assert len(there.processes) > 6
        assert there.cgroups
        ours = descendants(cluster.state.supervisor)
        spaces = namespaces(ours)
        assert len(spaces) >= len(KINDS) + 1, "those of the node, and the switch's network"
        before = list(psutil.process_iter())
        if killed:
            os.kill(cluster.state.supervisor, signal.SIGKILL)
            # The kernel ends them, without help of the kit.
            until("the end of all processes", lambda: not leftovers.find(SETTINGS).processes, seconds=60)
            until("the end of its cable", lambda: not leftovers.find(SETTINGS).interfaces, seconds=60)
            assert lifetime.running(SETTINGS.name) is None
    finally:
        said = clusterkit("down")
    assert "0 processes, 0 mounts, 0 network interfaces, 0 control groups" in said
    until("nobody left", lambda: not ours & set(processes()), seconds=60)
    # The kernel reuses a namespace's number: later processes, such as pods of another cluster, are excluded.
    still = {process.pid for process in before if process.is_running()}
    assert not spaces & namespaces(still), "a namespace of the cluster lives on"
    assert not list(Path("/sys/fs/cgroup").glob(f"*/{SETTINGS.cgroup}"))
    assert not (Path("/sys/class/net") / SETTINGS.cable).exists()
    assert str(SETTINGS.directory) not in Path("/proc/self/mountinfo").read_text()
    assert {path.name for path in SETTINGS.directory.iterdir()} == {"logs"}


@pytest.mark.long
def test_the_tests_cluster_ends_with_the_tests() -> None:
    """This also holds if the tests are killed, without any further command."""
    lifetime.prepare(SETTINGS)
    code = (
        "import time\n"
        "from clusterkit import lifetime\n"
        "from clusterkit.layout import Settings\n"
        f"with lifetime.lasting({SETTINGS!r}):\n"
        "    time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    tests = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        until("the cluster", lambda: lifetime.running(SETTINGS.name), seconds=300, every=0.5)
        assert leftovers.find(SETTINGS)
    finally:
        tests.kill()
        tests.wait(10)
    until("its end", lambda: not leftovers.find(SETTINGS), seconds=60, every=0.5)
    until("the end of its files", lambda: [path.name for path in SETTINGS.directory.iterdir()] == ["logs"], seconds=60)


def test_ending_a_cluster_that_does_not_exist_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    lifetime.end("nothing")
    assert "0 processes, 0 mounts, 0 network interfaces, 0 control groups" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "My cluster"}, "--name: 'My cluster' is no name"),
        ({"nodes": 9}, "--nodes: 9; a cluster here has 0 to 4 real nodes"),
        ({"fake": -1}, "--fake: -1; a cluster here has 0 to 5000 nodes of KWOK"),
    ],
)
def test_settings_that_make_no_cluster(given: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Settings(**given)  # type: ignore[arg-type]
