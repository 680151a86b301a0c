"""The only code that speaks to the API server of Kubernetes. Everything is asynchronous; objects are plain dicts."""

from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube.access import Access, AccessError, find_access
from dsv4_operator.kube.base import Kube, KubeReader, Listing, WatchEvent
from dsv4_operator.kube.cache import Cache, PodCache
from dsv4_operator.kube.client import Client
from dsv4_operator.kube.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    KubeError,
    NotFound,
    Unavailable,
)
from dsv4_operator.kube.exact import apply_exactly
from dsv4_operator.kube.owned import OwnedCache
from dsv4_operator.kube.resources import (
    CONFIG_MAPS,
    CUSTOM_RESOURCE_DEFINITIONS,
    DEPLOYMENTS,
    DSV4_DEPLOYMENTS,
    EVENTS,
    LEASES,
    NODES,
    PODS,
    SECRETS,
    SERVICES,
    Resource,
    resource_of,
)

__all__ = [
    "CONFIG_MAPS",
    "CUSTOM_RESOURCE_DEFINITIONS",
    "DEPLOYMENTS",
    "DSV4_DEPLOYMENTS",
    "EVENTS",
    "LEASES",
    "NODES",
    "PODS",
    "SECRETS",
    "SERVICES",
    "Access",
    "AccessError",
    "AlreadyExists",
    "Cache",
    "Client",
    "Conflict",
    "Forbidden",
    "Gone",
    "Invalid",
    "Kube",
    "KubeError",
    "KubeReader",
    "Listing",
    "Manifest",
    "NotFound",
    "OwnedCache",
    "PodCache",
    "Resource",
    "Unavailable",
    "WatchEvent",
    "apply_exactly",
    "find_access",
    "resource_of",
]
