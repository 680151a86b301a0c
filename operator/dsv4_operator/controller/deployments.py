"""Deployments of the cluster: the latest object and the reconciler of each."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, InvalidDeployment, Metadata, Reason
from dsv4_operator.api.deployment import parse
from dsv4_operator.api.status import read_status
from dsv4_operator.backends.base import Backend
from dsv4_operator.controller.queue import REPEAT_SECONDS, Part, text_of
from dsv4_operator.controller.reconcile import Endpoints, Reconciler, Refused, StatusLost
from dsv4_operator.kube import DSV4_DEPLOYMENTS, Client, Conflict, KubeError, Listing, Manifest, NotFound, Unavailable
from dsv4_operator.kube.cache import DeploymentKey
from dsv4_operator.lifecycle import Event, EventType, events, refused_status
from dsv4_operator.lifecycle.decide import RESYNC_SECONDS
from dsv4_operator.planning import PlanRefused
from dsv4_operator.planning.revision import last_valid
from dsv4_runtime.util.clock import unix_time
from dsv4_runtime.util.files import log_context

_log = logging.getLogger("dsv4")

_TRIES = 3
_READ_SECONDS = 2.0
"""Time for which a reconcile waits for the object of a deployment that it knows."""
_UNANSWERED = 32
"""Writes without an answer that may still be executed: API servers give a request up after 60 s."""
_WRITE_SECONDS = 15.0
"""Time for which a reconcile waits for a write of the status: members are supervised by the next one. Long
enough for an overloaded API server, which would otherwise get the same write again."""
_START_SECONDS = 2.0
"""Time from a claim until the members that appeared are written, unless they serve or fail before."""
# Loading takes minutes, and its progress changes every second.
_PROGRESS_SECONDS = 5.0
_METADATA = frozenset(field.alias or name for name, field in Metadata.model_fields.items())


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Dependencies of the reconciliation of deployments."""

    kube: Client
    backend: Callable[[DSV4Deployment], Backend]
    """Returns the backend of a deployment; raises InvalidDeployment if there is no such backend."""
    endpoints: Callable[[DSV4Deployment], Endpoints]
    record: Callable[[Manifest, Event], None]
    """Called with every event and the object that it is about."""
    clock: Callable[[], float] = unix_time
    failed: Callable[[DeploymentKey, Part], None] = lambda *_: None
    """Called with every failure of a part of a reconcile."""


