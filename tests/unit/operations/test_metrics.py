"""Tests the metrics: their values, their documented names, and the page that serves them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gradrule_server.limits import TENANT_RESOURCES
from gradrule_server.operations import metrics as metrics_module
from gradrule_server.operations.metrics import Metrics, TenantLabels
from gradrule_server.operations.request_record import EngineRun, RequestRecord
from tests.unit.operations.records import make, refusal
from tests.unit.operations.states import quarantine, sources, tenant

DOCS = Path(__file__).resolve().parents[3] / "docs/guide/operating.md"


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"gradrule_{name}", labels)


def busy(request: RequestRecord) -> None:
    request.bytes_in, request.bytes_out = 100, 20
    request.compile_ns = 10**9
    request.sent_to_engine_ns = 1
    request.read_engine_run = lambda: EngineRun(2 * 10**9, 3 * 10**9, "CPU:0")
    request.hits = {"programs": 2}
    request.misses = {"loaded": 1}


def test_requests_are_counted_by_rpc_and_reason() -> None:
    metrics = Metrics()
    for _ in range(3):
        make(metrics, rpc="A/B")
    make(metrics, rpc="A/B", fails=refusal("UNKNOWN_RULE"), tenant="ada")
    make(metrics, rpc="A/C", within=busy)
    assert value(metrics, "requests_total", rpc="A/B", reason="OK") == 3
    assert value(metrics, "requests_total", rpc="A/B", reason="UNKNOWN_RULE") == 1
    assert value(metrics, "tenant_requests_total", tenant="ada", outcome="error") == 1
    assert value(metrics, "tenant_requests_total", tenant="default", outcome="ok") == 4
    assert value(metrics, "request_seconds_count", rpc="A/B") == 4
    assert value(metrics, "received_bytes_total", rpc="A/C") == 100
    assert value(metrics, "sent_bytes_total", rpc="A/C") == 20
    assert [value(metrics, f"{part}_seconds_sum") for part in ("compile", "queue", "run")] == [1, 2, 3]
    assert [value(metrics, f"{part}_seconds_count") for part in ("compile", "queue", "run")] == [1, 1, 1]
    assert value(metrics, "cache_hits_total", cache="programs") == 2
    assert value(metrics, "cache_misses_total", cache="loaded") == 1


def test_gauges_show_the_last_state() -> None:
    metrics = Metrics()
    assert value(metrics, "requests_in_flight") is None
    metrics.count_quarantine()
    metrics.set_state(sources(quarantines=[quarantine("0f", "signal 6", 300.0)]), audit_dropped=7)
    assert value(metrics, "engine_up", engine="0", device="CPU:0") == 1
    assert value(metrics, "engine_up", engine="1", device="CPU:0") == 0
    assert value(metrics, "engine_restarts_total", engine="1", reason="crash") == 2
    assert value(metrics, "engine_resident_bytes", engine="0", device="CPU:0") == 1 << 30
    assert value(metrics, "engine_spares") == 1
    assert value(metrics, "engines", holder="programs") == 2
    assert [value(metrics, name) for name in ("engines_limit", "engine_waiting_tenants")] == [21, 3]
    reasons = ("turn", "memory", "idle")
    assert [value(metrics, "engine_evictions_total", reason=reason) for reason in reasons] == [4, 0, 1]
    assert [value(metrics, f"engines_memory_{name}") for name in ("bytes", "limit_bytes")] == [3 << 20, 5 << 20]
    assert value(metrics, "helper_restarts_total", helper="fork_server", reason="killed") == 2
    assert value(metrics, "helper_restarts_total", helper="gateway", reason="crash") == 1
    figures = ("compile_workers", "compile_workers_busy", "compile_waiting_tasks", "compile_workers_resident_bytes")
    assert [value(metrics, name) for name in figures] == [3, 2, 1, 1 << 20]
    assert value(metrics, "requests_in_flight") == 4
    assert value(metrics, "cache_bytes", cache="programs") == 1000
    blobs = ("hits_total", "fetches_total", "fetch_failures_total", "fetched_bytes_total", "fetch_seconds_total")
    assert [value(metrics, f"blob_cache_{name}") for name in blobs] == [5, 3, 1, 100, 0.5]
    assert value(metrics, "blob_cache_bytes") == 70
    assert value(metrics, "rules", tenant="default") == 6
    assert value(metrics, "quarantines_total") == 1
    assert value(metrics, "quarantined_programs") == 1
    assert value(metrics, "audit_left_out_total") == 7


def test_unauthenticated_callers_have_an_empty_tenant_label() -> None:
    metrics = Metrics(TenantLabels(1))
    make(metrics, tenant=None, fails=refusal("UNAUTHENTICATED"))
    make(metrics, tenant="default")
    assert value(metrics, "tenant_requests_total", tenant="", outcome="error") == 1
    assert value(metrics, "tenant_requests_total", tenant="default", outcome="error") is None
    assert value(metrics, "tenant_requests_total", tenant="default", outcome="ok") == 1


def test_tenants_beyond_the_limit_share_one_label() -> None:
    metrics = Metrics(TenantLabels(2))
    for name in ("a", "b", "c", "d", "a"):
        make(metrics, tenant=name)
    metrics.set_state(sources([tenant(name) for name in "abcd"]), audit_dropped=0)
    assert value(metrics, "tenant_requests_total", tenant="a", outcome="ok") == 2
    assert value(metrics, "tenant_requests_total", tenant="other", outcome="ok") == 2
    assert value(metrics, "tenant_requests_total", tenant="c", outcome="ok") is None
    assert (value(metrics, "rules", tenant="b"), value(metrics, "rules", tenant="other")) == (6, 12)


def test_all_metrics_are_documented_and_exist() -> None:
    metrics = Metrics()
    make(metrics, within=busy, fails=refusal("UNKNOWN_RULE"))
    metrics.set_state(sources(), audit_dropped=0)
    reported = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in metrics.registry.collect()
        if family.name.startswith("gradrule_")
    }
    documented = set(re.findall(r"^\| `(gradrule_\w+)` \|", DOCS.read_text(), re.MULTILINE))
    assert reported == documented


def test_a_row_of_the_table_of_resources_is_all_that_a_tenant_gauge_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipe "I want to add a metric": `gauge` in limits.py, and a line in docs/guide/operating.md."""
    rows = [replace(each, gauge=f"tenant_{each.name}") for each in TENANT_RESOURCES if not each.gauge]
    monkeypatch.setattr(metrics_module, "REPORTED_RESOURCES", rows)
    metrics = Metrics()
    metrics.set_state(sources(), audit_dropped=0)
    assert [metrics.registry.get_sample_value(f"gradrule_{row.gauge}", {"tenant": "default"}) for row in rows] == [
        1.0
    ] * len(rows)
