"""The store of blobs: bounded, least recently used go first, held ones stay, a restart knows them."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.registry.blobs import BlobStore


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


def test_what_was_put_in_is_there(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs", 100)
    name = put(store, b"abc")
    assert (store.read(name), store.size(name), store.held_bytes) == (b"abc", 3, 3)
    assert store.missing([name, "0" * 64, "0" * 64]) == ["0" * 64]
    assert put(store, b"abc") == name
    assert (store.held_bytes, files(store)) == (3, {name})


def test_the_least_recently_used_go(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 30)
    a, b, c = (put(store, bytes([letter]) * 10) for letter in b"abc")
    store.missing([a])
    d = put(store, b"d" * 10)
    assert store.missing([a, b, c, d]) == [b]
    assert files(store) == {a, c, d}


def test_held_ones_stay(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 20)
    a, b = put(store, b"a" * 10), put(store, b"b" * 10)
    store.hold([a])
    with store.held([a, b, b]):
        error = refusal(put, store, b"c" * 10)
        assert reason_name(error.reason) == "QUOTA_EXCEEDED"
        assert "--max-blob-bytes" in error.message
    put(store, b"c" * 10)
    assert store.missing([a, b]) == [b]
    store.let_go([a])
    put(store, b"d" * 20)
    assert store.missing([a]) == [a]
    assert (store.held_bytes, len(files(store))) == (20, 1)


def test_holding_is_all_or_nothing(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 20)
    a = put(store, b"a" * 10)
    error = refusal(store.hold, [a, "1" * 64, "2" * 64])
    assert reason_name(error.reason) == "BLOB_NOT_FOUND"
    assert [item.name for item in error.resources] == ["1" * 64, "2" * 64]
    put(store, b"b" * 20)
    assert store.missing([a]) == [a]


@pytest.mark.parametrize("name", ["", "abc", "A" * 64, "0" * 63 + "/", "../" + "0" * 61])
def test_names_are_hashes(tmp_path: Path, name: str) -> None:
    store = BlobStore(tmp_path, 20)
    for call in (store.size, store.upload, store.read):
        assert reason_name(refusal(call, name).reason) == "MALFORMED_REQUEST"
    assert reason_name(refusal(store.missing, [name]).reason) == "MALFORMED_REQUEST"


def test_what_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 20)
    wrong = store.upload("0" * 64)
    wrong.write(b"abc")
    assert reason_name(refusal(wrong.finish).reason) == "BLOB_MISMATCH"
    wrong.close()
    large = store.upload("0" * 64)
    large.write(b"a" * 15)
    assert reason_name(refusal(large.write, b"a" * 15).reason) == "QUOTA_EXCEEDED"
    large.close()
    large.write(b"late")
    assert (store.held_bytes, files(store)) == (0, set())


_DISK = """
import hashlib, resource, sys
from pathlib import Path
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
    assert store.held_bytes == 0, store.held_bytes
    assert list(store.folder.iterdir()) == []
small = data[:50_000]
upload = store.upload(hashlib.sha256(small).hexdigest())
upload.write(small)
upload.finish()
upload.close()
assert store.held_bytes == 50_000
"""


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _DISK, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_disk_that_is_found_full_at_the_end_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store = BlobStore(tmp_path, 20)
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
    assert (store.held_bytes, files(store)) == (0, set())
    put(store, b"abc")


def test_a_blob_s_name_is_on_the_disk_when_it_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore(tmp_path / "blobs", 20).of("ada")
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


def test_a_restart_knows_what_is_there_and_in_which_order(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 30)
    a, b = put(store, b"a" * 10), put(store, b"b" * 10)
    os.utime(tmp_path / b, ns=(1, 1))
    (tmp_path / ".upload-left-behind").write_bytes(b"x")
    store = BlobStore(tmp_path, 25)
    assert store.held_bytes == 20
    put(store, b"c" * 10)
    assert store.missing([a, b]) == [b]
    assert ".upload-left-behind" not in files(store)
