"""Metrics, probes, Kubernetes events and the status page of the operator."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dsv4_operator.api import (
    ConditionStatus,
    ConditionType,
    DeploymentPhase,
    DeploymentStatus,
    DSV4Deployment,
    GroupPhase,
    GroupStatus,
    InvalidDeployment,
)
from dsv4_operator.api.deployment import API_VERSION, parse
from dsv4_operator.api.status import read_status
from dsv4_operator.controller.lease import micro_time
from dsv4_operator.kube import DSV4_DEPLOYMENTS, EVENTS, AlreadyExists, Client, KubeError, Manifest, NotFound
from dsv4_operator.lifecycle import Event, given_up
from dsv4_operator.lifecycle.status import page_failures
from dsv4_operator.planning.revision import last_valid
from dsv4_runtime.contract import Health
from dsv4_runtime.contract.gateway import (
    EVENT_HEADERS,
    VIEW_SECONDS,
    VIEWERS,
    CanaryReport,
    Figures,
    PageBudget,
    PageCache,
    PageDeployment,
    PageGroup,
    PageMember,
    PageRequests,
    PageVerdict,
    StatusPage,
    api_keys,
    page_event,
    page_file,
)
from dsv4_runtime.contract.recovery import within
from dsv4_runtime.contract.status import RECENT_SECONDS
from dsv4_runtime.util.clock import unix_time
from dsv4_runtime.util.sse import Feed, FeedFullError, payload

_log = logging.getLogger("dsv4")

_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 30, 60)
_PARTS = ("observe", "machines", "decide", "plan", "act", "frontend", "status")


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
        for part in _PARTS:
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
        failing: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """Compute the gauges at every scrape.

        Args:
            deployments: all of them, with their status.
            leading: whether this process acts.
            waiting: deployments in the work queue.
            certificate_end: Unix time at which the webhook's certificate expires; None without a webhook.
            failing: the name of every part of a reconcile whose latest attempt failed.
        """
        self._registry.register(_StatusCollector(deployments, leading, waiting, certificate_end, failing))

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
    failing: Callable[[], Iterable[str]]

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
        failing = GaugeMetricFamily(
            "dsv4_operator_failing", "Parts of reconciles whose latest attempt failed", labels=["part"]
        )
        now = Tally(self.failing())
        for part in _PARTS:
            failing.add_metric([part], now[part])
        yield failing
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
            # `kubectl events --for` compares this with the newest served version.
            "apiVersion": API_VERSION,
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


_STARTING = frozenset(
    {
        GroupPhase.PENDING,
        GroupPhase.FORMING,
        GroupPhase.QUEUED,
        GroupPhase.STARTING,
        GroupPhase.UPDATING,
    }
)
_DEAD = frozenset({GroupPhase.RESTARTING, GroupPhase.RECOVERING, GroupPhase.FAILED})


def page_entries(manifest: Manifest, now: float) -> tuple[PageDeployment, tuple[PageGroup, ...]]:
    """Return the entries of a DSV4Deployment on the status page; `now` is Unix time.

    A specification that breaks a rule is replaced by the last valid one; without one, only the status is shown.
    """
    metadata = manifest["metadata"]
    key, status = f"{metadata['namespace']}/{metadata['name']}", read_status(manifest.get("status"))
    deployment = _valid(manifest, status)
    groups = tuple(_page_group(key, group, deployment, status, now) for group in status.groups)
    problems = [
        found.message
        for kind in (ConditionType.ACCEPTED, ConditionType.READY)
        if (found := status.condition(kind)) is not None and found.status is not ConditionStatus.TRUE
    ]
    return (
        PageDeployment(
            key=key,
            phase=status.phase.value,
            message="; ".join(dict.fromkeys(filter(None, problems))),
            ready=status.ready_replicas,
            wanted=deployment.spec.replicas if deployment is not None else status.replicas,
            models=deployment.served_names if deployment is not None else (),
            endpoint=status.endpoint or "",
            dashboard=status.ray_dashboard or "",
        ),
        groups,
    )


def _valid(manifest: Manifest, status: DeploymentStatus) -> DSV4Deployment | None:
    about = {name: manifest["metadata"].get(name) for name in ("name", "namespace", "uid", "generation")}
    given = {**manifest, "metadata": about, "status": status}
    try:
        return parse(given)
    except InvalidDeployment:
        found = last_valid(given, status)
        return found.deployment if found is not None else None


def _page_group(
    key: str, group: GroupStatus, deployment: DSV4Deployment | None, status: DeploymentStatus, now: float
) -> PageGroup:
    serves, failure = group.phase is GroupPhase.SERVING, group.last_failure
    verdict = None
    if serves or group.phase in _STARTING:
        verdict = PageVerdict(health=Health.HEALTHY if serves else Health.STARTING)
    elif group.phase in _DEAD:
        verdict = PageVerdict(health=Health.DEAD)
        if failure is not None:
            verdict = PageVerdict(health=Health.DEAD, cause=failure.cause, message=failure.message)
    budget = cache = None
    if deployment is not None:
        policy = deployment.spec.recovery.policy()
        allowed, window = policy.max_restarts, policy.window_seconds
        budget = PageBudget.of(allowed, window, group.restarts, now, group.next_restart_time)
    if group.kv_cache is not None:
        cache = PageCache(
            tokens=group.kv_cache.tokens,
            planned_tokens=group.kv_cache.planned_tokens,
            concurrency=group.kv_cache.concurrency,
        )
    return PageGroup(
        deployment=key,
        index=group.index,
        phase=group.phase.value,
        since=group.phase_time,
        incarnation=group.incarnation,
        generation=group.engine_generation,
        ready_since=group.ready_time if serves else None,
        expected_ready_seconds=group.expected_ready_seconds,
        message=(given_up(deployment, status, group.index) or "") if deployment is not None else "",
        verdict=verdict,
        members=tuple(
            PageMember(
                rank=member.rank,
                node=member.node,
                phase=member.phase.value if member.phase is not None else "",
                since=member.phase_time,
                message=member.message,
                warnings=member.warnings,
                silent_since=member.silent_since,
            )
            for member in group.members
        ),
        budget=budget,
        total_restarts=group.total_restarts,
        cache=cache,
        memory={item.item: item.difference for item in group.measured.items} if group.measured is not None else {},
        kernels=group.kernels,
        failures=page_failures(group),
    )


def with_figures(
    entries: tuple[PageDeployment, tuple[PageGroup, ...]], reports: Mapping[str, tuple[float, Figures]], now: float
) -> tuple[PageDeployment, tuple[PageGroup, ...]]:
    """Return entries with the fresh figures of the deployment's gateways.

    Requests are the sum over the gateways that reported; the load of a serving group is that of the latest report.
    """
    fresh = sorted(
        ((time, found) for time, found in reports.values() if now - time < _FIGURES_SECONDS), key=lambda one: one[0]
    )
    if not fresh:
        return entries
    deployment, groups = entries
    counts = [found.requests.model_dump() for _, found in fresh]
    requests = PageRequests(**{name: sum(one[name] for one in counts) for name in counts[0]})
    loads = fresh[-1][1].loads
    filled = []
    for group in groups:
        load = loads.get(group.index) if group.phase == GroupPhase.SERVING else None
        cache = group.cache
        if load is not None and cache is not None:
            cache = cache.model_copy(update={"usage": load.usage})
        filled.append(group.model_copy(update={"load": load, "cache": cache}))
    return deployment.model_copy(update={"requests": requests}), tuple(filled)


class Fleet:
    """Document of the status page with every deployment."""

    def __init__(self, manifests: Callable[[], Awaitable[Iterable[Manifest]]], clock: Callable[[], float] = unix_time):
        """`manifests` returns the latest objects."""
        self._manifests, self._clock = manifests, clock
        self._known: dict[str, tuple[tuple[str, str, int], tuple[PageDeployment, tuple[PageGroup, ...]]]] = {}
        """By key: version of the object and time in steps, and its entries."""
        self._figures: dict[str, dict[str, tuple[float, Figures]]] = {}
        """By key and gateway: time of its latest report, and its figures."""

    def take(self, namespace: str, name: str, report: CanaryReport) -> None:
        """Take a gateway's report on a deployment."""
        if report.figures is None:
            return
        now, key = self._clock(), f"{namespace}/{name}"
        fresh = {
            gateway: found for gateway, found in self._figures.pop(key, {}).items() if now - found[0] < _FIGURES_SECONDS
        }
        self._figures[key] = {**fresh, report.gateway: (now, report.figures)}
        if len(self._figures) > _MOST_FIGURES:
            del self._figures[next(iter(self._figures))]

    async def make(self) -> StatusPage:
        """Return the present document; an unchanged object is read again only for its budget, every few seconds."""
        now, known = self._clock(), self._known
        self._known = {}
        for manifest in await self._manifests():
            metadata = manifest["metadata"]
            key = f"{metadata['namespace']}/{metadata['name']}"
            version = str(metadata["uid"]), str(metadata["resourceVersion"]), int(now / _PAGE_STEP_SECONDS)
            before = known.get(key)
            entries = before[1] if before is not None and before[0] == version else page_entries(manifest, now)
            self._known[key] = version, entries
        found = [
            with_figures(entries, self._figures.get(key, {}), now) for key, (_, entries) in sorted(self._known.items())
        ]
        return StatusPage(
            source="operator",
            time=round(now, 1),
            deployments=tuple(deployment for deployment, _ in found),
            groups=tuple(group for _, groups in found for group in groups),
        )


