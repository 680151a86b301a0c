"""Recovery with members as processes of this machine, as pods, and as pods of KubeRay, in one run.

    python benchmarks/recovery_pods.py --json figures.json
    python benchmarks/recovery_pods.py --backend Pods --fault "kill -9 EngineCore" --runs 3

Every fault is a real signal to a real process of a serving group of two members: the faults of `recovery.py`, one for
each process and recovery level. Pods run on two real nodes of a cluster that is started and removed here (needs
`make cluster-build` and root), with the operator of the chart. Local processes run beside the idle cluster, because
its components use the same processors. Seconds count from the signal: until the death in the
status, and until the response to a request that was sent when the status was `Serving` again. The table contains the
differences to processes of this machine; the bound is 2 s for level 1 and 15 s for level 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import yaml

# The kit of the test cluster is not a package.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster"))

import kuberay_parts
from clusterkit import cgroups, images, lifetime
from clusterkit.client import Cluster
from clusterkit.layout import Settings
from nano_world import Nano, forwarded, operated

from dsv4_operator.builders import names
from dsv4_testkit.faults.table import PROCESS_DEATHS, Fault
from dsv4_testkit.harness import Deployment, Recovery, Serving, inflict, pid_in, unix

ROOT = Path(__file__).parents[1]
LOCAL, PODS, KUBERAY = "local", "Pods", "KubeRay"
BOUNDS = {1: 2.0, 2: 15.0}
"""Largest difference to local processes in seconds, by recovery level."""
_NAMESPACE = "recovery"


class InPods:
    """The deployment `nano` in pods; the operations of `harness.Deployment` that `inflict` uses."""

    def __init__(self, nano: Nano, base: str) -> None:
        self._nano, self._base = nano, base

    def status(self) -> dict[str, Any]:
        path = f"/apis/dsv4.dev/v1alpha1/namespaces/{self._nano.namespace}/dsv4deployments/nano"
        return dict(self._nano.cluster.http.get(path).raise_for_status().json()["status"])

    def pid(self, rank: int, process: str) -> int:
        """Return the process id on this machine of a process of a member.

        Raises:
            LookupError: it does not run.
        """
        group = self.status()["groups"][0]
        inner = pid_in(group, rank, process)
        incarnation = str(group["incarnation"])
        wanted = {"dsv4.dev/rank": str(rank), "dsv4.dev/incarnation": incarnation}
        pods = (pod for pod in self._nano.members().values() if wanted.items() <= pod["metadata"]["labels"].items())
        pod = next(pods)
        uid, node = str(pod["metadata"]["uid"]), pod["spec"]["nodeName"]
        for pid in cgroups.processes(f"{self._nano.cluster.state.settings.cgroup}/{node}"):
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                numbers = next(line for line in lines if line.startswith("NSpid:")).split()
                if int(numbers[-1]) == inner and uid in Path(f"/proc/{pid}/cgroup").read_text().replace("_", "-"):
                    return pid
        raise LookupError(f"{process} of rank {rank}, process {inner} of {pod['metadata']['name']}, does not run")

    def wait(self, phase: str, *, since: float, timeout: float = 480.0) -> dict[str, Any]:
        """See `Deployment.wait`."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            status = self.status()
            failure = status["groups"][0].get("lastFailure")
            if status["phase"] == phase and failure is not None and unix(failure["time"]) > since:
                return status
            time.sleep(0.25)
        raise AssertionError(f"not {phase} after {timeout:.0f} s:\n{json.dumps(status, indent=1)}")

    def complete(self) -> dict[str, Any]:
        """Return the response to a request through the gateway."""
        body = {"model": "nano", "prompt": "Hello", "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
        with httpx.Client(base_url=self._base, timeout=60.0, trust_env=False) as http:
            return dict(http.post("/v1/completions", json=body).raise_for_status().json())


@contextlib.contextmanager
def _local(restarts: int) -> Iterator[Serving]:
    deployment = Deployment(restarts=restarts)
    try:
        print(f"{LOCAL}: ready after {deployment.up():.1f} s", flush=True)
        yield deployment
    finally:
        deployment.destroy()


@contextlib.contextmanager
def _in_pods(cluster: Cluster, backend: str, restarts: int) -> Iterator[Serving]:
    namespace = f"{_NAMESPACE}-{backend.lower()}"
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.kubectl, "delete", "namespace", namespace, "--timeout=120s", seconds=130)
        values = ()
        if backend == KUBERAY:
            stack.enter_context(kuberay_parts.defined(cluster))
            stack.enter_context(kuberay_parts.operating(cluster))
            values = (kuberay_parts.RIGHTS,)
        stack.enter_context(operated(cluster, namespace, images.OPERATOR, images.RUNTIME, *values))
        nano = Nano(cluster, namespace)
        recovery = {"maxRestarts": restarts, "window": "1h", "backoff": {"base": "0s", "max": "0s"}}
        # While its operator runs: the pods of a RayCluster have a finalizer.
        gone = ("wait", "pods", "-n", namespace, "-l", f"{names.DEPLOYMENT}=nano", "--for=delete", "--timeout=120s")
        stack.callback(cluster.kubectl, *gone, seconds=130)
        stack.callback(cluster.kubectl, "delete", "dsv4deployments", "--all", "-n", namespace, seconds=130)
        print(f"{backend}: ready after {nano.start(backend=backend, recovery=recovery):.1f} s", flush=True)
        base = stack.enter_context(forwarded(cluster, namespace, f"pod/{nano.gateway()}", 8000))
        yield InPods(nano, base)


