"""Tests `gradrule registry` on PostgreSQL: backups, restores, checks, new registries, and copies either way."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradrule.v1 import program_pb2, rule_pb2, tensor_pb2
from gradrule_server.commands.registry import run
from gradrule_server.registry import database, schema
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.database import open_database
from gradrule_server.registry.store import ProgramContent, ProgramRow, RuleRow, Store
from tests.cluster.postgres import PASSWORD, USER, PostgresServer
from tests.stores import open_blobs
from tests.unit.registry.rows import execute, kept_bytes
from tests.unit.registry.version_2 import version_2

DEFINITION = rule_pb2.RuleDefinition(expression="3 * dy").SerializeToString()
WEIGHTS = b"weights"
DIGEST = hashlib.sha256(WEIGHTS).hexdigest()
TENANT = "\N{GREEK SMALL LETTER PI} tenant"


@contextlib.contextmanager
def opened(folder: Path, url: str = "") -> Iterator[Store]:
    """Opens the registry of a server."""
    store = Store(open_database(url, folder))
    try:
        yield store
    finally:
        store.close()


def fill(folder: Path, url: str = "") -> object:
    """Adds rules and programs of two tenants, with a blob, and returns `content`."""
    with opened(folder, url) as store:
        upload = BlobStore(folder / "blobs", 1 << 20).for_tenant("ada").upload(DIGEST)
        upload.write(WEIGHTS)
        upload.finish()
        upload.close()
        store.add_rule(RuleRow("Q", DEFINITION, "a\0b \\ \N{GREEK SMALL LETTER PI}", 2**50))
        store.add_rule(RuleRow("Q", DEFINITION, "", 1), TENANT)
        spec = program_pb2.ProgramSpec()
        spec.variables.add(name="w", value={"blob": tensor_pb2.BlobTensor(sha256=DIGEST)})
        source = ProgramContent(spec.SerializeToString(), bytes(range(256)) * 20_000, b"")
        for name in ("p", "q"):
            summary = program_pb2.Program()
            summary.create_time.FromMicroseconds(5)
            store.add_program(ProgramRow(name, "same", summary.SerializeToString(), 5), source, "ada")
    return content(folder, url)


def content(folder: Path, url: str = "") -> object:
    """Returns everything that `fill` has added."""
    with opened(folder, url) as store:
        return (
            store.rules(),
            store.rules(TENANT),
            store.program_identities("ada"),
            store.program("p", "ada"),
            store.program_content("q", "same", "ada"),
            kept_bytes(store),
            BlobStore(folder / "blobs", 1 << 20).for_tenant("ada").read(DIGEST),
        )


@pytest.mark.parametrize("source", ["sqlite", "postgresql"])
@pytest.mark.parametrize("target", ["sqlite", "postgresql"])
def test_backup_of_one_database_can_be_restored_to_the_other(
    postgres: PostgresServer, tmp_path: Path, source: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [postgres.create_database() if name == "postgresql" else "" for name in (source, target)]
    before = fill(tmp_path / "from", urls[0])
    places = [
        ["--data-dir", str(tmp_path / name), *(("--registry", url) if url else ())]
        for name, url in zip(("from", "to"), urls, strict=True)
    ]
    assert run(["check", *places[0]]) == 0
    assert run(["backup", str(tmp_path / "copy"), *places[0]]) == 0
    assert run(["restore", str(tmp_path / "copy"), *places[1]]) == 0
    assert content(tmp_path / "to", urls[1]) == before
    assert run(["check", *places[1]]) == 0
    assert run(["restore", str(tmp_path / "copy"), *places[1]]) == 1
    printed = capsys.readouterr()
    assert "2 rules and 2 programs of 3 tenants, with 1 blob" in printed.out
    assert "already" in printed.err
    assert PASSWORD not in printed.out + printed.err


def test_registry_is_copied_to_postgresql_and_back(
    postgres: PostgresServer, database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = fill(tmp_path / "old")
    shared = ["--data-dir", str(tmp_path / "shared")]
    assert run(["copy", str(tmp_path / "old"), database_url, *shared]) == 0
    assert content(tmp_path / "shared", database_url) == before
    assert run(["copy", database_url, str(tmp_path / "back"), *shared]) == 0
    assert content(tmp_path / "back") == before
    assert run(["copy", str(tmp_path / "old"), database_url, *shared]) == 1
    printed = capsys.readouterr()
    assert "has rules or programs already" in printed.err
    assert PASSWORD not in printed.out + printed.err


def test_copy_may_use_the_object_store_of_the_registry(database_url: str, tmp_path: Path) -> None:
    objects = tmp_path / "objects"
    objects.mkdir()

    def held(folder: Path, url: str = "") -> bytes:
        """Starts as a server does with `--blobs`, and returns the blob that the program needs."""
        with opened(folder, url) as store:
            blobs = open_blobs(store, folder, objects.as_uri())
            return asyncio.run(read(blobs.for_tenant("ada")))

    async def read(blobs: BlobStore) -> bytes:
        async with blobs.acquired([DIGEST]):
            return blobs.read(DIGEST)

    fill(tmp_path / "local")
    # As the log of a server advises that starts with --blobs, and has blobs in its data folder.
    shared = ["--to-blobs", objects.as_uri(), "--data-dir", str(tmp_path / "local")]
    assert run(["copy", str(tmp_path / "local"), str(tmp_path / "old"), *shared]) == 0
    assert held(tmp_path / "old") == WEIGHTS
    assert run(["copy", str(tmp_path / "old"), database_url, "--data-dir", str(tmp_path / "shared")]) == 0
    assert held(tmp_path / "shared", database_url) == WEIGHTS
    assert run(["copy", database_url, str(tmp_path / "back"), "--data-dir", str(tmp_path / "shared")]) == 0
    assert held(tmp_path / "back") == WEIGHTS


def test_registry_is_checked_and_backed_up_by_a_role_that_only_reads(
    postgres: PostgresServer, database_url: str, tmp_path: Path
) -> None:
    fill(tmp_path, database_url)
    name = database_url.rpartition("/")[2]
    postgres.execute("CREATE ROLE reader LOGIN PASSWORD 'reader'")
    postgres.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader", database=name)
    place = ["--registry", postgres.url(name, user="reader", password="reader"), "--data-dir", str(tmp_path)]
    assert run(["check", *place]) == 0
    assert run(["backup", str(tmp_path / "copy"), *place]) == 0


def test_backup_does_not_migrate(
    database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, database_url)
    monkeypatch.setattr(schema, "_STEPS", {3: ("ALTER TABLE rules ADD COLUMN added INTEGER",)})
    with monkeypatch.context() as newer:
        for module in (schema, database):
            newer.setattr(module, "SCHEMA_VERSION", 4)
        assert run(["backup", str(tmp_path / "copy"), "--registry", database_url, "--data-dir", str(tmp_path)]) == 1
    assert "has schema version 3" in capsys.readouterr().err
    with opened(tmp_path, database_url) as store:
        assert len(store.rules()) == 1


def test_registry_of_an_older_release_is_copied(database_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    version_2(folder, b"")
    assert run(["copy", str(folder), database_url, "--data-dir", str(tmp_path / "shared")]) == 0
    with opened(tmp_path / "shared", database_url) as store:
        assert [row.name for row in store.rules()] == ["Q"]
        assert store.program_content("p", "same") == ProgramContent(b"", b"graph", b"")


def test_damaged_rows_are_left_out(database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = fill(tmp_path / "old")
    with contextlib.closing(sqlite3.connect(tmp_path / "old" / "gradrule.db")) as database:
        row = "('default', CAST(x'70ff' AS TEXT), x'00', '', 1), ('default', 'text', 'text', '', 1)"
        database.execute(f"INSERT INTO rules VALUES {row}, ('default', 'time', x'00', '', 'now')")
        database.commit()
    assert run(["copy", str(tmp_path / "old"), database_url, "--data-dir", str(tmp_path / "shared")]) == 0
    assert capsys.readouterr().out.count("of tenant 'default' cannot be read") == 3
    with opened(tmp_path / "shared", database_url) as store:
        assert len(store.rules()) == 1
    assert content(tmp_path / "shared", database_url) == before


def test_changed_graph_is_found(database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, database_url)
    with opened(tmp_path, database_url) as store:
        execute(store, "UPDATE blobs SET content = :content", content=b"other")
    place = ["--registry", database_url, "--data-dir", str(tmp_path)]
    assert run(["check", *place]) == 1
    assert "delete the program 'p' of tenant 'ada' and others with this graph" in capsys.readouterr().out
    assert run(["backup", str(tmp_path / "copy"), *place]) == 1
    assert not (tmp_path / "copy").exists()


def test_commands_name_databases_that_cannot_be_used(
    postgres: PostgresServer, database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for url, problem in (
        (database_url, "there is no registry in postgresql://gradrule@127.0.0.1"),
        (database_url + "x", "does not exist"),
        (database_url.replace(PASSWORD, "wrong"), "password authentication failed"),
        (f"postgresql://me:{PASSWORD}@127.0.0.1:1/rules", "cannot be used"),
    ):
        assert run(["check", "--registry", url, "--data-dir", str(tmp_path)]) == 1
        printed = capsys.readouterr()
        assert problem in printed.err
        assert PASSWORD not in printed.err
    assert run(["check", "--registry", f"postgresql://me:{PASSWORD}/@h/d", "--data-dir", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert "percent-encoded" in printed.err
    assert PASSWORD not in printed.err


def test_a_role_that_may_not_create_tables_is_told_what_to_do(
    postgres: PostgresServer, database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    postgres.execute(f"CREATE ROLE guest LOGIN PASSWORD '{PASSWORD}'")
    guest_url = database_url.replace(f"{USER}:", "guest:")
    fill(tmp_path / "old")
    assert run(["copy", str(tmp_path / "old"), guest_url, "--data-dir", str(tmp_path / "shared")]) == 1
    refusal = "permission denied for schema public; make the server's role the owner of the database\n"
    assert capsys.readouterr().err.endswith(refusal)


@pytest.mark.parametrize("name", ["postgresq://me:secret@host/rules", "postgresql:/host/rules", "s3://bucket/rules"])
def test_a_url_that_is_not_of_postgresql_does_not_become_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "old")
    assert run(["copy", "old", name, "--data-dir", "shared"]) == 2
    printed = capsys.readouterr()
    assert "expected postgresql://USER@HOST:PORT/DATABASE" in printed.err
    assert "secret" not in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
