"""Tests backing up, restoring and checking registries."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradrule.v1 import program_pb2, rule_pb2, tensor_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.registry.backup import (
    BackupError,
    RegistryPlace,
    _Entry,
    _with_digest,
    _write_member,
    backup,
    check,
    copy_registry,
    restore,
)
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.object_store import MARKER
from gradrule_server.registry.programs import ProgramRegistry
from gradrule_server.registry.rules import RuleRegistry
from gradrule_server.registry.schema import copy_database
from gradrule_server.registry.store import DEFAULT_TENANT, ProgramContent, ProgramRow, RuleRow, Store
from gradrule_server.rules import RuleContent
from tests.stores import folder_url, open_blobs
from tests.unit.registry.test_blobs import damage, name_of, put
from tests.unit.registry.test_shared_blobs import content, create
from tests.unit.registry.version_2 import version_2

DEFINITION = rule_pb2.RuleDefinition(expression="3 * dy").SerializeToString()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def store(data: Path) -> Iterator[Store]:
    """Two tenants; a program of one needs a blob."""
    opened = Store(data)
    blobs = BlobStore(data / "blobs", 1 << 20)
    opened.add_rule(RuleRow("Q", DEFINITION, "", 1))
    opened.add_rule(RuleRow("Q", DEFINITION, "", 1), "ada")
    spec = program_pb2.ProgramSpec()
    name = put(blobs.for_tenant("ada"), b"weights")
    put(blobs.for_tenant("ada"), b"nobody's")
    spec.variables.add(name="w", value={"blob": tensor_pb2.BlobTensor(sha256=name)})
    content = ProgramContent(spec.SerializeToString(), b"graph", b"")
    opened.add_program(ProgramRow("p", "same", b"", 5), content, "ada")
    yield opened
    opened.close()


def test_backup_can_be_restored(store: Store, data: Path, tmp_path: Path) -> None:
    report = backup(RegistryPlace(data), tmp_path / "copy")
    assert (report.rules, report.programs, report.tenants, len(report.blobs)) == (2, 1, {"default", "ada"}, 1)
    assert not report.missing
    # What no program needs is no part of it.
    assert [name for name in members(tmp_path / "copy") if name.startswith("blobs")] == [
        f"blobs/ada/{hashlib.sha256(b'weights').hexdigest()}"
    ]
    store.add_rule(RuleRow("later", DEFINITION, "", 1))

    restore(tmp_path / "copy", RegistryPlace(tmp_path / "again"))
    again = Store(tmp_path / "again")
    assert [row.name for row in again.rules()] == ["Q"]
    content = again.program_content("p", "same", "ada")
    assert content is not None
    assert content.graph == b"graph"
    blobs = BlobStore(tmp_path / "again" / "blobs", 1 << 20)
    assert blobs.for_tenant("ada").read(hashlib.sha256(b"weights").hexdigest()) == b"weights"
    again.close()
    assert not check(RegistryPlace(tmp_path / "again")).problems


def members(archive: Path) -> dict[str, bytes]:
    """Returns the members of a backup."""
    with tarfile.open(archive) as opened:
        return {name: opened.extractfile(name).read() for name in opened.getnames()}  # type: ignore[union-attr]


def test_backup_holds_the_messages_of_the_service(store: Store, data: Path, tmp_path: Path) -> None:
    backup(RegistryPlace(data), tmp_path / "copy")
    found = members(tmp_path / "copy")
    rule = rule_pb2.Rule.FromString(found["rules/ada/Q"])
    assert (rule.name, rule.definition.expression, rule.create_time.ToMicroseconds()) == ("Q", "3 * dy", 1)
    spec = program_pb2.ProgramSpec.FromString(found["programs/ada/p/spec"])
    graph = hashlib.sha256(b"graph").hexdigest()
    assert (spec.graph.blob_sha256, found[f"graphs/ada/{graph}"]) == (graph, b"graph")
    assert spec.variables[0].value.blob.sha256 == hashlib.sha256(b"weights").hexdigest()
    assert list(found)[-1] == "sha256"


LEFTOVERS = ("gradrule.db-wal", "gradrule.db-shm", "gradrule.db-journal")

_KILLED = """
import os, signal, sys
from pathlib import Path
from gradrule_server.registry.store import RuleRow, Store

store = Store(Path(sys.argv[1]))
for name in ("old", "older"):
    store.add_rule(RuleRow(name, b"", "", 1))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_report_has_the_right_plurals(store: Store, data: Path) -> None:
    assert str(check(RegistryPlace(data))) == "2 rules and 1 program of 2 tenants, with 1 blob"
    store.remove_rule("Q")
    assert str(check(RegistryPlace(data))) == "1 rule and 1 program of 1 tenant, with 1 blob"


