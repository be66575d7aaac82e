"""Rows on disk: rules, programs and their graphs in one SQLite file.

Every write is one transaction that is on the disk before the method returns. Names, limits and meaning are the
registries'.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import (
    ColumnElement,
    Connection,
    Delete,
    LargeBinary,
    Select,
    Table,
    cast,
    delete,
    exists,
    func,
    insert,
    select,
)
from sqlalchemy.exc import DatabaseError, OperationalError

from gradrule_server.registry.database import Database
from gradrule_server.registry.schema import blobs, programs, rules

DEFAULT_TENANT = "default"
"""Whose names are those that callers without credentials make; the owner of what is older than tenants."""


class UnreadableRowError(Exception):
    """A kept rule or program that this server cannot read; the message says why."""


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
    """The rows of the registry in `folder`, which is made where missing. Blocking; safe to use from several threads.

    Adding raises QUOTA_EXCEEDED where the disk is full, and adds nothing then. All methods raise UNAVAILABLE where the
    registry's files were removed or replaced after they were opened. `is_new`: whether an empty registry may begin
    where there was one before.

    Raises `StoreError` where the folder cannot be used, another server holds it, or its file is gone, damaged, or of
    another version.
    """

    def __init__(self, folder: Path, *, is_new: bool = False) -> None:
        self._database = Database(folder, is_new=is_new)
        self.path = self._database.path

    def close(self) -> None:
        """Closes the file and lets other servers have the folder."""
        self._database.close()

    def look(self) -> None:
        """Logs where the registry's files were removed or replaced behind the server's back."""
        self._database.look()

    def rules(self, tenant: str = DEFAULT_TENANT) -> list[RuleRow]:
        """All rules of a tenant, by name."""
        columns = (rules.c.name, rules.c.definition, rules.c.description, rules.c.create_time_us)
        query = select(*columns).where(rules.c.tenant == tenant).order_by(rules.c.name)
        with self._database.read() as connection:
            return [RuleRow(**row._mapping) for row in connection.execute(query)]

    def add_rule(self, row: RuleRow, tenant: str = DEFAULT_TENANT, *, replaces: bool = False) -> None:
        """Adds a rule under a name that is free. `replaces`: whether one of that name is removed first."""
        with self._database.write() as connection:
            if replaces:
                connection.execute(_delete_rule(row.name, tenant))
            connection.execute(insert(rules).values(asdict(row) | {"tenant": tenant}))

    def remove_rule(self, name: str, tenant: str = DEFAULT_TENANT) -> None:
        """Removes a rule."""
        self._database.delete(lambda connection: connection.execute(_delete_rule(name, tenant)))

    def counts(self) -> tuple[int, int]:
        """Rules and programs, of all tenants."""
        with self._database.read() as connection:
            return (
                connection.execute(select(func.count()).select_from(rules)).scalar_one(),
                connection.execute(select(func.count()).select_from(programs)).scalar_one(),
            )

    def kept_bytes(self, tenant: str | None = None) -> int:
        """Bytes of rules and programs, of one tenant or of all; see `size_of`."""
        with self._database.read() as connection:
            return sum(connection.execute(_kept_bytes(*columns, tenant)).scalar_one() for columns in _COUNTED)

    def program_identities(self, tenant: str = DEFAULT_TENANT) -> dict[str, str]:
        """The identity of every program of a tenant by its id."""
        query = select(programs.c.id, programs.c.identity).where(programs.c.tenant == tenant)
        with self._database.read() as connection:
            return {row.id: row.identity for row in connection.execute(query)}

    def program(self, program_id: str, tenant: str = DEFAULT_TENANT) -> ProgramRow | None:
        """One program, if there is one."""
        with self._database.read() as connection:
            row = connection.execute(_program_rows(tenant).where(programs.c.id == program_id)).one_or_none()
            return None if row is None else ProgramRow(**row._mapping)

    def program_specs(self) -> list[tuple[str, str, bytes]]:
        """Tenant, id and spec of every program."""
        query = select(programs.c.tenant, programs.c.id, programs.c.spec)
        with self._database.read() as connection:
            return [(row.tenant, row.id, row.spec) for row in connection.execute(query)]

    def programs_after(
        self, program_id: str, count: int, max_bytes: int, tenant: str = DEFAULT_TENANT
    ) -> tuple[list[ProgramRow], bool]:
        """Programs of a tenant whose ids come after `program_id`, by id, and whether there are more.

        At most `count`, and so many that their summaries have at most `max_bytes`; one has any number.
        """
        is_meant = (programs.c.id > program_id) & _IS_PROGRAM_ID
        query = _program_rows(tenant).where(is_meant).order_by(programs.c.id).limit(count + 1)
        found: list[ProgramRow] = []
        # Row by row: what does not fit is not read.
        with self._database.read() as connection, connection.execute(query) as rows:
            for row in rows:
                max_bytes -= len(row.summary) if isinstance(row.summary, bytes) else 0
                if len(found) == count or (found and max_bytes < 0):
                    return found, True
                found.append(ProgramRow(**row._mapping))
        return found, False

    def program_content(self, program_id: str, identity: str, tenant: str = DEFAULT_TENANT) -> ProgramContent | None:
        """What a program is compiled from. `UnreadableRowError` where its graph is not what was stored."""
        query = (
            select(programs.c.spec, programs.c.snapshot, programs.c.graph_digest, blobs.c.content)
            .join(blobs)
            .where(programs.c.tenant == tenant, programs.c.id == program_id, programs.c.identity == identity)
        )
        with _damage_is_unreadable(), self._database.read() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            return None
        if not isinstance(row.content, bytes) or hashlib.sha256(row.content).hexdigest() != row.graph_digest:
            raise UnreadableRowError("its graph is not what was stored")
        return ProgramContent(row.spec, row.content, row.snapshot)

    def program_graph_bytes(self, program_id: str, identity: str, tenant: str = DEFAULT_TENANT) -> int:
        """Returns the size of a program's graph; 0 where the program is gone. `UnreadableRowError`."""
        query = (
            select(func.length(blobs.c.content))
            .select_from(programs.join(blobs))
            .where(programs.c.tenant == tenant, programs.c.id == program_id, programs.c.identity == identity)
        )
        with _damage_is_unreadable(), self._database.read() as connection:
            return connection.execute(query).scalar_one_or_none() or 0

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
        with self._database.write() as connection:
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
            return int(freed) + (graph or 0)

        return self._database.delete(remove)


