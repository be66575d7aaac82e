"""Opens, checks and writes the registry's SQLite database.

Only one server uses it at a time. A write is acknowledged after it is on the disk. Writes are refused if the file was
removed or replaced.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry

from gradrule.v1 import errors_pb2
from gradrule_server.concurrency import RepeatedWarning
from gradrule_server.errors import GradruleError, error
from gradrule_server.registry.data_folder import (
    DATABASE_FILE,
    DISK_FULL_ERRORS,
    MARKER,
    OpenFiles,
    Reserve,
    StoreError,
    find_logs,
    lock_folder,
    refuse_lost_database,
    sync_to_disk,
)
from gradrule_server.registry.database import Database
from gradrule_server.registry.schema import copy_database

T = TypeVar("T")

_log = logging.getLogger(__name__)


class SqliteDatabase(Database):
    """A registry's database in a data folder, which one server uses at a time.

    Reading and writing raise UNAVAILABLE if the file was removed or replaced after it was opened. Deleting works also
    on a full disk.

    Args:
        folder: The data folder, which is created if missing.

    Raises:
        StoreError: The folder cannot be used, another server uses it, or its database is missing, damaged or of another
            version.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / DATABASE_FILE
        self.description = str(self.path)
        self._warning = RepeatedWarning(_log)
        self._files: OpenFiles | None = None
        # SQLite allows one writer at a time. Use a lock, because SQLite would poll, and late writers could overtake.
        self._writing = threading.Lock()
        self._reserve = Reserve(folder)
        try:
            self._lock_and_open()
        except StoreError as failure:
            if not (_is_full(failure.__cause__) and self._reserve.release()):
                raise
            _log.warning("the disk of %s is full; the space reserved for deletions was used to open it", self.path)
            self._lock_and_open()
        self._renew_reserve()

    def _renew_reserve(self) -> None:
        if not self._reserve.create():
            _log.warning("cannot reserve space beside %s: deletions may fail when the disk is full", self.path)

    def _lock_and_open(self) -> None:
        self._lock = lock_folder(self.path.parent)
        self._engine = self._reader = _engine(self.path, self._check_files)
        self._pinned: Connection | None = None
        try:
            self._create_file()
            # Keep one connection open: closing the last one removes SQLite's log, and the log must stay the same file.
            self._pinned = self._engine.connect()
            self._open()
            self._files = OpenFiles(self.path)
        except BaseException as cause:
            self.close()
            if isinstance(cause, OperationalError | sqlite3.OperationalError | OSError | GradruleError):
                raise StoreError(f"{self.path} cannot be opened: {_original(cause)}") from cause
            if isinstance(cause, DatabaseError | sqlite3.DatabaseError):
                raise _damaged(self.path, str(_original(cause))) from cause
            raise

    def close(self) -> None:
        """Closes the database and unlocks the folder."""
        if self._pinned is not None:
            self._pinned.close()
        self._engine.dispose()
        self._lock.release()

    def check(self) -> None:
        """Logs a warning if the registry's files were removed or replaced; called at intervals."""
        problem = None if self._files is None else self._files.problem()
        if problem:
            problem += (
                "; rules and programs cannot be read or changed. Put the file back; or stop the server, restore a "
                "backup and start the server again"
            )
        self._warning.report(problem)
        self._set_away(problem or "")

    def _create_file(self) -> None:
        """Creates an empty file if there is none, readable for its owner only, and syncs the folder."""
        # SQLite syncs the content of files, not the names in a folder.
        path, folder = self.path, self.path.parent
        if path.exists():
            return
        leftovers = " and ".join(log.name for log in find_logs(path))
        if leftovers:
            raise StoreError(
                f"{path} is missing, but its log {leftovers} exists, which does not fit a new database; put "
                f"{path.name} back, or move {leftovers} and {MARKER} away to start with an empty registry"
            )
        refuse_lost_database(folder, "missing")
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        sync_to_disk(folder)

    def _open(self) -> None:
        """Checks the database, or creates the tables in a new one.

        Checks the tables that the server reads at each start, not graphs, because they are large; their hashes are
        checked when they are read.
        """
        folder = self.path.parent
        with self.write() as connection:
            for table in sorted({"meta", "rules", "programs"} & set(inspect(connection).get_table_names())):
                report = connection.exec_driver_sql(f"PRAGMA quick_check({table})").scalar_one()
                if report != "ok":
                    raise _damaged(self.path, str(report))
            if self._prepare(connection, self._keep_copy):
                refuse_lost_database(folder, "empty")
        (folder / MARKER).touch(0o600)
        sync_to_disk(folder)

    def _keep_copy(self, version: int) -> None:
        """Copies the database before it is migrated, for an older server to use."""
        copy_database(self.path, self.path.with_name(f"{self.path.name}.v{version}"))

    def _check_files(self) -> None:
        """Raises UNAVAILABLE if the files were removed or replaced: writes to them would be lost."""
        if self._files is not None and self._files.problem() is not None:
            raise error(
                errors_pb2.ERROR_REASON_UNAVAILABLE,
                "a file of the server's registry was removed or replaced while the server runs, so rules and programs "
                "cannot be read or changed; the server's log names the file",
            )

    @contextmanager
    def _guarded(self, *, is_writing: bool) -> Iterator[None]:
        try:
            with self._writing if is_writing else nullcontext():
                self._check_files()
                yield
            # Check again, because the files may have been removed just before the commit.
            self._check_files()
        except OperationalError as cause:
            if not _is_full(cause):
                raise
            raise error(
                errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
                "the server's disk for rules and programs is full; its operator must free space",
            ) from cause

    def lock(self, connection: Connection) -> None:
        """Does nothing: one transaction of `write` runs at a time."""

    def delete(self, work: Callable[[Connection], T]) -> T:
        """Runs a transaction that frees space; uses the reserved space if the disk is full."""
        try:
            return super().delete(work)
        except GradruleError as failure:
            if not (_is_full(failure.__cause__) and self._reserve.release()):
                raise
        result = super().delete(work)
        # Truncate the log: SQLite never shrinks it, and the reserve needs its space.
        with self._writing:
            raw_connection = self._engine.raw_connection()
            try:
                raw_connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                raw_connection.close()
        self._renew_reserve()
        return result


