"""Counting, against prometheus_client's own counters and histograms."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from gradrule_server.operations.tallies import Spread, Tally

BOUNDS = (0.5, 1.0, 2.5)
LABELS = st.sampled_from(["a", "b"])


def samples(metric: Metric) -> dict[Any, float]:
    return {
        (item.name, *sorted(item.labels.items())): item.value
        for item in metric.samples
        if not item.name.endswith("_created")
    }


@given(st.lists(st.tuples(LABELS, LABELS, st.integers(0, 100))))
def test_a_tally_is_a_counter(adds: list[tuple[str, str, int]]) -> None:
    tally = Tally("some", "text", "x", "y")
    registry = CollectorRegistry()
    counter = Counter("some", "text", ["x", "y"], registry=registry)
    for x, y, by in adds:
        tally.add(x, y, by=by)
        counter.labels(x, y).inc(by)
    (expected,) = registry.collect()
    assert samples(tally.metric()) == samples(expected)


@given(st.lists(st.tuples(LABELS, st.sampled_from([0.0, 0.4, 0.5, 0.6, 1.0, 2.0, 2.5, 3.0, 1e9]))))
def test_a_spread_is_a_histogram(adds: list[tuple[str, float]]) -> None:
    spread = Spread("some", "text", BOUNDS, "x")
    registry = CollectorRegistry()
    histogram = Histogram("some", "text", ["x"], buckets=BOUNDS, registry=registry)
    for x, value in adds:
        spread.add(value, x)
        histogram.labels(x).observe(value)
    (expected,) = registry.collect()
    assert samples(spread.metric()) == samples(expected)


def test_without_labels_there_is_a_zero_from_the_start() -> None:
    assert samples(Tally("some", "text").metric()) == {("some_total",): 0}
    assert samples(Spread("some", "text", BOUNDS).metric())[("some_count",)] == 0
