"""The registry's database: opened by one server, checked, watched, and written so that nothing is lost silently."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, insert, inspect, select
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.periodic import RepeatedWarning
from gradrule_server.registry.files import (
    FILE_NAME,
    FULL,
    MARKER,
    OpenFiles,
    Reserve,
    StoreError,
    check_not_lost,
    logs_of,
    read_marker,
    write_marker,
)
from gradrule_server.registry.lock import FolderInUseError, FolderLock
from gradrule_server.registry.migrations import migrate, sync
from gradrule_server.registry.schema import SCHEMA_VERSION, meta, metadata

_log = logging.getLogger(__name__)

T = TypeVar("T")

_NEW = "begin with an empty registry (`gradrule registry new`)"


class Database:
    """The registry's database in `folder`, which is made where missing. Blocking; safe to use from several threads.

    Adding raises QUOTA_EXCEEDED where the disk is full, and adds nothing then. Reading and writing raise UNAVAILABLE
    where the file was removed or replaced after it was opened. `is_new`: whether an empty registry may begin where
    there was one before.

    Raises `StoreError` where the folder cannot be used, another server holds it, or its file is gone, damaged, or of
    another version.
    """

    def __init__(self, folder: Path, *, is_new: bool = False) -> None:
        self.path = folder / FILE_NAME
        self._is_new = is_new
        self._reserve = Reserve(folder)
        self._warning = RepeatedWarning(_log)
        self._files: OpenFiles | None = None
        # SQLite lets one writer in at a time; waiting here is fair, waiting in SQLite is polling.
        self._writing = threading.Lock()
        try:
            self._start()
        except StoreError as refusal:
            if not (_is_full(refusal.__cause__) and self._reserve.release()):
                raise
            _log.warning("the disk of %s is full; what was reserved for deleting was used to open it", self.path)
            self._start()
        if not self._reserve.make():
            _log.warning("no room could be reserved beside %s: deleting may fail when the disk is full", self.path)

    def _start(self) -> None:
        folder = self.path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = FolderLock(folder)
        except FolderInUseError as held:
            raise StoreError(str(held)) from held
        except OSError as cause:
            raise StoreError(
                f"the data folder {folder} cannot be used: {cause.strerror}; give another --data-dir"
            ) from cause
        self._engine = _engine(self.path, self._check_files)
        self._pinned: Connection | None = None
        try:
            self._create_file()
            # SQLite removes its log with the last connection: one stays open, so that the log's file stays the same.
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
        """Closes the file and lets other servers have the folder."""
        if self._pinned is not None:
            self._pinned.close()
        self._engine.dispose()
        self._lock.release()

    def look(self) -> None:
        """Logs where the registry's files were removed or replaced behind the server's back."""
        problem = None if self._files is None else self._files.problem()
        try:
            if self._lock.is_file_removed():
                _log.warning("the lock file of %s was removed, and was made anew", self.path.parent)
        except FolderInUseError as other:
            problem = problem or str(other)
        if problem:
            problem += (
                "; rules and programs can be neither read nor changed. Put the file back, or stop the server, bring a "
                "copy back and start it again"
            )
        self._warning.report(problem)

    def _create_file(self) -> None:
        """Makes an empty file that only its owner reads, whose name outlives a power failure, where there is none."""
        # SQLite syncs only contents.
        path, folder = self.path, self.path.parent
        if path.exists():
            if self._lock.was_killed and not path.with_name(path.name + "-wal").exists():
                _log.warning(
                    "%s-wal is gone, though the last server did not stop in order: what was written last may be lost",
                    path,
                )
            return
        leftovers = " and ".join(log.name for log in logs_of(path))
        if leftovers:
            raise StoreError(
                f"{path} is gone, but {leftovers} of it is there, which belongs to it and not to a new one; bring "
                f"{path.name} back beside it, or {_NEW}"
            )
        if not self._is_new:
            check_not_lost(folder, "gone")
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        sync(folder)

    def _open(self) -> None:
        """Checks the file, or makes the tables where it is new."""
        folder = self.path.parent
        marker = read_marker(folder)
        with self.write() as connection:
            tables = set(inspect(connection).get_table_names())
            if not tables:
                if not self._is_new:
                    check_not_lost(folder, "empty")
                metadata.create_all(connection)
                connection.execute(insert(meta).values(key="schema_version", value=str(SCHEMA_VERSION)))
            elif "meta" not in tables:
                raise StoreError(f"{self.path} is a database of something else; move it, or give another --data-dir")
            else:
                self._check_tables(connection, tables)
            registry_id = self._identify(connection, marker)
        if marker != registry_id:
            write_marker(folder, registry_id)

    def _check_tables(self, connection: Connection, tables: set[str]) -> None:
        """Checks what is read at each start, and brings tables of an older version to this one's.

        Graphs are much larger than all else: their hashes are checked when they are read.
        """
        for table in sorted(tables & {"meta", "rules", "programs"}):
            report = connection.exec_driver_sql(f"PRAGMA quick_check({table})").scalar_one()
            if report != "ok":
                raise _damaged(self.path, str(report))
        query = select(meta.c.value).where(meta.c.key == "schema_version")
        version = connection.execute(query).scalar_one_or_none()
        if migrate(connection, version, self.path):
            _log.info("%s had schema version %s and has %d now", self.path, version, SCHEMA_VERSION)
        elif version != str(SCHEMA_VERSION):
            raise StoreError(
                f"{self.path} has schema version {version}, and this server reads version {SCHEMA_VERSION}; start "
                f"the server that wrote it, or {_NEW}"
            )

    def _identify(self, connection: Connection, marker: str | None) -> str:
        """The registry's id. `StoreError` where the marker has another: the file came from another folder."""
        query = select(meta.c.value).where(meta.c.key == "registry_id")
        found = connection.execute(query).scalar_one_or_none()
        if found is None:
            # New, or of a release that gave no ids.
            found = marker or uuid.uuid4().hex
            connection.execute(insert(meta).values(key="registry_id", value=found))
        elif marker and marker != found:
            raise StoreError(
                f"{self.path} belongs to another registry than the one that was in this folder (see {MARKER}); bring "
                f"its own file back, or remove {MARKER} if this one is meant"
            )
        return str(found)

    def _check_files(self) -> None:
        """UNAVAILABLE where the files are no longer those that were opened: what is written to them would be lost."""
        if self._files is not None and self._files.problem() is not None:
            raise error(
                errors_pb2.ERROR_REASON_UNAVAILABLE,
                "the server's registry was removed or replaced while the server runs, so it can neither be read nor "
                "changed; the server's log names the file",
            )

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that reads."""
        self._check_files()
        with self._engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that writes; it is on the disk when this ends without an error."""
        try:
            with self._writing, self._engine.begin() as connection:
                self._check_files()
                yield connection
            # The files may have gone just before they were written: nothing is acknowledged then.
            self._check_files()
        except OperationalError as cause:
            if not _is_full(cause):
                raise
            raise error(
                errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
                "the disk that the server keeps rules and programs on is full; whoever runs the server can make room",
            ) from cause

    def delete(self, work: Callable[[Connection], T]) -> T:
        """Does what frees room, with the room that is reserved for it where the disk is full."""
        try:
            with self.write() as connection:
                return work(connection)
        except GradruleError as refusal:
            if not (_is_full(refusal.__cause__) and self._reserve.release()):
                raise
        with self.write() as connection:
            done = work(connection)
        # SQLite keeps its log at the size it had; what it takes is needed for the reserve.
        with self._writing:
            connection_of_pool = self._engine.raw_connection()
            try:
                connection_of_pool.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                connection_of_pool.close()
        if not self._reserve.make():
            _log.warning("no room could be reserved beside %s: deleting may fail when the disk is full", self.path)
        return done


