"""Tests how registries claim an object store at the same time; with a shared folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gradrule_server.registry.data_folder import StoreError
from gradrule_server.registry.object_store import MARKER, ObjectStore, claim, open_object_store


class DelayedWrites:
    """An object store that is empty for two registries when they look, and whose writes are delayed.

    Args:
        objects: The object store.
        both_have_read: Where each registry waits after its first look.
        delay_s: Time after which this registry's writes begin.
    """

    def __init__(self, objects: ObjectStore, both_have_read: threading.Barrier, delay_s: float) -> None:
        self._objects = objects
        self._both_have_read: threading.Barrier | None = both_have_read
        self._delay_s = delay_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    def read(self, key: str, offset: int, count: int) -> bytes:
        try:
            return self._objects.read(key, offset, count)
        finally:
            if (barrier := self._both_have_read) is not None:
                self._both_have_read = None
                barrier.wait(30)
                time.sleep(self._delay_s)


def claims_at_once(open_store: Callable[[], ObjectStore]) -> list[str]:
    """Claims an empty object store for two registries, of which one writes later; returns those that succeeded."""
    barrier = threading.Barrier(2)

    def run(registry_id: str, delay_s: float) -> bool:
        objects: Any = DelayedWrites(open_store(), barrier, delay_s)
        try:
            return claim(objects, registry_id)
        except StoreError as cause:
            assert "another registry" in str(cause)
            return False

    with ThreadPoolExecutor(2) as threads:
        started = {name: threads.submit(run, name, delay_s) for name, delay_s in (("ada", 0.0), ("grace", 0.3))}
        return [name for name, claimed in started.items() if claimed.result(60)]


def test_of_registries_that_claim_a_folder_at_once_one_succeeds(tmp_path: Path) -> None:
    assert len(claims_at_once(lambda: open_object_store(tmp_path.as_uri()))) == 1
    assert [path.name for path in tmp_path.iterdir()] == [MARKER]


def test_a_registry_claims_its_object_store_again(tmp_path: Path) -> None:
    assert [claim(open_object_store(tmp_path.as_uri()), "ada") for _ in range(2)] == [True, False]
