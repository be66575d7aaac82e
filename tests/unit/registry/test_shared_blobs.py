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

from gradrule.v1 import program_pb2, tensor_pb2
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.registry.blob_index import BlobAmount
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.data_folder import BLOBS, StoreError
from gradrule_server.registry.object_store import MARKER, FolderObjects, ObjectStoreError, open_object_store
from gradrule_server.registry.programs import NeededBlobs, ProgramRegistry
from gradrule_server.registry.shared_blobs import (
    MAX_TRANSFERS,
    SharedBlobs,
    _blob_objects,
)
from gradrule_server.registry.store import Store
from tests.stores import folder_url, open_blobs, shared_of
from tests.unit.registry.test_blobs import PAGE, damage, name_of, put, refusal

WEIGHTS = b"weights"


class Servers:
    """Opens the blobs of several servers with one registry and one object store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = folder_url(path)
        self.store = Store(path / "registry")

    def open(self, name: str, **limits: int) -> BlobStore:
        return open_blobs(self.store, self.path / name, self.url, **limits)

    @property
    def objects(self) -> list[Path]:
        """The files of all objects."""
        return [path for path in (self.path / "objects").rglob("*") if path.is_file() and path.name != MARKER]

    def age(self, *names: str) -> None:
        """Lets the objects of some blobs, or all files, be two days old."""
        for path in self.objects:
            if not names or path.name in names:
                os.utime(path, (time.time() - 172_800,) * 2)

    def collect(self, grace_s: float = 86_400.0) -> tuple[int, int]:
        """Deletes objects that no program needs, as `gradrule registry gc` does."""
        shared = SharedBlobs(open_object_store(self.url), self.store.database, BlobAmount(1 << 30, 1000))
        return shared.collect(NeededBlobs(self.store), grace_s)


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


async def upload(blobs: BlobStore, data: bytes) -> int:
    upload = blobs.upload(name_of(data))
    try:
        upload.write(data)
        return await blobs.finish_upload(upload)
    finally:
        upload.close()


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
    uploads = [asyncio.create_task(upload(theirs, bytes([200 + number]))) for number in range(10)]
    assert await content(grace, other) == WEIGHTS
    await upload(grace, b"other")
    assert await theirs.look_up(lambda: theirs.missing([*names, other])) == [other]
    assert not any(transfer.done() for transfer in (*fetches, *uploads))
    may_go_on.set()
    assert await asyncio.gather(*fetches) == [bytes([number]) for number in range(10)]
    assert await asyncio.gather(*uploads) == [1] * 10
    assert theirs.used.count == 20


async def test_fetch_goes_on_when_nobody_waits(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
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
    # Calls that give up at their deadlines.
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert not grace._own.pins
    [fetch] = [task for task in asyncio.all_tasks() if task.get_name() == "fetch-blob"]
    later = asyncio.create_task(content(grace, name))
    may_go_on.set()
    await fetch
    assert (await later, reads, files(grace)) == (WEIGHTS, [0], [name])


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


def test_blobs_in_the_cache_are_known_while_the_object_store_is_away(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = servers.open("ada")
    cached, other, recent = put(ada, WEIGHTS), put(servers.open("grace"), b"other"), b"recent"
    ada = servers.open("ada")
    put(ada, recent)
    programs = ProgramRegistry(servers.store, ada)

    def away(*_: object) -> None:
        raise ObjectStoreError("away")

    with monkeypatch.context() as patch:
        patched(patch, "find", away)
        assert ada.missing([cached]) == []
        assert reason_name(refusal(ada.missing, [cached, other]).reason) == "UNAVAILABLE"
        # Other servers would need the object.
        assert reason_name(refusal(create, programs, "early", cached).reason) == "UNAVAILABLE"
        # `gradrule registry gc` deletes no object that was stored in the last minutes.
        create(programs, "recent", name_of(recent))
    assert ada.missing([cached, other]) == []
    create(programs, "late", cached)


async def test_few_lookups_wait_for_an_object_store_that_hangs(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = servers.open("ada")
    started, may_go_on = threading.Semaphore(0), threading.Event()

    def hang(self: FolderObjects, keys: Any) -> dict[str, Any]:
        started.release()
        may_go_on.wait(20)
        return {}

    patched(monkeypatch, "find", hang)
    calls = [asyncio.create_task(blobs.look_up(lambda: blobs.missing(["0" * 64]))) for _ in range(20)]
    for _ in range(MAX_TRANSFERS):
        await asyncio.to_thread(started.acquire)
    # Calls that give up at their deadlines: those that wait for a slot start nothing, the others keep theirs.
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    later = asyncio.create_task(blobs.look_up(lambda: blobs.missing(["1" * 64])))
    await asyncio.sleep(0)
    assert shared_of(blobs)._lookup_slots.waiting == 1
    assert not started.acquire(blocking=False)
    may_go_on.set()
    assert await later == ["1" * 64]


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


async def test_missing_object_is_a_missing_blob(servers: Servers) -> None:
    name = put(servers.open("ada"), WEIGHTS)
    grace = servers.open("grace")
    servers.objects[0].unlink()
    assert reason_name((await failure(content(grace, name))).reason) == "BLOB_NOT_FOUND"
    assert grace.missing([name]) == [name]


async def test_folder_that_is_not_mounted_loses_nothing(servers: Servers) -> None:
    ada, grace = servers.open("ada"), servers.open("grace")
    name = put(ada, WEIGHTS)
    folder = servers.path / "objects"
    folder.rename(servers.path / "elsewhere")
    for _ in range(2):
        assert reason_name((await failure(content(grace, name))).reason) == "UNAVAILABLE"
        assert reason_name(refusal(put, grace, b"new").reason) == "UNAVAILABLE"
        folder.mkdir(exist_ok=True)
    assert reason_name(refusal(grace.missing, [name]).reason) == "UNAVAILABLE"
    assert (files(grace), os.listdir(folder)) == ([], [])
    folder.rmdir()
    (servers.path / "elsewhere").rename(folder)
    assert await content(grace, name) == WEIGHTS
    shared_of(grace).maintain()
    assert grace.used.count == 1


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


def spec_with(name: str) -> program_pb2.ProgramSpec:
    spec = program_pb2.ProgramSpec()
    spec.graph.serialized = b"graph"
    spec.variables.add(name="w", value=tensor_pb2.TensorSource(blob=tensor_pb2.BlobTensor(sha256=name)))
    return spec


def create(programs: ProgramRegistry, program_id: str, name: str) -> None:
    program = program_pb2.Program()
    program.digests.program = name
    programs.create(program_id, spec_with(name), b"", program, b"")


def test_limits_count_the_blobs_of_all_servers(servers: Servers) -> None:
    ada, grace = (servers.open(name, capacity=2 * PAGE) for name in ("ada", "grace"))
    put(ada, b"1" * PAGE)
    second = put(grace, b"2" * PAGE)
    assert (ada.used.size, grace.used.size) == (PAGE, 2 * PAGE)
    # What is there already needs no room.
    put(ada, b"2" * PAGE)
    assert ada.used.size == 2 * PAGE
    found = refusal(put, ada, b"3" * PAGE)
    assert reason_name(found.reason) == "QUOTA_EXCEEDED"
    assert "delete programs and run `gradrule registry gc`, or start" in found.message
    assert "--max-blob-bytes" in found.message
    assert (len(servers.objects), files(ada)) == (2, sorted(name_of(bytes([digit]) * PAGE) for digit in b"12"))
    servers.age(second)
    assert servers.collect() == (1, PAGE)
    put(ada, b"3" * PAGE)
    assert "--tenant-blobs" in refusal(put, ada.for_tenant("math", PAGE, 0), b"4").message


def test_objects_that_no_program_needs_are_deleted_after_a_grace_time(servers: Servers) -> None:
    ada, grace = servers.open("ada"), servers.open("grace")
    needed, old, young = (put(ada, data) for data in (WEIGHTS, b"old", b"young"))
    of_math = put(ada.for_tenant("math"), WEIGHTS)
    create(ProgramRegistry(servers.store, ada), "kept", needed)
    for path in servers.objects:
        if path.name != young:
            os.utime(path, (time.time() - 172_800,) * 2)
    # The tenant's program needs its own blob only.
    assert servers.collect() == (2, len(WEIGHTS) + len(b"old"))
    assert (grace.missing([needed, old, young]), grace.for_tenant("math").missing([of_math])) == ([old], [of_math])
    shared_of(grace).maintain()
    assert (grace.used.count, grace.for_tenant("math").used.count) == (2, 0)
    # However short the time, a program that is stored now finds its blobs.
    assert servers.collect(0.0) == (0, 0)
    ProgramRegistry(servers.store, ada).delete("kept")
    servers.age()
    assert servers.collect() == (2, len(WEIGHTS) + len(b"young"))
    assert servers.objects == []


def test_blob_that_a_client_looks_for_is_renewed(servers: Servers) -> None:
    ada = servers.open("ada")
    name, again = put(ada, WEIGHTS), put(ada, b"again")
    servers.age()
    assert ada.missing([name]) == []
    assert put(ada, b"again") == again
    assert servers.collect() == (0, 0)


def test_object_that_is_renewed_while_others_are_listed_stays(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = servers.open("ada")
    name = put(ada, WEIGHTS)
    servers.age()

    def late(self: FolderObjects, start: str = "") -> Iterator[Any]:
        listed = list(iterate(self, start))
        ada.missing([name])
        yield from listed

    iterate = patched(monkeypatch, "iterate", late)
    assert servers.collect() == (0, 0)
    assert ada.missing([name]) == []


def test_nothing_is_collected_in_an_object_store_without_the_marker(servers: Servers) -> None:
    put(servers.open("ada"), WEIGHTS)
    servers.age()
    (servers.path / "objects" / MARKER).unlink()
    with pytest.raises(ObjectStoreError, match="of this registry"):
        servers.collect()
    assert len(servers.objects) == 1


def test_program_is_not_stored_if_its_blob_was_deleted(servers: Servers) -> None:
    ada = servers.open("ada")
    name = put(ada, WEIGHTS)
    servers.age()
    servers.collect()
    # It stays in the cache of the server.
    ada = servers.open("ada")
    assert files(ada) == [name]
    programs = ProgramRegistry(servers.store, ada)
    assert reason_name(refusal(create, programs, "late", name).reason) == "BLOB_NOT_FOUND"
    assert (len(programs), servers.store.total_usage().programs, ada._own.pins) == (0, 0, {})
    put(ada, WEIGHTS)
    create(programs, "late", name)


def test_blobs_of_the_data_folder_are_reported(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    data_dir = servers.path / "ada"
    put(BlobStore(data_dir / BLOBS, 1 << 20), WEIGHTS)
    assert servers.open("ada").missing([name_of(WEIGHTS)]) == [name_of(WEIGHTS)]
    assert "are not used, because --blobs names another place; `gradrule registry copy`" in caplog.messages[0]


def test_blobs_of_an_object_store_that_are_not_counted_are_counted_at_the_start(servers: Servers) -> None:
    put(servers.open("ada"), WEIGHTS)
    put(servers.open("ada").for_tenant("math"), b"more")
    (servers.path / "objects" / "default" / "notes.txt").write_text("not a blob")
    # As after a backup was restored.
    with servers.store.database.write() as connection:
        connection.exec_driver_sql("DELETE FROM blob_usage")
    grace = servers.open("grace")
    assert (grace.used.size, grace.used.count, grace.for_tenant("math").used.count) == (PAGE, 1, 1)


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
    assert (grace.missing([name]), len(servers.objects), grace.used.count) == ([name], 1, 1)
    assert servers.collect() == (0, 0)
    assert len(servers.objects) == 1
    servers.age()
    assert servers.collect() == (0, 0)
    shared_of(grace).maintain()
    assert (servers.objects, grace.used.count) == ([], 0)
    # The next start removes what the server itself had received.
    assert files(servers.open("ada")) == []
    assert put(grace, WEIGHTS) == name


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
    assert len(servers.objects) == 1
    # Both have counted it, at most.
    assert servers.collect() == (0, 0)
    shared_of(ada).maintain()
    assert ada.used.count == 1


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
        assert (blobs.used.count, files(blobs), blobs.missing([name_of(WEIGHTS)])) == (0, [], [name_of(WEIGHTS)])
    put(blobs, WEIGHTS)


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


def test_objects_of_others_are_no_blobs(tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    tenant, name = f"tenant-{'1' * 32}", "2" * 64
    others = ("default/a", f"{tenant}/.upload-c", f"others/{name}", f"default-{name}", MARKER)
    for path in (f"default/{name}", f"{tenant}/{name}", *others):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"1")
    objects = open_object_store(folder.as_uri())
    assert sorted(key for key, _ in _blob_objects(objects)) == [("", name), (tenant, name)]
    assert len(list(objects.iterate())) == 5


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
