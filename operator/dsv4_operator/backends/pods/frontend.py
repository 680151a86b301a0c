"""Services, gateways and token Secrets of deployments, and their repair."""

from __future__ import annotations

import base64
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, GroupPhase
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.backends.pods.ownership import OwnedObjects, all_done
from dsv4_operator.builders import frontend, names, paths
from dsv4_operator.builders import group as group_objects
from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube import CONFIG_MAPS, DEPLOYMENTS, SECRETS, SERVICES, Client, Conflict, KubeError, KubeReader
from dsv4_operator.kube.cache import Versions
from dsv4_operator.lifecycle import given_up
from dsv4_operator.lifecycle.watch import ALIVE
from dsv4_runtime.contract.token import new_key, new_token

_log = logging.getLogger("dsv4")

_FRESH_SECONDS = 60.0
"""For which a Secret is believed to be there that was, where members are made."""


class TokenKeys:
    """The token keys of all deployments, remembered so that not every question to an agent costs a request."""

    def __init__(self, kube: Client) -> None:
        self._kube: KubeReader = kube
        self._objects = OwnedObjects(kube)
        self._known: dict[tuple[str, str], tuple[str | None, str, float]] = {}
        """By namespace and name: uid of the deployment, key, and monotonic time at which the API server had it."""

    async def ensure(self, deployment: DSV4Deployment, seconds: float = _FRESH_SECONDS) -> str:
        """Return the key, which the API server had within the last `seconds`; made if it is gone.

        Raises:
            BackendError: see `_key_of`.
            KubeError: see `_key_of`.
        """
        metadata = deployment.metadata
        known = self._known.get((metadata.namespace, metadata.name))
        if known is not None and known[0] == metadata.uid and time.monotonic() - known[2] <= seconds:
            return known[1]
        # Of running agents the tokens were made with it: a Secret that somebody removed is made again as it was.
        earlier = known[1] if known is not None and known[0] == metadata.uid else None
        key = await self._key_of(deployment, earlier)
        self._known[metadata.namespace, metadata.name] = metadata.uid, key, time.monotonic()
        return key

    async def make_token(self, deployment: DSV4Deployment, group_index: int, incarnation: int) -> None:
        """Make the Secret with the token of a new incarnation, if no earlier try has made it.

        Raises:
            BackendError: see `_key_of`; or the Secret's name is somebody else's.
            KubeError: see `_key_of`; or the API server refused the Secret.
        """
        token = new_token(await self.ensure(deployment))
        await self._objects.create(group_objects.token_secret(deployment, group_index, incarnation, token))

    async def of(self, deployment: DSV4Deployment) -> str | None:
        """Return the key for what agents are asked with, however old; None while it cannot be had."""
        metadata = deployment.metadata
        known = self._known.get((metadata.namespace, metadata.name))
        if known is not None and known[0] == metadata.uid:
            return known[1]
        try:
            return await self.ensure(deployment)
        except (BackendError, KubeError) as error:
            _log.warning("%s/%s: no token key for its agents: %s", metadata.namespace, metadata.name, error)
            return None

    async def _key_of(self, deployment: DSV4Deployment, earlier: str | None) -> str:
        """Return the token key of `deployment`; made if there is none, from `earlier` if that is known.

        Raises:
            BackendError: the Secret belongs to somebody else, or is being deleted.
            KubeError: the Secret cannot be read or made, or has no key.
        """
        # A deployment that never had a group has none, most likely.
        older = bool(deployment.status.groups)
        wanted = group_objects.token_key_secret(deployment, earlier or "")
        known = await self._objects.find(wanted) if older or earlier is not None else None
        if known is None:
            key = earlier or (await self._key_before_uid(deployment) if older else None) or new_key()
            if await self._objects.create(group_objects.token_key_secret(deployment, key)):
                return key
            known = await self._objects.find(wanted)
        found = _entry(known)
        if found is None:
            name = f"{deployment.metadata.namespace}/{wanted['metadata']['name']}"
            what = f"the Secret {name} has no entry {paths.TOKEN_KEY_ENTRY}"
            raise KubeError(f"{what}; delete it, and it is made anew")
        return found

    async def _key_before_uid(self, deployment: DSV4Deployment) -> str | None:
        """Return the key in the Secret of the earlier name, with which the tokens of running agents were made."""
        metadata = deployment.metadata
        found = await self._kube.get(SECRETS, metadata.namespace, names.earlier_token_key_name(metadata.name))
        return _entry(found) if found is not None and names.belongs(found, metadata.uid) else None

    def release(self, namespace: str, name: str) -> None:
        """Drop what is remembered of one deployment."""
        self._known.pop((namespace, name), None)


async def require_secrets(kube: KubeReader, deployment: DSV4Deployment) -> None:
    """See that what `deployment` names by a `secretKeyRef` is there: without it, its pods would wait and not say why.

    Raises:
        BackendError: it is not; the text names the field, the Secret and the remedy.
        KubeError: it cannot be read.
    """
    namespace, gateway = deployment.metadata.namespace, deployment.spec.gateway
    source = deployment.spec.model.source.secret_key_ref
    keys = gateway.api_keys.secret_key_ref if gateway.api_keys is not None else None
    for field, ref in (("spec.model.source", source), ("spec.gateway.apiKeys", keys)):
        if ref is None:
            continue
        found = await kube.get(SECRETS, namespace, ref.name)
        if not ((found or {}).get("data") or {}).get(ref.key):
            what = "has no entry" if found is not None else "is not there, which should have"
            raise BackendError(
                f"{field}.secretKeyRef: the Secret {namespace}/{ref.name} {what} {ref.key}; make it, for example "
                f"kubectl create secret generic {ref.name} -n {namespace} --from-file={ref.key}=FILE"
            )


def _entry(secret: Manifest | None) -> str | None:
    """Return the token key in `secret`; None without one."""
    text = ((secret or {}).get("data") or {}).get(paths.TOKEN_KEY_ENTRY)
    return None if text is None else base64.b64decode(text).decode().strip()


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
    """Return whether a group ever had a plan: a deployment that fits nowhere gets no gateways, which would take room.

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
                service = group_objects.incarnation_service(deployment, group.index, group.incarnation)
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
        """Return whether somebody else removed or changed an object since it was last looked at."""
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
    wanted = group_objects.head_service(deployment, group, incarnation)
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
