"""Stores rules, programs and their graphs as rows of a database.

Each write is one transaction, which is on the disk before the method returns. The callers check names and limits.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    delete,
    exists,
    func,
    insert,
    select,
)
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.exc import DatabaseError, OperationalError

from gradrule_server.quotas import Quota
from gradrule_server.registry.database import Database, open_database
from gradrule_server.registry.schema import blobs, programs, read_meta, rules
from gradrule_server.registry.usage import (
    PROGRAM_BYTES,
    RULE_BYTES,
    Usage,
    change_usage,
    read_total,
    read_usage,
)

Quotas = Mapping[str, Quota]
"""Limits of a tenant by resource: `rules`, `programs`, `registry_bytes`."""

DEFAULT_TENANT = "default"
"""The tenant of callers without credentials, and of rows that releases without tenants wrote."""


class UnreadableRowError(Exception):
    """A stored rule or program cannot be read by this release; the message says why."""


class _IdTakenError(Exception):
    """There is a program of this id."""


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
    """

    def __init__(self, database: Database | Path) -> None:
        self.database = open_database("", database) if isinstance(database, Path) else database
        # Fetches rows a few at a time. SQLite does so anyway, one at a time.
        self._streamed: dict[str, Any] = {"stream_results": True, "max_row_buffer": 16} if self.is_shared else {}

    @property
    def is_shared(self) -> bool:
        """Whether other servers may change the rows."""
        return self.database.is_shared

    def close(self) -> None:
        """Closes the database."""
        self.database.close()

    def registry_id(self) -> str:
        """Returns the id of the registry."""
        with self.database.read() as connection:
            return read_meta(connection, "registry_id") or ""

    def tenants(self) -> list[str]:
        """Returns the tenants that have ever stored a rule or a program, ordered by name."""
        with self.database.read() as connection:
            return sorted(read_usage(connection))

    def usage(self, tenants: Collection[str]) -> dict[str, Usage]:
        """Returns what tenants have stored; those that never stored anything are left out."""
        with self.database.read() as connection:
            return read_usage(connection, tenants)

    def total_usage(self) -> Usage:
        """Returns what all tenants have stored together."""
        with self.database.read() as connection:
            return read_total(connection)

    def rules(self, tenant: str = DEFAULT_TENANT, names: Collection[str] | None = None) -> list[RuleRow]:
        """Returns the rules of a tenant, ordered by name: all, or those of `names` that exist."""
        return list(self.iterate_rules(tenant, names))

    def iterate_rules(self, tenant: str = DEFAULT_TENANT, names: Collection[str] | None = None) -> Iterator[RuleRow]:
        """Yields what `rules` returns."""
        columns = (rules.c.name, rules.c.definition, rules.c.description, rules.c.create_time_us)
        query = select(*columns).where(rules.c.tenant == tenant).order_by(rules.c.name)
        if names is not None:
            query = query.where(rules.c.name.in_(names))
        # Row by row: all rules together may be larger than the memory.
        with (
            self.database.read() as connection,
            connection.execute(query.execution_options(**self._streamed)) as found,
        ):
            for row in found:
                yield RuleRow(**row._mapping)

    def rule_times(self, tenant: str) -> dict[str, int]:
        """Returns when each rule of a tenant was created, microseconds since 1970."""
        query = select(rules.c.name, rules.c.create_time_us).where(rules.c.tenant == tenant)
        with self.database.read() as connection:
            return {row.name: row.create_time_us for row in connection.execute(query)}

    def add_rule(
        self, row: RuleRow, tenant: str = DEFAULT_TENANT, *, replaces: bool = False, quotas: Quotas | None = None
    ) -> None:
        """Adds a rule; its name must be unused.

        Args:
            row: The rule.
            tenant: The tenant.
            replaces: Whether to remove a rule of this name first.
            quotas: The tenant's limits, see `change_usage`.
        """
        with self.database.write() as connection:
            self.database.lock(connection)
            freed = _delete_rule(connection, row.name, tenant) if replaces else None
            connection.execute(insert(rules).values(asdict(row) | {"tenant": tenant}))
            change = Usage(int(freed is None), 0, counted_size(row) - (freed or 0), 1)
            change_usage(connection, tenant, change, quotas)

    def remove_rule(self, name: str, tenant: str = DEFAULT_TENANT, quotas: Quotas | None = None) -> None:
        """Removes a rule, if it exists."""

        def remove(connection: Connection) -> None:
            freed = _delete_rule(connection, name, tenant)
            if freed is not None:
                change_usage(connection, tenant, Usage(-1, 0, -freed, 1), quotas)

        self.database.delete(remove)

    def program_identities(self, tenant: str = DEFAULT_TENANT) -> dict[str, str]:
        """Returns the identity of each program of a tenant by id."""
        query = select(programs.c.id, programs.c.identity).where(programs.c.tenant == tenant)
        with self.database.read() as connection:
            return {row.id: row.identity for row in connection.execute(query)}

    def program_keys(self, tenant: str | None = None) -> list[tuple[str, str, str, str]]:
        """Returns tenant, id, identity and the graph's SHA-256 of programs: of a tenant by graph, or of all tenants."""
        query = select(programs.c.tenant, programs.c.id, programs.c.identity, programs.c.graph_digest)
        if tenant is not None:
            query = query.where(programs.c.tenant == tenant)
        with self.database.read() as connection:
            return [tuple(row) for row in connection.execute(query.order_by(programs.c.graph_digest, programs.c.id))]

    def program(self, program_id: str, tenant: str = DEFAULT_TENANT) -> ProgramRow | None:
        """Returns the metadata of a program; None if there is none."""
        with self.database.read() as connection:
            row = connection.execute(_program_rows(tenant).where(programs.c.id == program_id)).one_or_none()
            return None if row is None else ProgramRow(**row._mapping)

    def program_spec(self, program_id: str, identity: str, tenant: str = DEFAULT_TENANT) -> bytes | None:
        """Returns the spec of a program; None if there is no program of this id and identity."""
        is_meant = _is_program(program_id, identity, tenant)
        size = self._program_bytes(func.length(programs.c.spec), is_meant) if self.is_shared else 0
        with self.database.read(size) as connection:
            return connection.execute(select(programs.c.spec).where(is_meant)).scalar_one_or_none()

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
        query = _program_rows(tenant).where(programs.c.id > program_id).order_by(programs.c.id).limit(count + 1)
        found: list[ProgramRow] = []
        # Read row by row, so that summaries beyond the limit are not read.
        with self.database.read() as connection, connection.execute(query.execution_options(**self._streamed)) as rows:
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
        is_meant = _is_program(program_id, identity, tenant)
        query = select(programs.c.spec, programs.c.snapshot, programs.c.graph_digest, blobs.c.content).join(blobs)
        # Only a server on a network needs time for the size.
        lengths = func.length(blobs.c.content) + func.length(programs.c.spec) + func.length(programs.c.snapshot)
        size = self._program_bytes(lengths, is_meant) if self.is_shared else 0
        with _damage_is_unreadable(), self.database.read(size) as connection:
            row = connection.execute(query.where(is_meant)).one_or_none()
        if row is None:
            return None
        if not isinstance(row.content, bytes) or hashlib.sha256(row.content).hexdigest() != row.graph_digest:
            raise UnreadableRowError("its graph is damaged: it does not have the SHA-256 that was stored")
        return ProgramContent(row.spec, row.content, row.snapshot)

    def program_graph_bytes(self, program_id: str, identity: str, tenant: str = DEFAULT_TENANT) -> int:
        """Returns the size of a program's graph; 0 if the program is gone. Raises `UnreadableRowError`."""
        return self._program_bytes(func.length(blobs.c.content), _is_program(program_id, identity, tenant))

    def _program_bytes(self, lengths: ColumnElement[int], is_meant: ColumnElement[bool]) -> int:
        query = select(lengths).select_from(programs.join(blobs)).where(is_meant)
        with _damage_is_unreadable(), self.database.read() as connection:
            return connection.execute(query).scalar_one_or_none() or 0

    def add_program(
        self,
        row: ProgramRow,
        content: ProgramContent,
        tenant: str = DEFAULT_TENANT,
        *,
        quotas: Quotas | None = None,
    ) -> bool:
        """Adds a program, and its graph if the tenant does not have it; returns False if its id is taken.

        Args:
            row: The program's metadata.
            content: Its source.
            tenant: The tenant.
            quotas: The tenant's limits, see `change_usage`.
        """
        is_added = False
        digest = hashlib.sha256(content.graph).hexdigest()
        size = len(row.summary) + len(content.spec) + len(content.snapshot)
        values = {"tenant": tenant, "graph_digest": digest, "spec": content.spec, "snapshot": content.snapshot}
        with contextlib.suppress(_IdTakenError), self.database.write(size + len(content.graph)) as connection:
            # A large graph takes long: add it before other servers have to wait.
            is_new = _add_graph(connection, content.graph, digest, tenant)
            self.database.lock(connection)
            is_taken = exists().where(programs.c.tenant == tenant, programs.c.id == row.id)
            if connection.execute(select(is_taken)).scalar_one():
                # Undo the addition of the graph.
                raise _IdTakenError
            # Another server may have removed the graph with its last program meanwhile.
            is_new = _add_graph(connection, content.graph, digest, tenant) or is_new
            connection.execute(insert(programs).values(asdict(row) | values))
            added = size + len(content.graph) if is_new else size
            change_usage(connection, tenant, Usage(0, 1, added, 0, 1), quotas)
            is_added = True
        return is_added

    def remove_program(self, program_id: str, tenant: str = DEFAULT_TENANT, quotas: Quotas | None = None) -> bool:
        """Removes a program, and its graph if no other program has it; returns False if there is no such program."""

        def remove(connection: Connection) -> bool:
            is_meant = (programs.c.tenant == tenant) & (programs.c.id == program_id)
            found = connection.execute(select(programs.c.graph_digest, PROGRAM_BYTES).where(is_meant)).one_or_none()
            if found is None:
                return False
            digest, freed = found
            connection.execute(delete(programs).where(is_meant))
            still_used = exists().where(programs.c.tenant == tenant, programs.c.graph_digest == digest)
            is_unused = (blobs.c.tenant == tenant) & (blobs.c.digest == digest) & ~still_used
            graph = connection.execute(select(func.length(blobs.c.content)).where(is_unused)).scalar_one_or_none()
            connection.execute(delete(blobs).where(is_unused))
            change_usage(connection, tenant, Usage(0, -1, -int(freed) - (graph or 0), 0, 1), quotas)
            return True

        return self.database.delete(remove)


