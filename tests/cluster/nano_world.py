"""The nano model in pods, with requests and faults: an operator from the chart, a deployment, and concurrent users."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import charts
import httpx
import yaml
from clusterkit.client import Cluster, KubectlError
from clusterkit.waiting import until

from dsv4_operator.api.values import parse_time

MANIFEST = yaml.safe_load((Path(__file__).parents[2] / "examples" / "nano.yaml").read_text())
RELEASE = "main"
OPERATOR_NODE = "spark3"
"""Node of the operator while nodes of the group are lost."""
# Far above the usual durations: the ring runs in parallel with other work of the machine.
READY_SECONDS = 600.0
BACK_SECONDS = 480.0
ASKED = {"model": "nano", "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 2}
_LAST_WORD_SECONDS = 2.0
_MEMBERS = ("-l", "app.kubernetes.io/component=member")
_GATEWAY = "app.kubernetes.io/component=gateway"


@contextlib.contextmanager
def operated(cluster: Cluster, namespace: str, operator: str, runtime: str, *values: str) -> Iterator[None]:
    """Install the chart's operator in `namespace`, whose members run the image `runtime`."""
    repository, tag = operator.rsplit(":", 1)
    chosen = charts.settings(
        f"image.repository={repository}", f"image.tag={tag}", "image.pullPolicy=Never",
        f"runtimeImage={runtime}", f"watchNamespaces={{{namespace}}}", "crds.enabled=false", *values,
    )  # fmt: skip
    place = ("--namespace", namespace, "--wait", "--timeout=100s")
    charts.helm("install", RELEASE, str(charts.CHART), *chosen, *place, env=cluster.environment)
    try:
        yield
    finally:
        with contextlib.suppress(KubectlError):
            cluster.kubectl("delete", "dsv4", "--all", "-n", namespace, "--timeout=60s", seconds=70)
        charts.helm("uninstall", RELEASE, "--ignore-not-found", *place, env=cluster.environment)


@dataclass
class Nano:
    """The deployment `nano` of a namespace."""

    cluster: Cluster
    namespace: str

    def start(self, **spec: object) -> float:
        """Create it; return the seconds until it was Ready."""
        begun = time.monotonic()
        wanted = {**MANIFEST["spec"], **spec}
        about = {"name": "nano", "namespace": self.namespace}
        self.cluster.apply({**MANIFEST, "metadata": about, "spec": wanted})
        wait = ("wait", "dsv4/nano", "-n", self.namespace, "--for=condition=Ready")
        self.cluster.kubectl(*wait, f"--timeout={READY_SECONDS:.0f}s", seconds=READY_SECONDS + 10)
        return time.monotonic() - begun

    def group(self) -> dict[str, Any]:
        """Return its group from the status."""
        found: dict[str, Any] = self.cluster.get("dsv4", "nano", "-n", self.namespace)["status"]["groups"][0]
        return found

    def members(self) -> dict[str, dict[str, Any]]:
        """Return its members' pods by name."""
        items = self.cluster.get("pods", "-n", self.namespace, *_MEMBERS)["items"]
        return {pod["metadata"]["name"]: pod for pod in items}

    def uids(self) -> dict[str, str]:
        """Return the uids of its members' pods by name."""
        return {name: pod["metadata"]["uid"] for name, pod in self.members().items()}

    def pod(self, rank: int) -> str:
        """Return the name of the present member of `rank`."""
        return f"nano-0-i{self.group()['incarnation']}-r{rank}"

    def inside(self, rank: int, code: str) -> str:
        """Return the output of a Python program that runs in the pod of `rank`."""
        return self.cluster.kubectl("exec", "-n", self.namespace, self.pod(rank), "--", "python3", "-c", code)

    def gateway(self, away_from: str = "") -> str:
        """Return the name of a running gateway's pod that is not on the node `away_from`."""
        items = self.cluster.get("pods", "-n", self.namespace, "-l", _GATEWAY)["items"]
        running = (pod for pod in items if pod["status"]["phase"] == "Running")
        return str(next(pod["metadata"]["name"] for pod in running if pod["spec"]["nodeName"] != away_from))

    def phases(self, rank: int = 0) -> str:
        """Return the phase changes of the present agent of `rank` from its log, with times."""
        log = self.cluster.kubectl("logs", "-n", self.namespace, self.pod(rank))
        return "; ".join(
            f"{line.split()[1]} {line.partition('state ')[2]}"
            for line in log.splitlines()
            if " -> " in line and not line.startswith("[")
        )

    def noticed(self, since: float, cause: str, seconds: float = 60.0) -> dict[str, Any]:
        """Wait for the first death with `cause` since Unix time `since` in the status, and return it."""
        return until(f"{cause} in the status", lambda: self._death(since, cause), seconds=seconds, every=0.2)

    def recovered(self, since: float, cause: str) -> dict[str, Any]:
        """Return the same once the group serves again."""

        def ended() -> dict[str, Any] | None:
            found = self._death(since, cause)
            return found if found is not None and found.get("recoverSeconds") is not None else None

        return until(f"recovery from {cause}", ended, seconds=BACK_SECONDS, every=0.5)

    def _death(self, since: float, cause: str) -> dict[str, Any] | None:
        # A silent member is dead since its last report, which may precede the fault.
        deaths = [one for one in self.group()["history"] if parse_time(one["time"]) > since - _LAST_WORD_SECONDS]
        return next((one for one in sorted(deaths, key=lambda one: one["time"]) if one["cause"] == cause), None)


