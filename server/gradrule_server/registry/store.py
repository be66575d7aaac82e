"""Rows on disk: rules, programs and their graphs in one SQLite file.

Every write is one transaction that is on the disk before the method returns. Names, limits and meaning are the
registries'.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Engine,
    LargeBinary,
    Select,
    Table,
    cast,
    create_engine,
    delete,
    event,
    exists,
    func,
    insert,
    inspect,
    select,
)
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.registry.lock import FolderInUseError, FolderLock
from gradrule_server.registry.migrations import migrate, sync
from gradrule_server.registry.schema import SCHEMA_VERSION, blobs, meta, metadata, programs, rules

_log = logging.getLogger(__name__)

FILE_NAME = "gradrule.db"

DEFAULT_TENANT = "default"
"""Whose names are those that callers without credentials make; the owner of what is older than tenants."""


class StoreError(Exception):
    """The registry's file cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class RuleRow:
    """A USER rule. `definition`: bytes of a `RuleDefinition`; time in microseconds since 1970, UTC."""

    name: str
    definition: bytes
    description: str
    create_time_us: int


@dataclass(frozen=True, slots=True)
class ProgramRow:
    """What is told of a program. `summary`: bytes of a `Program`; time in microseconds since 1970, UTC."""

    id: str
    identity: str
    summary: bytes
    create_time_us: int


@dataclass(frozen=True, slots=True)
class ProgramContent:
    """What a program is compiled from. `spec`: bytes of a `ProgramSpec` without its graph."""

    spec: bytes
    graph: bytes
    snapshot: bytes


