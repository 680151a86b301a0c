"""Services, gateways and token Secrets of deployments, and their repair."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, GroupPhase, GroupStatus
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.backends.pods.ownership import OwnedObjects, gather_all
from dsv4_operator.builders import frontend, member, names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube import CONFIG_MAPS, DEPLOYMENTS, SECRETS, SERVICES, Client, Conflict, KubeError, KubeReader
from dsv4_operator.kube.cache import Versions
from dsv4_operator.lifecycle import given_up
from dsv4_operator.lifecycle.watch import ALIVE
from dsv4_runtime.contract.token import new_key, new_token

_log = logging.getLogger("dsv4")

_FRESH_SECONDS = 60.0
"""Time for which an observed Secret is assumed to exist when members are created."""


class TokenKeys:
    """Cache of the token keys of all deployments, so that requests to agents cost no request to the API server."""

    def __init__(self, kube: Client) -> None:
        self._objects = OwnedObjects(kube)
        self._known: dict[tuple[str, str], tuple[str | None, str, float]] = {}
        """By namespace and name: uid of the deployment, key, and monotonic time of the latest confirmation."""
        self._reading: dict[tuple[str, str], asyncio.Lock] = {}

    async def ensure(self, deployment: DSV4Deployment, seconds: float = _FRESH_SECONDS) -> str:
        """Return the key, confirmed by the API server within the last `seconds`; created if it is missing.

        Raises:
            BackendError: see `_key_of`.
            KubeError: see `_key_of`.
        """
        metadata = deployment.metadata
        name = metadata.namespace, metadata.name
        # One request for all that wait for it.
        async with self._reading.setdefault(name, asyncio.Lock()):
            known = self._known.get(name)
            if known is not None and known[0] == metadata.uid and time.monotonic() - known[2] <= seconds:
                return known[1]
            # Tokens of running agents derive from this key: a deleted Secret is created again with the same content.
            earlier = known[1] if known is not None and known[0] == metadata.uid else None
            key = await self._key_of(deployment, earlier)
            self._known[name] = metadata.uid, key, time.monotonic()
            return key

    async def make_token(self, deployment: DSV4Deployment, group_index: int, incarnation: int) -> None:
        """Create the Secret with the token of a new incarnation, unless it exists.

        Raises:
            BackendError: see `_key_of`; or the Secret belongs to another owner.
            KubeError: see `_key_of`; or the API server refused the Secret.
        """
        # Never from the cache: gateways have the key that the Secret has now, and would reach none of these members.
        token = new_token(await self.ensure(deployment, -1.0))
        await self._objects.create(member.token_secret(deployment, group_index, incarnation, token))

    async def of(self, deployment: DSV4Deployment) -> str | None:
        """Return the key for requests to agents, of any age; None if it is not available."""
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
        """Return the token key of `deployment`; created if there is none, from `earlier` if that is known.

        Raises:
            BackendError: the Secret belongs to another owner, or is being deleted.
            KubeError: the Secret cannot be read or created, or has no key.
        """
        wanted = member.token_key_secret(deployment, earlier or "")
        # A deployment without groups most likely has no key.
        known = await self._objects.find(wanted) if deployment.status.groups or earlier is not None else None
        if known is None:
            key = earlier or new_key()
            if await self._objects.create(member.token_key_secret(deployment, key)):
                return key
            known = await self._objects.find(wanted)
        found = _entry(known)
        if found is None:
            name = f"{deployment.metadata.namespace}/{wanted['metadata']['name']}"
            what = f"the Secret {name} has no entry {names.TOKEN_KEY_ENTRY}"
            raise KubeError(f"{what}; delete the Secret, and the operator creates it again")
        return found

    def release(self, namespace: str, name: str) -> None:
        """Drop the data of one deployment."""
        self._known.pop((namespace, name), None)
        self._reading.pop((namespace, name), None)


async def require_secrets(kube: KubeReader, deployment: DSV4Deployment) -> None:
    """Check that all Secrets of `deployment` exist: without them its pods would wait without a message.

    Raises:
        BackendError: one is missing; the text contains the field, the Secret and the remedy.
        KubeError: a Secret cannot be read.
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
    text = ((secret or {}).get("data") or {}).get(names.TOKEN_KEY_ENTRY)
    return None if text is None else base64.b64decode(text).decode().strip()


