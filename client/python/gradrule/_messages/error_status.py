"""Makes typed errors from failed RPCs, serializes requests, and reads answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar, cast
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, EncodeError, Message
from google.rpc import error_details_pb2, status_pb2

from gradrule._messages.request_encoding import EncodedForward, EncodedRequest
from gradrule.common.wire_format import Parts, length
from gradrule.errors import (
    Detail,
    GradruleError,
    InternalError,
    MessageTooLargeError,
    UnavailableError,
    error_for_reason,
)

_DETAILS_KEY = "grpc-status-details-bin"
_REQUEST_ID_KEY = "x-request-id"
_NODE = "node:"
# protobuf's limit.
_MAX_MESSAGE_BYTES = 2**31 - 1
# Starts of what gRPC says if it could not connect.
_NOT_CONNECTED = ("connections to all backends failing", "failed to connect to all addresses", "errors resolving")
# What gRPC says of a call that reached a server while it stopped, and that the server did not accept.
_NOT_ACCEPTED = "CANCELLED"
_ADDRESS = re.compile(r"(?:ipv4:|ipv6:)?((?:%5B[0-9a-fA-F:.%]+%5D|\d[\d.]+):\d+|unix[^:]*:[^: ]+): ")
_NO_SERVER = "no server listens at {target}; start one ({serve}), or connect to the address of another"
# What the cause means, by a part of gRPC's text; {address} is the server's. gRPC says it of the last address only.
_CAUSES = {
    "Connection refused": _NO_SERVER,
    "No such file or directory": _NO_SERVER,
    "WRONG_VERSION_NUMBER": "the server at {address} does not use TLS; connect without credentials",
    "CERTIFICATE_VERIFY_FAILED": (
        "the certificate of the server at {address} is not signed by a trusted authority; give the file of its "
        "authority: credentials=gradrule.tls('ca.pem')"
    ),
    "Socket closed": (
        "the server at {address} closed the connection; if it uses TLS, connect with credentials=gradrule.tls(…)"
    ),
    "Connection reset": (
        "the server at {address} closed the connection; if it uses TLS, connect with credentials=gradrule.tls(…)"
    ),
    "Failed parsing HTTP/2": "the server at {address} is not a gRPC server",
}
# Bad gateway, service unavailable, gateway timeout.
_PROXY_STATUS = re.compile(r"Received http2 header with status: (50[234])")
_UNKNOWN_HOST = re.compile(r"lookup failed for (\S+): (.+?)\]?$")
_R = TypeVar("_R")
_M = TypeVar("_M", bound=Message)

# Reasons for codes that gRPC itself sets, without details; see errors.proto.
_REASONS = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
    grpc.StatusCode.CANCELLED: "CANCELLED",
    grpc.StatusCode.UNAVAILABLE: "UNAVAILABLE",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "MESSAGE_TOO_LARGE",
    grpc.StatusCode.UNIMPLEMENTED: "UNSUPPORTED",
}


class AnswerLostError(Exception):
    """Reports that a call reached a server that went away before the end of its answer.

    Args:
        cause: Error to raise if the call is not sent again.
    """

    def __init__(self, cause: GradruleError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def closed_error(target: str) -> UnavailableError:
    """Returns the error of calls of a client that was closed."""
    return UnavailableError(f"the client of {target!r} is closed")


def lost_or_error(failure: grpc.RpcError, target: str) -> AnswerLostError | GradruleError:
    """Returns the typed error of a failed call, wrapped in `AnswerLostError` if the server did not send the error."""
    error = error_of(failure, target)
    said = cast(Any, failure).details() or ""
    # Servers add the id of the request to each error.
    is_lost = not error.request_id and (
        said == _NOT_ACCEPTED
        if error.code is grpc.StatusCode.CANCELLED
        else error.code is grpc.StatusCode.UNAVAILABLE and reached_server(error)
    )
    return AnswerLostError(error) if is_lost else error


def reached_server(error: GradruleError) -> bool:
    """Returns whether a call that failed with an error of this module had reached a server or a proxy."""
    return not error._is_unreached


def error_of(failure: grpc.RpcError, target: str) -> GradruleError:
    """Returns the typed error of a failed call, sync or async. `target`: that of the client."""
    call = cast(Any, failure)
    error = _error_of(call, target)
    error.request_id = next((str(value) for key, value in call.trailing_metadata() or () if key == _REQUEST_ID_KEY), "")
    return error


def _error_of(call: Any, target: str) -> GradruleError:
    code: grpc.StatusCode = call.code()
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                break
            if (error := _from_status(status, code)) is not None:
                return error
    return error_of_code(code, call.details() or f"the call failed: {code.name}", target)


def error_of_code(code: grpc.StatusCode, said: str, target: str) -> GradruleError:
    """Returns the typed error of a call that failed without details; `said`: the text of gRPC or of a proxy."""
    message = _connection_problem(said, target) or _proxy_problem(said, target) or said
    error = error_for_reason(_REASONS.get(code, "INTERNAL"), message, code=code.name)
    error._is_unreached = said.startswith(_NOT_CONNECTED)
    return error


def _connection_problem(said: str, target: str) -> str | None:
    """Returns why there is no connection and what to do, from the text of gRPC; None: another error."""
    if not said.startswith(_NOT_CONNECTED):
        return None
    if (host := _UNKNOWN_HOST.search(said)) is not None:
        return f"the host of {host[1]!r} is not found: {host[2]}"
    address = _ADDRESS.search(said)
    where = target if address is None else unquote(address[1])
    port = target.rpartition(":")[2]
    serve = f"gradrule serve --port {port}" if port.isdecimal() else "gradrule serve"
    return next(
        (
            meaning.format(address=where, target=target, serve=serve)
            for part, meaning in _CAUSES.items()
            if part in said
        ),
        None,
    )


def _proxy_problem(said: str, target: str) -> str | None:
    """Returns what an HTTP status means that a proxy answered with; None: another error."""
    if (found := _PROXY_STATUS.search(said)) is None:
        return None
    return f"the proxy at {target} reaches no server (HTTP status {found[1]}); its servers may be starting again"


def error_from_status_bytes(data: bytes) -> GradruleError:
    """Returns the typed error of a serialized status, which streams answer with."""
    try:
        return error_from_status(status_pb2.Status.FromString(data))
    except DecodeError as cause:
        return InternalError(f"the server's answer cannot be read: {cause}")


def error_from_status(status: status_pb2.Status) -> GradruleError:
    """Returns the typed error of a status, which sessions answer with."""
    code = next((code for code in grpc.StatusCode if code.value[0] == status.code), grpc.StatusCode.UNKNOWN)
    error = _from_status(status, code) or error_for_reason(
        _REASONS.get(code, "INTERNAL"), status.message, code=code.name
    )
    info = _unpacked(status, error_details_pb2.RequestInfo())
    error.request_id = "" if info is None else info.request_id
    return error


def waiting_error(failure: grpc.RpcError, target: str) -> GradruleError | None:
    """Returns the error with which waiting for a server ends; None: continue to wait."""
    error = error_of(failure, target)
    if error.reason == "DEADLINE_EXCEEDED":
        return UnavailableError(f"no server answers at {target!r}")
    return None if error.reason == "UNAVAILABLE" else error


def message_parts(request: Message | EncodedRequest | EncodedForward) -> tuple[Parts, int]:
    """Returns the parts of a request's bytes, and their size. Raises `MessageTooLargeError` above 2 GiB."""
    try:
        parts = (request.SerializeToString(),) if isinstance(request, Message) else request.parts()
    except (EncodeError, ValueError) as cause:
        raise MessageTooLargeError(f"the request is too large to be one message: {cause}") from None
    size = length(parts)
    if size > _MAX_MESSAGE_BYTES:
        raise MessageTooLargeError(
            f"the request is too large to be one message: {size} bytes of at most {_MAX_MESSAGE_BYTES}"
        )
    return parts, size


