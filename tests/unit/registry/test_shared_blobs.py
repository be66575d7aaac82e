"""Tests blobs in an object store that several servers share: fetches, limits, removal, faults; with a shared folder."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradrule.v1 import errors_pb2, program_pb2, tensor_pb2
from gradrule_server.errors import GradruleError, error, reason_name
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.data_folder import BLOB_CACHE, BLOBS, StoreError
from gradrule_server.registry.object_store import MARKER, FolderObjects, ObjectStoreError, open_object_store
from gradrule_server.registry.programs import PinnedBlobs, ProgramRegistry
from gradrule_server.registry.shared_blobs import SharedBlobStore
from gradrule_server.registry.store import Store
from gradrule_server.registry.stored_blobs import blob_objects
from tests.stores import folder_url, open_blobs, stored_files
from tests.unit.registry.test_blobs import PAGE, damage, name_of, put, refusal
from tests.waiting import wait_until

WEIGHTS = b"weights"


class Servers:
    """Opens the blobs of several servers with one registry and one object store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = folder_url(path)
        self.store = Store(path / "registry")

    def open(self, name: str, **limits: int) -> SharedBlobStore:
        return open_blobs(self.store, self.path / name, self.url, **limits)

    @property
    def objects(self) -> list[Path]:
        """The files of all objects."""
        return [path for path in (self.path / "objects").rglob("*") if path.is_file() and path.name != MARKER]

    def query(self, statement: str) -> list[Any]:
        with self.store.database.read() as connection:
            return list(connection.exec_driver_sql(statement).scalars())

    def execute(self, statement: str) -> None:
        with self.store.database.write() as connection:
            connection.exec_driver_sql(statement)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    opened = Servers(tmp_path)
    yield opened
    opened.store.close()


def files(blobs: BlobStore) -> list[str]:
    return sorted(path.name for path in blobs.root.rglob("*") if path.is_file())


async def content(blobs: BlobStore, name: str) -> bytes:
    async with blobs.acquired([name]):
        return blobs.read(name)


def patched(monkeypatch: pytest.MonkeyPatch, method: str, replacement: Any) -> Any:
    """Replaces a method of the folder's objects; returns the original."""
    original = getattr(FolderObjects, method)
    monkeypatch.setattr(FolderObjects, method, replacement)
    return original


async def test_blob_uploaded_at_one_server_is_fetched_by_another(servers: Servers) -> None:
    ada, grace = servers.open("ada"), servers.open("grace")
    name = put(ada, WEIGHTS)
    assert (grace.missing([name]), grace.sizes([name, "0" * 64]), files(grace)) == ([], [7, -1], [])
    assert await content(grace, name) == WEIGHTS
    assert files(grace) == [name]
    # Tenants share nothing.
    other = grace.for_tenant("other")
    assert other.missing([name]) == [name]
    assert reason_name((await failure(content(other, name))).reason) == "BLOB_NOT_FOUND"


async def failure(work: Any) -> GradruleError:
    with pytest.raises(GradruleError) as caught:
        await work
    return caught.value


async def test_blobs_of_a_tenant_are_fetched_into_its_folder(servers: Servers) -> None:
    name = put(servers.open("ada").for_tenant("math"), WEIGHTS)
    grace = servers.open("grace").for_tenant("math")
    assert await content(grace, name) == WEIGHTS
    assert (grace.folder / name).read_bytes() == WEIGHTS


async def test_all_missing_blobs_are_named_at_once_and_nothing_is_pinned(servers: Servers) -> None:
    blobs = servers.open("ada")
    name = put(blobs, WEIGHTS)
    found = await failure(blobs.acquire([name, "1" * 64, "2" * 64]))
    assert [item.name for item in found.resources] == ["1" * 64, "2" * 64]
    assert not blobs._own.pins


