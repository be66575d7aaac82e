"""Checks timeouts and computes deadlines of calls."""

from __future__ import annotations

import math
import numbers
import time
from typing import Any

from gradrule.errors import InvalidParamError

# About thirty years. With much longer timeouts gRPC's clock overflows, and calls end at once.
_LONGEST_S = 1e9


def seconds(timeout: Any) -> float:
    """Returns a timeout as a float. Raises `InvalidParamError` unless it is a positive, finite number."""
    if isinstance(timeout, numbers.Real) and not isinstance(timeout, bool):
        number: Any = timeout
        if 0 < number < math.inf:
            return float(min(number, _LONGEST_S))
    raise InvalidParamError(f"timeout is a positive number of seconds, not {timeout!r}")


def of_call(timeout: Any, default: float) -> float:
    """Returns the timeout of a call in seconds: its own, or the client's."""
    return default if timeout is None else seconds(timeout)


def left(ends_at: float) -> float:
    """Returns the seconds until a time on the clock `time.monotonic`, at least 1 µs."""
    return max(ends_at - time.monotonic(), 1e-6)
