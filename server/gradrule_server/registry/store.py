"""Stores rules, programs and their graphs as rows of a database.

Each write is one transaction, which is on the disk before the method returns. The callers check names and limits.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Connection,
    LargeBinary,
    Row,
    Select,
    Table,
    cast,
    delete,
    exists,
    func,
    insert,
    select,
)
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from gradrule_server.registry.database import Change, Database, Follower, T, open_database
from gradrule_server.registry.schema import blobs, programs, rules

DEFAULT_TENANT = "default"
"""The tenant of callers without credentials, and of rows that releases without tenants wrote."""


class UnreadableRowError(Exception):
    """A stored rule or program cannot be read by this release; the message says why."""


@dataclass(frozen=True, slots=True)
class RuleRow:
    """A USER rule. `definition`: bytes of a `RuleDefinition`; time in microseconds since 1970, UTC."""

    name: str
    definition: bytes
    description: str
    create_time_us: int


@dataclass(frozen=True, slots=True)
class ProgramRow:
    """The metadata of a program. `summary`: bytes of a `Program`; time in microseconds since 1970, UTC."""

    id: str
    identity: str
    summary: bytes
    create_time_us: int


@dataclass(frozen=True, slots=True)
class ProgramContent:
    """The source of a program. `spec`: bytes of a `ProgramSpec` without its graph; `snapshot`: its rules."""

    spec: bytes
    graph: bytes
    snapshot: bytes


class Store:
    """The rows of a registry. All methods block; safe to use from several threads.

    Methods raise the errors of `Database`; those that add raise QUOTA_EXCEEDED if the disk is full, and then add
    nothing.

    Args:
        database: The database, or the data folder of an SQLite database, which is opened with the errors of
            `open_database`.
        is_new: Whether an empty SQLite database may be created in a folder that had a registry before.
    """

    def __init__(self, database: Database | Path, *, is_new: bool = False) -> None:
        self._database = open_database("", database, is_new=is_new) if isinstance(database, Path) else database

    @property
    def is_shared(self) -> bool:
        """Whether other servers may change the rows."""
        return self._database.is_shared

    @property
    def database(self) -> Database:
        """The database, for the index of shared blobs."""
        return self._database

    def close(self) -> None:
        """Closes the database."""
        self._database.close()

    def check(self) -> None:
        """Checks the database, see `Database.check`; called at intervals."""
        self._database.check()

    def exclusively(self, work: Callable[[], T], first: Callable[[], None] | None = None) -> T:
        """Runs `work`, which writes at most once, while no other server writes, see `Database.exclusively`."""
        return self._database.exclusively(work, first)

    def consistently(self, work: Callable[[], T]) -> T:
        """Runs `work`, which reads one state of the rows, see `Database.consistently`."""
        return self._database.consistently(work)

    def refresh(self) -> None:
        """Applies what other servers have written before this call."""
        self._database.refresh()

    def follow(self, follower: Follower) -> None:
        """Sets who applies what other servers write, see `Database.follow`."""
        self._database.follow(follower)

    def rules(self, tenant: str = DEFAULT_TENANT, names: Collection[str] | None = None) -> list[RuleRow]:
        """Returns the rules of a tenant, ordered by name: all, or those of `names` that exist."""
        return list(self.iterate_rules(tenant, names))

    def iterate_rules(self, tenant: str = DEFAULT_TENANT, names: Collection[str] | None = None) -> Iterator[RuleRow]:
        """Yields what `rules` returns."""
        columns = (rules.c.name, rules.c.definition, rules.c.description, rules.c.create_time_us)
        query = select(*columns).where(rules.c.tenant == tenant).order_by(rules.c.name)
        if names is not None:
            query = query.where(rules.c.name.in_(names))
        with self._database.read() as connection:
            # Only a server on a network needs time for the size.
            total = query.with_only_columns(func.sum(_RULE_BYTES)).order_by(None)
            total_size = connection.execute(total).scalar_one() if self.is_shared else 0
            # Row by row: all rules together may be larger than the memory.
            query = query.execution_options(stream_results=True, max_row_buffer=16) if self.is_shared else query
            with self._database.time_for(connection, int(total_size or 0)), connection.execute(query) as found:
                for row in found:
                    yield RuleRow(**row._mapping)

    def add_rule(self, row: RuleRow, tenant: str = DEFAULT_TENANT, *, replaces: bool = False) -> None:
        """Adds a rule; its name must be unused. `replaces`: whether to remove a rule of this name first."""
        with self._database.write() as connection:
            freed = self._delete_rule(connection, row.name, tenant) if replaces else 0
            connection.execute(insert(rules).values(asdict(row) | {"tenant": tenant}))
            change = Change("rule", tenant, row.name, 0 if replaces else 1, counted_size(row) - freed)
            self._database.record(connection, change)

    def remove_rule(self, name: str, tenant: str = DEFAULT_TENANT) -> None:
        """Removes a rule."""

        def remove(connection: Connection) -> None:
            freed = self._delete_rule(connection, name, tenant)
            self._database.record(connection, Change("rule", tenant, name, -1, -freed))

        self._database.delete(remove)

    def counts(self) -> tuple[int, int]:
        """Returns the numbers of rules and of programs of all tenants."""
        with self._database.read() as connection:
            return (
                connection.execute(select(func.count()).select_from(rules)).scalar_one(),
                connection.execute(select(func.count()).select_from(programs)).scalar_one(),
            )

    def kept_bytes(self, tenant: str | None = None) -> int:
        """Returns the bytes of rules and programs of a tenant; None: of all tenants. See `counted_size`."""
        with self._database.read() as connection:
            return sum(int(connection.execute(_kept_bytes(*columns, tenant)).scalar_one()) for columns in _COUNTED)

    def program_identities(self, tenant: str = DEFAULT_TENANT, ids: Collection[str] | None = None) -> dict[str, str]:
        """Returns the identity of each program of a tenant by id: of all, or of those of `ids` that exist."""
        query = select(programs.c.id, programs.c.identity).where(programs.c.tenant == tenant)
        if ids is not None:
            query = query.where(programs.c.id.in_(ids))
        with self._database.read() as connection:
            return {row.id: row.identity for row in connection.execute(query)}

    def program(self, program_id: str, tenant: str = DEFAULT_TENANT) -> ProgramRow | None:
        """Returns the metadata of a program; None if there is none."""
        with self._database.read() as connection:
            row = connection.execute(_program_rows(tenant).where(programs.c.id == program_id)).one_or_none()
            return None if row is None else ProgramRow(**row._mapping)

    def program_specs(self, tenant: str | None = None, ids: Collection[str] = ()) -> list[tuple[str, str, bytes]]:
        """Returns tenant, id and spec of every program; with a tenant, of those of `ids` that exist."""
        query = select(programs.c.tenant, programs.c.id, programs.c.spec)
        if tenant is not None:
            query = query.where(programs.c.tenant == tenant, programs.c.id.in_(ids))
        return [(row.tenant, row.id, row.spec) for row in self._all_rows(query, func.length(programs.c.spec))]

    def programs_after(
        self, program_id: str, count: int, max_bytes: int, tenant: str = DEFAULT_TENANT
    ) -> tuple[list[ProgramRow], bool]:
        """Returns the next programs of a tenant after `program_id`, ordered by id, and whether more follow.

        Args:
            program_id: The id before the first program.
            count: Largest number of programs.
            max_bytes: Largest size of their summaries, bytes; the first program may be larger.
            tenant: The tenant.
        """
        is_meant = (programs.c.id > program_id) & _is_program_id(programs.c.id)
        query = _program_rows(tenant).where(is_meant).order_by(programs.c.id).limit(count + 1)
        found: list[ProgramRow] = []
        # Read row by row, so that summaries beyond the limit are not read.
        if self.is_shared:
            query = query.execution_options(stream_results=True, max_row_buffer=16)
        with self._database.read() as connection, connection.execute(query) as rows:
            for row in rows:
                max_bytes -= len(row.summary) if isinstance(row.summary, bytes) else 0
                if len(found) == count or (found and max_bytes < 0):
                    return found, True
                found.append(ProgramRow(**row._mapping))
        return found, False

    def program_content(self, program_id: str, identity: str, tenant: str = DEFAULT_TENANT) -> ProgramContent | None:
        """Returns the source of a program; None if there is no program of this id and identity.

        Raises:
            UnreadableRowError: The graph is damaged.
        """
        query = (
            select(programs.c.spec, programs.c.snapshot, programs.c.graph_digest, blobs.c.content)
            .join(blobs)
            .where(programs.c.tenant == tenant, programs.c.id == program_id, programs.c.identity == identity)
        )
        # Only a server on a network needs time for the size.
        lengths = func.length(blobs.c.content) + func.length(programs.c.spec) + func.length(programs.c.snapshot)
        size = self._program_bytes(lengths, program_id, identity, tenant) if self.is_shared else 0
        with _damage_is_unreadable(), self._database.read() as connection, self._database.time_for(connection, size):
            row = connection.execute(query).one_or_none()
        if row is None:
            return None
        if not isinstance(row.content, bytes) or hashlib.sha256(row.content).hexdigest() != row.graph_digest:
            raise UnreadableRowError("its graph is damaged: it does not have the SHA-256 that was stored")
        return ProgramContent(row.spec, row.content, row.snapshot)

    def program_graph_bytes(self, program_id: str, identity: str, tenant: str = DEFAULT_TENANT) -> int:
        """Returns the size of a program's graph; 0 if the program is gone. Raises `UnreadableRowError`."""
        return self._program_bytes(func.length(blobs.c.content), program_id, identity, tenant)

    def _program_bytes(self, lengths: ColumnElement[int], program_id: str, identity: str, tenant: str) -> int:
        query = (
            select(lengths)
            .select_from(programs.join(blobs))
            .where(programs.c.tenant == tenant, programs.c.id == program_id, programs.c.identity == identity)
        )
        with _damage_is_unreadable(), self._database.read() as connection:
            return connection.execute(query).scalar_one_or_none() or 0

    def add_graph(self, graph: bytes, tenant: str = DEFAULT_TENANT) -> bool:
        """Adds the graph of a program that `add_program` adds in the same transaction; returns whether it is new.

        For `first` of `exclusively`: a large graph takes long, and no lock is held meanwhile.
        """
        digest = hashlib.sha256(graph).hexdigest()
        added = upsert(blobs).values(tenant=tenant, digest=digest, content=graph).on_conflict_do_nothing()
        with self._database.write() as connection, self._database.time_for(connection, len(graph)):
            if connection.execute(_same_graph(digest, tenant)).one_or_none() is not None:
                return False
            return connection.execute(added.returning(blobs.c.digest)).one_or_none() is not None

    def add_program(
        self,
        row: ProgramRow,
        content: ProgramContent,
        tenant: str = DEFAULT_TENANT,
        *,
        before: Callable[[int], None] = lambda _: None,
        within: Callable[[Connection], None] = lambda _: None,
        is_graph_added: bool = False,
    ) -> None:
        """Adds a program, whose id must be unused, and its graph if the tenant does not have it.

        Args:
            row: The program's metadata.
            content: Its source.
            tenant: The tenant.
            before: Called with the number of added bytes; if it raises, nothing is added.
            within: Called in the transaction after the program was added; if it raises, nothing is added.
            is_graph_added: Whether `add_graph` has added the graph in this transaction.
        """
        digest = hashlib.sha256(content.graph).hexdigest()
        size = len(row.summary) + len(content.spec) + len(content.snapshot)
        with (
            self._database.write() as connection,
            self._database.time_for(connection, size + len(content.graph)),
        ):
            is_missing = connection.execute(_same_graph(digest, tenant)).one_or_none() is None
            if is_missing or is_graph_added:
                size += len(content.graph)
            before(size)
            if is_missing:
                connection.execute(insert(blobs).values(tenant=tenant, digest=digest, content=content.graph))
            connection.execute(
                insert(programs).values(
                    asdict(row)
                    | {"tenant": tenant, "graph_digest": digest, "spec": content.spec, "snapshot": content.snapshot}
                )
            )
            within(connection)
            self._database.record(connection, Change("program", tenant, row.id, 1, size))

    def remove_program(self, program_id: str, tenant: str = DEFAULT_TENANT) -> int:
        """Removes a program, and its graph if no other program of the tenant has it; returns the freed bytes."""

        def remove(connection: Connection) -> int:
            is_meant = (programs.c.tenant == tenant) & (programs.c.id == program_id)
            found = connection.execute(select(programs.c.graph_digest, _PROGRAM_BYTES).where(is_meant)).one_or_none()
            if found is None:
                return 0
            digest, freed = found
            connection.execute(delete(programs).where(is_meant))
            still_used = exists().where(programs.c.tenant == tenant, programs.c.graph_digest == digest)
            is_unused = (blobs.c.tenant == tenant) & (blobs.c.digest == digest) & ~still_used
            graph = connection.execute(select(func.length(blobs.c.content)).where(is_unused)).scalar_one_or_none()
            connection.execute(delete(blobs).where(is_unused))
            size = int(freed) + (graph or 0)
            self._database.record(connection, Change("program", tenant, program_id, -1, -size))
            return size

        return self._database.delete(remove)

    def _all_rows(self, query: Select[Any], size: ColumnElement[int]) -> Sequence[Row[Any]]:
        """Returns the rows of a query, which may be large together. `size`: bytes of a row."""
        with self._database.read() as connection:
            # Only a server on a network needs time for the size.
            total = query.with_only_columns(func.sum(size)).order_by(None)
            total_size = connection.execute(total).scalar_one() if self.is_shared else 0
            with self._database.time_for(connection, int(total_size or 0)):
                return connection.execute(query).all()

    def _delete_rule(self, connection: Connection, name: str, tenant: str) -> int:
        """Deletes a rule, and returns the freed bytes."""
        is_meant = (rules.c.tenant == tenant) & (rules.c.name == name)
        # Only the log needs the size.
        freed = connection.execute(select(_RULE_BYTES).where(is_meant)).scalar_one_or_none() if self.is_shared else 0
        connection.execute(delete(rules).where(is_meant))
        return freed or 0


