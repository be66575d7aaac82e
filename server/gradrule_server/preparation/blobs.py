"""The blobs of the caller, as preparation needs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Blobs(Protocol):
    """Blobs by their SHA-256."""

    def missing(self, names: Iterable[str]) -> list[str]:
        """Returns those that are not there, each once. MALFORMED_REQUEST for what is no hash."""
        ...

    def size(self, name: str) -> int:
        """Returns the number of bytes. BLOB_NOT_FOUND."""
        ...

    def read(self, name: str) -> bytes:
        """Returns the bytes. BLOB_NOT_FOUND."""
        ...
