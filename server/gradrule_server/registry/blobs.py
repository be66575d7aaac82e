"""Stores blobs as one file each, named by their SHA-256; removes the least recently used ones that are not pinned.

Each tenant has a folder of its own; the blobs of the default tenant are in the common folder itself. A file's time of
access is the time of its last use, so that the order survives a restart. The hash of a file is verified at first use
after a start, and again if the file has changed; a damaged file is renamed, and the blob must be uploaded again.

With `--blobs`, the files are a cache of an object store, see `shared_blobs`. A blob that is not in the cache is fetched
when a call needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.policy import check_blob_name, missing_blobs
from gradrule_server.registry.blob_index import (
    UPLOADING,
    BlobAmount,
    BlobCacheUse,
    BlobFile,
    BlobIndex,
    BlobKey,
    FileStamp,
    disk_bytes,
    disk_full,
    file_stamp,
)
from gradrule_server.registry.data_folder import DISK_FULL_ERRORS, file_sha256, sync_to_disk
from gradrule_server.registry.store import DEFAULT_TENANT

if TYPE_CHECKING:
    from gradrule_server.registry.shared_blobs import SharedBlobs

_log = logging.getLogger(__name__)

T = TypeVar("T")

DAMAGED = ".damaged-"
"""Prefix of the names of damaged files, whose bytes do not have the hash in their name."""

# Assumed block size of the file system, for the space of a file that is not yet written.
_BLOCK = 4096
# Shortest time between two updates of the stored time of the last use.
_STORE_USE_EVERY_NS = 60 * 10**9


def folder_name(tenant: str) -> str:
    """Returns the name of a tenant's folder within the common folder; empty: the common folder."""
    # Hash the name, because names of tenants may contain characters that are invalid in names of files.
    return "" if tenant == DEFAULT_TENANT else f"tenant-{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"


