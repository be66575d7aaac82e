"""Checks that an answer is a valid message, or an error with a reason that errors.proto defines."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from gradrule.v1 import errors_pb2, evaluate_pb2, session_pb2
from gradrule_server.front.calls import status_code

_PREFIX = "ERROR_REASON_"
_DETAILS_KEY = "grpc-status-details-bin"
_MADE_BY_GRPC = {
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
LOST_STATUS = "LOST_STATUS"
"""gRPC's asyncio client says this itself, where it still wrote to a stream that the server had ended with a status."""

_LOST = "Internal error from Core"


class Verdict(enum.Enum):
    """Classifies an answer."""

    GOOD = "good"
    REFUSED = "refused"
    FAULT = "fault"


@dataclass(frozen=True)
class Judgement:
    """Holds the verdict on one answer. reason: of the error; what: of the fault; is_bare: only gRPC reported it."""

    verdict: Verdict
    reason: str = ""
    what: str = ""
    retry_after_s: float | None = None
    is_bare: bool = False


GOOD = Judgement(Verdict.GOOD)


def check_answer(kind: type[Message], data: bytes) -> Judgement:
    """Checks the bytes of an answer with status OK, or one message of a stream."""
    try:
        message = kind.FromString(data)
    except DecodeError:
        return _fault(f"the answer is no {kind.DESCRIPTOR.full_name}")
    if isinstance(message, evaluate_pb2.StreamEvaluateResponse | session_pb2.RunSessionResponse):
        kind_of_answer = message.WhichOneof("response")
        if kind_of_answer is None:
            return _fault("an answer of a stream that holds nothing")
        if kind_of_answer == "status":
            return check_status(message.status.SerializeToString(), None)
    return GOOD


def check_failure(failure: grpc.RpcError) -> Judgement:
    """Checks a failed call."""
    call: Any = failure
    details = dict(call.trailing_metadata() or ()).get(_DETAILS_KEY)
    code: grpc.StatusCode = call.code()
    if details is not None:
        return check_status(details, code)
    if code in _MADE_BY_GRPC:
        return Judgement(Verdict.REFUSED, reason=code.name, what=f"{call.details()!r:.300}", is_bare=True)
    if code is grpc.StatusCode.INTERNAL and call.details() == _LOST:
        return Judgement(Verdict.REFUSED, reason=LOST_STATUS)
    return _fault(f"{code.name} without details: {call.details()!r:.300}")


def check_status(data: bytes, code: grpc.StatusCode | None) -> Judgement:
    """Checks the bytes of a `google.rpc.Status`. `code`: the status code of the call itself."""
    try:
        status = status_pb2.Status.FromString(data)
    except DecodeError:
        return _fault("the details are no google.rpc.Status")
    infos = [_unpacked(detail, error_details_pb2.ErrorInfo()) for detail in status.details]
    found = [info for info in infos if info is not None]
    if len(found) != 1:
        return _fault(f"{len(found)} ErrorInfos with code {status.code}: {status.message!r:.300}")
    info = found[0]
    try:
        number = errors_pb2.ErrorReason.Value(_PREFIX + info.reason)
    except ValueError:
        return _fault(f"the reason {info.reason!r} is not in errors.proto")
    if info.domain != "gradrule" or not number:
        return _fault(f"domain {info.domain!r}, reason {info.reason!r}")
    wanted = status_code(number)
    if status.code != wanted.value[0] or (code is not None and code is not wanted):
        return _fault(f"{info.reason} with code {status.code} ({code}), not {wanted.name}")
    if not status.message:
        return _fault(f"{info.reason} without a message")
    if number == errors_pb2.ERROR_REASON_INTERNAL:
        return _fault(f"INTERNAL: {status.message:.300}")
    retry = next((each for d in status.details if (each := _unpacked(d, error_details_pb2.RetryInfo()))), None)
    delay = retry.retry_delay.ToNanoseconds() / 1e9 if retry is not None else None
    return Judgement(Verdict.REFUSED, reason=info.reason, what=status.message[:300], retry_after_s=delay)


def _unpacked(detail: Any, message: Any) -> Any:
    return message if detail.Unpack(message) else None


def _fault(what: str) -> Judgement:
    return Judgement(Verdict.FAULT, what=what)
