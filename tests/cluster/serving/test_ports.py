"""A foreign pod tries every listening port of a member's pod: the port refuses, or is listed here by name.

The test cluster does not enforce network policies: the servers refuse by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from clusterkit.client import Cluster
from nano_world import Nano

from dsv4_runtime.engine import token_auth

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

STRANGERS = "strangers"
_PROGRAMS = Path(__file__).parents[1]
_LIST = (_PROGRAMS / "listening.py").read_text()
_TRY = (_PROGRAMS / "stranger.py").read_text()

REFUSING = {
    "agent": "http",
    "api": "http",
    "dashboard": "http",
    "dashboard-agent-http": "http",
    "runtime-env-agent": "http",
    "gcs": "grpc",
    "raylet": "grpc",
    "ray-client": "grpc",
    "core-worker": "grpc",
    "dashboard-agent": "grpc",
}
"""Ports that require the token, and their protocol."""
OPEN = {
    "queue": "vLLM's queue from EngineCore to workers, and theirs to it",
    "gloo": "connections between ranks for collective operations",
    "store": "torch's store, by which ranks find each other",
}
"""Ports that cannot require it (docs/pods.md, Ports). An enforced NetworkPolicy closes them."""


@dataclass(frozen=True)
class Listener:
    """One socket that may be reachable from outside of the pod."""

    protocol: str
    address: str
    port: int
    process: str
    """Its command line, or the title that the process set."""

    @property
    def anywhere(self) -> bool:
        """Whether it is bound to every address."""
        return self.address in ("0.0.0.0", "::")

    @property
    def judged(self) -> str | None:
        """Name of the port; None if it is unknown."""
        worker, core = "RayWorkerProc" in self.process, "EngineCore" in self.process
        # Ray gives its core workers ports of this range (--min-worker-port), and listens on every address.
        core_worker = self.anywhere and 10002 <= self.port <= 19999
        known = {
            "agent": "dsv4_runtime.agent" in self.process and self.port == 8090,
            # A process that waited for its engine keeps its original command line.
            "api": self.port == 8000 and any(one in self.process for one in ("api_server", "vllm_plugin.warm_pool")),
            "dashboard": "dashboard/dashboard.py" in self.process and self.port == 8265,
            "dashboard-agent-http": "DashboardAgent" in self.process and self.port == 52365,
            "dashboard-agent": "DashboardAgent" in self.process and self.anywhere,
            "runtime-env-agent": "RuntimeEnvAgent" in self.process,
            "gcs": "gcs_server" in self.process and self.port == 6379,
            "raylet": "raylet/raylet" in self.process,
            "ray-client": "ray.util.client.server" in self.process and self.port == 10001,
            "core-worker": core_worker and ("ray::" in self.process or core),
            "store": worker and self.anywhere and not core_worker,
            "gloo": worker and not self.anywhere,
            "queue": core and not self.anywhere,
        }
        return next((name for name, true in known.items() if true), None)


@pytest.fixture(scope="module", autouse=True)
def _strangers(cluster: Cluster) -> Iterator[None]:
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": STRANGERS}})
    yield
    cluster.kubectl("delete", "namespace", STRANGERS, "--wait=false")


def listeners(nano: Nano, rank: int) -> list[Listener]:
    """Return the listening sockets in the pod of `rank` that are reachable from outside."""
    return [
        one for one in (Listener(*row) for row in json.loads(nano.inside(rank, _LIST))) if one.address != "127.0.0.1"
    ]


def tried(cluster: Cluster, image: str, questions: list[dict[str, Any]], name: str) -> dict[str, list[str]]:
    """Run the requests in a pod without a token; return the results by the request's name."""
    pod = ["run", name, "-n", STRANGERS, f"--image={image}", "--image-pull-policy=Never", "--restart=Never"]
    cluster.kubectl(*pod, "--command", "--", "python3", "-c", _TRY, json.dumps(questions))
    wait = ("wait", "--for=jsonpath={.status.phase}=Succeeded", f"pod/{name}", "-n", STRANGERS, "--timeout=240s")
    cluster.kubectl(*wait, seconds=250)
    found: dict[str, list[str]] = json.loads(cluster.kubectl("logs", name, "-n", STRANGERS))
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_every_port_refuses_or_is_judged(nano: Nano, cluster: Cluster, runtime_image: str, rank: int) -> None:
    address = nano.members()[nano.pod(rank)]["status"]["podIP"]
    found = listeners(nano, rank)
    kinds = {one: one.judged for one in found}
    unknown = [one for one, kind in kinds.items() if kind is None]
    assert not unknown, f"nobody has judged these ports yet: {unknown}"
    asked = [
        {"name": f"{kind}:{one.port}", "way": REFUSING[kind], "address": address, "port": one.port}
        for one, kind in kinds.items()
        if kind in REFUSING and one.protocol == "tcp"
    ]
    answers = tried(cluster, runtime_image, asked, f"rank{rank}")
    for name, said in sorted(answers.items()):
        print(f"rank {rank} {name}: {', '.join(sorted(set(said)))}")
        assert "refused" in said, f"{name} did not ask for a token: {said}"
        assert "answered" not in said, f"{name} answered a stranger: {said}"
    wanted = {"agent", "raylet", "core-worker"} | ({"api", "gcs", "dashboard"} if rank == 0 else set())
    assert wanted <= set(kinds.values())
    left = sorted({kind for kind in kinds.values() if kind in OPEN})
    print(f"rank {rank}: without a token {left}, on {[one.address for one in found if one.judged in OPEN]}")
    for one in found:
        assert kinds[one] not in ("gloo", "queue") or one.address == address


def test_the_engine_accepts_requests_with_the_token(nano: Nano) -> None:
    """The same request with the token, from within the engine's pod."""
    code = (
        "import urllib.request as asking\n"
        f"token = open('/etc/dsv4/token/token').read().strip()\n"
        f"question = asking.Request('http://' + __import__('os').environ['DSV4_POD_IP'] + ':8000/health',"
        f" headers={{{token_auth.HEADER!r}: token}})\n"
        "print(asking.urlopen(question, timeout=20).status)"
    )
    assert nano.inside(0, code).strip() == "200"
