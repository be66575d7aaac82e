"""Stores immutable objects by key, in a folder that several servers share or in an S3 bucket.

An object becomes visible when it is complete. All methods block, and their time is limited where the object store is
reached over a network.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from gradrule_server.registry.data_folder import StoreError, sync_to_disk

MARKER = "gradrule.registry"
"""Key of the object that names the registry which an object store belongs to."""

_PARTIAL = ".upload-"
_PIECE_BYTES = 8 << 20
_USER_INFO = re.compile(r"//[^/@\s]*@")


class ObjectStoreError(Exception):
    """The object store cannot be used now; the message says why, without secrets."""

    def __init__(self, message: str) -> None:
        super().__init__(_USER_INFO.sub("//…@", message))


class ObjectNotFoundError(Exception):
    """The object store works, but has no object with this key."""


class StoredObject(NamedTuple):
    """An object: its key, its size in bytes, and when it was stored or renewed, seconds since 1970."""

    key: str
    size: int
    modified_s: float


class ObjectStore(Protocol):
    """The objects of one folder or bucket. Safe to use from several threads.

    Methods raise `ObjectStoreError`; `put` also raises `OSError` if the disk of a shared folder is full. Call
    `check_owner` before believing that an object is missing or damaged.

    Attributes:
        url: Where the objects are, without secrets.
    """

    url: str

    def put(self, key: str, content: Path | bytes) -> None:
        """Stores bytes or a file's content as an object, which is durable when the method returns."""

    def read(self, key: str, offset: int, count: int) -> bytes:
        """Returns up to `count` bytes of an object, at least one; empty at its end. Raises `ObjectNotFoundError`."""

    def find(self, keys: Iterable[str]) -> dict[str, StoredObject]:
        """Returns those of the objects that exist, by key."""

    def renew(self, key: str) -> None:
        """Sets the time of an object to now. Raises `ObjectNotFoundError`."""

    def delete(self, key: str) -> None:
        """Deletes an object. Does nothing if there is none."""

    def iterate(self, start: str = "") -> Iterator[StoredObject]:
        """Yields each object whose key starts with `start`, except the marker."""

    def delete_unfinished(self, before_s: float) -> None:
        """Deletes what uploads have left that were killed before a time, seconds since 1970."""


