"""Registry of backends by name; a new backend is a folder and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsv4_operator.api import ClusterPolicy, DSV4Deployment, InvalidDeployment
from dsv4_operator.api.findings import Finding
from dsv4_operator.api.spec import DEFAULT_BACKEND
from dsv4_operator.api.values import ValueReason
from dsv4_operator.backends.base import Backend
from dsv4_operator.backends.pods import Cluster, PodsBackend
from dsv4_operator.kube import Client, OwnedCache, PodCache
from dsv4_runtime.contract.gateway import CanaryReport


@dataclass(frozen=True, slots=True)
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
    reported: Callable[[str, str, CanaryReport], None] = lambda namespace, name, report: None
    """Called with namespace and name of a deployment and each report of one of its gateways."""


def _pods(given: BackendDependencies) -> Backend:
    cluster = Cluster(
        given.kube,
        given.pods,
        runtime_image=given.runtime_image,
        policy=given.policy,
        owned=given.owned,
        in_cluster=given.in_cluster,
    )
    return PodsBackend(cluster, changed=given.changed, reported=given.reported)


BACKENDS: dict[str, Callable[[BackendDependencies], Backend]] = {DEFAULT_BACKEND: _pods}
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

    async def close(self) -> None:
        """Close all connections; members are not touched."""
        for backend in self._made.values():
            await backend.close()
