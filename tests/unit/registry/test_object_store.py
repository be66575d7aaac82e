"""Tests how registries claim an object store; with a shared folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradrule_server.registry.data_folder import StoreError
from gradrule_server.registry.object_store import MARKER, claim, open_object_store


def test_first_registry_claims_an_object_store(tmp_path: Path) -> None:
    objects = open_object_store(tmp_path.as_uri())
    assert [claim(objects, "ada") for _ in range(2)] == [True, False]
    with pytest.raises(StoreError, match="another registry"):
        claim(objects, "grace")
    assert [path.name for path in tmp_path.iterdir()] == [MARKER]
