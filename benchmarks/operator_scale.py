"""Benchmark of the operator: rate of group formation, cost at rest, and processor time of all components.

    python benchmarks/operator_scale.py                     # its own cluster: 50 nodes of KWOK, removed afterwards
    python benchmarks/operator_scale.py --cluster NAME      # a running cluster (clusterkit up --nodes 0 --fake 50)

The API server, etcd, the scheduler, the controllers and the operator are real and run on this machine, the operator as
a process with the rights of the chart. Nodes are simulated by KWOK, which reports every pod as running; one process
responds for all agents and reports that a group serves as soon as its members run. The benchmark thus covers everything
except engines. A group counts as formed when its deployment's status is `Serving`: its plan is stored, its members are
bound and run, its Services and its gateway's Deployment exist, its agents have reported, and the status is written. The
gateways' pods are created by Kubernetes' own controllers, at 20 requests a second each; their time is printed
separately.

Requests are counted by the API server itself: the operator's account has its own flow schema. Requires root, for the
pods' addresses. `--profile FILE` writes a cProfile of the operator, which makes it slower.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# The kit of the test cluster is not a package.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster"))

import charts
from clusterkit import lifetime
from clusterkit.client import Cluster
from clusterkit.layout import Settings
from operator_process import OperatorProcess

from dsv4_operator.backends.local.network import die_with_parent
from dsv4_operator.builders import names
from dsv4_operator.kube import DSV4_DEPLOYMENTS, PODS, Client, find_access
from dsv4_testkit.scale import counts
from dsv4_testkit.scripted_agent import routed

ROOT = Path(__file__).parents[1]
NODES = 50
_FORM_SECONDS = 900.0
_SETTLE_SECONDS = 15.0
_REMOVE_SECONDS = 300.0
_CREATING = 16
_SAY_SECONDS = 5.0


def manifest(namespace: str, number: int) -> dict[str, Any]:
    """Return a deployment with one group of two members."""
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


@dataclass(frozen=True, slots=True)
class Moment:
    """Counted figures at one time."""

    time: float
    cpu: dict[str, float]
    requests: counts.Requests


class Bench:
    """One run on one cluster."""

    def __init__(self, cluster: Cluster, namespace: str, operator: OperatorProcess, processes: dict[str, int]) -> None:
        self.cluster, self.namespace, self.operator, self.processes = cluster, namespace, operator, processes

    def now(self) -> Moment:
        cpu = {name: counts.cpu_seconds(pid) for name, pid in self.processes.items()}
        return Moment(time.monotonic(), cpu, counts.requests(self.cluster.http))

    async def form(self, kube: Client, count: int) -> None:
        """Create the deployments and wait until all serve."""
        began = time.monotonic()
        start = (await kube.listing(DSV4_DEPLOYMENTS, self.namespace)).resource_version
        following = asyncio.create_task(self._until_serving(kube, start, count))
        slots = asyncio.Semaphore(_CREATING)

        async def create(number: int) -> None:
            async with slots:
                await kube.create(manifest(self.namespace, number))

        await asyncio.gather(*(create(number) for number in range(count)))
        print(f"created after {time.monotonic() - began:.1f} s", flush=True)
        await following

    async def _until_serving(self, kube: Client, version: str, count: int) -> None:
        began = said = time.monotonic()
        phases: dict[str, str] = {}
        async with asyncio.timeout(_FORM_SECONDS):
            while True:
                async for event in kube.watch(DSV4_DEPLOYMENTS, self.namespace, resource_version=version):
                    version = event.resource_version
                    if event.type != "BOOKMARK":
                        name = event.object["metadata"]["name"]
                        phases[name] = (event.object.get("status") or {}).get("phase", "no status")
                    serving = sum(phase == "Serving" for phase in phases.values())
                    if serving == count:
                        return
                    if time.monotonic() - said > _SAY_SECONDS:
                        said = time.monotonic()
                        print(f"{said - began:5.0f} s: {serving} of {count} serve", flush=True)

    async def proven(self, kube: Client, count: int) -> None:
        """Fail unless two members of every group run, each on a node."""
        made, running = await self._pods(kube, names.MEMBER)
        if (made, running) != (2 * count, 2 * count):
            raise SystemExit(f"{running} of {made} members run, and {2 * count} should")

    async def gateways(self, kube: Client, count: int) -> None:
        """Wait until the gateway of every group runs."""
        async with asyncio.timeout(_FORM_SECONDS):
            while True:
                _, running = await self._pods(kube, names.GATEWAY)
                if running >= count:
                    return
                await asyncio.sleep(0.5)

    async def _pods(self, kube: Client, component: str) -> tuple[int, int]:
        """Return the numbers of existing and of running pods of a component."""
        pods = await kube.list(PODS, self.namespace, labels=f"{names.COMPONENT}={component}")
        return len(pods), sum(pod["status"].get("phase") == "Running" and "nodeName" in pod["spec"] for pod in pods)


async def _measure(bench: Bench, count: int, rest: float) -> None:
    operator = bench.processes["operator"]
    async with Client(find_access(kubeconfig=bench.cluster.kubeconfig)) as kube:
        before = bench.now()
        await bench.form(kube, count)
        after = bench.now()
        load = os.getloadavg()[0]
        await bench.proven(kube, count)
        await bench.gateways(kube, count)
        reached = time.monotonic() - before.time
        print(f"\n{count} deployments of 2 members on {NODES} nodes of KWOK, {platform.machine()}, ", end="")
        print(f"{os.cpu_count()} processors, load {load:.1f}, {time.strftime('%Y-%m-%d')}\n")
        print("| | forming | at rest |\n|---|---|---|")
        await asyncio.sleep(_SETTLE_SECONDS)
        quiet = bench.now()
        await asyncio.sleep(rest)
        end = bench.now()
        _table(bench, count, (before, after), (quiet, end))
        print(f"\noperator: {counts.mebibytes(operator)} MiB at rest, {counts.mebibytes(operator, 'VmHWM')} at most")
        print(f"all gateways ran {reached:.1f} s after the creation of the first deployment")
        made = after.requests.since(before.requests)
        print("writes of all while forming, a group: ", end="")
        print(", ".join(f"{verb} {what} {n / count:.1f}" for (verb, what), n in made.writes.most_common()))
        wrote = end.requests.since(quiet.requests).writes
        print("writes of all at rest: " + ", ".join(f"{verb} {what} {n}" for (verb, what), n in wrote.most_common()))


def _table(bench: Bench, count: int, forming: tuple[Moment, Moment], rest: tuple[Moment, Moment]) -> None:
    seconds = [end.time - begin.time for begin, end in (forming, rest)]
    asked = [end.requests.since(begin.requests) for begin, end in (forming, rest)]
    print(f"| seconds | {seconds[0]:.1f} | {seconds[1]:.1f} |")
    print(f"| groups/s | {count / seconds[0]:.1f} | |")
    print(f"| requests of the operator | {asked[0].ours / count:.1f} a group | {asked[1].ours / seconds[1]:.2f}/s |")
    everybody = f"| requests of all | {asked[0].everybodys / count:.1f} a group "
    print(f"{everybody}| {asked[1].everybodys / seconds[1]:.2f}/s |")
    for name in bench.processes:
        used = [end.cpu[name] - begin.cpu[name] for begin, end in (forming, rest)]
        shares = [f"{one:.1f} s, {100 * one / span:.0f} %" for one, span in zip(used, seconds, strict=True)]
        print(f"| processor: {name} | {shares[0]} | {shares[1]} |")


@contextlib.contextmanager
def _agents(kubeconfig: Path, namespace: str) -> Iterator[int]:
    command = [
        sys.executable,
        "-m",
        "dsv4_testkit.scale.agents",
        f"--kubeconfig={kubeconfig}",
        f"--namespace={namespace}",
    ]
    process = subprocess.Popen(command, cwd=ROOT / "benchmarks", preexec_fn=lambda: die_with_parent(signal.SIGKILL))
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait(10)


def _end(operator: OperatorProcess) -> None:
    """Stop the operator, first with SIGTERM so that a profile is written."""
    try:
        operator.end()
    except subprocess.TimeoutExpired:
        operator.kill()


@contextlib.contextmanager
def _cluster(name: str | None) -> Iterator[Cluster]:
    if name is None:
        with lifetime.lasting(Settings("bench", nodes=0, fake=NODES)) as cluster:
            yield cluster
        return
    found = lifetime.running(name)
    if found is None:
        raise SystemExit(f"--cluster {name}: no such cluster is running; start it with clusterkit up")
    yield found


@contextlib.contextmanager
def _bench(cluster: Cluster, profile: Path | None, *, stays: bool) -> Iterator[Bench]:
    """Yield the namespace with its operator and agents; on a cluster that stays, it is removed afterwards."""
    cluster.apply(yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text()))
    namespace = f"scale-{int(time.time())}"
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if stays:
            # Removal is awaited, so that it does not affect the next measurement on this cluster.
            stack.callback(cluster.kubectl, "delete", "namespace", namespace, seconds=_REMOVE_SECONDS)
        stack.enter_context(cluster.http)
        stack.enter_context(routed(cluster.state.addresses.fake_pods))
        file = stack.enter_context(charts.account(cluster, namespace, folder / "operator.kubeconfig"))
        (account,) = (
            one["metadata"]["name"]
            for one in cluster.get("serviceaccounts", "-n", namespace)["items"]
            if one["metadata"]["name"] != "default"
        )
        cluster.apply(counts.flow_schema(namespace, account))
        stack.callback(cluster.kubectl, "delete", "flowschema", counts.SCHEMA)
        agents = stack.enter_context(_agents(cluster.kubeconfig, namespace))
        log = Path(tempfile.gettempdir()) / f"{namespace}.log"
        operator = OperatorProcess(file, namespace, log, profile=profile)
        operator.start()
        stack.callback(_end, operator)
        asyncio.run(operator.until_leading())
        print(f"the operator leads; its log: {log}", flush=True)
        processes = {"operator": operator.pid, **counts.children(cluster.state.supervisor), "agents": agents}
        yield Bench(cluster, namespace, operator, processes | {"this benchmark": os.getpid()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", metavar="NAME", help="a running cluster (default: start and remove one)")
    parser.add_argument("--deployments", type=int, default=100, help="number of deployments (default: %(default)s)")
    parser.add_argument(
        "--rest", type=float, default=60.0, metavar="SECONDS", help="time at rest (default: %(default)s)"
    )
    parser.add_argument("--profile", type=Path, metavar="FILE", help="file of the operator's profile, for pstats")
    options = parser.parse_args()
    stays = options.cluster is not None
    with _cluster(options.cluster) as cluster, _bench(cluster, options.profile, stays=stays) as bench:
        asyncio.run(_measure(bench, options.deployments, options.rest))


if __name__ == "__main__":
    main()
