"""Reads and changes rows of a registry behind the server's back."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text

from gradrule_server.registry.store import Store


def execute(store: Store, statement: str, **values: Any) -> list[tuple[Any, ...]]:
    """Runs a statement with `:name` parameters and returns its rows."""
    with store._database.write() as connection:
        result = connection.execute(text(statement), values)
        return [tuple(row) for row in result] if result.returns_rows else []


def is_sqlite(store: Store) -> bool:
    """Returns whether the registry is an SQLite database, which accepts values of any type in any column."""
    return not store.is_shared
