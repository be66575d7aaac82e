"""OpenTelemetry traces (the extra `otel`): what a request did, in the front end and in the engine, as spans.

Spans are made when a request has ended, from the times that were noted. The engine has no network: it reports its own
times, by the clock that all processes of a machine share, and the front end exports them as spans of the service
`gradrule-engine`. Sampling follows the caller's decision, then OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gradrule_server.operations.request import TRACE_PARENT, TRACE_STATE, Request

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_PACKAGE = "gradrule.v1."
_FLUSH_MS = 5000


class TracingRefused(Exception):
    """Traces cannot be exported as asked; says why and what to do."""


def exporter_to(endpoint: str) -> SpanExporter:
    """An exporter to an OTLP collector at `http://host:4317` (or https). `TracingRefused` without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as cause:
        raise TracingRefused(
            f"--otel-endpoint needs OpenTelemetry ({cause.name} is missing); get it with: pip install 'gradrule[otel]'"
        ) from cause
    return OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http:"))


class Tracing:
    """A sink: exports each request that is sampled, in the background."""

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

    def __call__(self, request: Request) -> None:
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
            self._add_parts(request, trace.set_span_in_context(rpc))
        rpc.end(_wall_ns(request.ended_ns))

    def close(self) -> None:
        """Exports what is left, for a few seconds at most."""
        self._processor.force_flush(_FLUSH_MS)
        self._processor.shutdown()  # type: ignore[no-untyped-call]  # it takes and returns nothing

    def _add_parts(self, request: Request, parent: object) -> None:
        from opentelemetry.context import Context

        assert isinstance(parent, Context)
        parts = []
        run = request.engine_run
        if request.compile_ns:
            begin_ns = request.compile_started_ns
            parts.append((self._front, "compile", begin_ns, begin_ns + request.compile_ns))
        if request.has_run:
            begin_ns = request.taken_up_ns + run.queue_ns
            parts.append((self._front, "queue", request.taken_up_ns, begin_ns))
            parts.append((self._engine, "run", begin_ns, begin_ns + run.run_ns))
        for tracer, name, begin_ns, end_ns in parts:
            span = tracer.start_span(name, parent, start_time=_wall_ns(begin_ns))
            if name == "run" and run.device:
                span.set_attribute("gradrule.device", run.device)
            span.end(_wall_ns(end_ns))


def _wall_ns(monotonic_ns: int) -> int:
    """A time of CLOCK_MONOTONIC as time since the epoch."""
    return time.time_ns() - time.monotonic_ns() + monotonic_ns
