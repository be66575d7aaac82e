"""Defines what a registry needs of its database, and opens one: SQLite in the data folder, or PostgreSQL.

Several servers may use one PostgreSQL database. Each keeps rules in memory, and sees by the revisions in `tenant_usage`
that another server has changed them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, TypeVar

from sqlalchemy import Connection

from gradrule_server.registry.data_folder import StoreError

T = TypeVar("T")

LARGE_BYTES = 1 << 20
"""Size from which on a row takes long to write and read, bytes."""

# How long a server that starts waits for a database that starts too.
_START_WAIT_S = 30.0


class Database(ABC):
    """The database of a registry. All methods block; safe to use from several threads.

    Reading and writing raise UNAVAILABLE while the database cannot be used. Writing raises QUOTA_EXCEEDED if the disk
    is full, and changes nothing then.

    Attributes:
        is_shared: Whether several servers may use the database at a time.
        description: Where the database is, for messages; holds no password.
        away: Why the database cannot be used now; empty: it can.
        away_since: When it could not be used for the first time, on the clock of `time.monotonic`; None: it can.
    """

    is_shared: ClassVar[bool] = False
    description: str
    away: str = ""
    away_since: float | None = None

    def _set_away(self, reason: str) -> None:
        """Stores why the database cannot be used now, and since when; empty: it can be used."""
        self.away_since = (self.away_since or time.monotonic()) if reason else None
        self.away = reason

    @abstractmethod
    def read(self) -> AbstractContextManager[Connection]:
        """Opens a transaction that reads; all its queries see one state."""

    @abstractmethod
    def write(self) -> AbstractContextManager[Connection]:
        """Opens a transaction that writes; its changes survive once the context ends without an error.

        Within `exclusively` it is a part of that transaction.
        """

    @abstractmethod
    def lock(self, connection: Connection) -> None:
        """Waits until no other transaction of `write` has this lock, and holds it until the transaction ends."""

    @abstractmethod
    def exclusively(self) -> AbstractContextManager[None]:
        """Lets no other server write while the context decides by what it reads and then writes.

        Does nothing where one server uses the database: its caller's locks suffice.
        """

    @abstractmethod
    def snapshot(self) -> AbstractContextManager[None]:
        """Lets all reads of the context see one state, also while other servers write."""

    def delete(self, work: Callable[[Connection], T]) -> T:
        """Runs a transaction that frees space, also on a full disk where that is possible."""
        with self.write() as connection:
            return work(connection)

    @abstractmethod
    def close(self) -> None:
        """Closes the database."""

    @abstractmethod
    def check(self) -> None:
        """Called at intervals: logs why the database cannot be used."""

    @abstractmethod
    def time_for(self, connection: Connection, size: int) -> AbstractContextManager[None]:
        """Gives the statements of a context the time that a row of `size` bytes needs."""


def open_database(url: str, folder: Path, *, is_new: bool = False) -> Database:
    """Opens the database of a server's registry.

    Args:
        url: URL of a PostgreSQL database; empty: SQLite in the data folder.
        folder: The data folder, which this server alone uses.
        is_new: Whether an empty SQLite database may be created in a folder that had a registry before.

    Raises:
        StoreError: The folder or the database cannot be used.
    """
    # Load only the driver that is used.
    if url:
        import_postgres()
        from gradrule_server.registry.postgres_database import PostgresDatabase

        return PostgresDatabase(url, folder, wait_s=_START_WAIT_S)
    from gradrule_server.registry.sqlite_database import SqliteDatabase

    return SqliteDatabase(folder, is_new=is_new)


def import_postgres() -> None:
    """Loads the driver of PostgreSQL. Raises `StoreError` if it is not installed."""
    try:
        import psycopg  # noqa: F401
    except ModuleNotFoundError as cause:
        if cause.name != "psycopg":
            raise
        raise StoreError(
            "a registry in PostgreSQL needs the package psycopg: pip install 'gradrule[server,postgres]'"
        ) from None
