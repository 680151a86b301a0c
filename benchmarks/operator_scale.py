"""How fast the operator forms groups, and what it costs when nothing happens.

    (cd tests/cluster && python -m clusterkit --name scale up --nodes 0 --fake 50)
    python benchmarks/operator_scale.py --kubeconfig FILE [--deployments 100]

The operator runs as a process of this machine against the API server. Nodes are KWOK's, which say of every pod that it
runs; so this measures the operator, the API server and the scheduler, and no engine. A group counts as formed when all
its pods run and its status says `Starting`. There are no agents; the operator asks for them in vain, as it does on a
real cluster while they start.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from dsv4_operator.backends.local.network import die_with_parent
from dsv4_operator.kube import DSV4_DEPLOYMENTS, PODS, Client, find_access
from dsv4_operator.kube.resources import NAMESPACES

_START_SECONDS = 120.0
_FORM_SECONDS = 600.0
_REST_SECONDS = 30.0
_CREATING = 16
_TICKS = os.sysconf("SC_CLK_TCK")


def manifest(namespace: str, number: int) -> dict[str, Any]:
    """One deployment of one group of two members."""
    return {
        "apiVersion": DSV4_DEPLOYMENTS.api_version,
        "kind": DSV4_DEPLOYMENTS.kind,
        "metadata": {"name": f"d{number}", "namespace": namespace},
        "spec": {
            "model": {"variant": "Nano", "source": {"nano": {"seed": 0}}},
            "topology": {
                "hardware": "CPU",
                "nodesPerGroup": 2,
                "nodeSelector": {"type": "kwok"},
                "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
            },
        },
    }


class Operator:
    """The operator's process."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "dsv4_operator.controller.operator", f"--kubeconfig={kubeconfig}"]
        command += [f"--namespace={namespace}", f"--lease-namespace={namespace}", f"--metrics-port={self.port}"]
        self.process = subprocess.Popen(
            [*command, "--runtime-image=none.invalid/none:1"],
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL),
        )

    def metrics(self) -> dict[str, float]:
        try:
            text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=10, trust_env=False).text
        except httpx.HTTPError:
            return {}
        pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def requests(self) -> float:
        return sum(value for name, value in self.metrics().items() if name.startswith("dsv4_operator_requests_total"))

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    @property
    def mebibytes(self) -> int:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found
        return int(found[1]) // 1024

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


async def _formed(kube: Client, namespace: str, count: int) -> bool:
    listed = await kube.list(DSV4_DEPLOYMENTS, namespace)
    if sum((one.get("status") or {}).get("phase") == "Starting" for one in listed) < count:
        return False
    members = await kube.list(PODS, namespace, labels="app.kubernetes.io/component=member")
    return sum(pod["status"].get("phase") == "Running" for pod in members) == 2 * count


async def _measure(kubeconfig: Path, count: int) -> None:
    namespace = f"scale-{int(time.time())}"
    async with Client(find_access(kubeconfig=kubeconfig)) as kube:
        await kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        operator = Operator(kubeconfig, namespace)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while operator.metrics().get("dsv4_operator_leading") != 1.0:
                assert time.monotonic() < deadline, "the operator does not lead"
                await asyncio.sleep(0.2)
            begun, cpu, asked = time.monotonic(), operator.cpu_seconds, operator.requests()
            slots = asyncio.Semaphore(_CREATING)

            async def create(number: int) -> None:
                async with slots:
                    await kube.create(manifest(namespace, number))

            await asyncio.gather(*(create(number) for number in range(count)))
            created = time.monotonic() - begun
            while not await _formed(kube, namespace, count):
                assert time.monotonic() - begun < _FORM_SECONDS, "not all groups were formed"
                await asyncio.sleep(0.2)
            formed = time.monotonic() - begun
            print(f"{platform.machine()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
            print(f"{count} deployments: created in {created:.1f} s, formed in {formed:.1f} s", end="")
            print(f", {count / formed:.1f} groups/s")
            print(f"operator: {operator.cpu_seconds - cpu:.1f} s of processor, {operator.mebibytes} MiB", end="")
            print(f", {(operator.requests() - asked) / count:.1f} requests a group")
            await asyncio.sleep(5)
            begun, cpu, asked = time.monotonic(), operator.cpu_seconds, operator.requests()
            await asyncio.sleep(_REST_SECONDS)
            rest = time.monotonic() - begun
            print(f"at rest: {(operator.requests() - asked) / rest:.2f} requests/s", end="")
            print(f", {(operator.cpu_seconds - cpu) / rest:.3f} processors, {operator.mebibytes} MiB")
        finally:
            operator.end()
            await kube.delete(NAMESPACES, None, namespace)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--deployments", type=int, default=100)
    options = parser.parse_args()
    # Seen at once, also in a pipe.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    asyncio.run(_measure(options.kubeconfig, options.deployments))


if __name__ == "__main__":
    main()
