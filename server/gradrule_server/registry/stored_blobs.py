"""Indexes the blobs in an object store, for all servers of a registry: objects, sizes, uses, needing programs.

The tables are derived data: they are filled again from the object store and the stored programs if they are missing.
Servers change them one after another, because `Database.write` lets in one at a time. An object is deleted only after
its row was marked: a server that is killed in between leaves the mark, and another server deletes the object.
"""

from __future__ import annotations

import re
import sqlite3
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    ForeignKeyConstraint,
    Index,
    MetaData,
    Select,
    String,
    Table,
    bindparam,
    delete,
    exists,
    func,
    insert,
    inspect,
    literal,
    select,
    tuple_,
    update,
)

from gradrule_server.policy import missing_blobs
from gradrule_server.registry.blob_index import BlobAmount, quota_exceeded
from gradrule_server.registry.database import Database
from gradrule_server.registry.object_store import ObjectStore
from gradrule_server.registry.schema import meta, programs

T = TypeVar("T")

STORED = "stored"
"""The state of an object whose blob servers find."""

_UPLOADING, _DELETED = "uploading", "deleted"

_metadata = MetaData()

_blobs = Table(
    "stored_blobs",
    _metadata,
    Column("object", String, primary_key=True),
    # The tenant's folder, see `blobs.folder_name`.
    Column("folder", String, nullable=False),
    Column("name", String, nullable=False),
    Column("length", BigInteger, nullable=False),
    # What counts towards limits: the length, rounded up to blocks.
    Column("size", BigInteger, nullable=False),
    Column("state", String, nullable=False),
    # The last use of a stored blob, the last sign of life of an upload, the time of a deletion.
    Column("last_use_us", BigInteger, nullable=False),
    Index("ix_stored_blobs_use", "folder", "state", "last_use_us"),
)
Index(
    "ix_stored_blobs_name",
    _blobs.c.folder,
    _blobs.c.name,
    unique=True,
    sqlite_where=_blobs.c.state == STORED,
    postgresql_where=_blobs.c.state == STORED,
)

# Of each folder: the sum of `size` and the number of its blobs, without those that are marked for deletion.
_totals = Table(
    "stored_blob_totals",
    _metadata,
    Column("folder", String, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),
)

