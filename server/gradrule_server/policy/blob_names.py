"""Checks names of blobs, and reports missing blobs."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gradrule.v1 import errors_pb2
from gradrule_server.errors import Finding, GradruleError, Resource, error

RESOURCE_TYPE = "gradrule.v1.Blob"
BLOB_NAME = re.compile(r"[0-9a-f]{64}")

_MAX_SHOWN = 5


def check_blob_name(name: str) -> None:
    """Raises MALFORMED_REQUEST unless `name` is a SHA-256 in hex."""
    if BLOB_NAME.fullmatch(name) is None:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
            f"{name[:80]!r} is not a SHA-256: 64 characters of 0-9 and a-f",
            field="sha256",
        )


def missing_blobs(names: Iterable[str]) -> GradruleError:
    """Returns a BLOB_NOT_FOUND error with one resource for each blob."""
    missing = list(names)
    shown = ", ".join(missing[:_MAX_SHOWN])
    if len(missing) > _MAX_SHOWN:
        shown += f", and {len(missing) - _MAX_SHOWN} more"
    finding = Finding(
        errors_pb2.ERROR_REASON_BLOB_NOT_FOUND,
        f"the server does not have the blob{'s' if len(missing) > 1 else ''} {shown}; upload what is missing, and send "
        "the request again",
    )
    return GradruleError([finding], resources=[Resource(RESOURCE_TYPE, name) for name in missing])
