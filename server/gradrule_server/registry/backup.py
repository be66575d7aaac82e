"""Checks, backs up, restores and copies registries; a server may use a registry while it is checked or backed up.

A backup is a folder with a consistent copy of the database, the blobs that its programs need, and the manifest
`backup.json`. It is created atomically. The copy is an SQLite file also where the database is in PostgreSQL, and blobs
are files also where they are in an object store, so that a backup of one can be restored to the other.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import create_engine
from sqlalchemy.exc import SQLAlchemyError

from gradrule_server.errors import GradruleError
from gradrule_server.policy.faults import BLOB_NAME
from gradrule_server.registry.blob_places import (
    BlobPlace,
    DamagedBlobError,
    FolderBlobs,
    MissingBlobError,
    ObjectBlobs,
    checked,
)
from gradrule_server.registry.blobs import DAMAGED, folder_name
from gradrule_server.registry.data_folder import (
    BLOBS,
    DATABASE_FILE,
    MARKER,
    FolderInUseError,
    FolderLock,
    StoreError,
    add_suffix,
    file_sha256,
    find_logs,
    sync_to_disk,
)
from gradrule_server.registry.database import import_postgres
from gradrule_server.registry.database_url import describe_url
from gradrule_server.registry.object_store import ObjectStoreError
from gradrule_server.registry.programs import read_spec, read_summary, variable_blobs
from gradrule_server.registry.rule_entries import read_rule
from gradrule_server.registry.schema import SCHEMA_VERSION, add_current_views, copy_database
from gradrule_server.registry.sqlite_rows import content_digest, open_file
from gradrule_server.registry.store import RuleRow, Store, UnreadableRowError
from gradrule_server.registry.stored_blobs import STORED, drop_index, object_states
from gradrule_server.rules.signature import count_noun

MANIFEST = "backup.json"

_FORMAT = 1
_ATTEMPTS = 5
_SHOW_EVERY_S = 0.1


class BackupError(Exception):
    """A registry cannot be backed up or restored; the message says why, and what to do."""


@dataclass(slots=True)
class Report:
    """The content of a registry, and its problems."""

    tenants: set[str] = field(default_factory=set)
    rules: int = 0
    programs: int = 0
    blobs: set[str] = field(default_factory=set)
    """Paths of the blobs that programs need, relative to the folder of blobs."""
    missing: set[str] = field(default_factory=set)
    """Paths of the needed blobs that are missing; calls of programs that need them raise BLOB_NOT_FOUND."""
    schema_version: int = SCHEMA_VERSION
    unreadable: list[str] = field(default_factory=list)
    """A sentence for each rule or program that this release cannot read; backups include these rows unchanged."""
    left_out: list[str] = field(default_factory=list)
    """A sentence for each damaged row that PostgreSQL cannot store."""
    damaged_blobs: int = 0
    """Number of damaged files of blobs; the server has renamed these files."""
    unindexed: int = 0
    """Number of objects of blobs that the index of the object store lacks."""
    without_object: int = 0
    """Number of blobs in the index of the object store that have no object."""
    registry_id: str = ""
    """The registry's id; empty: it has none yet."""
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

    def open_blobs(self, registry_id: str, *, is_target: bool = False) -> BlobPlace:
        """Opens the blobs of the registry with this id; see `ObjectBlobs`."""
        if not self.blobs_url:
            return FolderBlobs(self.data_dir / BLOBS)
        if not registry_id:
            raise BackupError(f"the registry in {self} has no id yet; start a server with it once")
        return ObjectBlobs(self.blobs_url, registry_id, is_target=is_target)


class _ChangedError(Exception):
    """A blob was removed while it was to be copied, because its programs were deleted meanwhile."""


Progress = Callable[[str], object]
"""Gets a short text about what is done now, up to ten times a second."""


def _show_nothing(_: str) -> None:
    pass


