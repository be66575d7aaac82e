"""Counts and collects histograms on the event loop.

A request adds to a dozen counters, so adding must be cheap: only one thread adds, without a lock, and readers on other
threads copy the values first. prometheus_client's own counters lock on each call.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]


class EventLoopCounter:
    """A counter.

    Args:
        name: The metric's name without `_total`.
        text: Its description.
        labels: Names of its labels; `add` takes their values in this order.
    """

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, *labels: str, by: float = 1.0) -> None:
        """Increases the counter of these label values."""
        counts = self._counts
        counts[labels] = counts.get(labels, 0.0) + by

    def metric(self) -> Metric:
        """Returns the values for Prometheus."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.copy().items():
            family.add_metric(labels, count)
        return family


class EventLoopHistogram:
    """A histogram.

    Args:
        name: The metric's name.
        text: Its description.
        bounds: Upper bounds of the buckets, ascending; larger values are counted in one more bucket.
        labels: Names of its labels; `add` takes their values in this order.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], *labels: str) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._labels = labels
        self._counts: dict[Labels, list[float]] = {} if labels else {(): self._zeros()}

    def add(self, value: float, *labels: str) -> None:
        """Adds a value to the bucket that it belongs to."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = self._zeros()
        counts[bisect.bisect_left(self._bounds, value)] += 1
        counts[-1] += value

    def metric(self) -> Metric:
        """Returns the values for Prometheus, whose buckets include all smaller values."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, own in self._counts.copy().items():
            *counts, total = own.copy()
            buckets = list(zip(names, itertools.accumulate(counts), strict=True))
            family.add_metric(labels, buckets, total)
        return family

    def _zeros(self) -> list[float]:
        """Returns counts for all buckets, followed by the sum of the values."""
        return [0.0] * (len(self._bounds) + 2)
