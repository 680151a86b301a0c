"""kube-router on the nodes, which enforces network policies; k3s has it in its agents."""

from __future__ import annotations

from pathlib import Path

from clusterkit.controlplane import ControlPlane

USER = "kube-router"
ACCESS = [
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": USER},
        "rules": [
            {
                "apiGroups": [""],
                "resources": ["namespaces", "pods", "services", "nodes", "endpoints"],
                "verbs": ["get", "list", "watch"],
            },
            {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": ["list", "watch"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
        ],
    },
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": USER},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": USER},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": USER}],
    },
]


def command(node: str, programs: Path, plane: ControlPlane) -> list[str]:
    """Return the command of one node, with the settings of k3s: no routes and no Services, only policies.

    It ends where its node does not exist yet, so it starts after the kubelet has registered the node.
    """
    access = plane.kubeconfig(USER)
    return [
        "/bin/sh",
        "-c",
        'until "$0" --kubeconfig="$1" get node "$2" >/dev/null 2>&1; do sleep 1; done; shift 2; exec "$@"',
        str(programs / "kubectl"),
        str(access),
        node,
        str(programs / "kube-router"),
        f"--kubeconfig={access}",
        f"--hostname-override={node}",
        f"--service-cluster-ip-range={plane.place.addresses.services}",
        "--run-firewall=true",
        "--run-router=false",
        "--run-service-proxy=false",
        "--run-loadbalancer=false",
        "--health-port=0",
        "--metrics-port=0",
    ]
