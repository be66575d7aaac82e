"""Checks, backs up, restores and copies registries; a server may use a registry while it is checked or backed up.

A backup is a folder with a consistent copy of the database, the blobs that its programs need, and the manifest
`backup.json`. It is created atomically. The copy is an SQLite file also where the database is in PostgreSQL, so that a
backup of one can be restored to the other.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from gradrule_server.errors import GradruleError
from gradrule_server.registry.blob_index import UPLOADING
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
from gradrule_server.registry.programs import read_spec, read_summary, variable_blobs
from gradrule_server.registry.rule_entries import read_rule
from gradrule_server.registry.schema import SCHEMA_VERSION, add_current_views, copy_database
from gradrule_server.registry.sqlite_rows import content_digest, open_file
from gradrule_server.registry.store import RuleRow, Store, UnreadableRowError

MANIFEST = "backup.json"

_FORMAT = 1
_ATTEMPTS = 5
_CHUNK_BYTES = 1 << 20


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
    problems: list[str] = field(default_factory=list)
    """A sentence for each damaged part; a damaged registry is not backed up."""

    def __str__(self) -> str:
        return (
            f"{self.rules} rules and {self.programs} programs of {len(self.tenants)} tenants, which need "
            f"{len(self.blobs)} blobs"
        )


def check(data_dir: Path, url: str = "") -> Report:
    """Reads and checks everything in a registry, also while a server uses it. Raises `BackupError` if there is none.

    Args:
        data_dir: The data folder, with the blobs.
        url: URL of the database in PostgreSQL; empty: SQLite in the data folder.
    """
    if not url:
        return _check(data_dir / DATABASE_FILE, data_dir)
    with tempfile.TemporaryDirectory(prefix="gradrule-check-") as made:
        file = Path(made) / DATABASE_FILE
        _export(url, file)
        return _check(file, data_dir)


def _check(file: Path, data_dir: Path) -> Report:
    """Checks a database and the blobs of a data folder."""
    if not file.is_file():
        raise BackupError(f"there is no registry in {data_dir}: it has no {DATABASE_FILE}")
    report = Report()
    try:
        with contextlib.closing(open_file(file)) as database:
            _check_database(database, report)
    except sqlite3.Error as cause:
        report.problems.append(f"the database cannot be read: {cause}")
    report.damaged_blobs = sum(1 for _ in (data_dir / BLOBS).rglob(f"{DAMAGED}*"))
    for path in sorted(report.blobs):
        blob = data_dir / BLOBS / path
        if not blob.is_file():
            report.missing.add(path)
        elif file_sha256(blob) != blob.name:
            report.problems.append(f"the blob {path} is damaged: it does not have the SHA-256 in its name")
    return report


def backup(data_dir: Path, to: Path, url: str = "") -> Report:
    """Backs up a registry to a new folder, also while a server uses it; see `check`. Raises `BackupError`."""
    if to.exists():
        raise BackupError(f"{to} exists already; name a folder that does not exist")
    unfinished = to.with_name(f".{to.name}.unfinished")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        if unfinished.exists():
            shutil.rmtree(unfinished)
        for _ in range(_ATTEMPTS):
            report = _copy(data_dir, unfinished, url)
            if report is not None:
                unfinished.rename(to)
                sync_to_disk(to.parent)
                return report
            shutil.rmtree(unfinished)
    except OSError as cause:
        raise BackupError(f"the backup cannot be written: {cause}") from cause
    raise BackupError(f"programs were created and deleted in {data_dir} during each attempt; try again")


def restore(folder: Path, data_dir: Path, url: str = "") -> Report:
    """Restores a backup, and migrates it; see `check`. Raises `BackupError`.

    There must be no database in the data folder, or no rule and no program in the database in PostgreSQL.
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
    report = check(folder)
    # Accept missing blobs that were missing when the backup was made.
    lost = report.missing - set(manifest.get("missing", ()))
    if report.problems or lost:
        problems = [*report.problems, *(f"the blob {path} is missing" for path in sorted(lost))]
        raise BackupError(f"{folder} is damaged: {'; '.join(problems)}")
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(data_dir):
            if not url:
                _check_empty(data_dir)
            for path in sorted(report.blobs - report.missing):
                _copy_blob(folder / BLOBS / path, data_dir / BLOBS / path)
            with _migrated(folder / DATABASE_FILE, data_dir) as database:
                if url:
                    report.left_out = _import(database, url)
                    return report
                # Remove the marker, which may belong to another registry; the server creates it again.
                (data_dir / MARKER).unlink(missing_ok=True)
                # Copy the database last: a folder without a database is not a registry.
                copy_database(database, data_dir / DATABASE_FILE)
    except (OSError, sqlite3.Error, StoreError) as cause:
        raise BackupError(f"{data_dir} cannot be written: {cause}") from cause
    return report