@contextlib.contextmanager
def _damage_is_unreadable() -> Iterator[None]:
    """Raises `UnreadableRowError` where a graph's part of the file is damaged."""
    try:
        yield
    except DatabaseError as cause:
        if isinstance(cause, OperationalError):
            raise
        raise UnreadableRowError(f"its graph cannot be read: {cause.orig}") from cause


def size_of(row: RuleRow) -> int:
    """Bytes that count of a rule; of a program its summary, spec and snapshot do, and its graph, once for a tenant."""
    return len(row.definition) + len(row.description.encode(errors="surrogateescape"))


# Of bytes the length is known without reading them, of text it is not.
_RULE_BYTES = func.length(rules.c.definition) + func.length(cast(rules.c.description, LargeBinary))
_PROGRAM_BYTES = func.length(programs.c.summary) + func.length(programs.c.spec) + func.length(programs.c.snapshot)
_COUNTED = ((rules, _RULE_BYTES), (programs, _PROGRAM_BYTES), (blobs, func.length(blobs.c.content)))


def _kept_bytes(table: Table, size: ColumnElement[int], tenant: str | None) -> Select[int]:
    query = select(func.coalesce(func.sum(size), 0)).select_from(table)
    return query if tenant is None else query.where(table.c.tenant == tenant)


# What a damaged file may hold in the place of an id would neither be a name, nor sort among names.
_IS_PROGRAM_ID = (
    (func.typeof(programs.c.id) == "text")
    & programs.c.id.bool_op("GLOB")("[a-z]*")
    & programs.c.id.bool_op("NOT GLOB")("*[^a-z0-9_.-]*")
)


def _program_rows(tenant: str) -> Select[tuple[str, str, bytes, int]]:
    columns = (programs.c.id, programs.c.identity, programs.c.summary, programs.c.create_time_us)
    return select(*columns).where(programs.c.tenant == tenant)


def _delete_rule(name: str, tenant: str) -> Delete:
    return delete(rules).where(rules.c.tenant == tenant, rules.c.name == name)
