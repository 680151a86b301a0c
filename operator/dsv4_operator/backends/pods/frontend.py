"""Keeps what users reach: the Service and the gateways of one deployment."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence

from dsv4_operator.api import DeploymentStatus, DSV4Deployment
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.backends.pods.ownership import all_done
from dsv4_operator.builders import frontend, names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube import CONFIG_MAPS, DEPLOYMENTS, SERVICES
from dsv4_operator.lifecycle import given_up

_AGAIN_SECONDS = 600.0
"""Between looks whether somebody else changed or removed it: nothing of it is watched."""


class Frontend:
    """The frontend of one deployment. Remembers what was applied, so that nothing is written twice."""

    def __init__(self, cluster: Cluster, token_key: Callable[[], Awaitable[str]]) -> None:
        """Args:
        cluster: where.
        token_key: makes the deployment's token key if there is none.
        """
        self._cluster = cluster
        self._token_key = token_key
        self._built: tuple[DSV4Deployment, list[str | None], list[Manifest]] | None = None
        """Inputs of the objects at the latest look, and the objects."""
        self._applied: list[Manifest] = []
        self._time = -math.inf

    async def ensure(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        """See `PodsBackend.ensure_frontend`."""
        lost = [given_up(deployment, status, group) for group in range(deployment.spec.replicas)]
        if self._built is None or self._built[0] is not deployment or self._built[1] != lost:
            self._built = deployment, lost, _objects(deployment, lost, self._cluster.image(deployment))
        wanted = self._built[2]
        due = time.monotonic() - self._time > _AGAIN_SECONDS
        if wanted is self._applied and not due:
            return
        changed = [one for one in wanted if due or one not in self._applied]
        if not changed and len(wanted) == len(self._applied):
            self._applied = wanted
            return
        await self._token_key()
        await all_done(*(self._cluster.objects.apply(one) for one in changed))
        if deployment.metadata.generation > 1:
            # The first version of a specification follows none that asked for more groups.
            await self._remove_superfluous(deployment)
        self._applied = wanted
        if due:
            self._time = time.monotonic()

    async def _remove_superfluous(self, deployment: DSV4Deployment) -> None:
        """Remove the gateways and head Services of groups that are no longer asked for."""
        metadata, objects = deployment.metadata, self._cluster.objects
        namespace, name, uid = metadata.namespace, metadata.name, metadata.uid or ""
        chosen = names.selector(names.labels(name, component=names.GATEWAY))
        for one in await self._cluster.kube.list(DEPLOYMENTS, namespace, labels=chosen):
            group = names.number(one, names.GROUP)
            if group is not None and group >= deployment.spec.replicas and names.belongs(one, uid):
                await objects.delete_named(SERVICES, namespace, names.head_name(name, group), uid)
                await objects.delete_named(CONFIG_MAPS, namespace, names.gateway_name(name, group), uid)
                await objects.delete(DEPLOYMENTS, one, uid)


def _objects(deployment: DSV4Deployment, lost: Sequence[str | None], image: str) -> list[Manifest]:
    found: list[Manifest] = [
        frontend.public_service(deployment),
        frontend.network_policy(deployment),
        frontend.disruption_budget(deployment),
    ]
    for group in range(len(lost)):
        found.append(frontend.gateway_config(deployment, group, lost))
        found.append(frontend.gateway_deployment(deployment, group, image=image))
    return found
