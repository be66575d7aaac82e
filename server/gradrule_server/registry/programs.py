"""Registers, finds and lists programs by id; registering equal content again returns the existing program."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from gradrule.v1 import errors_pb2, program_pb2, rule_pb2
from gradrule_server.errors import GradruleError, Resource, did_you_mean, error
from gradrule_server.quotas import Quota
from gradrule_server.registry import page_tokens
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.database import LARGE_BYTES
from gradrule_server.registry.store import DEFAULT_TENANT, ProgramContent, ProgramRow, Store, UnreadableRowError

_log = logging.getLogger(__name__)

PROGRAM_PREFIX = "programs/"
_ID = re.compile(r"[a-z][a-z0-9_.-]{0,62}")
_LISTING = "programs"
# Rows have at most 1,000,000,000 bytes in SQLite, values less than 1 GiB in PostgreSQL.
_MAX_GRAPH_BYTES = 999_000_000


@dataclass(frozen=True, slots=True)
class StoredProgram:
    """A stored program. `program` holds its name and creation time; `identity` is equal for equal content."""

    id: str
    identity: str
    program: program_pb2.Program


class PinnedBlobs:
    """Pins the blobs of all stored programs of all tenants. Safe to use from several threads.

    Of shared blobs, the index records which ones programs need: their files are only copies.
    """

    def __init__(self, store: Store, blobs: BlobStore) -> None:
        self._store = store
        self._all_blobs = blobs
        self._pinned: dict[tuple[str, str], list[str]] = {}
        needs = self._needs(store.program_specs())
        if blobs.is_shared:
            blobs.record_needs(needs)
        else:
            self._pin_unchecked(needs)

    def apply(self, tenant: str, program_ids: Collection[str]) -> None:
        """Pins what programs need that another server has created, and unpins what deleted ones needed."""
        if not self._all_blobs.is_shared:
            self._replace([(tenant, name) for name in program_ids], self._store.program_specs(tenant, program_ids))

    def reload(self) -> None:
        """Reads all programs again."""
        if self._all_blobs.is_shared:
            self._all_blobs.follow_restore(self._needs(self._store.program_specs()))
        else:
            self._replace(list(self._pinned), self._store.program_specs())

    def _replace(self, keys: Iterable[tuple[str, str]], specs: Iterable[tuple[str, str, bytes]]) -> None:
        old = [(key[0], self._pinned.pop(key)) for key in keys if key in self._pinned]
        # Pin first, so that no blob that is still needed is removed meanwhile.
        self._pin_unchecked(self._needs(specs))
        for tenant, names in old:
            self._all_blobs.for_tenant(tenant).unpin(names)

    def _needs(self, specs: Iterable[tuple[str, str, bytes]]) -> list[tuple[str, str, list[str]]]:
        """Returns tenant, id and blobs of the programs that need blobs."""
        needs = []
        for tenant, program_id, spec in specs:
            try:
                wanted = variable_blobs(read_spec(tenant, program_id, spec))
            except UnreadableRowError as cause:
                _log_unreadable(tenant, program_id, cause)
                continue
            if wanted:
                needs.append((tenant, program_id, wanted))
        return needs

    def _pin_unchecked(self, needs: Iterable[tuple[str, str, list[str]]]) -> None:
        for tenant, program_id, wanted in needs:
            # Do not fail for missing blobs: calls of the program report them.
            self._all_blobs.for_tenant(tenant).pin_unchecked(wanted)
            self._pinned[tenant, program_id] = wanted

    def pin(self, blobs: BlobStore, tenant: str, program_id: str, names: list[str]) -> None:
        """Pins the blobs of a program before it is stored. Raises BLOB_NOT_FOUND."""
        if names:
            blobs.pin(names)
            self._pinned[tenant, program_id] = names

    def unpin(self, blobs: BlobStore, tenant: str, program_id: str) -> None:
        """Unpins the blobs of a deleted program."""
        blobs.unpin(self._pinned.pop((tenant, program_id), ()))


class ProgramRegistry:
    """A tenant's programs in a store, which pin their blobs. All methods block; safe to use from several threads.

    Args:
        store: The store.
        blobs: The tenant's blobs.
        tenant: The tenant.
        quota: Limits the number of programs; None: unlimited.
        bytes_quota: Limits the bytes of programs; None: unlimited.
        pins: The pins of all programs, if several registries share the store.
    """

    def __init__(
        self,
        store: Store,
        blobs: BlobStore,
        *,
        tenant: str = DEFAULT_TENANT,
        quota: Quota | None = None,
        bytes_quota: Quota | None = None,
        pins: PinnedBlobs | None = None,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._tenant = tenant
        self._changing = threading.Lock()
        self._identities = self._read_identities()
        self.on_changed: Callable[[str], None] = lambda name: None
        """Called with the name of each program that another server has created or deleted."""
        self._quota = quota or Quota.unlimited()
        self._bytes_quota = bytes_quota or Quota.unlimited()
        self._pins = pins or PinnedBlobs(store, blobs)

    def __len__(self) -> int:
        """Returns the number of programs."""
        return len(self._identities)

    def create(
        self,
        program_id: str | None,
        spec: program_pb2.ProgramSpec,
        snapshot: bytes,
        program: program_pb2.Program,
        override_values: bytes,
    ) -> StoredProgram:
        """Stores a program, or returns the existing one if id and content are equal.

        Args:
            program_id: The id; None: an id is derived from the content.
            spec: The program's spec, with the graph as bytes or as a blob.
            snapshot: The current rules, in bytes that are equal for equal rules.
            program: The program's metadata.
            override_values: The values of the overrides' params, which `program.digests.program` does not cover, in
                bytes that are equal for equal values.

        Raises:
            GradruleError: MALFORMED_REQUEST (the id), PROGRAM_EXISTS, LIMIT_EXCEEDED, QUOTA_EXCEEDED, BLOB_NOT_FOUND.
        """
        # Aliases are part of the identity. Without aliases, the identity is the same as in releases that had none.
        aliases = [_without_graph(program_pb2.ProgramSpec(aliases=spec.aliases))] if spec.aliases else []
        identity = _identity(program.digests.program, snapshot, override_values, *aliases)
        if program_id is None:
            # Start with a letter, as ids must.
            program_id = f"p{identity[:32]}"
        elif _ID.fullmatch(program_id) is None:
            raise error(
                errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
                f"{program_id!r} is not a valid program id: 1 to 63 of a-z, 0-9, '-', '_', '.', starting with a letter",
                field="program_id",
            )
        existing = self._existing(program_id, identity)
        if existing is not None:
            return existing
        now_us = time.time_ns() // 1000
        kept = program_pb2.Program()
        kept.CopyFrom(program)
        kept.name = PROGRAM_PREFIX + program_id
        kept.create_time.FromMicroseconds(now_us)
        row = ProgramRow(program_id, identity, kept.SerializeToString(), now_us)
        content = ProgramContent(_without_graph(spec), self._graph_bytes(spec), snapshot)
        if len(content.graph) > _MAX_GRAPH_BYTES:
            raise error(
                errors_pb2.ERROR_REASON_LIMIT_EXCEEDED,
                f"the graph has {len(content.graph)} bytes; graphs of stored programs have at most {_MAX_GRAPH_BYTES} "
                "bytes. Send large constants as variables, whose values are blobs",
                field="spec.graph",
            )
        blobs = variable_blobs(spec)
        is_graph_added = False

        def add_graph() -> None:
            nonlocal is_graph_added
            is_graph_added = self._store.add_graph(content.graph, self._tenant)

        def add() -> StoredProgram:
            return self._add(row, content, blobs, StoredProgram(row.id, identity, kept), is_graph_added=is_graph_added)

        return self._store.exclusively(add, first=add_graph if len(content.graph) >= LARGE_BYTES else None)

    def _add(
        self,
        row: ProgramRow,
        content: ProgramContent,
        blobs: list[str],
        stored: StoredProgram,
        *,
        is_graph_added: bool,
    ) -> StoredProgram:
        """Stores a program unless there is one with its id; no other server writes meanwhile."""
        with self._changing:
            if row.id in self._identities:
                # Another caller was faster.
                return self._matching(self.get(row.id), row.identity)
            with self._quota.reserved(), contextlib.ExitStack() as taken, contextlib.ExitStack() as undo:
                self._pins.pin(self._blobs, self._tenant, row.id, blobs)
                undo.callback(self._pins.unpin, self._blobs, self._tenant, row.id)
                self._store.add_program(
                    row,
                    content,
                    self._tenant,
                    before=lambda size: taken.enter_context(self._bytes_quota.reserved(size)),
                    within=lambda connection: self._blobs.record_need(connection, self._tenant, row.id, blobs),
                    is_graph_added=is_graph_added,
                )
                if not self._blobs.is_shared:
                    undo.pop_all()
            self._identities[row.id] = row.identity
        return stored

    def apply(self, program_ids: Collection[str]) -> None:
        """Reads programs again that another server has created or deleted."""
        found = self._read_identities(program_ids)
        with self._changing:
            kept = {name: identity for name, identity in self._identities.items() if name not in program_ids}
            self._identities = kept | found
        for program_id in program_ids:
            self.on_changed(PROGRAM_PREFIX + program_id)

    def reload(self) -> None:
        """Reads all programs again."""
        found = self._read_identities()
        with self._changing:
            changed = {name for name, _ in self._identities.items() ^ found.items()}
            self._identities = found
        for program_id in changed:
            self.on_changed(PROGRAM_PREFIX + program_id)

    def _read_identities(self, program_ids: Collection[str] | None = None) -> dict[str, str]:
        # Ignore rows with an invalid id: no request can name them.
        return {
            program_id: identity
            for program_id, identity in self._store.program_identities(self._tenant, program_ids).items()
            if isinstance(program_id, str) and _ID.fullmatch(program_id)
        }

    def acquired_blobs(self, spec: program_pb2.ProgramSpec) -> AbstractAsyncContextManager[None]:
        """Returns a context within which the blobs of a spec can be read, as `create` does. Raises BLOB_NOT_FOUND."""
        graph = [spec.graph.blob_sha256] if spec.graph.blob_sha256 else []
        return self._blobs.acquired([*graph, *variable_blobs(spec)])

    def get(self, name: str) -> StoredProgram:
        """Returns a program by its id, with or without `programs/`. Raises PROGRAM_NOT_FOUND."""
        program_id = name.removeprefix(PROGRAM_PREFIX)
        # PostgreSQL refuses some texts that are no ids.
        row = self._store.program(program_id, self._tenant) if _ID.fullmatch(program_id) else None
        if row is None:
            raise self._not_found(name)
        with self._unreadable_is_not_found(program_id):
            return _stored(row)

    def content(self, stored: StoredProgram) -> tuple[program_pb2.ProgramSpec, bytes]:
        """Returns the spec with the graph's bytes, and the snapshot of the rules. Raises PROGRAM_NOT_FOUND."""
        with self._unreadable_is_not_found(stored.id):
            found = self._content(stored)
        if found is None:
            raise self._not_found(stored.program.name)
        return found

    def graph_bytes(self, stored: StoredProgram) -> int:
        """Returns the size of the graph; 0 if the program was deleted. Raises PROGRAM_NOT_FOUND if it is unreadable."""
        with self._unreadable_is_not_found(stored.id):
            return self._store.program_graph_bytes(stored.id, stored.identity, self._tenant)

    def list(self, page_size: int, page_token: str) -> tuple[list[StoredProgram], str]:
        """Returns a page of programs by id, and the next page's token.

        The stored metadata of a page has at most `page_tokens.MAX_PAGE_BYTES`, whatever its size. Raises
        MALFORMED_REQUEST.
        """
        size = page_tokens.page_size(page_size)
        after = page_tokens.decode(_LISTING, page_token, _ID)[0] if page_token else ""
        rows, has_more = self._store.programs_after(after, size, page_tokens.MAX_PAGE_BYTES, self._tenant)
        page = []
        for row in rows:
            try:
                page.append(_stored(row))
            except UnreadableRowError as cause:
                _log_unreadable(self._tenant, row.id, cause)
        return page, page_tokens.encode(_LISTING, [rows[-1].id]) if has_more else ""

    def delete(self, name: str) -> None:
        """Deletes a program. Raises PROGRAM_NOT_FOUND."""
        program_id = name.removeprefix(PROGRAM_PREFIX)

        def delete() -> None:
            with self._changing:
                if program_id not in self._identities:
                    raise self._not_found(name)
                self._remove(program_id)

        self._store.exclusively(delete)

    def _remove(self, program_id: str) -> None:
        """Deletes a program, whether its row exists or not."""
        freed = self._store.remove_program(program_id, self._tenant)
        del self._identities[program_id]
        self._pins.unpin(self._blobs, self._tenant, program_id)
        self._quota.release()
        self._bytes_quota.release(freed)

    def _content(self, stored: StoredProgram) -> tuple[program_pb2.ProgramSpec, bytes] | None:
        """Returns the spec with the graph's bytes, and the snapshot; None if the row is gone.

        Raises:
            UnreadableRowError: The row is damaged.
        """
        content = self._store.program_content(stored.id, stored.identity, self._tenant)
        if content is None:
            return None
        spec = read_spec(self._tenant, stored.id, content.spec)
        with _decoding():
            rule_pb2.ListRulesResponse.FromString(content.snapshot)
        spec.graph.serialized = content.graph
        return spec, content.snapshot

    @contextlib.contextmanager
    def _unreadable_is_not_found(self, program_id: str) -> Iterator[None]:
        """Raises PROGRAM_NOT_FOUND in place of `UnreadableRowError`, which is logged."""
        try:
            yield
        except UnreadableRowError as cause:
            _log_unreadable(self._tenant, program_id, cause)
            raise error(
                errors_pb2.ERROR_REASON_PROGRAM_NOT_FOUND,
                f"the stored program {program_id!r} cannot be read: {cause}; compile it again, or delete it",
                field="name",
                resource=Resource("gradrule.v1.Program", PROGRAM_PREFIX + program_id),
            ) from cause

    def _graph_bytes(self, spec: program_pb2.ProgramSpec) -> bytes:
        if spec.graph.HasField("inline_graph"):
            # Compile workers convert graphs to bytes, because the front end does not parse graphs.
            raise ValueError("a stored program has its graph as bytes or as a blob")
        return self._blobs.read(spec.graph.blob_sha256) if spec.graph.blob_sha256 else spec.graph.serialized

    def _existing(self, program_id: str, identity: str) -> StoredProgram | None:
        """Returns a program if there is one; removes one that cannot be read. Raises PROGRAM_EXISTS."""
        if not self._store.is_shared and program_id not in self._identities:
            return None
        stored = self._readable(program_id)
        if stored is not None:
            return self._matching(stored, identity)

        def remove() -> None:
            with self._changing:
                if program_id in self._identities and self._readable(program_id) is None:
                    self._remove(program_id)

        if program_id in self._identities or self._store.program(program_id, self._tenant) is not None:
            self._store.exclusively(remove)
        return None

    def _readable(self, program_id: str) -> StoredProgram | None:
        """Returns a program if there is one and all of it can be read."""
        row = self._store.program(program_id, self._tenant)
        if row is None:
            return None
        try:
            stored = _stored(row)
            return None if self._content(stored) is None else stored
        except UnreadableRowError as cause:
            _log_unreadable(self._tenant, program_id, cause)
            return None

    def _matching(self, stored: StoredProgram, identity: str) -> StoredProgram:
        """Returns a program if it has an identity. Raises PROGRAM_EXISTS."""
        if stored.identity != identity:
            since = stored.program.create_time.ToJsonString()
            raise error(
                errors_pb2.ERROR_REASON_PROGRAM_EXISTS,
                f"{stored.id!r} is a program with other content (digest {stored.program.digests.program[:12]}, "
                f"compiled {since}); delete it first, or choose another id",
                field="program_id",
                resource=Resource("gradrule.v1.Program", stored.program.name),
            )
        return stored

    def _not_found(self, name: str) -> GradruleError:
        program_id = name.removeprefix(PROGRAM_PREFIX)
        return error(
            errors_pb2.ERROR_REASON_PROGRAM_NOT_FOUND,
            f"there is no program {program_id!r}.{did_you_mean(program_id, tuple(self._identities))}",
            field="name",
            resource=Resource("gradrule.v1.Program", PROGRAM_PREFIX + program_id),
        )


