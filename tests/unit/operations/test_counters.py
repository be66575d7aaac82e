"""Compares the counters and histograms with those of prometheus_client."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from gradrule_server.operations.counters import EventLoopCounter, EventLoopHistogram

BOUNDS = (0.5, 1.0, 2.5)
LABELS = st.sampled_from(["a", "b"])


def samples(metric: Metric) -> dict[Any, float]:
    return {
        (item.name, *sorted(item.labels.items())): item.value
        for item in metric.samples
        if not item.name.endswith("_created")
    }


@given(st.lists(st.tuples(LABELS, LABELS, st.integers(0, 100))))
def test_counter_equals_prometheus_counter(adds: list[tuple[str, str, int]]) -> None:
    own = EventLoopCounter("some", "text", "x", "y")
    registry = CollectorRegistry()
    counter = Counter("some", "text", ["x", "y"], registry=registry)
    for x, y, by in adds:
        own.add(x, y, by=by)
        counter.labels(x, y).inc(by)
    (expected,) = registry.collect()
    assert samples(own.metric()) == samples(expected)


@given(st.lists(st.tuples(LABELS, st.sampled_from([0.0, 0.4, 0.5, 0.6, 1.0, 2.0, 2.5, 3.0, 1e9]))))
def test_histogram_equals_prometheus_histogram(adds: list[tuple[str, float]]) -> None:
    own = EventLoopHistogram("some", "text", BOUNDS, "x")
    registry = CollectorRegistry()
    histogram = Histogram("some", "text", ["x"], buckets=BOUNDS, registry=registry)
    for x, value in adds:
        own.add(value, x)
        histogram.labels(x).observe(value)
    (expected,) = registry.collect()
    assert samples(own.metric()) == samples(expected)


def test_metrics_without_labels_start_at_zero() -> None:
    assert samples(EventLoopCounter("some", "text").metric()) == {("some_total",): 0}
    assert samples(EventLoopHistogram("some", "text", BOUNDS).metric())[("some_count",)] == 0
