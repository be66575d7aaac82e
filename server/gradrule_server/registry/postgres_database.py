"""Opens and uses a registry's database in PostgreSQL, which several servers share.

Writers take turns: each holds an advisory lock of PostgreSQL until its transaction has ended. Under this lock a server
first applies what others have written (see `change_log`), so that what it has in memory is what is stored: names are
unique and quotas are exact across servers.

While the database is away, calls fail at once; one at a time tries to connect.
"""

from __future__ import annotations

import datetime
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import Connection, insert, inspect, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from gradrule.v1 import errors_pb2
from gradrule_server.concurrency import RepeatedWarning
from gradrule_server.errors import GradruleError, error
from gradrule_server.registry.change_log import ChangeLog, SupersededError
from gradrule_server.registry.data_folder import DATABASE_FILE, FolderInUseError, FolderLock, StoreError
from gradrule_server.registry.database import Change, Database, Follower, T
from gradrule_server.registry.database_url import describe_url, hide_password
from gradrule_server.registry.postgres_connection import (
    APPLICATION_NAME,
    WAIT_S,
    create_postgres_engine,
    is_refused,
    time_for,
)
from gradrule_server.registry.schema import SCHEMA_VERSION, change_metadata, meta, metadata, migrate

_log = logging.getLogger(__name__)

# `gradrule` in ASCII.
_LOCK_KEY = 0x6772616472756C65
# Connections of a server; docs/guide/clusters.md states them.
_CONNECTIONS = 8
_RETRY_S = 0.4
_ATTEMPTS = 4
_START_POLL_S = 0.5

# States of PostgreSQL (SQLSTATE) of errors that another attempt may not meet: serialisation failure, deadlock.
_AGAIN = frozenset({"40001", "40P01"})
# A statement or a lock took too long.
_BUSY = frozenset({"57014", "55P03"})
_DISK_FULL = "53100"
_NOT_PERMITTED = "42501"
# A text that the database cannot store, a constraint or a damaged row: concerns the caller only. Other errors of class
# 22, such as a number out of range, come from statements and rows of the server.
_OF_THE_CALLER = ("22021", "23", "XX")
# The database went away or refuses connections: shut down, starting, out of connections or memory, read-only.
_AWAY = ("08", "53", "57P", "25006")
# All connections that the database or the role may have are in use.
_TOO_MANY_CONNECTIONS = ("too many", "connection slots")
# Messages of libpq, which are always in English, and of a server that is up: another attempt may succeed.
_TEMPORARY = (*_TOO_MANY_CONNECTIONS, "read-only", "hot standby", "closed the connection", "timeout expired")
# Messages of libpq on encryption that another attempt meets too.
_NOT_ENCRYPTED = re.compile(r"does not support SSL|certificate|SSL error: (?!unexpected eof)|GSSAPI encryption")


_OTHER_SERVERS = (
    "SELECT count(*) FROM pg_stat_activity "
    "WHERE datname = current_database() AND application_name IN (:name, current_setting('application_name')) "
    "AND pid <> pg_backend_pid()"
)


class _TryAgain(Exception):
    """PostgreSQL ended a transaction to let another one go on."""


