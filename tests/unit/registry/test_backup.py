"""Copies of a registry: made while it is in use, brought back, and not taken where they are damaged."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradrule.v1 import program_pb2, rule_pb2, tensor_pb2
from gradrule_server.registry.backup import BackupError, backup, check, restore
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.store import ProgramContent, ProgramRow, RuleRow, Store

DEFINITION = rule_pb2.RuleDefinition(expression="3 * dy").SerializeToString()


def put(blobs: BlobStore, data: bytes) -> str:
    name = hashlib.sha256(data).hexdigest()
    upload = blobs.upload(name)
    try:
        upload.write(data)
        upload.finish()
    finally:
        upload.close()
    return name


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def store(data: Path) -> Iterator[Store]:
    """Two tenants; a program of one needs a blob."""
    opened = Store(data)
    blobs = BlobStore(data / "blobs", 1000)
    opened.add_rule(RuleRow("Q", DEFINITION, "", 1))
    opened.add_rule(RuleRow("Q", DEFINITION, "", 1), "ada")
    spec = program_pb2.ProgramSpec()
    name = put(blobs.of("ada"), b"weights")
    put(blobs.of("ada"), b"nobody's")
    spec.variables.add(name="w", value={"blob": tensor_pb2.BlobTensor(sha256=name)})
    content = ProgramContent(spec.SerializeToString(), b"graph", b"snapshot")
    opened.add_program(ProgramRow("p", "same", b"summary", 5), content, "ada")
    yield opened
    opened.close()


def test_what_was_copied_comes_back(store: Store, data: Path, tmp_path: Path) -> None:
    report = backup(data, tmp_path / "copy")
    assert (report.rules, report.programs, report.tenants, len(report.blobs)) == (2, 1, {"default", "ada"}, 1)
    assert not report.missing
    # What no program needs is no part of it.
    assert len([path for path in (tmp_path / "copy" / "blobs").rglob("*") if path.is_file()]) == 1
    store.add_rule(RuleRow("later", DEFINITION, "", 1))

    restore(tmp_path / "copy", tmp_path / "again")
    again = Store(tmp_path / "again")
    assert [row.name for row in again.rules()] == ["Q"]
    content = again.program_content("p", "same", "ada")
    assert content is not None
    assert content.graph == b"graph"
    blobs = BlobStore(tmp_path / "again" / "blobs", 1000)
    assert blobs.of("ada").read(hashlib.sha256(b"weights").hexdigest()) == b"weights"
    again.close()
    assert not check(tmp_path / "again").problems


def test_a_copy_is_one_moment_of_a_registry_in_use(store: Store, data: Path, tmp_path: Path) -> None:
    stop = threading.Event()

    def work() -> None:
        for number in range(10_000):
            if stop.is_set():
                return
            # Both or none may be in a copy: the second is written after the first.
            store.add_rule(RuleRow(f"a{number}", DEFINITION, "", 1))
            store.add_rule(RuleRow(f"b{number}", DEFINITION, "", 1))

    writer = threading.Thread(target=work)
    writer.start()
    try:
        for number in range(3):
            report = backup(data, tmp_path / f"copy{number}")
            assert not report.problems
            restore(tmp_path / f"copy{number}", tmp_path / f"again{number}")
            again = Store(tmp_path / f"again{number}")
            names = {row.name for row in again.rules()}
            firsts = sum(name.startswith("a") for name in names)
            seconds = sum(name.startswith("b") for name in names)
            assert firsts - seconds in (0, 1)
            again.close()
    finally:
        stop.set()
        writer.join()


def test_a_copy_is_never_written_over_anything(store: Store, data: Path, tmp_path: Path) -> None:
    backup(data, tmp_path / "copy")
    with pytest.raises(BackupError, match="there already"):
        backup(data, tmp_path / "copy")
    with pytest.raises(BackupError, match="in use by another server"):
        restore(tmp_path / "copy", data)
    store.close()
    with pytest.raises(BackupError, match="has a registry already"):
        restore(tmp_path / "copy", data)
    Store(data)


def test_a_damaged_copy_is_not_brought_back(store: Store, data: Path, tmp_path: Path) -> None:
    copy, to = tmp_path / "copy", tmp_path / "to"
    backup(data, copy)
    blob = next(path for path in (copy / "blobs").rglob("*") if path.is_file())
    blob.write_bytes(b"other")
    with pytest.raises(BackupError, match="not what was stored"):
        restore(copy, to)
    blob.unlink()
    with pytest.raises(BackupError, match="is gone"):
        restore(copy, to)
    blob.write_bytes(b"weights")
    database = (copy / "gradrule.db").read_bytes()
    (copy / "gradrule.db").write_bytes(database[:-100] + b"\0" * 100)
    with pytest.raises(BackupError, match="not what was copied"):
        restore(copy, to)
    (copy / "gradrule.db").write_bytes(database)
    manifest = json.loads((copy / "backup.json").read_text())
    (copy / "backup.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(BackupError, match="another release"):
        restore(copy, to)
    (copy / "backup.json").unlink()
    with pytest.raises(BackupError, match="is no backup"):
        restore(copy, to)
    assert not to.exists()


def test_a_blob_that_was_gone_before_is_told_and_does_not_hinder(store: Store, data: Path, tmp_path: Path) -> None:
    next(path for path in (data / "blobs").rglob("*") if path.is_file() and path.read_bytes() == b"weights").unlink()
    assert len(backup(data, tmp_path / "copy").missing) == 1
    assert len(restore(tmp_path / "copy", tmp_path / "again").missing) == 1


def test_what_is_wrong_with_a_registry(store: Store, data: Path) -> None:
    assert not check(data).problems
    store.add_rule(RuleRow("broken", b"\xff\xff", "", 1), "ada")
    for path in (data / "blobs").rglob("*"):
        if path.is_file() and path.read_bytes() == b"weights":
            path.write_bytes(b"changed")
    problems = check(data).problems
    assert len(problems) == 2
    assert any("'broken' of tenant 'ada'" in problem for problem in problems)
    with pytest.raises(BackupError, match="there is no registry"):
        check(data / "nowhere")
