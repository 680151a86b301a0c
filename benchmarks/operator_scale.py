"""Benchmark of the operator: rate of group formation, cost at rest, and processor time of all components.

    python benchmarks/operator_scale.py                     # its own cluster of KWOK's nodes, removed afterwards
    python benchmarks/operator_scale.py --cluster NAME      # a running cluster (clusterkit up --nodes 0 --fake 50)
    python benchmarks/operator_scale.py --kuberay           # and as many RayClusters of KubeRay, with the ratios

The API server, etcd, the scheduler, the controllers and the operator are real and run on this machine, the operator as
a process with the rights of the chart. Nodes are simulated by KWOK, which reports every pod as running; one process
responds for all agents and gateways, and reports that a group serves as soon as its members run. The benchmark thus
covers everything except engines. A group counts as formed when its deployment's status is `Serving`: its plan is
stored, its members are bound and run, its Services and its gateway's Deployment exist, its agents have reported, and
the status is written. The gateways' pods are created by Kubernetes' own controllers, at 20 requests a second each;
their time is printed separately.

Requests are counted by the API server itself: the operator's account has its own flow schema. With `--kuberay` the
deployments are removed and their operator ends, and KubeRay's operator, with its default settings and its own account,
gets as many RayClusters of a head and a worker, which count as formed when their state is `ready`. Requires root, for
the pods' addresses. `--profile FILE` writes a cProfile of the operator, which makes it slower; it is not restarted
then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# The kit of the test cluster is not a package.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster"))

import charts
import kuberay_parts
from clusterkit import lifetime
from clusterkit.client import Cluster
from clusterkit.layout import Settings
from operator_process import OperatorProcess

from dsv4_operator.backends.local.network import die_with_parent
from dsv4_operator.builders import names
from dsv4_operator.builders.frontend import gateways_of
from dsv4_operator.kube import DSV4_DEPLOYMENTS, PODS, RAY_CLUSTERS, Client, Manifest, Resource, find_access
from dsv4_testkit.scale import counts
from dsv4_testkit.scripted_agent import routed

ROOT = Path(__file__).parents[1]
NODES, DEPLOYMENTS_OF_A_NODE = 50, 10
"""Least number of nodes, and the number of deployments whose members and gateways have room on one."""
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


def ray_cluster(namespace: str, number: int) -> dict[str, Any]:
    """One RayCluster of a head and a worker."""

    def template(name: str) -> dict[str, Any]:
        resources = {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
        container = {"name": name, "image": "dsv4.test/none:1", "resources": resources}
        tolerations = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
        return {"spec": {"containers": [container], "nodeSelector": {"type": "kwok"}, "tolerations": tolerations}}

    worker = {"groupName": "workers", "replicas": 1, "minReplicas": 1, "maxReplicas": 1}
    return {
        "apiVersion": RAY_CLUSTERS.api_version,
        "kind": RAY_CLUSTERS.kind,
        "metadata": {"name": f"r{number}", "namespace": namespace},
        "spec": {
            "rayVersion": "2.55.0",
            "headGroupSpec": {"rayStartParams": {}, "template": template("ray-head")},
            "workerGroupSpecs": [{**worker, "rayStartParams": {}, "template": template("ray-worker")}],
        },
    }


@dataclass(frozen=True, slots=True)
class Side:
    """An operator that is measured."""

    name: str
    """Of its process among those of the benchmark."""
    schema: str
    """Flow schema of its account."""
    resource: Resource
    manifest: Callable[[str, int], dict[str, Any]]
    state: Callable[[Manifest], str]
    ready: str
    """State of an object that counts as formed."""


OURS = Side(
    "operator",
    counts.OPERATOR,
    DSV4_DEPLOYMENTS,
    manifest,
    lambda found: str((found.get("status") or {}).get("phase")),
    "Serving",
)
KUBERAY = Side(
    "KubeRay",
    counts.KUBERAY,
    RAY_CLUSTERS,
    ray_cluster,
    lambda found: str((found.get("status") or {}).get("state")),
    "ready",
)


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

    async def form(self, kube: Client, side: Side, count: int) -> None:
        """Create the objects and wait until all are ready."""
        began = time.monotonic()
        start = (await kube.listing(side.resource, self.namespace)).resource_version
        following = asyncio.create_task(self._until_ready(kube, side, start, count))
        slots = asyncio.Semaphore(_CREATING)

        async def create(number: int) -> None:
            async with slots:
                await kube.create(side.manifest(self.namespace, number))

        await asyncio.gather(*(create(number) for number in range(count)))
        print(f"created after {time.monotonic() - began:.1f} s", flush=True)
        await following

    async def _until_ready(self, kube: Client, side: Side, version: str, count: int) -> None:
        began = said = time.monotonic()
        states: dict[str, str] = {}
        async with asyncio.timeout(_FORM_SECONDS):
            while True:
                async for event in kube.watch(side.resource, self.namespace, resource_version=version):
                    version = event.resource_version
                    if event.type != "BOOKMARK":
                        states[event.object["metadata"]["name"]] = side.state(event.object)
                    ready = sum(state == side.ready for state in states.values())
                    if ready == count:
                        return
                    if time.monotonic() - said > _SAY_SECONDS:
                        said = time.monotonic()
                        print(f"{said - began:5.0f} s: {ready} of {count} are ready", flush=True)

    async def remove(self, kube: Client, side: Side, count: int) -> None:
        """Delete the `count` objects, and wait until their pods are gone, a second longer for each."""
        for one in await kube.list(side.resource, self.namespace):
            await kube.delete(side.resource, self.namespace, one["metadata"]["name"])
        # A list of thousands of pods takes seconds of processor time, which the removal needs.
        pause = max(0.5, count / 200)
        async with asyncio.timeout(_REMOVE_SECONDS + count):
            while True:
                if not await kube.list(PODS, self.namespace):
                    return
                await asyncio.sleep(pause)

    async def proven(self, kube: Client, count: int) -> None:
        """Fail unless two members of every group run, each on a node."""
        made, running = await self._pods(kube, names.MEMBER)
        if (made, running) != (2 * count, 2 * count):
            raise SystemExit(f"{running} of {made} members run, and {2 * count} should")

    async def gateways(self, kube: Client, count: int) -> None:
        """Wait until the gateways of every deployment run."""
        async with asyncio.timeout(_FORM_SECONDS):
            while True:
                _, running = await self._pods(kube, names.GATEWAY)
                if running >= count * gateways_of(0):
                    return
                await asyncio.sleep(0.5)

    async def _pods(self, kube: Client, component: str) -> tuple[int, int]:
        """Return the numbers of existing and of running pods of a component."""
        pods = await kube.list(PODS, self.namespace, labels=f"{names.COMPONENT}={component}")
        return len(pods), sum(pod["status"].get("phase") == "Running" and "nodeName" in pod["spec"] for pod in pods)


async def _restart(bench: Bench, count: int) -> None:
    """End the operator in order, start another one, and wait until it has reconciled every deployment."""
    _end(bench.operator)
    begun = time.monotonic()
    bench.operator.start()
    bench.processes[OURS.name] = bench.operator.pid
    await bench.operator.until_leading()
    leads = time.monotonic() - begun
    async with asyncio.timeout(_FORM_SECONDS):
        while True:
            metrics = await asyncio.to_thread(bench.operator.metrics)
            # Only of reconciled deployments. The number of reconciles counts some of them more than once.
            if metrics.get('dsv4_deployments{phase="Serving"}', 0.0) >= count:
                break
            await asyncio.sleep(0.5)
    took = time.monotonic() - begun
    await asyncio.sleep(_SETTLE_SECONDS)
    made = ", ".join(f"{method} {number:.0f}" for method, number in sorted(bench.operator.requests().items()))
    print(f"\nanother operator leads after {leads:.1f} s and has reconciled all after {took:.1f} s; ", end="")
    print(f"its requests in {time.monotonic() - begun:.0f} s (PUT: the lease every 2 s): {made}", flush=True)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one operator."""

    rate: float
    """Groups formed a second."""
    cpu: float
    """Its processor time for a group, in ms."""
    requests: float
    """Its requests for a group."""
    memory: int
    """Its largest resident memory in MiB."""


