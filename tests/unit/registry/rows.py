"""Provides rows for tests, and reads and changes rows of a registry without its store."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text

from gradrule_server.registry.store import ProgramContent, ProgramRow, RuleRow, Store


def execute(store: Store, statement: str, **values: Any) -> list[tuple[Any, ...]]:
    """Runs a statement with `:name` parameters and returns its rows."""
    with store._database.write() as connection:
        result = connection.execute(text(statement), values)
        return [tuple(row) for row in result] if result.returns_rows else []


def is_sqlite(store: Store) -> bool:
    """Returns whether the registry is an SQLite database, which accepts values of any type in any column."""
    return not store.is_shared


def rule(name: str) -> RuleRow:
    return RuleRow(name, b"definition \x00 of " + name.encode(), "", 1_700_000_000_000_001)


def program(program_id: str, identity: str = "same") -> ProgramRow:
    return ProgramRow(program_id, identity, b"summary of " + program_id.encode(), 5)


def content(graph: bytes = b"graph") -> ProgramContent:
    return ProgramContent(b"spec", graph, b"snapshot")


def blob_count(store: Store) -> int:
    [(count,)] = execute(store, "SELECT count(*) FROM blobs")
    return int(count)
