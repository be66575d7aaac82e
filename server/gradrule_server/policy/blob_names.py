"""Names of blobs, and the error that says which are missing."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gradrule.v1 import errors_pb2
from gradrule_server.errors import Finding, GradruleError, Resource, error

RESOURCE_TYPE = "gradrule.v1.Blob"
NAME = re.compile(r"[0-9a-f]{64}")

_SHOWN = 5


def check_blob_name(name: str) -> None:
    """Raises MALFORMED_REQUEST for what is no SHA-256 in hex."""
    if NAME.fullmatch(name) is None:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
            f"{name[:80]!r} is no SHA-256: 64 of 0-9 and a-f",
            field="sha256",
        )


def missing_blobs(names: Iterable[str]) -> GradruleError:
    """Returns BLOB_NOT_FOUND; a resource names each blob."""
    gone = list(names)
    shown = ", ".join(gone[:_SHOWN]) + (f", and {len(gone) - _SHOWN} more" if len(gone) > _SHOWN else "")
    finding = Finding(
        errors_pb2.ERROR_REASON_BLOB_NOT_FOUND,
        f"the server does not have the blob{'s' if len(gone) > 1 else ''} {shown}; upload what is missing, and send "
        "the request again",
    )
    return GradruleError([finding], resources=[Resource(RESOURCE_TYPE, name) for name in gone])
