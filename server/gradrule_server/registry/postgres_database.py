"""Opens and uses a registry's database in PostgreSQL, which several servers share.

A writer holds an advisory lock of PostgreSQL while it decides by names and quotas that it reads, until its transaction
has ended: names are unique and quotas are exact across servers. All waits are bounded.

While the database is away, calls fail at once; one at a time tries to connect.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo, Format
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import DBAPIError, DisconnectionError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from gradrule.v1 import errors_pb2
from gradrule_server.concurrency import RepeatedWarning
from gradrule_server.errors import GradruleError, error
from gradrule_server.registry.data_folder import DATABASE_FILE, FolderLock, StoreError, lock_folder
from gradrule_server.registry.database import Database, VersionError
from gradrule_server.registry.database_url import check_url, describe_url, hide_password

_log = logging.getLogger(__name__)

# What PostgreSQL shows as the name of a server's connections, unless the URL sets another.
_APPLICATION_NAME = "gradrule"
# Longest time until a host has accepted a connection, seconds.
_CONNECT_S = 3
# Longest time that PostgreSQL works on a statement or waits for a lock, seconds.
_STATEMENT_S = 5.0
# Longest time without an answer, seconds; then the connection is closed.
_ANSWER_S = _STATEMENT_S + 1.0
# Longest wait for a connection that other threads have, seconds. Where the database hangs, those that wait for its
# answer report that first.
_WAIT_S = _ANSWER_S + 1.0
# Size from which on a row takes long to write and read, bytes, and the rate that it gets time for, bytes per second.
_LARGE_BYTES = 1 << 20
_LARGE_RATE = 5 << 20

_SETTINGS = {
    "statement_timeout": f"{_STATEMENT_S * 1000:.0f}",
    "lock_timeout": f"{_STATEMENT_S * 1000 - 500:.0f}",
    # A server that hangs within a transaction must not stop the writes of all others.
    "idle_in_transaction_session_timeout": "15000",
    # An acknowledged write must survive, whatever the default of the database is.
    "synchronous_commit": "on",
}

_DEFAULTS = {
    "connect_timeout": str(_CONNECT_S),
    "application_name": _APPLICATION_NAME,
    "target_session_attrs": "read-write",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
}

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
# All connections that the database or the role may have are in use.
_TOO_MANY_CONNECTIONS = ("too many", "connection slots")


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
        super().__init__()
        self.description = describe_url(url)
        self._url = url
        self._is_read_only = is_read_only
        self._warning = RepeatedWarning(_log)
        self._connections_warning = RepeatedWarning(_log)
        self._state = threading.Lock()
        # When a call may try again to connect.
        self._probe_at = 0.0
        self._folder_lock = None if folder is None else _lock_folder(folder)
        self._engine = _create_engine(url)
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

    def check(self) -> None:
        """Logs why the database cannot be used, and when it can be used again."""
        was_away = self.away
        try:
            with self.read() as connection:
                self._check_version(connection)
        except GradruleError as cause:
            self._warning.report(f"{self.away or cause.message}; the server goes on with what it has in memory")
            return
        self._warning.report(None)
        if was_away:
            _log.info("the registry's database %s can be used again", self.description)

    def lock(self, connection: Connection) -> None:
        if self._thread.connection is None:
            _lock_writers(connection)
            # A newer release may have migrated the tables meanwhile.
            self._check_version(connection)

    @contextmanager
    def _transaction(self, *, is_writing: bool) -> Iterator[Connection]:
        is_first = self._thread.connection is None
        with super()._transaction(is_writing=is_writing) as connection:
            if is_first:
                self._check_version(connection)
            yield connection

    def _open(self, ends_at: float) -> None:
        """Creates or checks the tables. Several servers may do this at once: one does it, and the others find them."""
        while True:
            try:
                with self._engine.begin() as connection:
                    _check_encoding(connection, self.description)
                    if self._is_read_only:
                        self._check_tables(connection)
                    else:
                        _lock_writers(connection)
                        self._prepare(connection)
                return
            except (DBAPIError, PoolTimeoutError) as cause:
                reason = self._reason(cause)
                if not isinstance(cause, OperationalError | PoolTimeoutError) or time.monotonic() > ends_at:
                    raise StoreError(f"the database {self.description} cannot be used: {reason}") from None
                self._warning.report(f"waiting for the database {self.description}: {reason}")
            time.sleep(_START_POLL_S)

    def _check_tables(self, connection: Connection) -> None:
        """Raises `StoreError` if there are no tables of this release."""
        if not inspect(connection).has_table("meta"):
            raise StoreError(f"there is no registry in {self.description}: it has no tables")
        self._check_version(connection)

    @contextmanager
    def _guarded(self, *, is_writing: bool) -> Iterator[None]:
        """Raises UNAVAILABLE in place of errors of the database, and at once while it is away."""
        self._enter()
        try:
            yield
        except VersionError as cause:
            self._set_away(str(cause))
            raise _unavailable("was changed by a newer release, which this server cannot read") from cause
        except PoolTimeoutError as cause:
            raise _unavailable("is busy") from cause
        except DBAPIError as cause:
            raise self._translate(cause) from cause
        else:
            if self.away:
                self._set_away("")

    def _enter(self) -> None:
        """Raises UNAVAILABLE while the database is away, unless this call tries if it is back."""
        with self._state:
            if self.away:
                if time.monotonic() < self._probe_at:
                    raise _unavailable("cannot be used now")
                # Other calls wait for the outcome of this one.
                self._probe_at = time.monotonic() + _WAIT_S

    def _disconnect(self) -> None:
        """Closes the connections that are not in use; others are closed when their thread returns them."""
        self._engine.dispose()

    def _set_away(self, reason: str) -> None:
        with self._state:
            super()._set_away(reason)
            self._probe_at = time.monotonic() + _RETRY_S

    @contextmanager
    def _time_for(self, connection: Connection, size: int) -> Iterator[None]:
        if size < _LARGE_BYTES:
            yield
            return
        driver = connection.connection.driver_connection
        assert isinstance(driver, _BoundedConnection)
        seconds = _STATEMENT_S + size / _LARGE_RATE
        connection.execute(text(f"SET LOCAL statement_timeout = {seconds * 1000:.0f}"))
        driver.answer_s = seconds + 1.0
        try:
            yield
        finally:
            driver.answer_s = _ANSWER_S

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


class _BoundedConnection(psycopg.Connection[Any]):
    """A connection that is closed if PostgreSQL does not answer in time, as where its machine hangs."""

    answer_s = _ANSWER_S

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        try:
            return super().wait(gen, interval, self.answer_s if timeout is None else timeout)
        except psycopg.errors._WaitTimeout as cause:
            self.pgconn.finish()
            raise psycopg.OperationalError(f"no answer within {self.answer_s:g} s") from cause


class _BinaryCursor(psycopg.Cursor[Any]):
    """A cursor that receives rows in PostgreSQL's binary format, in which bytes are half as long as in text."""

    def __init__(self, connection: Any, **options: Any) -> None:
        super().__init__(connection, **options)
        self.format = Format.BINARY


