"""The agent's HTTP API.

`/livez`, `/readyz` and `/metrics` are open, as kubelets and Prometheus expect. `/v1/*` requires the token of the
incarnation; a refusal contains its salt (`contract.token`). `/v1/watch` streams `/v1/status`, one JSON document a line:
immediately after changes of phase, verdict, progress or engine generation, otherwise once a second; the stream ends
with the agent. On rank 0 `/v1/watch?group=1` streams the whole group (`GroupReport`). `POST /v1/drain?seconds=20`
starts the drain of a healthy engine, bounded from the first such request, and returns its progress without waiting
(`DrainReport`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dsv4_runtime.agent.decide.events import Peer
from dsv4_runtime.agent.record import Changes
from dsv4_runtime.contract import (
    AgentStatus,
    DrainReport,
    EngineStatus,
    FabricStatus,
    GpuSignals,
    GroupReport,
    Health,
    MemoryUse,
    Phase,
    Signals,
)
from dsv4_runtime.contract.token import CHALLENGE, challenge

# A client that receives nothing for a few of these treats the agent or the link as lost.
_WATCH_SECONDS = 1.0
# Interval between checks of the other members' statuses, for clients that watch the group.
_PEERS_SECONDS = 0.1
# Age of a sample of the GPUs from which on their power is not taken for the present one.
_POWER_SECONDS = 5.0


class Reporter(Protocol):
    """Part of the agent that the API reads."""

    @property
    def changes(self) -> Changes:
        """Return the notifications of status changes."""

    def status(self) -> AgentStatus:
        """Return the member's status now."""

    def others(self) -> Mapping[int, Peer]:
        """Return the other members by rank, with their latest answers."""

    def evidence(self) -> dict[str, object]:
        """Return the first fatal lines and last lines of every log, as JSON values; never a prompt."""

    def drain(self, seconds: float) -> DrainReport:
        """Start to drain a serving engine, unless it drains already; return the progress."""


class _Collector:
    """Metrics computed from the status at every scrape, so that both always agree."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def collect(self) -> Iterable[Metric]:
        status = self._reporter.status()
        phase = GaugeMetricFamily("dsv4_agent_phase", "1 for the member's present phase", labels=["phase"])
        for value in Phase:
            phase.add_metric([value.value], float(status.phase is value))
        yield phase
        yield GaugeMetricFamily(
            "dsv4_agent_incarnation", "Incarnation that the member belongs to", value=status.incarnation
        )
        joined = float(status.joined)
        yield GaugeMetricFamily("dsv4_agent_ray_joined", "1 if the member's Ray node is in the cluster", value=joined)
        health = GaugeMetricFamily("dsv4_agent_health", "1 for the health in the verdict", labels=["health"])
        for verdict in Health:
            health.add_metric([verdict.value], float(status.verdict.health is verdict))
        yield health
        yield GaugeMetricFamily(
            "dsv4_agent_gpu_warnings",
            "Conditions that make a GPU slow: clock, power, temperature",
            len(status.warnings),
        )
        yield GaugeMetricFamily(
            "dsv4_agent_weights_repaired",
            "Files of the checkpoint that were damaged and fetched again in this incarnation",
            len(status.weights_repaired),
        )
        if status.signals is not None:
            yield from _signals(status.signals)
        if status.fabric is not None:
            yield from _fabric(status.fabric)
        if status.engine is not None:
            yield GaugeMetricFamily(
                "dsv4_engine_generation", "Lives of the engine in this incarnation", value=status.engine.generation
            )
            restarts = CounterMetricFamily("dsv4_engine_restarts", "Engine restarts in place in this incarnation")
            restarts.add_metric([], len(status.engine.restarts))
            yield restarts
            yield from _memory(status.engine)
            yield from _kernels(status.engine)


def _signals(signals: Signals) -> Iterable[Metric]:
    """Yield the latest sample of the member's machine; a value that the driver does not report has no sample."""
    for name, documentation, value in (
        ("dsv4_node_memory_available_bytes", "Memory available to programs", signals.memory_available),
        ("dsv4_node_shared_memory_free_bytes", "Bytes free in /dev/shm", signals.shm_free),
    ):
        if value is not None:
            yield GaugeMetricFamily(name, documentation, value)
    for name, documentation, read in _GPU_GAUGES:
        family = GaugeMetricFamily(f"dsv4_gpu_{name}", documentation, labels=["gpu"])
        for gpu in signals.gpus:
            if (measured := read(gpu)) is not None:
                family.add_metric([str(gpu.index)], measured)
        yield family
    slowed = GaugeMetricFamily("dsv4_gpu_slowed", "1 for each reason of a low clock", labels=["gpu", "reason"])
    for gpu in signals.gpus:
        for reason in gpu.slowed_by:
            slowed.add_metric([str(gpu.index), reason], 1)
    yield slowed