class FolderObjects:
    """Objects as files of a folder, for example on NFS."""

    def __init__(self, folder: Path) -> None:
        self.url = folder.absolute().as_uri()
        self._folder = folder

    def put(self, key: str, content: Path | bytes) -> None:
        target = self._folder / key
        # Servers may store the same object at the same time.
        partial = target.with_name(f"{_PARTIAL}{target.name}-{uuid.uuid4().hex}")
        if key != MARKER:
            self._check_marker()
        try:
            if not target.parent.exists():
                # Do not create parents: without the mounted file system the objects would be on the wrong disk.
                with contextlib.suppress(FileExistsError):
                    target.parent.mkdir(mode=0o700)
                sync_to_disk(self._folder)
            try:
                source: IO[bytes] = io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")
                with source, partial.open("wb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
                    copy.flush()
                    os.fsync(copy.fileno())
                partial.rename(target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            sync_to_disk(target.parent)
        except FileNotFoundError as cause:
            raise ObjectStoreError(f"{self.url} cannot be written: {cause.strerror}") from cause

    def read(self, key: str, offset: int, count: int) -> bytes:
        try:
            with (self._folder / key).open("rb") as file:
                file.seek(offset)
                return file.read(count)
        except FileNotFoundError as cause:
            raise ObjectNotFoundError(key) from cause
        except OSError as cause:
            raise ObjectStoreError(f"{self.url} cannot be read: {cause.strerror}") from cause

    def find(self, keys: Iterable[str]) -> dict[str, StoredObject]:
        found = {}
        for key in keys:
            try:
                stat = (self._folder / key).stat()
            except FileNotFoundError:
                continue
            except OSError as cause:
                raise ObjectStoreError(f"{self.url} cannot be read: {cause.strerror}") from cause
            found[key] = StoredObject(key, stat.st_size, stat.st_mtime)
        return found

    def renew(self, key: str) -> None:
        try:
            os.utime(self._folder / key)
        except FileNotFoundError as cause:
            raise ObjectNotFoundError(key) from cause
        except OSError as cause:
            raise ObjectStoreError(f"{self.url} cannot be changed: {cause.strerror}") from cause

    def delete(self, key: str) -> None:
        try:
            (self._folder / key).unlink(missing_ok=True)
        except OSError as cause:
            raise ObjectStoreError(f"{self.url} cannot be changed: {cause.strerror}") from cause

    def iterate(self, start: str = "") -> Iterator[StoredObject]:
        for found in self._files(start):
            if found.key != MARKER and not found.key.rpartition("/")[2].startswith(_PARTIAL):
                yield found

    def delete_unfinished(self, before_s: float) -> None:
        for found in self._files(""):
            if found.key.rpartition("/")[2].startswith(_PARTIAL) and found.modified_s < before_s:
                self.delete(found.key)

    def _files(self, start: str) -> Iterator[StoredObject]:
        for folder, folders, names in os.walk(self._folder, onerror=self._refuse):
            if Path(folder) == self._folder:
                folders[:] = [name for name in folders if f"{name}/".startswith(start) or start.startswith(f"{name}/")]
            keys = ((Path(folder) / name).relative_to(self._folder).as_posix() for name in names)
            yield from self.find(key for key in keys if key.startswith(start)).values()

    def _refuse(self, cause: OSError) -> None:
        # A tenant's folder may be removed while the others are listed.
        if not isinstance(cause, FileNotFoundError) or not self._folder.is_dir():
            raise ObjectStoreError(f"{self.url} cannot be listed: {cause.strerror}") from cause

    def _check_marker(self) -> None:
        # A folder whose file system is not mounted is empty: objects seem to be missing, and new ones would be lost.
        if not (self._folder / MARKER).exists():
            raise ObjectStoreError(f"{self.url} has no file {MARKER}; its file system may not be mounted")


def open_object_store(url: str) -> ObjectStore:
    """Opens the object store of `--blobs`, and checks that it can be reached.

    Args:
        url: `file:///folder`, or `s3://bucket/prefix`.

    Raises:
        StoreError: The URL is invalid, the folder or bucket does not exist, or credentials are missing or refused.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        # Its text shows parts of the URL, which may hold credentials.
        raise StoreError("--blobs is no valid URL: expected file:///folder or s3://bucket/prefix") from None
    if "@" in parts.netloc:
        raise StoreError(
            "--blobs must hold no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
        )
    if parts.query or parts.fragment:
        raise StoreError("--blobs must be file:///folder or s3://bucket/prefix, without ? and #")
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        if not (folder := Path(unquote(parts.path))).is_dir():
            raise StoreError(f"the folder of --blobs {folder.as_uri()} does not exist; create it, or mount it")
        return FolderObjects(folder)
    if parts.scheme == "s3" and parts.netloc:
        try:
            from gradrule_server.registry.s3_objects import S3Objects
        except ImportError as cause:
            raise StoreError("--blobs s3://… needs further packages: pip install 'gradrule[s3]'") from cause
        return S3Objects(parts.netloc, parts.path.strip("/"))
    # Before an @ there may be credentials.
    raise StoreError(f"--blobs must be file:///folder or s3://bucket/prefix, not {url.rpartition('@')[2][:60]!r}")


def read_object(objects: ObjectStore, key: str, length: int) -> Iterator[bytes]:
    """Yields the content of an object in pieces of up to 8 MiB; fewer bytes than `length` if the object is shorter.

    Raises `ObjectNotFoundError` and `ObjectStoreError`.
    """
    offset = 0
    while offset < length:
        piece = objects.read(key, offset, min(_PIECE_BYTES, length - offset))
        if not piece:
            return
        yield piece
        offset += len(piece)


def claim(objects: ObjectStore, registry_id: str) -> bool:
    """Marks an object store as that of a registry; returns whether it was new.

    Raises:
        StoreError: The object store belongs to another registry, or cannot be used.
    """
    try:
        is_new = _owner(objects) is None
        if is_new:
            objects.put(MARKER, json.dumps({"registry": registry_id}).encode() + b"\n")
        # Read it back: another registry may have claimed it meanwhile, and reading may be refused.
        owner = _owner(objects)
    except (ObjectStoreError, OSError) as cause:
        raise StoreError(f"--blobs cannot be used: {cause}") from cause
    if owner is None:
        raise StoreError(f"--blobs cannot be used: {objects.url} has no object {MARKER} although it was stored")
    if owner != registry_id:
        raise StoreError(
            f"{objects.url} holds the blobs of another registry ({owner or 'unknown'}, this one is {registry_id}); "
            "give another --blobs, or the same --registry as the servers that use it; if no server uses it any more, "
            f"delete its object {MARKER}"
        )
    return is_new


def check_owner(objects: ObjectStore, registry_id: str) -> None:
    """Raises `ObjectStoreError` unless an object store still has the marker of a registry.

    Something else may answer in its place: a folder whose file system is not mounted, or a proxy with pages of its own.
    """
    if _owner(objects) != registry_id:
        raise ObjectStoreError(
            f"{objects.url} has no object {MARKER} of this registry; its file system may not be mounted, or another "
            "server answers in its place"
        )


def _owner(objects: ObjectStore) -> str | None:
    """Returns the id of the registry in the marker; empty: an invalid marker; None: no marker."""
    try:
        found = json.loads(objects.read(MARKER, 0, 4096))["registry"]
    except ObjectNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return ""
    return found if isinstance(found, str) else ""
