"""Defines what a registry needs of its database, and opens one: SQLite in the data folder, or PostgreSQL.

Several servers may use one PostgreSQL database. Each keeps names and rules in memory; a log of changes in the database
tells it what others have written (see `change_log`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol, TypeVar

from sqlalchemy import Connection

from gradrule_server.registry.data_folder import StoreError

T = TypeVar("T")

LARGE_BYTES = 1 << 20
"""Size from which on a row takes long to write and read, bytes."""

# How long a server that starts waits for a database that starts too.
_START_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Change:
    """A rule or program that was added or removed.

    Attributes:
        kind: What it is.
        tenant: Its tenant.
        name: Its name or id.
        count: 1 if it was added, -1 if it was removed, 0 if it was replaced.
        size: Bytes that it added to the tenant's rules and programs; negative: that it freed.
    """

    kind: Literal["rule", "program"]
    tenant: str
    name: str
    count: int
    size: int


class Follower(Protocol):
    """Keeps what is in memory equal to a database that other servers change.

    Both methods are called while no other change is applied, within a transaction that reads: methods of `Store` then
    return the state after the changes.
    """

    def apply(self, changes: Sequence[Change]) -> None:
        """Applies changes of other servers, in their order."""
        ...

    def reload(self) -> None:
        """Reads everything again: the changes are not known."""
        ...


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
        """Opens a transaction that writes, one at a time; its changes survive once the context ends without an error.

        Within `exclusively` it is part of that transaction, which it ends.
        """

    def delete(self, work: Callable[[Connection], T]) -> T:
        """Runs a transaction that frees space, also on a full disk where that is possible."""
        with self.write() as connection:
            return work(connection)

    @abstractmethod
    def close(self) -> None:
        """Closes the database."""

    @abstractmethod
    def check(self) -> None:
        """Called at intervals: applies changes of other servers, and logs why the database cannot be used."""

    @abstractmethod
    def exclusively(self, work: Callable[[], T], first: Callable[[], None] | None = None) -> T:
        """Runs `work`, which decides by what is in memory and writes at most once, while no other server writes.

        A database for one server runs `work` only: its caller's locks suffice.

        Args:
            work: Runs after all changes of other servers were applied. It runs again after a deadlock.
            first: Runs before, in the same transaction, while other servers may write: for large rows.
        """

    @abstractmethod
    def consistently(self, work: Callable[[], T]) -> T:
        """Runs `work`, which reads: what it reads is the state after the last change that was applied."""

    @abstractmethod
    def refresh(self) -> None:
        """Applies all changes that other servers have written before this call."""

    @abstractmethod
    def follow(self, follower: Follower) -> None:
        """Sets who applies changes; called within `consistently`."""

    @abstractmethod
    def time_for(self, connection: Connection, size: int) -> AbstractContextManager[None]:
        """Gives the statements of a context the time that a row of `size` bytes needs."""

    @abstractmethod
    def record(self, connection: Connection, change: Change) -> None:
        """Adds a change to the log, in a transaction of `write`."""


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
