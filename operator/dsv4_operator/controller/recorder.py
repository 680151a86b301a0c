"""Events about what happened, as `kubectl describe` shows them."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import logging
from collections import OrderedDict

from dsv4_operator.kube import DSV4_DEPLOYMENTS, EVENTS, AlreadyExists, Kube, KubeError, Manifest, NotFound
from dsv4_operator.lifecycle import Event

_log = logging.getLogger("dsv4")

_CONTROLLER = "dsv4.dev/operator"
_LONGEST_NOTE = 1024
_WAITING = 10_000
_PAUSE_SECONDS = 0.05
"""Between two events: when hundreds of groups form or die at once, the API server has more urgent things to do."""
_REMEMBERED = 1000


class Recorder:
    """Posts events in the background, so that no recovery waits for them; what cannot be posted is only logged.

    The name of an event is made of what it says. So one that is told again, by this process or by the next one, becomes
    a count on the first.
    """

    def __init__(self, kube: Kube, instance: str) -> None:
        """Args:
        kube: the API server.
        instance: which process this is, for people.
        """
        self._kube = kube
        self._instance = instance
        self._queue: asyncio.Queue[Manifest] = asyncio.Queue(_WAITING)
        self._counts: OrderedDict[tuple[str, str], int] = OrderedDict()

    def record(self, about: Manifest, event: Event) -> None:
        """Log `event` of the object `about`, and post it soon."""
        where = "{namespace}/{name}".format_map(about["metadata"])
        _log.info("%s: %s %s: %s", where, event.type, event.reason, event.message)
        try:
            self._queue.put_nowait(event_manifest(about, event, self._instance, _now()))
        except asyncio.QueueFull:
            _log.warning("too many events wait: one was dropped")

    async def run(self) -> None:
        """Post until cancelled."""
        while True:
            manifest = await self._queue.get()
            try:
                await self._post(manifest)
            except KubeError as error:
                _log.warning("an event was not posted: %s", error)
            except Exception:
                # Events must not end the process.
                _log.exception("an event was not posted")
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _post(self, manifest: Manifest) -> None:
        """Count the event if the API server has it, else create it: it removes events after an hour (`--event-ttl`)."""
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        count = self._counts.pop((namespace, name), 0)
        if count:
            try:
                await self._count(manifest, count)
            except NotFound:
                count = 0
        if not count:
            try:
                await self._kube.create(manifest)
            except AlreadyExists:
                known = await self._kube.get(EVENTS, namespace, name) or {}
                count = int((known.get("series") or {}).get("count") or 1)
                await self._count(manifest, count)
        # The most recently used ones stay.
        self._counts[namespace, name] = count + 1
        if len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)

    async def _count(self, manifest: Manifest, count: int) -> None:
        about = manifest["metadata"]
        series = {"count": count + 1, "lastObservedTime": manifest["eventTime"]}
        await self._kube.patch(EVENTS, about["namespace"], about["name"], {"series": series})


def event_manifest(about: Manifest, event: Event, instance: str, time: str) -> Manifest:
    """Return `event` as an object of the API.

    Args:
        about: the object that it happened to.
        event: what happened.
        instance: the process that says so.
        time: when, as `metav1.MicroTime`.
    """
    namespace, name, uid = (about["metadata"][field] for field in ("namespace", "name", "uid"))
    note = event.message if event.group is None else f"group {event.group}: {event.message}"
    identity = hashlib.sha256("\n".join((uid, event.reason, note)).encode()).hexdigest()[:16]
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {"name": f"{name}.{identity}", "namespace": namespace},
        "eventTime": time,
        "reportingController": _CONTROLLER,
        "reportingInstance": instance,
        "type": event.type.value,
        "reason": event.reason.value,
        "action": "Reconcile",
        "note": note.encode()[:_LONGEST_NOTE].decode(errors="ignore"),
        "regarding": {
            "apiVersion": DSV4_DEPLOYMENTS.api_version,
            "kind": DSV4_DEPLOYMENTS.kind,
            "namespace": namespace,
            "name": name,
            "uid": uid,
        },
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
