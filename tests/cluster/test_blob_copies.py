"""Tests `gradrule registry` with blobs in S3: backups, restores, checks, and copies."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gradrule_server.commands.registry import run
from gradrule_server.registry.object_store import MARKER
from gradrule_server.registry.programs import ProgramRegistry
from tests.cluster.postgres import PostgresServer
from tests.cluster.s3 import SECRET, S3Server
from tests.cluster.test_registry_copies import opened
from tests.stores import open_blobs, shared_of
from tests.unit.registry.rows import execute
from tests.unit.registry.test_backup import members
from tests.unit.registry.test_blobs import name_of, put
from tests.unit.registry.test_shared_blobs import content, create

# More than one piece.
WEIGHTS = bytes(range(256)) * (40 << 10)
MORE = b"more"


def fill(folder: Path, url: str, blobs_url: str) -> None:
    """Adds programs of two tenants, which need a blob each."""
    with opened(folder, url) as store:
        blobs = open_blobs(store, folder, blobs_url)
        for tenant, data in (("default", WEIGHTS), ("ada", MORE)):
            registry = ProgramRegistry(store, blobs.for_tenant(tenant), tenant=tenant)
            create(registry, "p", put(blobs.for_tenant(tenant), data))


async def served(folder: Path, url: str, blobs_url: str) -> bool:
    """Returns whether a server with an empty cache finds the blobs of `fill`."""
    with opened(folder, url) as store:
        blobs = open_blobs(store, folder, blobs_url)
        assert len(store.program_keys()) == 2
        return [
            await content(blobs.for_tenant(tenant), name_of(data)) == data
            for tenant, data in (("default", WEIGHTS), ("ada", MORE))
        ] == [True, True]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_backup_and_restore_with_s3(
    postgres: PostgresServer,
    tmp_path: Path,
    s3: S3Server,
    s3_environment: None,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    urls = [postgres.create_database() if kind == "postgresql" else "" for _ in range(2)]
    stores = [f"s3://{s3.create_bucket()}/x" for _ in range(2)]
    first, last = (
        ["--data-dir", str(tmp_path / name), "--blobs", store, *(("--registry", url) if url else ())]
        for name, store, url in zip(("from", "to"), stores, urls, strict=True)
    )
    fill(tmp_path / "from", urls[0], stores[0])
    assert run(["check", *first]) == 0
    assert run(["backup", str(tmp_path / "copy"), *first]) == 0
    found = {name: data for name, data in members(tmp_path / "copy").items() if name.startswith("blobs/")}
    assert sorted(found.values()) == sorted([WEIGHTS, MORE])
    assert run(["restore", str(tmp_path / "copy"), *last]) == 0
    assert run(["check", *last]) == 0
    assert await served(tmp_path / "to", urls[1], stores[1])
    printed = capsys.readouterr()
    assert "missing" not in printed.out
    assert SECRET not in printed.out + printed.err


async def test_copy_moves_blobs_between_s3_and_data_folders(
    database_url: str, tmp_path: Path, bucket: str, s3_environment: None, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = f"s3://{bucket}/old", f"s3://{bucket}/new"
    fill(tmp_path / "old", "", old)
    shared = ["--data-dir", str(tmp_path / "shared")]
    assert run(["copy", str(tmp_path / "old"), database_url, "--from-blobs", old, "--to-blobs", new, *shared]) == 0
    assert run(["copy", database_url, str(tmp_path / "files"), "--from-blobs", new, *shared]) == 0
    assert run(["check", "--data-dir", str(tmp_path / "files")]) == 0
    assert "missing" not in capsys.readouterr().out
    assert await served(tmp_path / "shared", database_url, new)
    # The copy has the id of the registry, so its servers may use the same object store.
    assert run(["copy", str(tmp_path / "files"), str(tmp_path / "same"), "--to-blobs", old, *shared]) == 0
    assert await served(tmp_path / "same", "", old)
    fill(tmp_path / "other", "", f"s3://{bucket}/other")
    assert run(["copy", str(tmp_path / "files"), str(tmp_path / "x"), "--to-blobs", f"s3://{bucket}/other"]) == 1
    assert "holds the blobs of another registry" in capsys.readouterr().err
    assert run(["check", "--data-dir", str(tmp_path / "old"), "--blobs", f"s3://{bucket}/absent"]) == 1
    assert "has no object gradrule.registry of this registry" in capsys.readouterr().err


def test_servers_that_run_find_the_blobs_of_a_restored_registry(
    database_url: str, tmp_path: Path, s3: S3Server, bucket: str, s3_environment: None
) -> None:
    url = f"s3://{bucket}/x"
    fill(tmp_path / "old", database_url, url)
    place = ["--registry", database_url, "--blobs", url, "--data-dir", str(tmp_path / "shared")]
    assert run(["backup", str(tmp_path / "copy"), *place]) == 0
    with opened(tmp_path / "server", database_url) as store:
        blobs = open_blobs(store, tmp_path / "server", url)
        for table in ("programs", "blobs", "tenant_usage"):
            execute(store, f"DELETE FROM {table}")
        for key in s3.keys(bucket):
            if key != f"x/{MARKER}":
                s3.client.delete_object(Bucket=bucket, Key=key)
        assert blobs.missing([name_of(WEIGHTS)]) == [name_of(WEIGHTS)]
        assert run(["restore", str(tmp_path / "copy"), *place]) == 0
        assert blobs.missing([name_of(WEIGHTS)]) == []
        assert ProgramRegistry(store, blobs).get("p").id == "p"


def test_blobs_that_no_program_needs_are_deleted_from_s3(
    database_url: str,
    tmp_path: Path,
    s3: S3Server,
    bucket: str,
    s3_environment: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"s3://{bucket}/x"
    fill(tmp_path / "old", database_url, url)
    with opened(tmp_path / "server", database_url) as store:
        blobs = open_blobs(store, tmp_path / "server", url)
        name = put(blobs, b"nobody's")
        place = ["--registry", database_url, "--blobs", url, "--data-dir", str(tmp_path / "shared")]
        # Servers may run meanwhile.
        assert run(["gc", *place]) == 0
        assert blobs.missing([name]) == []
        with pytest.MonkeyPatch.context() as patch:
            now = time.time()
            patch.setattr(time, "time", lambda: now + 90_000)
            # It is renewed, because a client looks for it.
            assert blobs.missing([name]) == []
            patch.setattr(time, "time", lambda: now + 190_000)
            assert run(["gc", *place]) == 0
        assert f"deleted from {url}: 1 blob, 0 MB" in capsys.readouterr().out
        assert blobs.missing([name, name_of(WEIGHTS)]) == [name]
        shared_of(blobs).maintain()
        assert (blobs.used.count, blobs.for_tenant("ada").used.count) == (1, 1)


def test_messages_name_what_is_wrong_with_an_object_store(
    tmp_path: Path, s3: S3Server, bucket: str, s3_environment: None, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, "", f"s3://{bucket}")
    for url, problem in (
        ("s3://no-such-bucket/x", "does not exist"),
        (f"s3://key:{SECRET}@{bucket}", "AWS_ACCESS_KEY_ID"),
        ("ftp://host", "must be file:///folder or s3://bucket/prefix"),
    ):
        for command in (["check"], ["backup", str(tmp_path / "copy")]):
            assert run([*command, "--data-dir", str(tmp_path), "--blobs", url]) == 1
            printed = capsys.readouterr()
            assert problem in printed.err
            assert SECRET not in printed.out + printed.err
    with s3.proxy.stopped():
        assert run(["check", "--data-dir", str(tmp_path), "--blobs", f"s3://{bucket}"]) == 1
    assert "cannot be used" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()
