"""From requests to those who count, log or export them: each is handed on once, when it has ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextvars import Token
from types import TracebackType
from typing import Self

from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.operations.request import OK, Request, current, enter, leave, of_metadata, part_of

_log = logging.getLogger(__name__)

Sink = Callable[[Request], None]


class Observer:
    """Sees every request of the front. Without sinks it only knows which request is under way."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = tuple(sinks)

    def rpc(self, rpc: str, metadata: Iterable[tuple[str, str | bytes]] | None, peer: Callable[[], str]) -> Observed:
        """An RPC that begins. rpc: `GradientService/Evaluate`."""
        return Observed(of_metadata(rpc, metadata, peer, time.monotonic_ns()), self._sinks)

    def part(self, kind: str) -> Observed:
        """A request that begins within the stream under way."""
        received_ns = time.monotonic_ns()
        stream = current()
        if stream is None:
            return Observed(of_metadata(kind, (), str, received_ns), self._sinks)
        return Observed(part_of(stream, kind, received_ns), self._sinks)


class Observed:
    """A context manager: within it, its `request` is the one under way; its end is how the request ended."""

    __slots__ = ("_sinks", "_token", "request")

    def __init__(self, request: Request, sinks: tuple[Sink, ...]) -> None:
        self.request = request
        self._sinks = sinks
        self._token: Token[Request | None] | None = None

    def __enter__(self) -> Self:
        self._token = enter(self.request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None
    ) -> None:
        request = self.request
        request.ended_ns = time.monotonic_ns()
        if cause is not None:
            request.reason, request.message = _outcome(request, cause)
        try:
            for sink in self._sinks:
                sink(request)
        except Exception:
            # Whoever counts or logs must not cost a caller the answer.
            _log.exception("a request could not be noted")
        finally:
            # It holds the engine's answer, and timers that were set within the request hold the request.
            request.read_run = None
            if self._token is not None:
                leave(self._token)


def _outcome(request: Request, cause: BaseException) -> tuple[str, str]:
    if isinstance(cause, GradruleError):
        return reason_name(cause.reason), cause.message
    if isinstance(cause, asyncio.CancelledError):
        if request.is_stream:
            # That is how callers end streams.
            return OK, ""
        return "CANCELLED", "the caller gave the request up"
    return "INTERNAL", type(cause).__name__