async def _measure(bench: Bench, kube: Client, side: Side, count: int, rest: float) -> Figures:
    before = bench.now()
    await bench.form(kube, side, count)
    after = bench.now()
    load = os.getloadavg()[0]
    reached = None
    if side is OURS:
        await bench.proven(kube, count)
        await bench.gateways(kube, count)
        reached = time.monotonic() - before.time
    print(
        f"\n{side.name}: {count} {side.resource.kind} of 2 members on {bench.cluster.state.settings.fake} KWOK nodes, ",
        end="",
    )
    print(f"{platform.machine()}, {os.cpu_count()} processors, load {load:.1f}, {time.strftime('%Y-%m-%d')}\n")
    print("| | forming | at rest |\n|---|---|---|")
    await asyncio.sleep(_SETTLE_SECONDS)
    quiet = bench.now()
    await asyncio.sleep(rest)
    end = bench.now()
    _table(bench, side, count, (before, after), (quiet, end))
    pid = bench.processes[side.name]
    print(f"\n{side.name}: {counts.mebibytes(pid)} MiB at rest, {counts.mebibytes(pid, 'VmHWM')} at most")
    if reached is not None:
        print(f"all gateways ran {reached:.1f} s after the first deployment was created")
    made = after.requests.since(before.requests)
    print("writes of all while forming, a group: ", end="")
    print(", ".join(f"{verb} {what} {n / count:.1f}" for (verb, what), n in made.writes.most_common()))
    wrote = end.requests.since(quiet.requests).writes
    print("writes of all at rest: " + ", ".join(f"{verb} {what} {n}" for (verb, what), n in wrote.most_common()))
    return Figures(
        count / (after.time - before.time),
        1000 * (after.cpu[side.name] - before.cpu[side.name]) / count,
        made.by_schema[side.schema] / count,
        counts.mebibytes(pid, "VmHWM"),
    )


