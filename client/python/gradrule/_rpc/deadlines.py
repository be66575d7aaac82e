"""Deadlines of calls."""

from __future__ import annotations

import math
import numbers
import time
from typing import Any

from gradrule.errors import InvalidParamError

# Some thirty years; gRPC's clock overflows not far beyond, and the call would end at once.
_LONGEST_S = 1e9


def seconds(timeout: Any) -> float:
    """A timeout as gRPC takes it. Raises `InvalidParamError` unless it is a positive, finite number."""
    if isinstance(timeout, numbers.Real) and not isinstance(timeout, bool):
        number: Any = timeout
        if 0 < number < math.inf:
            return float(min(number, _LONGEST_S))
    raise InvalidParamError(f"timeout is a positive number of seconds, not {timeout!r}")


def of_call(timeout: Any, default: float) -> float:
    """The deadline of a call: its own timeout, or the client's."""
    return default if timeout is None else seconds(timeout)


def left(ends_at: float) -> float:
    """Seconds until a time on the clock `time.monotonic`; gRPC ends a call without any at once."""
    return max(ends_at - time.monotonic(), 1e-6)