_PAGE_STEP_SECONDS = 10.0
_FIGURES_SECONDS = 120.0
"""Age up to which a gateway's figures are shown: each deployment is asked every 30 s, through one of its gateways."""
_MOST_FIGURES = 10_000
_PAGE_CONNECTIONS = 64
"""Beyond it, requests are refused and their connections closed."""
_PAGE = "/dsv4/status"
_READ_SECONDS = 10.0
"""Time for which a request for the document waits for the first one."""


class PageServer:
    """Serves the status page; its data require one of the keys in a file, in the form of the gateway's API keys."""

    def __init__(self, port: int, keys: Path, make: Callable[[], Awaitable[StatusPage]]) -> None:
        """Serve on `port`, on all addresses.

        Raises:
            ValueError: the file of keys cannot be read or has no key; the message has the remedy.
        """
        self._port, self._keys = port, keys
        if not self._digests():
            raise ValueError("it has no key; write one a line")
        self.feed = Feed(make, page_event, limit=VIEWERS)
        application = web.Application(middlewares=[self._admit])
        application.router.add_get("/", self._redirect)
        application.router.add_get(_PAGE, self._page)
        application.router.add_get(f"{_PAGE}.json", self._document)
        application.router.add_get(f"{_PAGE}/events", self._stream, allow_head=False)
        self._runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0, keepalive_timeout=15.0
        )

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        await self._runner.setup()
        await web.TCPSite(self._runner, None, self._port).start()

    async def close(self) -> None:
        await self.feed.close()
        await self._runner.cleanup()

    def _digests(self) -> list[bytes]:
        try:
            return [_digest(key.encode()) for key in api_keys(self._keys.read_text(encoding="utf-8"))]
        except UnicodeDecodeError:
            raise ValueError("it is not UTF-8; write one key a line in UTF-8") from None
        except OSError as error:
            raise ValueError(f"{error.strerror or error}; mount the Secret with the keys") from error

    def _known(self, request: web.Request) -> bool:
        """Return whether the request has a key, compared with the present file in constant time."""
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = request.headers.get("X-Api-Key", "")
        digest, found = _digest(given.strip().encode(errors="surrogateescape")), False
        try:
            for known in self._digests():
                found |= hmac.compare_digest(known, digest)
        except ValueError as error:
            _log.warning("--page-keys %s: %s; all requests for the status page are refused", self._keys, error)
        return found

    @web.middleware
    async def _admit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        server = self._runner.server
        if server is not None and len(server.connections) > _PAGE_CONNECTIONS:
            refused = web.Response(status=503, text="too many connections\n", headers={"Retry-After": "10"})
            refused.force_close()
            return refused
        if request.path not in ("/", _PAGE) and not self._known(request):
            return web.Response(
                status=401, text="send a key: Authorization: Bearer <key>\n", headers={"WWW-Authenticate": "Bearer"}
            )
        return await handler(request)

    async def _redirect(self, _: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(_PAGE)

    async def _page(self, _: web.Request) -> web.StreamResponse:
        body, headers = page_file(key=True)
        return web.Response(body=body, headers=headers)

    async def _document(self, _: web.Request) -> web.StreamResponse:
        with self._place(), contextlib.suppress(StopAsyncIteration):
            async with contextlib.aclosing(self.feed.events(_READ_SECONDS)) as events:
                body = payload(await anext(events))
            return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})
        return web.Response(status=503, text="the deployments cannot be read\n")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        with self._place():
            response = web.StreamResponse(headers=EVENT_HEADERS)
            await response.prepare(request)
            async with contextlib.aclosing(self.feed.events(VIEW_SECONDS)) as events:
                # The client may leave at any time.
                with contextlib.suppress(ConnectionResetError):
                    async for event in events:
                        async with asyncio.timeout(_READ_SECONDS):
                            await response.write(event)
            return response

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        try:
            with self.feed.place():
                yield
        except FeedFullError as error:
            raise web.HTTPServiceUnavailable(
                text=f"the status page has {error}\n", headers={"Retry-After": "10"}
            ) from error


def _digest(key: bytes) -> bytes:
    # Of one length, so that a comparison reveals nothing about the length of a key.
    return hashlib.sha256(key).digest()
