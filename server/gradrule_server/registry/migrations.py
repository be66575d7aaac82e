"""From the tables of older releases to those of this one: one step per version, all in one transaction.

What was there is kept beside the file, as `gradrule.db.v1` for example, so that an older server can go on from it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from sqlalchemy import Connection

from gradrule_server.registry.schema import SCHEMA_VERSION


def migrate(connection: Connection, version: str | None, path: Path) -> bool:
    """Brings tables of an older version to this one's; False where there is no way from `version`.

    The connection is in a transaction and has written nothing yet, so what is kept is what was there before.
    `OSError`, `sqlite3.Error` where it cannot be kept.
    """
    if version is None or not version.isdecimal() or int(version) not in _STEPS:
        return False
    copy_database(path, kept_name(path, int(version)))
    for number in range(int(version), SCHEMA_VERSION):
        for statement in _STEPS[number]:
            connection.exec_driver_sql(statement)
    connection.exec_driver_sql("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(SCHEMA_VERSION),))
    return True


def show_as_current(database: sqlite3.Connection, version: str) -> bool:
    """Lets a connection read tables of an older version as it reads this one's; False where there is no way."""
    if version == str(SCHEMA_VERSION):
        return True
    if not version.isdecimal() or int(version) not in _VIEWS:
        return False
    for name, query in _VIEWS[int(version)].items():
        # Of one connection's alone: nothing is written to the database.
        database.execute(f"CREATE TEMP VIEW {name} AS {query}")
    return True


def kept_name(path: Path, version: int) -> Path:
    """Where the database as `version` had it is kept."""
    return path.with_name(f"{path.name}.v{version}")


def copy_database(path: Path, to: Path) -> None:
    """A complete copy of a database as it is at one moment, whoever writes to it meanwhile; there or not there at all.

    `sqlite3.Error` where it is none, `OSError` where the copy cannot be written.
    """
    # A database in use is more than its file: what was written last lies in a log beside it.
    unfinished = to.with_name(f".{to.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    os.close(os.open(unfinished, os.O_CREAT | os.O_RDWR, 0o600))
    try:
        with (
            contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True)) as source,
            contextlib.closing(sqlite3.connect(unfinished)) as copy,
        ):
            source.backup(copy)
            # What is copied says that it has a log; a copy that is put away is one file.
            copy.execute("PRAGMA journal_mode=DELETE")
        sync(unfinished)
        unfinished.rename(to)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync(to.parent)


def sync(path: Path) -> None:
    """Sees to it that a file's content, or a folder's names, outlive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_STEPS: Mapping[int, tuple[str, ...]] = {
    # Names belong to tenants: what was there belongs to `default`.
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
"""The tables that have changed since, by name."""
