"""A deployment of the nano model under test, operated through the commands of users."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from dsv4_operator.backends.local.supervisor import read_kept_status
from dsv4_testkit.faults.actions import Signal
from dsv4_testkit.faults.table import Fault
from dsv4_testkit.waiting import free_ports

MARKER = "DSV4_DEPLOYMENT_DIR"
MANIFEST = """\
apiVersion: dsv4.dev/v1alpha1
kind: DSV4Deployment
metadata: {{name: {name}}}
spec:
  replicas: {replicas}
  model: {{variant: Nano, source: {{nano: {{seed: 0, precision: bf16}}}}}}
  topology: {{hardware: CPU, nodesPerGroup: {nodes}, devicesPerNode: 1}}
  engine: {{maxModelLen: 1024, maxNumSeqs: {seqs}, maxNumBatchedTokens: 512}}
  network: {{ports: {{api: {api}, dashboard: {dashboard}}}}}
  recovery: {{maxRestarts: {restarts}, window: {window}, backoff: {{base: 0s, max: 0s}}}}
"""


class Deployment:
    """One deployment with its own state directory and ports."""

    def __init__(
        self,
        name: str = "nano",
        *,
        nodes: int = 2,
        restarts: int = 5,
        window: str = "1h",
        weights: Path | None = None,
        environment: Mapping[str, str] | None = None,
        manifest: str = MANIFEST,
        replicas: int = 1,
        seqs: int = 4,
    ) -> None:
        """Create a deployment without starting it.

        Args:
            name: of the deployment.
            nodes: members per group.
            restarts: restart budget within `window`.
            window: a duration.
            weights: a directory of checkpoints to begin with.
            environment: variables in addition to those of this process.
            manifest: text with the fields of `MANIFEST` in braces.
            replicas: groups.
            seqs: concurrent requests of an engine.
        """
        self.name = name
        self.key: str | None = None
        """Key of callers, if the API requires one."""
        self.environment = {**os.environ, **(environment or {})}
        # Short because of the length limit of Ray's sockets.
        self.root = Path(tempfile.mkdtemp(prefix="d4-"))
        self.directory = self.root / name
        self.api, self.dashboard = free_ports(2)
        self.file = self.root / "deployment.yaml"
        ports = {"api": self.api, "dashboard": self.dashboard}
        asked = {"nodes": nodes, "restarts": restarts, "window": window, "replicas": replicas, "seqs": seqs}
        self.file.write_text(manifest.format(name=name, **asked, **ports))
        # As in a state directory after earlier use: compilation occurs only at the machine's first start.
        compiled = Path(tempfile.gettempdir()) / "dsv4-compiled"
        compiled.mkdir(exist_ok=True)
        (self.root / "cache").symlink_to(compiled)
        if weights is not None and weights.is_dir():
            shutil.copytree(weights, self.root / "weights")

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "dsv4_operator.cli.main", *words, "--state-dir", str(self.root)]

    def run(self, *words: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    def up(self, timeout: float = 300.0) -> float:
        """Start the deployment; return the seconds until it was ready."""
        begun = time.monotonic()
        done = self.run("up", str(self.file), "--detach", "--timeout", f"{timeout:.0f}s", timeout=timeout + 30.0)
        if done.returncode != 0:
            raise AssertionError(f"up failed:\n{done.stdout}\n{done.stderr}\n{self.log()}")
        return time.monotonic() - begun

    def log(self) -> str:
        path = self.directory / "loop.log"
        return path.read_text() if path.exists() else ""

    def object(self) -> dict[str, Any]:
        done = self.run("status", self.name, "-o", "json", timeout=30)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def group(self, index: int = 0) -> dict[str, Any]:
        return dict(self.peek()["groups"][index])

    def peek(self) -> dict[str, Any]:
        """Return the status from its file: `dsv4 status` takes a second of processor time, which engines need."""
        try:
            text = (self.directory / "object.json").read_text()
        except FileNotFoundError:
            # Removed by a fault; the supervisor has a copy.
            text = read_kept_status(int((self.directory / "lock").read_text())) or "{}"
        return dict(json.loads(text)["status"])

    def pid(self, rank: int, process: str) -> int:
        """Return the process id of a member's running process.

        Raises:
            RuntimeError: the status lists no such process within a minute.
        """
        # The status lists the processes of a new engine shortly after it serves.
        deadline = time.monotonic() + 60.0
        while True:
            try:
                found = pid_in(self.group(), rank, process)
                os.kill(found, 0)
            except (StopIteration, ProcessLookupError):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the status lists no running {process} of rank {rank}") from None
                time.sleep(0.25)
            else:
                return found

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a JSON request to the API."""
        key = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        return {"Content-Type": "application/json", **key}

    def complete(self, prompt: str = "Hello", tokens: int = 4, timeout: float = 60.0) -> dict[str, Any]:
        body = {"model": self.name, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.api}/v1/completions",
            json.dumps(body).encode(),
            self.headers,
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return dict(json.load(response))

    def wait(self, phase: str, *, since: float, timeout: float = 240.0) -> dict[str, Any]:
        """Return the status once it is in `phase` and contains a failure after Unix time `since`."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            status = self.peek()
            failure = status["groups"][0].get("lastFailure")
            if status["phase"] == phase and failure is not None and unix(failure["time"]) > since:
                return status
            time.sleep(0.1)
        raise AssertionError(f"not {phase} after {timeout:.0f} s:\n{json.dumps(status, indent=1)}\n{self.log()}")

    def remains(self) -> list[str]:
        """Return processes and ports left by a deployment after its end."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARKER) == str(self.directory):
                    found.append(f"process {process.pid} {' '.join(process.cmdline())[:80]}")
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        for port in (self.api, self.dashboard):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    found.append(f"port {port}")
        return found

    def destroy(self) -> None:
        self.run("down", self.name, timeout=90)
        shutil.rmtree(self.root, ignore_errors=True)