def parsed(read: Callable[[bytes], Any], decode: Callable[[Any], _R], answer: bytes) -> _R:
    """Reads and decodes an answer's bytes. Raises `InternalError`."""
    try:
        message = read(answer)
    except DecodeError as cause:
        raise InternalError(f"the server's answer cannot be read: {cause}") from None
    return decode(message)


def _from_status(status: status_pb2.Status, code: grpc.StatusCode) -> GradruleError | None:
    info = _unpacked(status, error_details_pb2.ErrorInfo())
    if info is None or not info.reason:
        return None
    bad = _unpacked(status, error_details_pb2.BadRequest())
    retry = _unpacked(status, error_details_pb2.RetryInfo())
    details = [
        Detail(
            violation.reason or info.reason,
            violation.description,
            node=violation.field.removeprefix(_NODE) if violation.field.startswith(_NODE) else "",
            field="" if violation.field.startswith(_NODE) else violation.field,
        )
        for violation in (bad.field_violations if bad is not None else ())
    ]
    total = info.metadata.get("findings_total", "")
    return error_for_reason(
        info.reason,
        status.message,
        code=code.name,
        details=details,
        retry_delay=retry.retry_delay.ToNanoseconds() / 1e9 if retry is not None else None,
        findings_total=int(total) if total.isdecimal() else None,
    )


def _unpacked(status: status_pb2.Status, message: _M) -> _M | None:
    return next((message for detail in status.details if detail.Unpack(message)), None)