def copy_registry(data_dir: Path, url: str, to_data_dir: Path, to_url: str) -> Report:
    """Copies a registry with its blobs to an empty one, and verifies the copy; see `check`. Raises `BackupError`."""
    with tempfile.TemporaryDirectory(prefix="gradrule-copy-") as made:
        folder = Path(made) / "copy"
        backup(data_dir, folder, url)
        report = restore(folder, to_data_dir, to_url)
        copied = to_data_dir / DATABASE_FILE
        if to_url:
            copied = Path(made) / "copied"
            _export(to_url, copied)
        with _migrated(folder / DATABASE_FILE, Path(made)) as database:
            if content_digest(copied) != content_digest(database):
                raise BackupError(
                    "the copy differs from the registry, because a server has changed it already; compare them, or "
                    "copy again to an empty one"
                )
    return report


def _export(url: str, file: Path) -> None:
    with _postgres_errors(url):
        from gradrule_server.registry.postgres_copy import export_registry

        export_registry(url, file)


def _import(file: Path, url: str) -> list[str]:
    with _postgres_errors(url):
        from gradrule_server.registry.postgres_copy import import_registry

        return import_registry(file, url)


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
        if _version(opened) == str(SCHEMA_VERSION):
            yield database
            return
    with tempfile.TemporaryDirectory(prefix=".restore-", dir=folder) as made:
        copy_database(database, Path(made) / DATABASE_FILE)
        Store(Path(made)).close()
        yield Path(made) / DATABASE_FILE


def _copy(data_dir: Path, to: Path, url: str) -> Report | None:
    """Copies a registry; returns None if a program's blob was removed meanwhile."""
    place = describe_url(url) if url else str(data_dir)
    if not url and not (data_dir / DATABASE_FILE).is_file():
        raise BackupError(f"there is no registry in {data_dir}: it has no {DATABASE_FILE}")
    # The data folder of a server with PostgreSQL has blobs of its own, and not all.
    missing_before = None if url else check(data_dir).missing
    to.mkdir(mode=0o700)
    if url:
        _export(url, to / DATABASE_FILE)
    else:
        try:
            copy_database(data_dir / DATABASE_FILE, to / DATABASE_FILE)
        except sqlite3.Error as cause:
            raise BackupError(f"the database in {data_dir} cannot be read: {cause}") from cause
    needed = check(to)
    if needed.problems:
        raise BackupError(f"the registry in {place} is damaged: {'; '.join(needed.problems)}")
    missing = set()
    for path in sorted(needed.blobs):
        try:
            _copy_blob(data_dir / BLOBS / path, to / BLOBS / path)
        except FileNotFoundError:
            missing.add(path)
    if missing_before is not None and not missing <= missing_before:
        return None
    manifest = {
        "format": _FORMAT,
        "schema_version": needed.schema_version,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "database_sha256": file_sha256(to / DATABASE_FILE),
        "missing": sorted(missing),
    }
    (to / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    sync_to_disk(to / MANIFEST)
    sync_to_disk(to)
    needed.missing = missing
    return needed


def _check_database(database: sqlite3.Connection, report: Report) -> None:
    for (text,) in database.execute("PRAGMA integrity_check(5)"):
        if text != "ok":
            report.problems.append(f"the database is damaged: {text}")
    if report.problems:
        return
    for table, *_ in database.execute("PRAGMA foreign_key_check"):
        report.problems.append(f"a row of {table} refers to a missing row")
    version = _version(database)
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
        except UnreadableRowError as cause:
            report.unreadable.append(f"the program {program_id!r} of tenant {tenant!r} cannot be read: {cause}")
        else:
            folder = folder_name(tenant)
            report.blobs.update(f"{folder}/{name}" if folder else name for name in needed)


def _version(database: sqlite3.Connection) -> str:
    """Returns the schema version; empty if there is none."""
    row = database.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    return row[0] if row else ""


def _names(paths: Sequence[Path]) -> str:
    return " and ".join(path.name for path in paths)


def _copy_blob(path: Path, to: Path) -> None:
    """Copies a blob and verifies its hash, which is its name. Raises `BackupError` if it differs."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = to.with_name(UPLOADING + to.name)
        with unfinished.open("wb") as copy:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                copy.write(chunk)
            copy.flush()
            os.fsync(copy.fileno())
    if digest.hexdigest() != to.name:
        unfinished.unlink()
        raise BackupError(f"the blob {path} is damaged; remove it, and clients will upload it again")
    unfinished.rename(to)
    sync_to_disk(to.parent)


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