def check(data_dir: Path, url: str = "", blobs_url: str = "", *, progress: Progress = _show_nothing) -> Report:
    """Reads and checks everything in a registry, also while a server uses it.

    See `RegistryPlace`. Raises `BackupError` if there is no registry, or its object store cannot be read.
    """
    progress("checking the database")
    registry = RegistryPlace(data_dir, url, blobs_url)
    with _errors("the registry cannot be read"), tempfile.TemporaryDirectory(prefix="gradrule-check-") as made:
        file = data_dir / DATABASE_FILE
        if url:
            file = Path(made) / DATABASE_FILE
            _export(url, file)
        report = _check_file(file, data_dir)
        report.damaged_blobs = sum(1 for _ in (data_dir / BLOBS).rglob(f"{DAMAGED}*"))
        if report.problems and not report.registry_id:
            return report
        blobs = registry.open_blobs(report.registry_id)
        if isinstance(blobs, ObjectBlobs):
            _compare_index(blobs, registry, report)
        for path, pieces in _blobs_of(report, blobs, "checking", progress):
            try:
                for _ in pieces:
                    pass
            except MissingBlobError:
                report.missing.add(path)
            except DamagedBlobError as cause:
                report.problems.append(str(cause))
    return report


def _check_file(file: Path, data_dir: Path) -> Report:
    """Checks a database."""
    if not file.is_file():
        raise BackupError(f"there is no registry in {data_dir}: it has no {DATABASE_FILE}")
    report = Report()
    try:
        with contextlib.closing(open_file(file)) as database:
            _check_database(database, report)
    except sqlite3.Error as cause:
        report.problems.append(f"the database cannot be read: {cause}")
    return report


def _compare_index(blobs: ObjectBlobs, registry: RegistryPlace, report: Report) -> None:
    """Compares the objects with the index of a registry, which servers may change meanwhile."""
    before = _indexed(registry)
    blobs.refresh()
    after = _indexed(registry)
    report.unindexed = len(blobs.listed.keys() - before.keys() - after.keys())
    report.without_object = sum(before.get(key) == after[key] == STORED and key not in blobs.listed for key in after)


def _indexed(registry: RegistryPlace) -> dict[str, str]:
    """Returns the state of each object in the index."""
    if registry.url:
        with _postgres_errors(registry.url):
            from gradrule_server.registry.postgres_database import PostgresDatabase

            with (
                contextlib.closing(PostgresDatabase(registry.url, is_read_only=True)) as database,
                database.read() as connection,
            ):
                return object_states(connection)
    engine = create_engine("sqlite://", creator=lambda: open_file(registry.data_dir / DATABASE_FILE))
    try:
        with engine.connect() as connection:
            return object_states(connection)
    finally:
        engine.dispose()