def _table(bench: Bench, side: Side, count: int, forming: tuple[Moment, Moment], rest: tuple[Moment, Moment]) -> None:
    seconds = [end.time - begin.time for begin, end in (forming, rest)]
    asked = [end.requests.since(begin.requests) for begin, end in (forming, rest)]
    own = [one.by_schema[side.schema] for one in asked]
    print(f"| seconds | {seconds[0]:.1f} | {seconds[1]:.1f} |")
    print(f"| groups/s | {count / seconds[0]:.1f} | |")
    print(f"| requests of {side.name} | {own[0] / count:.1f} a group | {own[1] / seconds[1]:.2f}/s |")
    everybody = f"| requests of all | {asked[0].everybodys / count:.1f} a group "
    print(f"{everybody}| {asked[1].everybodys / seconds[1]:.2f}/s |")
    for name in bench.processes:
        used = [end.cpu[name] - begin.cpu[name] for begin, end in (forming, rest)]
        shares = [f"{one:.1f} s, {100 * one / span:.0f} %" for one, span in zip(used, seconds, strict=True)]
        print(f"| processor: {name} | {shares[0]} | {shares[1]} |")


async def _both(bench: Bench, count: int, rest: float, *, kuberay: bool, restart: bool) -> None:
    async with Client(find_access(kubeconfig=bench.cluster.kubeconfig)) as kube:
        ours = await _measure(bench, kube, OURS, count, rest)
        if restart:
            await _restart(bench, count)
        if not kuberay:
            return
        began = time.monotonic()
        await bench.remove(kube, OURS, count)
        print(f"\nall deployments and their pods were gone {time.monotonic() - began:.1f} s later\n", flush=True)
        # It would parse the pods of the RayClusters.
        _end(bench.operator)
        del bench.processes[OURS.name]
        theirs = await _measure(bench, kube, KUBERAY, count, rest)
        print("\n| | dsv4 | KubeRay | ratio |\n|---|---|---|---|")
        rows = (
            ("groups/s", ours.rate, theirs.rate),
            ("processor time of the operator a group, ms", ours.cpu, theirs.cpu),
            ("requests of the operator a group", ours.requests, theirs.requests),
            ("memory of the operator at most, MiB", ours.memory, theirs.memory),
        )
        for name, one, other in rows:
            print(f"| {name} | {one:.1f} | {other:.1f} | {one / other:.2f} |")


