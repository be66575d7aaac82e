"""What the last release wrote."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from gradrule.v1 import rule_pb2
from gradrule_server.registry.store import ProgramContent, ProgramRow, RuleRow, Store

DEFINITION = rule_pb2.RuleDefinition(expression="3 * dy")


def version_2(folder: Path, spec: bytes = b"spec") -> Path:
    """A registry of the second schema, which counted nothing, in WAL mode."""
    store = Store(folder)
    store.add_rule(RuleRow("Q", DEFINITION.SerializeToString(), "kept", 5))
    store.add_program(ProgramRow("p", "same", b"", 7), ProgramContent(spec, b"graph", b""))
    store.close()
    file = folder / "gradrule.db"
    with sqlite3.connect(file) as database:
        for table in ("tenant_usage", "blob_usage"):
            database.execute(f"DROP TABLE {table}")
        database.execute("CREATE TABLE stored_blobs (object VARCHAR NOT NULL, PRIMARY KEY (object))")
        database.execute("UPDATE meta SET value = '2' WHERE key = 'schema_version'")
    database.close()
    return file