def test_log_of_a_killed_server_does_not_change_a_restored_registry(store: Store, data: Path, tmp_path: Path) -> None:
    backup(RegistryPlace(data), tmp_path / "copy")
    again = tmp_path / "again"
    child = subprocess.run([sys.executable, "-c", _KILLED, str(again)], check=False)
    assert child.returncode == -signal.SIGKILL
    (again / "gradrule.db").rename(tmp_path / "moved away.db")
    left = {path.name for path in again.glob("gradrule.db*")}
    assert left == {"gradrule.db-wal", "gradrule.db-shm"}
    with pytest.raises(BackupError, match=r"gradrule\.db-wal and gradrule\.db-shm of an earlier one.*move them away"):
        restore(tmp_path / "copy", RegistryPlace(again))
    assert {path.name for path in again.glob("gradrule.db*")} == left
    for name in left:
        (again / name).rename(tmp_path / f"moved away.db{name.removeprefix('gradrule.db')}")
    restore(tmp_path / "copy", RegistryPlace(again))
    with contextlib.closing(Store(again)) as opened:
        assert [row.name for row in opened.rules()] == ["Q"]


@pytest.mark.parametrize("name", LEFTOVERS)
def test_restore_beside_a_log_is_refused(store: Store, data: Path, tmp_path: Path, name: str) -> None:
    backup(RegistryPlace(data), tmp_path / "copy")
    again = tmp_path / "again"
    again.mkdir()
    (again / name).write_bytes(b"")
    with pytest.raises(BackupError, match=f"{name} of an earlier one"):
        restore(tmp_path / "copy", RegistryPlace(again))
    (again / name).unlink()
    restore(tmp_path / "copy", RegistryPlace(again))


def test_backup_of_a_used_registry_is_consistent(store: Store, data: Path, tmp_path: Path) -> None:
    stop, written = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        for number in range(10_000):
            if stop.is_set():
                return
            # Both or none may be in a copy: the second is written after the first.
            store.add_rule(RuleRow(f"a{number}", DEFINITION, "", 1))
            store.add_rule(RuleRow(f"b{number}", DEFINITION, "", 1))
            written.release()

    writer = threading.Thread(target=work)
    writer.start()
    try:
        for number in range(3):
            assert all(written.acquire(timeout=30) for _ in range(10))
            report = backup(RegistryPlace(data), tmp_path / f"copy{number}")
            assert not report.problems
            restore(tmp_path / f"copy{number}", RegistryPlace(tmp_path / f"again{number}"))
            again = Store(tmp_path / f"again{number}")
            names = {row.name for row in again.rules()}
            firsts = sum(name.startswith("a") for name in names)
            seconds = sum(name.startswith("b") for name in names)
            assert firsts - seconds in (0, 1)
            # What was written before is in it.
            assert seconds >= 10 * (number + 1)
            again.close()
    finally:
        stop.set()
        writer.join()


def test_backup_and_restore_overwrite_nothing(store: Store, data: Path, tmp_path: Path) -> None:
    backup(RegistryPlace(data), tmp_path / "copy")
    with pytest.raises(BackupError, match="exists already"):
        backup(RegistryPlace(data), tmp_path / "copy")
    with pytest.raises(BackupError, match="in use by another server"):
        restore(tmp_path / "copy", RegistryPlace(data))
    store.close()
    with pytest.raises(BackupError, match="has a registry already"):
        restore(tmp_path / "copy", RegistryPlace(data))
    Store(data)


