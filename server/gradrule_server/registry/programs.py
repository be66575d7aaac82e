"""Registers, finds and lists programs by id; registering equal content again returns the existing program."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from gradrule.v1 import errors_pb2, program_pb2, rule_pb2
from gradrule_server.errors import GradruleError, Resource, did_you_mean, error
from gradrule_server.quotas import Quota
from gradrule_server.registry import page_tokens
from gradrule_server.registry.blobs import BlobStore, folder_name
from gradrule_server.registry.store import DEFAULT_TENANT, ProgramContent, ProgramRow, Store, UnreadableRowError
from gradrule_server.registry.usage import Usage

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


class NeededBlobs:
    """Finds the blobs that stored programs need, of all tenants, when blobs must be removed from a full disk."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._revision = -1
        self._known: dict[tuple[str, str, str], list[str]] = {}
        """The blobs of each program, by tenant, id and identity."""
        self._found: set[tuple[str, str]] = set()

    def __call__(self) -> set[tuple[str, str]]:
        """Returns folder and name of each blob. Reads only the specs of programs that are new since the last call."""
        revision = self._store.total_usage().programs_revision
        if revision != self._revision:
            # One by one: all specs together, which may hold tensors, may be larger than the memory.
            self._known = {
                key: self._known[key] if key in self._known else self._read(*key)
                for key in (row[:3] for row in self._store.program_keys())
            }
            self._found = {(folder_name(key[0]), name) for key, names in self._known.items() for name in names}
            self._revision = revision
        return self._found

    def _read(self, tenant: str, program_id: str, identity: str) -> list[str]:
        """Returns the blobs that a program needs; none if it is gone or cannot be read."""
        try:
            spec = self._store.program_spec(program_id, identity, tenant)
            return [] if spec is None else variable_blobs(read_spec(tenant, program_id, spec))
        except UnreadableRowError as cause:
            _log_unreadable(tenant, program_id, cause)
            return []


class ProgramRegistry:
    """A tenant's programs in a store. All methods block; safe to use from several threads.

    Args:
        store: The store.
        blobs: The tenant's blobs.
        tenant: The tenant.
        quota: Limits the number of programs; None: unlimited.
        bytes_quota: Limits the bytes of programs; None: unlimited.
    """

    def __init__(
        self,
        store: Store,
        blobs: BlobStore,
        *,
        tenant: str = DEFAULT_TENANT,
        quota: Quota | None = None,
        bytes_quota: Quota | None = None,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._tenant = tenant
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        """The identity of each program that was returned, by id; empty: it is being read."""
        self.on_changed: Callable[[str], None] = lambda name: None
        """Called with the name of each known program that another server has deleted or replaced."""
        self._quotas = {"programs": quota or Quota.unlimited(), "registry_bytes": bytes_quota or Quota.unlimited()}

    def __len__(self) -> int:
        """Returns the number of programs."""
        return self._store.usage([self._tenant]).get(self._tenant, Usage()).programs

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
        self._blobs.require_stored(blobs)
        with self._blobs.pinned(blobs):
            if not self._store.add_program(row, content, self._tenant, quotas=self._quotas):
                # Another caller was faster.
                return self._matching(self.get(row.id), row.identity)
        with self._lock:
            self._known[row.id] = identity
        return StoredProgram(row.id, identity, kept)

    def apply_changes(self) -> None:
        """Notices which known programs another server has deleted or replaced."""
        with self._lock:
            known = dict(self._known)
        found = self._store.program_identities(self._tenant)
        for program_id, identity in known.items():
            if found.get(program_id) != identity:
                with self._lock:
                    self._known.pop(program_id, None)
                self.on_changed(PROGRAM_PREFIX + program_id)

    def acquired_blobs(self, spec: program_pb2.ProgramSpec) -> AbstractAsyncContextManager[None]:
        """Returns a context within which the blobs of a spec can be read, as `create` does. Raises BLOB_NOT_FOUND."""
        graph = [spec.graph.blob_sha256] if spec.graph.blob_sha256 else []
        return self._blobs.acquired([*graph, *variable_blobs(spec)])

    def get(self, name: str) -> StoredProgram:
        """Returns a program by its id, with or without `programs/`. Raises PROGRAM_NOT_FOUND."""
        program_id = name.removeprefix(PROGRAM_PREFIX)
        # PostgreSQL refuses some texts that are no ids.
        if not _ID.fullmatch(program_id):
            raise self._not_found(name)
        # Known from now on: another server may replace the program while it is read.
        with self._lock:
            known = self._known.setdefault(program_id, "")
        try:
            row = self._store.program(program_id, self._tenant)
            known = "" if row is None else row.identity
        finally:
            with self._lock:
                self._known[program_id] = known
                if not known:
                    del self._known[program_id]
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
        if not (_ID.fullmatch(program_id) and self._store.remove_program(program_id, self._tenant, self._quotas)):
            raise self._not_found(name)
        with self._lock:
            self._known.pop(program_id, None)

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
        row = self._store.program(program_id, self._tenant)
        if row is None:
            return None
        try:
            stored = _stored(row)
            if self._content(stored) is None:
                return None
        except UnreadableRowError as cause:
            _log_unreadable(self._tenant, program_id, cause)
            self._store.remove_program(program_id, self._tenant, self._quotas)
            return None
        return self._matching(stored, identity)

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
        hint = did_you_mean(program_id, self._store.program_identities(self._tenant))
        return error(
            errors_pb2.ERROR_REASON_PROGRAM_NOT_FOUND,
            f"there is no program {program_id!r}.{hint}",
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
    if spec.graph.format:
        rest.graph.format = spec.graph.format
    return rest.SerializeToString(deterministic=True)


def variable_blobs(spec: program_pb2.ProgramSpec) -> list[str]:
    """Returns the blobs that hold values of a program's variables."""
    found = (item.value.blob.sha256 for item in spec.variables if item.value.HasField("blob"))
    return list(dict.fromkeys(found))
