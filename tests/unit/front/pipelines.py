"""Request pipelines without a server, with fake tenants and contexts that record how calls end."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from gradrule.v1 import rule_pb2
from gradrule_server.front.admission import Admission, InFlight, InFlightLimits
from gradrule_server.front.authentication import CallerAuthenticator
from gradrule_server.front.calls import Method, StreamMethod
from gradrule_server.front.request_pipeline import CallTimes, RequestPipeline
from gradrule_server.identity import Authenticator
from gradrule_server.quotas import Quota


class Aborted(Exception):
    """The call ended with a status."""


class FakeTenants:
    """Fake tenants that have only quotas."""

    def __init__(self, streams: int = 1) -> None:
        self.tenants: dict[str, Any] = {}
        self.inside = 0
        self._streams = streams

    def get_loaded(self, name: str) -> Any:
        return self.tenants.get(name)

    async def load(self, name: str) -> Any:
        quotas = defaultdict(Quota.unlimited, streams=Quota(self._streams, "streams", "--tenant-streams"))
        return self.tenants.setdefault(
            name,
            SimpleNamespace(
                name=name,
                in_flight=InFlight(),
                quotas=quotas,
                program_service=SimpleNamespace(blobs=None, limits=None),
                handle_ttl_s=60.0,
                session_idle_s=0.0,
            ),
        )

    def retain(self, _: Any) -> None:
        self.inside += 1

    def release(self, _: Any) -> None:
        self.inside -= 1


def create_pipeline(
    max_requests: int = 9,
    default_deadline_s: float = 10.0,
    max_deadline_s: float = 10.0,
    stall_s: float = 10.0,
    recheck_s: float = 10.0,
    credentials: Authenticator | None = None,
) -> RequestPipeline:
    times = CallTimes(default_deadline_s, max_deadline_s, stall_s, recheck_s)
    return RequestPipeline(
        CallerAuthenticator(credentials or Authenticator()), FakeTenants(), create_admission(max_requests), times
    )


def create_admission(max_requests: int) -> Admission:
    bound = InFlightLimits(max_requests, 10**6)
    return Admission(bound, bound)


class Context:
    """A fake gRPC context, with `remaining` seconds until the deadline; None: no deadline."""

    def __init__(self, remaining: float | None = None) -> None:
        self.request = b""
        self.remaining = remaining
        self.reason = ""
        self.code = grpc.StatusCode.OK
        self.trailers: dict[str, str | bytes] = {}
        self.callbacks: list[Any] = []
        self.requests: AsyncIterator[bytes] | None = None

    def disable_next_message_compression(self) -> None:
        pass

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "ipv4:192.0.2.1:1234"

    def set_trailing_metadata(self, trailers: tuple[tuple[str, str], ...]) -> None:
        self.trailers = dict(trailers)

    def add_done_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def done(self) -> None:
        """Calls the done callbacks, as gRPC does when the client has read everything."""
        for callback in self.callbacks:
            callback(self)

    def time_remaining(self) -> float | None:
        return self.remaining

    async def read(self) -> object:
        return self.request if self.requests is None else await anext(self.requests, grpc.aio.EOF)

    async def write(self, _: bytes) -> None:
        """Never returns, like a write to a client that does not read."""
        await asyncio.Event().wait()

    async def abort(self, code: grpc.StatusCode, _: str, trailing_metadata: tuple[tuple[str, bytes], ...]) -> None:
        info = error_details_pb2.ErrorInfo()
        status_pb2.Status.FromString(trailing_metadata[0][1]).details[0].Unpack(info)
        self.code, self.reason = code, info.reason
        self.trailers = dict(trailing_metadata)
        raise Aborted


async def call(pipeline: RequestPipeline, method: Method[Any], context: Context, raw: bytes = b"") -> bytes:
    service = pipeline.create_service("s", {"m": (rule_pb2.GetRuleRequest, method)})
    handler: Any = service.service(SimpleNamespace(method="/s/m", invocation_metadata=()))
    if handler.stream_unary is None:
        # Refused before the request is read.
        assert await handler.stream_stream(never_read(), context) is None
    context.request = raw
    answer: bytes = await handler.stream_unary(never_read(), context)
    return answer


async def stream(
    pipeline: RequestPipeline, method: StreamMethod, context: Context, requests: AsyncIterator[bytes] | None = None
) -> None:
    handler: Any = pipeline.create_service("s", streams={"m": method}).service(
        SimpleNamespace(method="/s/m", invocation_metadata=())
    )
    context.requests = never_read() if requests is None else requests
    await handler.stream_stream(never_read(), context)


async def never_read() -> AsyncIterator[bytes]:
    raise AssertionError
    yield b""
