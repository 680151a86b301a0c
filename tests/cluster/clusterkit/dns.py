"""CoreDNS on the machine, at the address that the kubelets give to their pods."""

from __future__ import annotations

from pathlib import Path

from clusterkit import processes
from clusterkit.controlplane import ControlPlane
from clusterkit.layout import DOMAIN
from clusterkit.processes import Process

USER = "coredns"
ACCESS = [
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": USER},
        "rules": [
            {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
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


def start(programs: Path, plane: ControlPlane) -> Process:
    """Start it; it responds after it has received the first Services."""
    place = plane.place
    file = place.files / "Corefile"
    # Pods have no internet, so other names do not exist; resolvers would retry after an error of the server. No cache:
    # a member waits for the names of its peers, and a negative response must not be kept.
    file.write_text(
        f"""{DOMAIN}:53 {{
    bind {place.address}
    errors
    kubernetes {DOMAIN} {{
        kubeconfig {plane.kubeconfig(USER)}
        ttl 1
    }}
}}
.:53 {{
    bind {place.address}
    errors
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""
    )
    return processes.start(USER, [programs / "coredns", "-conf", file], log=place.log(USER))
