"""The backends that an operator has, by name: a new one is a folder and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.base import Backend
from dsv4_operator.backends.pods import Cluster, PodsBackend
from dsv4_operator.backends.pods.cluster import OwnedView, PodView
from dsv4_operator.kube import Kube

PODS = "Pods"


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What backends are made of."""

    kube: Kube
    pods: PodView
    """Of the namespaces that the operator watches."""
    owned: OwnedView
    runtime_image: str
    """Of members and gateways whose deployment names no image."""
    changed: Callable[[str, str], None]
    """Called with namespace and name of a deployment of which there is news."""


def _pods(given: Dependencies) -> Backend:
    cluster = Cluster(given.kube, given.pods, runtime_image=given.runtime_image, owned=given.owned)
    return PodsBackend(cluster, changed=given.changed)


BACKENDS: Mapping[str, Callable[[Dependencies], Backend]] = {PODS: _pods}


def backend_name(_: DSV4Deployment) -> str:
    """Return which of `BACKENDS` runs the members of a deployment."""
    return PODS
