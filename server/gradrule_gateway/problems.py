"""Defines `Problem`, the only error that the gateway answers with, as problem details (RFC 9457)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from gradrule.common.status_codes import DEFAULT_STATUS_CODE, STATUS_CODES
from gradrule.errors import Detail

CONTENT_TYPE = "application/problem+json"

# As grpc-gateway maps the codes of gRPC.
HTTP_STATUS = {
    "CANCELLED": 499,
    "UNKNOWN": 500,
    "INVALID_ARGUMENT": 400,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "PERMISSION_DENIED": 403,
    "UNAUTHENTICATED": 401,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400,
    "ABORTED": 409,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 501,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DATA_LOSS": 500,
}
"""HTTP status by gRPC code."""


class Problem(Exception):
    """An error with an HTTP status.

    Args:
        reason: Name of an `ErrorReason` without its prefix.
        detail: What is wrong, where, and what would be right.
        code: Name of the gRPC status code; empty: the code of the reason.
        status: HTTP status; 0: that of the code. A message that is too large has 413, because no later try can succeed.
        field: Path of the field that is wrong, in the request's JSON.
        violations: All findings; empty: `detail` and `field`.
        metadata: Metadata of the server's ErrorInfo.
        retry_after_s: Seconds to wait before another try; None if a retry does not help.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        reason: str,
        detail: str,
        *,
        code: str = "",
        status: int = 0,
        field: str = "",
        violations: Sequence[Detail] = (),
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.code = code or STATUS_CODES.get(reason, DEFAULT_STATUS_CODE)
        self.status = status or (413 if reason == "MESSAGE_TOO_LARGE" else HTTP_STATUS.get(self.code, 500))
        self.violations = list(violations) or ([Detail(reason, detail, field=field)] if field else [])
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})

    def __reduce__(self) -> Any:
        return _restored, (self.args[0], self.__dict__)

    def body(self) -> dict[str, Any]:
        """Returns the problem details as JSON values."""
        found: dict[str, Any] = {
            "type": "about:blank",
            "title": _title(self.status),
            "status": self.status,
            "detail": self.detail,
            "reason": self.reason,
            "code": self.code,
            "metadata": self.metadata,
            "violations": [_violation(detail, self.reason) for detail in self.violations],
        }
        if self.retry_after_s is not None:
            found["retryAfterSeconds"] = self.retry_after_s
        return found

    def all_headers(self) -> dict[str, str]:
        """Returns the headers of the answer, with `Retry-After` in whole seconds."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers.setdefault("www-authenticate", "Bearer")
        return headers


def _restored(detail: str, attributes: dict[str, Any]) -> Problem:
    """Returns a problem that another process raised."""
    problem = Problem("INTERNAL", detail)
    problem.__dict__.update(attributes)
    return problem


def malformed(detail: str, field: str = "") -> Problem:
    """Returns the problem of a request that does not follow the format."""
    return Problem("MALFORMED_REQUEST", f"{field}: {detail}" if field else detail, field=field)


def _violation(detail: Detail, reason: str) -> dict[str, str]:
    found = {"field": detail.field, "description": detail.message}
    if detail.reason and detail.reason != reason:
        found["reason"] = detail.reason
    if detail.node:
        found["node"] = detail.node
    return found


def _title(status: int) -> str:
    # nginx's code, which grpc-gateway uses for a call that the client cancelled.
    return "Client Closed Request" if status == 499 else HTTPStatus(status).phrase