@contextlib.contextmanager
def forwarded(cluster: Cluster, namespace: str, target: str, port: int) -> Iterator[str]:
    """Yield the base URL of a port of `target`, such as `svc/nano`, on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        local = taken.getsockname()[1]
    command = [str(cluster.programs / "kubectl"), "port-forward", "-n", namespace, target, f"{local}:{port}"]
    process = subprocess.Popen(command, env=cluster.environment, stdout=subprocess.DEVNULL)
    try:
        until("the port-forward", lambda: _listens(local), seconds=60, every=0.2)
        yield f"http://127.0.0.1:{local}"
    finally:
        process.terminate()
        process.wait(60)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@dataclass
class Users:
    """Two users with one request at a time; the result of every request is recorded."""

    base: str
    answered: list[float] = field(default_factory=list)
    """Unix times of complete responses."""
    refused: list[str] = field(default_factory=list)
    """Error responses."""
    lost: list[str] = field(default_factory=list)
    """Requests without a response: the worst result."""

    @contextlib.contextmanager
    def asking(self) -> Iterator[Users]:
        """Send requests until the block ends, and wait for the last responses."""
        stop = threading.Event()
        threads = [threading.Thread(target=self._ask, args=(stop,), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            stop.set()
            for thread in threads:
                thread.join(BACK_SECONDS)
        assert not any(thread.is_alive() for thread in threads), "a question was neither answered nor refused"

    def next_after(self, time_of: float) -> float:
        """Return the seconds from Unix time `time_of` to the next complete response."""
        found = until(
            "an answer", lambda: [one for one in self.answered if one > time_of], seconds=BACK_SECONDS, every=0.1
        )
        return min(found) - time_of

    def _ask(self, stop: threading.Event) -> None:
        with httpx.Client(base_url=self.base, timeout=BACK_SECONDS, trust_env=False) as http:
            while not stop.wait(0.3):
                try:
                    answer = http.post("/v1/chat/completions", json=ASKED)
                    if answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2:
                        self.answered.append(time.time())
                    else:
                        self.refused.append(f"{answer.status_code} {answer.text[:200]}")
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    self.lost.append(f"{type(error).__name__}: {error}")


def timed(what: str, wait: Callable[[], object]) -> float:
    """Return the seconds that `wait` took, and print them."""
    begun = time.monotonic()
    wait()
    taken = time.monotonic() - begun
    print(f"{what}: {taken:.1f} s")
    return taken