def pid_in(group: Mapping[str, Any], rank: int, process: str) -> int:
    """Return the process id of a member's process in a group's status.

    Raises:
        StopIteration: the status lists no such process.
    """
    member = next(member for member in group["members"] if member["rank"] == rank)
    return next(int(found["pid"]) for found in member["processes"] if found["name"] == process)


@dataclass(frozen=True)
class Recovery:
    """Recovery from one fault. Seconds count from the signal."""

    fault: Fault
    detected: float
    answered: float
    cause: str
    culprit: int | None
    level: int | None


class Serving(Protocol):
    """A deployment that serves, on any backend; see `Deployment`."""

    def pid(self, rank: int, process: str) -> int: ...

    def wait(self, phase: str, *, since: float) -> dict[str, Any]: ...

    def complete(self) -> dict[str, Any]: ...


def inflict(deployment: Serving, fault: Fault) -> Recovery:
    """Cause the fault, wait until the deployment serves again, and complete a request."""
    action = fault.action
    assert isinstance(action, Signal), f"{fault.name} is no signal"
    pid = deployment.pid(action.rank, action.process)
    killed = time.time()
    os.kill(pid, action.number)
    status = deployment.wait("Serving", since=killed)
    deployment.complete()
    answered = time.time() - killed
    failure = first_failure(status, killed)
    return Recovery(
        fault,
        unix(failure["time"]) - killed,
        answered,
        failure["cause"],
        failure.get("culpritRank"),
        failure.get("level"),
    )


def first_failure(status: dict[str, Any], since: float) -> dict[str, Any]:
    """Return the earliest death after Unix time `since`."""
    later = [failure for failure in status["groups"][0]["history"] if unix(failure["time"]) > since]
    return min(later, key=lambda failure: unix(failure["time"]))


def unix(text: str) -> float:
    """Convert an RFC 3339 time to seconds since 1970."""
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def phases(deployment: Deployment, incarnation: int = 1, start: int = 0) -> dict[str, float]:
    """Return the seconds of the head in each phase of its first start, or of a later start of the same incarnation."""
    from datetime import datetime

    log = (deployment.directory / f"i{incarnation}" / "m0" / "agent.log").read_text()
    starts: list[dict[str, float]] = [{}]
    entered: tuple[str, datetime] | None = None
    for line in log.splitlines():
        words = line.split()
        if " -> " in line and len(words) > 6:
            time_of = datetime.fromisoformat(f"{words[0]} {words[1].replace(',', '.')}")
            if entered is not None and entered[0] != "Serving":
                starts[-1][entered[0]] = (time_of - entered[1]).total_seconds()
            entered = (words[6].rstrip(":"), time_of)
            if entered[0] == "Serving":
                starts.append({})
    return starts[start]


def memory(deployment: Deployment) -> list[float]:
    """Return the memory of each member's processes in MiB; shared pages count in proportion (PSS)."""
    found = []
    for rank, _ in enumerate(deployment.group()["members"]):
        agent = deployment.pid(rank, "agent")
        space = os.readlink(f"/proc/{agent}/ns/pid")
        total = 0
        for process in psutil.process_iter():
            try:
                if os.readlink(f"/proc/{process.pid}/ns/pid") == space:
                    total += process.memory_full_info().pss
            except (OSError, psutil.Error):
                continue
        found.append(total / 2**20)
    return found


def network_namespaces() -> set[str]:
    """Return the network namespaces of all processes."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.add(os.readlink(entry / "ns" / "net"))
            except OSError:
                continue
    return found


def shared_memory() -> set[str]:
    """Return the files in this machine's /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()}
