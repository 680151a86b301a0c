"""Start and end of a cluster from outside: the supervisor does the work; this module waits and prints its messages."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from clusterkit import build, layout, leftovers, needs
from clusterkit.client import Cluster
from clusterkit.layout import Settings, State
from clusterkit.waiting import ClusterError, say, until

START_SECONDS = 600.0
END_SECONDS = 120.0


def running(name: str) -> Cluster | None:
    """Return the cluster of that name if it exists and its supervisor runs."""
    state = State.read(name)
    if state and _alive(state.supervisor):
        return Cluster(state)
    return None


def _alive(pid: int) -> bool:
    try:
        return leftovers.SUPERVISOR in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def start(settings: Settings) -> Cluster:
    """Start a cluster that runs until `end`. Missing parts are built and installed first.

    Raises:
        ClusterError: it already exists, or does not start; started parts have been ended.
    """
    with layout.alone(f"cluster {settings.name}"):
        _start(settings, tied=False)
        return _found(settings)


def prepare(settings: Settings) -> None:
    """Install and build the parts of a cluster with these settings; a first build takes minutes."""
    needs.provide(nodes=bool(settings.nodes), images=False, policies=bool(settings.k3s and settings.nodes))
    for module in settings.modules:
        build.built(module)


@contextmanager
def lasting(settings: Settings) -> Iterator[Cluster]:
    """Run a cluster until the end of the block or of this process, in any case."""
    with layout.alone(f"cluster {settings.name}"):
        supervisor = _start(settings, tied=True)
        try:
            yield _found(settings)
        finally:
            code = _stop(supervisor)
        if code or (left := leftovers.find(settings)):
            said = f"code {code}" if code else f"left behind: {left}"
            raise ClusterError(f"the cluster did not end well ({said}); see {settings.directory / 'logs'}")


def _start(settings: Settings, *, tied: bool) -> subprocess.Popen[bytes]:
    if running(settings.name):
        raise ClusterError(f"cluster {settings.name!r} runs already (make cluster-down ends it)")
    # Here and not in the supervisor, whose time is limited.
    prepare(settings)
    leftovers.sweep(settings)
    shutil.rmtree(settings.directory, ignore_errors=True)
    settings.directory.mkdir(parents=True, mode=0o700)
    (settings.directory / "logs").mkdir()
    log = settings.directory / "logs" / "supervisor.log"
    # The kernel sends this signal when this process has ended for any reason.
    tie = ("setpriv", "--pdeathsig", "TERM") if tied else ()
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    with log.open("wb") as out:
        supervisor = subprocess.Popen(
            [*tie, sys.executable, "-m", leftovers.SUPERVISOR, json.dumps(asdict(settings))],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
    with log.open() as words:

        def up() -> bool:
            ended = supervisor.poll() is not None
            if heard := words.read():
                print(heard, end="", flush=True)
            if ended:
                raise ClusterError(f"it did not come up; logs are in {settings.directory / 'logs'}")
            return (settings.directory / "state.json").exists()

        try:
            until("the cluster", up, seconds=START_SECONDS)
        except BaseException:
            _stop(supervisor)
            raise
    return supervisor


def _stop(supervisor: subprocess.Popen[bytes]) -> int:
    """Let the supervisor end the cluster, or kill it, and return its exit code; the kernel then ends the cluster."""
    supervisor.terminate()
    try:
        return supervisor.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        return supervisor.wait(END_SECONDS)


def _found(settings: Settings) -> Cluster:
    if cluster := running(settings.name):
        return cluster
    raise ClusterError(f"cluster {settings.name!r} ended as soon as it was up; see {settings.directory / 'logs'}")


def end(name: str) -> None:
    """End the cluster of that name, and remove the remains of a killed one.

    Raises:
        ClusterError: something remains; the text counts it.
    """
    settings = Settings(name=name)
    with layout.alone(f"cluster {name}"):
        state = State.read(name)
        if state and _alive(state.supervisor):
            os.kill(state.supervisor, signal.SIGTERM)
            pid = state.supervisor
            until(f"the end of the supervisor (process {pid})", lambda: not _alive(pid), seconds=END_SECONDS)
        leftovers.sweep(settings)
        if left := leftovers.find(settings):
            raise ClusterError(f"left behind: {left}")
        say(f"{name!r} is gone: {left}; logs are in {settings.directory / 'logs'}")
