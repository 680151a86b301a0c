"""Every deployment of the cluster: what was last heard of it, and one reconciler for each."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, InvalidDeployment, Metadata, Reason
from dsv4_operator.api.load import parse
from dsv4_operator.api.status import read_status
from dsv4_operator.backends.base import Backend, BackendError
from dsv4_operator.controller.queue import LONGEST_BACKOFF_SECONDS
from dsv4_operator.controller.reconcile import Endpoints, Reconciler
from dsv4_operator.kube import DSV4_DEPLOYMENTS, Conflict, Kube, KubeError, Manifest, NotFound
from dsv4_operator.kube.owned import DeploymentKey
from dsv4_operator.lifecycle import Event, EventType, events, refused_status
from dsv4_operator.lifecycle.decide import QUIET_SECONDS
from dsv4_operator.lifecycle.watch import ALIVE
from dsv4_runtime.contract.clock import unix_time

_log = logging.getLogger("dsv4")

_TRIES = 3
_SHORT_SECONDS = 5.0
# Loading takes minutes, and its progress is news every second.
_PROGRESS_SECONDS = 5.0
_METADATA = frozenset(field.alias or name for name, field in Metadata.model_fields.items())


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Dependencies of reconciling a deployment."""

    kube: Kube
    backend: Callable[[DSV4Deployment], Backend]
    """Backend that runs the members of a deployment; raises InvalidDeployment where there is no such backend."""
    endpoints: Callable[[DSV4Deployment], Endpoints]
    tell: Callable[[Manifest, Event], None]
    """Told of everything that happened, with the object that it happened to."""
    clock: Callable[[], float] = unix_time


class Deployments:
    """The work of the queue: `look` is one turn of one deployment."""

    def __init__(self, dependencies: Dependencies) -> None:
        self._dependencies = dependencies
        self._heard: dict[DeploymentKey, Manifest] = {}
        self._states: dict[DeploymentKey, _DeploymentTurns] = {}

    def told(self, manifest: Manifest, gone: bool) -> DeploymentKey | None:
        """Take note of an event of the watch; return the deployment to reconcile, None if nothing changed.

        Events of one UID come in order, but those of two objects that had the same name one after the other do not. So
        an older version replaces no later one, and the end of another object is no news.
        """
        metadata = manifest["metadata"]
        key = metadata["namespace"], metadata["name"]
        metadata.pop("managedFields", None)
        known = self._heard.get(key)
        if gone:
            if known is None or known["metadata"]["uid"] != metadata["uid"]:
                return None
            del self._heard[key]
            return key
        if known is not None and _number(manifest) < _number(known):
            return None
        self._heard[key] = manifest
        state = self._states.get(key)
        return None if state is not None and state.wrote(manifest) else key

    def knows(self, key: DeploymentKey) -> bool:
        """Tell whether there is such a deployment, as far as was heard."""
        return key in self._heard

    def patience(self, key: DeploymentKey) -> float:
        """Return the longest wait after a turn that failed: short while other groups run that must be looked after."""
        state = self._states.get(key)
        groups = state.status.groups if state is not None and state.status is not None else ()
        others = len(groups) > 1 and any(group.phase in ALIVE for group in groups)
        return _SHORT_SECONDS if others else LONGEST_BACKOFF_SECONDS

    def statuses(self) -> Iterator[DeploymentStatus]:
        """Yield the status of every deployment that was looked at."""
        for state in self._states.values():
            if state.status is not None:
                yield state.status

    async def close(self) -> None:
        """Let go of all connections; nothing on the cluster is touched."""
        for state in self._states.values():
            await state.close()
        self._states.clear()

    async def look(self, key: DeploymentKey) -> float | None:
        """Take one turn, and return the seconds until the next one is due, None when the deployment is gone."""
        heard, state = self._heard.get(key), self._states.get(key)
        if state is not None and (heard is None or heard["metadata"]["uid"] != state.uid):
            del self._states[key]
            await state.close()
            state = None
        if heard is None:
            return None
        if state is None or state.due:
            # The watch may be late or have missed the end, and the status is what the first decision builds on.
            live = await self._dependencies.kube.get(DSV4_DEPLOYMENTS, *key)
            if live is None or live["metadata"]["uid"] != heard["metadata"]["uid"]:
                return await self._replace(key, heard, live)
            if state is None:
                state = self._states[key] = _DeploymentTurns(self._dependencies, live)
            state.confirm()
        try:
            state.see(heard)
            pause = await state.look()
        except BackendError as error:
            state.complain(str(error), error.reason)
            if error.retry_seconds is not None:
                return error.retry_seconds
            raise
        except NotFound:
            live = await self._dependencies.kube.get(DSV4_DEPLOYMENTS, *key)
            if live is not None and live["metadata"]["uid"] == state.uid:
                raise
            return await self._replace(key, heard, live)
        except _StrangeStatusError:
            # Its memory is worth nothing any more. The next look begins with what is there.
            del self._states[key]
            await state.close()
            raise
        state.complain(None)
        return pause

    async def _replace(self, key: DeploymentKey, heard: Manifest, live: Manifest | None) -> float | None:
        """Forget the object `heard`, which does not exist any more, and go on with `live`, which has its name now."""
        state = self._states.pop(key, None)
        if state is not None:
            await state.close()
        latest = self._heard.get(key)
        if latest is not None and latest["metadata"]["uid"] == heard["metadata"]["uid"]:
            del self._heard[key]
            latest = None
        if live is not None and (latest is None or _number(live) > _number(latest)):
            live["metadata"].pop("managedFields", None)
            latest = self._heard[key] = live
        return None if latest is None else 0.0