def _create_engine(url: str) -> Engine:
    """Returns a pool of at most `_CONNECTIONS` connections; it connects when a connection is needed."""
    check_url(url)

    def connect() -> _BoundedConnection:
        connection: _BoundedConnection = _BoundedConnection.connect(
            **_connect_arguments(url), prepare_threshold=None, cursor_factory=_BinaryCursor
        )
        return connection

    engine = create_engine(
        "postgresql+psycopg://",
        creator=connect,
        pool_size=_CONNECTIONS,
        max_overflow=0,
        pool_timeout=_WAIT_S,
        # Errors are logged, and parameters hold what tenants store.
        hide_parameters=True,
    )
    # Not the ping of SQLAlchemy, which would wait for an answer before each transaction.
    event.listen(engine, "checkout", _replace_if_ended)
    return engine


def _connect_arguments(url: str) -> dict[str, Any]:
    # libpq reads the URL, so that all its options work: sslmode, passfile, several hosts.
    given = {name: value for name, value in conninfo_to_dict(url).items() if value is not None}
    # Variables such as PGOPTIONS, and the file that PGSERVICE names.
    names = {*_DEFAULTS, "options"}
    environment = {
        name: option.val.decode()
        for option in Conninfo.get_defaults()
        if (name := option.keyword.decode()) in names and option.val is not None and option.val != option.compiled
    }
    arguments: dict[str, Any] = _DEFAULTS | environment | given
    options = [arguments.get("options", ""), *(f"-c {name}={value}" for name, value in _SETTINGS.items())]
    return arguments | {"options": " ".join(options).strip(), "client_encoding": "utf8"}


def _replace_if_ended(connection: psycopg.Connection[Any], *_: object) -> None:
    """Lets the pool connect again if PostgreSQL has ended a connection that was not in use."""
    # An unused connection has something to read only at its end, which a last message may precede.
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    if poll.poll(0):
        raise DisconnectionError("PostgreSQL has ended the connection")


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


def _unavailable(problem: str) -> GradruleError:
    return error(
        errors_pb2.ERROR_REASON_UNAVAILABLE,
        f"the database of rules and programs {problem}; try again",
        retry_after_s=1.0,
    )