class Store:
    """The registry's file in `folder`, which is made where missing. Blocking; safe to use from several threads.

    Adding raises QUOTA_EXCEEDED where the disk is full, and adds nothing then.

    Raises `StoreError` where the folder cannot be used, another server holds it, or its file is damaged or of another
    version.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = FolderLock(folder)
        except FolderInUseError as held:
            raise StoreError(str(held)) from held
        except OSError as cause:
            raise StoreError(
                f"the data folder {folder} cannot be used: {cause.strerror}; give another --data-dir"
            ) from cause
        # SQLite lets one writer in at a time; waiting here is fair, waiting in SQLite is polling.
        self._writing = threading.Lock()
        self._engine = _engine(self.path)
        try:
            _create_file(self.path)
            self._open()
        except BaseException as cause:
            self.close()
            if isinstance(cause, OperationalError | sqlite3.OperationalError | OSError | GradruleError):
                raise StoreError(f"{self.path} cannot be opened: {_original(cause)}") from cause
            if isinstance(cause, DatabaseError | sqlite3.DatabaseError):
                raise self._damaged(str(_original(cause))) from cause
            raise

    def close(self) -> None:
        """Closes the file and lets other servers have the folder."""
        self._engine.dispose()
        self._lock.release()

    def rules(self, tenant: str = DEFAULT_TENANT) -> list[RuleRow]:
        """All rules of a tenant, by name."""
        columns = (rules.c.name, rules.c.definition, rules.c.description, rules.c.create_time_us)
        query = select(*columns).where(rules.c.tenant == tenant).order_by(rules.c.name)
        with self._read() as connection:
            return [RuleRow(**row._mapping) for row in connection.execute(query)]

    def add_rule(self, row: RuleRow, tenant: str = DEFAULT_TENANT) -> None:
        """Adds a rule under a name that is free."""
        with self._write() as connection:
            connection.execute(insert(rules).values(asdict(row) | {"tenant": tenant}))

    def remove_rule(self, name: str, tenant: str = DEFAULT_TENANT) -> None:
        """Removes a rule."""
        with self._write() as connection:
            connection.execute(delete(rules).where(rules.c.tenant == tenant, rules.c.name == name))

    def counts(self) -> tuple[int, int]:
        """Rules and programs, of all tenants."""
        with self._read() as connection:
            return (
                connection.execute(select(func.count()).select_from(rules)).scalar_one(),
                connection.execute(select(func.count()).select_from(programs)).scalar_one(),
            )

    def kept_bytes(self, tenant: str | None = None) -> int:
        """Bytes of rules and programs, of one tenant or of all; see `size_of`."""
        with self._read() as connection:
            return sum(connection.execute(_kept_bytes(*columns, tenant)).scalar_one() for columns in _COUNTED)

    def program_identities(self, tenant: str = DEFAULT_TENANT) -> dict[str, str]:
        """The identity of every program of a tenant by its id."""
        query = select(programs.c.id, programs.c.identity).where(programs.c.tenant == tenant)
        with self._read() as connection:
            return {row.id: row.identity for row in connection.execute(query)}

    def program(self, program_id: str, tenant: str = DEFAULT_TENANT) -> ProgramRow | None:
        """One program, if there is one."""
        with self._read() as connection:
            row = connection.execute(_program_rows(tenant).where(programs.c.id == program_id)).one_or_none()
            return None if row is None else ProgramRow(**row._mapping)

    def program_specs(self) -> list[tuple[str, str, bytes]]:
        """Tenant, id and spec of every program."""
        query = select(programs.c.tenant, programs.c.id, programs.c.spec)
        with self._read() as connection:
            return [(row.tenant, row.id, row.spec) for row in connection.execute(query)]

    def programs_after(
        self, program_id: str, count: int, max_bytes: int, tenant: str = DEFAULT_TENANT
    ) -> tuple[list[ProgramRow], bool]:
        """Programs of a tenant whose ids come after `program_id`, by id, and whether there are more.

        At most `count`, and so many that their summaries have at most `max_bytes`; one has any number.
        """
        query = _program_rows(tenant).where(programs.c.id > program_id).order_by(programs.c.id).limit(count + 1)
        found: list[ProgramRow] = []
        # Row by row: what does not fit is not read.
        with self._read() as connection, connection.execute(query) as rows:
            for row in rows:
                max_bytes -= len(row.summary)
                if len(found) == count or (found and max_bytes < 0):
                    return found, True
                found.append(ProgramRow(**row._mapping))
        return found, False

    def program_content(self, program_id: str, identity: str, tenant: str = DEFAULT_TENANT) -> ProgramContent | None:
        """What a program is compiled from. `StoreError` where the graph's bytes are not what was stored."""
        query = (
            select(programs.c.spec, programs.c.snapshot, programs.c.graph_digest, blobs.c.content)
            .join(blobs)
            .where(programs.c.tenant == tenant, programs.c.id == program_id, programs.c.identity == identity)
        )
        with self._read() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            return None
        if hashlib.sha256(row.content).hexdigest() != row.graph_digest:
            raise self._damaged(f"the graph of program {program_id!r} is not what was stored")
        return ProgramContent(row.spec, row.content, row.snapshot)

    def add_program(
        self,
        row: ProgramRow,
        content: ProgramContent,
        tenant: str = DEFAULT_TENANT,
        *,
        before: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Adds a program under an id that is free, and its graph where it is new to the tenant.

        `before` is told how many bytes that takes, and may raise, so that nothing is added.
        """
        digest = hashlib.sha256(content.graph).hexdigest()
        is_there = select(blobs.c.digest).where(blobs.c.tenant == tenant, blobs.c.digest == digest)
        with self._write() as connection:
            is_new = connection.execute(is_there).one_or_none() is None
            before(len(row.summary) + len(content.spec) + len(content.snapshot) + (len(content.graph) if is_new else 0))
            if is_new:
                connection.execute(insert(blobs).values(tenant=tenant, digest=digest, content=content.graph))
            connection.execute(
                insert(programs).values(
                    asdict(row)
                    | {"tenant": tenant, "graph_digest": digest, "spec": content.spec, "snapshot": content.snapshot}
                )
            )

    def remove_program(self, program_id: str, tenant: str = DEFAULT_TENANT) -> int:
        """Removes a program, and its graph where no other program of the tenant has it; how many bytes that frees."""
        is_meant = (programs.c.tenant == tenant) & (programs.c.id == program_id)
        with self._write() as connection:
            found = connection.execute(select(programs.c.graph_digest, _PROGRAM_BYTES).where(is_meant)).one_or_none()
            if found is None:
                return 0
            digest, freed = found
            connection.execute(delete(programs).where(is_meant))
            still_used = exists().where(programs.c.tenant == tenant, programs.c.graph_digest == digest)
            is_unused = (blobs.c.tenant == tenant) & (blobs.c.digest == digest) & ~still_used
            graph = connection.execute(select(func.length(blobs.c.content)).where(is_unused)).scalar_one_or_none()
            connection.execute(delete(blobs).where(is_unused))
            return int(freed) + (graph or 0)

    def _open(self) -> None:
        """Checks the file, or makes the tables where it is new."""
        with self._write() as connection:
            report = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
            if report != "ok":
                raise self._damaged(str(report))
            tables = set(inspect(connection).get_table_names())
            if not tables:
                metadata.create_all(connection)
                connection.execute(insert(meta).values(key="schema_version", value=str(SCHEMA_VERSION)))
                return
            if "meta" not in tables:
                raise StoreError(f"{self.path} is a database of something else; move it, or give another --data-dir")
            query = select(meta.c.value).where(meta.c.key == "schema_version")
            version = connection.execute(query).scalar_one_or_none()
            if migrate(connection, version, self.path):
                _log.info("%s had schema version %s and has %d now", self.path, version, SCHEMA_VERSION)
            elif version != str(SCHEMA_VERSION):
                raise StoreError(
                    f"{self.path} has schema version {version}, and this server reads version {SCHEMA_VERSION}; start "
                    "the server that wrote it, or move the file away to begin with an empty registry"
                )

    def _damaged(self, what: str) -> StoreError:
        return StoreError(
            f"{self.path} is damaged ({what}); restore it from a copy, or move it away (with its -wal and -shm files) "
            "to begin with an empty registry"
        )

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        try:
            with self._writing, self._engine.begin() as connection:
                yield connection
        except OperationalError as cause:
            if getattr(cause.orig, "sqlite_errorcode", None) != sqlite3.SQLITE_FULL:
                raise
            raise error(
                errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
                "the disk that the server keeps rules and programs on is full; whoever runs the server can make room",
            ) from cause


def size_of(row: RuleRow) -> int:
    """Bytes that count of a rule; of a program its summary, spec and snapshot do, and its graph, once for a tenant."""
    return len(row.definition) + len(row.description.encode())


# Of bytes the length is known without reading them, of text it is not.
_RULE_BYTES = func.length(rules.c.definition) + func.length(cast(rules.c.description, LargeBinary))
_PROGRAM_BYTES = func.length(programs.c.summary) + func.length(programs.c.spec) + func.length(programs.c.snapshot)
_COUNTED = ((rules, _RULE_BYTES), (programs, _PROGRAM_BYTES), (blobs, func.length(blobs.c.content)))


def _kept_bytes(table: Table, size: ColumnElement[int], tenant: str | None) -> Select[int]:
    query = select(func.coalesce(func.sum(size), 0)).select_from(table)
    return query if tenant is None else query.where(table.c.tenant == tenant)


def _program_rows(tenant: str) -> Select[tuple[str, str, bytes, int]]:
    columns = (programs.c.id, programs.c.identity, programs.c.summary, programs.c.create_time_us)
    return select(*columns).where(programs.c.tenant == tenant)


def logs_of(path: Path) -> list[Path]:
    """Files beside a database's, from which SQLite takes over what a process that was killed wrote last."""
    found = (path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))
    return [log for log in found if log.exists()]


def _create_file(path: Path) -> None:
    """An empty file that only its owner reads, whose name outlives a power failure; SQLite syncs only contents."""
    if not path.exists():
        leftovers = " and ".join(log.name for log in logs_of(path))
        if leftovers:
            raise StoreError(
                f"{path} is gone, but {leftovers} of it is there, which belongs to it and not to a new one; bring "
                f"{path.name} back beside it, or move {leftovers} away to begin with an empty registry"
            )
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        sync(path.parent)


def _engine(path: Path) -> Engine:
    engine = create_engine(URL.create("sqlite", database=str(path)), max_overflow=-1)

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
        # Python's sqlite3 begins transactions on its own, and not around reads or tables; with None it leaves them
        # to `begin`.
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def _original(cause: BaseException) -> object:
    return getattr(cause, "orig", None) or cause
