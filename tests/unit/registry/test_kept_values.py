"""Files of values that programs share: how long they exist, and what is written to them."""

from __future__ import annotations

import errno
import gc
from io import FileIO
from pathlib import Path

import pytest

from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.kept_values import KeptFile, KeptValues


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, 0)


def written(kept: KeptValues, name: str, *parts: bytes) -> KeptFile:
    """Returns a complete file."""
    file = kept.create(sum(map(len, parts)))
    for part in parts:
        assert not file.is_complete
        file.write(part)
    assert file.is_complete
    kept.add(name, file)
    return file


def test_a_file_exists_as_long_as_something_refers_to_it(blobs: BlobStore) -> None:
    kept = KeptValues(blobs)
    first = written(kept, "a", b"ab", b"cde")
    path = blobs.folder / first.name
    assert path.read_bytes() == b"abcde"
    assert kept.find("a") is first
    assert kept.find("b") is None
    del first
    gc.collect()
    assert kept.find("a") is None
    assert not path.exists()


def test_an_incomplete_file_is_removed_and_never_found(blobs: BlobStore) -> None:
    kept = KeptValues(blobs)
    file = kept.create(10)
    file.write(b"12345")
    path = blobs.folder / file.name
    assert path.exists()
    assert kept.find("a") is None
    del file
    gc.collect()
    assert not path.exists()


def test_too_many_bytes_are_refused(blobs: BlobStore) -> None:
    file = KeptValues(blobs).create(3)
    with pytest.raises(ValueError, match="4 bytes were sent for a file of 3"):
        file.write(b"1234")


def test_kept_files_are_no_blobs_and_do_not_survive_a_start(blobs: BlobStore) -> None:
    for store in (blobs, blobs.for_tenant("ada")):
        (file,) = [written(KeptValues(store), "a", b"abc")]
        assert store.used.count == store.used.size == 0
        # As after a crash, in which nothing is removed.
        path = store.folder / file.name
        path.rename(path.with_name(".kept-99999"))
    assert len(list(blobs.folder.rglob(".kept-*"))) == 2
    BlobStore(blobs.folder, 0)
    assert not list(blobs.folder.rglob(".kept-*"))


def test_equal_contents_of_two_tenants_are_two_files(blobs: BlobStore) -> None:
    ada, grace = KeptValues(blobs.for_tenant("ada")), KeptValues(blobs.for_tenant("grace"))
    file = written(ada, "a", b"abc")
    assert grace.find("a") is None
    other = written(grace, "a", b"abc")
    assert file.name != other.name


def test_a_full_disk_is_told_as_a_quota(blobs: BlobStore) -> None:
    file = KeptValues(blobs).create(3)

    class Full(FileIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    file._file.close()
    file._file = Full(blobs.folder / file.name, "w")
    with file._file, pytest.raises(GradruleError) as caught:
        file.write(b"abc")
    assert reason_name(caught.value.reason) == "QUOTA_EXCEEDED"