def _damaged(path: Path, what: str) -> StoreError:
    return StoreError(
        f"{path} is damaged ({what}): move it away and bring a copy back (`gradrule registry restore`), or {_NEW}"
    )


def _is_full(cause: BaseException | None) -> bool:
    """Whether an error says that the disk takes no more."""
    if isinstance(cause, OSError):
        return cause.errno in FULL
    original = getattr(cause, "orig", None) or cause
    if isinstance(original, sqlite3.OperationalError):
        return original.sqlite_errorcode in _FULL_CODES
    return isinstance(cause, GradruleError) and _is_full(cause.__cause__)


# The second and third: the memory that connections share about the log is a file too.
_FULL_CODES = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_SHMOPEN})


def _engine(path: Path, check: Callable[[], None]) -> Engine:
    # Not made where it is missing: an empty file would take the place of one that was removed.
    url = URL.create("sqlite", database=path.absolute().as_uri(), query={"mode": "rw", "uri": "true"})
    engine = create_engine(url, max_overflow=-1)

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
        # Python's sqlite3 begins transactions on its own, and not around reads or tables; with None it leaves them
        # to `begin`.
        check()
        connection.isolation_level = None
        # One damaged text must not hide all the rows that are read with it.
        connection.text_factory = text_of
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def text_of(raw: bytes) -> str:
    """A text of a row, whatever bytes it has: no name and no description that is valid has such characters."""
    return raw.decode("utf-8", "surrogateescape")


def _original(cause: BaseException) -> object:
    return getattr(cause, "orig", None) or cause
