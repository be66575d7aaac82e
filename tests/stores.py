"""Provides stores for tests that store nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gradrule_server.registry.blobs import BlobStore


def no_blobs() -> BlobStore:
    """Returns a blob store with a capacity of 0 bytes."""
    return BlobStore(Path(tempfile.mkdtemp()), 0)
