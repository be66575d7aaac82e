"""Exports OpenTelemetry traces (the extra `otel`): the phases of a request in front end and engine, as spans.

Spans are made from the recorded times when a request has ended. The engine has no network: it reports its times, by the
clock that all processes of a machine share, and the front end exports them as spans of the service `gradrule-engine`.
Sampling follows the caller's decision, then OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gradrule_server.errors import CannotStartError
from gradrule_server.operations.request_record import TRACE_PARENT, TRACE_STATE, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_PACKAGE = "gradrule.v1."
_FLUSH_MS = 5000


class TracingUnavailableError(CannotStartError):
    """Traces cannot be exported; the message says why and what to do."""


def exporter_to(endpoint: str) -> SpanExporter:
    """Returns an exporter to an OTLP collector, at `http://host:4317` for example.

    Raises:
        TracingUnavailableError: The extra `otel` is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as cause:
        raise TracingUnavailableError(
            f"--otel-endpoint needs OpenTelemetry ({cause.name} is missing); get it with: pip install 'gradrule[otel]'"
        ) from cause
    return OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http:"))


class Tracing:
    """A sink that exports each sampled request, in the background."""

    def __init__(self, exporter: SpanExporter, version: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._processor = BatchSpanProcessor(exporter)
        self._propagator = TraceContextTextMapPropagator()
        tracers = []
        for service in ("gradrule", "gradrule-engine"):
            resource = Resource.create({"service.name": service, "service.version": version})
            provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            provider.add_span_processor(self._processor)
            tracers.append(provider.get_tracer("gradrule", version))
        self._front, self._engine = tracers

    def __call__(self, request: RequestRecord) -> None:
        from opentelemetry import trace

        rpc = self._front.start_span(
            _PACKAGE + request.rpc,
            self._propagator.extract({TRACE_PARENT: request.trace_parent, TRACE_STATE: request.trace_state}),
            trace.SpanKind.SERVER,
            start_time=_wall_ns(request.received_ns),
        )
        if rpc.is_recording():
            service, _, method = request.rpc.partition("/")
            rpc.set_attributes(
                {
                    "rpc.system": "grpc",
                    "rpc.service": _PACKAGE + service,
                    "rpc.method": method,
                    "gradrule.request_id": request.id,
                    "gradrule.tenant": request.tenant,
                    "gradrule.reason": request.reason,
                }
            )
            if not request.is_ok:
                rpc.set_status(trace.StatusCode.ERROR, request.reason)
            self._add_phases(request, trace.set_span_in_context(rpc))
        rpc.end(_wall_ns(request.ended_ns))

    def close(self) -> None:
        """Exports the remaining spans, for a few seconds at most, and stops."""
        self._processor.force_flush(_FLUSH_MS)
        self._processor.shutdown()  # type: ignore[no-untyped-call]  # it takes and returns nothing

    def _add_phases(self, request: RequestRecord, parent: object) -> None:
        """Adds a span for each phase of the request: compiling, waiting and running."""
        from opentelemetry.context import Context

        assert isinstance(parent, Context)
        phases = []
        run = request.engine_run
        if request.compile_ns:
            start_ns = request.compile_started_ns
            phases.append((self._front, "compile", start_ns, start_ns + request.compile_ns))
        if request.has_run:
            start_ns = request.sent_to_engine_ns + run.queue_ns
            phases.append((self._front, "queue", request.sent_to_engine_ns, start_ns))
            phases.append((self._engine, "run", start_ns, start_ns + run.run_ns))
        for tracer, name, start_ns, end_ns in phases:
            span = tracer.start_span(name, parent, start_time=_wall_ns(start_ns))
            if name == "run" and run.device:
                span.set_attribute("gradrule.device", run.device)
            span.end(_wall_ns(end_ns))


def _wall_ns(monotonic_ns: int) -> int:
    """Converts a time of CLOCK_MONOTONIC to time since the epoch."""
    return time.time_ns() - time.monotonic_ns() + monotonic_ns
