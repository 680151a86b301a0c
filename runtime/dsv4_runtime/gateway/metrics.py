"""Metrics of the gateway; vLLM's are appended under their own names."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from dsv4_runtime.contract.status import RECENT_SECONDS
from dsv4_runtime.gateway.errors import Outcome, Refusal
from dsv4_runtime.gateway.routing import Availability, Groups
from dsv4_runtime.util.clock import unix_time

_HOLD_BUCKETS = (0.1, 0.5, 1, 2, 5, 10, 20, 40, 60, 120, 240, 600)
_FIRST_BYTE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class GatewayMetrics:
    """Metrics in a separate registry: the metrics text of vLLM contains those of its process."""

    def __init__(self, number: int | None = None) -> None:
        """Args:
        number: index of this gateway among several at one address, used as a label; None: no label.
        """
        self._number = number
        self._registry = CollectorRegistry(auto_describe=True)
        counter = partial(Counter, registry=self._registry)
        gauge = partial(Gauge, registry=self._registry)
        histogram = partial(Histogram, registry=self._registry)
        self.requests = counter("dsv4_gateway_requests", "Requests by outcome", ["outcome"])
        for outcome in Outcome:
            # Rates need an initial zero.
            self.requests.labels(outcome)
        refused = "Requests refused before they were handled, and refused connections"
        self._refused = counter("dsv4_gateway_refused", refused, ["code"])
        for code in ("malformed_request", "head_too_large", "overloaded", "invalid_api_key"):
            self._refused.labels(code)
        self._refusals: dict[str, tuple[Counter, Counter]] = {}
        """Counters by code."""
        self._client_bytes = gauge("dsv4_gateway_client_bytes", "Bytes kept for clients")
        self._active = gauge("dsv4_gateway_active", "Requests in progress")
        self.held = gauge("dsv4_gateway_held", "Requests waiting for an engine")
        self.held_bytes = gauge("dsv4_gateway_held_bytes", "Bytes of the bodies of waiting requests")
        self.replayed = counter("dsv4_gateway_replayed", "Requests repeated from their start")
        self.continued = counter("dsv4_gateway_continued", "Streams continued after an engine failure")
        rejected = "1 while no agent accepts this gateway and one rejects its credentials"
        self._rejected = gauge("dsv4_gateway_credentials_rejected", rejected)
        self.cut = counter("dsv4_gateway_cut", "Started responses that ended with an error")
        self.hold = histogram(
            "dsv4_gateway_hold_seconds", "Time that requests waited for an engine", buckets=_HOLD_BUCKETS
        )
        first_byte = "Time from a request to the first byte of its response"
        self.first_byte = histogram("dsv4_gateway_first_byte_seconds", first_byte, buckets=_FIRST_BYTE_BUCKETS)

    def refuse(self, refusal: Refusal) -> None:
        """Count a refused request."""
        if (counters := self._refusals.get(refusal.code)) is None:
            counters = self.requests.labels(refusal.outcome), self._refused.labels(refusal.code)
            self._refusals[refusal.code] = counters
        for counter in counters:
            counter.inc()

    def observe(self, groups: Groups, active: Callable[[], int], client_bytes: Callable[[], int]) -> None:
        """Compute the gauges of groups, open requests and client memory at every scrape."""
        self._registry.register(_GroupsCollector(groups))
        self._active.set_function(active)
        self._client_bytes.set_function(client_bytes)
        self._rejected.set_function(lambda: float(groups.refusal is not None))

    def text(self) -> bytes:
        """Return all metrics in Prometheus text format."""
        return generate_latest(self if self._number is not None else self._registry)

    def collect(self) -> Iterable[Metric]:
        """Add the label `gateway` to every sample, to distinguish the processes."""
        for metric in self._registry.collect():
            samples = [one._replace(labels={**one.labels, "gateway": str(self._number)}) for one in metric.samples]
            metric.samples = samples
            yield metric


def merge_metrics(texts: Sequence[bytes]) -> bytes:
    """Return several texts in Prometheus text format as one, each metric with the samples of all.

    Their samples must differ in a label.
    """
    if len(texts) == 1:
        return texts[0]
    heads, samples = dict[bytes, list[bytes]](), dict[bytes, list[bytes]]()
    for text in texts:
        name = b""
        for line in text.splitlines(keepends=True):
            if line.startswith(b"# "):
                name = line.split(b" ", 3)[2]
                if line not in heads.setdefault(name, []):
                    heads[name].append(line)
            else:
                samples.setdefault(name, []).append(line)
    return b"".join(line for name in heads for line in (*heads[name], *samples.get(name, ())))


class _GroupsCollector:
    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def collect(self) -> Iterable[Metric]:
        states = GaugeMetricFamily(
            "dsv4_gateway_engine_state", "1 for the state of a group's engine", labels=["group", "state"]
        )
        ages = GaugeMetricFamily(
            "dsv4_gateway_watch_age_seconds",
            "Seconds since the last event from the agent of the group's head",
            labels=["group"],
        )
        restarts = GaugeMetricFamily(
            "dsv4_gateway_engine_restarts", "Engine restarts in place in the present incarnation", labels=["group"]
        )
        failures = GaugeMetricFamily(
            "dsv4_gateway_engine_recent_failures",
            "Deaths of the present incarnation in the last hour by cause",
            labels=["group", "cause"],
        )
        for index, group in self._groups.all.items():
            for state in Availability:
                states.add_metric([str(index), state.value], float(state is group.engine.state))
            if (age := group.age) is not None:
                ages.add_metric([str(index)], age)
            if group.report is not None and (engine := group.report.engine) is not None:
                restarts.add_metric([str(index)], len(engine.restarts))
                now = unix_time()
                recent = Tally(one.cause for one in engine.failures if abs(now - one.time) < RECENT_SECONDS)
                for cause, number in recent.items():
                    failures.add_metric([str(index), cause.value], number)
        yield from (states, ages, restarts, failures)
