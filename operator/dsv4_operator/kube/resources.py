"""The kinds of objects that dsv4 reads and writes, and where the API server has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsv4_operator.api.deployment import API_VERSION, KIND


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object."""

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
DSV4_DEPLOYMENTS = Resource(API_VERSION, KIND, "dsv4deployments")
EVENTS = Resource("events.k8s.io/v1", "Event", "events")
LEASES = Resource("coordination.k8s.io/v1", "Lease", "leases")
NAMESPACES = Resource("v1", "Namespace", "namespaces", namespaced=False)
NODES = Resource("v1", "Node", "nodes", namespaced=False)
POD_DISRUPTION_BUDGETS = Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
PODS = Resource("v1", "Pod", "pods")
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
        SECRETS,
        SERVICES,
        NETWORK_POLICIES,
    )
}


def resource_of(manifest: Mapping[str, Any]) -> Resource:
    """Return the kind of the object `manifest`.

    Raises:
        KeyError: none that dsv4 writes.
    """
    return _KNOWN[manifest["apiVersion"], manifest["kind"]]