def test_damaged_backup_is_not_restored(store: Store, data: Path, tmp_path: Path) -> None:
    copy, to = tmp_path / "copy", tmp_path / "to"
    backup(RegistryPlace(data), copy)
    whole = copy.read_bytes()
    for part in (b"3 * dy", b"graph", b"weights", b"rules/ada/Q"):
        start = whole.rindex(part)
        copy.write_bytes(whole[:start] + bytes([whole[start] ^ 1]) + whole[start + 1 :])
        with pytest.raises(BackupError, match=r"is damaged|is no backup|cannot be written"):
            restore(copy, RegistryPlace(to))
        assert not (to / "gradrule.db").exists()
    for size in (0, 100, 512, len(whole) // 2, whole.rindex(b"sha256") - 512):
        copy.write_bytes(whole[:size])
        with pytest.raises(BackupError, match=r"is damaged|is no backup|cannot be written"):
            restore(copy, RegistryPlace(to))
        assert not (to / "gradrule.db").exists()
    with pytest.raises(BackupError, match="No such file"):
        restore(tmp_path / "nowhere", RegistryPlace(to))
    copy.write_bytes(whole)
    restore(copy, RegistryPlace(to))


@pytest.mark.parametrize(
    "member",
    [
        (f"blobs/ada/{'0' * 64}", b"other"),
        ("blobs/ada/..%2F..%2Fx", b"outside"),
        ("rules/ada/Q", b"\xff"),
        ("rules", b""),
        ("programs/ada/p/program", b""),
    ],
)
@pytest.mark.parametrize("has_objects", [False, True])
def test_archive_with_other_members_is_refused(tmp_path: Path, member: tuple[str, bytes], *, has_objects: bool) -> None:
    entries = [_Entry(name, len(data), (data,)) for name, data in (("registry", b"id"), member)]
    with tarfile.open(tmp_path / "copy", "w") as archive:
        for entry in _with_digest(entries):
            _write_member(archive, entry)
    to = RegistryPlace(tmp_path / "to", "", folder_url(tmp_path) if has_objects else "")
    with pytest.raises(BackupError):
        restore(tmp_path / "copy", to)
    assert not (tmp_path / "to" / "gradrule.db").exists()
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {"copy", "gradrule.lock", MARKER}


def test_backup_of_an_older_release_is_restored(store: Store, data: Path, tmp_path: Path) -> None:
    """It was a folder with a copy of the database, the blobs that programs need, and a manifest."""
    old = tmp_path / "old"
    old.mkdir()
    copy_database(data / "gradrule.db", old / "gradrule.db")
    shutil.copytree(data / "blobs", old / "blobs")
    (old / "backup.json").write_text('{"format": 1, "schema_version": 2}')
    before = sorted(path.name for path in old.iterdir())
    assert str(restore(old, RegistryPlace(tmp_path / "again"))) == str(check(RegistryPlace(data)))
    assert check(RegistryPlace(tmp_path / "again")).problems == []
    # It is only read.
    assert sorted(path.name for path in old.iterdir()) == before


def test_missing_blob_is_reported_and_does_not_prevent_a_backup(store: Store, data: Path, tmp_path: Path) -> None:
    next(path for path in (data / "blobs").rglob("*") if path.is_file() and path.read_bytes() == b"weights").unlink()
    assert len(backup(RegistryPlace(data), tmp_path / "copy").missing) == 1
    restore(tmp_path / "copy", RegistryPlace(tmp_path / "again"))
    assert len(check(RegistryPlace(tmp_path / "again")).missing) == 1


def test_check_reports_all_problems(store: Store, data: Path) -> None:
    assert not check(RegistryPlace(data)).problems
    store.add_rule(RuleRow("broken", b"\xff\xff", "", 1), "ada")
    for path in (data / "blobs").rglob("*"):
        if path.is_file() and path.read_bytes() == b"weights":
            path.write_bytes(b"changed")
    report = check(RegistryPlace(data))
    assert len(report.problems) == len(report.unreadable) == 1
    assert "'broken' of tenant 'ada'" in report.unreadable[0]
    damaged = next(path for path in (data / "blobs").rglob("*") if path.is_file() and path.read_bytes() == b"changed")
    ada = BlobStore(data / "blobs", 1 << 20).for_tenant("ada")
    assert ada.folder == damaged.parent
    with pytest.raises(GradruleError):
        ada.verify([damaged.name])
    assert (check(RegistryPlace(data)).damaged_blobs, len(check(RegistryPlace(data)).missing)) == (1, 1)
    with pytest.raises(BackupError, match="there is no registry"):
        check(RegistryPlace(data / "nowhere"))


def test_check_accepts_what_the_server_opens(store: Store, data: Path, tmp_path: Path) -> None:
    # Kept before the language got a function of that name.
    definition = rule_pb2.RuleDefinition(expression="dy * exp")
    definition.params.add(name="exp").default_value.number = 2
    with pytest.raises(GradruleError):
        RuleContent.from_definition(definition)
    store.add_rule(RuleRow("R", definition.SerializeToString(), "", 1))
    assert RuleRegistry(store, ["Sign"]).get("R").message.formula == "dy * exp"
    for report in (
        check(RegistryPlace(data)),
        backup(RegistryPlace(data), tmp_path / "copy"),
        restore(tmp_path / "copy", RegistryPlace(tmp_path / "again")),
    ):
        assert (report.rules, report.unreadable, report.problems) == (3, [], [])


def test_unreadable_rows_are_reported_and_left_out(store: Store, data: Path, tmp_path: Path) -> None:
    store.add_rule(RuleRow("later", rule_pb2.RuleDefinition(expression="dy ** ** x").SerializeToString(), "", 1))
    content = ProgramContent(b"\xff\xff", b"graph", b"")
    store.add_program(ProgramRow("q", "same", b"", 5), content)
    for report in (check(RegistryPlace(data)), backup(RegistryPlace(data), tmp_path / "copy")):
        assert [sentence[:18] for sentence in report.unreadable] == ["the rule 'later' o", "the program 'q' of"]
    restore(tmp_path / "copy", RegistryPlace(tmp_path / "again"))
    with contextlib.closing(Store(tmp_path / "again")) as again:
        assert [row.name for row in again.rules()] == ["Q"]
        assert again.program_keys(DEFAULT_TENANT) == []


def test_names_of_blobs_that_are_paths_are_refused(store: Store, data: Path, tmp_path: Path) -> None:
    spec = program_pb2.ProgramSpec()
    spec.variables.add(name="w", value={"blob": tensor_pb2.BlobTensor(sha256="../../other")})
    store.add_program(ProgramRow("q", "same", b"", 5), ProgramContent(spec.SerializeToString(), b"graph", b""))
    (tmp_path / "other").write_bytes(b"of another program")
    report = backup(RegistryPlace(data), tmp_path / "copy")
    assert (len(report.blobs), report.missing) == (1, set())
    assert report.unreadable == [
        "the program 'q' of tenant 'default' cannot be read: it names a blob that is no SHA-256"
    ]


def test_registry_of_schema_2_is_copied_unchanged_and_migrated_by_restore(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    spec = program_pb2.ProgramSpec()
    spec.variables.add(name="w", value={"blob": tensor_pb2.BlobTensor(sha256=name_of(b"weights"))})
    file = version_2(data, spec.SerializeToString())
    name = put(BlobStore(data / "blobs", 1 << 20), b"weights")
    before = file.read_bytes()
    assert not check(RegistryPlace(data)).problems
    report = backup(RegistryPlace(data), tmp_path / "copy")
    assert (report.rules, report.programs, report.tenants, report.blobs) == (1, 1, {"default"}, {("default", name)})
    assert file.read_bytes() == before

    restore(tmp_path / "copy", RegistryPlace(tmp_path / "again"))
    assert sorted(path.name for path in (tmp_path / "again").iterdir() if not path.name.endswith("lock")) == [
        "blobs",
        "gradrule.db",
    ]
    with contextlib.closing(sqlite3.connect(tmp_path / "again" / "gradrule.db")) as database:
        version = database.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    assert version == ("3",)
    with contextlib.closing(Store(tmp_path / "again")) as again:
        assert [row.name for row in again.rules()] == ["Q"]
        kept = again.program_content("p", "same")
        assert kept is not None
        assert (kept.graph, kept.spec) == (b"graph", spec.SerializeToString())


def test_registry_of_a_later_schema_is_not_copied(store: Store, data: Path, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(data / "gradrule.db")) as database:
        database.execute("UPDATE meta SET value = '4' WHERE key = 'schema_version'")
        database.commit()
    with pytest.raises(BackupError, match="schema version 4, and this release reads version 3"):
        backup(RegistryPlace(data), tmp_path / "copy")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Store]:
    """A registry whose blobs are in an object store; programs of two tenants need one each."""
    url = folder_url(tmp_path)
    opened = Store(tmp_path / "data")
    blobs = open_blobs(opened, tmp_path / "data", url)
    for tenant, data in ((DEFAULT_TENANT, b"weights"), ("ada", b"more")):
        create(
            ProgramRegistry(opened, blobs.for_tenant(tenant), tenant=tenant), "p", put(blobs.for_tenant(tenant), data)
        )
    put(blobs, b"nobody's")
    yield opened
    opened.close()


def read_all(blobs: BlobStore) -> dict[str, bytes]:
    """Returns the blobs that programs of `shared` need, as a server finds them."""
    return {
        tenant: asyncio.run(content(blobs.for_tenant(tenant), name_of(data)))
        for tenant, data in ((DEFAULT_TENANT, b"weights"), ("ada", b"more"))
    }


NEEDED = {DEFAULT_TENANT: b"weights", "ada": b"more"}


@pytest.mark.parametrize("target", ["same", "new", "files"])
def test_backup_includes_blobs_of_an_object_store(shared: Store, tmp_path: Path, target: str) -> None:
    url = (tmp_path / "objects").as_uri()
    report = backup(RegistryPlace(tmp_path / "data", "", url), tmp_path / "copy")
    assert (len(report.blobs), report.missing) == (2, set())
    copied = {name: data for name, data in members(tmp_path / "copy").items() if name.startswith("blobs/")}
    assert copied == {f"blobs/{tenant}/{name_of(data)}": data for tenant, data in NEEDED.items()}

    # The registry is lost, and its cache.
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "new").mkdir()
    to = {"same": url, "new": (tmp_path / "new").as_uri(), "files": ""}[target]
    restore(tmp_path / "copy", RegistryPlace(tmp_path / "again", "", to))
    assert not check(RegistryPlace(tmp_path / "again", "", to)).missing
    with contextlib.closing(Store(tmp_path / "again")) as again:
        blobs = open_blobs(again, tmp_path / "again", to) if to else BlobStore(tmp_path / "again" / "blobs", 1 << 20)
        assert read_all(blobs) == NEEDED
    # Nothing is stored twice.
    assert len([path for path in (tmp_path / "objects").rglob("*") if path.is_file()]) == 4


