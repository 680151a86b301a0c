"""Metrics and traces of the gateway; vLLM's metrics are appended under their own names."""

from __future__ import annotations

import logging
import threading
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from dsv4_runtime.contract.status import RECENT_SECONDS
from dsv4_runtime.gateway.errors import Outcome, Refusal
from dsv4_runtime.gateway.routing import Availability, Groups
from dsv4_runtime.util import TRACES, trace_receiver
from dsv4_runtime.util.clock import unix_time

if TYPE_CHECKING:
    from opentelemetry.trace import Span

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

    def observe(
        self,
        groups: Groups,
        active: Callable[[], int],
        client_bytes: Callable[[], int],
        overdue: Callable[[], float] | None = None,
    ) -> None:
        """Compute the gauges of groups, open requests, client memory and control loop at every scrape.

        Args:
            groups: groups of the deployment.
            active: returns the number of open requests.
            client_bytes: returns the bytes kept for clients.
            overdue: returns the seconds since a reconcile of the control loop was due; None: the loop tells nothing.
        """
        self._registry.register(_GroupsCollector(groups))
        self._active.set_function(active)
        self._client_bytes.set_function(client_bytes)
        self._rejected.set_function(lambda: float(groups.refusal is not None))
        if overdue is not None:
            late = "Seconds for which a successful reconcile of the control loop has been overdue"
            Gauge("dsv4_gateway_loop_overdue_seconds", late, registry=self._registry).set_function(overdue)

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
        watts = GaugeMetricFamily(
            "dsv4_gateway_group_watts", "Power of all GPUs of the group, if all of them report it", labels=["group"]
        )
        for index, group in self._groups.all.items():
            for state in Availability:
                states.add_metric([str(index), state.value], float(state is group.engine.state))
            if (age := group.age) is not None:
                ages.add_metric([str(index)], age)
            if group.connected and group.report is not None and group.report.group_watts is not None:
                watts.add_metric([str(index)], group.report.group_watts)
            if group.report is not None and (engine := group.report.engine) is not None:
                restarts.add_metric([str(index)], len(engine.restarts))
                now = unix_time()
                recent = Tally(one.cause for one in engine.failures if abs(now - one.time) < RECENT_SECONDS)
                for cause, number in recent.items():
                    failures.add_metric([str(index), cause.value], number)
        yield from (states, ages, restarts, failures, watts)


_log = logging.getLogger("dsv4.gateway")
TRACE_HEADERS = ("traceparent", "tracestate")
"""Of W3C Trace Context."""
_EXPORT_SECONDS = 5.0
_FLUSH_SECONDS = 2.0
_FAILED = frozenset({Outcome.ENGINE_ERROR, Outcome.LOST, Outcome.FATAL, Outcome.UNAVAILABLE, Outcome.TIMEOUT})


class Trace:
    """Span of one request."""

    def __init__(self, span: Span, headers: Mapping[str, str]) -> None:
        self._span = span
        self.headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        """Headers with which vLLM's span becomes a child of this one."""

    def event(self, name: str, attributes: Mapping[str, str | int]) -> None:
        """Add an event that happens now."""
        self._span.add_event(name, attributes)

    def end(self, outcome: Outcome, attributes: Mapping[str, str | int | float]) -> None:
        """End the span now."""
        from opentelemetry.trace import StatusCode

        self._span.set_attributes({**attributes, "dsv4.outcome": outcome.value})
        if outcome in _FAILED:
            self._span.set_status(StatusCode.ERROR, outcome.value)
        self._span.end()


class Traces:
    """Spans of requests, which a thread sends to a receiver of OTLP over gRPC; OpenTelemetry is imported only here.

    No request waits for the receiver: while it is away, spans are kept up to the limits of OpenTelemetry's batch
    processor, then dropped. OpenTelemetry's own variables, such as `OTEL_TRACES_SAMPLER`, apply.
    """

    def __init__(self, receiver: str, identity: Mapping[str, str]) -> None:
        """Args:
        receiver: see `trace_receiver`.
        identity: further attributes of the resource.

        Raises:
            ImportError: OpenTelemetry is not installed.
        """
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # A failed export is one line, its repetitions are none.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        resource = Resource.create({"service.name": "dsv4-gateway", **identity})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(receiver, insecure=True, timeout=_EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("dsv4_runtime.gateway")
        self._context = TraceContextTextMapPropagator()

    def begin(self, name: str, received: Mapping[str, str], attributes: Mapping[str, str]) -> Trace:
        """Begin the span of a request now.

        Args:
            name: of the span, without text of clients.
            received: `TRACE_HEADERS` of the request; with a valid one the span is a child of the client's.
            attributes: of the span.
        """
        from opentelemetry.trace import SpanKind, set_span_in_context

        parent = self._context.extract(received)
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes)
        headers: dict[str, str] = {}
        self._context.inject(headers, set_span_in_context(span))
        return Trace(span, headers)

    def close(self) -> None:
        """Send what is left, within 2 s."""
        # The thread may wait for the receiver longer.
        flush = threading.Thread(target=self._provider.shutdown, daemon=True)
        flush.start()
        flush.join(_FLUSH_SECONDS)


def open_traces(receiver: str | None, namespace: str | None, deployment: str | None) -> Traces | None:
    """Return the traces of this process; None without a receiver, or, with a line in the log, if there can be none."""
    if not receiver:
        return None
    identity = {"k8s.namespace.name": namespace, "dsv4.deployment": deployment}
    try:
        return Traces(trace_receiver(receiver), {name: text for name, text in identity.items() if text})
    except ValueError as error:
        _log.warning("%s: %s; there are no traces", TRACES, error)
    except ImportError as error:
        _log.warning("%s: %s; install dsv4[tracing]; there are no traces", TRACES, error)
    return None