_GPU_GAUGES: tuple[tuple[str, str, Callable[[GpuSignals], float | None]], ...] = (
    ("celsius", "Temperature", lambda gpu: gpu.celsius),
    ("power_watts", "Power", lambda gpu: gpu.power_watts),
    ("clock_mhz", "Clock of the multiprocessors", lambda gpu: gpu.sm_mhz),
    ("clock_max_mhz", "Highest clock of the multiprocessors", lambda gpu: gpu.sm_max_mhz),
    ("utilization", "Share of time in which it was busy, 0 to 1", lambda gpu: gpu.utilization),
    ("memory_used_bytes", "Used memory", lambda gpu: gpu.memory_used),
    ("memory_bytes", "Memory", lambda gpu: gpu.memory_total),
)


def _fabric(fabric: FabricStatus) -> Iterable[Metric]:
    rails = sum(rail.hca is not None for rail in fabric.rails)
    yield GaugeMetricFamily("dsv4_fabric_rdma_rails", "Addresses of the member with an RDMA device", rails)
    if fabric.bandwidth is not None:
        documentation = "Bus bandwidth of an all-reduce, measured before the load, in bytes a second"
        yield GaugeMetricFamily("dsv4_fabric_bandwidth_bytes", documentation, fabric.bandwidth)
    if fabric.transport is not None:
        transport = GaugeMetricFamily("dsv4_fabric_transport", "1 for NCCL's transport", labels=["transport"])
        transport.add_metric([fabric.transport], 1)
        yield transport


def _memory(engine: EngineStatus) -> Iterable[Metric]:
    for name, documentation, value in (
        ("tokens", "Size of the KV cache in tokens, as logged", engine.kv_cache_tokens),
        ("planned_tokens", "Size of the KV cache in tokens in the memory plan", engine.kv_planned_tokens),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"dsv4_engine_kv_cache_{name}", documentation, value)
    memory = GaugeMetricFamily(
        "dsv4_engine_memory_over_plan_bytes", "Logged minus planned bytes of an item of the plan", labels=["item"]
    )
    for item, difference in engine.memory.items():
        memory.add_metric([item], difference)
    yield memory


def _kernels(engine: EngineStatus) -> Iterable[Metric]:
    provider = GaugeMetricFamily(
        "dsv4_kernel_provider",
        "1 for the provider that computes an operation; stock is vLLM's own selection",
        labels=["op", "provider"],
    )
    slowness = GaugeMetricFamily(
        "dsv4_kernel_slowness",
        "Time of a provider that was tried over the fastest right one's",
        labels=["op", "provider"],
    )
    excluded = GaugeMetricFamily(
        "dsv4_kernel_excluded", "1 for a provider excluded by a trial", labels=["op", "provider", "seen"]
    )
    for found in engine.kernels:
        provider.add_metric([found.op, found.provider], 1)
        for standing in found.standings:
            if standing.excluded is not None:
                excluded.add_metric([found.op, standing.provider, standing.excluded], 1)
            elif standing.slowness is not None:
                slowness.add_metric([found.op, standing.provider], standing.slowness)
    yield from (provider, slowness, excluded)


def group_report(status: AgentStatus, others: Mapping[int, Peer], now: float) -> GroupReport:
    """Return the report of the member with `status` on its group; `now` is monotonic time."""
    heard = {rank: (peer.status, peer.heard) for rank, peer in others.items()}
    ages = {rank: round(max(0.0, now - when), 3) for rank, (_, when) in heard.items() if when is not None}
    members = [status, *(said for said, _ in heard.values() if said is not None)]
    return GroupReport(
        ages={status.rank: 0.0, **ages},
        memory={one.rank: memory_use(one.signals) for one in members if one.signals is not None},
        members=tuple(sorted((_lasting(one) for one in members), key=lambda one: one.rank)),
    )


def memory_use(signals: Signals) -> MemoryUse:
    """Return the memory in a sample; of GPUs only if the driver reports it for all of them."""
    used = [gpu.memory_used for gpu in signals.gpus if gpu.memory_used is not None]
    total = [gpu.memory_total for gpu in signals.gpus if gpu.memory_total is not None]
    known = bool(used) and len(used) == len(total) == len(signals.gpus)
    return MemoryUse(
        available=signals.memory_available,
        gpu_used=sum(used) if known else None,
        gpu_total=sum(total) if known else None,
    )


