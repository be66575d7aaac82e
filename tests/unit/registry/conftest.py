"""Provides registries in the database that `--registry-database` names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradrule_server.registry.database import open_database
from gradrule_server.registry.store import Store


@pytest.fixture
def registry_url(new_database: Callable[[], str]) -> str:
    """Returns what `--registry` says for the test's registry; empty: SQLite in `tmp_path / "data"`."""
    return new_database()


@pytest.fixture
def open_store(registry_url: str, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Returns a function that opens the test's registry, the same one each time; the last one must be closed before."""
    opened: list[Store] = []

    def open_again() -> Store:
        opened.append(Store(open_database(registry_url, tmp_path / "data")))
        return opened[-1]

    yield open_again
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[[], Store]) -> Store:
    """Returns the test's registry."""
    return open_store()