def read_spec(tenant: str, program_id: str, spec: bytes) -> program_pb2.ProgramSpec:
    """Parses a stored spec. Raises only `UnreadableRowError` for a damaged row."""
    for name, text in (("tenant", tenant), ("id", program_id)):
        if not isinstance(text, str) or not text.isprintable():
            raise UnreadableRowError(f"its {name} {text!r} is not a valid name")
    with _decoding():
        return program_pb2.ProgramSpec.FromString(spec)


def read_summary(summary: bytes) -> program_pb2.Program:
    """Parses the stored metadata of a program. Raises `UnreadableRowError`."""
    with _decoding():
        return program_pb2.Program.FromString(summary)


@contextlib.contextmanager
def _decoding() -> Iterator[None]:
    try:
        yield
    except (DecodeError, TypeError, ValueError) as cause:
        raise UnreadableRowError(str(cause)) from cause


def _log_unreadable(tenant: str, program_id: str, cause: UnreadableRowError) -> None:
    _log.warning(
        "the stored program %r of tenant %r cannot be read and is ignored (`gradrule registry check` shows all): %s",
        program_id,
        tenant,
        cause,
    )


def _stored(row: ProgramRow) -> StoredProgram:
    return StoredProgram(row.id, row.identity, read_summary(row.summary))


def _identity(*parts: str | bytes) -> str:
    """Returns the SHA-256 of the hashes of the parts, so that different lists of parts have different identities."""
    hashes = (hashlib.sha256(part.encode() if isinstance(part, str) else part).digest() for part in parts)
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def _without_graph(spec: program_pb2.ProgramSpec) -> bytes:
    rest = program_pb2.ProgramSpec()
    rest.CopyFrom(spec)
    rest.ClearField("graph")
    return rest.SerializeToString(deterministic=True)


def variable_blobs(spec: program_pb2.ProgramSpec) -> list[str]:
    """Returns the blobs that hold values of a program's variables."""
    found = (item.value.blob.sha256 for item in spec.variables if item.value.HasField("blob"))
    return list(dict.fromkeys(found))