def test_registry_is_copied_between_object_stores_and_folders(shared: Store, tmp_path: Path) -> None:
    first = RegistryPlace(tmp_path / "data", "", (tmp_path / "objects").as_uri())
    files = RegistryPlace(tmp_path / "files")
    assert not copy_registry(first, files).missing
    (tmp_path / "new").mkdir()
    last = RegistryPlace(tmp_path / "last", "", (tmp_path / "new").as_uri())
    assert not copy_registry(files, last).missing
    with contextlib.closing(Store(tmp_path / "last")) as again:
        assert read_all(open_blobs(again, tmp_path / "last", last.blobs_url)) == NEEDED
    assert not (tmp_path / "last" / "blobs").exists()


def test_check_reports_problems_of_an_object_store(shared: Store, tmp_path: Path) -> None:
    url = (tmp_path / "objects").as_uri()
    assert not check(RegistryPlace(tmp_path / "data", "", url)).problems
    objects = {path.name: path for path in (tmp_path / "objects").rglob("*") if path.is_file()}
    objects[name_of(b"more")].unlink()
    damage(objects[name_of(b"weights")])
    report = check(RegistryPlace(tmp_path / "data", "", url))
    assert report.missing == {("ada", name_of(b"more"))}
    assert report.problems == [
        f"the blob {name_of(b'weights')} of tenant 'default' is damaged: its bytes have another SHA-256"
    ]
    with pytest.raises(BackupError, match="is damaged"):
        backup(RegistryPlace(tmp_path / "data", "", url), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_object_store_of_another_registry_is_refused(shared: Store, tmp_path: Path) -> None:
    url = (tmp_path / "objects").as_uri()
    backup(RegistryPlace(tmp_path / "data", "", url), tmp_path / "copy")
    other = Store(tmp_path / "other")
    other.close()
    with pytest.raises(BackupError, match="of this registry"):
        check(RegistryPlace(tmp_path / "other", "", url))
    with pytest.raises(BackupError, match="of this registry"):
        backup(RegistryPlace(tmp_path / "other", "", url), tmp_path / "copy of another")
    backup(RegistryPlace(tmp_path / "other"), tmp_path / "of other")
    with pytest.raises(BackupError, match="blobs of another registry"):
        restore(tmp_path / "of other", RegistryPlace(tmp_path / "again", "", url))
    # A folder without a file system.
    (tmp_path / "objects").rename(tmp_path / "elsewhere")
    (tmp_path / "objects").mkdir()
    with pytest.raises(BackupError, match="may not be mounted"):
        check(RegistryPlace(tmp_path / "data", "", url))
    assert not (tmp_path / "again" / "gradrule.db").exists()


def test_damaged_object_is_replaced_by_restore(shared: Store, tmp_path: Path) -> None:
    url = (tmp_path / "objects").as_uri()
    backup(RegistryPlace(tmp_path / "data", "", url), tmp_path / "copy")
    for path in (tmp_path / "objects").rglob("*"):
        if path.is_file() and path.name != MARKER:
            damage(path)
    restore(tmp_path / "copy", RegistryPlace(tmp_path / "again", "", url))
    assert not check(RegistryPlace(tmp_path / "again", "", url)).problems
    with contextlib.closing(Store(tmp_path / "again")) as again:
        assert read_all(open_blobs(again, tmp_path / "again", url)) == NEEDED