class Deployments:
    """Reconciliation of all deployments for the work queue."""

    def __init__(self, dependencies: Dependencies) -> None:
        self._dependencies = dependencies
        self._cached: dict[DeploymentKey, Manifest] = {}
        self._states: dict[DeploymentKey, _DeploymentController] = {}

    def handle_event(self, manifest: Manifest, gone: bool) -> DeploymentKey | None:
        """Store an event of the watch; return the deployment to reconcile, None if nothing changed.

        Events of one UID are ordered, but those of two successive objects of the same name are not. So an older version
        never replaces a later one, and the deletion of another object is ignored.
        """
        metadata = manifest["metadata"]
        key = metadata["namespace"], metadata["name"]
        metadata.pop("managedFields", None)
        known = self._cached.get(key)
        if gone:
            if known is None or known["metadata"]["uid"] != metadata["uid"]:
                return None
            del self._cached[key]
            return key
        if known is not None and _number(manifest) < _number(known):
            return None
        self._cached[key] = manifest
        state = self._states.get(key)
        return None if state is not None and state.is_own_write(manifest) else key

    def handle_listing(self, listing: Listing, namespace: str | None) -> list[DeploymentKey]:
        """Store a list of all deployments, of `namespace` if given; return those to reconcile.

        The watch does not report deletions during its interruptions.
        """
        present, keys = {}, list[DeploymentKey | None]()
        for item in listing.items:
            manifest = {"apiVersion": DSV4_DEPLOYMENTS.api_version, "kind": DSV4_DEPLOYMENTS.kind, **item}
            key = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
            present[key] = manifest["metadata"]["uid"]
            known = self._cached.get(key)
            if known is None or _number(manifest) > _number(known):
                keys.append(self.handle_event(manifest, gone=False))
        for key, known in list(self._cached.items()):
            listed = namespace in (None, key[0]) and _number(known) <= int(listing.resource_version)
            if listed and present.get(key) != known["metadata"]["uid"]:
                keys.append(self.handle_event(known, gone=True))
        return [key for key in keys if key is not None]

    def knows(self, key: DeploymentKey) -> bool:
        """Return whether the watch has reported such a deployment."""
        return key in self._cached

    def uid(self, key: DeploymentKey) -> str | None:
        """Return the UID of the deployment; None if the watch has reported none of that name."""
        known = self._cached.get(key)
        return str(known["metadata"]["uid"]) if known is not None else None

    def manifests(self) -> tuple[Manifest, ...]:
        """Return the latest object of every deployment that the watch has reported."""
        return tuple(self._cached.values())

    def observed(self) -> Iterator[DSV4Deployment]:
        """Yield every deployment that was reconciled, with its status."""
        for state in self._states.values():
            if (found := state.observed) is not None:
                yield found

    def failing(self) -> Iterator[str]:
        """Yield the name of every part of a reconcile whose latest attempt failed."""
        for state in self._states.values():
            yield from state.failing

    async def close(self) -> None:
        """Close all connections; objects on the cluster are not changed."""
        for state in self._states.values():
            await state.close()
        self._states.clear()

    async def reconcile(self, key: DeploymentKey) -> float | None:
        """Reconcile once, and return the seconds until the next reconcile, None if the deployment is gone."""
        log_context.set({"namespace": key[0], "deployment": key[1]})
        cached, state = self._cached.get(key), self._states.get(key)
        if state is not None and (cached is None or cached["metadata"]["uid"] != state.uid):
            del self._states[key]
            await state.close()
            state = None
        if cached is None:
            return None
        if state is None:
            # The watch may lag or have missed the deletion, and the first decision builds on the status.
            live = await self._dependencies.kube.get(DSV4_DEPLOYMENTS, *key)
            if live is None or live["metadata"]["uid"] != cached["metadata"]["uid"]:
                return await self._replace(key, cached, live)
            state = self._states[key] = _DeploymentController(self._dependencies, live)
        try:
            if state.unread:
                await self._read_again(state, key)
            state.update(cached)
            pause = await state.reconcile()
        except _DeletedError:
            return await self._replace(key, cached, await self._dependencies.kube.get(DSV4_DEPLOYMENTS, *key))
        except StatusLost:
            # The state in memory is invalid. The next reconcile starts from the object.
            del self._states[key]
            await state.close()
            raise
        except Exception as error:
            state.report_failure(text_of(error))
            raise
        state.report_failure(None)
        return pause

    async def _read_again(self, state: _DeploymentController, key: DeploymentKey) -> None:
        """Read the object of `state`; without an answer the supervision continues, and the next reconcile reads again.

        Raises:
            _DeletedError: it was deleted, or replaced by another one of its name.
            _ForeignStatusError: another client has written its status.
        """
        try:
            async with asyncio.timeout(_READ_SECONDS):
                live = await self._dependencies.kube.get(DSV4_DEPLOYMENTS, *key)
        except (KubeError, TimeoutError) as error:
            _log.debug("%s/%s cannot be read: %s", *key, error)
            return
        if live is None or live["metadata"]["uid"] != state.uid:
            raise _DeletedError("{}/{} was deleted".format(*key))
        state.update(live)
        state.unread = False

    async def _replace(self, key: DeploymentKey, cached: Manifest, live: Manifest | None) -> float | None:
        """Drop the object `cached`, which no longer exists, and continue with `live`, which has its name now."""
        state = self._states.pop(key, None)
        if state is not None:
            await state.close()
        latest = self._cached.get(key)
        if latest is not None and latest["metadata"]["uid"] == cached["metadata"]["uid"]:
            del self._cached[key]
            latest = None
        if live is not None and (latest is None or _number(live) > _number(latest)):
            live["metadata"].pop("managedFields", None)
            latest = self._cached[key] = live
        return None if latest is None else 0.0


class _ForeignStatusError(StatusLost):
    """Another writer changed the status."""


class _DeletedError(StatusLost):
    """The object was deleted, or replaced by another one of its name."""


@dataclass(frozen=True, slots=True)
class _Specification:
    deployment: DSV4Deployment | None
    """The manifest, or the last valid one; None: there is none, and no group needs one."""
    refused: Refused | None = None
    """Refusal of the manifest; None: it is valid."""


