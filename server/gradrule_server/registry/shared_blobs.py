"""Keeps blobs in an object store that several servers share; the files of `BlobStore` are a cache of it.

The key of an object is the tenant's folder and the blob's SHA-256, so an object is there or not, and its content never
changes. An upload is received into the cache's folder, verified, stored as an object, and only then acknowledged. A
blob that is not in the cache is fetched when a call needs it. Only the command `gradrule registry gc` deletes objects
that no program needs, see `collect`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

from sqlalchemy import Connection, delete, insert, select

from gradrule.v1 import errors_pb2
from gradrule_server.concurrency import RepeatedWarning, TenantSlots, run_in_own_thread
from gradrule_server.errors import GradruleError, error
from gradrule_server.policy import missing_blobs
from gradrule_server.registry.blob_index import CACHE_SETTING, BlobAmount, BlobFile, BlobKey, quota_exceeded
from gradrule_server.registry.blobs import BlobCacheUse, BlobStore, Upload, disk_full, valid_names
from gradrule_server.registry.data_folder import BLOB_CACHE, BLOBS, DISK_FULL_ERRORS, StoreError, has_blobs
from gradrule_server.registry.database import Database
from gradrule_server.registry.object_store import (
    ObjectNotFoundError,
    ObjectStore,
    ObjectStoreError,
    StoredObject,
    check_owner,
    claim,
    open_object_store,
    read_object,
)
from gradrule_server.registry.schema import blob_usage, read_meta

_log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TRANSFERS = 8
"""Number of uploads to the object store that run at a time, and of fetches."""

_WAIT_FOR_UPLOADS_S = 60.0
# A blob whose bytes are wrong is read once more, because they may have been damaged on their way.
_READ_ATTEMPTS = 2
_RETRY_AFTER_S = 1.0
# An object that is still wanted after this time is renewed, so that `collect` takes it for a new one.
_RENEW_AFTER_S = 600.0
MIN_GRACE_S = 2 * _RENEW_AFTER_S
"""Shortest time after which `collect` may delete objects."""

# The folder of the default tenant.
_DEFAULT = "default"
_OBJECT = re.compile(r"(?:(tenant-[0-9a-f]{32})|default)/([0-9a-f]{64})")
# How the keys of objects start.
_STARTS = ("default/", "tenant-")
_BLOCK = 4096


class BlobUsage:
    """Counts what the blobs in an object store take, for all servers of a registry. All methods block.

    Args:
        database: The registry's database.
        limit: The amount of blobs that all tenants may have.
    """

    def __init__(self, database: Database, limit: BlobAmount) -> None:
        self.database = database
        self.limit = limit
        with database.read() as connection:
            self.registry_id = read_meta(connection, "registry_id") or ""

    def read(self) -> dict[str, BlobAmount]:
        """Returns the amount of each folder, including running uploads."""
        with self.database.read() as connection:
            return _read_amounts(connection)

    def reserve(self, folder: str, size: int, limit: BlobAmount) -> None:
        """Counts one more blob. Raises QUOTA_EXCEEDED. `limit`: of the tenant."""
        limit = BlobAmount(min(limit.size, self.limit.size), min(limit.count, self.limit.count))
        remedy = "delete programs and run `gradrule registry gc`"
        with self.database.write() as connection:
            self.database.lock(connection)
            used = _read_amounts(connection)
            wanted = used.get(folder, BlobAmount()).plus(size, 1)
            if wanted.exceeds(limit):
                raise quota_exceeded("one tenant may have", wanted, limit, self.limit, remedy=remedy)
            total = BlobAmount(sum(item.size for item in used.values()), sum(item.count for item in used.values()))
            if (wanted_of_all := total.plus(size, 1)).exceeds(self.limit):
                raise quota_exceeded("the server keeps", wanted_of_all, self.limit, self.limit, remedy=remedy)
            _write_amounts(connection, {folder: wanted})

    def release(self, folder: str, size: int) -> None:
        """Counts one blob less."""
        with self.database.write() as connection:
            self.database.lock(connection)
            used = _read_amounts(connection).get(folder, BlobAmount()).plus(-size, -1)
            _write_amounts(connection, {folder: BlobAmount(max(0, used.size), max(0, used.count))})

    def replace(self, amounts: Mapping[str, BlobAmount]) -> None:
        """Replaces all amounts, which were counted again."""
        with self.database.write() as connection:
            self.database.lock(connection)
            connection.execute(delete(blob_usage))
            _write_amounts(connection, amounts)


def _read_amounts(connection: Connection) -> dict[str, BlobAmount]:
    return {row.folder: BlobAmount(row.size, row.number) for row in connection.execute(select(blob_usage))}


def _write_amounts(connection: Connection, amounts: Mapping[str, BlobAmount]) -> None:
    for folder, amount in amounts.items():
        connection.execute(delete(blob_usage).where(blob_usage.c.folder == folder))
        connection.execute(insert(blob_usage).values(folder=folder, number=amount.count, size=amount.size))


class _Shared:
    """What the stores of all tenants share.

    Attributes:
        amounts: The amount of each folder, as last seen.
        cache_use: How the cache was used; `held_bytes` is not set.
    """

    def __init__(self, objects: ObjectStore, usage: BlobUsage, tenant_transfers: int) -> None:
        self.objects = objects
        self.usage = usage
        self.registry_id = usage.registry_id
        self._fetches: dict[BlobKey, asyncio.Task[None]] = {}
        self._fetch_slots = TenantSlots(MAX_TRANSFERS, tenant_transfers)
        self.lock = threading.Lock()
        self.publishing: weakref.WeakValueDictionary[BlobKey, threading.Lock] = weakref.WeakValueDictionary()
        """A lock for each blob that is being stored, so that it is counted once."""
        self.upload_slots = TenantSlots(MAX_TRANSFERS, tenant_transfers)
        self.amounts = usage.read()
        self.cache_use = BlobCacheUse()
        self.warning = RepeatedWarning(_log)

    async def in_slot(self, folder: str, function: Callable[[], T]) -> T:
        """Returns what a function returns that waits for the object store; runs it in a thread, a few at a time.

        A function that runs keeps its slot until it ends, also if its caller gives up.
        """
        async with contextlib.AsyncExitStack() as slot:
            await slot.enter_async_context(self._fetch_slots.hold_in_task(folder))
            running = asyncio.create_task(_run_in(slot.pop_all(), function))
        return await asyncio.shield(running)

    async def fetch(self, key: BlobKey, download: Callable[[], None]) -> None:
        """Waits until a blob is fetched: once for all that wait, and a few blobs at a time.

        The fetch goes on if nobody waits any more. Belongs to one event loop. Raises what `download` raises.

        Args:
            key: Identifies the blob.
            download: Fetches it, in a thread.
        """
        running = self._fetches.get(key)
        if running is None:
            running = self._fetches[key] = asyncio.create_task(self.in_slot(key[0], download), name="fetch-blob")
            running.add_done_callback(lambda _: self._fetches.pop(key))
        # A caller that is cancelled must not cancel the fetch for others.
        await asyncio.shield(running)

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


async def _run_in(slot: contextlib.AsyncExitStack, function: Callable[[], T]) -> T:
    async with slot:
        return await run_in_own_thread("object-store", function)


class SharedBlobStore(BlobStore):
    """The blobs of the default tenant in an object store, see `BlobStore`.

    Args:
        folder: The folder of the cache, which is created if missing.
        cache_bytes: Bytes that the cache may take on the disk.
        objects: The object store.
        usage: Counts the blobs of all servers.
        tenant_transfers: Number of uploads of one tenant that run at a time, and of fetches.
    """

    is_shared = True

    def __init__(
        self,
        folder: Path,
        cache_bytes: int,
        objects: ObjectStore,
        usage: BlobUsage,
        tenant_transfers: int = MAX_TRANSFERS,
    ) -> None:
        super().__init__(folder, cache_bytes, bytes_setting=CACHE_SETTING)
        self._shared = _Shared(objects, usage, tenant_transfers)
        self._limit = usage.limit

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
        return self._shared.amounts.get(self.folder_name, BlobAmount())

    def cache_use(self) -> BlobCacheUse:
        with self._shared.lock:
            return dataclasses.replace(self._shared.cache_use, held_bytes=self._index.used.size)

    def missing(self, names: Iterable[str]) -> list[str]:
        wanted = valid_names(names)
        try:
            return self._renew(wanted)
        except GradruleError:
            # Calls of blobs in the cache go on while the object store is away.
            if all(map(self._is_present, wanted)):
                return []
            raise

    def require_stored(self, names: Iterable[str]) -> None:
        # Not those of the cache: other servers need the objects.
        if missing := self._renew(valid_names(names)):
            raise missing_blobs(missing)

    def _renew(self, names: Sequence[str]) -> list[str]:
        """Renews those objects of blobs that are old; returns the blobs that have none. Raises UNAVAILABLE."""
        found = self._find(names)
        with self._shared.reaching_objects():
            for item in list(found.values()):
                if time.time() - item.modified_s > _RENEW_AFTER_S:
                    try:
                        self._shared.objects.renew(item.key)
                    except ObjectNotFoundError:
                        # Deleted just now.
                        found.pop(item.key.rpartition("/")[2])
        return [name for name in names if name not in found]

    def _find(self, names: Iterable[str]) -> dict[str, StoredObject]:
        """Returns the objects of those blobs that are stored, by name. Raises UNAVAILABLE."""
        keys = {object_key(self.folder_name, name): name for name in names}
        with self._shared.reaching_objects():
            found = self._shared.objects.find(keys)
            if len(found) < len(keys):
                check_owner(self._shared.objects, self._shared.registry_id)
        return {keys[key]: item for key, item in found.items()}

    def sizes(self, names: Sequence[str]) -> list[int]:
        wanted = valid_names(names)
        # Blobs in the cache must work while the object store cannot be reached.
        cached = {name: self.size(name) for name in wanted if self._is_present(name)}
        absent = [name for name in wanted if name not in cached]
        found = self._find(absent) if absent else {}
        return [cached[name] if name in cached else found[name].size if name in found else -1 for name in names]

    def check_length(self, length: int) -> None:
        limit = BlobAmount(min(self._limit.size, self._shared.usage.limit.size), 1)
        wanted = BlobAmount(counted_bytes(length), 1)
        if wanted.exceeds(limit):
            raise quota_exceeded("one tenant may have", wanted, limit, self._shared.usage.limit)

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
            with shared.lock:
                own = shared.publishing.setdefault((self.folder_name, name), threading.Lock())
            with own:
                self._publish(name, path, length)

    def _publish(self, name: str, path: Path, length: int) -> None:
        shared, size = self._shared, counted_bytes(length)
        is_new = not self._find([name])
        if is_new:
            shared.usage.reserve(self.folder_name, size, self._limit)
        try:
            with shared.reaching_objects():
                try:
                    # Also if it is there: to renew it, and in case that it is damaged.
                    shared.objects.put(object_key(self.folder_name, name), path)
                except OSError as cause:
                    if cause.errno not in DISK_FULL_ERRORS:
                        raise ObjectStoreError(str(cause)) from cause
                    raise disk_full(cause, f"the file system of {shared.objects.url}", "--max-blob-bytes") from cause
        except BaseException:
            if is_new:
                # If the database is away, `collect` counts again later.
                with contextlib.suppress(GradruleError):
                    shared.usage.release(self.folder_name, size)
            raise
        finally:
            self.maintain()

    async def look_up(self, function: Callable[[], T]) -> T:
        return await self._shared.in_slot(self.folder_name, function)

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
        fetches = (
            self._shared.fetch((self.folder_name, name), functools.partial(self._download, name)) for name in names
        )
        missing = []
        for name, failure in zip(names, await asyncio.gather(*fetches, return_exceptions=True), strict=True):
            if isinstance(failure, GradruleError) and failure.reason == errors_pb2.ERROR_REASON_BLOB_NOT_FOUND:
                missing.append(name)
            elif failure is not None:
                raise failure
        if missing:
            raise missing_blobs(missing)

    def _download(self, name: str) -> None:
        """Copies a blob into the cache. Raises BLOB_NOT_FOUND if its object is damaged or missing."""
        shared = self._shared
        if (item := self._find([name]).get(name)) is None:
            raise missing_blobs([name])
        with shared.counted_fetch(), shared.reaching_objects():
            for _ in range(_READ_ATTEMPTS):
                incoming = Upload(self, name, is_copy=True)
                try:
                    for piece in read_object(shared.objects, item.key, item.size):
                        incoming.write(piece)
                        with shared.lock:
                            shared.cache_use.fetched_bytes += len(piece)
                    if incoming.is_valid:
                        incoming.finish()
                        with shared.lock:
                            shared.cache_use.fetches += 1
                        return
                except ObjectNotFoundError:
                    # Deleted just now.
                    raise missing_blobs([name]) from None
                finally:
                    incoming.close()
            check_owner(shared.objects, shared.registry_id)
            _log.warning(
                "the object %s in %s is damaged: its bytes do not have the SHA-256 in its name; calls that need the "
                "blob ask clients to upload it again",
                item.key,
                shared.objects.url,
            )
            shared.objects.delete(item.key)
            shared.usage.release(self.folder_name, counted_bytes(item.size))
            raise missing_blobs([name])

    def maintain(self) -> None:
        """Reads what the blobs of all tenants take; called at intervals."""
        with contextlib.suppress(GradruleError):
            self._shared.amounts = self._shared.usage.read()

    def _remove_damaged(self, name: str, file: BlobFile) -> None:
        path = self.folder / name
        path.unlink()
        self._forget(name, file)
        _log.warning("the file %s of the cache is damaged; the blob is fetched again", path)


def object_key(folder: str, name: str) -> str:
    """Returns the key of a blob's object. `folder`: the tenant's, see `blobs.folder_name`."""
    return f"{folder or _DEFAULT}/{name}"


def counted_bytes(length: int) -> int:
    """Returns the bytes of a blob that count towards limits, as on a disk with blocks of 4 KiB."""
    return -(-length // _BLOCK) * _BLOCK


def collect(
    objects: ObjectStore,
    usage: BlobUsage,
    needed: Callable[[], Collection[BlobKey]],
    grace_s: float,
) -> tuple[int, int]:
    """Deletes the objects of blobs that no program needs, and counts the others; servers may run meanwhile.

    Args:
        objects: The object store.
        usage: Counts its blobs.
        needed: Returns folder and name of the blobs that stored programs need.
        grace_s: Objects that were stored or renewed within this time stay, because a program may be about to need
            them; at least `MIN_GRACE_S` seconds.

    Returns:
        The number of deleted objects, and their bytes.

    Raises:
        ObjectStoreError: The object store cannot be used, or belongs to another registry.
        GradruleError: The database cannot be used.
    """
    check_owner(objects, usage.registry_id)
    oldest_s = time.time() - max(grace_s, MIN_GRACE_S)
    found = dict(_blob_objects(objects))
    # Read the programs after the objects: a newer program has renewed its blobs, or has found them missing.
    kept = set(needed())
    count = size = 0
    for key, item in list(found.items()):
        if key in kept or item.modified_s > oldest_s:
            continue
        # It may have been renewed since.
        now = objects.find([item.key]).get(item.key)
        if now is not None and now.modified_s <= oldest_s:
            objects.delete(item.key)
            del found[key]
            count, size = count + 1, size + item.size
    usage.replace(_amounts(found))
    objects.delete_unfinished(oldest_s)
    return count, size


def _blob_objects(objects: ObjectStore) -> Iterator[tuple[BlobKey, StoredObject]]:
    """Yields each blob with its object; a bucket may have other objects besides."""
    for start in _STARTS:
        for item in objects.iterate(start):
            if match := _OBJECT.fullmatch(item.key):
                yield (match[1] or "", match[2]), item


def _amounts(found: Mapping[BlobKey, StoredObject]) -> dict[str, BlobAmount]:
    amounts: dict[str, BlobAmount] = {}
    for (folder, _), item in found.items():
        amounts[folder] = amounts.get(folder, BlobAmount()).plus(counted_bytes(item.size), 1)
    return amounts


def open_shared_blobs(
    url: str,
    data_dir: Path,
    cache_bytes: int,
    database: Database,
    limit: BlobAmount,
    *,
    tenant_transfers: int = MAX_TRANSFERS,
) -> SharedBlobStore:
    """Opens an object store for blobs.

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
    usage = BlobUsage(database, limit)
    is_new = claim(objects, usage.registry_id)
    try:
        if is_new and any(amount.count for amount in usage.read().values()):
            _log.warning(
                "%s is new, but the registry has blobs in an object store: those are missing until clients upload them "
                "again, or until their objects are copied there",
                objects.url,
            )
        if is_new or not usage.read():
            # A backup may have been restored there.
            usage.replace(_amounts(dict(_blob_objects(objects))))
        if has_blobs(data_dir / BLOBS):
            _log.warning(
                "the blobs in %s are not used, because --blobs names another place; `gradrule registry copy` copies a "
                "registry with its blobs",
                data_dir / BLOBS,
            )
        return SharedBlobStore(data_dir / BLOB_CACHE, cache_bytes, objects, usage, tenant_transfers)
    except (ObjectStoreError, GradruleError) as cause:
        raise StoreError(f"--blobs {objects.url} cannot be used: {cause}") from cause
