"""What is known of the request under way, wherever in the server one is.

It lives in a context variable, which tasks and threads that work for the request inherit; code far from the front
notes here what only it knows. Outside of requests (warming engines, starting) nothing is noted.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

OK = "OK"
UNKNOWN_TENANT = ""
"""Whose a request is until its caller is known; no tenant has that name."""

REQUEST_ID = "x-request-id"
TRACE_PARENT = "traceparent"
TRACE_STATE = "tracestate"
ANSWER_COMPRESSION = "gradrule-answer-compression"
"""Asks for answers compressed by gRPC; its value is `gzip`. gRPC does not tell how a request was compressed."""

_REQUEST_ID_FORM = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACE_PARENT_FORM = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_MAX_TRACE_BYTES = 512

# Ids that a server makes: its own beginning, so that those of two servers differ, and a number.
_BEGINNING = secrets.token_hex(4)
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Registration:
    """Something that was created or deleted. action: `create` or `delete`; kind: `rule`, `program`, `blob`."""

    action: str
    kind: str
    name: str
    digest: str = ""


class EngineRun(NamedTuple):
    """How long a request waited in an engine and ran there, in nanoseconds, and on which device."""

    queue_ns: int = 0
    run_ns: int = 0
    device: str = ""


NOT_RUN = EngineRun()
_NO_LOOKUPS: Mapping[str, int] = MappingProxyType({})


class Request:
    """One request, or one of those within a stream. Times are CLOCK_MONOTONIC in nanoseconds; 0: not known.

    rpc: `GradientService/Evaluate`; a request within a stream has its kind behind it. reason: `OK` or the name of an
    ErrorReason. tenant: whose it is, once that is known. principal: who asked, beyond the tenant. peer: tells the
    caller's address. is_stream: it holds `parts` requests, each of which is one of its own. wants_gzip: its answer
    is to be compressed by gRPC.
    """

    # Most requests leave most fields as they are: class attributes cost a request nothing.
    ended_ns = 0
    reason = OK
    message = ""
    bytes_in = 0
    bytes_out = 0
    compile_started_ns = 0
    compile_ns = 0
    taken_up_ns = 0
    read_run: Callable[[], EngineRun] | None = None
    hits: Mapping[str, int] = _NO_LOOKUPS
    misses: Mapping[str, int] = _NO_LOOKUPS
    registration: Registration | None = None
    is_stream = False
    parts = 0
    wants_gzip = False

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
        """It has not failed."""
        return self.reason == OK

    @property
    def seconds(self) -> float:
        """How long it took, once it has ended."""
        return (self.ended_ns - self.received_ns) / 1e9

    @property
    def trace_id(self) -> str:
        """The id of the caller's trace, in hex; empty where it has none."""
        found = _TRACE_PARENT_FORM.fullmatch(self.trace_parent)
        return found[1] if found is not None else ""

    @property
    def has_run(self) -> bool:
        """An engine has answered it."""
        return self.taken_up_ns > 0

    @property
    def engine_run(self) -> EngineRun:
        """What the engine says of its run; zeros before."""
        return NOT_RUN if self.read_run is None else self.read_run()

    def ran(self, taken_up_ns: int, read: Callable[[], EngineRun]) -> None:
        """An engine has run it, which it was handed on to at `taken_up_ns`. `read`: called only if somebody asks."""
        self.taken_up_ns, self.read_run = taken_up_ns, read


_current: ContextVar[Request | None] = ContextVar("gradrule_request", default=None)


def current() -> Request | None:
    """The request under way; None outside of requests."""
    return _current.get()


def enter(request: Request) -> Token[Request | None]:
    """Makes it the request under way, until `leave` is called with what this returns."""
    return _current.set(request)


def leave(token: Token[Request | None]) -> None:
    """Makes the request that was under way before `enter` the one under way again."""
    _current.reset(token)


def note_tenant(tenant: str, principal: str = "") -> None:
    """Notes whose request it is."""
    request = _current.get()
    if request is not None:
        request.tenant, request.principal = tenant, principal


def note_lookup(cache: str, *, is_hit: bool) -> None:
    """Notes that something was looked for in a cache."""
    request = _current.get()
    if request is not None:
        if is_hit:
            request.hits = {**request.hits, cache: request.hits.get(cache, 0) + 1}
        else:
            request.misses = {**request.misses, cache: request.misses.get(cache, 0) + 1}


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Notes the time that is spent within this context as spent on compiling."""
    started_ns = time.monotonic_ns()
    try:
        yield
    finally:
        request = _current.get()
        if request is not None:
            request.compile_started_ns = request.compile_started_ns or started_ns
            request.compile_ns += time.monotonic_ns() - started_ns


def of_metadata(
    rpc: str, metadata: Iterable[tuple[str, str | bytes]] | None, peer: Callable[[], str], received_ns: int
) -> Request:
    """A request with the id and trace that its metadata tell; an id that is missing or malformed is made."""
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
    request = Request(
        request_id or f"{_BEGINNING}-{next(_NUMBERS):x}", rpc, received_ns, peer, trace_parent, trace_state
    )
    if wants_gzip:
        request.wants_gzip = True
    return request


def part_of(stream: Request, kind: str, received_ns: int) -> Request:
    """A request within a stream."""
    stream.parts += 1
    return Request(
        f"{stream.id}/{stream.parts}",
        f"{stream.rpc}/{kind}",
        received_ns,
        stream.peer,
        stream.trace_parent,
        stream.trace_state,
        stream.tenant,
        stream.principal,
    )
