"""Decides how a call is sent (alone, over the stream of the client, or in chunks), and how long it may take."""

from __future__ import annotations

import math
import numbers
import time
from typing import Any

from gradrule._messages.rpc_calls import Call
from gradrule.common import fast_paths
from gradrule.errors import InvalidParamError
from gradrule.v1 import evaluate_pb2

# About thirty years. With much longer timeouts, gRPC's clock overflows and calls end at once.
_LONGEST_S = 1e9
MAX_WHOLE_BYTES = 64 << 20
"""Longer requests are sent in chunks: servers limit the length of a message, by default to 64 MiB."""
_MAX_STREAMED_BYTES = 512 << 10
# A stream is opened after this number of calls, each within REPEATED_WITHIN_S of the previous one.
_CALLS_BEFORE = 3
REPEATED_WITHIN_S = 60.0
"""Seconds without a request after which a stream is closed, unless the server may keep forward handles for it."""
# A server runs at most this many requests of one stream at a time; more would wait.
_MAX_PENDING = 32
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
TRIES = 4
"""Attempts of a call over a stream if streams are lost; equal to `maxAttempts` of other calls."""


def checked_timeout(timeout: Any) -> float:
    """Returns a timeout as a float. Raises `InvalidParamError` unless it is a positive, finite number."""
    if isinstance(timeout, numbers.Real) and not isinstance(timeout, bool):
        number: Any = timeout
        if 0 < number < math.inf:
            return float(min(number, _LONGEST_S))
    raise InvalidParamError(f"timeout is a positive number of seconds, not {timeout!r}")


def checked_compile_timeout(timeout: Any) -> float:
    """Returns a timeout of compiling, which may be 0, as a float. Raises `InvalidParamError`."""
    if timeout == 0 and not isinstance(timeout, bool):
        return 0.0
    try:
        return checked_timeout(timeout)
    except InvalidParamError:
        raise InvalidParamError(f"compile_timeout is a number of seconds, 0 or more, not {timeout!r}") from None


def call_timeout(timeout: Any, default: float) -> float:
    """Returns the timeout of a call in seconds: its own, or the default of the client."""
    return default if timeout is None else checked_timeout(timeout)


def limit(call: Call[Any], timeout: Any, default_s: float, compile_s: float) -> float:
    """Returns the timeout of a call in seconds.

    A call for which the server may compile a program, and that has no timeout of its own, gets more time. Only
    compiling may use it, so the request is given the limit of its run.

    Args:
        call: The call.
        timeout: Its own timeout; None: it has none.
        default_s: The client's default.
        compile_s: Additional seconds for compiling.
    """
    if timeout is not None:
        return checked_timeout(timeout)
    if not (call.may_compile and compile_s):
        return default_s
    request = call.request
    if isinstance(request, evaluate_pb2.ForwardRequest):
        request = request.evaluate
    if isinstance(request, evaluate_pb2.EvaluateRequest):
        request.run_timeout.FromNanoseconds(int(default_s * 1e9))
    return default_s + compile_s


def tries(call: Call[Any]) -> int:
    """Returns the number of attempts of a call that only streams have: one if it names a handle of its stream."""
    return TRIES if isinstance(call.request, evaluate_pb2.ForwardRequest) else 1


def remaining_s(ends_at: float) -> float:
    """Returns the seconds until a time on the clock of `time.monotonic`; at least 1 µs."""
    return max(ends_at - time.monotonic(), 1e-6)


class Routes:
    """Chooses how calls are sent, based on the outcomes of earlier calls.

    Args:
        use_stream: Send repeated calls over a stream.
    """

    def __init__(self, *, use_stream: bool) -> None:
        self._use_stream = use_stream and fast_paths.is_enabled("streams")
        self._calls = 0
        self._called_at = 0.0
        self._pause_s = 0.0
        self._not_before = 0.0
        self._max_whole_bytes = MAX_WHOLE_BYTES

    def must_chunk(self, size: int) -> bool:
        """Returns whether a request of this size, in bytes, is too long for one message."""
        return size > self._max_whole_bytes

    def may_stream(self, size: int, pending_count: int, *, is_open: bool) -> bool:
        """Returns whether a request of this size, in bytes, is sent over the stream.

        Args:
            size: Bytes of the request.
            pending_count: Number of requests on the stream without an answer.
            is_open: Whether the stream is open.
        """
        if not self._use_stream or size > _MAX_STREAMED_BYTES:
            return False
        now = time.monotonic()
        if now - self._called_at > REPEATED_WITHIN_S:
            self._calls = 0
        self._called_at = now
        self._calls += 1
        if self._calls <= _CALLS_BEFORE or pending_count >= _MAX_PENDING:
            return False
        return is_open or now >= self._not_before

    def record_answer(self) -> None:
        """Records that a stream answered."""
        self._pause_s = 0.0

    def record_lost_stream(self) -> None:
        """Records that a stream was lost; delays opening another one, and doubles the delay with each loss."""
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        self._not_before = time.monotonic() + self._pause_s

    def record_too_long(self, size: int) -> None:
        """Records that the server refuses messages of this size, in bytes."""
        self._max_whole_bytes = min(self._max_whole_bytes, size - 1)


def pause_before(attempt: int) -> float:
    """Returns the seconds to wait before the next attempt over a stream; `attempt` counts earlier ones."""
    return min(0.05 * (1 << attempt - 1), 1.0)
