"""The operator's only client of the Kubernetes API server. All calls are asynchronous; objects are dicts."""

from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube.access import Access, AccessError, find_access
from dsv4_operator.kube.cache import NodeCache, OwnedCache, PodCache, RayClusterCache
from dsv4_operator.kube.client import Client, KubeReader, Listing
from dsv4_operator.kube.exact import apply_exactly, is_exact
from dsv4_operator.kube.resources import (
    CONFIG_MAPS,
    COSCHEDULING_POD_GROUPS,
    DEPLOYMENTS,
    DSV4_DEPLOYMENTS,
    EVENTS,
    LEASES,
    LOCAL_QUEUES,
    NODES,
    PODS,
    RAY_CLUSTERS,
    SECRETS,
    SERVICES,
    VOLCANO_POD_GROUPS,
    WORKLOADS,
    AlreadyExists,
    Conflict,
    Forbidden,
    Invalid,
    KubeError,
    NotFound,
    Resource,
    Unavailable,
    resource_of,
)
