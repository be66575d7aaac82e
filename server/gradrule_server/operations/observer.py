"""Passes the record of each ended request to the sinks that count, log or export it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextvars import Token
from types import TracebackType
from typing import Self

from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.operations.request_record import (
    OK,
    RequestRecord,
    current,
    from_metadata,
    part_of_stream,
    reset_current,
    set_current,
)

_log = logging.getLogger(__name__)

Sink = Callable[[RequestRecord], None]


class Observer:
    """Starts the record of every request. Without sinks the record only serves as the current request."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = tuple(sinks)

    def rpc(
        self, rpc: str, metadata: Iterable[tuple[str, str | bytes]] | None, peer: Callable[[], str]
    ) -> ObservedRequest:
        """Starts the record of an RPC, `GradientService/Evaluate` for example."""
        return ObservedRequest(from_metadata(rpc, metadata, peer, time.monotonic_ns()), self._sinks)

    def part(self, kind: str) -> ObservedRequest:
        """Starts the record of a request within the current stream."""
        received_ns = time.monotonic_ns()
        stream = current()
        if stream is None:
            return ObservedRequest(from_metadata(kind, (), str, received_ns), self._sinks)
        return ObservedRequest(part_of_stream(stream, kind, received_ns), self._sinks)


class ObservedRequest:
    """Context manager that makes `request` the current request, and passes it to the sinks at the end.

    An exception that leaves the context determines the reason that is recorded.
    """

    __slots__ = ("_sinks", "_token", "request")

    def __init__(self, request: RequestRecord, sinks: tuple[Sink, ...]) -> None:
        self.request = request
        self._sinks = sinks
        self._token: Token[RequestRecord | None] | None = None

    def __enter__(self) -> Self:
        self._token = set_current(self.request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None
    ) -> None:
        request = self.request
        request.ended_ns = time.monotonic_ns()
        if cause is not None:
            request.reason, request.message = _reason_and_message(request, cause)
        try:
            for sink in self._sinks:
                sink(request)
        except Exception:
            # The caller must get the response even if a sink fails.
            _log.exception("a request could not be recorded")
        finally:
            # Free the engine's response: timers that were set during the request still reference the record.
            request.read_engine_run = None
            if self._token is not None:
                reset_current(self._token)


def _reason_and_message(request: RequestRecord, cause: BaseException) -> tuple[str, str]:
    if isinstance(cause, GradruleError):
        return reason_name(cause.reason), cause.message
    if isinstance(cause, asyncio.CancelledError):
        if request.is_stream:
            # Callers end streams by cancelling them.
            return OK, ""
        return "CANCELLED", "the caller gave the request up"
    return "INTERNAL", type(cause).__name__