async def test_many_waiters_share_one_fetch(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    name = put(servers.open("ada"), WEIGHTS)
    grace = servers.open("grace")
    reads: list[str] = []

    def counted(self: FolderObjects, key: str, offset: int, count: int) -> bytes:
        reads.append(key)
        time.sleep(0.02)
        return read(self, key, offset, count)

    read = patched(monkeypatch, "read", counted)
    assert await asyncio.gather(*(content(grace, name) for _ in range(20))) == [WEIGHTS] * 20
    assert len(reads) == 1


async def test_few_fetches_run_at_a_time(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    ada, grace = servers.open("ada"), servers.open("grace")
    names = [put(ada, bytes([number])) for number in range(30)]
    running, most, lock = 0, 0, threading.Lock()

    def counted(self: FolderObjects, key: str, offset: int, count: int) -> bytes:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        return read(self, key, offset, count)

    read = patched(monkeypatch, "read", counted)
    async with grace.acquired(names):
        assert sorted(files(grace)) == sorted(names)
    assert 1 < most <= 8


async def test_slow_transfers_of_a_tenant_do_not_hold_up_others(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = servers.open("ada").for_tenant("slow")
    names = [put(ada, bytes([number])) for number in range(10)]
    other = put(servers.open("third"), WEIGHTS)
    grace = open_blobs(servers.store, servers.path / "grace", servers.url, tenant_transfers=2)
    may_go_on = threading.Event()

    def slow(self: FolderObjects, key: str, *arguments: Any) -> Any:
        if key.startswith("tenant-"):
            may_go_on.wait(20)
        return (store if len(arguments) == 1 else read)(self, key, *arguments)

    read, store = patched(monkeypatch, "read", slow), patched(monkeypatch, "put", slow)
    theirs = grace.for_tenant("slow")
    fetches = [asyncio.create_task(content(theirs, name)) for name in names]
    uploads = [threading.Thread(target=put, args=(theirs, bytes([200 + number]))) for number in range(10)]
    for upload in uploads:
        upload.start()
    assert await content(grace, other) == WEIGHTS
    await asyncio.to_thread(put, grace, b"other")
    assert not any(fetch.done() for fetch in fetches)
    assert all(upload.is_alive() for upload in uploads)
    may_go_on.set()
    assert await asyncio.gather(*fetches) == [bytes([number]) for number in range(10)]
    for upload in uploads:
        await asyncio.to_thread(upload.join, 20)
    assert theirs.held_count == 20


async def test_fetch_ends_when_nobody_waits_and_leaves_nothing(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradrule_server.registry.object_store._PIECE_BYTES", 4)
    name = put(servers.open("ada"), WEIGHTS)
    grace = servers.open("grace")
    has_read, may_go_on, reads = threading.Event(), threading.Event(), []

    def slow(self: FolderObjects, key: str, offset: int, count: int) -> bytes:
        reads.append(offset)
        has_read.set()
        may_go_on.wait(20)
        return read(self, key, offset, count)

    read = patched(monkeypatch, "read", slow)
    calls = [asyncio.create_task(content(grace, name)) for _ in range(2)]
    await asyncio.to_thread(has_read.wait, 20)
    while grace._shared.fetches._running["", name].waiters < 2:
        await asyncio.sleep(0.001)
    calls[0].cancel()
    await asyncio.wait(calls[:1])
    assert not grace._shared.fetches._running["", name].is_unwanted.is_set()
    # A call that gives up at its deadline.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(calls[1], 0.01)
    [fetch] = [task for task in asyncio.all_tasks() if task.get_name() == "fetch-blob"]
    may_go_on.set()
    await fetch
    assert (reads, files(grace), grace._index.used.size) == ([0], [], 0)
    assert await content(grace, name) == WEIGHTS


async def test_cached_blobs_work_while_the_object_store_hangs_or_is_away(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ada, grace = servers.open("ada"), servers.open("grace")
    cached, other, third = put(ada, WEIGHTS), put(ada, b"other"), put(ada, b"third")
    await content(grace, cached)
    hangs = threading.Event()

    def hang(self: FolderObjects, key: str, offset: int, count: int) -> bytes:
        hangs.wait(20)
        raise ObjectStoreError("no route to http://user:secret@host")

    patched(monkeypatch, "read", hang)
    waiting = asyncio.create_task(failure(content(grace, other)))
    assert await content(grace, cached) == WEIGHTS
    # A file that must be verified again, as after a start.
    grace._own.files[cached].verified = None
    assert await content(grace, cached) == WEIGHTS
    hangs.set()
    found = await waiting
    assert (reason_name(found.reason), found.retry_after_s) == ("UNAVAILABLE", 1.0)
    assert "object store" in found.message
    assert "host" not in found.message
    assert caplog.messages == [f"the blobs in {servers.url} cannot be reached: no route to http://…@host"]
    monkeypatch.undo()
    assert await content(grace, third) == b"third"
    assert grace.missing([cached, other, third]) == []


async def test_use_of_the_cache_is_counted(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    name, other = put(servers.open("ada"), WEIGHTS), put(servers.open("ada"), b"other")
    grace = servers.open("grace")
    for _ in range(3):
        await content(grace, name)
    with monkeypatch.context() as patch:
        patched(patch, "read", lambda *_: b"")
        await failure(content(grace, other))
    found = grace.cache_use()
    assert (found.hits, found.fetches, found.failures, found.fetched_bytes, found.held_bytes) == (2, 1, 1, 7, PAGE)
    assert found.fetch_s > 0


async def test_damaged_object_is_missing_until_it_is_uploaded_again(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    ada, grace = servers.open("ada"), servers.open("grace")
    name = put(ada, WEIGHTS)
    [file] = servers.objects
    damage(file)
    assert reason_name((await failure(content(grace, name))).reason) == "BLOB_NOT_FOUND"
    assert f"{file.name} in {servers.url} is damaged" in caplog.messages[0]
    assert (grace.missing([name]), files(grace), servers.objects) == ([name], [], [])
    assert put(grace, WEIGHTS) == name
    assert await content(servers.open("third"), name) == WEIGHTS


async def test_object_damaged_on_its_way_is_read_again(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    name = put(servers.open("ada"), WEIGHTS)
    grace = servers.open("grace")
    damaged = [b"damaged"]

    def once(self: FolderObjects, key: str, offset: int, count: int) -> bytes:
        return damaged.pop() if damaged else read(self, key, offset, count)

    read = patched(monkeypatch, "read", once)
    assert await content(grace, name) == WEIGHTS
    assert not damaged


async def test_missing_object_is_a_missing_blob(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    name = put(servers.open("ada"), WEIGHTS)
    grace = servers.open("grace")
    servers.objects[0].unlink()
    assert reason_name((await failure(content(grace, name))).reason) == "BLOB_NOT_FOUND"
    assert "is missing" in caplog.messages[0]
    assert grace.missing([name]) == [name]


@pytest.mark.parametrize("tenant", ["default", "math"])
@pytest.mark.parametrize("is_damaged", [True, False])
async def test_server_with_the_blob_in_its_cache_stores_a_lost_object_again(
    servers: Servers, caplog: pytest.LogCaptureFixture, tenant: str, is_damaged: bool
) -> None:
    ada, grace = servers.open("ada"), servers.open("grace")
    needed, other = (put(ada.for_tenant(tenant), data) for data in (WEIGHTS, b"other"))
    create(ProgramRegistry(servers.store, ada.for_tenant(tenant), tenant=tenant), "kept", needed)
    for file in servers.objects:
        damage(file) if is_damaged else file.unlink()
    theirs = grace.for_tenant(tenant)
    for name in (needed, other):
        assert reason_name((await failure(content(theirs, name))).reason) == "BLOB_NOT_FOUND"
    # This server does not have it.
    grace.maintain()
    assert theirs.missing([needed]) == [needed]
    ada.maintain()
    # No program needs the other one: it could as well have been removed because of a limit.
    assert theirs.missing([needed, other]) == [other]
    assert await content(theirs, needed) == WEIGHTS
    assert f"the blob {needed}, whose object was lost, was stored again from the cache" in caplog.messages
    ada.maintain()
    assert len(servers.objects) == 1


async def test_damaged_file_of_the_cache_is_not_stored(servers: Servers) -> None:
    ada, grace = servers.open("ada"), servers.open("grace")
    name = put(ada, WEIGHTS)
    create(ProgramRegistry(servers.store, ada), "kept", name)
    await content(ada, name)
    servers.objects[0].unlink()
    await failure(content(grace, name))
    path = ada.folder / name
    stat = path.stat()
    path.write_bytes(b"wEights")
    # Damaged by the disk, which does not change the time.
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    ada.maintain()
    assert (files(ada), servers.objects, ada.missing([name])) == ([], [], [name])


def test_lost_blob_is_not_stored_again_if_programs_took_its_room(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    ada, grace = (servers.open(name, capacity=PAGE) for name in ("ada", "grace"))
    programs = ProgramRegistry(servers.store, ada)
    name = put(ada, WEIGHTS)
    create(programs, "first", name)
    servers.objects[0].unlink()
    grace.compare_objects()
    others = ProgramRegistry(servers.store, grace)
    create(others, "second", put(grace, b"2"))
    for _ in range(2):
        ada.maintain()
    found = [text for text in caplog.messages if name in text]
    assert len(found) == 1
    assert "cannot be stored again now: " in found[0]
    assert "--max-blob-bytes" in found[0]
    assert ada.missing([name]) == [name]
    others.delete("second")
    ada.maintain()
    assert ada.missing([name]) == []


async def test_folder_that_is_not_mounted_loses_nothing(servers: Servers) -> None:
    ada, grace = servers.open("ada"), servers.open("grace")
    name = put(ada, WEIGHTS)
    folder = servers.path / "objects"
    folder.rename(servers.path / "elsewhere")
    for _ in range(2):
        assert reason_name((await failure(content(grace, name))).reason) == "UNAVAILABLE"
        assert reason_name(refusal(put, grace, b"new").reason) == "UNAVAILABLE"
        folder.mkdir(exist_ok=True)
    assert (files(grace), os.listdir(folder), grace.missing([name])) == ([], [], [])
    folder.rmdir()
    (servers.path / "elsewhere").rename(folder)
    assert await content(grace, name) == WEIGHTS
    assert grace.held_count == 1


async def test_damaged_file_of_the_cache_is_fetched_again(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    blobs = servers.open("ada")
    name = put(blobs, WEIGHTS)
    damage(blobs.folder / name)
    blobs = servers.open("ada")
    assert await content(blobs, name) == WEIGHTS
    assert "cache is damaged" in caplog.messages[0]
    (blobs.folder / name).unlink()
    assert await content(blobs, name) == WEIGHTS


async def test_cache_is_bounded_and_its_removals_delete_nothing(servers: Servers) -> None:
    blobs = servers.open("ada", cache_bytes=2 * PAGE)
    names = [put(blobs, bytes([number]) * PAGE) for number in range(5)]
    assert len(files(blobs)) == 2
    for number, name in enumerate(names):
        assert await content(blobs, name) == bytes([number]) * PAGE
    assert (len(files(blobs)), blobs.missing(names), len(servers.objects)) == (2, [], 5)
    async with blobs.acquired(names[:2]):
        found = await failure(blobs.acquire(names[2:3]))
        assert reason_name(found.reason) == "QUOTA_EXCEEDED"
        assert "--blob-cache-bytes" in found.message
        assert (files(blobs), blobs._index.used.count) == (sorted(names[:2]), 2)
    assert "--blob-cache-bytes" in refusal(put, blobs, b"x" * 3 * PAGE).message


async def test_full_disk_of_the_cache_is_an_error_and_leaves_nothing(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = put(servers.open("ada"), WEIGHTS)
    grace = servers.open("grace")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        found = await failure(content(grace, name))
    assert reason_name(found.reason) == "QUOTA_EXCEEDED"
    assert "smaller --blob-cache-bytes" in found.message
    assert (files(grace), grace._index.used.size, grace._own.pins) == ([], 0, {})
    assert await content(grace, name) == WEIGHTS


def test_limits_count_the_blobs_of_all_servers(servers: Servers) -> None:
    ada, grace = (servers.open(name, capacity=2 * PAGE) for name in ("ada", "grace"))
    first, second = put(ada, b"1" * PAGE), put(grace, b"2" * PAGE)
    assert (ada.held_bytes, grace.held_bytes) == (PAGE, 2 * PAGE)
    ada.maintain()
    assert ada.held_bytes == 2 * PAGE
    # The first is used at another server than the one that makes room.
    ada.missing([first])
    ada.maintain()
    third = put(grace, b"3" * PAGE)
    assert ada.missing([first, second, third]) == [second]
    assert stored_files(grace) == {first, third}
    assert "--max-blob-bytes" in refusal(put, ada, b"x" * 3 * PAGE).message


def spec_with(name: str) -> program_pb2.ProgramSpec:
    spec = program_pb2.ProgramSpec()
    spec.graph.serialized = b"graph"
    spec.variables.add(name="w", value=tensor_pb2.TensorSource(blob=tensor_pb2.BlobTensor(sha256=name)))
    return spec


def create(programs: ProgramRegistry, program_id: str, name: str) -> None:
    program = program_pb2.Program()
    program.digests.program = name
    programs.create(program_id, spec_with(name), b"", program, b"")


def test_blobs_that_programs_of_another_server_need_are_not_removed(servers: Servers) -> None:
    ada, grace = (servers.open(name, capacity=2 * PAGE) for name in ("ada", "grace"))
    programs = ProgramRegistry(servers.store, ada)
    needed = put(ada, b"1" * PAGE)
    create(programs, "kept", needed)
    assert not ada._own.pins
    others = [put(grace, bytes([number]) * PAGE) for number in range(3)]
    assert grace.missing([needed, *others]) == others[:2]
    create(programs, "too", put(ada, others[2].encode()))
    found = refusal(put, grace, b"x" * PAGE)
    assert reason_name(found.reason) == "QUOTA_EXCEEDED"
    assert "delete programs" in found.message
    programs.delete("kept")
    last = put(grace, b"x" * PAGE)
    assert grace.missing([needed, last]) == [needed]


def test_program_is_not_stored_if_another_server_has_removed_its_blob(servers: Servers) -> None:
    ada, grace = (servers.open(name, capacity=PAGE) for name in ("ada", "grace"))
    name = put(ada, b"1" * PAGE)
    # It stays in the cache of the first server.
    put(grace, b"2" * PAGE)
    programs = ProgramRegistry(servers.store, ada)
    found = refusal(create, programs, "late", name)
    assert reason_name(found.reason) == "BLOB_NOT_FOUND"
    assert (len(programs), servers.store.counts(), ada._own.pins) == (0, (0, 0), {})
    put(ada, b"1" * PAGE)
    create(programs, "late", name)
    assert reason_name(refusal(put, grace, b"2" * PAGE).reason) == "QUOTA_EXCEEDED"


def test_programs_stored_before_the_object_store_was_used_keep_their_blobs(servers: Servers) -> None:
    data_dir = servers.path / "ada"
    local = BlobStore(data_dir / BLOBS, 1 << 20)
    needed, other = put(local, b"1" * PAGE), put(local.for_tenant("math"), b"2" * PAGE)
    create(ProgramRegistry(servers.store, local), "kept", needed)
    (data_dir / BLOBS / ("3" * 64)).write_bytes(b"damaged")
    ada = servers.open("ada", capacity=2 * PAGE)
    assert (ada.missing([needed]), ada.for_tenant("math").missing([other])) == ([], [])
    assert files(local) == ["3" * 64]
    assert (data_dir / BLOB_CACHE / needed).is_file()
    PinnedBlobs(servers.store, ada)
    for number in range(3):
        put(ada, bytes([number]) * PAGE)
    assert ada.missing([needed]) == []


_KILLED = """
import os, sys
from pathlib import Path
from gradrule_server.registry.object_store import FolderObjects
from gradrule_server.registry.store import Store
from tests.stores import open_blobs
from tests.unit.registry.test_blobs import put

def kill(self, key, path):
    partial = Path(sys.argv[1], "objects", key).with_name(".upload-" + Path(key).name)
    partial.parent.mkdir(exist_ok=True)
    partial.write_bytes(b"wei")
    os.kill(os.getpid(), 9)

blobs = open_blobs(Store(Path(sys.argv[1], "registry")), Path(sys.argv[1], "ada"), sys.argv[2])
FolderObjects.put = kill
put(blobs, b"weights")
"""


def test_killed_upload_is_invisible_and_is_cleaned_up(servers: Servers) -> None:
    servers.store.close()
    command = [sys.executable, "-c", _KILLED, str(servers.path), servers.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    servers.store = Store(servers.path / "registry")
    grace = servers.open("grace")
    name = name_of(WEIGHTS)
    assert (grace.missing([name]), len(servers.objects), grace.held_count) == ([name], 1, 1)
    grace.maintain()
    assert len(servers.objects) == 1
    servers.execute("UPDATE stored_blobs SET last_use_us = last_use_us - 121000000")
    grace.maintain()
    grace.maintain()
    assert (servers.objects, grace.held_count) == ([], 0)
    # The next start removes what the server itself had received.
    assert files(servers.open("ada")) == []
    assert put(grace, WEIGHTS) == name


def test_slow_upload_is_not_taken_for_a_killed_one(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradrule_server.registry.shared_blobs._SIGN_OF_LIFE_S", 0.01)
    ada, grace = servers.open("ada"), servers.open("grace")

    def slow(self: FolderObjects, key: str, path: Path) -> None:
        store(self, key, path)
        servers.execute("UPDATE stored_blobs SET last_use_us = 1")
        # Neither the upload nor the server's periodic check needs to come to an end for it.
        wait_until(lambda: servers.query("SELECT 1 FROM stored_blobs WHERE last_use_us > 1") or None, "a sign of life")
        grace.maintain()

    store = patched(monkeypatch, "put", slow)
    name = put(ada, WEIGHTS)
    assert grace.missing([name]) == []


def test_upload_that_another_server_has_discarded_is_refused(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    ada, grace = servers.open("ada"), servers.open("grace")

    def hang(self: FolderObjects, key: str, path: Path) -> None:
        store(self, key, path)
        servers.execute("UPDATE stored_blobs SET last_use_us = last_use_us - 121000000")
        grace.maintain()

    with monkeypatch.context() as patch:
        store = patched(patch, "put", hang)
        assert reason_name(refusal(put, ada, WEIGHTS).reason) == "UNAVAILABLE"
    assert (servers.objects, ada.missing([name_of(WEIGHTS)])) == ([], [name_of(WEIGHTS)])
    put(ada, WEIGHTS)


def totals(servers: Servers) -> tuple[list[Any], list[Any]]:
    """Returns the stored amounts of each folder, and those that its blobs have."""
    stored = "SELECT folder || ' ' || size || ' ' || number FROM stored_blob_totals WHERE number > 0 ORDER BY 1"
    counted = (
        "SELECT folder || ' ' || sum(size) || ' ' || count(*) FROM stored_blobs WHERE state <> 'deleted' "
        "GROUP BY folder ORDER BY 1"
    )
    return servers.query(stored), servers.query(counted)


def test_totals_are_those_of_the_blobs(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    ada, grace = servers.open("ada", capacity=8 * PAGE), servers.open("grace", capacity=8 * PAGE)
    for number in range(9):
        put(ada.for_tenant("math") if number % 3 else grace, bytes([number]))
    with monkeypatch.context() as patch:
        patched(patch, "put", lambda *_: (_ for _ in ()).throw(ObjectStoreError("away")))
        refusal(put, ada, WEIGHTS)
    servers.objects[0].unlink()
    ada.compare_objects()
    stored, counted = totals(servers)
    assert stored == counted
    assert len(counted) == 2
    # An upload whose server was killed.
    ada._shared.index.reserve("", "f" * 64, PAGE, limit=ada._limit, kept=())
    assert totals(servers)[0] != stored
    servers.execute("UPDATE stored_blobs SET last_use_us = 1 WHERE state <> 'stored'")
    grace.maintain()
    stored, counted = totals(servers)
    assert stored == counted
    # Totals that are wrong, however that happened, are computed again at the next start.
    servers.execute("UPDATE stored_blob_totals SET size = 1, number = 17")
    servers.open("third")
    assert totals(servers) == (counted, counted)


async def test_blob_whose_commit_succeeded_without_an_answer_stays(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, grace = servers.open("ada"), servers.open("grace")
    name = name_of(WEIGHTS)

    def unanswered(key: str) -> bool:
        assert commit(key)
        # Another client finds the blob, and its program needs it.
        create(ProgramRegistry(servers.store, grace), "early", name)
        raise error(errors_pb2.ERROR_REASON_UNAVAILABLE, "the connection broke")

    commit = ada._shared.index.commit
    monkeypatch.setattr(ada._shared.index, "commit", unanswered)
    grace.pin_unchecked([name])
    monkeypatch.setattr(grace, "pin", lambda _: None)
    assert reason_name(refusal(put, ada, WEIGHTS).reason) == "UNAVAILABLE"
    assert await content(servers.open("third"), name) == WEIGHTS


def test_uses_are_not_lost_with_an_upload_that_fails(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    ada = servers.open("ada", capacity=2 * PAGE)
    first, second = put(ada, WEIGHTS), put(ada, b"second")
    # Asking for a blob is a use.
    assert ada.missing([first]) == []
    away = error(errors_pb2.ERROR_REASON_UNAVAILABLE, "the database is away")
    with monkeypatch.context() as patch:
        patch.setattr(ada._shared.index, "record_uses", lambda _: (_ for _ in ()).throw(away))
        assert reason_name(refusal(put, ada, b"third").reason) == "UNAVAILABLE"
    put(ada, b"third")
    assert ada.missing([first, second]) == [second]


def test_two_servers_may_upload_the_same_blob_at_once(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    ada, grace = servers.open("ada"), servers.open("grace")
    both = threading.Barrier(2, timeout=20)

    def together(self: FolderObjects, key: str, path: Path) -> None:
        store(self, key, path)
        both.wait()

    store = patched(monkeypatch, "put", together)
    threads = [threading.Thread(target=put, args=(blobs, WEIGHTS)) for blobs in (ada, grace)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert ada.missing([name_of(WEIGHTS)]) == []
    ada.maintain()
    assert (ada.held_count, len(servers.objects)) == (1, 2)
    servers.execute("UPDATE stored_blobs SET last_use_us = last_use_us - 61000000 WHERE state = 'deleted'")
    ada.maintain()
    assert len(servers.objects) == 1
    # A later upload of the same blob stores no second object.
    monkeypatch.undo()
    put(servers.open("third"), WEIGHTS)
    assert len(servers.objects) == 1


async def test_blob_uploaded_again_during_its_removal_stays(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    ada, grace = servers.open("ada", capacity=PAGE), servers.open("grace", capacity=2 * PAGE)
    name = put(ada, WEIGHTS)

    def late(self: FolderObjects, key: str, **options: bool) -> None:
        if name in key and not uploaded:
            uploaded.append(put(grace, WEIGHTS))
        delete(self, key, **options)

    uploaded: list[str] = []
    delete = patched(monkeypatch, "delete", late)
    put(ada, b"2" * PAGE)
    assert uploaded == [name]
    assert await content(servers.open("third"), name) == WEIGHTS


def test_failed_upload_leaves_nothing(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = servers.open("ada")
    for cause, reason in (
        (ObjectStoreError("away"), "UNAVAILABLE"),
        (OSError(errno.EIO, "failed"), "UNAVAILABLE"),
        (OSError(errno.ENOSPC, "No space left on device"), "QUOTA_EXCEEDED"),
    ):

        def fail(*_: object, cause: Exception = cause) -> None:
            raise cause

        with monkeypatch.context() as patch:
            patched(patch, "put", fail)
            found = refusal(put, blobs, WEIGHTS)
        assert reason_name(found.reason) == reason
        assert (blobs.held_count, files(blobs), blobs.missing([name_of(WEIGHTS)])) == (0, [], [name_of(WEIGHTS)])
    put(blobs, WEIGHTS)


def test_index_is_filled_again_from_the_object_store(servers: Servers) -> None:
    ada = servers.open("ada")
    names = [put(ada, WEIGHTS), put(ada.for_tenant("math"), b"more")]
    for table in ("program_blobs", "stored_blobs"):
        servers.execute(f"DROP TABLE {table}")
    (servers.path / "objects" / "default" / "notes.txt").write_text("not a blob")
    again = servers.open("grace")
    assert (again.missing(names[:1]), again.for_tenant("math").missing(names[1:])) == ([], [])
    again.maintain()
    assert (again.held_bytes, again.held_count) == (PAGE, 1)


def test_objects_that_a_restored_index_lacks_are_entered(servers: Servers) -> None:
    ada = servers.open("ada")
    old, new = put(ada, WEIGHTS), put(ada, b"new")
    # A restored backup: the table is as before the second upload.
    servers.execute(f"DELETE FROM stored_blobs WHERE name = '{new}'")
    again = servers.open("grace")
    assert again.missing([old, new]) == [new]
    again.maintain()
    again.maintain()
    assert (again.missing([old, new]), again.held_count) == ([], 2)


async def test_index_older_than_the_objects_is_corrected(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    ada = servers.open("ada")
    name, lost = put(ada, WEIGHTS), put(ada, b"lost")
    [key] = servers.query(f"SELECT object FROM stored_blobs WHERE name = '{name}'")
    # The restored table has objects that were deleted since: one blob was uploaded again, as another object.
    (servers.path / "objects" / key).rename(servers.path / "objects" / f"{key.rpartition('-')[0]}-{'0' * 32}")
    next(path for path in servers.objects if lost in path.name).unlink()
    grace = servers.open("grace")
    grace.maintain()
    assert grace.missing([name, lost]) == [lost]
    assert await content(grace, name) == WEIGHTS
    assert [text for text in caplog.messages if "missing" in text] == [
        f"2 blobs are missing in {servers.url}; calls that need them ask clients to upload them again"
    ]


def test_missing_objects_are_looked_up_at_the_same_time(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    ada = servers.open("ada")
    names = [put(ada, bytes([number])) for number in range(40)]
    for file in servers.objects[:32]:
        file.unlink()
    grace = servers.open("grace")
    running, most, keys, lock = 0, 0, list[str](), threading.Lock()

    def counted(self: FolderObjects, key: str, offset: int, count: int) -> bytes:
        nonlocal running, most
        with lock:
            keys.append(key)
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        try:
            return read(self, key, offset, count)
        finally:
            with lock:
                running -= 1

    read = patched(monkeypatch, "read", counted)
    grace.maintain()
    assert len(grace.missing(names)) == 32
    assert 1 < most <= 8
    # Nothing is looked up twice but the marker, nor anything that was listed.
    assert sorted(set(keys)) == sorted(
        [*servers.query("SELECT object FROM stored_blobs WHERE state = 'deleted'"), MARKER]
    )
    assert len(keys) == 32 + 2


def test_missing_objects_are_not_looked_up_without_the_marker(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = servers.open("ada")
    names = [put(ada, bytes([number])) for number in range(3)]
    grace = servers.open("grace")
    (servers.path / "objects").rename(servers.path / "lost")
    (servers.path / "objects").mkdir()
    keys: list[str] = []

    def counted(self: FolderObjects, key: str, offset: int, count: int) -> bytes:
        keys.append(key)
        return read(self, key, offset, count)

    read = patched(monkeypatch, "read", counted)
    grace.maintain()
    assert keys == [MARKER]
    assert grace.missing(names) == []


def test_first_failure_ends_the_search_for_missing_objects(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    ada = servers.open("ada")
    names = [put(ada, bytes([number])) for number in range(40)]
    for file in servers.objects:
        file.unlink()
    grace = servers.open("grace")
    keys: list[str] = []

    def away(self: FolderObjects, key: str, offset: int, count: int) -> bytes:
        if key == MARKER:
            return read(self, key, offset, count)
        keys.append(key)
        raise ObjectStoreError("away")

    read = patched(monkeypatch, "read", away)
    grace.maintain()
    assert 1 <= len(keys) <= 8
    assert grace.missing(names) == []


def test_object_that_is_deleted_while_objects_are_listed_is_not_entered_again(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, grace = servers.open("ada", capacity=PAGE), servers.open("grace", capacity=PAGE)
    name = put(ada, WEIGHTS)

    def late(self: FolderObjects, start: str = "") -> Iterator[tuple[str, int]]:
        listed = list(iterate(self, start))
        put(ada, b"other")
        yield from listed

    iterate = patched(monkeypatch, "iterate", late)
    grace.maintain()
    assert grace.missing([name]) == [name]


def test_many_objects_are_entered_in_several_transactions(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    # One insert of 100,000 rows exceeds the time that PostgreSQL may take for a statement.
    for name in ("_CHUNK", "_STATES"):
        monkeypatch.setattr(f"gradrule_server.registry.stored_blobs.{name}", 7)
    ada = servers.open("ada")
    names = [put(ada, bytes([number])) for number in range(30)]
    index, write = ada._shared.index, servers.store.database.write
    writes: list[object] = []

    def counted() -> Any:
        writes.append(None)
        return write()

    monkeypatch.setattr(servers.store.database, "write", counted)
    servers.execute("DELETE FROM stored_blobs")
    listed = [*ada.objects.iterate(), *((f"default/{name}-{'0' * 32}", 1) for name in names)]
    writes.clear()
    assert index.compare(listed, list) == (30, 0)
    assert len(writes) == 9
    assert ada.missing(names) == []
    assert set(servers.query("SELECT count(*) FROM stored_blobs GROUP BY state")) == {30}
    assert index.compare([], list) == (0, 30)
    assert ada.missing(names) == names


def test_upload_that_displaces_many_blobs_deletes_only_some_objects_itself(servers: Servers) -> None:
    ada = servers.open("ada", capacity=20 * PAGE)
    for number in range(20):
        put(ada, bytes([number]))
    put(ada, b"x" * 20 * PAGE)
    assert len(servers.objects) == 20 - 8 + 1
    servers.execute("UPDATE stored_blobs SET last_use_us = 1 WHERE state = 'deleted'")
    ada.maintain()
    assert len(servers.objects) == 1


def test_second_object_of_a_blob_is_deleted(servers: Servers) -> None:
    put(servers.open("ada"), WEIGHTS)
    [file] = servers.objects
    twin = file.with_name(f"{file.name.rpartition('-')[0]}-{'0' * 32}")
    twin.write_bytes(WEIGHTS)
    grace = servers.open("grace")
    grace.maintain()
    servers.execute("UPDATE stored_blobs SET last_use_us = 0 WHERE state = 'deleted'")
    grace.maintain()
    assert servers.objects == [file]
    assert grace.missing([name_of(WEIGHTS)]) == []


async def test_nothing_is_deleted_while_something_else_answers(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = put(servers.open("ada"), WEIGHTS)
    grace = servers.open("grace")
    with monkeypatch.context() as patch:
        patched(patch, "read", lambda *_: b"<html>")
        assert reason_name((await failure(content(grace, name))).reason) == "UNAVAILABLE"
    assert len(servers.objects) == 1
    assert await content(grace, name) == WEIGHTS


def test_objects_of_others_are_not_listed(tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    for path in ("default/a", "tenant-1/b", "tenant-1/.upload-c", "others/d", "default-e", MARKER):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"1")
    objects = open_object_store(folder.as_uri())
    assert sorted(blob_objects(objects)) == [("default/a", 1), ("tenant-1/b", 1)]
    assert len(list(objects.iterate())) == 4


def test_object_store_belongs_to_one_registry(servers: Servers, tmp_path: Path) -> None:
    put(servers.open("ada"), WEIGHTS)
    other = Store(tmp_path / "other")
    with pytest.raises(StoreError, match="another registry"):
        open_blobs(other, tmp_path / "other", servers.url)
    other.close()
    (tmp_path / "objects" / MARKER).write_text("{}")
    with pytest.raises(StoreError, match="another registry"):
        servers.open("ada")


def test_new_object_store_of_a_registry_with_blobs_is_reported(
    servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(servers.open("ada"), WEIGHTS)
    (tmp_path / "objects").rename(tmp_path / "lost")
    (tmp_path / "objects").mkdir()
    servers.open("ada")
    assert "is new, but the registry has blobs" in caplog.messages[0]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file:///does/not/exist", "does not exist; create it"),
        ("s3://key:secret@bucket/x", "AWS_ACCESS_KEY_ID"),
        ("s3:///x", "must be file:///folder or s3://bucket/prefix"),
        ("ftp://host/x", "not 'ftp://host/x'"),
        ("s3:/key:secret@bucket", "not 'bucket'"),
        ("s3://", "not 's3://'"),
        ("relative", "not 'relative'"),
        ("file://host/x", "must be file:///folder"),
        ("s3://bucket/x?versionId=1", r"without \? and #"),
        ("s3://key:secret@[::1/x", "is no valid URL"),
        ("s3://key:secret@b\u2100/x", "is no valid URL"),
    ],
)
def test_wrong_urls_are_refused(url: str, says: str) -> None:
    with pytest.raises(StoreError, match=says) as caught:
        open_object_store(url)
    assert "secret" not in str(caught.value)


_IMPORTS = """
import sys
from pathlib import Path
from gradrule_server.assembly import create_blob_store
from gradrule_server.settings import Settings
from gradrule_server.registry.store import Store
folder = Path(sys.argv[1])
(folder / "objects").mkdir()
for flags in ([], ["--blobs", (folder / "objects").as_uri()]):
    assert "gradrule_server.registry.shared_blobs" not in sys.modules
    store = Store(folder / "data")
    create_blob_store(Settings.load(["--data-dir", str(folder / "data"), *flags], {}), store)
    store.close()
found = {"fsspec", "s3fs", "botocore", "aiobotocore", "aiohttp"} & set(sys.modules)
assert not found, found
"""


def test_servers_without_s3_import_nothing_of_it(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORTS, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
