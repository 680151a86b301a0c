"""Registry of backends by name; a new backend is a folder and a line here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dsv4_operator.api import ClusterPolicy, DSV4Deployment, InvalidDeployment
from dsv4_operator.api.findings import Finding
from dsv4_operator.api.spec import DEFAULT_BACKEND, KUBERAY_BACKEND
from dsv4_operator.api.values import ValueReason
from dsv4_operator.backends.base import Backend
from dsv4_operator.backends.pods import Cluster, KubeRayBackend, PodsBackend
from dsv4_operator.kube import Client, NodeCache, OwnedCache, PodCache, RayClusterCache
from dsv4_operator.kube.cache import PodKey
from dsv4_runtime.contract.gateway import CanaryReport


@dataclass(frozen=True)
class BackendDependencies:
    """Dependencies of backends."""

    kube: Client
    pods: PodCache
    owned: OwnedCache
    runtime_image: str
    """Image of members and gateways whose deployment names none."""
    policy: ClusterPolicy
    """Limits on the use of nodes by deployments."""
    changed: Callable[[str, str], None]
    """Called with namespace and name of a deployment after a change."""
    in_cluster: bool = False
    """Whether this process is a pod of the cluster."""
    ray_clusters: RayClusterCache | None = None
    """None: the policy does not allow the backend KubeRay."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """See `Host.variables`."""
    reported: Callable[[str, str, CanaryReport], None] = lambda namespace, name, report: None
    """Called with namespace and name of a deployment and each report of one of its gateways."""
    nodes: NodeCache | None = None
    """None: no group moves away from cordoned nodes."""

    @functools.cached_property
    def cluster(self) -> Cluster:
        """Return the state that the backends on a cluster share, such as reservations of nodes."""
        return Cluster(
            self.kube,
            self.pods,
            runtime_image=self.runtime_image,
            policy=self.policy,
            owned=self.owned,
            nodes=self.nodes,
            in_cluster=self.in_cluster,
            variables=self.variables,
        )


def _pods(given: BackendDependencies) -> Backend:
    return PodsBackend(given.cluster, changed=given.changed, reported=given.reported)


def _kuberay(given: BackendDependencies) -> Backend:
    return KubeRayBackend(
        given.cluster, changed=given.changed, reported=given.reported, ray_clusters=given.ray_clusters
    )


BACKENDS: dict[str, Callable[[BackendDependencies], Backend]] = {DEFAULT_BACKEND: _pods, KUBERAY_BACKEND: _kuberay}
"""By the values of `spec.backend`."""


def check(deployment: DSV4Deployment) -> None:
    """Check that the backend of a deployment exists.

    Raises:
        InvalidDeployment: `spec.backend` is none of `BACKENDS`.
    """
    name = deployment.spec.backend
    if name not in BACKENDS:
        remedy = f"use one of {', '.join(BACKENDS)}, or remove it"
        message = "is not supported by this operator"
        raise InvalidDeployment([Finding("spec.backend", ValueReason.NOT_SUPPORTED, message, remedy, name)])


class Backends:
    """One of each backend in `BACKENDS`."""

    def __init__(self, given: BackendDependencies) -> None:
        self._made = {name: make(given) for name, make in BACKENDS.items()}

    def of(self, deployment: DSV4Deployment) -> Backend:
        """Return the backend of `deployment`.

        Raises:
            InvalidDeployment: there is no such backend.
        """
        check(deployment)
        return self._made[deployment.spec.backend]

    def orphaned(self, key: PodKey, uid: str | None) -> None:
        """Handle pods of members whose deployment may be gone; `uid` is that of the present one of its name."""
        for backend in self._made.values():
            if isinstance(backend, KubeRayBackend):
                backend.orphaned(key, uid)

    async def close(self) -> None:
        """Close all connections; members are not touched."""
        for backend in self._made.values():
            await backend.close()
