"""Decides how a call is sent (alone, over the stream of the client, or in chunks), and how long it may take."""

from __future__ import annotations

import math
import numbers
import random
import time
from typing import Any

from gradrule._messages.error_status import reached_server
from gradrule._messages.request_encoding import EncodedForward, EncodedRequest
from gradrule._messages.rpc_calls import Call
from gradrule.common import fast_paths
from gradrule.errors import GradruleError, InvalidParamError

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
"""Attempts of a call over a stream if no server is reached; equal to `maxAttempts` of other calls."""
# Seconds in which a proxy gets another server, and in which a server that answered a minute ago listens again.
_RESEND_S, _RESTART_S = 30.0, 10.0
_FIRST_RESEND_S, _LONGEST_RESEND_S = 0.1, 4.0


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
    request = call.request.evaluate if isinstance(call.request, EncodedForward) else call.request
    if isinstance(request, EncodedRequest):
        request.run_timeout_s = default_s
    return default_s + compile_s


def may_resend(call: Call[Any]) -> bool:
    """Returns whether a call that only streams have may go to another stream: not if it names a handle of its own."""
    return isinstance(call.request, EncodedForward)


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
        self.answered_at = -math.inf
        """When a server answered a call for the last time, on the clock of `time.monotonic`."""

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

    def record_answer(self, *, on_stream: bool = False) -> None:
        """Records that a server answered a call."""
        self.answered_at = time.monotonic()
        if on_stream:
            self._pause_s = 0.0

    def record_lost_stream(self) -> None:
        """Records that a stream was lost; delays opening another one, and doubles the delay with each loss."""
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        self._not_before = time.monotonic() + self._pause_s

    def record_too_long(self, size: int) -> None:
        """Records that the server refuses messages of this size, in bytes."""
        self._max_whole_bytes = min(self._max_whole_bytes, size - 1)


class Resends:
    """Decides whether and when one call is sent again.

    A call that was lost with its server, or that a proxy could not pass on, is sent again for 30 s; a call to a server
    that answered within the minute before it, but does not listen any more, for 10 s. A call that reaches no server
    otherwise has few attempts, because the address may be wrong.

    Args:
        routes: Knows when a server has answered.
        ends_at: End of the call's timeout, on the clock of `time.monotonic`.
        tries: Attempts if no server is reached.
    """

    def __init__(self, routes: Routes, ends_at: float, tries: int = 1) -> None:
        self._was_reached = time.monotonic() - routes.answered_at < REPEATED_WITHIN_S
        self._ends_at = ends_at
        self._tries = tries
        self._attempts = 0
        self._until: float | None = None

    def pause_after(self, error: GradruleError, *, is_lost: bool) -> float:
        """Returns the seconds to wait before the next attempt. Raises `error` if there is none.

        Args:
            error: Why the last attempt failed.
            is_lost: Whether that attempt reached a server or a proxy that did not answer it.
        """
        self._attempts += 1
        now = time.monotonic()
        if self._until is None and (is_lost or (self._was_reached and not reached_server(error))):
            self._until = min(self._ends_at, now + (_RESEND_S if is_lost else _RESTART_S))
        longest = min(_FIRST_RESEND_S * 2.0 ** (self._attempts - 1), _LONGEST_RESEND_S)
        # Clients that have lost the same server must not come back at the same time.
        pause = longest * random.uniform(0.5, 1.0)
        until = self._ends_at if self._attempts < self._tries else self._until
        is_late = until is None or now + pause >= until
        if is_late or not (is_lost or error.code_name == "UNAVAILABLE"):
            raise error from None
        return pause
