"""Tests registries whose files are missing, empty, exchanged or changed, and full disks."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.registry.backup import RegistryPlace, backup, check, restore
from gradrule_server.registry.data_folder import MARKER, RESERVE, StoreError
from gradrule_server.registry.store import RuleRow, Store
from tests.unit.registry.version_2 import DEFINITION

RULE = DEFINITION.SerializeToString()


def rule(name: str, size: int = 0) -> RuleRow:
    return RuleRow(name, RULE, "d" * size, 1)


def names(folder: Path) -> list[str]:
    store = Store(folder)
    found = [row.name for row in store.rules()]
    store.close()
    return found


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder whose registry has one rule."""
    store = Store(tmp_path / "data")
    store.add_rule(rule("Kept"))
    store.close()
    return tmp_path / "data"


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(b"")], ids=["removed", "emptied"])
def test_lost_database_is_not_replaced_by_an_empty_one(kept: Path, change: Callable[[Path], object]) -> None:
    change(kept / "gradrule.db")
    with pytest.raises(
        StoreError, match=r"gradrule\.db is (missing|empty), but gradrule\.registry .*remove gradrule\.registry"
    ) as lost:
        Store(kept)
    assert "\n" not in str(lost.value)
    (kept / MARKER).unlink()
    (kept / "gradrule.db").unlink(missing_ok=True)
    assert names(kept) == []


def test_lost_log_that_held_all_tables_is_detected(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from gradrule_server.registry.store import *\n"
        "store = Store(Path(sys.argv[1])); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    (tmp_path / "gradrule.db-wal").unlink()
    with pytest.raises(StoreError, match=r"gradrule\.db is empty, but"):
        Store(tmp_path)


def test_backup_can_be_restored_where_the_database_was_lost(kept: Path, tmp_path: Path) -> None:
    backup(RegistryPlace(kept), tmp_path / "copy")
    (kept / "gradrule.db").write_bytes(b"")
    restore(tmp_path / "copy", RegistryPlace(kept))
    assert names(kept) == ["Kept"]
    assert "1 rule and" in str(check(RegistryPlace(kept)))


def test_registry_of_an_older_release_gets_an_id_and_a_marker(kept: Path) -> None:
    with sqlite3.connect(kept / "gradrule.db") as database:
        database.execute("DELETE FROM meta WHERE key = 'registry_id'")
    database.close()
    (kept / MARKER).unlink()
    store = Store(kept)
    assert store.registry_id()
    store.close()
    (kept / "gradrule.db").unlink()
    with pytest.raises(StoreError, match="is missing"):
        Store(kept)


def test_second_server_is_refused_after_the_lock_file_was_removed(kept: Path) -> None:
    store = Store(kept)
    with pytest.raises(StoreError, match=rf"in use by another server \(process {os.getpid()}\)"):
        Store(kept)
    (kept / "gradrule.lock").unlink()
    with pytest.raises(StoreError, match="in use by another server"):
        Store(kept)
    store.close()
    assert names(kept) == ["Kept"]


@pytest.mark.parametrize("name", ["gradrule.db", "gradrule.db-wal", "gradrule.db-shm"])
@pytest.mark.parametrize("is_replaced", [False, True], ids=["removed", "replaced"])
def test_writes_to_a_removed_file_are_refused(
    kept: Path, caplog: pytest.LogCaptureFixture, name: str, is_replaced: bool
) -> None:
    store = Store(kept)
    store.add_rule(rule("Second"))
    store.database.check()
    assert not caplog.messages
    aside = kept / "aside"
    (kept / name).rename(aside)
    if is_replaced:
        shutil.copy(aside, kept / name)
    for call in (lambda: store.add_rule(rule("Third")), store.rules, lambda: store.remove_rule("Kept")):
        with pytest.raises(GradruleError) as refusal:
            call()
        assert refusal.value.reason == errors_pb2.ERROR_REASON_UNAVAILABLE
        # Callers are not told where the server keeps its files.
        assert str(kept) not in refusal.value.message
    since: list[float | None] = []
    for _ in range(3):
        store.database.check()
        since.append(store.database.away_since)
    assert since[0] is not None
    assert since == since[:1] * 3
    assert len(caplog.messages) == 1
    assert f"{kept / name} was {'replaced' if is_replaced else 'removed'}" in caplog.text
    aside.rename(kept / name)
    store.database.check()
    assert not store.database.away
    assert store.database.away_since is None
    store.add_rule(rule("Third"))
    store.close()
    assert names(kept) == ["Kept", "Second", "Third"]


def test_write_is_not_acknowledged_if_the_file_is_removed_meanwhile(kept: Path) -> None:
    store = Store(kept)
    with pytest.raises(GradruleError, match="was removed or replaced"), store.database.write():
        (kept / "gradrule.db").unlink()
    store.close()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size; skips where none can be mounted."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Takes all the room that is left."""
    with (folder / "ballast").open("ab", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return


def test_full_disk_refuses_changes_and_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "12m") as disk:
        store = Store(disk)
        names_before = [f"R{number:02}" for number in range(60)]
        for name in names_before:
            store.add_rule(rule(name, 8000))
        fill(disk)

        def add_more() -> None:
            for number in range(1000):
                store.add_rule(rule(f"S{number:03}", 8000))

        with pytest.raises(GradruleError, match=r"disk .* is full") as refusal:
            add_more()
        assert refusal.value.reason == errors_pb2.ERROR_REASON_QUOTA_EXCEEDED
        assert [row.name for row in store.rules()][:60] == names_before
        (disk / "ballast").unlink()
        store.remove_rule("R00")
        store.close()
        assert names(disk)[:59] == names_before[1:]


def test_deleting_works_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "12m") as disk:
        store = Store(disk)
        for number in range(60):
            store.add_rule(rule(f"R{number:02}", 8000))
        fill(disk)

        def add_more() -> None:
            for number in range(1000):
                store.add_rule(rule(f"S{number:03}", 8000))

        with pytest.raises(GradruleError, match=r"disk .* is full"):
            add_more()
        fill(disk)
        for number in range(60):
            store.remove_rule(f"R{number:02}")
        store.close()
        # Nor does it refuse a start.
        fill(disk)
        store = Store(disk)
        assert not [row for row in store.rules() if row.name.startswith("R")]
        store.close()


def test_start_after_a_kill_works_on_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "import os, sys; from pathlib import Path; from gradrule_server.registry.store import *\n"
        "store = Store(Path(sys.argv[1])); os._exit(0)"
    )
    with small_disk(tmp_path / "disk", "6m") as disk:
        subprocess.run([sys.executable, "-c", code, str(disk)], check=True)
        for name in ("gradrule.db-shm", "gradrule.lock"):
            (disk / name).unlink()
        fill(disk)
        store = Store(disk)
        store.close()
        assert "was used to open it" in caplog.text
        (disk / "ballast").unlink()
        Store(disk).close()
        assert (disk / RESERVE).stat().st_size == 4 << 20
