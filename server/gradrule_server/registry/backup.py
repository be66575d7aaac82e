"""Checks, backs up, restores and copies registries; a server may use a registry while it is checked or backed up.

A backup is a tar archive of messages of the service: each rule as a `Rule`, each program as a `Program`, its
`ProgramSpec` and the `ListRulesResponse` of its rules, and the bytes of graphs and blobs. Its last member is the
SHA-256 of all others. It is the same for all databases and places of blobs. A copy passes on the same messages.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import sqlite3
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import quote, unquote

from google.protobuf.message import DecodeError
from sqlalchemy.exc import SQLAlchemyError

from gradrule.v1 import program_pb2, rule_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.policy.faults import BLOB_NAME
from gradrule_server.registry.blob_index import BlobAmount
from gradrule_server.registry.blobs import DAMAGED, BlobStore, folder_name
from gradrule_server.registry.data_folder import (
    BLOBS,
    DATABASE_FILE,
    StoreError,
    find_logs,
    lock_folder,
    sync_to_disk,
)
from gradrule_server.registry.database import Database, import_postgres, open_database
from gradrule_server.registry.database_url import describe_url
from gradrule_server.registry.object_store import (
    FolderObjects,
    ObjectNotFoundError,
    ObjectStore,
    ObjectStoreError,
    check_owner,
    claim,
    open_object_store,
    read_object,
)
from gradrule_server.registry.programs import NeededBlobs, read_spec, read_summary, variable_blobs
from gradrule_server.registry.rule_entries import read_rule
from gradrule_server.registry.schema import copy_database, write_meta
from gradrule_server.registry.shared_blobs import SharedBlobs, object_key
from gradrule_server.registry.store import ProgramContent, ProgramRow, RuleRow, Store, UnreadableRowError
from gradrule_server.rules.signature import count_noun

_CHUNK_BYTES = 1 << 20
# The members of an archive.
_ID, _RULES, _GRAPHS, _PROGRAMS, _BLOBS, _END = "registry", "rules", "graphs", "programs", "blobs", "sha256"


class BackupError(Exception):
    """A registry cannot be backed up or restored; the message says why, and what to do."""


@dataclass(slots=True)
class Report:
    """The content of a registry, and its problems."""

    tenants: set[str] = field(default_factory=set)
    rules: int = 0
    programs: int = 0
    blobs: set[tuple[str, str]] = field(default_factory=set)
    """Tenant and name of each blob that programs need."""
    missing: set[tuple[str, str]] = field(default_factory=set)
    """The needed blobs that are missing; calls of programs that need them raise BLOB_NOT_FOUND."""
    unreadable: list[str] = field(default_factory=list)
    """A sentence for each rule or program that this release cannot read; they are not in backups."""
    damaged_blobs: int = 0
    """Number of damaged files of blobs; the server has renamed these files."""
    problems: list[str] = field(default_factory=list)
    """A sentence for each damaged part; a damaged registry is not backed up."""

    def __str__(self) -> str:
        return (
            f"{count_noun(self.rules, 'rule')} and {count_noun(self.programs, 'program')} of "
            f"{count_noun(len(self.tenants), 'tenant')}, with {count_noun(len(self.blobs), 'blob')}"
        )


@dataclass(frozen=True, slots=True)
class RegistryPlace:
    """Where a registry is.

    Attributes:
        data_dir: The data folder.
        url: URL of the database in PostgreSQL; empty: SQLite in the data folder.
        blobs_url: URL of the object store of the blobs; empty: files in the data folder.
    """

    data_dir: Path
    url: str = ""
    blobs_url: str = ""

    def __str__(self) -> str:
        return describe_url(self.url) if self.url else str(self.data_dir)


class _Entry(NamedTuple):
    """A member of an archive. `size`: the sum of the bytes of its `pieces`, which are read once."""

    name: str
    size: int
    pieces: Iterable[bytes]


def check(place: RegistryPlace) -> Report:
    """Reads and checks everything in a registry, also while a server uses it.

    Raises:
        BackupError: There is no registry, or its database or object store cannot be read.
    """
    report = Report()
    for entry in _read_registry(place, report):
        for _ in entry.pieces:
            pass
    report.damaged_blobs = sum(1 for _ in (place.data_dir / BLOBS).rglob(f"{DAMAGED}*"))
    return report


def backup(place: RegistryPlace, to: Path) -> Report:
    """Writes a backup of a registry to a new file, also while a server uses it. Raises `BackupError`."""
    if to.exists():
        raise BackupError(f"{to} exists already; name a file that does not exist")
    report = Report()
    unfinished = to.with_name(f".{to.name}.unfinished")
    with _errors("the backup cannot be written"):
        to.parent.mkdir(parents=True, exist_ok=True)
        unfinished.unlink(missing_ok=True)
        unfinished.touch(0o600)
        try:
            with tarfile.open(unfinished, "w", format=tarfile.PAX_FORMAT) as archive:
                for entry in _with_digest(_read_registry(place, report)):
                    _write_member(archive, entry)
            _refuse_problems(report, f"the registry in {place}")
            sync_to_disk(unfinished)
            unfinished.rename(to)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        sync_to_disk(to.parent)
    return report


def restore(file: Path, target: RegistryPlace) -> Report:
    """Restores a backup to a place without a registry, or with an empty one in PostgreSQL. Raises `BackupError`.

    The registry keeps its id, so an object store must be its own, or new.

    Args:
        file: The backup; also the folder of one of releases that wrote folders.
        target: Where to restore it.
    """
    if file.is_dir():
        return copy_registry(RegistryPlace(file), target)
    report = Report()
    with _errors(f"{file} is no backup, or it is damaged"), tarfile.open(file, "r:") as archive:
        try:
            _install(_read_archive(archive, file, report), target)
        except (LookupError, ValueError, DecodeError) as cause:
            raise BackupError(f"{file} is damaged: it holds what no backup holds ({cause})") from cause
    return report


def copy_registry(source: RegistryPlace, target: RegistryPlace) -> Report:
    """Copies a registry with its blobs to an empty one; see `restore`. Raises `BackupError`."""
    report = Report()

    def entries() -> Iterator[_Entry]:
        yield from _read_registry(source, report)
        _refuse_problems(report, f"the registry in {source}")

    _install(entries(), target)
    return report


def delete_unneeded_blobs(place: RegistryPlace, grace_s: float) -> tuple[int, int]:
    """Deletes objects of blobs that no program needs, see `SharedBlobs.collect`. Raises `BackupError`."""
    if not place.blobs_url:
        raise BackupError("blobs in a data directory are removed by its server; name an object store with --blobs")
    with _errors("the registry cannot be read"), _opened(place) as store:
        shared = SharedBlobs(open_object_store(place.blobs_url), store.database, BlobAmount(sys.maxsize, sys.maxsize))
        return shared.collect(NeededBlobs(store), grace_s)


def _read_registry(place: RegistryPlace, report: Report) -> Iterator[_Entry]:
    """Yields the content of a registry as entries, and adds what it finds to a report."""
    with _errors("the registry cannot be read"):
        with _opened_snapshot(place) as store:
            yield from _read_rows(store, report)
            registry_id = store.registry_id()
        objects: ObjectStore = FolderObjects(place.data_dir / BLOBS)
        if place.blobs_url:
            objects = open_object_store(place.blobs_url)
            check_owner(objects, registry_id)
        for tenant, name in sorted(report.blobs):
            folder = folder_name(tenant)
            key = object_key(folder, name) if place.blobs_url else str(Path(folder, name))
            yield from _read_blob(objects, key, tenant, name, report)


def _read_rows(store: Store, report: Report) -> Iterator[_Entry]:
    yield _message(_ID, store.registry_id().encode())
    for tenant in store.tenants():
        if tenant.isprintable():
            yield from _read_rules(store, tenant, report)
            yield from _read_programs(store, tenant, report)
        else:
            report.unreadable.append(f"the rules and programs of tenant {tenant!r} cannot be read: no valid name")


def _read_rules(store: Store, tenant: str, report: Report) -> Iterator[_Entry]:
    for row in store.iterate_rules(tenant):
        report.tenants.add(tenant)
        report.rules += 1
        try:
            read_rule(row)
            definition = rule_pb2.RuleDefinition.FromString(row.definition)
            rule = rule_pb2.Rule(name=row.name, definition=definition, description=row.description)
            rule.create_time.FromMicroseconds(row.create_time_us)
        except (UnreadableRowError, TypeError, ValueError) as cause:
            report.unreadable.append(f"the rule {row.name!r} of tenant {tenant!r} cannot be read: {cause}")
        else:
            yield _message(_path(_RULES, tenant, row.name), rule.SerializeToString())


def _read_programs(store: Store, tenant: str, report: Report) -> Iterator[_Entry]:
    written, damaged = "", set()
    for _, program_id, identity, digest in store.program_keys(tenant):
        report.tenants.add(tenant)
        report.programs += 1
        row = store.program(program_id, tenant)
        try:
            content = store.program_content(program_id, identity, tenant)
        except UnreadableRowError as cause:
            if digest not in damaged:
                damaged.add(digest)
                what = f"{cause}; delete the program {program_id!r} of tenant {tenant!r} and others with this graph"
                report.problems.append(f"the graph {digest} is damaged: {what}")
            continue
        assert row is not None
        assert content is not None
        try:
            read_summary(row.summary)
            spec = read_spec(tenant, program_id, content.spec)
            needed = variable_blobs(spec)
            # Names become paths.
            if not all(BLOB_NAME.fullmatch(name) for name in needed):
                raise UnreadableRowError("it names a blob that is no SHA-256")
        except UnreadableRowError as cause:
            report.unreadable.append(f"the program {program_id!r} of tenant {tenant!r} cannot be read: {cause}")
            continue
        report.blobs.update((tenant, name) for name in needed)
        if digest != written:
            written = digest
            yield _message(_path(_GRAPHS, tenant, digest), content.graph)
        spec.graph.blob_sha256 = digest
        yield _message(_path(_PROGRAMS, tenant, program_id, "spec"), spec.SerializeToString())
        yield _message(_path(_PROGRAMS, tenant, program_id, "rules"), content.snapshot)
        yield _message(_path(_PROGRAMS, tenant, program_id, "identity"), identity.encode())
        yield _message(_path(_PROGRAMS, tenant, program_id, "program"), row.summary)


def _read_blob(objects: ObjectStore, key: str, tenant: str, name: str, report: Report) -> Iterator[_Entry]:
    """Yields a blob, unless it is missing; its bytes are verified."""
    item = objects.find([key]).get(key)
    if item is None:
        report.missing.add((tenant, name))
        return

    def verified() -> Iterator[bytes]:
        digest = hashlib.sha256()
        yield from _hashed(read_object(objects, key, item.size), digest)
        if digest.hexdigest() != name:
            report.problems.append(f"the blob {name} of tenant {tenant!r} is damaged: its bytes have another SHA-256")

    yield _Entry(_path(_BLOBS, tenant, name), item.size, verified())


def _read_archive(archive: tarfile.TarFile, file: Path, report: Report) -> Iterator[_Entry]:
    """Yields the entries of an archive, and counts them. Raises `BackupError` if it is incomplete or damaged."""
    digest = hashlib.sha256()
    for member in archive:
        opened = archive.extractfile(member)
        if opened is None:
            break
        if member.name == _END:
            if opened.read().decode(errors="replace") != digest.hexdigest():
                break
            return
        digest.update(f"{member.name}\0{member.size}\0".encode())
        _count(member.name, report)
        yield _Entry(member.name, member.size, _hashed(_chunks(opened), digest))
    raise BackupError(f"{file} is no backup, or it is damaged or incomplete: it does not have the SHA-256 at its end")


def _count(name: str, report: Report) -> None:
    kind, *parts = name.split("/")
    if len(parts) > 1:
        report.tenants.add(unquote(parts[0]))
    report.rules += kind == _RULES
    report.programs += kind == _PROGRAMS and parts[-1] == "program"
    if kind == _BLOBS:
        report.blobs.add((unquote(parts[0]), parts[1]))


def _with_digest(entries: Iterable[_Entry]) -> Iterator[_Entry]:
    """Yields the entries, and at the end one with the SHA-256 of all."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry.name}\0{entry.size}\0".encode())
        yield entry._replace(pieces=_hashed(entry.pieces, digest))
    yield _message(_END, digest.hexdigest().encode())


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def _hashed(pieces: Iterable[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
    for piece in pieces:
        digest.update(piece)
        yield piece


def _write_member(archive: tarfile.TarFile, entry: _Entry) -> None:
    member = tarfile.TarInfo(entry.name)
    member.size, member.mtime, member.mode = entry.size, int(time.time()), 0o600
    pieces = iter(entry.pieces)
    archive.addfile(member, io.BufferedReader(_Pieces(pieces), _CHUNK_BYTES))
    # Blobs are verified after their last piece.
    for _ in pieces:
        pass


class _Pieces(io.RawIOBase):
    """Reads pieces as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest and (piece := next(self._pieces, None)) is not None:
            self._rest = piece
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _install(entries: Iterable[_Entry], target: RegistryPlace) -> None:
    """Writes entries to an empty registry: blobs as they come, then rules and programs, all or none."""
    data_dir = target.data_dir
    with (
        _errors(f"{target} cannot be written"),
        _locked(data_dir),
        tempfile.TemporaryDirectory(prefix=".restore-", dir=data_dir) as made,
    ):
        _check_empty(target)
        with contextlib.closing(Store(Path(made))) as staged:
            files = BlobStore(Path(made, BLOBS) if target.blobs_url else data_dir / BLOBS, sys.maxsize)
            _add(entries, staged, target, files)
            if target.url:
                with _opened(target) as store, store.database.exclusively():
                    _check_unused(store, target)
                    _add(_read_rows(staged, Report()), store, target, files)
        if not target.url:
            # Copy the database last: a folder without a database is not a registry.
            copy_database(Path(made) / DATABASE_FILE, data_dir / DATABASE_FILE)


def _add(entries: Iterable[_Entry], store: Store, target: RegistryPlace, files: BlobStore) -> None:
    """Adds entries to an empty registry. `files`: where blobs are put, before they go to the target's object store."""
    objects: ObjectStore | None = None
    graph, parts = b"", dict[str, bytes]()
    for entry in entries:
        kind, *path = map(unquote, entry.name.split("/"))
        if kind == _BLOBS:
            _put_blob(files.for_tenant(path[0]), objects, path[1], entry.pieces)
            continue
        data = b"".join(entry.pieces)
        if kind == _ID:
            with store.database.write() as connection:
                write_meta(connection, "registry_id", data.decode())
            if target.blobs_url:
                objects = open_object_store(target.blobs_url)
                claim(objects, data.decode())
        elif kind == _RULES:
            rule = rule_pb2.Rule.FromString(data)
            definition = rule.definition.SerializeToString(deterministic=True)
            store.add_rule(RuleRow(path[1], definition, rule.description, rule.create_time.ToMicroseconds()), path[0])
        elif kind == _GRAPHS:
            graph = data
        elif kind == _PROGRAMS:
            parts[path[2]] = data
            if path[2] == "program":
                spec = program_pb2.ProgramSpec.FromString(parts["spec"])
                spec.ClearField("graph")
                created = program_pb2.Program.FromString(data).create_time.ToMicroseconds()
                row = ProgramRow(path[1], parts["identity"].decode(), data, created)
                content = ProgramContent(spec.SerializeToString(deterministic=True), graph, parts["rules"])
                store.add_program(row, content, path[0])


def _put_blob(files: BlobStore, objects: ObjectStore | None, name: str, pieces: Iterable[bytes]) -> None:
    upload = files.upload(name)
    try:
        for piece in pieces:
            upload.write(piece)
        upload.finish()
    finally:
        upload.close()
    if objects is not None:
        objects.put(object_key(files.folder_name, name), files.folder / name)
        (files.folder / name).unlink()


@contextlib.contextmanager
def _opened(place: RegistryPlace, *, is_read_only: bool = False) -> Iterator[Store]:
    """Opens a registry. Only one in PostgreSQL may be in use by servers."""
    database: Database
    if place.url:
        import_postgres()
        from gradrule_server.registry.postgres_database import PostgresDatabase

        database = PostgresDatabase(place.url, is_read_only=is_read_only)
    else:
        database = open_database("", place.data_dir)
    with contextlib.closing(Store(database)) as store:
        yield store


@contextlib.contextmanager
def _opened_snapshot(place: RegistryPlace) -> Iterator[Store]:
    """Opens the state of a registry at this moment, which servers may use meanwhile."""
    if place.url:
        with _opened(place, is_read_only=True) as store, store.database.snapshot():
            yield store
        return
    file = place.data_dir / DATABASE_FILE
    if not file.is_file():
        raise BackupError(f"there is no registry in {place.data_dir}: it has no {DATABASE_FILE}")
    with tempfile.TemporaryDirectory(prefix="gradrule-registry-") as made:
        copy_database(file, Path(made) / DATABASE_FILE)
        with contextlib.closing(Store(Path(made))) as store:
            yield store


def _check_empty(target: RegistryPlace) -> None:
    """Raises `BackupError` if a registry is there, or logs that SQLite would apply to a new database."""
    if target.url:
        with _opened(target) as store:
            _check_unused(store, target)
        return
    database = target.data_dir / DATABASE_FILE
    if database.exists() and database.stat().st_size:
        raise BackupError(f"{target} has a registry already; move its {DATABASE_FILE}* files and {BLOBS} away")
    if leftovers := find_logs(database):
        raise BackupError(
            f"{target} has no {DATABASE_FILE}, but {' and '.join(path.name for path in leftovers)} of an earlier one, "
            "which SQLite would apply to the new database; move them away"
        )


def _check_unused(store: Store, target: RegistryPlace) -> None:
    total = store.total_usage()
    if total.rules or total.programs:
        raise BackupError(f"{target} has rules or programs already; name an empty database")


def _refuse_problems(report: Report, what: str) -> None:
    if report.problems:
        raise BackupError(f"{what} is damaged: {'; '.join(report.problems)}")


def _message(name: str, data: bytes) -> _Entry:
    return _Entry(name, len(data), (data,))


def _path(kind: str, *parts: str) -> str:
    return "/".join((kind, *(quote(part, safe="") for part in parts)))


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    """Raises `BackupError` in place of errors of files, databases and object stores. `what`: what failed."""
    try:
        yield
    except (StoreError, ObjectStoreError) as cause:
        raise BackupError(str(cause)) from cause
    except GradruleError as cause:
        raise BackupError(f"{what}: {cause.message}") from cause
    except SQLAlchemyError as cause:
        raise BackupError(f"{what}: {type(cause).__name__}") from cause
    except ObjectNotFoundError as cause:
        raise BackupError(f"{what}: the blob {cause} was deleted meanwhile; try again") from cause
    except (OSError, sqlite3.Error, tarfile.TarError) as cause:
        raise BackupError(f"{what}: {cause}") from cause


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    lock = lock_folder(data_dir)
    try:
        yield
    finally:
        lock.release()
