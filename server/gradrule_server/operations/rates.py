"""Bounds on lines that callers cause: so many at once, so many a second, and a count of those left out."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_MAX_KEYS = 1000


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at: float
    left_out: int = 0


class RateBound:
    """Lines by key (a tenant's, say), each key with a budget of its own; at most 1,000 keys are told apart.

    per_second: how fast a budget grows again, up to `burst` lines.
    """

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._left_out_of_forgotten = 0

    def admits(self, key: str = "") -> bool:
        """Whether a line may be written now; where not, it is counted as left out."""
        now = self._clock()
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= _MAX_KEYS:
                _, forgotten = self._buckets.popitem(last=False)
                self._left_out_of_forgotten += forgotten.left_out
            bucket = self._buckets[key] = _Bucket(self._burst, now)
        else:
            self._buckets.move_to_end(key)
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.filled_at) * self._per_second)
        bucket.filled_at = now
        if bucket.tokens < 1:
            bucket.left_out += 1
            return False
        bucket.tokens -= 1
        return True

    def take_left_out(self) -> int:
        """How many lines were left out since this was asked last."""
        left_out = self._left_out_of_forgotten + sum(bucket.left_out for bucket in self._buckets.values())
        self._left_out_of_forgotten = 0
        for bucket in self._buckets.values():
            bucket.left_out = 0
        return left_out