class _StrangeStatusError(KubeError):
    """Somebody else wrote the status."""


class _DeploymentTurns:
    """One deployment, from its first look until it is gone."""

    def __init__(self, dependencies: Dependencies, live: Manifest) -> None:
        self._dependencies = dependencies
        self._manifest = live
        self._written: object = live.get("status") or {}
        """The status as the server has it."""
        self._version: str = live["metadata"]["resourceVersion"]
        self._read: tuple[object, DSV4Deployment] | None = None
        self._backend: Backend | None = None
        self._reconciler: Reconciler | None = None
        self._problem: str | None = None
        self._confirmed = -math.inf
        """Monotonic time at which the API server had the object."""

    @property
    def due(self) -> bool:
        """Tell whether the API server is to be asked for the object: the watch may have missed its end."""
        return time.monotonic() - self._confirmed >= QUIET_SECONDS

    def confirm(self) -> None:
        """Take note that the API server has the object."""
        self._confirmed = time.monotonic()

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

    def wrote(self, heard: Manifest) -> bool:
        """Tell whether that is the version that was written here last."""
        metadata = heard["metadata"]
        return bool(metadata["uid"] == self.uid and metadata["resourceVersion"] == self._version)

    def see(self, heard: Manifest) -> None:
        """Take over what was heard, unless a later version is known.

        Raises:
            _StrangeStatusError: its status is not the one that was written here.
        """
        if _number(heard) > int(self._version):
            if (heard.get("status") or {}) != self._written:
                where = "{namespace}/{name}".format_map(heard["metadata"])
                raise _StrangeStatusError(f"{where}: its status was written by somebody else")
            self._version = heard["metadata"]["resourceVersion"]
        if _number(heard) > _number(self._manifest):
            self._manifest = heard

    async def look(self) -> float:
        deleting = "deletionTimestamp" in self._manifest["metadata"]
        try:
            deployment = self._deployment()
            if self._backend is None:
                # `spec.backend` cannot change: the definition refuses it.
                self._backend = self._dependencies.backend(deployment)
        except InvalidDeployment as refusal:
            await self._refuse(str(refusal))
            return QUIET_SECONDS
        if self._reconciler is None:
            self._reconciler = Reconciler(
                self._backend,
                self._dependencies.endpoints(deployment),
                save=self._save,
                tell=self._tell,
                progress_interval=_PROGRESS_SECONDS,
                clock=self._dependencies.clock,
            )
        return await self._reconciler.reconcile(deployment, deleting=deleting)

    def complain(self, problem: str | None, reason: Reason = Reason.ACTION_FAILED) -> None:
        """Report once what cannot be done, until it is another problem or None."""
        if problem is not None and problem != self._problem:
            self._tell(Event(EventType.WARNING, reason, problem))
        self._problem = problem

    def _deployment(self) -> DSV4Deployment:
        """Read the manifest; anew only when something in it changed that dsv4 reads."""
        metadata = {name: value for name, value in self._manifest["metadata"].items() if name in _METADATA}
        if self._read is None or self._read[0] != metadata:
            status = read_status(self._written)
            self._read = metadata, parse({**self._manifest, "metadata": metadata, "status": status})
        return self._read[1]

    async def _refuse(self, why: str) -> None:
        """Say that the specification breaks a rule, in the words of the command line; nothing is done about it."""
        generation = int(self._manifest["metadata"].get("generation") or 0)
        known = read_status(self._written)
        status = refused_status(known, why, generation, self._dependencies.clock())
        if status != known:
            await self._write(status)
            for event in events(known, status):
                self._tell(event)

    def _tell(self, event: Event) -> None:
        self._dependencies.tell(self._manifest, event)

    async def _save(self, changed: DSV4Deployment) -> None:
        await self._write(changed.status)

    async def _write(self, status: DeploymentStatus) -> None:
        """Write the status through /status, over the very status that the decision built on, or not at all."""
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
                answer = await self._dependencies.kube.replace(manifest, subresource="status")
            except Conflict:
                live = await self._dependencies.kube.get(DSV4_DEPLOYMENTS, namespace, name)
                if live is None or live["metadata"]["uid"] != self.uid:
                    raise NotFound(f"{namespace}/{name} was deleted while it was looked at") from None
                self.see(live)
                continue
            self._written, self._version = answer.get("status") or {}, answer["metadata"]["resourceVersion"]
            return
        raise Conflict(f"the status of {namespace}/{name} was changed each time before it could be written")


def _number(manifest: Manifest) -> int:
    """Return the number of its version: later ones have higher numbers; Kubernetes lets clients rely on it."""
    return int(manifest["metadata"]["resourceVersion"])
