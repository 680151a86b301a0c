"""Objects that deployments own beside their members, as the API server has them: which exist, and in which version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from dsv4_operator.builders import names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube.base import Kube
from dsv4_operator.kube.cache import Cache
from dsv4_operator.kube.resources import CONFIG_MAPS, DEPLOYMENTS, NETWORK_POLICIES, POD_DISRUPTION_BUDGETS, SERVICES

_KINDS = (SERVICES, CONFIG_MAPS, DEPLOYMENTS, NETWORK_POLICIES, POD_DISRUPTION_BUDGETS)

DeploymentKey = tuple[str, str]
"""Namespace and name of a deployment."""

Versions = frozenset[tuple[str, str, str]]
"""Kind, name and version of objects."""


class OwnedCache:
    """The Services, ConfigMaps, gateways, budgets and policies of all deployments, kept up to date by watches."""

    def __init__(
        self, kube: Kube, *, namespaces: Sequence[str] = (), changed: Callable[[DeploymentKey], None] | None = None
    ) -> None:
        """Args:
        kube: the API server.
        namespaces: where; none means everywhere.
        changed: called with the deployment of every object that came, changed or went.
        """
        chosen = f"{names.MANAGED_BY}={names.MANAGER}"
        # Plans and evidence come and go with incarnations, and nobody reads a plan after its members have begun.
        lasting = f"{chosen},!{names.INCARNATION}"
        self._caches = {
            resource.kind: Cache(
                kube,
                resource,
                _key,
                namespaces=namespaces,
                labels=lasting if resource is CONFIG_MAPS else chosen,
                changed=changed,
                keep=_without_content,
            )
            for resource in _KINDS
        }

    async def run(self) -> None:
        """Keep the caches up to date until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for cache in self._caches.values():
                tasks.create_task(cache.run())

    def versions(self, namespace: str, deployment: str) -> Versions:
        """Return which objects `deployment` has. They change with what people change, not with an object's status."""
        return frozenset(
            (kind, one["metadata"]["name"], _version(one))
            for kind, cache in self._caches.items()
            for one in cache.objects((namespace, deployment))
        )


def _key(item: Manifest) -> DeploymentKey:
    metadata = item["metadata"]
    return metadata["namespace"], (metadata.get("labels") or {}).get(names.DEPLOYMENT, "")


def _version(item: Manifest) -> str:
    """Return a version that an object's status does not change: the generation and labels, of kinds that have one."""
    metadata = item["metadata"]
    if not metadata.get("generation"):
        return str(metadata["resourceVersion"])
    ours = sorted((metadata.get("labels") or {}).items())
    owners = sorted(one.get("uid", "") for one in metadata.get("ownerReferences") or [])
    return f"{metadata['generation']} {ours} {owners}"


def _without_content(item: Manifest) -> Manifest:
    wanted = ("namespace", "name", "labels", "generation", "resourceVersion", "ownerReferences")
    return {"metadata": {name: item["metadata"].get(name) for name in wanted}}
