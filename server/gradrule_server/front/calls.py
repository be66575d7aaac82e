"""What servicers get of a call, and the forms of what they give."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

if TYPE_CHECKING:
    from gradrule_server.front.tenants import Tenant
    from gradrule_server.identity import Principal

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
RequestT = TypeVar("RequestT", bound=Message)


# Not frozen, as one is made for each call: a frozen one takes three times as long.
@dataclass(slots=True)
class Caller:
    """Who calls, and the tenant whose names are meant."""

    principal: Principal
    tenant: Tenant


@dataclass(slots=True)
class Call(Generic[RequestT]):
    """One call: the request, its bytes, when it was read (CLOCK_MONOTONIC ns), when it ends (loop time, s), and whose
    it is. The request of a method that reads its bytes itself is empty.
    """

    request: RequestT
    raw: bytes
    received_ns: int
    ends_at: float
    caller: Caller

    @property
    def tenant(self) -> Tenant:
        """Whose names are meant."""
        return self.caller.tenant

    @property
    def principal(self) -> Principal:
        """Who calls."""
        return self.caller.principal


@dataclass(frozen=True, slots=True)
class Incoming(Generic[RequestT]):
    """One call whose request comes in several messages."""

    messages: AsyncIterator[RequestT]
    tenant: Tenant


Write = Callable[[bytes], Awaitable[None]]
Method = Callable[[Call[RequestT]], Awaitable[Message | bytes]]
UploadMethod = Callable[[Incoming[RequestT]], Awaitable[Message | bytes]]
StreamMethod = Callable[[Caller, AsyncIterator[bytes], Write], Awaitable[None]]
"""A bidirectional stream: from its caller, its requests, and what writes an answer. Its return ends the stream."""

MethodTable = Mapping[str, tuple[type[Message] | None, Method]]  # type: ignore[type-arg]  # one table holds methods of every request type
UploadTable = Mapping[str, tuple[type[Message], UploadMethod]]  # type: ignore[type-arg]  # as above
StreamTable = Mapping[str, StreamMethod]
