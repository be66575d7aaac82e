"""Runs an OTLP collector: a gRPC server that stores the spans it receives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    """Describes an exported span."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Stores spans."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self.endpoint = ""

    def Export(self, request: Any, context: Any) -> Any:
        found = [
            Span(
                string_attributes(resource.resource.attributes).get("service.name", ""),
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                string_attributes(span.attributes),
            )
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += found
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[Span]:
        """Returns the spans of a trace received so far."""
        with self._lock:
            return [span for span in self._spans if span.trace_id == trace_id]


def string_attributes(attributes: Any) -> dict[str, str]:
    return {item.key: item.value.string_value for item in attributes}


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """Starts a collector and stops it at the end."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    collector = Collector()
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)
