"""Keeps what users reach: the Service and the gateways of one deployment."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, GroupPhase
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.backends.pods.ownership import all_done
from dsv4_operator.builders import frontend, names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube import CONFIG_MAPS, DEPLOYMENTS, SERVICES
from dsv4_operator.lifecycle import given_up

_AGAIN_SECONDS = 600.0
"""Between looks whether somebody else changed or removed it: nothing of it is watched."""
_GONE = frozenset({GroupPhase.SUSPENDED, GroupPhase.STOPPED})


class Frontend:
    """The frontend of one deployment. Remembers what was applied, so that nothing is written twice."""

    def __init__(self, cluster: Cluster, token_key: Callable[[], Awaitable[str]]) -> None:
        """Args:
        cluster: where.
        token_key: makes the deployment's token key if there is none.
        """
        self._cluster = cluster
        self._token_key = token_key
        self._built: tuple[DSV4Deployment, list[str | None], bool, list[Manifest]] | None = None
        """Inputs of the objects at the latest look, and the objects."""
        self._applied: list[Manifest] = []
        self._time = -math.inf

    @property
    def names(self) -> frozenset[tuple[str, str]]:
        """Return kind and name of what was applied."""
        return frozenset((one["kind"], one["metadata"]["name"]) for one in self._applied)

    async def ensure(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        """See `PodsBackend.ensure_frontend`."""
        lost = [given_up(deployment, status, group) for group in range(routed_groups(deployment, status))]
        placed = was_placed(status)
        if self._built is None or self._built[0] is not deployment or self._built[1:3] != (lost, placed):
            image = self._cluster.image(deployment)
            self._built = deployment, lost, placed, _objects(deployment, lost, image, placed=placed)
        wanted = self._built[3]
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
            await self._remove_superfluous(deployment, len(lost))
        self._applied = wanted
        if due:
            self._time = time.monotonic()

    async def _remove_superfluous(self, deployment: DSV4Deployment, groups: int) -> None:
        """Remove the gateways and head Services of all groups but the first `groups`."""
        metadata, objects = deployment.metadata, self._cluster.objects
        namespace, name, uid = metadata.namespace, metadata.name, metadata.uid or ""
        chosen = names.selector(names.labels(name, component=names.GATEWAY))
        for one in await self._cluster.kube.list(DEPLOYMENTS, namespace, labels=chosen):
            group = names.number(one, names.GROUP)
            if group is not None and group >= groups and names.belongs(one, uid):
                await objects.delete_named(SERVICES, namespace, names.head_name(name, group), uid)
                await objects.delete_named(CONFIG_MAPS, namespace, names.gateway_name(name, group), uid)
                await objects.delete(DEPLOYMENTS, one, uid)


def was_placed(status: DeploymentStatus) -> bool:
    """Tell whether a group ever had a plan: a deployment that fits nowhere gets no gateways, which would take room.

    Every decision leaves a status with groups, so one without tells nothing.
    """
    return not status.groups or any(group.incarnation for group in status.groups)


def routed_groups(deployment: DSV4Deployment, status: DeploymentStatus) -> int:
    """Return how many groups have routes and gateways: those that are wanted, and those that still finish requests."""
    ending = (group.index + 1 for group in status.groups if group.phase not in _GONE)
    return max((deployment.spec.replicas, *ending))


def _objects(deployment: DSV4Deployment, lost: Sequence[str | None], image: str, *, placed: bool) -> list[Manifest]:
    found: list[Manifest] = [
        frontend.public_service(deployment),
        frontend.network_policy(deployment),
        frontend.disruption_budget(deployment),
    ]
    for group in range(len(lost)):
        found.append(frontend.gateway_config(deployment, group, lost))
        if placed:
            found.append(frontend.gateway_deployment(deployment, group, image=image))
    return found