class BlobStore:
    """The blobs of the default tenant; `for_tenant` returns those of others.

    Safe to use from several threads. All methods that are not `async` block.

    Args:
        folder: The common folder, which is created if missing.
        capacity: Bytes that the blobs of all tenants may take on the disk.
        count: Number of blobs that all tenants may have.
        bytes_setting: The setting of `capacity`.
        needed: Returns folder and name of the blobs that stored programs need, which are not removed.
        shared: The object store that has the blobs; None: they are only in the folder.
    """

    def __init__(
        self,
        folder: Path,
        capacity: int,
        count: int = sys.maxsize,
        *,
        bytes_setting: str = "--max-blob-bytes",
        needed: Callable[[], Collection[BlobKey]] = tuple,
        shared: SharedBlobs | None = None,
    ) -> None:
        self.shared = shared
        self._index = BlobIndex(folder, BlobAmount(capacity, count), bytes_setting, needed)
        self._own = self._index.tenant("")
        self._folder = folder
        self.folder_name = ""
        """Name of the tenant's folder within the common folder, for engines; empty: the common folder."""

    def for_tenant(self, tenant: str, capacity: int | None = None, count: int = sys.maxsize) -> Self:
        """Returns the blobs of a tenant.

        Args:
            tenant: The tenant.
            capacity: Bytes that its blobs may take on the disk; None: only the server's limits apply.
            count: Number of blobs that it may have, if `capacity` is given.
        """
        view = self._in_folder(folder_name(tenant))
        if capacity is not None:
            limit = BlobAmount(capacity, count)
            if self.shared is not None:
                self.shared.limits[view.folder_name] = limit
            else:
                with self._index.lock:
                    view._own.limit = limit
        return view

    def _in_folder(self, name: str) -> Self:
        """Returns the blobs of the tenant whose folder has this name."""
        view = copy.copy(self)
        view.folder_name = name
        view._folder = self._index.folder / name
        with self._index.lock:
            view._own = self._index.tenant(name)
        return view

    def forget_limits(self) -> None:
        """Forgets the limits of a tenant that is unloaded; its blobs stay."""
        if self.shared is not None:
            self.shared.limits.pop(self.folder_name, None)
        with self._index.lock:
            own = self._own
            own.limit = None
            if not (own.files or own.used.count or own.pins):
                self._index.tenants.pop(self.folder_name, None)

    @property
    def root(self) -> Path:
        """The common folder of all tenants."""
        return self._index.folder

    @property
    def folder(self) -> Path:
        """The tenant's folder, which may not exist yet."""
        return self._folder

    def cache_use(self) -> BlobCacheUse:
        """Returns how the cache of an object store is used by all tenants."""
        use = BlobCacheUse() if self.shared is None else self.shared.cache_use
        return replace(use, held_bytes=0 if self.shared is None else self._index.used.size)

    @property
    def used(self) -> BlobAmount:
        """The amount of the tenant's blobs, including running uploads; in an object store: as last seen."""
        return self._own.used if self.shared is None else self.shared.amounts.get(self.folder_name, BlobAmount())

    def missing(self, names: Iterable[str]) -> list[str]:
        """Returns the blobs that are missing, each once; marks the others as used. Raises MALFORMED_REQUEST.

        The hash of a blob that was not used since the start is not verified here, but at its first use. While an object
        store is away, it raises UNAVAILABLE unless all blobs are in the cache.
        """
        wanted = valid_names(names)
        if self.shared is not None:
            try:
                return self.shared.renew(self.folder_name, wanted)
            except GradruleError:
                # Calls of blobs in the cache go on while the object store is away.
                if not all(map(self._is_present, wanted)):
                    raise
        return [name for name in wanted if not self._is_present(name)]

    def require_stored(self, names: Iterable[str]) -> None:
        """Raises BLOB_NOT_FOUND unless all blobs are where other servers find them, and UNAVAILABLE."""
        if self.shared is not None:
            self.shared.require_stored(self.folder_name, valid_names(names))

    def size(self, name: str) -> int:
        """Returns the size of a blob in bytes. Raises BLOB_NOT_FOUND."""
        check_blob_name(name)
        with self._index.lock:
            file = self._own.files.get(name)
        if file is None:
            raise missing_blobs([name])
        return file.length

    def read(self, name: str) -> bytes:
        """Returns the content of a blob. Raises BLOB_NOT_FOUND."""
        with self.pinned([name]):
            return (self.folder / name).read_bytes()

    def are_verified(self, names: Iterable[str]) -> bool:
        """Returns whether all blobs are present and unchanged since they were verified, so that `pin` is fast."""
        return all(
            (file := self._own.files.get(name)) is not None
            and file.verified is not None
            and file.verified == _read_stamp(f"{self.folder}/{name}")
            for name in names
        )

    def verify(self, names: Iterable[str]) -> None:
        """Verifies the hashes of blobs that were not verified yet. Raises BLOB_NOT_FOUND."""
        with self.pinned(names):
            pass

    def pin_unchecked(self, names: Iterable[str]) -> None:
        """Protects blobs from removal until `unpin`; blobs that are uploaded later are protected too."""
        with self._index.lock:
            for name in dict.fromkeys(names):
                self._own.pins[name] = self._own.pins.get(name, 0) + 1

    def pin(self, names: Iterable[str]) -> None:
        """Protects blobs from removal until `unpin`, and verifies those that were not verified yet.

        Raises:
            GradruleError: BLOB_NOT_FOUND, if a blob is missing or damaged; no blob is pinned then.
        """
        wanted = valid_names(names)
        self.pin_unchecked(wanted)
        try:
            missing = [name for name in wanted if not self._is_present(name, is_used=True)]
            if missing:
                raise missing_blobs(missing)
        except BaseException:
            self.unpin(wanted)
            raise

    def unpin(self, names: Iterable[str]) -> None:
        """Ends one `pin` or `pin_unchecked` of each blob."""
        pins = self._own.pins
        with self._index.lock:
            for name in dict.fromkeys(names):
                pins[name] -= 1
                if not pins[name]:
                    del pins[name]

    async def acquire(self, names: Iterable[str]) -> None:
        """Pins blobs as `pin` does, without blocking the event loop; fetches those that are only in an object store.

        Raises:
            GradruleError: BLOB_NOT_FOUND, if a blob is missing or damaged; UNAVAILABLE, if the object store cannot be
                reached. No blob is pinned then.
        """
        wanted = valid_names(names)
        if self.shared is not None:
            self.shared.add_use(hits=sum(name in self._own.files for name in wanted))
        if self.are_verified(wanted):
            self.pin(wanted)
            return
        # Pin them first, so that none is removed while others are fetched or verified.
        self.pin_unchecked(wanted)
        try:
            await self._provide(wanted)
        except BaseException:
            self.unpin(wanted)
            raise

    @contextlib.asynccontextmanager
    async def acquired(self, names: Iterable[str]) -> AsyncIterator[None]:
        """Keeps blobs, as `acquire` does, for the body of an `async with` statement."""
        wanted = list(names)
        await self.acquire(wanted)
        try:
            yield
        finally:
            self.unpin(wanted)

    async def look_up(self, function: Callable[[], T]) -> T:
        """Runs `missing` or `sizes` in a thread."""
        if self.shared is not None:
            return await self.shared.look_up(self.folder_name, function)
        return await asyncio.to_thread(function)

    async def finish_upload(self, upload: Upload) -> int:
        """Runs `Upload.finish` in a thread."""
        if self.shared is not None:
            return await self.shared.upload(self.folder_name, upload.finish)
        return await asyncio.to_thread(upload.finish)

    async def _provide(self, names: Sequence[str]) -> None:
        """Fetches those of pinned blobs that are only in an object store, and verifies all. Raises BLOB_NOT_FOUND."""
        if self.shared is not None:
            await self._fetch(names)
        try:
            # Verifying takes long.
            await asyncio.to_thread(self.verify, names)
        except GradruleError as cause:
            if self.shared is None or cause.reason != errors_pb2.ERROR_REASON_BLOB_NOT_FOUND:
                raise
            # A file of the cache was damaged.
            await self._fetch(names)
            await asyncio.to_thread(self.verify, names)

    async def _fetch(self, names: Sequence[str]) -> None:
        """Fetches blobs that are not in the cache. Raises BLOB_NOT_FOUND with all that are not stored."""
        assert self.shared is not None
        absent = [name for name in names if name not in self._own.files]
        fetches = (self.shared.fetch((self.folder_name, name), partial(self._download, name)) for name in absent)
        missing = []
        for name, failure in zip(absent, await asyncio.gather(*fetches, return_exceptions=True), strict=True):
            if isinstance(failure, GradruleError) and failure.reason == errors_pb2.ERROR_REASON_BLOB_NOT_FOUND:
                missing.append(name)
            elif failure is not None:
                raise failure
        if missing:
            raise missing_blobs(missing)

    def _download(self, name: str) -> None:
        """Copies a blob from the object store into the cache. Raises BLOB_NOT_FOUND and UNAVAILABLE."""
        assert self.shared is not None
        self.shared.download(self.folder_name, name, partial(self._receive, name))

    def _receive(self, name: str, pieces: Iterable[bytes]) -> bool:
        """Adds a blob to the cache; returns False if the pieces have another hash."""
        incoming = Upload(self, name, is_copy=True)
        try:
            for piece in pieces:
                incoming.write(piece)
            if incoming.is_valid:
                incoming.finish()
            return incoming.is_valid
        finally:
            incoming.close()

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Returns the size of each blob in bytes, -1 for missing ones; marks them as used. Raises MALFORMED_REQUEST."""
        # Blobs in the cache must work while the object store cannot be reached.
        found = {name: self.size(name) for name in valid_names(names) if self._is_present(name)}
        if self.shared is not None and (absent := [name for name in names if name not in found]):
            found |= {name: item.size for name, item in self.shared.find(self.folder_name, absent).items()}
        return [found.get(name, -1) for name in names]

    @contextlib.contextmanager
    def pinned(self, names: Iterable[str]) -> Iterator[None]:
        """Pins blobs for the body of a `with` statement. Raises BLOB_NOT_FOUND."""
        wanted = list(names)
        self.pin(wanted)
        try:
            yield
        finally:
            self.unpin(wanted)

    def upload(self, name: str) -> Upload:
        """Starts the upload of a blob. Raises MALFORMED_REQUEST unless `name` is a SHA-256, and QUOTA_EXCEEDED."""
        check_blob_name(name)
        return Upload(self, name)

    def put_object(self, name: str, path: Path) -> None:
        """Stores a complete, verified file in the object store, if any. Raises UNAVAILABLE and QUOTA_EXCEEDED."""
        if self.shared is not None:
            self.shared.put(self.folder_name, name, path)

    def create_folder(self) -> None:
        """Creates the tenant's folder if it is missing."""
        with self.disk_full_as_quota(), contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
            sync_to_disk(self.root)

    def reserve(self, size: int, count: int = 0) -> None:
        """Reserves disk space, and removes unused blobs if necessary. Raises QUOTA_EXCEEDED if all are pinned."""
        with self._index.lock:
            self._index.reserve(self.folder_name, size, count)

    def release(self, size: int, count: int) -> None:
        """Releases reserved disk space that was not used."""
        with self._index.lock:
            self._index.adjust(self.folder_name, -size, -count)

    def add(self, name: str, file: Path, reserved: int) -> int:
        """Renames a complete, verified file to the blob's name, and returns its size.

        Args:
            name: The blob's name.
            file: The file.
            reserved: The disk space that was reserved for it, in bytes.
        """
        path = self.folder / name
        with self._index.lock:
            # Replace an existing file: it may be damaged.
            file.rename(path)
            stat = path.stat()
            if name in self._own.files:
                self._index.forget(self.folder_name, name)
            self._own.files[name] = BlobFile(stat.st_size, disk_bytes(stat), file_stamp(stat))
            self._index.adjust(self.folder_name, disk_bytes(stat) - reserved, 0)
        return stat.st_size

    def _is_present(self, name: str, *, is_used: bool = False) -> bool:
        """Returns whether a blob is present; verifies its hash if it `is_used` now or was used before."""
        with self._index.lock:
            file = self._own.files.get(name)
        if file is None:
            return False
        path = f"{self.folder}/{name}"
        try:
            stat = os.stat(path)
            now_ns = time.time_ns()
            if now_ns - file.stored_use_ns > _STORE_USE_EVERY_NS:
                os.utime(path, ns=(now_ns, stat.st_mtime_ns))
                file.stored_use_ns = now_ns
            stamp = file_stamp(stat)
            if (is_used or file.verified is not None) and file.verified != stamp:
                if file_sha256(path) != name:
                    self._remove_damaged(name, file)
                    return False
                file.verified = stamp
        except FileNotFoundError:
            self._forget(name, file)
            return False
        with self._index.lock:
            if name in self._own.files:
                self._own.files.move_to_end(name)
        return True

    def _remove_damaged(self, name: str, file: BlobFile) -> None:
        path = self.folder / name
        if self.shared is not None:
            path.unlink()
            self._forget(name, file)
            _log.warning("the file %s of the cache is damaged; the blob is fetched again", path)
            return
        renamed = path.with_name(DAMAGED + name)
        path.rename(renamed)
        self._forget(name, file)
        _log.warning(
            "the blob %s is damaged; it was renamed to %s, and calls that need it ask clients to upload it again",
            path,
            renamed,
        )

    @contextlib.contextmanager
    def disk_full_as_quota(self) -> Iterator[None]:
        """Raises QUOTA_EXCEEDED in place of the operating system's error for a full disk."""
        try:
            yield
        except OSError as cause:
            if cause.errno not in DISK_FULL_ERRORS:
                raise
            raise disk_full(cause, "the disk that the server keeps blobs on", self._index.bytes_setting) from cause

    def _forget(self, name: str, file: BlobFile) -> None:
        with self._index.lock:
            # Another upload may have replaced the file meanwhile.
            if self._own.files.get(name) is file:
                self._index.forget(self.folder_name, name)


