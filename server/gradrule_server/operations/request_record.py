"""Records each request, and passes its record to the sinks that count, log or export it when it ends.

The record of the current request is in a context variable, which the tasks and threads of a request inherit. Outside of
requests (starting the server, warming engines) the functions that record do nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Self

from gradrule.common import wire_format
from gradrule.v1 import evaluate_pb2
from gradrule_server.errors import GradruleError, reason_name

_log = logging.getLogger(__name__)

OK = "OK"
UNKNOWN_TENANT = ""
"""The tenant of a request whose caller is not yet known; no tenant has this name."""

REQUEST_ID = "x-request-id"
TRACE_PARENT = "traceparent"
TRACE_STATE = "tracestate"
ANSWER_COMPRESSION = "gradrule-answer-compression"
"""Asks gRPC to compress the responses; its value is `gzip`. gRPC does not report how a request was compressed."""

_REQUEST_ID_FORM = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACE_PARENT_FORM = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_MAX_TRACE_BYTES = 512

# Generated request ids have a random prefix, so that ids of two servers differ, and a number.
_ID_PREFIX = secrets.token_hex(4)
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Registration:
    """A rule, program or blob that a request has created or deleted.

    `action` is `create` or `delete`; `kind` is `rule`, `program` or `blob`.
    """

    action: str
    kind: str
    name: str
    digest: str = ""


class CallPath(enum.StrEnum):
    """The code path of a call of `Evaluate`."""

    KNOWN = "known"
    """The call has the header of an earlier one, so nothing is decided again."""
    GENERAL = "general"
    """The program of the call is looked up, and compiled if needed."""


class EngineRun(NamedTuple):
    """How long a request waited in an engine and ran there, in nanoseconds, and on which device."""

    queue_ns: int = 0
    run_ns: int = 0
    device: str = ""


NOT_RUN = EngineRun()
_NO_LOOKUPS: Mapping[str, int] = MappingProxyType({})


class RequestRecord:
    """The record of one request. Times are of CLOCK_MONOTONIC in nanoseconds; 0: not known.

    Attributes:
        id: The request id, from the caller or generated.
        rpc: `GradientService/Evaluate`; for a request within a stream followed by its kind.
        received_ns: When the first byte arrived.
        peer: Returns the caller's address.
        trace_parent: The caller's header `traceparent`, if valid.
        trace_state: The caller's header `tracestate`.
        tenant: The caller's tenant, once it is known.
        principal: The label of the caller's credential.
        ended_ns: When the request ended.
        reason: `OK`, or the name of an ErrorReason.
        message: The error's message.
        bytes_in: Size of the request.
        bytes_out: Size of the response.
        compile_started_ns: When checking and compiling started.
        compile_ns: Time spent on checking and compiling.
        sent_to_engine_ns: When the request was sent to an engine that has run it.
        read_engine_run: Reads the times of the run from the engine's response, when somebody asks.
        hits: Number of cache hits, by cache.
        misses: Number of cache misses, by cache.
        registration: What the request has created or deleted.
        is_stream: Whether it is a stream, whose requests have records of their own.
        parts: Number of requests within the stream.
        wants_gzip: Whether gRPC compresses the response.
        path: The code path of a call of `Evaluate`; None for other requests.
    """

    # Most requests leave most fields as they are: class attributes cost a request nothing.
    ended_ns = 0
    reason = OK
    message = ""
    bytes_in = 0
    bytes_out = 0
    compile_started_ns = 0
    compile_ns = 0
    sent_to_engine_ns = 0
    read_engine_run: Callable[[], EngineRun] | None = None
    hits: Mapping[str, int] = _NO_LOOKUPS
    misses: Mapping[str, int] = _NO_LOOKUPS
    registration: Registration | None = None
    is_stream = False
    parts = 0
    wants_gzip = False
    path: CallPath | None = None

    def __init__(
        self,
        id: str,
        rpc: str,
        received_ns: int,
        peer: Callable[[], str],
        trace_parent: str = "",
        trace_state: str = "",
        tenant: str = UNKNOWN_TENANT,
        principal: str = "",
    ) -> None:
        self.id = id
        self.rpc = rpc
        self.received_ns = received_ns
        self.peer = peer
        self.trace_parent = trace_parent
        self.trace_state = trace_state
        self.tenant = tenant
        self.principal = principal

    @property
    def is_ok(self) -> bool:
        """Whether the request has not failed."""
        return self.reason == OK

    @property
    def seconds(self) -> float:
        """The duration of an ended request, in seconds."""
        return (self.ended_ns - self.received_ns) / 1e9

    @property
    def trace_id(self) -> str:
        """The id of the caller's trace, in hex; empty if it has none."""
        found = _TRACE_PARENT_FORM.fullmatch(self.trace_parent)
        return found[1] if found is not None else ""

    @property
    def has_run(self) -> bool:
        """Whether an engine has answered the request."""
        return self.sent_to_engine_ns > 0

    @property
    def engine_run(self) -> EngineRun:
        """The times of the engine's run; zeros before it has answered."""
        return NOT_RUN if self.read_engine_run is None else self.read_engine_run()


