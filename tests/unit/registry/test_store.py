from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sqlalchemy import event

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.registry.data_folder import StoreError
from gradrule_server.registry.store import ProgramContent, ProgramRow, RuleRow, Store, UnreadableRowError, counted_size


def rule(name: str) -> RuleRow:
    return RuleRow(name, b"definition \x00 of " + name.encode(), "", 1_700_000_000_000_001)


def program(program_id: str, identity: str = "same") -> ProgramRow:
    return ProgramRow(program_id, identity, b"summary of " + program_id.encode(), 5)


def content(graph: bytes = b"graph") -> ProgramContent:
    return ProgramContent(b"spec", graph, b"snapshot")


def blob_count(store: Store) -> int:
    with sqlite3.connect(store.path) as connection:
        return int(connection.execute("SELECT count(*) FROM blobs").fetchone()[0])


def test_only_the_owner_can_access_folder_and_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    store.close()


def test_every_connection_is_durable_and_checks_foreign_keys(store: Store) -> None:
    with store._database.read() as first, store._database.read() as second:
        for connection in (first, second):
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1


def test_rows_survive_the_process(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_rule(rule("b"))
    store.add_rule(rule("a"))
    store.add_rule(rule("c"))
    store.remove_rule("c")
    store.add_program(program("p"), content())
    store.close()

    store = Store(tmp_path)
    assert store.rules() == [rule("a"), rule("b")]
    assert store.program("p") == program("p")
    assert store.program("q") is None
    assert store.program_content("p", "same") == content()
    assert store.program_content("p", "other") is None
    store.close()


def test_failed_write_leaves_nothing(store: Store) -> None:
    store.add_program(program("p"), content(b"one"))
    with pytest.raises(Exception, match="UNIQUE"):
        store.add_program(program("p"), content(b"two"))
    assert blob_count(store) == 1
    store.add_program(program("q"), content(b"two"))


def test_programs_share_a_graph_until_the_last_is_deleted(store: Store) -> None:
    store.add_program(program("p"), content())
    store.add_program(program("q"), content())
    assert blob_count(store) == 1
    store.remove_program("p")
    assert store.program_content("q", "same") == content()
    store.remove_program("q")
    assert blob_count(store) == 0


def test_storing_a_graph_does_not_depend_on_other_tenants(store: Store) -> None:
    graph = b"graph" * 1_000_000

    def added(tenant: str) -> int:
        """Pages that keeping the program takes."""
        with store._database.read() as connection:
            before = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        store.add_program(program("p"), content(graph), tenant)
        with store._database.read() as connection:
            return int(connection.exec_driver_sql("PRAGMA page_count").scalar_one()) - before

    first, second = added("ada"), added("grace")
    assert abs(first - second) <= 2
    assert blob_count(store) == 2
    store.remove_program("p", "ada")
    assert blob_count(store) == 1
    assert store.program_content("p", "same", "ada") is None
    assert store.program_content("p", "same", "grace") == content(graph)


def test_counted_bytes_match_added_and_freed_bytes(store: Store) -> None:
    told: list[int] = []
    kept = [("p", b"graph", "ada"), ("q", b"graph", "ada"), ("r", b"another", "ada"), ("p", b"graph", "grace")]
    for name, graph, tenant in kept:
        store.add_program(program(name), content(graph), tenant, before=told.append)
    row = len(b"summary of p" + b"spec" + b"snapshot")
    assert told == [row + 5, row, row + 7, row + 5]
    described = RuleRow("a", b"definition", "stra\N{LATIN SMALL LETTER SHARP S}e", 1)
    store.add_rule(described, "ada")
    assert counted_size(described) == 10 + 7
    assert store.kept_bytes("ada") == sum(told[:3]) + 17
    assert store.kept_bytes() == sum(told) + 17
    freed = [store.remove_program(name, tenant) for name, _, tenant in kept]
    assert freed == [row, row + 5, row + 7, row + 5]
    assert store.remove_program("p", "ada") == 0
    store.remove_rule("a", "ada")
    assert store.kept_bytes() == store.kept_bytes("ada") == 0


def test_full_disk_is_an_error_and_adds_nothing(tmp_path: Path) -> None:
    Store(tmp_path).close()
    store = Store(tmp_path)

    @event.listens_for(store._database._engine, "connect")
    def bound(connection: sqlite3.Connection, _: object) -> None:
        # What a full disk is to SQLite: the file does not grow.
        connection.execute("PRAGMA max_page_count = 20")

    store._database._engine.dispose()
    with pytest.raises(GradruleError, match=r"disk .* is full") as refusal:
        store.add_program(program("p"), content(b"graph" * 100_000))
    assert refusal.value.reason == errors_pb2.ERROR_REASON_QUOTA_EXCEEDED
    with pytest.raises(GradruleError, match=r"disk .* is full"):
        store.add_rule(RuleRow("a", b"definition" * 100_000, "", 1))
    assert store.counts() == (0, 0)
    assert blob_count(store) == 0
    store.add_program(program("p"), content())
    store.close()


def test_refused_program_is_not_added(store: Store) -> None:
    def refuse(_: int) -> None:
        raise ValueError("too much")

    with pytest.raises(ValueError, match="too much"):
        store.add_program(program("p"), content(), before=refuse)
    assert store.counts() == (0, 0)
    assert blob_count(store) == 0


def test_threads_write_and_read_at_the_same_time(store: Store) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for count in range(10):
                store.add_rule(rule(f"r{number}_{count}"))
                assert f"r{number}_{count}" in {row.name for row in store.rules()}
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(store.rules()) == 80


_CREATE_FOREVER = """
import itertools, os, sys
from pathlib import Path
from gradrule_server.registry.store import ProgramContent, ProgramRow, RuleRow, Store

store, start = Store(Path(sys.argv[1])), sys.argv[2]
for number in itertools.count():
    name = f"r{start}_{number}"
    store.add_rule(RuleRow(name, os.urandom(3000), "", number))
    content = ProgramContent(b"spec", name.encode() * 3000, b"snapshot")
    store.add_program(ProgramRow(name, name, b"summary", number), content)
    os.write(1, f"{name}\\n".encode())
"""


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    acknowledged: set[str] = set()
    for start, count in enumerate((1, 7, 20, 3, 12)):
        child = subprocess.Popen(
            [sys.executable, "-c", _CREATE_FOREVER, str(tmp_path), str(start)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(count):
            acknowledged.add(child.stdout.readline().strip())
        child.send_signal(signal.SIGKILL)
        acknowledged.update(line.strip() for line in child.stdout if line.endswith("\n"))
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL

        store = Store(tmp_path)
        rules = {row.name for row in store.rules()}
        programs = store.program_identities()
        # What was in flight may be there or not; what was acknowledged must.
        assert acknowledged <= rules
        assert acknowledged <= programs.keys()
        for name in acknowledged:
            kept = store.program_content(name, name)
            assert kept is not None
            assert kept.graph == name.encode() * 3000
        store.close()
    assert len(acknowledged) >= 43


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
        StoreError, match=rf"is missing, but its log {name} exists.*put gradrule\.db back.*gradrule registry new"
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


def test_changed_graph_is_detected_when_it_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_program(program("p"), content(b"graph"))
    with sqlite3.connect(store.path) as connection:
        connection.execute("UPDATE blobs SET content = ?", (b"grapf",))
    with pytest.raises(UnreadableRowError, match="its graph is damaged"):
        store.program_content("p", "same")
    store.close()


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
        connection.execute("UPDATE meta SET value = '3' WHERE key = 'schema_version'")
    with pytest.raises(StoreError, match=r"version 3, and this server reads version 2; start the server that wrote it"):
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
