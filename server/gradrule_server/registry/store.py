"""Stores rules, programs and their graphs as rows of one SQLite file.

Each write is one transaction, which is on the disk before the method returns. The callers check names and limits.
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

    Methods that add raise QUOTA_EXCEEDED if the disk is full, and then add nothing. All methods raise UNAVAILABLE if
    the registry's files were removed or replaced after they were opened. The constructor has the arguments and errors
    of `Database`.
    """

    def __init__(self, folder: Path, *, is_new: bool = False) -> None:
        self._database = Database(folder, is_new=is_new)
        self.path = self._database.path

    @property
    def database(self) -> Database:
        """The database, for the index of shared blobs."""
        return self._database

    def close(self) -> None:
        """Closes the database and unlocks the folder."""
        self._database.close()

    def check_files(self) -> None:
        """Logs a warning if the registry's files were removed or replaced; called at intervals."""
        self._database.check_files()

    def rules(self, tenant: str = DEFAULT_TENANT) -> list[RuleRow]:
        """Returns all rules of a tenant, ordered by name."""
        columns = (rules.c.name, rules.c.definition, rules.c.description, rules.c.create_time_us)
        query = select(*columns).where(rules.c.tenant == tenant).order_by(rules.c.name)
        with self._database.read() as connection:
            return [RuleRow(**row._mapping) for row in connection.execute(query)]

    def add_rule(self, row: RuleRow, tenant: str = DEFAULT_TENANT, *, replaces: bool = False) -> None:
        """Adds a rule; its name must be unused. `replaces`: whether to remove a rule of this name first."""
        with self._database.write() as connection:
            if replaces:
                connection.execute(_delete_rule(row.name, tenant))
            connection.execute(insert(rules).values(asdict(row) | {"tenant": tenant}))

    def remove_rule(self, name: str, tenant: str = DEFAULT_TENANT) -> None:
        """Removes a rule."""
        self._database.delete(lambda connection: connection.execute(_delete_rule(name, tenant)))

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
            return sum(connection.execute(_kept_bytes(*columns, tenant)).scalar_one() for columns in _COUNTED)

    def program_identities(self, tenant: str = DEFAULT_TENANT) -> dict[str, str]:
        """Returns the identity of every program of a tenant, by id."""
        query = select(programs.c.id, programs.c.identity).where(programs.c.tenant == tenant)
        with self._database.read() as connection:
            return {row.id: row.identity for row in connection.execute(query)}

    def program(self, program_id: str, tenant: str = DEFAULT_TENANT) -> ProgramRow | None:
        """Returns the metadata of a program; None if there is none."""
        with self._database.read() as connection:
            row = connection.execute(_program_rows(tenant).where(programs.c.id == program_id)).one_or_none()
            return None if row is None else ProgramRow(**row._mapping)

    def program_specs(self) -> list[tuple[str, str, bytes]]:
        """Returns tenant, id and spec of every program."""
        query = select(programs.c.tenant, programs.c.id, programs.c.spec)
        with self._database.read() as connection:
            return [(row.tenant, row.id, row.spec) for row in connection.execute(query)]

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
        is_meant = (programs.c.id > program_id) & _IS_PROGRAM_ID
        query = _program_rows(tenant).where(is_meant).order_by(programs.c.id).limit(count + 1)
        found: list[ProgramRow] = []
        # Read row by row, so that summaries beyond the limit are not read.
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
        with _damage_is_unreadable(), self._database.read() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            return None
        if not isinstance(row.content, bytes) or hashlib.sha256(row.content).hexdigest() != row.graph_digest:
            raise UnreadableRowError("its graph is damaged: it does not have the SHA-256 that was stored")
        return ProgramContent(row.spec, row.content, row.snapshot)

    def program_graph_bytes(self, program_id: str, identity: str, tenant: str = DEFAULT_TENANT) -> int:
        """Returns the size of a program's graph; 0 if the program is gone. Raises `UnreadableRowError`."""
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
        within: Callable[[Connection], None] = lambda _: None,
    ) -> None:
        """Adds a program, whose id must be unused, and its graph if the tenant does not have it.

        Args:
            row: The program's metadata.
            content: Its source.
            tenant: The tenant.
            before: Called with the number of added bytes; if it raises, nothing is added.
            within: Called in the transaction after the program was added; if it raises, nothing is added.
        """
        digest = hashlib.sha256(content.graph).hexdigest()
        same_graph = select(blobs.c.digest).where(blobs.c.tenant == tenant, blobs.c.digest == digest)
        with self._database.write() as connection:
            is_new = connection.execute(same_graph).one_or_none() is None
            before(len(row.summary) + len(content.spec) + len(content.snapshot) + (len(content.graph) if is_new else 0))
            if is_new:
                connection.execute(insert(blobs).values(tenant=tenant, digest=digest, content=content.graph))
            connection.execute(
                insert(programs).values(
                    asdict(row)
                    | {"tenant": tenant, "graph_digest": digest, "spec": content.spec, "snapshot": content.snapshot}
                )
            )
            within(connection)

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
            return int(freed) + (graph or 0)

        return self._database.delete(remove)


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


# Exclude values of damaged rows that are not valid ids and do not sort like ids.
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
