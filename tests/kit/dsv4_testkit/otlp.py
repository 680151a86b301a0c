"""A receiver of OTLP over gRPC, made of OpenTelemetry's own protocol classes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from dsv4_testkit.waiting import PATIENCE_SECONDS


@dataclass(frozen=True)
class Received:
    """One span."""

    span: Span
    resource: dict[str, Any]

    @property
    def trace(self) -> str:
        return self.span.trace_id.hex()

    @property
    def id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent(self) -> str:
        return self.span.parent_span_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        return _values(self.span.attributes)

    @property
    def events(self) -> list[tuple[str, dict[str, Any]]]:
        return [(event.name, _values(event.attributes)) for event in self.span.events]


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind is not None else None


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Use as a context manager; `address` is `unix:PATH` or `127.0.0.1:0`."""

    def __init__(self, address: str) -> None:
        self._lock = threading.Lock()
        self._spans: list[Received] = []
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        self.url = address if address.startswith("unix:") else f"http://127.0.0.1:{port}"

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for part in request.resource_spans:
                resource = _values(part.resource.attributes)
                self._spans += [Received(span, resource) for scope in part.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, name: str | None = None) -> list[Received]:
        with self._lock:
            return [one for one in self._spans if name in (None, one.span.name)]

    def until(self, true: Callable[[list[Received]], bool], seconds: float = PATIENCE_SECONDS) -> list[Received]:
        """Wait for spans; blocks."""
        deadline = time.monotonic() + seconds
        while not true(found := self.spans()):
            assert time.monotonic() < deadline, [(one.span.name, one.attributes, one.events) for one in found]
            time.sleep(0.05)
        return found

    def __enter__(self) -> Receiver:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait(10)
