"""The one place where an error becomes a gRPC status."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from gradrule.common.status_codes import DEFAULT_STATUS_CODE, STATUS_CODES
from gradrule.v1 import errors_pb2
from gradrule_server.errors import Finding, GradruleError, reason_name

DOMAIN = "gradrule"
DETAILS_KEY = "grpc-status-details-bin"

# Larger trailers are lost on the way, and the error with them.
MAX_FINDINGS_BYTES = 4096
MAX_RESOURCES_BYTES = 3072
MAX_MESSAGE_BYTES = 1024
_MAX_NAME_BYTES = 256
# What packing a message into an Any adds.
_ANY_BYTES = 56


def code_of(reason: errors_pb2.ErrorReason.ValueType) -> grpc.StatusCode:
    """The gRPC code of a reason, as errors.proto documents it."""
    return grpc.StatusCode[STATUS_CODES.get(reason_name(reason), DEFAULT_STATUS_CODE)]


def status_of(cause: GradruleError) -> status_pb2.Status:
    """The `google.rpc.Status` of an error, small enough for trailers."""
    violations, kept = _violations(cause.findings)
    info = error_details_pb2.ErrorInfo(
        reason=reason_name(cause.reason),
        domain=DOMAIN,
        metadata={"findings_total": str(len(cause.findings)), "findings_sent": str(kept)},
    )
    details: list[Message] = [info]
    if violations.field_violations:
        details.append(violations)
    if cause.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(cause.retry_after_s * 1e9))
        details.append(retry)
    details += _resources(cause)
    status = status_pb2.Status(code=code_of(cause.reason).value[0], message=_cut(cause.message, MAX_MESSAGE_BYTES))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _resources(cause: GradruleError) -> list[Message]:
    """As many of the resources as fit."""
    found: list[Message] = []
    size = 0
    for resource in (*(() if cause.resource is None else (cause.resource,)), *cause.resources):
        info = error_details_pb2.ResourceInfo(
            resource_type=resource.type, resource_name=_cut(resource.name, _MAX_NAME_BYTES)
        )
        size += info.ByteSize() + _ANY_BYTES
        if size > MAX_RESOURCES_BYTES:
            break
        found.append(info)
    return found


def _violations(findings: Sequence[Finding]) -> tuple[error_details_pb2.BadRequest, int]:
    """As many findings as fit: `field` is the request's field or the node, `reason` the reason."""
    request = error_details_pb2.BadRequest()
    kept = 0
    for finding in findings:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(finding.field or (f"node:{finding.node}" if finding.node else ""), _MAX_NAME_BYTES),
            description=_cut(finding.message, MAX_MESSAGE_BYTES),
            reason=reason_name(finding.reason),
        )
        if request.ByteSize() + violation.ByteSize() + 4 > MAX_FINDINGS_BYTES:
            break
        request.field_violations.append(violation)
        kept += 1
    return request, kept


def _cut(text: str, limit: int) -> str:
    # No character takes less than a byte, so what lies behind the limit is not looked at, however long it is.
    data = text[: limit + 1].encode()
    return text if len(data) <= limit else data[: limit - 3].decode(errors="ignore") + "…"
