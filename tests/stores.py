"""Stores for tests that keep nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gradrule_server.registry.blobs import BlobStore


def no_blobs() -> BlobStore:
    """A store without blobs, and without room for any."""
    return BlobStore(Path(tempfile.mkdtemp()), 0)
