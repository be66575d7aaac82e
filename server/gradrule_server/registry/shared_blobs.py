"""Keeps blobs in an object store that several servers share; the files of `BlobStore` are a cache of it.

An upload is received into the cache's folder, verified, stored as an object, entered into the index (`stored_blobs`)
and only then acknowledged. A blob that is not in the cache is fetched when a call needs it. Removing a file of the
cache deletes nothing elsewhere; the limits on blobs apply to the index, whose least recently used blobs are deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

from sqlalchemy import Connection

from gradrule.v1 import errors_pb2
from gradrule_server.concurrency import PeriodicChecks, RepeatedWarning, TenantSlots, run_in_own_thread
from gradrule_server.errors import GradruleError, error
from gradrule_server.policy import missing_blobs
from gradrule_server.policy.faults import BLOB_NAME
from gradrule_server.registry.blob_fetches import BlobFetches
from gradrule_server.registry.blob_index import CACHE_SETTING, BlobAmount, BlobFile, quota_exceeded
from gradrule_server.registry.blobs import BlobCacheUse, BlobStore, Upload, disk_full, folder_name, valid_names
from gradrule_server.registry.data_folder import BLOB_CACHE, BLOBS, DISK_FULL_ERRORS, StoreError
from gradrule_server.registry.database import Database
from gradrule_server.registry.object_store import (
    ObjectNotFoundError,
    ObjectStore,
    ObjectStoreError,
    check_owner,
    claim,
    open_object_store,
    read_object,
)
from gradrule_server.registry.stored_blobs import BlobKey, StoredBlob, StoredBlobs, blob_objects, counted_bytes

_log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TRANSFERS = 8
"""Number of uploads to the object store that run at a time, and of fetches."""

_PIECE_BYTES = 8 << 20
_WAIT_FOR_UPLOADS_S = 60.0
# Other servers discard uploads without a sign of life, see `stored_blobs`.
_SIGN_OF_LIFE_S = 20.0
_DELETED_BY_UPLOAD = 8
# A blob whose bytes are wrong is read once more, because they may have been damaged on their way.
_READ_ATTEMPTS = 2
_RETRY_AFTER_S = 1.0
# Time after which the periodic check begins to store no further lost blob; the next check goes on.
_STORE_LOST_S = 5.0


class _Shared:
    """What the stores of all tenants share.

    Attributes:
        uses: The times of last uses that are not in the index yet, microseconds since 1970.
        restored: What `follow_restore` has noted; empty at the start, None: the index was compared with the objects.
        usage: The amount of each folder, as last seen.
        cache_use: How the cache was used; `held_bytes` is not set.
    """

    def __init__(self, objects: ObjectStore, index: StoredBlobs, tenant_transfers: int) -> None:
        self.objects = objects
        self.index = index
        self.registry_id = index.registry_id()
        self.fetches = BlobFetches(TenantSlots(MAX_TRANSFERS, tenant_transfers))
        self.lock = threading.Lock()
        self.uses: dict[BlobKey, int] = {}
        self.restored: Sequence[tuple[str, str, Sequence[str]]] | None = ()
        self.upload_slots = TenantSlots(MAX_TRANSFERS, tenant_transfers)
        self.usage = index.usage()
        self.cache_use = BlobCacheUse()
        self.warning = RepeatedWarning(_log)
        self.lost_warning = RepeatedWarning(_log)

    def store_uses(self) -> None:
        """Stores the times of last uses in the index."""
        with self.lock:
            uses, self.uses = self.uses, {}
        try:
            self.index.record_uses(uses)
        except BaseException:
            with self.lock:
                self.uses = uses | self.uses
            raise

    @contextlib.contextmanager
    def counted_fetch(self) -> Iterator[None]:
        """Counts the time of a fetch, and a failure if it raises an error."""
        started, failures = time.monotonic(), 1
        try:
            yield
            failures = 0
        finally:
            with self.lock:
                self.cache_use.fetch_s += time.monotonic() - started
                self.cache_use.failures += failures

    @contextlib.contextmanager
    def reaching_objects(self) -> Iterator[None]:
        """Raises UNAVAILABLE in place of `ObjectStoreError`, whose cause only the log holds."""
        try:
            yield
        except ObjectStoreError as cause:
            self.warning.report(f"the blobs in {self.objects.url} cannot be reached: {cause}")
            raise error(
                errors_pb2.ERROR_REASON_UNAVAILABLE,
                "the server cannot reach the object store that holds its blobs; try again later. Calls whose blobs "
                "are in the server's cache are not affected",
                retry_after_s=_RETRY_AFTER_S,
            ) from cause
        self.warning.report(None)


class SharedBlobStore(BlobStore):
    """The blobs of the default tenant in an object store, see `BlobStore`.

    Args:
        folder: The folder of the cache, which is created if missing.
        cache_bytes: Bytes that the cache may take on the disk.
        objects: The object store.
        index: The index of the object store.
        tenant_transfers: Number of uploads of one tenant that run at a time, and of fetches.
    """

    is_shared = True

    def __init__(
        self,
        folder: Path,
        cache_bytes: int,
        objects: ObjectStore,
        index: StoredBlobs,
        tenant_transfers: int = MAX_TRANSFERS,
    ) -> None:
        super().__init__(folder, cache_bytes, bytes_setting=CACHE_SETTING)
        self._shared = _Shared(objects, index, tenant_transfers)
        self._limit = index.limit

    def for_tenant(self, tenant: str, capacity: int | None = None, count: int = sys.maxsize) -> Self:
        view = super().for_tenant(tenant)
        if capacity is not None:
            view._limit = BlobAmount(capacity, count)
        return view

    @property
    def objects(self) -> ObjectStore:
        """The object store."""
        return self._shared.objects

    @property
    def held_bytes(self) -> int:
        return self._used.size

    @property
    def held_count(self) -> int:
        return self._used.count

    @property
    def _used(self) -> BlobAmount:
        return self._shared.usage.get(self.folder_name, BlobAmount())

    def cache_use(self) -> BlobCacheUse:
        with self._shared.lock:
            return dataclasses.replace(self._shared.cache_use, held_bytes=self._index.used.size)

    def missing(self, names: Iterable[str]) -> list[str]:
        wanted = valid_names(names)
        found = self._shared.index.find(self.folder_name, wanted)
        for name in wanted:
            if name in found:
                self._note_use(name)
        return [name for name in wanted if name not in found]

    def sizes(self, names: Sequence[str]) -> list[int]:
        wanted = valid_names(names)
        # Blobs in the cache must work while the object store or its index cannot be reached.
        cached = {name: self.size(name) for name in wanted if self._is_present(name)}
        absent = [name for name in wanted if name not in cached]
        found = self._shared.index.find(self.folder_name, absent) if absent else {}
        return [cached[name] if name in cached else found[name].length if name in found else -1 for name in names]

    def check_length(self, length: int) -> None:
        limit = BlobAmount(min(self._limit.size, self._shared.index.limit.size), 1)
        wanted = BlobAmount(counted_bytes(length), 1)
        if wanted.exceeds(limit):
            raise quota_exceeded("one tenant may have", wanted, limit, self._shared.index.limit)

    def publish(self, name: str, path: Path, length: int) -> None:
        shared = self._shared
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(shared.upload_slots.hold(self.folder_name, _WAIT_FOR_UPLOADS_S))
            except TimeoutError as cause:
                raise error(
                    errors_pb2.ERROR_REASON_UNAVAILABLE,
                    "other uploads to the object store have not ended; try again later",
                    retry_after_s=_RETRY_AFTER_S,
                ) from cause
            try:
                self._publish(name, path, length)
            finally:
                with contextlib.suppress(GradruleError):
                    shared.usage = shared.index.usage()

    def _publish(self, name: str, path: Path, length: int) -> None:
        shared, index = self._shared, self._shared.index
        # The order in which blobs are removed must be the current one.
        shared.store_uses()
        with self._index.lock:
            kept = {(folder, blob) for folder, tenant in self._index.tenants.items() for blob in tenant.pins}
        key, removed = index.reserve(self.folder_name, name, length, limit=self._limit, kept=kept)
        if key is None:
            return
        is_stored = False
        try:
            with PeriodicChecks(_SIGN_OF_LIFE_S, lambda: self._record_upload(key)), shared.reaching_objects():
                # The periodic check of a server deletes the others: the caller must not wait for thousands.
                self._delete(removed[:_DELETED_BY_UPLOAD])
                try:
                    shared.objects.put(key, path)
                except OSError as cause:
                    if cause.errno not in DISK_FULL_ERRORS:
                        raise ObjectStoreError(str(cause)) from cause
                    raise disk_full(cause, f"the file system of {shared.objects.url}", "--max-blob-bytes") from cause
            is_stored = index.commit(key)
        finally:
            if not is_stored:
                # If the database is away, another server discards the upload later.
                with contextlib.suppress(GradruleError):
                    if index.cancel(key):
                        self._delete([key], are_incomplete=True)
        if not is_stored:
            raise error(
                errors_pb2.ERROR_REASON_UNAVAILABLE,
                "the upload took so long that another server has discarded it; try again",
                retry_after_s=_RETRY_AFTER_S,
            )

    def _record_upload(self, key: str) -> None:
        try:
            self._shared.index.record_upload(key)
        except GradruleError as cause:
            _log.debug("the index of blobs cannot be changed now: %s", cause)

    async def in_thread(self, function: Callable[[], T]) -> T:
        # Not in the threads of `asyncio.to_thread`: a slow object store would leave none for other work.
        return await run_in_own_thread("blob-upload", function)

    async def acquire(self, names: Iterable[str]) -> None:
        wanted = list(names)
        hits = sum(name in self._own.files for name in wanted)
        with self._shared.lock:
            self._shared.cache_use.hits += hits
        await super().acquire(wanted)

    async def _provide(self, names: Sequence[str]) -> None:
        # Once more, because a file of the cache may turn out to be damaged.
        for is_last in (False, True):
            await self._fetch([name for name in names if name not in self._own.files])
            try:
                await super()._provide(names)
            except GradruleError as cause:
                if is_last or cause.reason != errors_pb2.ERROR_REASON_BLOB_NOT_FOUND:
                    raise
            else:
                return

    async def _fetch(self, names: Sequence[str]) -> None:
        """Fetches blobs into the cache. Raises BLOB_NOT_FOUND with all that are not stored."""
        if not names:
            return
        found = await asyncio.to_thread(self._shared.index.find, self.folder_name, names)
        missing = [name for name in names if name not in found]
        if missing:
            raise missing_blobs(missing)
        fetches = (
            self._shared.fetches.fetch((self.folder_name, name), functools.partial(self._download, name, blob))
            for name, blob in found.items()
            # Another call may have fetched it meanwhile.
            if name not in self._own.files
        )
        for failure in await asyncio.gather(*fetches, return_exceptions=True):
            if failure is not None:
                raise failure

    def _download(self, name: str, blob: StoredBlob, is_unwanted: threading.Event) -> None:
        """Copies a blob into the cache. Raises BLOB_NOT_FOUND if its object is damaged or missing."""
        with self._shared.counted_fetch(), self._shared.reaching_objects():
            for _ in range(_READ_ATTEMPTS):
                incoming = Upload(self, name, is_copy=True)
                try:
                    for piece in read_object(self._shared.objects, blob.object, blob.length):
                        if is_unwanted.is_set():
                            return
                        incoming.write(piece)
                        with self._shared.lock:
                            self._shared.cache_use.fetched_bytes += len(piece)
                    if incoming.is_valid:
                        incoming.finish()
                        with self._shared.lock:
                            self._shared.cache_use.fetches += 1
                        return
                except ObjectNotFoundError:
                    problem = "is missing"
                    break
                finally:
                    incoming.close()
            else:
                problem = "is damaged: its bytes do not have the SHA-256 in its name"
            self._discard(name, blob, problem)
            raise missing_blobs([name])

    def _discard(self, name: str, blob: StoredBlob, problem: str) -> None:
        """Removes a blob whose object cannot be used, unless it has another object by now."""
        shared = self._shared
        if shared.index.find(self.folder_name, [name]).get(name) != blob:
            return
        check_owner(shared.objects, shared.registry_id)
        _log.warning(
            "the object %s in %s %s; calls that need the blob ask clients to upload it again, unless a server has it "
            "in its cache and a program needs it: that server stores it again within seconds",
            blob.object,
            shared.objects.url,
            problem,
        )
        shared.index.mark_deleted([blob.object])
        self._delete([blob.object])

    def _delete(self, keys: Sequence[str], *, are_incomplete: bool = False) -> None:
        """Deletes objects that were marked; the periodic check of any server repeats what fails."""
        deleted = []
        try:
            for key in keys:
                self._shared.objects.delete(key, is_incomplete=are_incomplete)
                deleted.append(key)
        except ObjectStoreError as cause:
            _log.debug("objects of removed blobs are not deleted yet: %s", cause)
        if deleted:
            self._shared.index.forget(deleted)

    def record_need(self, connection: Connection, tenant: str, program_id: str, names: Sequence[str]) -> None:
        self._shared.index.need(connection, tenant, program_id, self.folder_name, names)

    def record_needs(self, wanted: Iterable[tuple[str, str, Sequence[str]]]) -> None:
        self._shared.index.add_needs(
            (tenant, program_id, folder_name(tenant), names) for tenant, program_id, names in wanted
        )

    def maintain(self) -> None:
        """Stores times of last uses, and deletes what killed servers left; called every few seconds."""
        shared = self._shared
        try:
            shared.store_uses()
            shared.usage = shared.index.usage()
            self._delete(shared.index.take_lost(), are_incomplete=True)
            self._compare_once()
            self._store_lost()
        except ObjectStoreError as cause:
            _log.debug("the objects cannot be listed now: %s", cause)
        except GradruleError as cause:
            # The database, which reports this itself, is away.
            _log.debug("the index of blobs cannot be changed now: %s", cause)

    def _store_lost(self) -> None:
        """Stores blobs of the cache again that programs need and whose objects were lost or damaged."""
        lost, tenants = self._shared.index.lost(), self._index.tenants
        with self._index.lock:
            held = [(folder, name) for folder, name in lost if folder in tenants and name in tenants[folder].files]
        # Several servers may have the same blobs.
        random.shuffle(held)
        end = time.monotonic() + _STORE_LOST_S
        for folder, name in held:
            if time.monotonic() > end:
                return
            self._in_folder(folder)._store_again(name)

    def _store_again(self, name: str) -> None:
        # Verify the hash now: the file may have been damaged since its first use.
        if (file := self._own.files.get(name)) is not None:
            file.verified = None
        try:
            with self.pinned([name]):
                self.publish(name, self.folder / name, self.size(name))
        except GradruleError as cause:
            # The file was removed or damaged; another server may have the blob.
            if cause.reason == errors_pb2.ERROR_REASON_BLOB_NOT_FOUND:
                return
            self._shared.lost_warning.report(
                f"the blob {name}, whose object was lost, cannot be stored again now: {cause.message}"
            )
            raise
        self._shared.lost_warning.report(None)
        _log.warning("the blob %s, whose object was lost, was stored again from the cache", name)

    def follow_restore(self, wanted: Iterable[tuple[str, str, Sequence[str]]]) -> None:
        self._shared.restored = list(wanted)

    def _compare_once(self) -> None:
        """Compares the index with the objects, if a backup may have been restored since that was done."""
        shared = self._shared
        restored, shared.restored = shared.restored, None
        if restored is None:
            return
        try:
            self.record_needs(restored)
            self.compare_objects()
        except BaseException:
            if shared.restored is None:
                shared.restored = restored
            raise

    def compare_objects(self) -> None:
        """Enters objects into the index that it lacks, and removes blobs without objects. Raises `ObjectStoreError`."""
        objects = self._shared.objects

        def find_missing(keys: Sequence[str]) -> Sequence[str]:
            if not keys:
                return ()
            # Before thousands of requests, and again in case that something else has answered them.
            check_owner(objects, self._shared.registry_id)
            missing = _missing_objects(objects, keys)
            if missing:
                check_owner(objects, self._shared.registry_id)
            return missing

        added, lost = self._shared.index.compare(blob_objects(objects), find_missing)
        if added:
            _log.info("%d blobs in %s were entered into the index", added, objects.url)
        if lost:
            _log.warning(
                "%d blobs are missing in %s; calls that need them ask clients to upload them again", lost, objects.url
            )

    def adopt_folder(self, folder: Path) -> int:
        """Moves the blobs of a server without an object store into the object store; returns their number.

        Args:
            folder: The folder of these blobs. Damaged blobs stay there.

        Raises:
            GradruleError: UNAVAILABLE, or QUOTA_EXCEEDED (also if the disk of the cache is full).
        """
        count = 0
        found = [path for path in folder.rglob("*") if BLOB_NAME.fullmatch(path.name) is not None and path.is_file()]
        if found:
            _log.info("moving %d blobs from %s to %s", len(found), folder, self._shared.objects.url)
        for path in sorted(found):
            tenant_folder = path.parent.relative_to(folder).as_posix().removeprefix(".")
            upload = Upload(self._in_folder(tenant_folder), path.name)
            try:
                with path.open("rb") as file:
                    while piece := file.read(_PIECE_BYTES):
                        upload.write(piece)
                upload.finish()
            except GradruleError as cause:
                if cause.reason != errors_pb2.ERROR_REASON_BLOB_MISMATCH:
                    raise
                _log.warning("the blob %s is damaged; it is not moved to %s", path, self._shared.objects.url)
            else:
                path.unlink()
                count += 1
            finally:
                upload.close()
        return count

    def _is_present(self, name: str, *, is_used: bool = False) -> bool:
        is_present = super()._is_present(name, is_used=is_used)
        if is_present:
            self._note_use(name)
        return is_present

    def _note_use(self, name: str) -> None:
        with self._shared.lock:
            self._shared.uses[self.folder_name, name] = time.time_ns() // 1000

    def _remove_damaged(self, name: str, file: BlobFile) -> None:
        path = self.folder / name
        path.unlink()
        self._forget(name, file)
        _log.warning("the file %s of the cache is damaged; the blob is fetched again", path)


def _missing_objects(objects: ObjectStore, keys: Sequence[str]) -> list[str]:
    """Returns which objects are missing, by reading a byte of each. Raises `ObjectStoreError`.

    HEAD requests would not do: their answers have no body that tells an S3 service from a proxy.
    """
    missing: list[str] = []
    failures: list[Exception] = []
    left = iter(keys)
    lock = threading.Lock()

    def read_all() -> None:
        while not failures:
            with lock:
                key = next(left, None)
            if key is None:
                return
            try:
                objects.read(key, 0, 1)
            except ObjectNotFoundError:
                missing.append(key)
            except Exception as cause:
                failures.append(cause)

    # Daemon threads, because a server that ends does not wait for the object store.
    readers = [
        threading.Thread(target=read_all, name="blob-check", daemon=True) for _ in range(min(MAX_TRANSFERS, len(keys)))
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    if failures:
        raise failures[0]
    return missing


def open_shared_blobs(
    url: str,
    data_dir: Path,
    cache_bytes: int,
    database: Database,
    limit: BlobAmount,
    *,
    tenant_transfers: int = MAX_TRANSFERS,
) -> SharedBlobStore:
    """Opens an object store for blobs, and its index in the registry. Moves blobs of the data folder there.

    Args:
        url: See `open_object_store`.
        data_dir: The data folder of the server, which holds the cache.
        cache_bytes: Bytes that the cache may take on the disk.
        database: The registry's database.
        limit: The amount of blobs that all tenants may have.
        tenant_transfers: Number of uploads of one tenant that run at a time, and of fetches.

    Raises:
        StoreError: The object store cannot be used, or belongs to another registry.
    """
    objects = open_object_store(url)
    index = StoredBlobs(database, limit)
    is_new = claim(objects, index.registry_id())
    try:
        if is_new and not index.is_empty():
            _log.warning(
                "%s is new, but the registry has blobs in an object store: those are missing until clients upload them "
                "again, or until their objects are copied there",
                objects.url,
            )
        is_lost = not is_new and index.is_empty()
        blobs = SharedBlobStore(data_dir / BLOB_CACHE, cache_bytes, objects, index, tenant_transfers)
        if is_lost:
            blobs.compare_objects()
        blobs.adopt_folder(data_dir / BLOBS)
    except (ObjectStoreError, GradruleError) as cause:
        raise StoreError(f"--blobs {objects.url} cannot be used: {cause}") from cause
    return blobs