_EVALUATE_FIELDS = evaluate_pb2.EvaluateResponse.DESCRIPTOR.fields_by_name
EVALUATE_TIMINGS, EVALUATE_DEVICE = _EVALUATE_FIELDS["timings"].number, _EVALUATE_FIELDS["device"].number
PULL_BACK_TIMINGS = evaluate_pb2.PullBackResponse.DESCRIPTOR.fields_by_name["timings"].number

_current: ContextVar[RequestRecord | None] = ContextVar("gradrule_request", default=None)


def current() -> RequestRecord | None:
    """Returns the record of the current request; None outside of requests."""
    return _current.get()


def record_cache_lookup(cache: str, *, is_hit: bool) -> None:
    """Records a look-up in a cache by the current request."""
    request = _current.get()
    if request is not None:
        if is_hit:
            request.hits = {**request.hits, cache: request.hits.get(cache, 0) + 1}
        else:
            request.misses = {**request.misses, cache: request.misses.get(cache, 0) + 1}


@contextlib.contextmanager
def timing_compilation() -> Iterator[None]:
    """Records the time spent in the body of the `with` statement as time of compiling."""
    started_ns = time.monotonic_ns()
    try:
        yield
    finally:
        request = _current.get()
        if request is not None:
            request.compile_started_ns = request.compile_started_ns or started_ns
            request.compile_ns += time.monotonic_ns() - started_ns


def from_metadata(
    rpc: str, metadata: Iterable[tuple[str, str | bytes]] | None, peer: Callable[[], str], received_ns: int
) -> RequestRecord:
    """Makes a record with the request id and trace of the metadata; generates an id if that is missing or malformed."""
    request_id = trace_parent = trace_state = ""
    wants_gzip = False
    for key, value in metadata or ():
        if key == REQUEST_ID:
            if isinstance(value, str) and _REQUEST_ID_FORM.fullmatch(value):
                request_id = value
        elif key == TRACE_PARENT:
            if isinstance(value, str) and len(value) <= _MAX_TRACE_BYTES and _TRACE_PARENT_FORM.fullmatch(value):
                trace_parent = value
        elif key == TRACE_STATE and isinstance(value, str) and len(value) <= _MAX_TRACE_BYTES:
            trace_state = value
        elif key == ANSWER_COMPRESSION:
            wants_gzip = value == "gzip"
    generated = request_id or f"{_ID_PREFIX}-{next(_NUMBERS):x}"
    request = RequestRecord(generated, rpc, received_ns, peer, trace_parent, trace_state)
    if wants_gzip:
        request.wants_gzip = True
    return request


def record_path(path: CallPath) -> None:
    """Records the code path of the current request."""
    request = _current.get()
    if request is not None:
        request.path = path


def record_run(response: bytes, sent_ns: int) -> None:
    """Records an engine's encoded `EvaluateResponse`. `sent_ns`: when the request was sent to the engine."""
    request = _current.get()
    if request is not None:
        request.sent_to_engine_ns = sent_ns
        request.read_engine_run = lambda: _engine_run(response, EVALUATE_TIMINGS, EVALUATE_DEVICE)


def record_pull_back(response: bytes, sent_ns: int) -> None:
    """Records an engine's encoded `PullBackResponse`. `sent_ns`: when the request was sent to the engine."""
    request = _current.get()
    if request is not None:
        request.sent_to_engine_ns = sent_ns
        request.read_engine_run = lambda: _engine_run(response, PULL_BACK_TIMINGS)


def _engine_run(response: bytes, timings_field: int, device_field: int = 0) -> EngineRun:
    """Reads the timings and the device of an encoded response, without parsing its tensors."""
    found = read_fields(response, (timings_field, device_field))
    timings = evaluate_pb2.Timings.FromString(found.get(timings_field, b""))
    device = str(found.get(device_field, b""), "utf-8")
    return EngineRun(timings.queue.ToNanoseconds(), timings.run.ToNanoseconds(), device)


def read_fields(message: bytes, numbers: tuple[int, ...]) -> dict[int, bytes]:
    """Returns the bytes of length-delimited fields of an encoded message, by number; the last occurrence of each.

    Raises:
        ValueError: The bytes are not a valid message.
    """
    found = wire_format.fields(message, 0, len(message))
    return {number: bytes(message[start:end]) for number, start, end in found if number in numbers}


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
        stream = _current.get()
        if stream is None:
            return ObservedRequest(from_metadata(kind, (), str, received_ns), self._sinks)
        stream.parts += 1
        request = RequestRecord(
            f"{stream.id}/{stream.parts}",
            f"{stream.rpc}/{kind}",
            received_ns,
            stream.peer,
            stream.trace_parent,
            stream.trace_state,
            stream.tenant,
            stream.principal,
        )
        return ObservedRequest(request, self._sinks)


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
        self._token = _current.set(self.request)
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
                _current.reset(self._token)


def _reason_and_message(request: RequestRecord, cause: BaseException) -> tuple[str, str]:
    if isinstance(cause, GradruleError):
        return reason_name(cause.reason), cause.message
    if isinstance(cause, asyncio.CancelledError):
        if request.is_stream:
            # Callers end streams by cancelling them.
            return OK, ""
        return "CANCELLED", "the caller gave the request up"
    return "INTERNAL", type(cause).__name__
