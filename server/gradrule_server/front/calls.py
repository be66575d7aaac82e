"""What service methods receive of a call and return, and how gRPC's call object is used."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from gradrule_server.operations.request_record import REQUEST_ID, ObservedRequest, Observer

if TYPE_CHECKING:
    from gradrule_server.front.tenants import Tenant
    from gradrule_server.identity import Principal

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
RequestT = TypeVar("RequestT", bound=Message)

MAX_COMPRESSED_BYTES = 256 * 1024
"""Largest response that gRPC compresses, bytes.

gRPC compresses on the event loop's thread, 25 ms for each MiB, and all other calls wait. Engines can compress tensors
instead.
"""


# Not frozen: one is made for each call, and a frozen dataclass takes three times as long to make.
@dataclass(slots=True)
class Caller:
    """The authenticated principal of a call, and the tenant whose resources the call uses."""

    principal: Principal
    tenant: Tenant


@dataclass(slots=True)
class Call(Generic[RequestT]):
    """One call.

    Attributes:
        request: the parsed request; empty for a method that reads `raw` itself.
        raw: the bytes of the request.
        received_ns: when the request had been read, CLOCK_MONOTONIC, nanoseconds.
        ends_at: the deadline, event loop time, seconds.
        caller: the principal and its tenant.
    """

    request: RequestT
    raw: bytes
    received_ns: int
    ends_at: float
    caller: Caller

    @property
    def tenant(self) -> Tenant:
        """The tenant whose resources the call uses."""
        return self.caller.tenant

    @property
    def principal(self) -> Principal:
        """The authenticated principal."""
        return self.caller.principal


@dataclass(frozen=True, slots=True)
class Upload(Generic[RequestT]):
    """One call whose request comes in several messages."""

    messages: AsyncIterator[RequestT]
    tenant: Tenant


Write = Callable[[bytes], Awaitable[None]]
Method = Callable[[Call[RequestT]], Awaitable[Message | bytes]]
UploadMethod = Callable[[Upload[RequestT]], Awaitable[Message | bytes]]
StreamMethod = Callable[[Caller, AsyncIterator[bytes], Write], Awaitable[None]]
"""Serves a bidirectional stream, given its caller, its requests and a function that writes a response."""

MethodTable = Mapping[str, tuple[type[Message] | None, Method]]  # type: ignore[type-arg]  # one table holds methods of every request type
UploadTable = Mapping[str, tuple[type[Message], UploadMethod]]  # type: ignore[type-arg]  # as above
StreamTable = Mapping[str, StreamMethod]


def observe_call(observer: Observer, rpc: str, context: Context) -> ObservedRequest:
    """Starts the record of an RPC, and sends its caller the request id that the log has."""
    observed = observer.rpc(rpc, context.invocation_metadata(), context.peer)
    context.set_trailing_metadata(((REQUEST_ID, observed.request.id),))
    return observed


async def compress_responses(context: Context) -> None:
    """Makes gRPC compress all further messages of a call.

    grpc.aio forgets the setting unless the initial metadata is sent here (https://github.com/grpc/grpc/issues/34690).
    """
    context.set_compression(grpc.Compression.Gzip)
    await context.send_initial_metadata(())


def when_done(context: Context, callback: Callable[[object], object]) -> None:
    """Calls `callback` with the context once gRPC has finished a call, including sending its last bytes."""
    context.add_done_callback(callback)  # type: ignore[arg-type]  # the stubs ask for a class of their own
