"""Decides whether a figure grows during a soak.

The first third of the samples is warm-up and excluded. Of the rest, the slope is that of Theil and Sen: the median of
the slopes between all pairs, which outliers do not change. It is flat if its growth over the measured time is within
the allowance of that figure: a share of its median plus a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WARM_UP = 1 / 3
MOST_SAMPLES = 400


@dataclass(frozen=True)
class Allowance:
    """Defines how much a figure may grow over the measured time."""

    part: float
    constant: float


@dataclass(frozen=True)
class Slope:
    """Holds the growth over the measured time, and the allowed growth."""

    median: float
    growth: float
    allowed: float
    samples: int

    @property
    def is_flat(self) -> bool:
        return self.growth <= self.allowed


def slope(times: Sequence[float], values: Sequence[float], allowance: Allowance) -> Slope:
    """Computes the slope of one figure. Raises `ValueError` with fewer than six samples after the warm-up."""
    begins = times[0] + (times[-1] - times[0]) * WARM_UP
    kept = [(time, value) for time, value in zip(times, values, strict=True) if time >= begins]
    if len(kept) < 6:
        raise ValueError(f"{len(kept)} samples after the warm-up say nothing")
    step = -(-len(kept) // MOST_SAMPLES)
    x, y = np.array(kept[::step], np.float64).T
    first, second = np.triu_indices(len(x), 1)
    per_second = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
    median = float(np.median(y))
    growth = per_second * float(x[-1] - x[0])
    return Slope(median, growth, median * allowance.part + allowance.constant, len(x))
