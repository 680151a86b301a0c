"""KWOK: nodes that are only objects, whose pods run as soon as they are scheduled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusterkit import processes
from clusterkit.controlplane import ControlPlane
from clusterkit.processes import Process

USER = "kwok-controller"
# kubectl requires all of its fields.
_INFO = dict.fromkeys(
    [
        "bootID",
        "containerRuntimeVersion",
        "kernelVersion",
        "kubeProxyVersion",
        "kubeletVersion",
        "machineID",
        "operatingSystem",
        "osImage",
        "systemUUID",
    ],
    "",
)
_MARK = {"kwok.x-k8s.io/node": "fake"}
DEFINITIONS = ("kustomize/crd", "kustomize/rbac")
STAGES = "kustomize/stage/fast"
# KWOK's role is intended for a service account; here KWOK uses a certificate.
ACCESS = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": "kwok-on-this-machine"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": USER},
    "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": USER}],
}


def start(programs: Path, plane: ControlPlane) -> Process:
    """Start it; its definitions and stages must exist."""
    command: list[str | Path] = [
        programs / "kwok",
        f"--kubeconfig={plane.kubeconfig(USER)}",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
        "--enable-crds=Stage",
        f"--cidr={plane.place.addresses.fake_pods}",
        f"--node-ip={plane.place.address}",
        "--node-lease-duration-seconds=40",
    ]
    return processes.start("kwok", command, log=plane.place.log("kwok"))


def nodes(count: int, *, beside_real_ones: bool) -> list[dict[str, Any]]:
    """Return node objects. Next to real nodes they are tainted, so that only pods with a toleration use them."""
    taints = [{"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}] if beside_real_ones else []
    room = {"cpu": "32", "memory": "128Gi", "pods": "110"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": f"fake{index}",
                "annotations": _MARK,
                "labels": {"kubernetes.io/hostname": f"fake{index}", "kubernetes.io/os": "linux", "type": "kwok"},
            },
            "spec": {"taints": taints},
            "status": {"allocatable": room, "capacity": room, "nodeInfo": {**_INFO, "architecture": "arm64"}},
        }
        for index in range(1, count + 1)
    ]


def first_pod() -> dict[str, Any]:
    """Return a pod that must be the only one while KWOK assigns the first address.

    KWOK creates its pool of addresses on first use, and two of its workers that need one at the same time create a pool
    each: then two pods have the same address (`PodController.ipPool` of v0.8.0).
    """
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "first-of-kwok", "namespace": "default"},
        "spec": {"nodeName": "fake1", "containers": [{"name": "nothing", "image": "none"}]},
    }
