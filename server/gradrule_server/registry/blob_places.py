"""Reads and stores the blobs of a registry for backups: in a data folder, in a backup, or in an object store.

A blob has a path: its name in the folder of its tenant, for example `tenant-…/SHA-256`. Blobs are read in pieces.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from gradrule_server.registry.blob_index import UPLOADING
from gradrule_server.registry.data_folder import sync_to_disk
from gradrule_server.registry.object_store import (
    ObjectNotFoundError,
    ObjectStore,
    check_owner,
    claim,
    open_object_store,
    read_object,
)
from gradrule_server.registry.stored_blobs import blob_objects, blob_of_object, new_object

_CHUNK_BYTES = 1 << 20


class DamagedBlobError(Exception):
    """The bytes of a blob do not have the SHA-256 in its name; the message names the blob."""


class MissingBlobError(Exception):
    """There is no blob of this path."""


class BlobPlace(Protocol):
    """Where the blobs of a registry are. Methods raise `OSError` and `ObjectStoreError`."""

    def refresh(self) -> None:
        """Looks for the blobs that are there now; called before `pieces`, after the programs were read."""

    def pieces(self, path: str) -> Iterator[bytes]:
        """Yields the content of a blob, not verified. Raises `MissingBlobError`."""

    def put(self, path: str, pieces: Iterable[bytes]) -> None:
        """Stores a blob, unless `pieces` raises an error. It is durable when the method returns."""


class FolderBlobs:
    """The blobs in the data folder of a server, or in a backup."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def refresh(self) -> None:
        """Does nothing: each file is looked for when it is read."""

    def pieces(self, path: str) -> Iterator[bytes]:
        try:
            file = (self._folder / path).open("rb")
        except FileNotFoundError as cause:
            raise MissingBlobError(path) from cause
        with file:
            while piece := file.read(_CHUNK_BYTES):
                yield piece

    def put(self, path: str, pieces: Iterable[bytes]) -> None:
        to = self._folder / path
        created = [folder for folder in to.parents if not folder.exists()]
        to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = to.with_name(UPLOADING + to.name)
        try:
            with unfinished.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(to)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        for folder in (to.parent, *(folder.parent for folder in created)):
            sync_to_disk(folder)


class ObjectBlobs:
    """The blobs in an object store, see `stored_blobs`.

    Args:
        url: See `open_object_store`.
        registry_id: The registry that the object store belongs to.
        is_target: Whether blobs are to be stored: an object store that belongs to no registry is claimed.

    Raises:
        StoreError: The object store cannot be used, or belongs to another registry.
    """

    def __init__(self, url: str, registry_id: str, *, is_target: bool = False) -> None:
        self.objects: ObjectStore = open_object_store(url)
        self._registry_id = registry_id
        if is_target:
            claim(self.objects, registry_id)
        self.listed: dict[str, int] = {}
        """The size of each object that is a blob, by its key."""
        self._keys: dict[str, str] = {}

    def refresh(self) -> None:
        check_owner(self.objects, self._registry_id)
        self.listed = {}
        self._keys = {}
        for key, length in blob_objects(self.objects):
            if (blob := blob_of_object(key)) is not None:
                self.listed[key] = length
                self._keys["/".join(filter(None, blob))] = key

    def pieces(self, path: str) -> Iterator[bytes]:
        key = self._keys.get(path)
        if key is None:
            raise MissingBlobError(path)
        try:
            yield from read_object(self.objects, key, self.listed[key])
        except ObjectNotFoundError as cause:
            check_owner(self.objects, self._registry_id)
            raise MissingBlobError(path) from cause

    def put(self, path: str, pieces: Iterable[bytes]) -> None:
        if self._is_stored(path):
            return
        with tempfile.NamedTemporaryFile(prefix="gradrule-blob-") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            folder, _, name = path.rpartition("/")
            key = new_object(folder, name)
            self.objects.put(key, Path(file.name))
            self.listed[key] = file.tell()
        if damaged := self._keys.get(path):
            check_owner(self.objects, self._registry_id)
            self.objects.delete(damaged)
        self._keys[path] = key

    def _is_stored(self, path: str) -> bool:
        try:
            for _ in checked(path, self.pieces(path)):
                pass
        except (MissingBlobError, DamagedBlobError):
            return False
        return True


def checked(path: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the pieces of a blob, and raises `DamagedBlobError` at the end if they do not have its SHA-256."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        yield piece
    if digest.hexdigest() != path.rpartition("/")[2]:
        raise DamagedBlobError(f"the blob {path} is damaged: it does not have the SHA-256 in its name")
