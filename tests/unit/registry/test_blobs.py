"""Tests the store of blobs: limits, order of removal, pins, restarts.

Tests with the fixture `open_store` run with files and with an object store; tests/cluster runs them with S3.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.registry.blobs import BlobStore
from tests.stores import OpenStore, folder_url, shared_stores, stored_files

PAGE = 4096
"""What a file takes on a disk at least."""


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(store: BlobStore, data: bytes) -> str:
    upload = store.upload(name_of(data))
    try:
        upload.write(data)
        assert upload.finish() == len(data)
    finally:
        upload.close()
    return name_of(data)


def refusal(call: object, *args: object) -> GradruleError:
    with pytest.raises(GradruleError) as caught:
        call(*args)  # type: ignore[operator]
    return caught.value


def files(store: BlobStore) -> set[str]:
    return {path.name for path in store.folder.iterdir()}


@pytest.fixture(params=["files", "folder"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    """Returns a function that opens a store; each call is one start of a server."""
    if request.param == "files":
        yield lambda capacity, count=sys.maxsize: BlobStore(tmp_path / "blobs", capacity, count)
    else:
        with shared_stores(tmp_path, folder_url(tmp_path)) as opened:
            yield opened


@pytest.fixture
def open_files(tmp_path: Path) -> OpenStore:
    """Returns a function that opens a store of files, which makes room for new blobs."""
    return lambda capacity, count=sys.maxsize: BlobStore(tmp_path / "blobs", capacity, count)


def test_uploaded_blob_is_present(open_store: OpenStore) -> None:
    store = open_store(3 * PAGE)
    name = put(store, b"abc")
    assert (store.read(name), store.size(name), store.used.size) == (b"abc", 3, PAGE)
    assert store.missing([name, "0" * 64, "0" * 64]) == ["0" * 64]
    assert put(store, b"abc") == name
    assert (store.used.size, stored_files(store)) == (PAGE, {name})


def test_least_recently_used_blobs_are_removed(open_files: OpenStore) -> None:
    store = open_files(3 * PAGE)
    a, b, c = (put(store, bytes([letter]) * PAGE) for letter in b"abc")
    store.missing([a])
    d = put(store, b"d" * PAGE)
    assert store.missing([a, b, c, d]) == [b]
    assert stored_files(store) == {a, c, d}


def test_pinned_blobs_are_not_removed(open_files: OpenStore) -> None:
    store = open_files(2 * PAGE)
    a, b = put(store, b"a" * PAGE), put(store, b"b" * PAGE)
    store.pin([a])
    with store.pinned([a, b, b]):
        error = refusal(put, store, b"c" * PAGE)
        assert reason_name(error.reason) == "QUOTA_EXCEEDED"
        assert "--max-blob-bytes" in error.message
    put(store, b"c" * PAGE)
    assert store.missing([a, b]) == [b]
    store.unpin([a])
    put(store, b"d" * (2 * PAGE))
    assert store.missing([a]) == [a]
    assert (store.used.size, len(stored_files(store))) == (2 * PAGE, 1)


def test_pin_pins_all_blobs_or_none(open_files: OpenStore) -> None:
    store = open_files(2 * PAGE)
    a = put(store, b"a" * PAGE)
    error = refusal(store.pin, [a, "1" * 64, "2" * 64])
    assert reason_name(error.reason) == "BLOB_NOT_FOUND"
    assert [item.name for item in error.resources] == ["1" * 64, "2" * 64]
    put(store, b"b" * (2 * PAGE))
    assert store.missing([a]) == [a]


@pytest.mark.parametrize("name", ["", "abc", "A" * 64, "0" * 63 + "/", "../" + "0" * 61])
def test_names_of_blobs_must_be_hashes(open_store: OpenStore, name: str) -> None:
    store = open_store(2 * PAGE)
    for call in (store.size, store.upload, store.read):
        assert reason_name(refusal(call, name).reason) == "MALFORMED_REQUEST"
    assert reason_name(refusal(store.missing, [name]).reason) == "MALFORMED_REQUEST"


def test_unfinished_upload_leaves_nothing(open_store: OpenStore) -> None:
    store = open_store(2 * PAGE)
    wrong = store.upload("0" * 64)
    wrong.write(b"abc")
    assert reason_name(refusal(wrong.finish).reason) == "BLOB_MISMATCH"
    wrong.close()
    large = store.upload("0" * 64)
    large.write(b"a" * (PAGE + 1))
    assert reason_name(refusal(large.write, b"a" * (PAGE + 1)).reason) == "QUOTA_EXCEEDED"
    large.close()
    large.write(b"late")
    assert (store.used.size, stored_files(store)) == (0, set())


_DISK = """
import hashlib, resource, sys
from pathlib import Path
from typing import Any
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.registry.blobs import BlobStore

