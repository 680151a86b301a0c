"""Resources that dsv4 reads and writes, their paths, and the errors of the API server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsv4_operator.api.deployment import KIND, STORED_VERSION


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource of the API."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the path of the collection, of the object `name`, or of its `subresource`."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        place = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return root + place + "".join(f"/{part}" for part in (self.plural, name, subresource) if part)


CONFIG_MAPS = Resource("v1", "ConfigMap", "configmaps")
CUSTOM_RESOURCE_DEFINITIONS = Resource(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False
)
DEPLOYMENTS = Resource("apps/v1", "Deployment", "deployments")
DSV4_DEPLOYMENTS = Resource(STORED_VERSION, KIND, "dsv4deployments")
EVENTS = Resource("events.k8s.io/v1", "Event", "events")
LEASES = Resource("coordination.k8s.io/v1", "Lease", "leases")
NAMESPACES = Resource("v1", "Namespace", "namespaces", namespaced=False)
NODES = Resource("v1", "Node", "nodes", namespaced=False)
LOCAL_QUEUES = Resource("kueue.x-k8s.io/v1beta1", "LocalQueue", "localqueues")
WORKLOADS = Resource("kueue.x-k8s.io/v1beta1", "Workload", "workloads")
VOLCANO_POD_GROUPS = Resource("scheduling.volcano.sh/v1beta1", "PodGroup", "podgroups")
COSCHEDULING_POD_GROUPS = Resource("scheduling.x-k8s.io/v1alpha1", "PodGroup", "podgroups")
POD_DISRUPTION_BUDGETS = Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
PODS = Resource("v1", "Pod", "pods")
RAY_CLUSTERS = Resource("ray.io/v1", "RayCluster", "rayclusters")
SECRETS = Resource("v1", "Secret", "secrets")
SERVICES = Resource("v1", "Service", "services")
NETWORK_POLICIES = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")

_KNOWN = {
    (resource.api_version, resource.kind): resource
    for resource in (
        CONFIG_MAPS,
        CUSTOM_RESOURCE_DEFINITIONS,
        DEPLOYMENTS,
        DSV4_DEPLOYMENTS,
        EVENTS,
        LEASES,
        NAMESPACES,
        NODES,
        POD_DISRUPTION_BUDGETS,
        PODS,
        RAY_CLUSTERS,
        SECRETS,
        SERVICES,
        NETWORK_POLICIES,
        LOCAL_QUEUES,
        WORKLOADS,
        VOLCANO_POD_GROUPS,
        COSCHEDULING_POD_GROUPS,
    )
}


def resource_of(manifest: Mapping[str, Any]) -> Resource:
    """Return the resource of the object `manifest`.

    Raises:
        KeyError: dsv4 does not write this kind.
    """
    return _KNOWN[manifest["apiVersion"], manifest["kind"]]


class KubeError(Exception):
    """A failed request to the API server; the text begins with the request and ends with the server's message."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "") -> None:
        """Args:
        message: the request and the server's message.
        status: HTTP status; 0 if there was no answer.
        reason: `metav1.StatusReason`, empty without one.
        """
        super().__init__(message)
        self.status = status
        self.reason = reason


class NotFound(KubeError):
    """The object, or its kind, does not exist."""


class AlreadyExists(KubeError):
    """An object of that name exists already."""


class Conflict(KubeError):
    """The object, or its version, is not the one of the request."""


class Forbidden(KubeError):
    """The account lacks the permission (401 and 403)."""


class Invalid(KubeError):
    """The server cannot accept the object (400 and 422)."""


class Gone(KubeError):
    """The resource version is too old to watch from: list again."""


class Unavailable(KubeError):
    """No answer in time, or a server that is overloaded or failing. A retry may succeed."""


_BY_STATUS: dict[int, type[KubeError]] = {
    400: Invalid,
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: Unavailable,
}


def error_of(request: str, status: int, reason: str, message: str) -> KubeError:
    """Return the error for an answer to `request` (method and path), with `reason` and `message` of its `Status`."""
    kind = AlreadyExists if reason == "AlreadyExists" else _BY_STATUS.get(status)
    if kind is None:
        kind = Unavailable if status >= 500 else KubeError
    return kind(f"{request}: {status} {message or reason}".rstrip(), status=status, reason=reason)