_needs = Table(
    "program_blobs",
    _metadata,
    Column("tenant", String, primary_key=True),
    Column("program_id", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("folder", String, nullable=False),
    ForeignKeyConstraint(["tenant", "program_id"], [programs.c.tenant, programs.c.id], ondelete="CASCADE"),
    Index("ix_program_blobs_name", "folder", "name"),
)

_BLOCK = 4096
_CHUNK = 1000
_PAGE = 500
_STATES = 10_000
# After this time without a sign of life, the server of an upload is gone.
_UPLOAD_LOST_US = 120 * 10**6
# The server that marked an object deletes it within this time; other servers delete it later.
_DELETION_LOST_US = 60 * 10**6
_OBJECT = re.compile(r"(?:(tenant-[0-9a-f]{32})|default)/([0-9a-f]{64})-[0-9a-f]{32}")

# How the keys of objects start.
_STARTS = ("default/", "tenant-")

BlobKey = tuple[str, str]
"""A tenant's folder and the name of a blob."""


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """Where a blob is. `length`: bytes."""

    object: str
    length: int


class StoredBlobs:
    """The index of an object store. All methods block; safe to use from several threads.

    Args:
        database: The registry's database, which the servers share. The tables are created if they are missing.
        limit: The amount of blobs that all tenants may have.
    """

    def __init__(self, database: Database, limit: BlobAmount) -> None:
        self._database = database
        self.limit = limit
        with database.write() as connection:
            _metadata.create_all(connection)
            _count_totals(connection)

    def registry_id(self) -> str:
        """Returns the id of the registry."""
        with self._database.read() as connection:
            return str(connection.execute(select(meta.c.value).where(meta.c.key == "registry_id")).scalar_one())

    def find(self, folder: str, names: Sequence[str]) -> dict[str, StoredBlob]:
        """Returns those of the blobs that are stored, by name."""
        found = {}
        columns = (_blobs.c.name, _blobs.c.object, _blobs.c.length)
        with self._database.read() as connection:
            for some in _chunks(names):
                query = select(*columns).where(
                    _blobs.c.folder == folder, _blobs.c.name.in_(some), _blobs.c.state == STORED
                )
                for row in connection.execute(query):
                    found[row.name] = StoredBlob(row.object, row.length)
        return found

    def usage(self) -> dict[str, BlobAmount]:
        """Returns the amount of each folder, including running uploads."""
        with self._database.read() as connection:
            return _usage(connection)

    def reserve(
        self, folder: str, name: str, length: int, *, limit: BlobAmount, kept: Collection[BlobKey]
    ) -> tuple[str | None, list[str]]:
        """Reserves room for a blob; deletes the least recently used blobs that no program needs if there is too little.

        Args:
            folder: The tenant's folder.
            name: The blob's name.
            length: Its size in bytes.
            limit: The tenant's limit.
            kept: Further blobs that are not deleted.

        Returns:
            The key of the object to store, None: the blob is stored already; and the keys of the objects to delete.

        Raises:
            GradruleError: QUOTA_EXCEEDED, if programs need all blobs; nothing is deleted then.
        """
        with self._database.write() as connection:
            now_us = _now_us(connection)
            is_same = (_blobs.c.folder == folder) & (_blobs.c.name == name) & (_blobs.c.state == STORED)
            if connection.execute(update(_blobs).where(is_same).values(last_use_us=now_us)).rowcount:
                return None, []
            removed = _make_room(connection, folder, counted_bytes(length), limit, self.limit, kept)
            for some in _chunks(removed):
                _mark_deleted(connection, _blobs.c.object.in_(some))
            key = new_object(folder, name)
            _insert(connection, [_row(key, folder, name, length, _UPLOADING, now_us)])
            return key, removed

    def commit(self, key: str) -> bool:
        """Makes the blob of a complete upload visible; returns False if it was lost: it must be uploaded again.

        If another server has stored the same blob meanwhile, that one stays and this object is marked for deletion.
        """
        with self._database.write() as connection:
            row = connection.execute(select(_blobs).where(_blobs.c.object == key)).one_or_none()
            if row is None or row.state != _UPLOADING:
                return False
            is_same = (_blobs.c.folder == row.folder) & (_blobs.c.name == row.name) & (_blobs.c.state == STORED)
            is_meant = _blobs.c.object == key
            if connection.execute(select(_blobs.c.object).where(is_same)).first() is not None:
                _mark_deleted(connection, is_meant)
            else:
                values = {"state": STORED, "last_use_us": _now_us(connection)}
                connection.execute(update(_blobs).where(is_meant).values(values))
            return True

    def cancel(self, key: str) -> bool:
        """Marks the object of a failed upload for deletion; returns False if its blob is stored nevertheless.

        It is stored if the connection to the database broke while `commit` waited for the answer.
        """
        with self._database.write() as connection:
            is_meant = _blobs.c.object == key
            if connection.execute(select(_blobs.c.state).where(is_meant)).scalar_one_or_none() == STORED:
                return False
            _mark_deleted(connection, is_meant)
            return True

    def mark_deleted(self, keys: Sequence[str]) -> None:
        """Marks objects of stored blobs for deletion, because they are damaged or missing."""
        for some in _chunks(keys):
            with self._database.write() as connection:
                _mark_deleted(connection, _blobs.c.object.in_(some) & (_blobs.c.state == STORED))

    def forget(self, keys: Sequence[str]) -> None:
        """Removes the rows of objects that were marked and are deleted now."""
        with self._database.write() as connection:
            for some in _chunks(keys):
                connection.execute(delete(_blobs).where(_blobs.c.object.in_(some), _blobs.c.state == _DELETED))

    def take_lost(self) -> list[str]:
        """Returns the keys of objects that other servers should have deleted or stored; marks them for deletion."""
        with self._database.read() as connection:
            now_us = _now_us(connection)
            lost = (_blobs.c.state == _UPLOADING) & (_blobs.c.last_use_us < now_us - _UPLOAD_LOST_US)
            left = (_blobs.c.state == _DELETED) & (_blobs.c.last_use_us < now_us - _DELETION_LOST_US)
            keys = list(connection.execute(select(_blobs.c.object).where(lost | left).limit(_PAGE)).scalars())
        if not keys:
            return []
        with self._database.write() as connection:
            # An upload may have shown a sign of life, or another server may have taken the object, meanwhile.
            is_left = _blobs.c.object.in_(keys) & left
            taken = update(_blobs).where(is_left).values(last_use_us=_now_us(connection)).returning(_blobs.c.object)
            return [
                *connection.execute(taken).scalars(),
                *_mark_deleted(connection, _blobs.c.object.in_(keys) & lost),
            ]

    def record_upload(self, key: str) -> None:
        """Stores that an upload still runs, so that other servers do not discard it."""
        with self._database.write() as connection:
            is_running = (_blobs.c.object == key) & (_blobs.c.state == _UPLOADING)
            connection.execute(update(_blobs).where(is_running).values(last_use_us=_now_us(connection)))

    def record_uses(self, uses: Mapping[BlobKey, int]) -> None:
        """Stores the times of last uses, microseconds since 1970 by the clock of this machine."""
        statement = (
            update(_blobs)
            .where(
                _blobs.c.folder == bindparam("in_folder"),
                _blobs.c.name == bindparam("of_name"),
                _blobs.c.state == STORED,
                _blobs.c.last_use_us < bindparam("used_us"),
            )
            .values(last_use_us=bindparam("used_us"))
        )
        for some in _chunks(list(uses.items())):
            with self._database.write() as connection:
                # Clocks of servers may differ.
                offset_us = _now_us(connection) - time.time_ns() // 1000
                connection.execute(
                    statement,
                    [
                        {"in_folder": folder, "of_name": name, "used_us": used_us + offset_us}
                        for (folder, name), used_us in some
                    ],
                )

    def need(self, connection: Connection, tenant: str, program_id: str, folder: str, names: Sequence[str]) -> None:
        """Records which blobs a program needs, in the transaction that stores the program.

        Raises:
            GradruleError: BLOB_NOT_FOUND, if a blob is not stored (any more).
        """
        if not names:
            return
        found: set[str] = set()
        for some in _chunks(names):
            is_meant = _blobs.c.name.in_(some) & (_blobs.c.folder == folder) & (_blobs.c.state == STORED)
            found.update(connection.execute(select(_blobs.c.name).where(is_meant)).scalars())
        missing = [name for name in names if name not in found]
        if missing:
            raise missing_blobs(missing)
        connection.execute(insert(_needs), [_need(tenant, program_id, folder, name) for name in names])

    def add_needs(self, wanted: Iterable[tuple[str, str, str, Sequence[str]]]) -> None:
        """Adds what is missing of the blobs that programs need: tenant, program id, folder, names of blobs."""
        with self._database.read() as connection:
            query = select(_needs.c.tenant, _needs.c.program_id, _needs.c.name)
            known = {tuple(row) for row in connection.execute(query)}
        rows = [
            _need(tenant, program_id, folder, name)
            for tenant, program_id, folder, names in wanted
            for name in names
            if (tenant, program_id, name) not in known
        ]
        for some in _chunks(rows):
            self._add_needs(some)

    def _add_needs(self, rows: Sequence[Mapping[str, str]]) -> None:
        with self._database.write() as connection:
            for row in rows:
                is_stored = exists().where(programs.c.tenant == row["tenant"], programs.c.id == row["program_id"])
                is_known = exists().where(*(_needs.c[key] == row[key] for key in ("tenant", "program_id", "name")))
                # Another server may have added it, or deleted the program.
                values = select(*(literal(value) for value in row.values())).where(is_stored, ~is_known)
                connection.execute(insert(_needs).from_select(list(row), values))

    def lost(self) -> list[BlobKey]:
        """Returns the blobs that programs need and that are not stored (any more)."""
        is_stored = exists().where(
            _blobs.c.folder == _needs.c.folder, _blobs.c.name == _needs.c.name, _blobs.c.state == STORED
        )
        with self._database.read() as connection:
            rows = connection.execute(select(_needs.c.folder, _needs.c.name).where(~is_stored).distinct())
            return [(row.folder, row.name) for row in rows]

    def is_empty(self) -> bool:
        """Returns whether no blob is stored."""
        with self._database.read() as connection:
            return connection.execute(select(_blobs.c.object).limit(1)).first() is None

    def compare(
        self, objects: Iterable[tuple[str, int]], find_missing: Callable[[Sequence[str]], Sequence[str]]
    ) -> tuple[int, int]:
        """Adds objects that have no rows, and marks stored blobs without an object for deletion; returns both numbers.

        Args:
            objects: Key and size of each object.
            find_missing: Returns which objects are missing, of those that `objects` lacks: new ones may be listed late.
        """
        # Read the rows first: an object that another server deletes meanwhile must not be entered again.
        with self._database.read() as connection:
            before = object_states(connection)
        found = {key: (blob, length) for key, length in objects if (blob := blob_of_object(key)) is not None}
        lost = find_missing([key for key, state in before.items() if state == STORED and key not in found])
        # Mark them first: an object that is there may have the same blob.
        self.mark_deleted(lost)
        # Not all in one transaction: other servers wait meanwhile, and the time of a statement is limited.
        added = sum(
            self._adopt([(key, *found[key]) for key in some]) for some in _chunks(sorted(found.keys() - before.keys()))
        )
        return added, len(lost)

    def _adopt(self, objects: Sequence[tuple[str, BlobKey, int]]) -> int:
        """Adds objects without rows: key, blob and size; returns the number of blobs that are stored now."""
        with self._database.write() as connection:
            now_us = _now_us(connection)
            query = select(_blobs.c.object).where(_blobs.c.object.in_([key for key, _, _ in objects]))
            keys = set(connection.execute(query).scalars())
            names = [name for _, (_, name), _ in objects]
            query_of_names = select(_blobs.c.folder, _blobs.c.name).where(
                _blobs.c.name.in_(names), _blobs.c.state == STORED
            )
            known = {(row.folder, row.name) for row in connection.execute(query_of_names)}
            rows: list[dict[str, Any]] = []
            for key, (folder, name), length in objects:
                if key in keys:
                    continue
                # A blob may have two objects, if two servers stored it at the same time and were killed.
                state = _DELETED if (folder, name) in known else STORED
                known.add((folder, name))
                # Different times: many rows with one time could not be read in their order by the database's index.
                rows.append(_row(key, folder, name, length, state, now_us - len(rows)))
            if rows:
                _insert(connection, rows)
        return sum(row["state"] == STORED for row in rows)


def _row(key: str, folder: str, name: str, length: int, state: str, now_us: int) -> dict[str, Any]:
    return {
        "object": key,
        "folder": folder,
        "name": name,
        "length": length,
        "size": counted_bytes(length),
        "state": state,
        "last_use_us": now_us,
    }


def new_object(folder: str, name: str) -> str:
    """Returns a new key for the object of a blob."""
    return f"{folder or 'default'}/{name}-{uuid.uuid4().hex}"


def blob_of_object(key: str) -> BlobKey | None:
    """Returns the blob of an object; None if the object is none of this program."""
    match = _OBJECT.fullmatch(key)
    return None if match is None else (match[1] or "", match[2])


def drop_index(database: sqlite3.Connection) -> None:
    """Removes the tables from a copy of a registry, which will have other objects."""
    for table in (_needs, _blobs, _totals):
        database.execute(f"DROP TABLE IF EXISTS {table.name}")
    database.commit()


def blob_objects(objects: ObjectStore) -> Iterator[tuple[str, int]]:
    """Yields key and size of each object that may be a blob; a bucket may have other objects besides."""
    for start in _STARTS:
        yield from objects.iterate(start)


def object_states(connection: Connection) -> dict[str, str]:
    """Returns the state of each object in the index; none if the registry has no index."""
    if not inspect(connection).has_table(_blobs.name):
        return {}
    query = select(_blobs.c.object, _blobs.c.state).order_by(_blobs.c.object).limit(_STATES)
    states: dict[str, str] = {}
    last = ""
    # The time of a statement is limited.
    while page := connection.execute(query.where(_blobs.c.object > last)).all():
        states.update((row.object, row.state) for row in page)
        last = page[-1].object
    return states


def counted_bytes(length: int) -> int:
    """Returns the bytes of a blob that count towards limits, as on a disk with blocks of 4 KiB."""
    return -(-length // _BLOCK) * _BLOCK


def _need(tenant: str, program_id: str, folder: str, name: str) -> dict[str, str]:
    return {"tenant": tenant, "program_id": program_id, "folder": folder, "name": name}


def _now_us(connection: Connection) -> int:
    """Returns the time in microseconds since 1970, by one clock for all servers."""
    if connection.dialect.name == "postgresql":
        query = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
        return int(connection.exec_driver_sql(query).scalar_one())
    return time.time_ns() // 1000


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    # Databases limit the number of parameters of a statement.
    for start in range(0, len(items), _CHUNK):
        yield items[start : start + _CHUNK]


def _usage(connection: Connection) -> dict[str, BlobAmount]:
    return {
        row.folder: BlobAmount(row.size, row.number)
        for row in connection.execute(select(_totals).where(_totals.c.number > 0))
    }


def _insert(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Adds rows of blobs, and their amounts to the totals."""
    connection.execute(insert(_blobs), rows)
    _add_to_totals(connection, [(row["folder"], row["size"]) for row in rows if row["state"] != _DELETED], 1)


def _mark_deleted(connection: Connection, is_meant: ColumnElement[bool]) -> list[str]:
    """Marks objects for deletion, and takes their amounts off the totals; returns the keys that were not marked yet."""
    values = {"state": _DELETED, "last_use_us": _now_us(connection)}
    marked = update(_blobs).where(is_meant, _blobs.c.state != _DELETED).values(values)
    rows = connection.execute(marked.returning(_blobs.c.object, _blobs.c.folder, _blobs.c.size)).all()
    _add_to_totals(connection, [(row.folder, row.size) for row in rows], -1)
    return [row.object for row in rows]


def _add_to_totals(connection: Connection, blobs: Iterable[tuple[str, int]], sign: int) -> None:
    """Adds blobs to the totals, or takes them off: folder and size of each."""
    changes: dict[str, BlobAmount] = {}
    for folder, size in blobs:
        changes[folder] = changes.get(folder, BlobAmount()).plus(sign * size, sign)
    for folder, change in changes.items():
        values = {"size": _totals.c.size + change.size, "number": _totals.c.number + change.count}
        if not connection.execute(update(_totals).where(_totals.c.folder == folder).values(values)).rowcount:
            connection.execute(insert(_totals).values(folder=folder, size=change.size, number=change.count))


def _count_totals(connection: Connection) -> None:
    """Computes the totals from the rows of all blobs."""
    connection.execute(delete(_totals))
    query = (
        select(_blobs.c.folder, func.sum(_blobs.c.size), func.count())
        .where(_blobs.c.state != _DELETED)
        .group_by(_blobs.c.folder)
    )
    connection.execute(insert(_totals).from_select(["folder", "size", "number"], query))


def _make_room(
    connection: Connection,
    folder: str,
    size: int,
    limit: BlobAmount,
    server_limit: BlobAmount,
    kept: Collection[BlobKey],
) -> list[str]:
    """Returns the keys of the objects to delete, so that one more blob fits into the limits. Raises QUOTA_EXCEEDED."""
    limit = BlobAmount(min(limit.size, server_limit.size), min(limit.count, server_limit.count))
    used = _usage(connection)
    removable = {name: _removable(connection, name, kept) for name in used}
    removed = []

    def remove_from(name: str) -> bool:
        """Removes the tenant's least recently used blob; returns False if it has none."""
        row = next(removable[name], None) if name in removable else None
        if row is None:
            removable.pop(name, None)
            return False
        removed.append(row[0])
        used[name] = used[name].plus(-row[1], -1)
        return True

    while (wanted := used.get(folder, BlobAmount()).plus(size, 1)).exceeds(limit):
        if not remove_from(folder):
            raise quota_exceeded("one tenant may have", wanted, limit, server_limit)
    while True:
        total = BlobAmount(sum(item.size for item in used.values()), sum(item.count for item in used.values()))
        wanted = total.plus(size, 1)
        if not wanted.exceeds(server_limit):
            return removed
        if not removable:
            raise quota_exceeded("the server keeps", wanted, server_limit, server_limit)
        by_count = wanted.size <= server_limit.size
        # Remove blobs of the tenant with the largest amount first.
        remove_from(max(removable, key=lambda name: used[name].count if by_count else used[name].size))


def _removable(connection: Connection, folder: str, kept: Collection[BlobKey]) -> Iterator[tuple[str, int]]:
    """Yields key and size of a tenant's blobs that no program needs, least recently used first."""
    order = (_blobs.c.last_use_us, _blobs.c.object)
    is_needed = exists().where(_needs.c.folder == _blobs.c.folder, _needs.c.name == _blobs.c.name)
    query: Select[tuple[str, str, int, int]] = (
        select(_blobs.c.object, _blobs.c.name, _blobs.c.size, _blobs.c.last_use_us)
        .where(_blobs.c.folder == folder, _blobs.c.state == STORED, ~is_needed)
        .order_by(*order)
        .limit(_PAGE)
    )
    page = connection.execute(query).all()
    while page:
        for row in page:
            if (folder, row.name) not in kept:
                yield row.object, row.size
        last = page[-1]
        page = connection.execute(query.where(tuple_(*order) > (last.last_use_us, last.object))).all()
