"""Metrics of the operator."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from dsv4_operator.api import DeploymentPhase, DeploymentStatus
from dsv4_operator.lifecycle import Event

_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 30, 60)


class OperatorMetrics:
    """Counters in a registry of their own; what can be looked up is looked up at each scrape."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        registry = self._registry
        self.looks = Counter(
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
        self._events = Counter("dsv4_operator_events", "What happened to deployments", ["reason"], registry=registry)
        # A rate needs the zero before the first.
        for result in ("ok", "error"):
            self.looks.labels(result)
        for part in ("observe", "machines", "decide", "plan", "act", "frontend", "status"):
            self.failures.labels(part)

    def asked(self, method: str, status: int) -> None:
        """Count a request that the API server answered."""
        self._requests.labels(method, status).inc()

    def happened(self, event: Event) -> None:
        """Count something that happened to a deployment."""
        self._events.labels(event.reason.value).inc()

    def observe(
        self,
        statuses: Callable[[], Iterable[DeploymentStatus]],
        leading: Callable[[], bool],
        waiting: Callable[[], int],
    ) -> None:
        """Have the state computed at every scrape.

        Args:
            statuses: of all deployments.
            leading: whether this process acts.
            waiting: deployments in the work queue.
        """
        self._registry.register(_StatusCollector(statuses, leading, waiting))

    def text(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self._registry)


class _StatusCollector:
    def __init__(
        self,
        statuses: Callable[[], Iterable[DeploymentStatus]],
        leading: Callable[[], bool],
        waiting: Callable[[], int],
    ) -> None:
        self._statuses, self._leading, self._waiting = statuses, leading, waiting

    def collect(self) -> Iterable[Metric]:
        phases: Tally[DeploymentPhase] = Tally()
        ready = groups = restarts = 0
        for status in self._statuses():
            phases[status.phase] += 1
            ready += status.ready_replicas
            groups += status.replicas
            restarts += sum(group.total_restarts for group in status.groups)
        family = GaugeMetricFamily("dsv4_deployments", "Deployments by phase", labels=["phase"])
        for phase in DeploymentPhase:
            family.add_metric([phase.value], phases[phase])
        yield family
        yield GaugeMetricFamily("dsv4_groups", "Groups that exist", groups)
        yield GaugeMetricFamily("dsv4_groups_ready", "Groups that answer", ready)
        yield GaugeMetricFamily("dsv4_restarts", "Restarts of any level of the groups that exist", restarts)
        yield GaugeMetricFamily("dsv4_operator_leading", "1 while this process holds the lease", int(self._leading()))
        yield GaugeMetricFamily("dsv4_operator_queue", "Deployments in the work queue", self._waiting())


__all__ = ["OperatorMetrics"]
