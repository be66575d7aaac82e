"""gRPC calls: what service methods receive and return, and the statuses with which calls fail.

No other module converts errors to statuses.
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NoReturn, TypeAlias, TypeVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from gradrule.common.status_codes import DEFAULT_STATUS_CODE, STATUS_CODES
from gradrule.v1 import errors_pb2
from gradrule_server.errors import Finding, GradruleError, error, lacks_memory, reason_name
from gradrule_server.operations.request_record import REQUEST_ID, ObservedRequest, Observer, RequestRecord

if TYPE_CHECKING:
    from gradrule_server.front.open_streams import Stream
    from gradrule_server.front.tenants import Tenant
    from gradrule_server.identity import Principal

_log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
RequestT = TypeVar("RequestT", bound=Message)

MAX_COMPRESSED_BYTES = 256 * 1024
"""Largest response that gRPC compresses, bytes.

gRPC compresses on the event loop's thread, 25 ms for each MiB, and all other calls wait. Engines can compress tensors
instead.
"""

DOMAIN = "gradrule"
DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"

# gRPC drops larger trailers, and the error with them.
MAX_FINDINGS_BYTES = 4096
MAX_RESOURCES_BYTES = 3072
MAX_MESSAGE_BYTES = 1024
_MAX_NAME_BYTES = 256
_NO_MEMORY_RETRY_S = 1.0
# Bytes that packing a message into an Any adds.
_ANY_BYTES = 56


# Not frozen: one is made for each call, and a frozen dataclass takes three times as long to make.
@dataclass(slots=True)
class Caller:
    """The authenticated principal of a call, and the tenant whose resources the call uses."""

    principal: Principal
    tenant: Tenant


@dataclass(slots=True)
class Call(Generic[RequestT]):
    """One admitted request, of a unary call or of a stream.

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


Method = Callable[[Call[RequestT]], Awaitable[Message | bytes]]
UploadMethod = Callable[[Upload[RequestT]], Awaitable[Message | bytes]]
StreamMethod: TypeAlias = "Callable[[Stream], Awaitable[None]]"

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


def status_code(reason: errors_pb2.ErrorReason.ValueType) -> grpc.StatusCode:
    """Returns the gRPC status code of a reason, as errors.proto documents it."""
    return grpc.StatusCode[STATUS_CODES.get(reason_name(reason), DEFAULT_STATUS_CODE)]


def to_status(cause: GradruleError) -> status_pb2.Status:
    """Returns the `google.rpc.Status` of an error, small enough for trailers."""
    if lacks_memory(cause.__cause__):
        # What could not be parsed for lack of memory is not malformed.
        cause = _no_memory_left()
    violations, sent = _violations(cause.findings)
    info = error_details_pb2.ErrorInfo(
        reason=reason_name(cause.reason),
        domain=DOMAIN,
        metadata={"findings_total": str(len(cause.findings)), "findings_sent": str(sent)},
    )
    details: list[Message] = [info]
    if violations.field_violations:
        details.append(violations)
    if cause.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(cause.retry_after_s * 1e9))
        details.append(retry)
    details += _resources(cause)
    status = status_pb2.Status(code=status_code(cause.reason).value[0], message=_cut(cause.message, MAX_MESSAGE_BYTES))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def log_incident() -> GradruleError:
    """Logs the current exception under a random number. Returns an INTERNAL error with that number for the caller.

    The exception's text may hold what other callers sent, so it goes to the log only. Lack of memory is no incident.
    """
    if lacks_memory(sys.exception()):
        _log.exception("the front end has no memory left for a request")
        return _no_memory_left()
    number = secrets.token_hex(4)
    _log.exception("incident %s", number)
    return error(errors_pb2.ERROR_REASON_INTERNAL, f"the server failed; its log has more under incident {number}")


def _no_memory_left() -> GradruleError:
    message = (
        "the server's front end has no memory left for the request; send less at a time, or give the server more memory"
    )
    return error(errors_pb2.ERROR_REASON_MEMORY_EXCEEDED, message, retry_after_s=_NO_MEMORY_RETRY_S)


async def abort(context: Context, cause: GradruleError, request: RequestRecord) -> NoReturn:
    """Ends a call with the status of an error."""
    status = to_status(cause)
    trailers: list[tuple[str, str | bytes]] = [
        (DETAILS_KEY, status.SerializeToString()),
        (REQUEST_ID, request.id),
    ]
    if cause.retry_after_s is not None:
        # gRPC clients that retry by themselves wait for this time.
        trailers.append((_PUSHBACK_KEY, str(int(cause.retry_after_s * 1000))))
    await context.abort(status_code(cause.reason), status.message, trailing_metadata=tuple(trailers))
    raise AssertionError("abort always raises")


def _resources(cause: GradruleError) -> list[Message]:
    """Returns as many resources of an error as fit."""
    infos: list[Message] = []
    size = 0
    for resource in (*(() if cause.resource is None else (cause.resource,)), *cause.resources):
        info = error_details_pb2.ResourceInfo(
            resource_type=resource.type, resource_name=_cut(resource.name, _MAX_NAME_BYTES)
        )
        size += info.ByteSize() + _ANY_BYTES
        if size > MAX_RESOURCES_BYTES:
            break
        infos.append(info)
    return infos


def _violations(findings: Sequence[Finding]) -> tuple[error_details_pb2.BadRequest, int]:
    """Returns as many findings as fit, and their number. `field` names the field of the request, or the node."""
    request = error_details_pb2.BadRequest()
    sent = 0
    for finding in findings:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(finding.field or (f"node:{finding.node}" if finding.node else ""), _MAX_NAME_BYTES),
            description=_cut(finding.message, MAX_MESSAGE_BYTES),
            reason=reason_name(finding.reason),
        )
        if request.ByteSize() + violation.ByteSize() + 4 > MAX_FINDINGS_BYTES:
            break
        request.field_violations.append(violation)
        sent += 1
    return request, sent


def _cut(text: str, limit: int) -> str:
    # Each character takes at least one byte, so only the first `limit` characters of a long text are encoded.
    data = text[: limit + 1].encode()
    return text if len(data) <= limit else data[: limit - 3].decode(errors="ignore") + "…"
