"""Copies registries between PostgreSQL and SQLite files, so that backups have one format for both."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, LargeBinary, Table, create_engine, func, insert, literal, select, update

from gradrule_server.registry.change_log import ChangeLog
from gradrule_server.registry.data_folder import StoreError, sync_to_disk
from gradrule_server.registry.database import Database
from gradrule_server.registry.postgres_database import PostgresDatabase
from gradrule_server.registry.schema import meta, metadata, programs, rules
from gradrule_server.registry.sqlite_rows import COPIED_TABLES, is_storable, open_file, stored_rows


def export_registry(url: str, file: Path) -> None:
    """Writes a consistent copy of a registry in PostgreSQL to a new SQLite file; servers may use it meanwhile.

    Raises:
        StoreError: There is no registry, or it cannot be read.
        GradruleError: The database went away.
        OSError, sqlalchemy.exc.SQLAlchemyError: The file cannot be written.
    """
    os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    engine = create_engine("sqlite://", creator=lambda: sqlite3.connect(file))
    with (
        contextlib.closing(PostgresDatabase(url, is_read_only=True)) as database,
        database.read() as source,
        engine.begin() as target,
    ):
        metadata.create_all(target)
        for table in (meta, *COPIED_TABLES):
            for row in _rows(database, source, table):
                target.execute(insert(table).values(row))
    engine.dispose()
    sync_to_disk(file)


def import_registry(file: Path, url: str) -> list[str]:
    """Copies the rows of an SQLite file into an empty registry in PostgreSQL, which is created if it is missing.

    The registry gets the id of the file, so that its servers may use the object store of the copied registry. Returns a
    sentence for each damaged row that PostgreSQL cannot store; no request could name it.

    Raises:
        StoreError: The registry has rules or programs, or it cannot be used.
        GradruleError: The database went away; nothing was copied.
    """
    left_out: list[str] = []
    with (
        contextlib.closing(PostgresDatabase(url)) as database,
        contextlib.closing(open_file(file)) as source,
        database.write() as target,
    ):
        _check_empty(database, target)
        for (registry_id,) in source.execute("SELECT value FROM meta WHERE key = 'registry_id'"):
            target.execute(update(meta).where(meta.c.key == "registry_id").values(value=registry_id))
        for table in COPIED_TABLES:
            for row in stored_rows(source, table):
                if not is_storable(table, row):
                    key = tuple(row[column.name] for column in table.primary_key)
                    left_out.append(f"the row {key!r} of {table.name} is damaged and was left out")
                    continue
                with database.time_for(target, sum(len(value) for value in row.values() if isinstance(value, bytes))):
                    target.execute(insert(table).values(row))
        # Servers that use the registry read everything again.
        ChangeLog().start(target)
    return left_out


def prepare_import(url: str) -> None:
    """Creates the registry if it is missing. Raises what `import_registry` raises."""
    with contextlib.closing(PostgresDatabase(url)) as database, database.read() as connection:
        _check_empty(database, connection)


def new_registry(url: str) -> str:
    """Creates an empty registry in PostgreSQL; moves the tables of an old one to a schema, whose name it returns.

    Raises:
        StoreError: A server uses the database, or it cannot be changed.
        GradruleError: The database went away.
    """
    with contextlib.closing(PostgresDatabase(url)) as database:
        return database.start_again()


def _check_empty(database: Database, connection: Connection) -> None:
    """Raises `StoreError` if a registry has rules or programs."""
    if any(connection.execute(select(table).limit(1)).first() is not None for table in (rules, programs)):
        raise StoreError(f"{database.description} has rules or programs already; name an empty database")


def _rows(database: Database, source: Connection, table: Table) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table one by one, because each may be large."""
    keys = list(table.primary_key)
    sizes = [func.length(column) for column in table.c if isinstance(column.type, LargeBinary)]
    size = functools.reduce(operator.add, sizes, literal(0))
    for *key, length in source.execute(select(*keys, size).order_by(*keys)).all():
        query = select(table).where(*(column == value for column, value in zip(keys, key, strict=True)))
        with database.time_for(source, length):
            row = source.execute(query).one()
        yield dict(row._mapping)