class Upload:
    """Receives the content of a blob. `close` discards an unfinished upload. Safe to use from several threads.

    Methods raise QUOTA_EXCEEDED if the disk is full or a limit is reached.

    Args:
        store: Where the blob is to be stored.
        name: The blob's name.
        is_copy: Whether the content comes from where the blob is stored; a copy may get lost at a power failure.
    """

    def __init__(self, store: BlobStore, name: str, *, is_copy: bool = False) -> None:
        self._store = store
        self._name = name
        self._is_copy = is_copy
        self._lock = threading.Lock()
        self._hash = hashlib.sha256()
        self._size = 0
        self._reserved = 0
        store.create_folder()
        store.reserve(0, 1)
        try:
            with store.disk_full_as_quota():
                handle, path = tempfile.mkstemp(prefix=UPLOADING, dir=store.folder)
        except BaseException:
            store.release(0, 1)
            raise
        self._path: Path | None = Path(path)
        # Do not buffer: after an error of a full disk, `close` would write the buffer again.
        self._file = os.fdopen(handle, "wb", buffering=0)

    def write(self, data: bytes) -> None:
        """Appends bytes. Does nothing after `close`."""
        with self._lock:
            if self._path is None:
                return
            size = self._size + len(data)
            if self._store.shared is not None and not self._is_copy:
                self._store.shared.check_length(self._store.folder_name, size)
            wanted = -(-size // _BLOCK) * _BLOCK
            self._store.reserve(wanted - self._reserved)
            self._reserved = wanted
            self._size = size
            self._hash.update(data)
            with self._store.disk_full_as_quota():
                rest = memoryview(data)
                while rest:
                    rest = rest[self._file.write(rest) :]

    @property
    def is_valid(self) -> bool:
        """Whether the bytes that were written have the hash in the blob's name."""
        return self._hash.hexdigest() == self._name

    def finish(self) -> int:
        """Stores the blob and returns its size. Raises BLOB_MISMATCH if the bytes have another hash."""
        with self._lock:
            self._finish()
        return self._size

    def _finish(self) -> None:
        if self._path is None:
            return
        if not self.is_valid:
            raise error(
                errors_pb2.ERROR_REASON_BLOB_MISMATCH,
                f"the {self._size} received bytes have the SHA-256 {self._hash.hexdigest()}, not {self._name}",
                field="sha256",
            )
        with self._store.disk_full_as_quota():
            if not self._is_copy:
                os.fsync(self._file.fileno())
                self._store.put_object(self._name, self._path)
            self._file.close()
            self._store.add(self._name, self._path, self._reserved)
            self._path = None
            if not self._is_copy:
                sync_to_disk(self._store.folder)

    def close(self) -> None:
        """Discards the upload, unless it is finished."""
        with self._lock:
            path, self._path = self._path, None
            if path is None:
                return
            try:
                self._file.close()
            finally:
                try:
                    path.unlink(missing_ok=True)
                finally:
                    self._store.release(self._reserved, 1)


def _read_stamp(path: str) -> FileStamp | None:
    try:
        return file_stamp(os.stat(path))
    except FileNotFoundError:
        return None


def valid_names(names: Iterable[str]) -> list[str]:
    """Returns the names, each once. Raises MALFORMED_REQUEST unless all are SHA-256 in hex."""
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        check_blob_name(name)
    return wanted