class PostgresDatabase(Database):
    """A registry's database in PostgreSQL, which several servers use at a time.

    Args:
        url: Its URL, with all options of libpq.
        folder: The folder of this server's caches, which no other server may use; None: there is none.
        wait_s: How long to wait for a database that is not there yet, seconds.
        is_read_only: Whether nothing is created, migrated or written.

    Raises:
        StoreError: The database cannot be used, or it is that of another program or of another version.
    """

    is_shared = True

    def __init__(
        self, url: str, folder: Path | None = None, *, wait_s: float = 0.0, is_read_only: bool = False
    ) -> None:
        self.description = describe_url(url)
        self._url = url
        self._is_read_only = is_read_only
        self._warning = RepeatedWarning(_log)
        self._connections_warning = RepeatedWarning(_log)
        self._log = ChangeLog()
        self._superseded: SupersededError | None = None
        # One thread of this server at a time applies changes or writes.
        self._turns = threading.RLock()
        self._refreshes_started = self._refreshes_done = 0
        self._thread = _ThreadState()
        self._state = threading.Lock()
        self.away = ""
        self._is_probing = False
        self._probe_at = 0.0
        self._folder_lock = None if folder is None else _lock_folder(folder)
        self._engine = create_postgres_engine(url, _CONNECTIONS - 1, self._check_probe)
        # The thread whose turn it is has a connection of its own, because threads that wait for their turn may hold
        # all others.
        self._turn_engine = create_postgres_engine(url, 1, self._check_probe)
        # One snapshot for all queries of a transaction.
        options: Mapping[str, Any] = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        self._reader = self._engine.execution_options(**options)
        self._turn_reader = self._turn_engine.execution_options(**options)
        try:
            self._open(time.monotonic() + wait_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes all connections, and unlocks the folder."""
        self._disconnect()
        if self._folder_lock is not None:
            self._folder_lock.release()
            self._folder_lock = None

    def check(self) -> None:
        """Applies changes of other servers; logs why the database cannot be used, and when it can be used again."""
        was_away = self.away
        try:
            self.refresh()
        except GradruleError as cause:
            self._warning.report(f"{self.away or cause.message}; the server goes on with what it has in memory")
            return
        self._warning.report(None)
        if was_away:
            _log.info("the registry's database %s can be used again", self.description)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        if self._thread.connection is not None:
            yield self._thread.connection
            return
        with self._guarded(), self._reader.begin() as connection:
            self._check_superseded()
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        state = self._thread
        if state.connection is not None:
            assert not state.is_reading, "`consistently` only reads"
            yield state.connection
            if not state.is_first:
                assert not state.has_written, "only one write belongs to a turn, because the lock ends with it"
                state.connection.commit()
                state.has_written = True
                self._log.advance()
            return
        with self._guarded(), self._engine.begin() as connection:
            self._check_superseded()
            _lock_writers(connection)
            yield connection

    def exclusively(self, work: Callable[[], T], first: Callable[[], None] | None = None) -> T:
        if self._thread.connection is not None:
            return work()
        for attempt in range(_ATTEMPTS):
            try:
                return self._attempt(work, first)
            except _TryAgain as cause:
                if attempt == _ATTEMPTS - 1:
                    raise _unavailable("is busy with other writes") from cause
        raise AssertionError

    def _attempt(self, work: Callable[[], T], first: Callable[[], None] | None) -> T:
        with ExitStack() as stack:
            stack.enter_context(self._guarded(tries_again=True))
            if first is None:
                stack.enter_context(self._turn())
            connection = stack.enter_context((self._turn_engine if first is None else self._engine).connect())
            stack.enter_context(self._thread.entered(connection))
            if first is not None:
                self._thread.is_first = True
                first()
                self._thread.is_first = False
                stack.enter_context(self._turn())
            _lock_writers(connection)
            self._catch_up(connection)
            return work()

    def consistently(self, work: Callable[[], T]) -> T:
        if self._thread.connection is not None:
            return work()
        with (
            self._guarded(),
            self._turn(),
            self._turn_reader.connect() as connection,
            self._thread.entered(connection),
        ):
            self._thread.is_reading = True
            self._catch_up(connection)
            return work()

    def refresh(self) -> None:
        if self._thread.connection is not None:
            return
        started_before = self._refreshes_started
        with self._guarded(), self._turn():
            # Another thread may have done it, in a transaction that began after this call.
            if self._refreshes_done > started_before:
                return
            self._refreshes_started += 1
            number = self._refreshes_started
            self.consistently(lambda: None)
            self._refreshes_done = number

    def _catch_up(self, connection: Connection) -> None:
        self._log.catch_up(connection)
        self._superseded = None

    def _check_superseded(self) -> None:
        """Raises `SupersededError` if the tables are those of a newer release, which this one would misread."""
        if self._superseded is not None:
            raise self._superseded

    def follow(self, follower: Follower) -> None:
        self._log.follower = follower

    def time_for(self, connection: Connection, size: int) -> AbstractContextManager[None]:
        return time_for(connection, size)

    def record(self, connection: Connection, change: Change) -> None:
        self._log.append(connection, change)

    def start_again(self) -> str:
        """Moves all tables to a new schema and creates empty ones; returns the name of that schema.

        Raises:
            StoreError: A server uses the database.
        """
        schema = f"until_{datetime.datetime.now(datetime.UTC):%Y%m%dt%H%M%S}"
        with self._guarded(), self._engine.begin() as connection:
            _lock_writers(connection)
            if connection.execute(text(_OTHER_SERVERS), {"name": APPLICATION_NAME}).scalar_one():
                raise StoreError(f"a server uses {self.description}; stop it first")
            connection.execute(text(f"CREATE SCHEMA {schema}"))
            for table in inspect(connection).get_table_names():
                connection.execute(text(f'ALTER TABLE "{table}" SET SCHEMA {schema}'))
            self._create_or_check(connection)
        return schema

    def _open(self, ends_at: float) -> None:
        """Creates or checks the tables. Several servers may do this at once: one does it, and the others find them."""
        refusal = last = ""
        while True:
            try:
                with self._engine.begin() as connection:
                    _check_encoding(connection, self.description)
                    if not self._is_read_only:
                        _lock_writers(connection)
                    self._create_or_check(connection)
                return
            except (DBAPIError, PoolTimeoutError) as cause:
                reason = self._reason(cause)
                if not _is_away(cause) or reason == refusal or time.monotonic() > ends_at:
                    raise StoreError(f"the database {self.description} cannot be used: {reason}") from None
                if reason != last and not any(words in str(cause) for words in _TEMPORARY) and is_refused(self._url):
                    # It may have become ready since: the next attempt decides.
                    refusal = reason
                else:
                    self._warning.report(f"waiting for the database {self.description}: {reason}")
                last = reason
            time.sleep(_START_POLL_S)

    def _create_or_check(self, connection: Connection) -> None:
        tables = set(inspect(connection).get_table_names())
        needed = set(metadata.tables)
        if tables and not needed <= tables:
            raise StoreError(
                f"{self.description} is the database of another program (it has the table {min(tables)}); create a "
                "database for gradrule alone"
            )
        if self._is_read_only and not tables:
            raise StoreError(f"there is no registry in {self.description}: it has no tables")
        if not self._is_read_only:
            # Tables that this release has added are created in an older database.
            metadata.create_all(connection)
            change_metadata.create_all(connection)
        if not tables:
            values = {"schema_version": str(SCHEMA_VERSION), "registry_id": uuid.uuid4().hex}
            connection.execute(insert(meta), [{"key": key, "value": value} for key, value in values.items()])
            self._log.start(connection)
            return
        version = connection.execute(select(meta.c.value).where(meta.c.key == "schema_version")).scalar_one_or_none()
        if not self._is_read_only and migrate(connection, version, lambda _: None):
            self._log.start(connection)
            _log.info("%s had schema version %s and has %d now", self.description, version, SCHEMA_VERSION)
        elif version != str(SCHEMA_VERSION):
            raise StoreError(
                f"{self.description} has schema version {version}, and this release reads version {SCHEMA_VERSION}; "
                "use the release that wrote it"
            )

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._turns.acquire(timeout=WAIT_S):
            raise _unavailable("is busy with other writes")
        try:
            yield
        finally:
            self._turns.release()

    @contextmanager
    def _guarded(self, *, tries_again: bool = False) -> Iterator[None]:
        """Raises UNAVAILABLE in place of errors of the database, and at once while it is away.

        `tries_again`: Raises `_TryAgain` after a serialisation failure or a deadlock.
        """
        if self._thread.is_guarded:
            yield
            return
        is_probe = self._enter()
        self._thread.is_guarded, self._thread.is_probe = True, is_probe
        try:
            yield
        except SupersededError as cause:
            self._superseded = cause
            self._set_away(str(cause))
            raise _unavailable("was changed by a newer release, which this server cannot read") from cause
        except PoolTimeoutError as cause:
            raise _unavailable("is busy") from cause
        except DBAPIError as cause:
            if tries_again and _sqlstate(cause) in _AGAIN:
                raise _TryAgain from cause
            raise self._translate(cause) from cause
        else:
            if self.away:
                self._set_away("")
        finally:
            self._thread.is_guarded = self._thread.is_probe = False
            if is_probe:
                self._is_probing = False

    def _enter(self) -> bool:
        """Returns whether this call tries if the database is back. Raises UNAVAILABLE if another call does that."""
        with self._state:
            if not self.away:
                return False
            if self._is_probing or time.monotonic() < self._probe_at:
                raise _unavailable("cannot be used now")
            self._is_probing = True
            return True

    def _check_probe(self) -> None:
        """Raises UNAVAILABLE if the database is away and this thread does not try if it is back.

        Calls that waited for a connection or a turn meanwhile would otherwise each wait for a new connection.
        """
        if self.away and not self._thread.is_probe:
            raise _unavailable("cannot be used now")

    def _disconnect(self) -> None:
        """Closes the connections that are not in use; others are closed when their thread returns them."""
        self._engine.dispose()
        self._turn_engine.dispose()

    def _set_away(self, reason: str) -> None:
        with self._state:
            super()._set_away(reason)
            self._probe_at = time.monotonic() + _RETRY_S

    def _translate(self, cause: DBAPIError) -> Exception:
        state = _sqlstate(cause)
        if state in _AGAIN or state in _BUSY:
            return _unavailable("is busy")
        if state == _DISK_FULL:
            return error(
                errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
                "the disk of the database for rules and programs is full; its operator must free space",
            )
        # The driver refuses some texts itself, without a state.
        if state.startswith(_OF_THE_CALLER) or (not state and isinstance(cause.orig, psycopg.DataError)):
            return cause
        if any(words in str(cause.orig) for words in _TOO_MANY_CONNECTIONS):
            # The connections that the server has go on.
            self._connections_warning.report(
                f"the registry's database {self.description} has too few connections for {_CONNECTIONS} per server: "
                f"{self._reason(cause)}"
            )
            return _unavailable("has no free connection")
        # The connection ended, or the tables, their rows, the rights or the password were changed: the next call may
        # meet the same.
        self._set_away(f"the registry's database {self.description} cannot be used: {self._reason(cause)}")
        # A server that became read-only keeps its connections.
        self._disconnect()
        return _unavailable("cannot be used now")

    def _reason(self, cause: Exception) -> str:
        original = getattr(cause, "orig", None) or cause
        if isinstance(original, psycopg.Error) and original.sqlstate == _NOT_PERMITTED:
            lines = [original.diag.message_primary or "", "make the server's role the owner of the database"]
        else:
            lines = [line.strip() for line in str(original).splitlines() if line.strip()]
        # libpq adds a hint to the last line of its message.
        return hide_password("; ".join(lines[:2]) or type(original).__name__, self._url)


class _ThreadState(threading.local):
    """The transaction that a thread has open in `exclusively` or `consistently`, and what `_guarded` knows of it."""

    connection: Connection | None = None
    is_first = False
    is_reading = False
    has_written = False
    is_guarded = False
    is_probe = False

    @contextmanager
    def entered(self, connection: Connection) -> Iterator[None]:
        """Makes a transaction the one that `read` and `write` of this thread use."""
        self.connection, self.is_first, self.is_reading, self.has_written = connection, False, False, False
        try:
            yield
        finally:
            self.connection = None


def _lock_folder(folder: Path) -> FolderLock:
    """Locks a server's data folder, so that no other server uses its caches. Raises `StoreError`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FolderLock(folder)
    except FolderInUseError as held:
        raise StoreError(str(held)) from held
    except OSError as cause:
        raise StoreError(
            f"the data folder {folder} cannot be used: {cause.strerror}; give another --data-dir"
        ) from cause
    if (folder / DATABASE_FILE).exists():
        _log.warning(
            "%s is not used, because --registry names another database; `gradrule registry copy` copies it",
            folder / DATABASE_FILE,
        )
    return lock


def _lock_writers(connection: Connection) -> None:
    """Waits until no other transaction writes, and holds the lock until this one ends."""
    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})


def _check_encoding(connection: Connection, description: str) -> None:
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    encoding = driver.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise StoreError(f"{description} has the encoding {encoding}; create a database with ENCODING 'UTF8'")


def _sqlstate(cause: DBAPIError) -> str:
    return getattr(cause.orig, "sqlstate", None) or ""


def _is_away(cause: Exception) -> bool:
    """Returns whether waiting may help a server that starts, because the database itself is away."""
    if isinstance(cause, PoolTimeoutError):
        return True
    if not isinstance(cause, DBAPIError):
        return False
    state = _sqlstate(cause)
    if state:
        return state.startswith(_AWAY)
    # libpq gives no state where no connection was made or where it ended.
    if _NOT_ENCRYPTED.search(str(cause.orig)):
        return False
    return cause.connection_invalidated or isinstance(cause.orig, psycopg.OperationalError | psycopg.InterfaceError)


def _unavailable(problem: str) -> GradruleError:
    return error(
        errors_pb2.ERROR_REASON_UNAVAILABLE,
        f"the database of rules and programs {problem}; try again",
        retry_after_s=1.0,
    )