def group_watts(status: AgentStatus, others: Mapping[int, Peer]) -> float | None:
    """Return the power of all GPUs of the group; None if a member does not report that of each of its GPUs."""
    members = [status.signals, *(peer.status.signals if peer.status is not None else None for peer in others.values())]
    watts: list[float | None] = []
    for signals in members:
        if signals is None or not signals.gpus or signals.gpus_age > _POWER_SECONDS:
            return None
        watts += [gpu.power_watts for gpu in signals.gpus]
    known = [each for each in watts if each is not None]
    return round(sum(known), 1) if len(known) == len(watts) else None


def _lasting(status: AgentStatus) -> AgentStatus:
    """Return `status` without the fields that change in every sample."""
    return status.model_copy(update={"signals": None, "time": status.phase_time})


def application(reporter: Reporter, token: str) -> web.Application:
    """Return the routes; `token` opens `/v1/*`."""

    @web.middleware
    async def authenticate(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path.startswith("/v1/"):
            given = request.headers.get("Authorization", "")
            # Invalid UTF-8 arrives as surrogates.
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), f"Bearer {token}".encode()):
                raise web.HTTPUnauthorized(
                    headers={CHALLENGE: challenge(token)},
                    text="send the incarnation's token: Authorization: Bearer <token>\n",
                )
        return await handler(request)

    handlers = _Handlers(reporter)
    app = web.Application(middlewares=[authenticate])
    app.router.add_get("/v1/status", handlers.status)
    app.router.add_get("/v1/watch", handlers.watch)
    app.router.add_get("/v1/evidence", handlers.evidence)
    app.router.add_post("/v1/drain", handlers.drain)
    app.router.add_get("/livez", handlers.livez)
    app.router.add_get("/readyz", handlers.readyz)
    app.router.add_get("/metrics", handlers.metrics)
    return app


class _Handlers:
    """Handlers of the routes."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._registry = CollectorRegistry(auto_describe=True)
        self._registry.register(_Collector(reporter))

    async def status(self, _: web.Request) -> web.Response:
        return web.Response(text=self._reporter.status().to_json(), content_type="application/json")

    async def watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await response.prepare(request)
        # The client may disconnect at any time.
        with contextlib.suppress(ConnectionResetError):
            await (self._watch_group if request.query.get("group") == "1" else self._watch_own)(response)
        return response

    async def _watch_group(self, response: web.StreamResponse) -> None:
        reporter = self._reporter
        told, told_time = None, 0.0
        while True:
            change, now = reporter.changes.next, time.monotonic()
            status = reporter.status()
            report = group_report(status, reporter.others(), now)
            if report.members != told or now - told_time >= _WATCH_SECONDS:
                line = report if report.members != told else report.model_copy(update={"members": None})
                await response.write(line.to_json().encode() + b"\n")
                told, told_time = report.members, now
            if status.phase is Phase.STOPPED:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PEERS_SECONDS):
                    await change.wait()

    async def _watch_own(self, response: web.StreamResponse) -> None:
        ended = False
        while not ended:
            change, now = self._reporter.changes.next, self._reporter.status()
            if now.engine is not None:
                now = now.model_copy(update={"group_watts": group_watts(now, self._reporter.others())})
            await response.write(now.to_json().encode() + b"\n")
            ended = now.phase is Phase.STOPPED
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_SECONDS):
                    await change.wait()

    async def evidence(self, _: web.Request) -> web.Response:
        return web.json_response(self._reporter.evidence())

    async def drain(self, request: web.Request) -> web.Response:
        given = request.query.get("seconds", "")
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            raise web.HTTPBadRequest(text=f"seconds: {given!r} is no number from 0 on; write /v1/drain?seconds=20\n")
        return web.Response(text=self._reporter.drain(seconds).to_json(), content_type="application/json")

    async def livez(self, _: web.Request) -> web.Response:
        # Liveness of the agent alone: the agent handles an engine's death, not the kubelet.
        return web.Response(text="ok\n")

    async def readyz(self, _: web.Request) -> web.Response:
        phase = self._reporter.status().phase
        return web.Response(text=f"{phase}\n", status=200 if phase is Phase.SERVING else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), content_type="text/plain", charset="utf-8")
