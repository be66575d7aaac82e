"""Tests what only SQLite databases have: files, locks, full disks, damaged pages, and migrations of older releases."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.registry.data_folder import StoreError
from gradrule_server.registry.sqlite_database import SqliteDatabase
from gradrule_server.registry.store import ProgramContent, ProgramRow, RuleRow, Store, UnreadableRowError
from tests.unit.registry.rows import blob_count, content, counts, program, rule
from tests.unit.registry.version_2 import DEFINITION, version_2


@pytest.fixture
def registry_url() -> str:
    """Names SQLite, whatever `--registry-database` says."""
    return ""


def test_only_the_owner_can_access_folder_and_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "b" / "gradrule.db").stat().st_mode) == 0o600
    store.close()


def test_every_connection_is_durable_and_checks_foreign_keys(store: Store) -> None:
    with store.database.read() as first, store.database.read() as second:
        for connection in (first, second):
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1


def test_storing_a_graph_does_not_depend_on_other_tenants(store: Store) -> None:
    graph = b"graph" * 1_000_000

    def added(tenant: str) -> int:
        """Pages that keeping the program takes."""
        with store.database.read() as connection:
            before = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        store.add_program(program("p"), content(graph), tenant)
        with store.database.read() as connection:
            return int(connection.exec_driver_sql("PRAGMA page_count").scalar_one()) - before

    first, second = added("ada"), added("grace")
    assert abs(first - second) <= 2
    assert blob_count(store) == 2
    store.remove_program("p", "ada")
    assert blob_count(store) == 1
    assert store.program_content("p", "same", "ada") is None
    assert store.program_content("p", "same", "grace") == content(graph)


def test_full_disk_is_an_error_and_adds_nothing(tmp_path: Path) -> None:
    Store(tmp_path).close()
    store = Store(tmp_path)

    database = store.database
    assert isinstance(database, SqliteDatabase)

    @event.listens_for(database._engine, "connect")
    def bound(connection: sqlite3.Connection, _: object) -> None:
        # What a full disk is to SQLite: the file does not grow.
        connection.execute("PRAGMA max_page_count = 24")

    database._engine.dispose()
    with pytest.raises(GradruleError, match=r"disk .* is full") as refusal:
        store.add_program(program("p"), content(b"graph" * 100_000))
    assert refusal.value.reason == errors_pb2.ERROR_REASON_QUOTA_EXCEEDED
    with pytest.raises(GradruleError, match=r"disk .* is full"):
        store.add_rule(RuleRow("a", b"definition" * 100_000, "", 1))
    assert counts(store) == (0, 0)
    assert blob_count(store) == 0
    store.add_program(program("p"), content())
    store.close()


def test_second_server_on_same_folder_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(StoreError, match=rf"in use by another server \(process {os.getpid()}\)"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


def test_invalid_file_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "gradrule.db").write_bytes(b"this is no database" * 500)
    with pytest.raises(StoreError, match=r"damaged.*not a database.*move it away and restore a backup"):
        Store(tmp_path)
    (tmp_path / "gradrule.db").unlink()
    Store(tmp_path).close()


@pytest.mark.parametrize("name", ["gradrule.db-wal", "gradrule.db-shm", "gradrule.db-journal"])
def test_no_new_database_is_created_beside_the_log_of_a_lost_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        StoreError,
        match=rf"is missing, but its log {name} exists.*put gradrule\.db back, or move {name}",
    ):
        Store(tmp_path)
    assert not (tmp_path / "gradrule.db").exists()
    (tmp_path / name).unlink()
    Store(tmp_path).close()


def test_damaged_page_is_detected_at_the_start(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number in range(100):
        store.add_rule(rule(f"r{number}"))
    store.close()
    file = tmp_path / "gradrule.db"
    raw = bytearray(file.read_bytes())
    raw[4096 : len(raw)] = b"\xff" * (len(raw) - 4096)
    file.write_bytes(raw)
    with pytest.raises(StoreError, match="damaged"):
        Store(tmp_path)


def test_damaged_graph_affects_only_its_program(tmp_path: Path) -> None:
    store = Store(tmp_path)
    graphs = {"p": b"first graph" * 10_000, "q": b"other graph" * 10_000}
    for name, graph in graphs.items():
        store.add_program(program(name), content(graph))
    store.close()
    file = tmp_path / "gradrule.db"
    raw = file.read_bytes()
    middle = raw.index(b"first graph" * 10) + 50_000
    # The first bytes of a page lead to the next one.
    page = middle // 4096 * 4096
    file.write_bytes(raw[:page] + b"\xff" * 4096 + raw[page + 4096 :])
    store = Store(tmp_path)
    with pytest.raises(UnreadableRowError, match="its graph"):
        store.program_content("p", "same")
    assert store.program_content("q", "same") == content(graphs["q"])
    store.close()


def test_newer_schema_is_refused(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "gradrule.db") as connection:
        connection.execute("UPDATE meta SET value = '4' WHERE key = 'schema_version'")
    with pytest.raises(StoreError, match=r"version 4, and this release reads version 3; use the release that wrote it"):
        Store(tmp_path)


def test_database_of_another_program_is_refused_unchanged(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "gradrule.db") as connection:
        connection.execute("CREATE TABLE photographs (id INTEGER)")
    with pytest.raises(StoreError, match="database of another program"):
        Store(tmp_path)
    with sqlite3.connect(tmp_path / "gradrule.db") as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("photographs",)]


def test_error_names_an_unusable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/data cannot be used: Not a directory; give another --data-dir"):
        Store(tmp_path / "file" / "data")


def test_error_names_a_path_that_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "gradrule.db").mkdir()
    with pytest.raises(StoreError, match=r"gradrule\.db cannot be opened"):
        Store(tmp_path)


def schema(file: Path) -> list[str]:
    database = sqlite3.connect(file)
    found = [row[0] for row in database.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL ORDER BY name")]
    database.close()
    return [" ".join(text.replace("(", " ( ").replace(")", " ) ").replace(",", " , ").split()) for text in found]


def test_registry_of_the_second_schema_is_counted_and_loses_derived_tables(tmp_path: Path) -> None:
    file = version_2(tmp_path)
    store = Store(tmp_path)
    assert store.rules() == [RuleRow("Q", DEFINITION.SerializeToString(), "kept", 5)]
    assert store.program("p") == ProgramRow("p", "same", b"", 7)
    assert store.program_content("p", "same") == ProgramContent(b"spec", b"graph", b"")
    size = len(DEFINITION.SerializeToString()) + len(b"kept") + len(b"spec") + len(b"graph")
    assert store.total_usage().registry_bytes == size
    assert counts(store) == (1, 1)
    store.close()
    # The tables are those that a new store has.
    Store(tmp_path / "new").close()
    assert schema(file) == schema(tmp_path / "new" / "gradrule.db")
    assert (tmp_path / "gradrule.db.v2").exists()
    Store(tmp_path).close()


def test_what_was_there_before_is_kept_beside(tmp_path: Path) -> None:
    before = schema(version_2(tmp_path))
    Store(tmp_path).close()
    kept = tmp_path / "gradrule.db.v2"
    assert schema(kept) == before
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    database = sqlite3.connect(kept)
    assert database.execute("SELECT name FROM rules").fetchall() == [("Q",)]
    database.close()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_migration_that_fails_leaves_the_old_store(tmp_path: Path) -> None:
    file = version_2(tmp_path)
    database = sqlite3.connect(file)
    database.execute("CREATE VIEW changes AS SELECT 1")
    database.commit()
    database.close()
    before = schema(file)
    with pytest.raises(StoreError):
        Store(tmp_path)
    assert schema(file) == before
    database = sqlite3.connect(file)
    database.execute("DROP VIEW changes")
    database.commit()
    database.close()
    store = Store(tmp_path)
    assert counts(store) == (1, 1)
    store.close()


def test_a_disk_without_room_for_the_copy_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version_2(tmp_path)
    connect = sqlite3.connect

    def connect_where_the_disk_is_full(path: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(path, **options)
        # What a full disk is to SQLite: the file does not grow.
        connection.execute("PRAGMA max_page_count = 2")
        return connection

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", connect_where_the_disk_is_full)
        with pytest.raises(StoreError, match=r"cannot be opened: .*disk is full") as refusal:
            Store(tmp_path)
    assert "move it away" not in str(refusal.value)
    assert not list(tmp_path.glob("*.v2*"))
    store = Store(tmp_path)
    assert counts(store) == (1, 1)
    store.close()
