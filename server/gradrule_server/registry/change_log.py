"""Tells each server what other servers have written, through a log of changes in their common database.

Each transaction that changes rules or programs adds a row. A server reads the rows after the last one that it knows:
at intervals, before it writes, and before it says that a name does not exist. Nothing is lost with a connection,
because the server goes on where it stopped. A log that does not continue there, as after a restored backup, makes the
server read everything again.
"""

from __future__ import annotations

import uuid
from typing import NamedTuple

from sqlalchemy import Connection, Row, delete, func, insert, select

from gradrule_server.registry.database import Change, Follower
from gradrule_server.registry.schema import SCHEMA_VERSION, changes, meta

# Rows that are kept at least. A server that was away for more changes reads everything again.
_KEPT_ROWS = 100_000
_PRUNE_EVERY = 1000
# To apply more changes takes longer than to read everything.
_MOST_CHANGES = 5000
# The largest number of a row, which nothing follows: a log that has it starts again with row 1.
_LAST_NUMBER = 2**63 - 1
# Kind of a row that starts a log: everything may have changed.
_START = "start"


class SupersededError(Exception):
    """A newer release has migrated the tables; the message says to which version."""


class Position(NamedTuple):
    """A row of the log: its number, and its random mark."""

    number: int
    mark: str


class ChangeLog:
    """The log, and the last row whose change this server has applied. Its caller lets one thread use it at a time."""

    def __init__(self) -> None:
        self.follower: Follower | None = None
        self._position: Position | None = None
        self._appended: Position | None = None

    def start(self, connection: Connection) -> None:
        """Starts a log in new or migrated tables."""
        _append(connection, _START, "", "", 0, 0)

    def append(self, connection: Connection, change: Change) -> None:
        """Adds a change. The caller holds the lock of writers."""
        self._appended = _append(connection, change.kind, change.tenant, change.name, change.count, change.size)
        number = self._appended.number
        if number % _PRUNE_EVERY == 0:
            connection.execute(delete(changes).where(changes.c.number <= number - _KEPT_ROWS))

    def advance(self) -> None:
        """Marks the change that was added last as applied, after its transaction was committed."""
        self._position = self._appended or self._position

    def catch_up(self, connection: Connection) -> None:
        """Applies the changes of other servers, in a transaction in which nobody else changes anything.

        Raises:
            SupersededError: A newer release has migrated the tables.
        """
        self._appended = None
        rows = [] if self._position is None else _rows_from(connection, self._position.number)
        continues = bool(rows) and _position(rows[0]) == self._position and len(rows) <= _MOST_CHANGES
        if continues and len(rows) == 1:
            return
        continues = continues and all(row.kind != _START for row in rows[1:])
        version = connection.execute(select(meta.c.value).where(meta.c.key == "schema_version")).scalar_one_or_none()
        if version != str(SCHEMA_VERSION):
            raise SupersededError(
                f"the registry has schema version {version} now, and this server reads version {SCHEMA_VERSION}; "
                "start a server of the newer release"
            )
        # If applying fails halfway, the next call reads everything.
        self._position = None
        if not continues:
            newest = connection.execute(select(changes).order_by(changes.c.number.desc()).limit(1)).one_or_none()
            if self.follower is not None:
                self.follower.reload()
            self._position = None if newest is None else _position(newest)
            return
        if self.follower is not None:
            self.follower.apply([_change(row) for row in rows[1:]])
        self._position = _position(rows[-1])


def _append(connection: Connection, kind: str, tenant: str, name: str, count: int, size: int) -> Position:
    number = connection.execute(select(func.coalesce(func.max(changes.c.number), 0))).scalar_one() + 1
    if number > _LAST_NUMBER:
        # Servers do not find their last row in the new log, because marks are random, and read everything again.
        connection.execute(delete(changes))
        number = 1
    mark = uuid.uuid4().hex
    row = {"number": number, "mark": mark, "kind": kind, "tenant": tenant, "name": name, "count": count, "size": size}
    connection.execute(insert(changes).values(row))
    return Position(number, mark)


def _rows_from(connection: Connection, number: int) -> list[Row[tuple[object, ...]]]:
    query = select(changes).where(changes.c.number >= number).order_by(changes.c.number).limit(_MOST_CHANGES + 1)
    return list(connection.execute(query))


def _position(row: Row[tuple[object, ...]]) -> Position:
    return Position(row.number, row.mark)


def _change(row: Row[tuple[object, ...]]) -> Change:
    # Not row.count: a row has a method of this name.
    found = row._mapping
    return Change(row.kind, row.tenant, row.name, found["count"], found["size"])
