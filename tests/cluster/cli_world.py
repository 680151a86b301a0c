"""A nano deployment with a fixed status, and pods in place of its members."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from clusterkit.archive import PROBE
from clusterkit.client import Cluster

from dsv4_operator.builders import names

ROOT = Path(__file__).parents[2]
NANO = yaml.safe_load((ROOT / "examples" / "nano.yaml").read_text())
PROGRAMS = Path(sys.executable).parent
SECONDS = 120

NOW = time.time()


def moment(ago: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW - ago))


FAILURE = {
    "time": moment(100),
    "cause": "EngineCoreDied",
    "incarnation": 2,
    "culpritRank": 1,
    "culpritNode": "spark2",
    "message": "killed by SIGKILL",
    "detectedBy": "exit",
    "level": 1,
    "recoverSeconds": 12.34,
    "evidence": "/var/lib/dsv4/evidence/x/nano/g0/2-g1-x",
}
STATUS = {
    "phase": "Serving",
    "observedGeneration": 1,
    "replicas": 1,
    "readyReplicas": 1,
    "endpoint": "http://nano.x.svc:8000/v1",
    "rayDashboard": "http://nano-0-head.x.svc:8265",
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "observedGeneration": 1,
            "lastTransitionTime": moment(60),
            "reason": "AllGroupsReady",
            "message": "all groups answer",
        }
    ],
    "groups": [
        {
            "index": 0,
            "phase": "Serving",
            "incarnation": 2,
            "fencedBelow": 2,
            "engineGeneration": 2,
            "readyTime": moment(60),
            "restarts": [moment(100)],
            "totalRestarts": 3,
            "kvCache": {"tokens": 13_809, "concurrency": 13.486, "plannedTokens": 14_000},
            "lastFailure": FAILURE,
            "history": [{**FAILURE, "time": moment(500), "cause": "RayletDied", "level": 2}, FAILURE],
            "members": [
                {"rank": 0, "role": "Head", "node": "spark1", "address": "nano-0-i2-r0", "phase": "Serving"},
                {
                    "rank": 1,
                    "role": "Worker",
                    "node": "spark2",
                    "address": "nano-0-i2-r1",
                    "phase": "Serving",
                    "message": "a long way from here",
                    "silentSince": moment(70),
                },
            ],
        }
    ],
}

Dsv4 = Callable[..., subprocess.CompletedProcess[str]]


@contextmanager
def running(cluster: Cluster, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a `kubectl dsv4` in the background; it is killed at the end of the block if it still runs."""
    environment = {**cluster.environment, "PATH": f"{PROGRAMS}:{cluster.environment['PATH']}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(["kubectl", "dsv4", *words], text=True, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def member(nano: dict[str, Any], incarnation: int, *probe: str) -> dict[str, Any]:
    """Return a pod in place of rank 0 that runs the probe (go/kubernetes/probe)."""
    labels = names.labels("nano", component=names.MEMBER, group=0, incarnation=incarnation, rank=0)
    container = {"name": "agent", "image": PROBE, "imagePullPolicy": "Never", "args": [*probe]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": names.member_name("nano", 0, incarnation, 0),
            "namespace": nano["metadata"]["namespace"],
            "labels": labels,
        },
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]},
    }


def service(nano: dict[str, Any], name: str, port: int, incarnation: int) -> dict[str, Any]:
    spec = {
        "selector": names.labels("nano", component=names.MEMBER, group=0, incarnation=incarnation, rank=0),
        "ports": [{"name": "http", "port": port, "targetPort": 8265}],
    }
    about = {"name": name, "namespace": nano["metadata"]["namespace"]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": spec}


def ready(cluster: Cluster, pod: dict[str, Any]) -> None:
    place = ("-n", pod["metadata"]["namespace"])
    name = f"pod/{pod['metadata']['name']}"
    cluster.kubectl("wait", "--for=condition=Ready", name, *place, "--timeout=120s", seconds=130)


def answer(url: str) -> str:
    return httpx.get(url, timeout=60, trust_env=False).text.split()[0]
