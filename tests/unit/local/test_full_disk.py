"""The loop with a full state directory: the real supervisor, loop and agents on a small tmpfs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsv4_operator.api import ConditionType, DSV4Deployment, Reason, parse
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.backends.local.supervisor import read_report
from dsv4_operator.cli import processes
from dsv4_operator.cli.sources.local import read_deployment
from dsv4_testkit.waiting import free_ports

# Only a bound: a busy machine may take long.
SECONDS = 90.0
STEADY = 2.0
"""Time without a change, in seconds: the loop writes the status again within it."""


@pytest.fixture
def small() -> Iterator[Path]:
    """A state directory of 1 MiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("to mount a tmpfs takes root")
    # tmp_path is not usable: its names are longer than Ray's sockets allow.
    path = Path(tempfile.mkdtemp(prefix="d", dir="/tmp"))
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], check=False)
    if made.returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)
    path.rmdir()


def until(true: Callable[[], bool], what: str, pause: float = 0.1) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(pause)


def fill(file: Path) -> None:
    with file.open("ab", buffering=0) as target, contextlib.suppress(OSError):
        while True:
            target.write(b"x" * 4096)


def deployment(root: Path) -> DSV4Deployment:
    ports = dict(zip(("api", "dashboard", "gcs", "agent"), free_ports(4), strict=True))
    # Its weights are missing, so its agents report failures repeatedly and start no Ray.
    return parse(
        {
            "apiVersion": "dsv4.dev/v1alpha1",
            "kind": "DSV4Deployment",
            "metadata": {"name": "n"},
            "spec": {
                "model": {"variant": "Nano", "source": {"path": str(root / "missing")}},
                "topology": {"hardware": "CPU"},
                "network": {"ports": ports},
                "engine": {"maxModelLen": 1024, "kvCacheMemory": "64Mi"},
            },
        }
    )


@pytest.mark.parametrize("file", ["object", "gateway", "route", "gateway-1", "route-1", "manifest"])
def test_the_status_is_kept_in_memory_and_written_when_there_is_space(small: Path, file: str) -> None:
    """The disk is full from the moment at which the start of the loop has written `file`."""
    state = DeploymentState(small, "n")
    state.prepare()
    state.save_manifest(deployment(small))
    process = processes.start_loop(state, processes.loop_command(state, attached=False))
    try:
        if file != "manifest":
            until(lambda: (state.directory / f"{file}.json").exists(), "it starts", pause=0.0005)
        else:
            # Later than any write of the start.
            until(lambda: (state.directory / "object.json").exists() and state.holder() is not None, "it starts")
            time.sleep(1.0)
        fill(small / "fill")
        until(lambda: state.holder() is not None, "it runs")

        def problem() -> bool:
            condition = read_deployment(state).status.condition(ConditionType.PROGRESSING)
            return condition is not None and condition.reason is Reason.STATE_NOT_SAVED

        until(problem, "the condition is in the status")
        begun = time.monotonic()

        def lasts() -> bool:
            # Files that are removed after a failed write leave space for a later one.
            nonlocal begun
            fill(small / "fill")
            if not problem():
                begun = time.monotonic()
            return time.monotonic() - begun >= STEADY

        until(lasts, "no space is left")
        # The file is complete, but may be old: files of ended processes may have freed space once.
        DSV4Deployment.model_validate_json((state.directory / "object.json").read_text())
        # The status in memory outlives the loop.
        supervisor = state.holder()
        assert supervisor is not None
        report = read_report(supervisor)
        assert report is not None
        assert report.loop is not None
        os.kill(report.loop, signal.SIGKILL)
        until(lambda: (found := read_report(supervisor)) is not None and found.loop not in (None, report.loop), "next")
        next_loop = time.time()

        def runs() -> bool:
            """Whether the next loop has reconciled; until then, and after it, the condition stays."""
            assert problem()
            found = read_report(supervisor)
            return found is not None and found.beat is not None and found.beat >= next_loop + STEADY

        until(runs, "the next loop reconciles", pause=0.005)
        (small / "fill").unlink()
        until(lambda: not problem(), "the condition ends")
        until(lambda: state.object_text() is not None, "the object is there")
        until(
            lambda: DSV4Deployment.model_validate_json((state.directory / "object.json").read_text()) == state.object(),
            "the file has the present status",
        )
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(SECONDS)
        processes.stop_processes(state)
    assert code == 0
