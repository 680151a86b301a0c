"""The main job on a cluster: real Ray and real vLLM with the nano model in pods on two nodes, asked and broken."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import charts
import httpx
import pytest
import yaml
from clusterkit.client import Cluster
from clusterkit.waiting import until

pytestmark = pytest.mark.usefixtures("definition")

NANO = yaml.safe_load((Path(__file__).parents[2] / "examples" / "nano.yaml").read_text())
RELEASE = "main"
READY_SECONDS = 420.0
# Far above what it takes: the ring runs beside whatever else the machine does.
BACK_SECONDS = 240.0
ASKED = {"model": "nano", "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 8}
KILL = "import os,signal,sys;" + (
    "found=[int(p) for p in os.listdir('/proc') if p.isdigit() "
    "and b'EngineCore' in open(f'/proc/{p}/cmdline','rb').read().split(b'\\0')[0]];"
    "[os.kill(p,signal.SIGKILL) for p in found];sys.exit(not found)"
)


@pytest.fixture
def operated(cluster: Cluster, namespace: str, operator_image: str, runtime_image: str) -> Iterator[str]:
    """The namespace, with an operator in it whose members run the runtime image."""
    repository, tag = operator_image.rsplit(":", 1)
    values = charts.settings(
        f"image.repository={repository}", f"image.tag={tag}", "image.pullPolicy=Never",
        f"runtimeImage={runtime_image}", f"watchNamespaces={{{namespace}}}", "crds.enabled=false",
    )  # fmt: skip
    place = ("--namespace", namespace, "--wait", "--timeout=100s")
    charts.helm("install", RELEASE, str(charts.CHART), *values, *place, env=cluster.environment)
    yield namespace
    with contextlib.suppress(subprocess.SubprocessError):
        cluster.kubectl("delete", "dsv4", "--all", "-n", namespace, "--timeout=60s", seconds=70)
    charts.helm("uninstall", RELEASE, "--ignore-not-found", *place, env=cluster.environment)


@contextlib.contextmanager
def forwarded(cluster: Cluster, namespace: str, service: str, port: int) -> Iterator[str]:
    """The base URL of a Service's port on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        local = taken.getsockname()[1]
    command = [str(cluster.programs / "kubectl"), "port-forward", "-n", namespace, f"svc/{service}", f"{local}:{port}"]
    process = subprocess.Popen(command, env=cluster.environment, stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{local}"
    finally:
        process.terminate()
        process.wait(10)


def pods(cluster: Cluster, namespace: str) -> dict[str, str]:
    """The members' pods: name to uid."""
    items = cluster.get("pods", "-n", namespace, "-l", "app.kubernetes.io/component=member")["items"]
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in items}


def status(cluster: Cluster, namespace: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get("dsv4", "nano", "-n", namespace).get("status", {})
    return found


def test_a_chat_a_killed_engine_and_an_answer(cluster: Cluster, operated: str) -> None:
    begun = time.monotonic()
    cluster.apply({**NANO, "metadata": {"name": "nano", "namespace": operated}})
    cluster.kubectl(
        "wait", "dsv4/nano", "-n", operated, "--for=condition=Ready", f"--timeout={READY_SECONDS:.0f}s",
        seconds=READY_SECONDS + 10,
    )  # fmt: skip
    print(f"\nready after {time.monotonic() - begun:.1f} s")
    before = pods(cluster, operated)
    items = cluster.get("pods", "-n", operated, "-l", "app.kubernetes.io/component=member")["items"]
    assert len({pod["spec"]["nodeName"] for pod in items}) == 2

    with forwarded(cluster, operated, "nano", 8000) as base, httpx.Client(base_url=base, timeout=BACK_SECONDS) as http:
        until("the port-forward", lambda: _listens(base), seconds=20, every=0.2)
        first = http.post("/v1/chat/completions", json=ASKED).raise_for_status().json()
        assert first["usage"]["completion_tokens"] == 8

        struck = time.monotonic()
        cluster.kubectl("exec", "-n", operated, "nano-0-i1-r0", "--", "python3", "-c", KILL)
        # Asked while the engine is dead: the gateway holds it until there is one again.
        again = http.post("/v1/chat/completions", json=ASKED).raise_for_status().json()
        print(f"answered again after {time.monotonic() - struck:.1f} s")
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert pods(cluster, operated) == before

    def recorded() -> dict[str, Any] | None:
        failure: dict[str, Any] | None = status(cluster, operated)["groups"][0].get("lastFailure")
        return failure if failure is not None and failure.get("recoverSeconds") is not None else None

    failure = until("the death in the status", recorded, seconds=60, every=0.5)
    assert failure
    assert (failure["cause"], failure["culpritRank"], failure["level"]) == ("EngineCoreDied", 0, 1)


def _listens(base: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{base}/v1/models", timeout=5).is_success
    return False