@contextlib.contextmanager
def _kuberay(cluster: Cluster, namespace: str, folder: Path) -> Iterator[int]:
    """KubeRay's operator with an account of its own; yields its process id."""
    name = f"kuberay-{namespace}"
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "subjects": [subject],
            "roleRef": role,
        },
        counts.flow_schema(counts.KUBERAY, namespace, name),
    )
    config = json.loads(cluster.kubeconfig.read_text())
    token = cluster.kubectl("create", "token", name, "--namespace", namespace, "--duration=1h").strip()
    config["users"][0]["user"] = {"token": token}
    file = folder / "kuberay.kubeconfig"
    file.write_text(json.dumps(config))
    try:
        with kuberay_parts.defined(cluster), kuberay_parts.operating(cluster, file) as process:
            # `setpriv` becomes the program.
            yield process.popen.pid
    finally:
        cluster.kubectl("delete", "flowschema", counts.KUBERAY)
        cluster.kubectl("delete", "clusterrolebinding", name)


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
def _cluster(name: str | None, deployments: int) -> Iterator[Cluster]:
    if name is None:
        nodes = max(NODES, deployments // DEPLOYMENTS_OF_A_NODE)
        with lifetime.lasting(Settings("bench", nodes=0, fake=nodes)) as cluster:
            yield cluster
        return
    found = lifetime.running(name)
    if found is None:
        raise SystemExit(f"--cluster {name}: no such cluster is running; start it with clusterkit up")
    yield found


@contextlib.contextmanager
def _bench(cluster: Cluster, profile: Path | None, *, stays: bool, kuberay: bool) -> Iterator[Bench]:
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
        cluster.apply(counts.flow_schema(counts.OPERATOR, namespace, account))
        stack.callback(cluster.kubectl, "delete", "flowschema", counts.OPERATOR)
        agents = stack.enter_context(_agents(cluster.kubeconfig, namespace))
        log = Path(tempfile.gettempdir()) / f"{namespace}.log"
        operator = OperatorProcess(file, namespace, log, profile=profile)
        operator.start()
        stack.callback(_end, operator)
        asyncio.run(operator.until_leading())
        print(f"the operator leads; its log: {log}", flush=True)
        processes = {OURS.name: operator.pid}
        if kuberay:
            processes[KUBERAY.name] = stack.enter_context(_kuberay(cluster, namespace, folder))
        processes |= {**counts.children(cluster.state.supervisor), "agents": agents}
        yield Bench(cluster, namespace, operator, processes | {"this benchmark": os.getpid()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", metavar="NAME", help="a running cluster (default: start and remove one)")
    parser.add_argument("--deployments", type=int, default=100, help="number of deployments (default: %(default)s)")
    parser.add_argument(
        "--rest", type=float, default=60.0, metavar="SECONDS", help="time at rest (default: %(default)s)"
    )
    parser.add_argument("--kuberay", action="store_true", help="measure KubeRay too, in the same run")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="file of the operator's profile, for pstats")
    options = parser.parse_args()
    stays = options.cluster is not None
    with (
        _cluster(options.cluster, options.deployments) as cluster,
        _bench(cluster, options.profile, stays=stays, kuberay=options.kuberay) as bench,
    ):
        restart = options.profile is None
        asyncio.run(_both(bench, options.deployments, options.rest, kuberay=options.kuberay, restart=restart))


if __name__ == "__main__":
    main()
