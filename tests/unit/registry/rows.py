"""Provides rows for tests, and reads and changes rows of a registry without its store."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text

from gradrule_server.registry import usage
from gradrule_server.registry.store import ProgramContent, ProgramRow, RuleRow, Store


def execute(store: Store, statement: str, **values: Any) -> list[tuple[Any, ...]]:
    """Runs a statement with `:name` parameters and returns its rows."""
    with store.database.write() as connection:
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


def counts(store: Store) -> tuple[int, int]:
    """Returns the numbers of rules and of programs of all tenants, which must be those that are counted."""
    [(rules, programs)] = execute(store, "SELECT (SELECT count(*) FROM rules), (SELECT count(*) FROM programs)")
    total = store.total_usage()
    assert (total.rules, total.programs) == (rules, programs)
    return rules, programs


def kept_bytes(store: Store, tenant: str = "") -> int:
    """Returns the bytes of rules and programs of a tenant, or of all, which must be those that are counted."""
    description = "CAST(description AS BLOB)" if is_sqlite(store) else "description"
    sizes = {
        "rules": f"length(definition) + length({description})",
        "programs": "length(summary) + length(spec) + length(snapshot)",
        "blobs": "length(content)",
    }
    where = " WHERE tenant = :tenant" if tenant else ""
    parts = (f"(SELECT coalesce(sum({size}), 0) FROM {table}{where})" for table, size in sizes.items())
    [(size,)] = execute(store, f"SELECT {' + '.join(parts)}", **({"tenant": tenant} if tenant else {}))
    counted = store.usage([tenant])[tenant] if tenant else store.total_usage()
    assert counted.registry_bytes == size
    return int(size)


def count_again(store: Store) -> None:
    """Counts what is stored, as each start of a server with SQLite does; rows were changed without the store."""
    with store.database.write() as connection:
        usage.count_again(connection)
