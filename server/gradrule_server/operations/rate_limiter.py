"""Limits the rate of lines that clients cause in a log, and counts the lines that were dropped."""

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
    dropped: int = 0


class RateLimiter:
    """Limits lines by key, a tenant for example, with one token bucket for each; remembers at most 1,000 keys.

    Args:
        per_second: Lines per second in the long run.
        burst: Lines at once.
        clock: Returns the time in seconds.
    """

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._dropped_of_removed_keys = 0

    def allow(self, key: str = "") -> bool:
        """Returns whether a line may be written now; counts it as dropped if not."""
        now = self._clock()
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= _MAX_KEYS:
                _, removed = self._buckets.popitem(last=False)
                self._dropped_of_removed_keys += removed.dropped
            bucket = self._buckets[key] = _Bucket(self._burst, now)
        else:
            self._buckets.move_to_end(key)
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.filled_at) * self._per_second)
        bucket.filled_at = now
        if bucket.tokens < 1:
            bucket.dropped += 1
            return False
        bucket.tokens -= 1
        return True

    def take_dropped(self) -> int:
        """Returns how many lines were dropped since the last call."""
        dropped = self._dropped_of_removed_keys + sum(bucket.dropped for bucket in self._buckets.values())
        self._dropped_of_removed_keys = 0
        for bucket in self._buckets.values():
            bucket.dropped = 0
        return dropped
