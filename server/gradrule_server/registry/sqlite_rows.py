"""Reads the rows of a registry's SQLite file as they are stored, damaged ones too."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import LargeBinary, Table

from gradrule_server.registry.schema import blobs, programs, rules
from gradrule_server.registry.sqlite_database import decode_text

COPIED_TABLES = (rules, blobs, programs)
"""The tables of a registry's content; later ones refer to earlier ones."""

_MAX_INTEGER = 1 << 63


def content_digest(file: Path) -> str:
    """Returns a digest of the rows of an SQLite file that PostgreSQL can store."""
    digest = hashlib.sha256()
    with contextlib.closing(open_file(file)) as source:
        for table in COPIED_TABLES:
            for row in stored_rows(source, table):
                if is_storable(table, row):
                    for value in row.values():
                        text = value if isinstance(value, bytes) else repr(value).encode()
                        digest.update(b"%d:" % len(text) + text)
    return digest.hexdigest()


def open_file(file: Path) -> sqlite3.Connection:
    """Opens a registry's SQLite file; applies the log of a server that was killed."""
    database = sqlite3.connect(f"{file.resolve().as_uri()}?mode=rw", uri=True)
    database.text_factory = decode_text
    return database


def stored_rows(source: sqlite3.Connection, table: Table) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table as they are stored, ordered by their keys."""
    columns = ", ".join(column.name for column in table.columns)
    keys = ", ".join(column.name for column in table.primary_key)
    for row in source.execute(f"SELECT {columns} FROM {table.name} ORDER BY {keys}"):
        yield dict(zip((column.name for column in table.columns), row, strict=True))


def is_storable(table: Table, row: dict[str, Any]) -> bool:
    """Returns whether all values of a row have the types of their columns, and names are valid UTF-8 without NUL."""
    for column in table.columns:
        value = row[column.name]
        if isinstance(column.type, LargeBinary):
            is_valid = isinstance(value, bytes)
        elif column.name == "create_time_us":
            is_valid = isinstance(value, int) and -_MAX_INTEGER <= value < _MAX_INTEGER
        elif not isinstance(value, str):
            is_valid = False
        else:
            is_valid = column is rules.c.description or ("\0" not in value and _is_utf_8(value))
        if not is_valid:
            return False
    return True


def _is_utf_8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
