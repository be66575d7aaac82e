"""Runs the tests of the store of blobs with an S3 server, and tests what only a network can do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores import OpenStore, shared_stores
from tests.unit.registry.test_blobs import (  # noqa: F401
    test_blob_pinned_before_its_upload_is_not_removed,
    test_least_recently_used_blobs_are_removed,
    test_names_of_blobs_must_be_hashes,
    test_number_of_stored_blobs_is_limited,
    test_pin_pins_all_blobs_or_none,
    test_pinned_blobs_are_not_removed,
    test_restart_keeps_blobs_and_uses,
    test_small_blobs_count_with_their_disk_space,
    test_unfinished_upload_leaves_nothing,
    test_uploaded_blob_is_present,
)


@pytest.fixture
def open_store(tmp_path: Path, bucket: str, s3_environment: None) -> Iterator[OpenStore]:
    """Returns a function that opens a store in an S3 bucket; each call is one start of a server."""
    with shared_stores(tmp_path, f"s3://{bucket}/some/prefix") as opened:
        yield opened