def _delete_rule(connection: Connection, name: str, tenant: str) -> int | None:
    """Deletes a rule, and returns the freed bytes; None: there is no such rule."""
    is_meant = (rules.c.tenant == tenant) & (rules.c.name == name)
    freed = connection.execute(select(RULE_BYTES).where(is_meant)).scalar_one_or_none()
    connection.execute(delete(rules).where(is_meant))
    return None if freed is None else int(freed)


def _add_graph(connection: Connection, graph: bytes, digest: str, tenant: str) -> bool:
    """Adds a graph unless the tenant has it; returns whether it is new."""
    if connection.execute(_same_graph(digest, tenant)).one_or_none() is not None:
        return False
    added = upsert(blobs).values(tenant=tenant, digest=digest, content=graph).on_conflict_do_nothing()
    return connection.execute(added.returning(blobs.c.digest)).one_or_none() is not None


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


def _same_graph(digest: str, tenant: str) -> Select[tuple[str]]:
    return select(blobs.c.digest).where(blobs.c.tenant == tenant, blobs.c.digest == digest)


def _is_program(program_id: str, identity: str, tenant: str) -> ColumnElement[bool]:
    return (programs.c.tenant == tenant) & (programs.c.id == program_id) & (programs.c.identity == identity)


def _program_rows(tenant: str) -> Select[tuple[str, str, bytes, int]]:
    columns = (programs.c.id, programs.c.identity, programs.c.summary, programs.c.create_time_us)
    return select(*columns).where(programs.c.tenant == tenant)
