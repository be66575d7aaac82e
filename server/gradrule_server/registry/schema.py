"""Declares the tables of the registry's database, migrates those of older releases, and copies databases.

A migration is one transaction. It keeps a copy of the old database beside the file, for example as `gradrule.db.v1`,
for an older server to use.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from sqlalchemy import (
    Column,
    Connection,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
)

from gradrule_server.registry.data_folder import sync_to_disk

SCHEMA_VERSION = 2

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("key", String, primary_key=True),
    Column("value", String, nullable=False),
)

# Names belong to a tenant: two tenants can have different rules and programs with the same name.
rules = Table(
    "rules",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("definition", LargeBinary, nullable=False),
    Column("description", String, nullable=False),
    Column("create_time_us", Integer, nullable=False),
)

# Graphs by their SHA-256, so that programs of a tenant share a graph. Tenants do not share graphs, because the time
# that storing takes would show whether another tenant has the graph.
blobs = Table(
    "blobs",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("digest", String, primary_key=True),
    Column("content", LargeBinary, nullable=False),
)

# Programs with equal `identity` have equal content. The graph is not in `spec` but in `blobs`.
programs = Table(
    "programs",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("identity", String, nullable=False),
    Column("graph_digest", String, nullable=False),
    Column("spec", LargeBinary, nullable=False),
    Column("snapshot", LargeBinary, nullable=False),
    Column("summary", LargeBinary, nullable=False),
    Column("create_time_us", Integer, nullable=False),
    ForeignKeyConstraint(["tenant", "graph_digest"], ["blobs.tenant", "blobs.digest"]),
    Index("ix_programs_graph", "tenant", "graph_digest"),
)


def migrate(connection: Connection, version: str | None, path: Path) -> bool:
    """Migrates tables from an older version; returns False if `version` is unknown or current.

    The connection must be in a transaction that has written nothing yet, so that the copy holds the old content.

    Raises:
        OSError, sqlite3.Error: The copy of the old database cannot be written.
    """
    if version is None or not version.isdecimal() or int(version) not in _STEPS:
        return False
    copy_database(path, old_version_path(path, int(version)))
    for number in range(int(version), SCHEMA_VERSION):
        for statement in _STEPS[number]:
            connection.exec_driver_sql(statement)
    connection.exec_driver_sql("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(SCHEMA_VERSION),))
    return True


def add_current_views(database: sqlite3.Connection, version: str) -> bool:
    """Adds views that show tables of an older version in the current form; returns False if `version` is unknown."""
    if version == str(SCHEMA_VERSION):
        return True
    if not version.isdecimal() or int(version) not in _VIEWS:
        return False
    for name, query in _VIEWS[int(version)].items():
        # Create temporary views: they belong to the connection and do not change the database.
        database.execute(f"CREATE TEMP VIEW {name} AS {query}")
    return True


def old_version_path(path: Path, version: int) -> Path:
    """Returns the path of the copy of a database of an older version."""
    return path.with_name(f"{path.name}.v{version}")


def copy_database(path: Path, to: Path) -> None:
    """Writes a consistent copy of a database, atomically; other processes may write to the database meanwhile.

    Raises:
        sqlite3.Error: `path` is not a valid database.
        OSError: The copy cannot be written.
    """
    # Do not copy the file itself: the last writes to a database in use are in a log beside it.
    unfinished = to.with_name(f".{to.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    os.close(os.open(unfinished, os.O_CREAT | os.O_RDWR, 0o600))
    try:
        with (
            contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True)) as source,
            contextlib.closing(sqlite3.connect(unfinished)) as copy,
        ):
            source.backup(copy)
            # Switch off WAL mode, which the copy inherits, so that the copy is a single file without a log.
            copy.execute("PRAGMA journal_mode=DELETE")
        sync_to_disk(unfinished)
        unfinished.rename(to)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_to_disk(to.parent)


_STEPS: Mapping[int, tuple[str, ...]] = {
    # Version 2 has tenants; all existing rows belong to `default`.
    1: (
        "DROP INDEX ix_programs_graph_digest",
        "ALTER TABLE rules RENAME TO rules_1",
        "ALTER TABLE blobs RENAME TO blobs_1",
        "ALTER TABLE programs RENAME TO programs_1",
        "CREATE TABLE rules (tenant VARCHAR NOT NULL, name VARCHAR NOT NULL, definition BLOB NOT NULL, "
        "description VARCHAR NOT NULL, create_time_us INTEGER NOT NULL, PRIMARY KEY (tenant, name))",
        "CREATE TABLE blobs (tenant VARCHAR NOT NULL, digest VARCHAR NOT NULL, content BLOB NOT NULL, "
        "PRIMARY KEY (tenant, digest))",
        "CREATE TABLE programs (tenant VARCHAR NOT NULL, id VARCHAR NOT NULL, identity VARCHAR NOT NULL, "
        "graph_digest VARCHAR NOT NULL, spec BLOB NOT NULL, snapshot BLOB NOT NULL, summary BLOB NOT NULL, "
        "create_time_us INTEGER NOT NULL, PRIMARY KEY (tenant, id), "
        "FOREIGN KEY(tenant, graph_digest) REFERENCES blobs (tenant, digest))",
        "INSERT INTO rules SELECT 'default', name, definition, description, create_time_us FROM rules_1",
        "INSERT INTO blobs SELECT 'default', digest, content FROM blobs_1",
        "INSERT INTO programs SELECT 'default', id, identity, graph_digest, spec, snapshot, summary, create_time_us "
        "FROM programs_1",
        "DROP TABLE rules_1",
        "DROP TABLE programs_1",
        "DROP TABLE blobs_1",
        "CREATE INDEX ix_programs_graph ON programs (tenant, graph_digest)",
    ),
}

_VIEWS: Mapping[int, Mapping[str, str]] = {
    1: {name: f"SELECT 'default' AS tenant, * FROM main.{name}" for name in ("rules", "blobs", "programs")},
}
"""For each older version: queries that return its changed tables in the current form."""
