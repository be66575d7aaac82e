"""Defines the database of a registry, and opens one: SQLite in the data folder, or PostgreSQL.

Several servers may use one PostgreSQL database. Each keeps rules in memory, and sees by the revisions in `tenant_usage`
that another server has changed them.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import ClassVar, TypeVar

from sqlalchemy import Connection, Engine, inspect

from gradrule_server.registry.data_folder import StoreError
from gradrule_server.registry.schema import SCHEMA_VERSION, metadata, migrate, read_meta, write_meta
from gradrule_server.registry.usage import count_again

T = TypeVar("T")

_log = logging.getLogger(__name__)

# How long a server that starts waits for a database that starts too.
_START_WAIT_S = 30.0

# The tables that every release had.
_OLDEST_TABLES = frozenset({"meta", "rules", "blobs", "programs"})


class VersionError(StoreError):
    """The tables are those of another release; the message says what to do."""


class Database(ABC):
    """The database of a registry. All methods block; safe to use from several threads.

    Reading and writing raise UNAVAILABLE while the database cannot be used. Writing raises QUOTA_EXCEEDED if the disk
    is full, and changes nothing then. Subclasses connect, lock writers, and translate errors.

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
    _engine: Engine
    _reader: Engine

    def __init__(self) -> None:
        self._thread = _ThreadState()

    def _set_away(self, reason: str) -> None:
        """Stores why the database cannot be used now, and since when; empty: it can be used."""
        self.away_since = (self.away_since or time.monotonic()) if reason else None
        self.away = reason

    @contextmanager
    def read(self, size: int = 0) -> Iterator[Connection]:
        """Opens a transaction that reads; all its queries see one state.

        Within `exclusively` or `snapshot` it is a part of that transaction.

        Args:
            size: Bytes of its largest row, which a database on a network needs time for; 0: small.
        """
        with self._transaction(is_writing=False) as connection, self._time_for(connection, size):
            yield connection

    @contextmanager
    def write(self, size: int = 0) -> Iterator[Connection]:
        """Opens a transaction that writes, see `read`; its changes survive once the context ends without an error."""
        with self._transaction(is_writing=True) as connection, self._time_for(connection, size):
            yield connection

    def delete(self, work: Callable[[Connection], T]) -> T:
        """Runs a transaction that frees space and returns its result; a database may keep room for it on a full disk.

        Args:
            work: Deletes rows. It may be called a second time after it was rolled back.
        """
        with self.write() as connection:
            self.lock(connection)
            return work(connection)

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Lets nobody else write while the context decides by what it reads and then writes, in one transaction."""
        with self.write() as connection:
            self.lock(connection)
            with self._entered(connection):
                yield

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Lets all reads of the context see one state, also while other servers write."""
        with self.read() as connection, self._entered(connection):
            yield

    @contextmanager
    def _transaction(self, *, is_writing: bool) -> Iterator[Connection]:
        if self._thread.connection is not None:
            yield self._thread.connection
            return
        engine = self._engine if is_writing else self._reader
        with self._guarded(is_writing=is_writing), engine.begin() as connection:
            yield connection

    @contextmanager
    def _entered(self, connection: Connection) -> Iterator[None]:
        """Makes a transaction the one that `read` and `write` of this thread use."""
        self._thread.connection = connection
        try:
            yield
        finally:
            self._thread.connection = None

    def _prepare(self, connection: Connection, before_migration: Callable[[int], None] = lambda _: None) -> bool:
        """Creates the tables in a new database, or checks and migrates those of an older release.

        Args:
            connection: A transaction that writes.
            before_migration: Called with the older version before anything is changed.

        Returns:
            Whether the database was empty.

        Raises:
            StoreError: The database is that of another program, or of another version.
        """
        tables = set(inspect(connection).get_table_names())
        if tables and not tables >= _OLDEST_TABLES:
            raise StoreError(
                f"{self.description} is the database of another program (it has the table {min(tables)}); use a "
                "database or --data-dir for gradrule alone"
            )
        metadata.create_all(connection)
        # Also a registry of a release without ids has none.
        if not tables or read_meta(connection, "registry_id") is None:
            write_meta(connection, "registry_id", uuid.uuid4().hex)
        if not tables:
            write_meta(connection, "schema_version", str(SCHEMA_VERSION))
            return True
        version = read_meta(connection, "schema_version")
        if migrate(connection, version, before_migration):
            count_again(connection)
            _log.info("%s had schema version %s and has %d now", self.description, version, SCHEMA_VERSION)
        else:
            self._check_version(connection)
        return False

    def _check_version(self, connection: Connection) -> None:
        """Raises `VersionError` if the tables are not those of this release."""
        version = read_meta(connection, "schema_version")
        if version != str(SCHEMA_VERSION):
            raise VersionError(
                f"{self.description} has schema version {version}, and this release reads version {SCHEMA_VERSION}; "
                "use the release that wrote it, or an empty database or --data-dir"
            )

    def _time_for(self, connection: Connection, size: int) -> AbstractContextManager[None]:
        """Gives the statements of a context the time that a row of `size` bytes needs."""
        return nullcontext()

    @abstractmethod
    def _guarded(self, *, is_writing: bool) -> AbstractContextManager[None]:
        """Returns a context for a transaction, which raises `GradruleError` in place of errors of the database."""

    @abstractmethod
    def lock(self, connection: Connection) -> None:
        """Waits until no other transaction of `write` has this lock, and holds it until the transaction ends."""

    @abstractmethod
    def close(self) -> None:
        """Closes the database."""

    @abstractmethod
    def check(self) -> None:
        """Called at intervals: logs why the database cannot be used."""


class _ThreadState(threading.local):
    """The transaction that a thread has open in `exclusively` or `snapshot`."""

    connection: Connection | None = None


def open_database(url: str, folder: Path) -> Database:
    """Opens the database of a server's registry.

    Args:
        url: URL of a PostgreSQL database; empty: SQLite in the data folder.
        folder: The data folder, which this server alone uses.

    Raises:
        StoreError: The folder or the database cannot be used.
    """
    # Load only the driver that is used.
    if url:
        import_postgres()
        from gradrule_server.registry.postgres_database import PostgresDatabase

        return PostgresDatabase(url, folder, wait_s=_START_WAIT_S)
    from gradrule_server.registry.sqlite_database import SqliteDatabase

    return SqliteDatabase(folder)


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