_AGAIN_SECONDS = 12 * 3600.0
"""Interval between checks for changes by other clients, in addition to the watches, which do not compare annotations;
half of it to all of it, so that deployments do not coincide."""
_GONE = frozenset({GroupPhase.SUSPENDED, GroupPhase.STOPPED})

_LATE_SECONDS = 15.0
"""Time in which the API server may still execute a write that got no response."""

Sweep = Callable[[DSV4Deployment, Callable[[int], int]], Awaitable[None]]
"""Removes objects of ended incarnations: deployment, and a function that returns the last one of a group."""


class Frontend:
    """Front end of one deployment. Caches the applied objects, so that only changes are written."""

    def __init__(self, cluster: Cluster, token_key: Callable[[], Awaitable[str]], sweep: Sweep) -> None:
        self._cluster = cluster
        self._token_key = token_key
        self._sweep = sweep
        self._built: tuple[DSV4Deployment, object, list[Manifest]] | None = None
        """Inputs of the latest objects, and the objects."""
        self._applied: list[Manifest] = []
        self._interrupted = False
        """Whether a request failed: some objects may differ from `_applied`, or belong to groups that it lacks."""
        self._time = -math.inf

    @property
    def names(self) -> frozenset[tuple[str, str]]:
        """Return kind and name of the applied objects."""
        return frozenset((one["kind"], one["metadata"]["name"]) for one in self._applied)

    async def ensure(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        """See `PodsBackend.ensure_frontend`."""
        lost = [given_up(deployment, status, group) for group in range(routed_groups(deployment, status))]
        placed = was_placed(status)
        served = {group.index: group.served_names for group in status.groups if group.index < len(lost)}
        inputs = lost, placed, served
        if self._built is None or self._built[0] is not deployment or self._built[1] != inputs:
            image = self._cluster.image(deployment)
            made = _objects(deployment, lost, served, image, placed=placed, variables=self._cluster.variables)
            self._built = deployment, inputs, made
        wanted = self._built[2]
        due = time.monotonic() - self._time > _AGAIN_SECONDS
        everything = due or self._interrupted
        if wanted is self._applied and not everything:
            return
        changed = [one for one in wanted if everything or one not in self._applied]
        if not changed and len(wanted) == len(self._applied):
            self._applied = wanted
            return
        self._interrupted = True
        await self._token_key()
        await gather_all(*(self._cluster.objects.apply(one) for one in changed))
        removed = 0
        if deployment.metadata.generation > 1:
            # The first generation cannot have had more groups.
            removed = last_removed(status, len(lost))
            await self._remove_superfluous(deployment, len(lost), removed)
        ended = {group.index: _last_ended(group) for group in status.groups}
        if removed or (everything and any(ended.values())):
            await self._sweep(deployment, lambda group: ended.get(group, 0) if group < len(lost) else removed)
        self._applied, self._interrupted = wanted, False
        if due:
            self._time = time.monotonic() - random.uniform(0.0, 0.5) * _AGAIN_SECONDS  # noqa: S311

    async def _remove_superfluous(self, deployment: DSV4Deployment, groups: int, removed: int) -> None:
        """Remove the gateways and head Services of all groups but the first `groups`.

        Each kind is listed: a removal may be interrupted, and a group may have a part of these objects only. A Service
        of an incarnation after `removed` belongs to a group that is formed again meanwhile.
        """
        metadata = deployment.metadata
        query = f"{names.selector(names.labels(metadata.name))},{names.GROUP},!{names.INCARNATION}"
        for resource in (DEPLOYMENTS, CONFIG_MAPS, SERVICES):
            for one in await self._cluster.kube.list(resource, metadata.namespace, labels=query):
                group = names.number(one, names.GROUP)
                if group is None or group < groups or (resource is SERVICES and _incarnation(one) > removed):
                    continue
                await self._cluster.objects.delete(resource, one, metadata.uid or "")


def was_placed(status: DeploymentStatus) -> bool:
    """Return whether a group ever had a plan: a deployment that fits nowhere gets no gateways, which would use
    resources.

    Every decision saves groups, so a status without groups gives no information.
    """
    return not status.groups or any(group.incarnation for group in status.groups)


def routed_groups(deployment: DSV4Deployment, status: DeploymentStatus) -> int:
    """Return the number of groups with routes and gateways: wanted groups, and those in drain."""
    ending = (group.index + 1 for group in status.groups if group.phase not in _GONE)
    return max((deployment.spec.replicas, *ending))


def _last_ended(group: GroupStatus) -> int:
    """Return the last incarnation of a group whose members are proven to be gone."""
    return group.incarnation if group.phase in _GONE else max(0, min(group.fenced_below, group.incarnation) - 1)


def last_removed(status: DeploymentStatus, groups: int) -> int:
    """Return the last incarnation of all groups but the first `groups`; groups that are created again begin above."""
    stopped = (max(group.incarnation, group.fenced_below) for group in status.groups if group.index >= groups)
    return max((status.removed_incarnation, *stopped))


def _objects(
    deployment: DSV4Deployment,
    lost: Sequence[str | None],
    served: frontend.Names,
    image: str,
    *,
    placed: bool,
    variables: Mapping[str, str],
) -> list[Manifest]:
    found: list[Manifest] = [
        frontend.public_service(deployment),
        frontend.network_policy(deployment),
        frontend.disruption_budget(deployment),
    ]
    for group in range(len(lost)):
        found.append(frontend.gateway_config(deployment, group, lost, served))
        if placed:
            made = frontend.gateway_deployment(deployment, group, image=image, variables=variables, names=served)
            found.append(made)
    return found


_SETTLE_SECONDS = 3.0
"""Time after a write in which new or changed objects are attributed to it."""
_SECRET_SECONDS = 3600.0
"""Interval between reads of the Secret of an idle deployment; watching Secrets would need access to all."""


class Superseded(BackendError):
    """Another operator has formed a later incarnation, so the state of this one is out of date."""


@dataclass(slots=True)
class _Known:
    uid: str | None
    frontend: Frontend
    versions: Versions
    """Versions of the owned objects at the latest observation."""
    written: float = -math.inf
    """Monotonic time of the last write."""


class Frontends:
    """Front ends of all deployments: objects are applied after a change of the wanted state or by another client."""

    def __init__(self, cluster: Cluster, keys: TokenKeys, sweep: Sweep) -> None:
        self._cluster = cluster
        self._keys = keys
        self._sweep = sweep
        self._known: dict[tuple[str, str], _Known] = {}
        self._writing: Counter[tuple[str, str]] = Counter()
        """Number of present `writing` blocks, by namespace and name."""
        self._failed: dict[tuple[str, str], float] = {}
        """Monotonic time of the latest failed write, which the API server may execute later, by namespace and name."""

    async def ensure(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        """See `Backend.ensure_frontend`."""
        name = deployment.metadata.namespace, deployment.metadata.name
        known = self._known.get(name)
        versions = self._versions(*name)
        same = known is not None and known.uid == deployment.metadata.uid
        failed = self._failed.get(name)
        late = failed is not None and time.monotonic() - failed >= _LATE_SECONDS
        changed = known is None or self._changed_externally(known, versions, writing=name in self._writing)
        with self._noted(name):
            if known is not None and same and not changed and not late:
                known.versions = versions
                await known.frontend.ensure(deployment, status)
            else:
                await self._apply(deployment, status, versions)
        if late and self._failed.get(name) == failed:
            del self._failed[name]
        await self._keys.ensure(deployment, _SECRET_SECONDS)

    @contextlib.contextmanager
    def _noted(self, name: tuple[str, str]) -> Iterator[None]:
        """Note a failed write: all objects are checked again once the API server cannot execute it any more."""
        try:
            yield
        except BaseException:
            self._failed[name] = time.monotonic()
            raise

    async def _apply(self, deployment: DSV4Deployment, status: DeploymentStatus, versions: Versions) -> None:
        """Apply all objects again; unchanged ones cause no write."""
        frontend = Frontend(self._cluster, functools.partial(self._keys.ensure, deployment), self._sweep)
        await frontend.ensure(deployment, status)
        for group in status.groups:
            if group.phase in ALIVE and group.members:
                await move_head(self._cluster.objects, deployment, group.index, group.incarnation, repair=True)
                service = member.incarnation_service(deployment, group.index, group.incarnation)
                await self._cluster.objects.apply(service)
        name = deployment.metadata.namespace, deployment.metadata.name
        self._known[name] = _Known(deployment.metadata.uid, frontend, versions, time.monotonic())

    @contextlib.contextmanager
    def writing(self, namespace: str, name: str) -> Iterator[None]:
        """Attribute changes of a deployment's objects to this process during the block, however long its requests take,
        and shortly after it."""
        key = namespace, name
        self._writing[key] += 1
        try:
            with self._noted(key):
                yield
        finally:
            self._writing[key] -= 1
            self._writing += Counter()
            if (known := self._known.get(key)) is not None:
                known.written = time.monotonic()

    def release(self, namespace: str, name: str) -> None:
        """Drop the data of one deployment."""
        self._known.pop((namespace, name), None)
        self._failed.pop((namespace, name), None)

    def _versions(self, namespace: str, name: str) -> Versions:
        return self._cluster.owned.versions(namespace, name) if self._cluster.owned is not None else frozenset()

    def _changed_externally(self, known: _Known, versions: Versions, *, writing: bool) -> bool:
        """Return whether another client removed or changed an object since the latest observation."""
        settling = writing or time.monotonic() - known.written < _SETTLE_SECONDS
        if not settling and self._cluster.owned is not None and known.frontend.names - _names(versions):
            # Created again at the latest reconcile, and removed again since.
            return True
        if versions == known.versions:
            return False
        return not settling or bool(_names(known.versions) - _names(versions))


async def move_head(
    owned: OwnedObjects, deployment: DSV4Deployment, group: int, incarnation: int, *, repair: bool = False
) -> None:
    """Set the incarnation of the head's Service, unless it has a later one.

    The API server compares versions: of two operators that form at once, one that has lost its lease without noticing
    gets no further, and its incarnation does not return. Pods that it had created before do not start, because fencing
    removed the plan that they mount.

    Args:
        owned: the objects.
        deployment: the deployment of the group.
        group: index of the group.
        incarnation: the wanted incarnation.
        repair: whether the cache suffices to prove that nothing is to be done, because nothing is formed.

    Raises:
        Superseded: a later incarnation was formed.
        BackendError: the Service belongs to another owner, or is being deleted.
        KubeError: the Service was changed at the same time, or the API server refused it.
    """
    wanted = member.head_service(deployment, group, incarnation)
    if repair and owned.is_current(wanted):
        return
    live = await owned.find(wanted) if owned.may_exist(wanted) else None
    if live is None:
        if await owned.create(wanted):
            return
        live = await owned.find(wanted)
        if live is None:
            raise Conflict(f"Service {wanted['metadata']['name']} was created and removed by another client")
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
    return frozenset((kind, name) for kind, name, _ in versions)
