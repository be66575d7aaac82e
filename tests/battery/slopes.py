"""Whether something grows: the rule by which a soak is judged.

The first third of the samples is warm-up and left out. Of the rest, the slope is Theil and Sen's: the median of the
slopes between all pairs, which single peaks do not move. It is flat where what it would add over the measured time is
within the allowance of that figure: a part of its median, and a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WARM_UP = 1 / 3
MOST_SAMPLES = 400


@dataclass(frozen=True)
class Allowance:
    """What a figure may grow by over the measured time."""

    part: float
    constant: float


@dataclass(frozen=True)
class Slope:
    """growth: over the measured time; allowed: what it may be."""

    median: float
    growth: float
    allowed: float
    samples: int

    @property
    def is_flat(self) -> bool:
        return self.growth <= self.allowed


def slope(times: Sequence[float], values: Sequence[float], allowance: Allowance) -> Slope:
    """Judges one figure. `ValueError` with fewer than six samples after the warm-up."""
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