def backup(
    data_dir: Path, to: Path, url: str = "", blobs_url: str = "", *, progress: Progress = _show_nothing
) -> Report:
    """Backs up a registry to a new folder, also while a server uses it; see `RegistryPlace`. Raises `BackupError`."""
    if to.exists():
        raise BackupError(f"{to} exists already; name a folder that does not exist")
    registry = RegistryPlace(data_dir, url, blobs_url)
    unfinished = to.with_name(f".{to.name}.unfinished")
    with _errors("the backup cannot be written"):
        to.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_ATTEMPTS):
            if unfinished.exists():
                shutil.rmtree(unfinished)
            unfinished.mkdir(mode=0o700)
            progress("copying the database")
            report = _copy_database(registry, unfinished / DATABASE_FILE)
            try:
                _copy_blobs(registry, FolderBlobs(unfinished / BLOBS), report, progress)
            except _ChangedError:
                continue
            manifest = {
                "format": _FORMAT,
                "schema_version": report.schema_version,
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "database_sha256": file_sha256(unfinished / DATABASE_FILE),
                "missing": sorted(report.missing),
            }
            (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
            sync_to_disk(unfinished / MANIFEST)
            sync_to_disk(unfinished)
            unfinished.rename(to)
            sync_to_disk(to.parent)
            return report
    raise _changed(registry)


def restore(
    folder: Path, data_dir: Path, url: str = "", blobs_url: str = "", *, progress: Progress = _show_nothing
) -> Report:
    """Restores a backup, and migrates it; see `RegistryPlace`. Raises `BackupError`.

    There must be no database in the data folder, or no rule and no program in the database in PostgreSQL. The registry
    keeps its id, so an object store must be its own, or new; servers enter the objects into their index.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError) as cause:
        raise BackupError(f"{folder} is no backup: its {MANIFEST} cannot be read: {cause}") from cause
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise BackupError(f"{folder} was created by a release whose backups this release cannot read")
    database_file = folder / DATABASE_FILE
    if not database_file.is_file() or manifest.get("database_sha256") != file_sha256(database_file):
        raise BackupError(f"{folder} is damaged: the SHA-256 of its {DATABASE_FILE} differs from {MANIFEST}")
    leftovers = find_logs(folder / DATABASE_FILE)
    if leftovers:
        raise BackupError(
            f"{folder} was changed after the backup: SQLite would apply {_names(leftovers)} to the restored database"
        )
    report = check(folder, progress=progress)
    # Accept missing blobs that were missing when the backup was made.
    lost = report.missing - set(manifest.get("missing", ()))
    if report.problems or lost:
        problems = [*report.problems, *(f"the blob {path} is missing" for path in sorted(lost))]
        raise BackupError(f"{folder} is damaged: {'; '.join(problems)}")
    target = RegistryPlace(data_dir, url, blobs_url)
    _install(folder / DATABASE_FILE, report, RegistryPlace(folder), target, progress)
    return report


def copy_registry(source: RegistryPlace, target: RegistryPlace, *, progress: Progress = _show_nothing) -> Report:
    """Copies a registry with its blobs to an empty one, and verifies the copy; see `restore`. Raises `BackupError`."""
    for _ in range(_ATTEMPTS):
        with tempfile.TemporaryDirectory(prefix="gradrule-copy-") as made:
            file = Path(made) / DATABASE_FILE
            progress("reading the database")
            with _errors("the copy cannot be written"):
                report = _copy_database(source, file)
            try:
                _install(file, report, source, target, progress)
            except _ChangedError:
                continue
            progress("comparing the copy with the registry")
            copied = target.data_dir / DATABASE_FILE
            if target.url:
                copied = Path(made) / "copied"
                _export(target.url, copied)
            with _migrated(file, Path(made)) as database:
                if content_digest(copied) != content_digest(database):
                    raise BackupError(
                        "the copy differs from the registry, because a server has changed it already; compare them, or "
                        "copy again to an empty one"
                    )
        return report
    raise _changed(source)


def _install(file: Path, report: Report, source: RegistryPlace, target: RegistryPlace, progress: Progress) -> None:
    """Copies the blobs of `source`, and then a database of any version, to an empty registry.

    `source`: Where the blobs are.

    Raises:
        _ChangedError: See `_copy_blobs`; there is no registry yet.
    """
    data_dir = target.data_dir
    with _errors(f"{target} cannot be written"):
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(data_dir), _migrated(file, data_dir) as database:
            if target.url:
                _prepare(target.url)
            else:
                _check_empty(data_dir)
            with contextlib.closing(open_file(database)) as opened:
                registry_id = _meta(opened, "registry_id")
            blobs = target.open_blobs(registry_id, is_target=True)
            blobs.refresh()
            _copy_blobs(source, blobs, report, progress)
            progress("writing the database")
            if target.url:
                report.left_out = _import(database, target.url)
                return
            # Remove the marker, which may belong to another registry; the server creates it again.
            (data_dir / MARKER).unlink(missing_ok=True)
            # Copy the database last: a folder without a database is not a registry.
            copy_database(database, data_dir / DATABASE_FILE)


def _export(url: str, file: Path) -> None:
    with _postgres_errors(url):
        from gradrule_server.registry.postgres_copy import export_registry

        export_registry(url, file)


def _import(file: Path, url: str) -> list[str]:
    with _postgres_errors(url):
        from gradrule_server.registry.postgres_copy import import_registry

        return import_registry(file, url)


def _prepare(url: str) -> None:
    with _postgres_errors(url):
        from gradrule_server.registry.postgres_copy import prepare_import

        prepare_import(url)


def create_empty_postgres_registry(url: str) -> str:
    """Creates an empty registry in PostgreSQL; returns the schema that holds the old tables. Raises `BackupError`."""
    with _postgres_errors(url):
        from gradrule_server.registry.postgres_copy import new_registry

        return new_registry(url)


@contextlib.contextmanager
def _postgres_errors(url: str) -> Iterator[None]:
    """Raises `BackupError` in place of errors of a database in PostgreSQL."""
    try:
        # For its error if the driver is not installed.
        import_postgres()
        yield
    except (StoreError, GradruleError) as cause:
        message = cause.message if isinstance(cause, GradruleError) else str(cause)
        raise BackupError(message if describe_url(url) in message else f"{describe_url(url)}: {message}") from cause
    except SQLAlchemyError as cause:
        raise BackupError(f"the copy of {describe_url(url)} cannot be written: {type(cause).__name__}") from cause


def create_empty_registry(data_dir: Path) -> list[Path]:
    """Creates an empty registry; renames the files of an existing database and returns their new paths.

    Blobs stay, because they are found by their hashes. Raises `BackupError`.
    """
    database = data_dir / DATABASE_FILE
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(data_dir):
            now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
            renamed = add_suffix([*find_logs(database), database, data_dir / MARKER], f".until-{now}")
        Store(data_dir, is_new=True).close()
    except (OSError, StoreError) as cause:
        raise BackupError(f"{data_dir} cannot be written: {cause}") from cause
    return renamed


def _check_empty(data_dir: Path) -> None:
    """Raises `BackupError` if a data folder holds a database, or logs that SQLite would apply to a new database."""
    database = data_dir / DATABASE_FILE
    if database.exists() and database.stat().st_size:
        raise BackupError(f"{data_dir} has a registry already; move its {DATABASE_FILE}* files and {BLOBS} away")
    leftovers = find_logs(data_dir / DATABASE_FILE)
    if leftovers:
        raise BackupError(
            f"{data_dir} has no {DATABASE_FILE}, but {_names(leftovers)} of an earlier one, which SQLite would apply "
            f"to the new database; move {'it' if len(leftovers) == 1 else 'them'} away"
        )


@contextlib.contextmanager
def _migrated(database: Path, folder: Path) -> Iterator[Path]:
    """Returns the path of a database of the current version: the database itself, or a migrated temporary copy."""
    with contextlib.closing(open_file(database)) as opened:
        if _meta(opened, "schema_version") == str(SCHEMA_VERSION):
            yield database
            return
    with tempfile.TemporaryDirectory(prefix=".restore-", dir=folder) as made:
        copy_database(database, Path(made) / DATABASE_FILE)
        Store(Path(made)).close()
        yield Path(made) / DATABASE_FILE


def _copy_database(registry: RegistryPlace, to: Path) -> Report:
    """Copies the database of a registry, without derived tables, and checks the copy."""
    if registry.url:
        _export(registry.url, to)
    else:
        if not (registry.data_dir / DATABASE_FILE).is_file():
            raise BackupError(f"there is no registry in {registry.data_dir}: it has no {DATABASE_FILE}")
        try:
            copy_database(registry.data_dir / DATABASE_FILE, to)
            with contextlib.closing(open_file(to)) as database:
                # Servers fill the index of an object store again, from the objects of the store that they use.
                drop_index(database)
        except sqlite3.Error as cause:
            raise BackupError(f"the database in {registry.data_dir} cannot be read: {cause}") from cause
    report = _check_file(to, registry.data_dir)
    if report.problems:
        raise BackupError(f"the registry in {registry} is damaged: {'; '.join(report.problems)}")
    return report


def _blobs_of(report: Report, blobs: BlobPlace, what: str, progress: Progress) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yields path and content of each blob in a report, and shows the progress. `what`: what is done with them."""
    number, done_bytes, shown_at = 0, 0, 0.0

    def pieces(path: str) -> Iterator[bytes]:
        nonlocal done_bytes
        for piece in checked(path, blobs.pieces(path)):
            yield piece
            done_bytes += len(piece)
            show()

    def show() -> None:
        nonlocal shown_at
        if (now := time.monotonic()) - shown_at >= _SHOW_EVERY_S:
            shown_at = now
            progress(f"{what} blob {number} of {len(report.blobs)}, {done_bytes / 1e6:.0f} MB done")

    for path in sorted(report.blobs):
        number += 1
        show()
        yield path, pieces(path)


def _copy_blobs(source: RegistryPlace, to: BlobPlace, report: Report, progress: Progress) -> None:
    """Copies the blobs that the programs in a report need, and adds the missing ones to the report.

    Raises:
        _ChangedError: Some are missing because their programs were deleted after the database was copied.
    """
    blobs = source.open_blobs(report.registry_id)
    blobs.refresh()
    missing = set()
    for path, pieces in _blobs_of(report, blobs, "copying", progress):
        try:
            to.put(path, pieces)
        except MissingBlobError:
            missing.add(path)
        except DamagedBlobError as cause:
            raise BackupError(f"{cause}; remove it, and clients will upload it again") from cause
    if missing:
        with tempfile.TemporaryDirectory(prefix="gradrule-check-") as made:
            if not missing <= _copy_database(source, Path(made) / DATABASE_FILE).blobs:
                raise _ChangedError
    report.missing = missing


def _check_database(database: sqlite3.Connection, report: Report) -> None:
    for (text,) in database.execute("PRAGMA integrity_check(5)"):
        if text != "ok":
            report.problems.append(f"the database is damaged: {text}")
    if report.problems:
        return
    for table, *_ in database.execute("PRAGMA foreign_key_check"):
        report.problems.append(f"a row of {table} refers to a missing row")
    report.registry_id = _meta(database, "registry_id")
    version = _meta(database, "schema_version")
    if not add_current_views(database, version):
        report.problems.append(
            f"the schema version is {version or 'unknown'}, which this release cannot read; use the release that "
            "wrote it"
        )
        return
    report.schema_version = int(version)
    for tenant, digest, content in database.execute("SELECT tenant, digest, content FROM blobs"):
        if not isinstance(content, bytes) or hashlib.sha256(content).hexdigest() != digest:
            query = "SELECT id FROM programs WHERE tenant = ? AND graph_digest = ?"
            used = ", ".join(repr(program_id) for (program_id,) in database.execute(query, (tenant, digest)))
            report.problems.append(
                f"the graph {digest} is damaged; delete the programs {used} of tenant {tenant!r}, which use it"
            )
    for tenant, *row in database.execute("SELECT tenant, name, definition, description, create_time_us FROM rules"):
        report.tenants.add(tenant)
        report.rules += 1
        try:
            read_rule(RuleRow(*row))
        except UnreadableRowError as cause:
            report.unreadable.append(f"the rule {row[0]!r} of tenant {tenant!r} cannot be read: {cause}")
    for tenant, program_id, spec, summary in database.execute("SELECT tenant, id, spec, summary FROM programs"):
        report.tenants.add(tenant)
        report.programs += 1
        try:
            read_summary(summary)
            needed = variable_blobs(read_spec(tenant, program_id, spec))
            # Names become paths.
            if not all(BLOB_NAME.fullmatch(name) for name in needed):
                raise UnreadableRowError("it names a blob that is no SHA-256")
        except UnreadableRowError as cause:
            report.unreadable.append(f"the program {program_id!r} of tenant {tenant!r} cannot be read: {cause}")
        else:
            folder = folder_name(tenant)
            report.blobs.update(f"{folder}/{name}" if folder else name for name in needed)


def _meta(database: sqlite3.Connection, key: str) -> str:
    """Returns a value of the table `meta`; empty if there is none."""
    row = database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return row[0] if row else ""


def _names(paths: Sequence[Path]) -> str:
    return " and ".join(path.name for path in paths)


def _changed(registry: RegistryPlace) -> BackupError:
    return BackupError(f"programs were created and deleted in {registry} during each attempt; try again")


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    """Raises `BackupError` in place of errors of files and object stores. `what`: what failed where a file did."""
    try:
        yield
    except (StoreError, ObjectStoreError) as cause:
        raise BackupError(str(cause)) from cause
    except (OSError, sqlite3.Error) as cause:
        raise BackupError(f"{what}: {cause}") from cause


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    try:
        lock = FolderLock(data_dir)
    except FolderInUseError as held:
        raise BackupError(str(held)) from held
    try:
        yield
    finally:
        lock.release()
