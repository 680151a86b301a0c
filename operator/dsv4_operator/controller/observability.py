"""Metrics, probes and Kubernetes events of the operator."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dsv4_operator.api import DeploymentPhase, DSV4Deployment, GroupPhase, GroupStatus
from dsv4_operator.controller.lease import micro_time
from dsv4_operator.kube import DSV4_DEPLOYMENTS, EVENTS, AlreadyExists, Client, KubeError, Manifest, NotFound
from dsv4_operator.lifecycle import Event
from dsv4_runtime.contract.recovery import within
from dsv4_runtime.contract.status import RECENT_SECONDS
from dsv4_runtime.util.clock import unix_time

_log = logging.getLogger("dsv4")

_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 30, 60)


class OperatorMetrics:
    """Counters in a registry of their own; gauges are computed at each scrape."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        registry = self._registry
        self.reconciles = Counter(
            "dsv4_operator_looks", "Turns of the reconcile loop by how they ended", ["result"], registry=registry
        )
        self.seconds = Histogram(
            "dsv4_operator_look_seconds", "How long turns took", buckets=_BUCKETS, registry=registry
        )
        self._requests = Counter(
            "dsv4_operator_requests", "Requests to the API server; status 0: no answer", ["method", "status"],
            registry=registry,
        )  # fmt: skip
        self.failures = Counter(
            "dsv4_operator_failures", "Failures of parts of the reconcile loop", ["part"], registry=registry
        )
        self._events = Counter("dsv4_operator_events", "Events of deployments", ["reason"], registry=registry)
        # A rate needs a zero before the first increment.
        for result in ("ok", "error"):
            self.reconciles.labels(result)
        for part in ("observe", "machines", "decide", "plan", "act", "frontend", "status"):
            self.failures.labels(part)

    def count_request(self, method: str, status: int) -> None:
        """Count a request that the API server answered."""
        self._requests.labels(method, status).inc()

    def count_event(self, event: Event) -> None:
        self._events.labels(event.reason.value).inc()

    def observe(
        self,
        deployments: Callable[[], Iterable[DSV4Deployment]],
        leading: Callable[[], bool],
        waiting: Callable[[], int],
        certificate_end: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Compute the gauges at every scrape.

        Args:
            deployments: all of them, with their status.
            leading: whether this process acts.
            waiting: deployments in the work queue.
            certificate_end: Unix time at which the webhook's certificate expires; None without a webhook.
        """
        self._registry.register(_StatusCollector(deployments, leading, waiting, certificate_end))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


_IDENTITY = ("namespace", "deployment", "group")


@dataclass(frozen=True, slots=True)
class _StatusCollector:
    deployments: Callable[[], Iterable[DSV4Deployment]]
    leading: Callable[[], bool]
    waiting: Callable[[], int]
    certificate_end: Callable[[], float | None]

    def collect(self) -> Iterable[Metric]:
        phases: Tally[DeploymentPhase] = Tally()
        ready = groups = restarts = 0
        families = _GroupFamilies(unix_time())
        for deployment in self.deployments():
            status = deployment.status
            phases[status.phase] += 1
            ready += status.ready_replicas
            groups += status.replicas
            for group in status.groups:
                restarts += group.total_restarts
                families.add(deployment, group)
        family = GaugeMetricFamily("dsv4_deployments", "Deployments by phase", labels=["phase"])
        for phase in DeploymentPhase:
            family.add_metric([phase.value], phases[phase])
        yield family
        yield GaugeMetricFamily("dsv4_groups", "Groups that exist", groups)
        yield GaugeMetricFamily("dsv4_groups_ready", "Groups that answer", ready)
        yield GaugeMetricFamily("dsv4_restarts", "Restarts of any level of the groups that exist", restarts)
        yield from families.all
        yield GaugeMetricFamily("dsv4_operator_leading", "1 while this process holds the lease", int(self.leading()))
        yield GaugeMetricFamily("dsv4_operator_queue", "Deployments in the work queue", self.waiting())
        certificate = GaugeMetricFamily(
            "dsv4_operator_certificate_expiry_timestamp_seconds", "Unix time at which the webhook's certificate expires"
        )
        if (end := self.certificate_end()) is not None:
            certificate.add_metric([], end)
        yield certificate


class _GroupFamilies:
    """Metrics of each group, from its status."""

    def __init__(self, now: float) -> None:
        self._now = now
        self.phase = _group_gauge("phase", "1 for the group's present phase", "phase")
        self.restarts = CounterMetricFamily(
            "dsv4_group_restarts", "Restarts of any level since the deployment was created", labels=_IDENTITY
        )
        self.allowed = _group_gauge("restarts_allowed", "Restarts that spec.recovery allows in its window")
        self.left = _group_gauge("restarts_left", "Restarts left in the present window of spec.recovery")
        self.failures = _group_gauge(
            "recent_failures", "Deaths in the last hour by cause, of the latest 10 in the status", "cause"
        )
        self.recovery = _group_gauge("recovery_seconds", "Time from the latest death to the next checked completion")
        self.slow = _group_gauge("slow_members", "Members with a GPU that is throttled or hot")
        self.tokens = _group_gauge("kv_cache_tokens", "Size of the KV cache in tokens, as the engine reported it")
        self.planned = _group_gauge("kv_cache_planned_tokens", "Size of the KV cache in tokens in the memory plan")
        self.memory = _group_gauge(
            "memory_over_plan_bytes", "Measured minus planned bytes of an item of the memory plan", "item"
        )

    def add(self, deployment: DSV4Deployment, group: GroupStatus) -> None:
        labels = [deployment.metadata.namespace, deployment.metadata.name, str(group.index)]
        for phase in GroupPhase:
            self.phase.add_metric([*labels, phase.value], float(group.phase is phase))
        policy = deployment.spec.recovery.policy()
        spent = len(within(policy.window_seconds, group.restarts, self._now))
        self.restarts.add_metric(labels, group.total_restarts)
        self.allowed.add_metric(labels, policy.max_restarts)
        self.left.add_metric(labels, max(0, policy.max_restarts - spent))
        recent = Tally(one.cause for one in group.history if abs(self._now - one.time) < RECENT_SECONDS)
        for cause, number in recent.items():
            self.failures.add_metric([*labels, cause.value], number)
        if group.last_failure is not None and group.last_failure.recover_seconds is not None:
            self.recovery.add_metric(labels, group.last_failure.recover_seconds)
        self.slow.add_metric(labels, sum(bool(member.warnings) for member in group.members))
        if group.kv_cache is not None:
            self.tokens.add_metric(labels, group.kv_cache.tokens)
            if group.kv_cache.planned_tokens is not None:
                self.planned.add_metric(labels, group.kv_cache.planned_tokens)
        for item in group.measured.items if group.measured is not None else ():
            self.memory.add_metric([*labels, item.item], item.difference)

    @property
    def all(self) -> Iterable[Metric]:
        return [found for found in vars(self).values() if isinstance(found, Metric)]


def _group_gauge(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"dsv4_group_{name}", documentation, labels=[*_IDENTITY, *labels])


_CONTROLLER = "dsv4.dev/operator"
_LONGEST_NOTE = 1024
_WAITING = 10_000
_PAUSE_SECONDS = 0.05
"""Interval between events: when hundreds of groups form or die at once, other requests are more urgent."""
_REMEMBERED = 1000


class Recorder:
    """Posts events in the background, so that no recovery waits for them; failures are only logged.

    The name of an event is a hash of its content, so a repeated event, also of another process, increments a count.
    """

    def __init__(self, kube: Client, instance: str) -> None:
        self._kube = kube
        self._instance = instance
        self._queue: asyncio.Queue[Manifest] = asyncio.Queue(_WAITING)
        self._counts: OrderedDict[tuple[str, str], int] = OrderedDict()

    def record(self, about: Manifest, event: Event) -> None:
        """Log `event` about an object, and queue it for posting."""
        where = "{namespace}/{name}".format_map(about["metadata"])
        _log.info("%s: %s %s: %s", where, event.type, event.reason, event.message)
        try:
            self._queue.put_nowait(event_manifest(about, event, self._instance, micro_time()))
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
        # Evict the least recently used entry.
        self._counts[namespace, name] = count + 1
        if len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)

    async def _count(self, manifest: Manifest, count: int) -> None:
        about = manifest["metadata"]
        series = {"count": count + 1, "lastObservedTime": manifest["eventTime"]}
        await self._kube.patch(EVENTS, about["namespace"], about["name"], {"series": series})


def event_manifest(about: Manifest, event: Event, instance: str, time: str) -> Manifest:
    """Return `event`, about the object `about`, as an API object; `time` is a `metav1.MicroTime`."""
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


_TEXT = "text/plain; version=0.0.4; charset=utf-8"

Problem = Callable[[], str | None]
"""Returns the problem as text; None if there is none."""


class ProbeServer:
    """Serves probes and metrics."""

    def __init__(self, port: int, *, live: Problem, ready: Problem, metrics: Callable[[], bytes]) -> None:
        """Serve on `port`, on all addresses; a problem of `live` requires a restart of the process."""
        self._port = port
        application = web.Application()
        application.router.add_get("/livez", _probe(live))
        application.router.add_get("/readyz", _probe(ready))

        async def scrape(_: web.Request) -> web.Response:
            return web.Response(body=metrics(), headers={"Content-Type": _TEXT})

        application.router.add_get("/metrics", scrape)
        self._runner = web.AppRunner(application, access_log=None)

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        await self._runner.setup()
        await web.TCPSite(self._runner, None, self._port).start()

    async def close(self) -> None:
        await self._runner.cleanup()


def _probe(problem: Problem) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_: web.Request) -> web.StreamResponse:
        wrong = problem()
        return web.Response(status=503 if wrong else 200, text=(wrong or "ok") + "\n")

    return answer
