"""Counters and histograms for the event loop: a request adds to a dozen of them, so adding must cost next to nothing.

Added to on one thread, and read on any: what is read is copied at once.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]


class Tally:
    """A counter. name: without `_total`; labels: their names, whose values every `add` gives in this order."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, *labels: str, by: float = 1.0) -> None:
        """Counts so many more."""
        counts = self._counts
        counts[labels] = counts.get(labels, 0.0) + by

    def metric(self) -> Metric:
        """As Prometheus reads it."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.copy().items():
            family.add_metric(labels, count)
        return family


class Spread:
    """A histogram. bounds: upper bounds of its buckets, growing; what is above the last is counted too."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], *labels: str) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._labels = labels
        self._seen: dict[Labels, list[float]] = {} if labels else {(): self._nothing()}

    def add(self, value: float, *labels: str) -> None:
        """Counts a value."""
        seen = self._seen.get(labels)
        if seen is None:
            seen = self._seen[labels] = self._nothing()
        seen[bisect.bisect_left(self._bounds, value)] += 1
        seen[-1] += value

    def metric(self) -> Metric:
        """As Prometheus reads it: each bucket holds those below it too."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, seen in self._seen.copy().items():
            *counts, total = seen.copy()
            buckets = list(zip(names, itertools.accumulate(counts), strict=True))
            family.add_metric(labels, buckets, total)
        return family

    def _nothing(self) -> list[float]:
        """Counts of the buckets, then the sum of the values."""
        return [0.0] * (len(self._bounds) + 2)