store = BlobStore(Path(sys.argv[1]), 1 << 20)
data = b"a" * 100_000
# No file may grow larger: what a write to a full disk does, part of it included.
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
for pieces in ([data], [data[:49_999], data[49_999:]], [data[:50_000], b"a", b"b"]):
    upload = store.upload(hashlib.sha256(data).hexdigest())
    told = ""
    for piece in pieces:
        try:
            upload.write(piece)
        except GradruleError as refusal:
            told = f"{reason_name(refusal.reason)}: {refusal.message}"
    assert told.startswith("QUOTA_EXCEEDED: the disk that the server keeps blobs on is full"), told
    upload.close()
    upload.close()
    assert store.used.size == 0, store.used.size
    assert list(store.folder.iterdir()) == []
small = data[:50_000]
upload = store.upload(hashlib.sha256(small).hexdigest())
upload.write(small)
upload.finish()
upload.close()
assert store.used.size == 13 * 4096, store.used.size
"""


def test_upload_to_a_full_disk_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _DISK, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_disk_that_is_full_at_the_end_of_an_upload_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store = BlobStore(tmp_path, 2 * PAGE)
    upload = store.upload(name_of(b"abc"))
    upload.write(b"abc")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if step == "fsync" else (Path, "rename")), full)
        found = refusal(upload.finish)
    assert reason_name(found.reason) == "QUOTA_EXCEEDED"
    assert "No space left on device" in found.message
    upload.close()
    assert (store.used.size, files(store)) == (0, set())
    put(store, b"abc")


def test_name_of_an_acknowledged_blob_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore(tmp_path / "blobs", 2 * PAGE).for_tenant("ada")
    synced: list[tuple[Path, bool]] = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced.append((path, (store.folder / name_of(b"abc")).exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    put(store, b"abc")
    assert (tmp_path / "blobs", False) in synced
    assert synced[-1] == (store.folder, True)


def test_restart_keeps_blobs_and_their_order(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 3 * PAGE)
    a, b = put(store, b"a" * PAGE), put(store, b"b" * PAGE)
    os.utime(tmp_path / b, ns=(1, 1))
    # As an older release left it, which knew a blob's last use by the time of its last change.
    os.utime(tmp_path / a, ns=(1, 5))
    (tmp_path / ".upload-left-behind").write_bytes(b"x")
    store = BlobStore(tmp_path, 2 * PAGE)
    assert store.used.size == 2 * PAGE
    put(store, b"c" * PAGE)
    assert store.missing([a, b]) == [b]
    assert ".upload-left-behind" not in files(store)


def test_small_blobs_count_with_their_disk_space(open_files: OpenStore) -> None:
    store = open_files(10 * PAGE)
    first = [put(store, bytes([number]) * 5) for number in range(10)]
    assert store.used.size == 10 * PAGE
    put(store, b"one more")
    assert store.missing(first) == first[:1]
    again = open_files(10 * PAGE)
    assert again.used.size == 10 * PAGE


def test_number_of_stored_blobs_is_limited(open_files: OpenStore) -> None:
    store = open_files(1 << 30, 3)
    ada, grace = store.for_tenant("ada", 1 << 20, 2), store.for_tenant("grace", 1 << 20, 3)
    first, second = put(ada, b""), put(ada, b"2")
    third = put(ada, b"3")
    assert ada.missing([first, second, third]) == [first]
    with ada.pinned([second, third]):
        found = refusal(put, ada, b"4")
        assert reason_name(found.reason) == "QUOTA_EXCEEDED"
        assert "at most 2 blobs" in found.message
        assert "--tenant-blobs" in found.message
        put(grace, b"4")
        with grace.pinned([name_of(b"4")]):
            assert "--max-blobs" in refusal(put, grace, b"5").message
    for data in (b"5", b"6"):
        put(grace, data)
    # Blobs of the tenant with the largest number are removed first.
    assert ada.missing([second, third]) == [second]
    assert grace.missing([name_of(data) for data in (b"4", b"5", b"6")]) == [name_of(b"4")]
    assert (ada.used.count, grace.used.count) == (1, 2)


def test_restart_keeps_blobs_and_uses(open_files: OpenStore) -> None:
    store = open_files(3 * PAGE)
    a, b, c = (put(store, bytes([letter]) * PAGE) for letter in b"abc")
    store.missing([a])
    store = open_files(3 * PAGE)
    assert store.used.size == 3 * PAGE
    put(store, b"d" * PAGE)
    assert store.missing([a, b, c]) == [b]


def test_number_of_blobs_is_limited(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 1 << 30, 4)
    ada, grace = store.for_tenant("ada", 1 << 20, 2), store.for_tenant("grace", 1 << 20, 3)
    first, second = put(ada, b""), put(ada, b"2")
    third = put(ada, b"3")
    assert ada.missing([first, second, third]) == [first]
    with ada.pinned([second, third]):
        found = refusal(ada.upload, "0" * 64)
        assert reason_name(found.reason) == "QUOTA_EXCEEDED"
        assert "at most 2 blobs" in found.message
        assert "--tenant-blobs" in found.message
        uploads = [grace.upload(f"{number}" * 64) for number in (1, 2)]
        # Uploads under way count too.
        found = refusal(grace.upload, "3" * 64)
        assert "--max-blobs" in found.message
        for upload in uploads:
            upload.close()
        put(grace, b"4")
    put(grace, b"5")
    put(grace, b"6")
    assert ada.missing([second, third]) == [second]
    assert grace.missing([name_of(bytes([letter])) for letter in b"456"]) == []


def damage(path: Path) -> None:
    """Changes a byte in place, as a disk may; nothing else of the file changes."""
    stat = path.stat()
    with path.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("use", ["pin", "read", "verify"])
def test_damaged_blob_is_missing_until_it_is_uploaded_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, use: str
) -> None:
    name = put(BlobStore(tmp_path, 1 << 20), b"weights")
    damage(tmp_path / name)
    store = BlobStore(tmp_path, 1 << 20)
    assert not store.are_verified([name])
    found = refusal(getattr(store, use), name if use == "read" else [name])
    assert reason_name(found.reason) == "BLOB_NOT_FOUND"
    assert [item.name for item in found.resources] == [name]
    assert caplog.messages == [
        f"the blob {tmp_path / name} is damaged; it was renamed to {tmp_path / f'.damaged-{name}'}, and calls that "
        "need it ask clients to upload it again"
    ]
    assert (store.missing([name]), store.used.size) == ([name], 0)
    put(store, b"weights")
    assert store.read(name) == b"weights"
    assert store.are_verified([name])


def test_change_of_a_file_is_detected_while_the_server_runs(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 1 << 20)
    name, other = put(store, b"weights"), put(store, b"other")
    (tmp_path / name).write_bytes(b"changed")
    assert not store.are_verified([name])
    # A client that was told BLOB_NOT_FOUND asks what it must send.
    assert store.missing([name, other]) == [name]
    put(store, b"weights")
    (tmp_path / name).unlink()
    assert reason_name(refusal(store.pin, [name]).reason) == "BLOB_NOT_FOUND"
    put(store, b"weights")
    (tmp_path / name).unlink()
    assert store.missing([name]) == [name]
    put(store, b"weights")
    assert store.read(name) == b"weights"
    # Written anew with the same bytes: it is read once more, and is right.
    (tmp_path / name).write_bytes(b"weights")
    assert store.missing([name]) == []
    assert store.are_verified([name])


def test_blob_is_verified_once_for_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = put(BlobStore(tmp_path, 1 << 20), b"weights")
    store = BlobStore(tmp_path, 1 << 20)
    read: list[str] = []
    digest = hashlib.file_digest

    def counted(file: Any, algorithm: str) -> Any:
        read.append(Path(file.name).name)
        return digest(file, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    assert store.missing([name]) == []
    assert read == []
    for _ in range(3):
        store.verify([name])
        store.missing([name])
    assert read == [name]
    uploaded = put(store, b"more")
    store.verify([uploaded])
    assert read == [name]


def test_upload_replaces_a_damaged_file(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 1 << 20)
    name = put(store, b"weights")
    damage(tmp_path / name)
    put(store, b"weights")
    assert store.read(name) == b"weights"
    assert store.used.size == PAGE


def test_blob_pinned_before_its_upload_is_not_removed(open_files: OpenStore) -> None:
    store = open_files(2 * PAGE)
    store.pin_unchecked([name_of(b"late")])
    put(store, b"late")
    put(store, b"1")
    put(store, b"2")
    assert store.missing([name_of(b"late")]) == []
    store.unpin([name_of(b"late")])
    put(store, b"3")
    put(store, b"4")
    assert store.missing([name_of(b"late")]) == [name_of(b"late")]
