"""Nodes and pods in the format of API servers, and their deployments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dsv4_operator.api import API_VERSION, KIND, ClusterPolicy, DSV4Deployment, parse
from dsv4_operator.builders.member import Host, member_pod
from dsv4_runtime.contract import GroupPlan

EXAMPLES = Path(__file__).parents[3] / "examples"
Manifest = dict[str, Any]

ALLOWED = ClusterPolicy(host_network_namespaces=("*",), toleration_keys=("*",))

SPARK = {"nvidia.com/gpu.product": "NVIDIA-GB10", "nvidia.com/gpu.present": "true"}
SPARK_ROOM = {"cpu": "20", "memory": "127598284Ki", "nvidia.com/gpu": "1", "rdma/hca_shared_devices_a": "63"}
PLAIN_ROOM = {"cpu": "8", "memory": "32Gi"}


def node(
    name: str,
    *,
    address: str = "192.168.0.1",
    labels: Mapping[str, str] | None = None,
    room: Mapping[str, str] = PLAIN_ROOM,
    ready: str = "True",
    taints: list[dict[str, str]] | None = None,
    cordoned: bool = False,
    boot: str | None = None,
) -> Manifest:
    amounts = {"pods": "110", "ephemeral-storage": "95551679124", "hugepages-2Mi": "0", **room}
    spec: Manifest = {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24"]}
    if taints:
        spec["taints"] = taints
    if cordoned:
        spec["unschedulable"] = True
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/arch": "arm64", **(labels or {})},
        },
        "spec": spec,
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": address},
                {"type": "Hostname", "address": name},
            ],
            "allocatable": amounts,
            "capacity": amounts,
            "conditions": [
                {"type": "MemoryPressure", "status": "False", "lastTransitionTime": "2026-11-21T10:00:00Z"},
                {"type": "Ready", "status": ready, "lastTransitionTime": "2026-11-21T10:00:00Z"},
            ],
            "nodeInfo": {"machineID": f"machine-{name}", "bootID": boot or f"boot-{name}", "architecture": "arm64"},
        },
    }


def sparks(count: int = 2, **changes: Any) -> list[Manifest]:
    return [
        node(f"spark-{n}", address=f"192.168.0.{n}", labels=SPARK, room=SPARK_ROOM, **changes)
        for n in range(1, count + 1)
    ]


def program(name: str, on: str, phase: str = "Running", **requests: str) -> Manifest:
    """Return a pod of another owner."""
    return {
        "metadata": {"namespace": "other", "name": name, "labels": {"app": name}},
        "spec": {"nodeName": on, "containers": [{"name": "main", "resources": {"requests": requests}}]},
        "status": {"phase": phase},
    }


def deployment(file: str = "flash-2x-spark.yaml", **topology: Any) -> DSV4Deployment:
    data = yaml.safe_load((EXAMPLES / file).read_text())
    data["metadata"] |= {"namespace": "team", "uid": "uid-of-it"}
    data["spec"]["replicas"] = topology.pop("replicas", 1)
    data["spec"]["topology"] |= topology
    return parse(data)


def owners(name: str, uid: str, kind: str = KIND, *, controller: bool = True) -> list[Manifest]:
    """Return the owner references of an object that belongs to the deployment (or another object) `name`."""
    return [{"apiVersion": API_VERSION, "kind": kind, "name": name, "uid": uid, "controller": controller}]


def nodes_of(plan: GroupPlan) -> list[str | None]:
    return [member.node for member in plan.members]


def made(wanted: DSV4Deployment, plan: GroupPlan, phase: str = "Running") -> tuple[Manifest, ...]:
    """Return the pods of `plan` after scheduling, in the format of the API server."""
    found = []
    for member in plan.members:
        pod: Manifest = dict(member_pod(wanted, plan, member.rank, host=Host(ALLOWED, "runtime")))
        pod["spec"]["nodeName"] = member.node
        found.append({**pod, "status": {"phase": phase}})
    return tuple(found)