@contextlib.contextmanager
def _damage_is_unreadable() -> Iterator[None]:
    """Raises `UnreadableRowError` if the part of the file with the graph is damaged."""
    try:
        yield
    except DatabaseError as cause:
        if isinstance(cause, OperationalError):
            raise
        raise UnreadableRowError(f"its graph cannot be read: {cause.orig}") from cause


def counted_size(row: RuleRow) -> int:
    """Returns the bytes of a rule that count towards the quota.

    For a program, its summary, spec and snapshot count; a graph counts once for each tenant.
    """
    return len(row.definition) + len(row.description.encode(errors="surrogateescape"))


# Cast text to bytes, because SQLite then finds the length in bytes without reading the text.
_RULE_BYTES = func.length(rules.c.definition) + func.length(cast(rules.c.description, LargeBinary))
_PROGRAM_BYTES = func.length(programs.c.summary) + func.length(programs.c.spec) + func.length(programs.c.snapshot)
_COUNTED = ((rules, _RULE_BYTES), (programs, _PROGRAM_BYTES), (blobs, func.length(blobs.c.content)))


def _kept_bytes(table: Table, size: ColumnElement[int], tenant: str | None) -> Select[int]:
    query = select(func.coalesce(func.sum(size), 0)).select_from(table)
    return query if tenant is None else query.where(table.c.tenant == tenant)


class _is_program_id(FunctionElement[bool]):
    """Excludes values of damaged rows that are not valid ids and do not sort like ids."""

    type = Boolean()
    inherit_cache = True


@compiles(_is_program_id, "sqlite")
def _compile_for_sqlite(element: Any, compiler: Any, **options: Any) -> str:
    column = compiler.process(element.clauses, **options)
    return f"(typeof({column}) = 'text' AND {column} GLOB '[a-z]*' AND {column} NOT GLOB '*[^a-z0-9_.-]*')"


@compiles(_is_program_id, "postgresql")
def _compile_for_postgresql(element: Any, compiler: Any, **options: Any) -> str:
    return f"{compiler.process(element.clauses, **options)} ~ '^[a-z][a-z0-9_.-]*$'"


def _same_graph(digest: str, tenant: str) -> Select[tuple[str]]:
    return select(blobs.c.digest).where(blobs.c.tenant == tenant, blobs.c.digest == digest)


def _program_rows(tenant: str) -> Select[tuple[str, str, bytes, int]]:
    columns = (programs.c.id, programs.c.identity, programs.c.summary, programs.c.create_time_us)
    return select(*columns).where(programs.c.tenant == tenant)
