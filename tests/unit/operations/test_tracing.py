"""Tests the spans of a request."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gradrule_server.operations.request_record import EngineRun, RequestRecord
from gradrule_server.operations.tracing import Tracing, TracingUnavailableError, exporter_to
from tests.unit.operations.records import make, refusal

TRACE_ID, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE_ID}-{CALLER}-01"), ("tracestate", "a=b"))


def spans_of(**request: Any) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "1.2.3")
    make(tracing, **request)
    tracing.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def in_engine(request: RequestRecord) -> None:
    now = time.monotonic_ns()
    request.compile_started_ns, request.compile_ns = now, 10**6
    request.sent_to_engine_ns = now + 10**6
    request.read_engine_run = lambda: EngineRun(2 * 10**6, 3 * 10**6, "CPU:0")


def service(span: ReadableSpan) -> object:
    return span.resource.attributes["service.name"]


def test_one_trace_covers_front_end_and_engine() -> None:
    before = time.time_ns()
    spans = spans_of(rpc="GradientService/Evaluate", metadata=SAMPLED, within=in_engine, tenant="ada")
    rpc = spans["gradrule.v1.GradientService/Evaluate"]
    assert set(spans) == {rpc.name, "compile", "queue", "run"}
    assert rpc.context is not None
    assert rpc.parent is not None
    assert f"{rpc.parent.span_id:016x}" == CALLER
    assert rpc.context.trace_state.get("a") == "b"
    for span in spans.values():
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        if span is not rpc:
            assert span.parent is not None
            assert span.parent.span_id == rpc.context.span_id
    assert {name: service(span) for name, span in spans.items()} == {
        rpc.name: "gradrule",
        "compile": "gradrule",
        "queue": "gradrule",
        "run": "gradrule-engine",
    }
    run, queue = spans["run"], spans["queue"]
    assert run.start_time is not None
    assert run.end_time is not None
    assert queue.end_time is not None
    assert run.end_time - run.start_time == pytest.approx(3 * 10**6, abs=10**4)
    assert abs(queue.end_time - run.start_time) < 10**5
    assert rpc.start_time is not None
    assert before - 10**7 < rpc.start_time < time.time_ns()
    assert rpc.attributes is not None
    assert rpc.attributes["gradrule.tenant"] == "ada"
    assert rpc.attributes["gradrule.reason"] == "OK"


def test_span_of_a_failed_request_has_the_reason() -> None:
    (span,) = spans_of(fails=refusal("UNKNOWN_RULE", "there is no rule 'secret'")).values()
    assert span.status.description == "UNKNOWN_RULE"
    assert not span.status.is_ok
    assert "secret" not in span.to_json()


def test_request_without_trace_starts_a_new_trace() -> None:
    (span,) = spans_of().values()
    assert span.parent is None


def test_sampling_follows_the_caller() -> None:
    unsampled = (("traceparent", f"00-{TRACE_ID}-{CALLER}-00"),)
    assert spans_of(metadata=unsampled, within=in_engine) == {}


def test_tracing_without_the_extra_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(TracingUnavailableError, match=r"gradrule\[otel\]"):
        exporter_to("http://localhost:4317")