def measure(backend: str, serving: Serving, faults: Sequence[Fault], runs: int, settle: float) -> list[Recovery]:
    """Cause every fault `runs` times, each after `settle` seconds of serving."""
    serving.complete()
    rows = []
    for _ in range(runs):
        for fault in faults:
            time.sleep(settle)
            try:
                row = inflict(serving, fault)
            except (LookupError, RuntimeError, StopIteration) as error:
                # The backend has no such process, or does not report it.
                print(
                    f"  {backend}, {fault.name}: not possible: {error or 'no such process in the status'}", flush=True
                )
                continue
            rows.append(row)
            print(f"  {backend}, {fault.name}: noticed {row.detected:.2f} s, answered {row.answered:.1f} s", flush=True)
    return rows


def table(found: Mapping[str, Sequence[Recovery]], faults: Sequence[Fault]) -> Iterator[str]:
    """Yield the lines of a Markdown table with medians, and the differences to the first backend."""
    first, *others = found
    yield "| fault | level | " + first + " s | " + " | ".join(f"{one} s | difference s" for one in others) + " |"
    yield "|---|---|---|" + "---|---|" * len(others)
    for fault in faults:
        medians = {name: _median(rows, fault) for name, rows in found.items()}
        base = medians[first]
        levels = {row.level for rows in found.values() for row in rows if row.fault is fault}
        cells = [fault.name, ", ".join(str(level) for level in sorted(levels, key=str)), _seconds(base)]
        bound = BOUNDS.get(fault.level or 0)
        for name in others:
            mine = medians[name]
            more = None if mine is None or base is None else mine - base
            late = "" if bound is None or more is None or more <= bound else f" (above {bound:.0f})"
            cells += [_seconds(mine), ("-" if more is None else f"{more:+.1f}") + late]
        yield "| " + " | ".join(cells) + " |"


def _median(rows: Sequence[Recovery], fault: Fault) -> float | None:
    mine = [row.answered for row in rows if row.fault is fault]
    return statistics.median(mine) if mine else None


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [fault.name for fault in PROCESS_DEATHS]
    parser.add_argument("--runs", type=int, default=1, help="runs of each fault (default: %(default)s)")
    parser.add_argument("--fault", action="append", choices=choices, help="only this one; can be given more than once")
    parser.add_argument(
        "--backend", action="append", choices=[PODS, KUBERAY], help="beside local processes (default: both)"
    )
    parser.add_argument("--without-local", action="store_true", help="do not measure processes of this machine")
    parser.add_argument(
        "--settle",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="of serving before a fault, until the standby processes of the next engine are ready (default: 60)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of the figures")
    options = parser.parse_args()
    faults = [fault for fault in PROCESS_DEATHS if options.fault is None or fault.name in options.fault]
    backends = options.backend or [PODS, KUBERAY]
    restarts = len(faults) * options.runs + 1
    found: dict[str, list[Recovery]] = {}
    settings = Settings("recovery", nodes=2)
    lifetime.prepare(settings)
    archives = images.operator(), images.runtime()
    with lifetime.lasting(settings) as cluster, cluster.http:
        cluster.apply(yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text()))
        for archive in archives:
            cluster.load(archive)
        if not options.without_local:
            with _local(restarts) as serving:
                found[LOCAL] = measure(LOCAL, serving, faults, options.runs, options.settle)
        for backend in backends:
            with _in_pods(cluster, backend, restarts) as serving:
                found[backend] = measure(backend, serving, faults, options.runs, options.settle)
    load = os.getloadavg()[0]
    about = f"{os.cpu_count()} CPUs, {platform.machine()}, Linux {platform.release()}, load {load:.1f} at the end"
    print(f"\nmachine: {about}; {options.runs} run(s), {time.strftime('%Y-%m-%d')}\n")
    print("\n".join(table(found, faults)))
    if options.json is not None:
        rows = {name: [{**asdict(row), "fault": row.fault.name} for row in rows] for name, rows in found.items()}
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
