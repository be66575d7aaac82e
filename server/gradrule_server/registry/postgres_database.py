"""Opens and uses a registry's database in PostgreSQL, which several servers share.

A writer holds an advisory lock of PostgreSQL while it decides by names and quotas that it reads, until its transaction
has ended: names are unique and quotas are exact across servers.

While the database is away, calls fail at once; one at a time tries to connect.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from gradrule.v1 import errors_pb2
from gradrule_server.concurrency import RepeatedWarning
from gradrule_server.errors import GradruleError, error
from gradrule_server.registry.data_folder import DATABASE_FILE, FolderLock, StoreError, lock_folder
from gradrule_server.registry.database import Database
from gradrule_server.registry.database_url import describe_url, hide_password
from gradrule_server.registry.postgres_connection import (
    create_postgres_engine,
    is_refused,
    time_for,
)
from gradrule_server.registry.schema import SCHEMA_VERSION, metadata, migrate, read_meta, write_meta
from gradrule_server.registry.usage import count_again

_log = logging.getLogger(__name__)

# `gradrule` in ASCII.
_LOCK_KEY = 0x6772616472756C65
# Connections of a server; docs/guide/clusters.md states them.
_CONNECTIONS = 8
_RETRY_S = 0.4
_START_POLL_S = 0.5

# States of PostgreSQL (SQLSTATE) of errors that another attempt may not meet: serialisation failure, deadlock, a
# statement or a lock that took too long.
_BUSY = frozenset({"40001", "40P01", "57014", "55P03"})
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

# The tables that every release had.
_OLDEST_TABLES = frozenset({"meta", "rules", "blobs", "programs"})


class SupersededError(Exception):
    """A newer release has migrated the tables; the message says to which version."""


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
        self._superseded: SupersededError | None = None
        self._thread = _ThreadState()
        self._state = threading.Lock()
        self.away = ""
        self._is_probing = False
        self._probe_at = 0.0
        self._folder_lock = None if folder is None else _lock_folder(folder)
        self._engine = create_postgres_engine(url, _CONNECTIONS, self._check_probe)
        # One snapshot for all queries of a transaction.
        options: Mapping[str, Any] = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        self._reader = self._engine.execution_options(**options)
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
        """Logs why the database cannot be used, and when it can be used again."""
        was_away = self.away
        try:
            with self._guarded(), self._reader.begin() as connection:
                self._check_version(connection)
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
        if self._thread.connection is not None:
            yield self._thread.connection
            return
        with self._guarded(), self._engine.begin() as connection:
            self._check_superseded()
            yield connection

    def lock(self, connection: Connection) -> None:
        if self._thread.connection is None:
            _lock_writers(connection)
            self._check_version(connection)

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        with self.write() as connection:
            self.lock(connection)
            with self._entered(connection):
                yield

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        with self.read() as connection, self._entered(connection):
            yield

    @contextmanager
    def _entered(self, connection: Connection) -> Iterator[None]:
        """Makes a transaction the one that `read` and `write` of this thread use."""
        self._thread.connection = connection
        try:
            yield
        finally:
            self._thread.connection = None

    def _check_version(self, connection: Connection) -> None:
        """Raises `SupersededError` if a newer release has migrated the tables."""
        version = read_meta(connection, "schema_version")
        self._superseded = None
        if version != str(SCHEMA_VERSION):
            raise SupersededError(
                f"the registry has schema version {version} now, and this server reads version {SCHEMA_VERSION}; "
                "start a server of the newer release"
            )

    def _check_superseded(self) -> None:
        """Raises `SupersededError` if the tables are those of a newer release, which this one would misread."""
        if self._superseded is not None:
            raise self._superseded

    def time_for(self, connection: Connection, size: int) -> AbstractContextManager[None]:
        return time_for(connection, size)

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
        if tables and not tables >= _OLDEST_TABLES:
            raise StoreError(
                f"{self.description} is the database of another program (it has the table {min(tables)}); create a "
                "database for gradrule alone"
            )
        if self._is_read_only and not tables:
            raise StoreError(f"there is no registry in {self.description}: it has no tables")
        if not self._is_read_only:
            metadata.create_all(connection)
        if not tables:
            write_meta(connection, "schema_version", str(SCHEMA_VERSION))
            write_meta(connection, "registry_id", uuid.uuid4().hex)
            return
        version = read_meta(connection, "schema_version")
        if not self._is_read_only and migrate(connection, version, lambda _: None):
            count_again(connection)
            _log.info("%s had schema version %s and has %d now", self.description, version, SCHEMA_VERSION)
        elif version != str(SCHEMA_VERSION):
            raise StoreError(
                f"{self.description} has schema version {version}, and this release reads version {SCHEMA_VERSION}; "
                "use the release that wrote it"
            )

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Raises UNAVAILABLE in place of errors of the database, and at once while it is away."""
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

        Calls that waited for a connection meanwhile would otherwise each wait for a new connection.
        """
        if self.away and not self._thread.is_probe:
            raise _unavailable("cannot be used now")

    def _disconnect(self) -> None:
        """Closes the connections that are not in use; others are closed when their thread returns them."""
        self._engine.dispose()

    def _set_away(self, reason: str) -> None:
        with self._state:
            super()._set_away(reason)
            self._probe_at = time.monotonic() + _RETRY_S

    def _translate(self, cause: DBAPIError) -> Exception:
        state = _sqlstate(cause)
        if state in _BUSY:
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
    """The transaction that a thread has open in `exclusively` or `snapshot`, and what `_guarded` knows of it."""

    connection: Connection | None = None
    is_guarded = False
    is_probe = False


def _lock_folder(folder: Path) -> FolderLock:
    """Locks a server's data folder, so that no other server uses its caches. Raises `StoreError`."""
    lock = lock_folder(folder)
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
