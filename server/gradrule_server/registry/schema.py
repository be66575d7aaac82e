"""Declares the tables of the registry's database, migrates those of older releases, and copies SQLite databases.

Both databases have the same tables and versions. A migration is one transaction. SQLite keeps a copy of the old
database beside the file, for example as `gradrule.db.v2`, for an older server to use.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Dialect,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    TypeDecorator,
    select,
)
from sqlalchemy.types import TypeEngine

from gradrule_server.registry.data_folder import sync_to_disk

SCHEMA_VERSION = 3

metadata = MetaData()

# Names compare and sort by their bytes, as in SQLite; PostgreSQL would use the language of the database.
_Name = String().with_variant(String(collation="C"), "postgresql")
_Microseconds = Integer().with_variant(BigInteger(), "postgresql")


class _AnyText(TypeDecorator[str]):
    """Text of any characters. PostgreSQL keeps it as bytes, because its own texts cannot hold NUL."""

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(LargeBinary() if dialect.name == "postgresql" else String())

    def process_bind_param(self, value: str | None, dialect: Dialect) -> Any:
        if dialect.name != "postgresql" or value is None:
            return value
        return value.encode("utf-8", "surrogateescape")

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        if dialect.name != "postgresql" or value is None:
            return value
        return bytes(value).decode("utf-8", "surrogateescape")


meta = Table(
    "meta",
    metadata,
    Column("key", _Name, primary_key=True),
    Column("value", _Name, nullable=False),
)

# Names belong to a tenant: two tenants can have different rules and programs with the same name.
rules = Table(
    "rules",
    metadata,
    Column("tenant", _Name, primary_key=True),
    Column("name", _Name, primary_key=True),
    Column("definition", LargeBinary, nullable=False),
    Column("description", _AnyText, nullable=False),
    Column("create_time_us", _Microseconds, nullable=False),
)

# Graphs by their SHA-256, so that programs of a tenant share a graph. Tenants do not share graphs, because the time
# that storing takes would show whether another tenant has the graph.
blobs = Table(
    "blobs",
    metadata,
    Column("tenant", _Name, primary_key=True),
    Column("digest", _Name, primary_key=True),
    Column("content", LargeBinary, nullable=False),
)

# Programs with equal `identity` have equal content. The graph is not in `spec` but in `blobs`.
programs = Table(
    "programs",
    metadata,
    Column("tenant", _Name, primary_key=True),
    Column("id", _Name, primary_key=True),
    Column("identity", _Name, nullable=False),
    Column("graph_digest", _Name, nullable=False),
    Column("spec", LargeBinary, nullable=False),
    Column("snapshot", LargeBinary, nullable=False),
    Column("summary", LargeBinary, nullable=False),
    Column("create_time_us", _Microseconds, nullable=False),
    ForeignKeyConstraint(["tenant", "graph_digest"], ["blobs.tenant", "blobs.digest"]),
    Index("ix_programs_graph", "tenant", "graph_digest"),
)


# What each tenant has stored. Each transaction that changes rules or programs changes its row. The revisions increase
# with each change: by them servers that share the database notice what others have written.
tenant_usage = Table(
    "tenant_usage",
    metadata,
    Column("tenant", _Name, primary_key=True),
    Column("rules", BigInteger, nullable=False),
    Column("programs", BigInteger, nullable=False),
    Column("registry_bytes", BigInteger, nullable=False),
    Column("rules_revision", BigInteger, nullable=False),
    Column("programs_revision", BigInteger, nullable=False),
)

# What the blobs of each tenant's folder take in an object store.
blob_usage = Table(
    "blob_usage",
    metadata,
    Column("folder", _Name, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False),
)


def read_meta(connection: Connection, key: str) -> str | None:
    """Returns a value of the table `meta`; None if there is none."""
    return connection.execute(select(meta.c.value).where(meta.c.key == key)).scalar_one_or_none()


def write_meta(connection: Connection, key: str, value: str) -> None:
    """Sets a value of the table `meta`."""
    if not connection.execute(meta.update().values(value=value).where(meta.c.key == key)).rowcount:
        connection.execute(meta.insert().values(key=key, value=value))


def migrate(connection: Connection, version: str | None, before: Callable[[int], None]) -> bool:
    """Migrates tables from an older version; returns False if `version` is unknown or current.

    Args:
        connection: A connection in a transaction that has written nothing yet.
        version: The version of the tables.
        before: Called with the old version, before anything is changed.
    """
    if version is None or not version.isdecimal() or int(version) not in _STEPS:
        return False
    before(int(version))
    metadata.create_all(connection)
    for number in range(int(version), SCHEMA_VERSION):
        for statement in _STEPS[number]:
            connection.exec_driver_sql(statement)
    write_meta(connection, "schema_version", str(SCHEMA_VERSION))
    return True


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


# Version 3 counts in `tenant_usage`, and has no log of changes and no index of objects.
_DROPPED = ("program_blobs", "stored_blobs", "stored_blob_totals", "changes")
_STEPS: Mapping[int, tuple[str, ...]] = {2: tuple(f"DROP TABLE IF EXISTS {name}" for name in _DROPPED)}
"""For each older version: the statements that lead to the next version."""
