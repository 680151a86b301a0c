"""Services of a deployment and of its groups: the frontend for users, and names for members."""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass

from dsv4_operator.api import DeploymentStatus, DSV4Deployment
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.backends.pods.frontend import Frontend
from dsv4_operator.backends.pods.ownership import OwnedObjects
from dsv4_operator.backends.pods.token import TokenKeys
from dsv4_operator.builders import member, names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube import Conflict
from dsv4_operator.kube.owned import Versions
from dsv4_operator.lifecycle.watch import ALIVE

_SETTLE_SECONDS = 3.0
"""After a write of our own, in which the objects that came or changed are taken for what was written."""
_SECRET_SECONDS = 600.0
"""Between looks at the Secret of a deployment at rest: Secrets are not watched, since who may list one may list all."""


class Superseded(BackendError):
    """Another operator has formed a later incarnation: what this one knows is out of date."""


@dataclass(slots=True)
class _Known:
    """One deployment's objects, as they were applied last."""

    uid: str | None
    frontend: Frontend
    versions: Versions
    """Of what the deployment owned, as far as it was seen."""
    written: float = -math.inf
    """Monotonic time of the last write."""


class Frontends:
    """The objects of all deployments, applied when they should be others, and when somebody changed or removed one."""

    def __init__(self, cluster: Cluster, keys: TokenKeys) -> None:
        self._cluster = cluster
        self._keys = keys
        self._known: dict[tuple[str, str], _Known] = {}

    async def ensure(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        """See `Backend.ensure_frontend`."""
        name = deployment.metadata.namespace, deployment.metadata.name
        known = self._known.get(name)
        versions = self._versions(*name)
        if known is not None and known.uid == deployment.metadata.uid and not self._disturbed(known, versions):
            known.versions = versions
            await known.frontend.ensure(deployment, status)
        else:
            await self._apply(deployment, status, versions)
        await self._keys.ensure(deployment, _SECRET_SECONDS)

    async def _apply(self, deployment: DSV4Deployment, status: DeploymentStatus, versions: Versions) -> None:
        """Apply everything again, which writes nothing where nothing differs."""
        frontend = Frontend(self._cluster, functools.partial(self._keys.ensure, deployment))
        await frontend.ensure(deployment, status)
        for group in status.groups:
            if group.phase in ALIVE and group.members:
                await move_head(self._cluster.objects, deployment, group.index, group.incarnation)
                service = member.incarnation_service(deployment, group.index, group.incarnation)
                await self._cluster.objects.apply(service)
        name = deployment.metadata.namespace, deployment.metadata.name
        self._known[name] = _Known(deployment.metadata.uid, frontend, versions, time.monotonic())

    def wrote(self, namespace: str, name: str) -> None:
        """Take note that objects of a deployment are written now: their versions will be others."""
        known = self._known.get((namespace, name))
        if known is not None:
            known.written = time.monotonic()

    def release(self, namespace: str, name: str) -> None:
        """Drop what is remembered of one deployment."""
        self._known.pop((namespace, name), None)

    def _versions(self, namespace: str, name: str) -> Versions:
        return self._cluster.owned.versions(namespace, name) if self._cluster.owned is not None else frozenset()

    def _disturbed(self, known: _Known, versions: Versions) -> bool:
        """Tell whether somebody else removed or changed an object since it was last looked at."""
        settling = time.monotonic() - known.written < _SETTLE_SECONDS
        if not settling and self._cluster.owned is not None and known.frontend.names - _names(versions):
            # Made again at the latest look, and removed again before this one.
            return True
        if versions == known.versions:
            return False
        return not settling or bool(_names(known.versions) - _names(versions))


async def move_head(owned: OwnedObjects, deployment: DSV4Deployment, group: int, incarnation: int) -> None:
    """Have the Service of the group's head name `incarnation`, unless it names a later one.

    The API server compares versions: of two operators that form at once, one that lost its lease and does not know it
    yet gets no further, and its incarnation does not come back. Pods that it had sent before do not start, because
    whoever fenced them removed the plan that they mount.

    Raises:
        Superseded: a later incarnation was formed.
        BackendError: the Service belongs to somebody else, or is being deleted.
        KubeError: somebody else changed the Service at the same time, or the API server refused it.
    """
    wanted = member.head_service(deployment, group, incarnation)
    live = await owned.find(wanted)
    if live is None:
        await owned.create(wanted)
        live = await owned.find(wanted)
        if live is None:
            raise Conflict(f"Service {wanted['metadata']['name']} was created and removed by somebody else")
    latest = _incarnation(live)
    if latest > incarnation:
        where = f"{deployment.metadata.namespace}/{wanted['metadata']['name']}"
        raise Superseded(
            f"group {group}: incarnation {incarnation} is not formed, because incarnation {latest} was formed "
            f"meanwhile (Service {where}); if no other operator runs, as after the restore of a backup, delete the "
            "Service, and it is made again"
        )
    await owned.apply_over(live, wanted)


def _incarnation(service: Manifest) -> int:
    """Return the incarnation that a Service selects; 0 if it selects none, such as one of the type ExternalName."""
    selector = dict(names.part(service, "spec", "selector"))
    return names.number({"metadata": {"labels": selector}}, names.INCARNATION) or 0


def _names(versions: Versions) -> frozenset[tuple[str, str]]:
    """Return kind and name of the objects that are there."""
    return frozenset((kind, name) for kind, name, _ in versions)