def _damaged(path: Path, what: str) -> StoreError:
    return StoreError(
        f"{path} is damaged ({what}): move it away and restore a backup (`gradrule registry restore`), or move it and "
        f"{MARKER} away to start with an empty registry"
    )


def _is_full(cause: BaseException | None) -> bool:
    """Returns whether an error was caused by a full disk."""
    if isinstance(cause, OSError):
        return cause.errno in DISK_FULL_ERRORS
    original = getattr(cause, "orig", None) or cause
    if isinstance(original, sqlite3.OperationalError):
        return original.sqlite_errorcode in _FULL_CODES
    return isinstance(cause, GradruleError) and _is_full(cause.__cause__)


# The last two codes: connections share information about the log in a file, which may not fit on the disk.
_FULL_CODES = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_SHMOPEN})


def _engine(path: Path, check: Callable[[], None]) -> Engine:
    # Mode rw does not create a missing file: an empty one would replace a file that was removed.
    url = URL.create("sqlite", database=path.absolute().as_uri(), query={"mode": "rw", "uri": "true"})
    # Errors are logged, and parameters hold what tenants store.
    engine = create_engine(url, max_overflow=-1, hide_parameters=True)

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
        check()
        # Let `begin` start all transactions: Python's sqlite3 would not start them for reads and changes of tables.
        connection.isolation_level = None
        # Accept any bytes, so that one damaged text does not make other rows unreadable.
        connection.text_factory = decode_text
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def decode_text(raw: bytes) -> str:
    """Decodes any bytes as a text of a row; invalid bytes become characters that no valid text has."""
    return raw.decode("utf-8", "surrogateescape")


def _original(cause: BaseException) -> object:
    return getattr(cause, "orig", None) or cause