class _DeploymentController:
    """One deployment, from its first reconcile until it is gone."""

    def __init__(self, dependencies: Dependencies, live: Manifest) -> None:
        self._dependencies = dependencies
        self._manifest = live
        self._written: object = live.get("status") or {}
        """The status on the API server."""
        self._version: str = live["metadata"]["resourceVersion"]
        self._read: tuple[object, _Specification] | None = None
        self._backend: Backend | None = None
        self._reconciler: Reconciler | None = None
        self._problem: tuple[str, float] | None = None
        """Failure of the whole reconcile, and the Unix time of its latest event."""
        self.unread = False
        """Whether to read the object from the API server: a write without an answer may have been executed."""
        self._unanswered: deque[DeploymentStatus] = deque(maxlen=_UNANSWERED)
        """Statuses of writes over the present version that got no answer; at most one of them is executed."""

    async def close(self) -> None:
        if self._reconciler is not None:
            await self._reconciler.close()
        if self._backend is not None:
            metadata = self._manifest["metadata"]
            await self._backend.release(metadata["namespace"], metadata["name"])

    @property
    def uid(self) -> str:
        return str(self._manifest["metadata"]["uid"])

    @property
    def status(self) -> DeploymentStatus | None:
        return self._reconciler.status if self._reconciler is not None else None

    @property
    def failing(self) -> tuple[str, ...]:
        """Return the names of the parts whose latest attempt failed."""
        return tuple(part.name for part in self._reconciler.failing) if self._reconciler is not None else ()

    @property
    def observed(self) -> DSV4Deployment | None:
        """Return the deployment with its present status; None before its first reconcile."""
        deployment = self._read[1].deployment if self._read is not None else None
        if deployment is None or self.status is None:
            return None
        return deployment.model_copy(update={"status": self.status})

    def is_own_write(self, cached: Manifest) -> bool:
        """Return whether this is the version that this process wrote or read last."""
        metadata = cached["metadata"]
        return bool(metadata["uid"] == self.uid and metadata["resourceVersion"] == self._version)

    def update(self, cached: Manifest) -> None:
        """Store the object, unless a later version is known.

        Raises:
            _ForeignStatusError: its status is not one that this process wrote.
        """
        if _number(cached) > int(self._version):
            status = cached.get("status") or {}
            if status != self._written:
                own = next((one for one in self._unanswered if one.to_dict() == status), None)
                if own is None:
                    where = "{namespace}/{name}".format_map(cached["metadata"])
                    raise _ForeignStatusError(f"{where}: another client has written its status")
                self._was_written(own, status)
            # Writes over earlier versions are refused from now on.
            self._unanswered.clear()
            self._version = cached["metadata"]["resourceVersion"]
        if _number(cached) > _number(self._manifest):
            self._manifest = cached

    def _was_written(self, status: DeploymentStatus, content: object) -> None:
        """Continue from `status`, whose write got no answer and was executed."""
        before, self._written = read_status(self._written), content
        if self._reconciler is not None:
            self._reconciler.saved(status)
        else:
            for event in events(before, status):
                self._record(event)

    async def reconcile(self) -> float:
        manifest = self._manifest
        pause = await self._reconcile()
        # A conflicting write read a later object: the watch may report it as this process' own write, or not at all.
        return pause if self._manifest is manifest else 0.0

    async def _reconcile(self) -> float:
        deleting = "deletionTimestamp" in self._manifest["metadata"]
        found = self._specification()
        refused, deployment = found.refused, found.deployment
        if deployment is not None and self._backend is None:
            try:
                # `spec.backend` is immutable.
                self._backend = self._dependencies.backend(deployment)
            except InvalidDeployment as refusal:
                refused = self._refused(refusal)
        if deployment is None or self._backend is None:
            if self._reconciler is not None:
                # No group was formed. Its status is not the one that is written next.
                await self._reconciler.close()
                self._reconciler = None
            await self._refuse(refused.refusal.message if refused is not None else "")
            return RESYNC_SECONDS
        if self._reconciler is None:
            key = deployment.metadata.namespace, deployment.metadata.name
            self._reconciler = Reconciler(
                self._backend,
                self._dependencies.endpoints(deployment),
                save=self._save,
                record=self._record,
                failed=lambda part, _: self._dependencies.failed(key, part),
                progress_interval=_PROGRESS_SECONDS,
                start_interval=_START_SECONDS,
                clock=self._dependencies.clock,
            )
        return await self._reconciler.reconcile(deployment, deleting=deleting, refused=refused)

    def report_failure(self, problem: str | None) -> None:
        """Report a failure of the whole reconcile: at once, and again every half hour while it lasts."""
        now = self._dependencies.clock()
        if problem is None:
            self._problem = None
        elif self._problem is None or self._problem[0] != problem or not 0 <= now - self._problem[1] < REPEAT_SECONDS:
            self._problem = problem, now
            self._record(Event(EventType.WARNING, Reason.ACTION_FAILED, problem))

    def _specification(self) -> _Specification:
        """Parse the manifest; cached until a field changes that dsv4 reads."""
        metadata = {name: value for name, value in self._manifest["metadata"].items() if name in _METADATA}
        if self._read is None or self._read[0] != metadata:
            status = self.status or read_status(self._written)
            manifest = {**self._manifest, "metadata": metadata, "status": status}
            try:
                found = _Specification(parse(manifest))
            except InvalidDeployment as error:
                found = self._last_valid(manifest, status, error)
            self._read = metadata, found
        return self._read[1]

    def _last_valid(self, manifest: Manifest, status: DeploymentStatus, error: InvalidDeployment) -> _Specification:
        found = last_valid(manifest, status)
        if found is None:
            return _Specification(None, self._refused(error))
        deployment = found.deployment.model_copy(update={"status": status})
        return _Specification(deployment, self._refused(error, formable=found.formable))

    def _refused(self, error: InvalidDeployment, *, formable: bool = True) -> Refused:
        generation = int(self._manifest["metadata"].get("generation") or 0)
        return Refused(PlanRefused(Reason.SPEC_INVALID, *error.findings), generation, formable=formable)

    async def _refuse(self, why: str) -> None:
        """Report that the specification breaks a rule and no group can be supervised."""
        generation = int(self._manifest["metadata"].get("generation") or 0)
        known = read_status(self._written)
        status = refused_status(known, why, generation, self._dependencies.clock())
        if status != known:
            await self._write(status)
            for event in events(known, status):
                self._record(event)

    def _record(self, event: Event) -> None:
        self._dependencies.record(self._manifest, event)

    async def _save(self, changed: DSV4Deployment) -> None:
        await self._write(changed.status)

    async def _write(self, status: DeploymentStatus) -> None:
        """Write the status through /status, only over the status on which the decision was based."""
        metadata = self._manifest["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        for _ in range(_TRIES):
            about = {"namespace": namespace, "name": name, "uid": self.uid, "resourceVersion": self._version}
            manifest: Manifest = {
                "apiVersion": DSV4_DEPLOYMENTS.api_version,
                "kind": DSV4_DEPLOYMENTS.kind,
                "metadata": about,
                "status": status.to_dict(),
            }
            try:
                async with asyncio.timeout(_WRITE_SECONDS):
                    answer = await self._dependencies.kube.replace(manifest, subresource="status")
            except (Conflict, NotFound):
                live = await self._dependencies.kube.get(DSV4_DEPLOYMENTS, namespace, name)
                if live is None or live["metadata"]["uid"] != self.uid:
                    raise _DeletedError(f"{namespace}/{name} was deleted while it was reconciled") from None
                written = self._written
                self.update(live)
                if self._written is not written:
                    raise Conflict(f"an earlier status of {namespace}/{name} was written without an answer") from None
                continue
            except (KubeError, TimeoutError) as error:
                # It may have been executed.
                self._unanswered.append(status)
                self.unread = True
                if isinstance(error, KubeError):
                    raise
                raise Unavailable(f"{namespace}/{name}: no answer within {_WRITE_SECONDS:.0f} s") from None
            self._written, self._version = answer.get("status") or {}, answer["metadata"]["resourceVersion"]
            self._unanswered.clear()
            return
        raise Conflict(f"the status of {namespace}/{name} was changed each time before it could be written")


def _number(manifest: Manifest) -> int:
    """Return the resource version as a number; Kubernetes guarantees that later versions are greater."""
    return int(manifest["metadata"]["resourceVersion"])
