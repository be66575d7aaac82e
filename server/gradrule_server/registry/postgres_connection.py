"""Connects to PostgreSQL with bounded waits."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo, Format, PGconn, Ping
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DisconnectionError

from gradrule_server.registry.database import LARGE_BYTES
from gradrule_server.registry.database_url import check_url

APPLICATION_NAME = "gradrule"
"""What PostgreSQL shows as the name of a server's connections, unless the URL sets another."""
CONNECT_S = 3
"""Longest time until a host has accepted a connection, seconds."""
STATEMENT_S = 5.0
"""Longest time that PostgreSQL works on a statement or waits for a lock, seconds."""
ANSWER_S = STATEMENT_S + 1.0
"""Longest time without an answer, seconds; then the connection is closed."""
WAIT_S = ANSWER_S + 1.0
"""Longest wait for a connection or a turn that other threads have, seconds.

Where the database hangs, those that wait for its answer report that first.
"""

# A large row gets the time that it needs at this rate, bytes per second.
_LARGE_RATE = 5 << 20

_SETTINGS = {
    "statement_timeout": f"{STATEMENT_S * 1000:.0f}",
    "lock_timeout": f"{STATEMENT_S * 1000 - 500:.0f}",
    # A server that hangs within a transaction must not stop the writes of all others.
    "idle_in_transaction_session_timeout": "15000",
    # An acknowledged write must survive, whatever the default of the database is.
    "synchronous_commit": "on",
}


_DEFAULTS = {
    "connect_timeout": str(CONNECT_S),
    "application_name": APPLICATION_NAME,
    "target_session_attrs": "read-write",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
}


class _BoundedConnection(psycopg.Connection[Any]):
    """A connection that is closed if PostgreSQL does not answer in time, as where its machine hangs."""

    answer_s = ANSWER_S

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


def create_postgres_engine(url: str, connections: int, check: Callable[[], None]) -> Engine:
    """Returns a pool of at most `connections` connections; it connects when a connection is needed.

    Args:
        url: The URL of the database.
        connections: Largest number of connections.
        check: Called before each attempt to connect; what it raises is raised instead.
    """
    check_url(url)

    def connect() -> _BoundedConnection:
        check()
        connection: _BoundedConnection = _BoundedConnection.connect(
            **_connect_arguments(url), prepare_threshold=None, cursor_factory=_BinaryCursor
        )
        return connection

    engine = create_engine(
        "postgresql+psycopg://",
        creator=connect,
        pool_size=connections,
        max_overflow=0,
        pool_timeout=WAIT_S,
        # Errors are logged, and parameters hold what tenants store.
        hide_parameters=True,
    )
    # Not the ping of SQLAlchemy, which would wait for an answer before each transaction.
    event.listen(engine, "checkout", _replace_if_ended)
    return engine


def is_refused(url: str) -> bool:
    """Returns whether a database that refuses a connection is up, rather than starting or away.

    Its messages may be in any language, and the driver does not give the state (SQLSTATE) of a refused connection.
    All threads of the process wait meanwhile.
    """
    conninfo = make_conninfo(**_connect_arguments(url)).encode()
    return PGconn.ping(conninfo) in (Ping.OK, Ping.NO_ATTEMPT)


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


@contextmanager
def time_for(connection: Connection, size: int) -> Iterator[None]:
    """Gives the statements of a context the time that a row of `size` bytes needs."""
    if size < LARGE_BYTES or connection.dialect.name != "postgresql":
        yield
        return
    driver = connection.connection.driver_connection
    assert isinstance(driver, _BoundedConnection)
    seconds = STATEMENT_S + size / _LARGE_RATE
    connection.execute(text(f"SET LOCAL statement_timeout = {seconds * 1000:.0f}"))
    driver.answer_s = seconds + 1.0
    try:
        yield
        connection.execute(text(f"SET LOCAL statement_timeout = {STATEMENT_S * 1000:.0f}"))
    finally:
        driver.answer_s = ANSWER_S
