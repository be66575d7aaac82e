"""Keeps blobs in an object store that several servers share, whose copies `BlobStore` keeps in a cache.

The key of an object is the tenant's folder and the blob's SHA-256, so an object is there or not, and its content never
changes. An upload is received into the cache's folder, verified, stored as an object, and only then acknowledged. Only
the command `gradrule registry gc` deletes objects that no program needs, see `SharedBlobs.collect`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, delete, insert, select

from gradrule.v1 import errors_pb2
from gradrule_server.concurrency import RepeatedWarning, TenantSlots, run_in_own_thread
from gradrule_server.errors import GradruleError, error
from gradrule_server.policy import missing_blobs
from gradrule_server.registry.blob_index import BlobAmount, BlobCacheUse, BlobKey, disk_full, quota_exceeded
from gradrule_server.registry.data_folder import BLOBS, DISK_FULL_ERRORS, StoreError
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

# A blob whose bytes are wrong is read once more, because they may have been damaged on their way.
_READ_ATTEMPTS = 2
_RETRY_AFTER_S = 1.0
# An object that is still wanted after this time is renewed, so that `collect` takes it for a new one.
_RENEW_AFTER_S = 600.0
MIN_GRACE_S = 2 * _RENEW_AFTER_S
"""Shortest time after which `collect` may delete objects."""

_REMEDY = "delete programs and run `gradrule registry gc`"

# The folder of the default tenant.
_DEFAULT = "default"
_OBJECT = re.compile(r"(?:(tenant-[0-9a-f]{32})|default)/([0-9a-f]{64})")
# How the keys of objects start.
_STARTS = ("default/", "tenant-")
_BLOCK = 4096


class SharedBlobs:
    """The blobs of all tenants in an object store, which all servers of a registry count in its database.

    Methods that are not `async` block. Those that reach the object store raise UNAVAILABLE while it is away. A `folder`
    is that of a tenant, see `blobs.folder_name`.

    Args:
        objects: The object store.
        database: The registry's database.
        limit: The amount of blobs that all tenants may have.
        tenant_transfers: Number of uploads of one tenant that run at a time, and of fetches.

    Attributes:
        objects: The object store.
        registry_id: The id of the registry.
        amounts: The amount of each folder, including running uploads, as last seen.
        cache_use: How the cache was used; `held_bytes` is not set.
        limits: The amount that the tenant of each folder may have; those of other tenants are `limit`.
    """

    def __init__(
        self, objects: ObjectStore, database: Database, limit: BlobAmount, tenant_transfers: int = MAX_TRANSFERS
    ) -> None:
        self.objects = objects
        self._database = database
        self._limit = limit
        with database.read() as connection:
            self.registry_id = read_meta(connection, "registry_id") or ""
            self.amounts = _read_amounts(connection)
        self.cache_use = BlobCacheUse()
        self.limits: dict[str, BlobAmount] = {}
        # When blobs were stored or renewed, as last seen: those seen in the last minutes need no request.
        self._seen_s: dict[BlobKey, float] = {}
        self._lock = threading.Lock()
        self._fetches: dict[BlobKey, asyncio.Task[None]] = {}
        # Large transfers must not hold up those who only ask whether a blob is there.
        slots = [TenantSlots(MAX_TRANSFERS, tenant_transfers) for _ in range(3)]
        self._fetch_slots, self._upload_slots, self._lookup_slots = slots
        self._warning = RepeatedWarning(_log)

    async def upload(self, folder: str, function: Callable[[], T]) -> T:
        """Returns what the end of an upload returns; runs it in a thread, a few at a time."""
        return await self._in_slot(self._upload_slots, folder, function)

    async def look_up(self, folder: str, function: Callable[[], T]) -> T:
        """Returns what a function returns that waits for the object store; runs it in a thread, a few at a time."""
        return await self._in_slot(self._lookup_slots, folder, function)

    async def fetch(self, key: BlobKey, download: Callable[[], None]) -> None:
        """Waits until a blob is fetched: once for all that wait, and a few blobs at a time.

        The fetch goes on if nobody waits any more. Belongs to one event loop. Raises what `download` raises.

        Args:
            key: Identifies the blob.
            download: Fetches it, in a thread.
        """
        running = self._fetches.get(key)
        if running is None:
            work = self._in_slot(self._fetch_slots, key[0], download)
            running = self._fetches[key] = asyncio.create_task(work, name="fetch-blob")
            running.add_done_callback(lambda _: self._fetches.pop(key))
        # A caller that is cancelled must not cancel the fetch for others.
        await asyncio.shield(running)

    async def _in_slot(self, slots: TenantSlots, folder: str, function: Callable[[], T]) -> T:
        """Runs a function in a thread; it keeps its slot until it ends, also if its caller gives up."""
        # Not in the threads of `asyncio.to_thread`: a slow object store would leave none for other work.
        async with contextlib.AsyncExitStack() as slot:
            await slot.enter_async_context(slots.hold(folder))
            running = asyncio.create_task(_run_in(slot.pop_all(), function))
        return await asyncio.shield(running)

    def find(self, folder: str, names: Iterable[str]) -> dict[str, StoredObject]:
        """Returns the objects of those blobs that are stored, by name."""
        keys = {object_key(folder, name): name for name in names}
        with self._reaching_objects():
            found = self.objects.find(keys)
            if len(found) < len(keys):
                check_owner(self.objects, self.registry_id)
        return {keys[key]: item for key, item in found.items()}

    def renew(self, folder: str, names: Sequence[str]) -> list[str]:
        """Renews those objects of blobs that are old; returns the blobs that have none."""
        found = self.find(folder, names)
        with self._reaching_objects():
            for name, item in list(found.items()):
                self._seen_s[folder, name] = item.modified_s
                if not self._is_recent(folder, name):
                    try:
                        self.objects.renew(item.key)
                        self._seen_s[folder, name] = time.time()
                    except ObjectNotFoundError:
                        # Deleted just now.
                        del found[name]
        return [name for name in names if name not in found]

    def require_stored(self, folder: str, names: Sequence[str]) -> None:
        """Raises BLOB_NOT_FOUND unless all blobs are stored, and `collect` deletes none in the next minutes.

        Blobs that were seen a short time ago are known without a request, so programs can be stored while the object
        store is away for a short time.
        """
        unknown = [name for name in names if not self._is_recent(folder, name)]
        if unknown and (missing := self.renew(folder, unknown)):
            raise missing_blobs(missing)

    def _is_recent(self, folder: str, name: str) -> bool:
        return time.time() - self._seen_s.get((folder, name), 0.0) <= _RENEW_AFTER_S

    def download(self, folder: str, name: str, receive: Callable[[Iterator[bytes]], bool]) -> None:
        """Reads a blob. Raises BLOB_NOT_FOUND if it has no object, or a damaged one, which is deleted.

        Args:
            folder: The tenant's folder.
            name: The blob.
            receive: Gets the pieces of the blob, and returns whether they have the right SHA-256.
        """
        if (item := self.find(folder, [name]).get(name)) is None:
            raise missing_blobs([name])
        started, failures = time.monotonic(), 1
        try:
            with self._reaching_objects():
                if any(receive(self._pieces(item)) for _ in range(_READ_ATTEMPTS)):
                    failures = 0
                    return
                check_owner(self.objects, self.registry_id)
                _log.warning(
                    "the object %s in %s is damaged: its bytes do not have the SHA-256 in its name; calls that need "
                    "the blob ask clients to upload it again",
                    item.key,
                    self.objects.url,
                )
                self.objects.delete(item.key)
                self._seen_s.pop((folder, name), None)
                self._release(folder, counted_bytes(item.size))
        except ObjectNotFoundError:
            # Deleted just now.
            pass
        finally:
            self.add_use(fetches=1 - failures, failures=failures, fetch_s=time.monotonic() - started)
        raise missing_blobs([name])

    def _pieces(self, item: StoredObject) -> Iterator[bytes]:
        for piece in read_object(self.objects, item.key, item.size):
            self.add_use(fetched_bytes=len(piece))
            yield piece

    def add_use(self, **amounts: float) -> None:
        """Adds amounts to the use of the cache."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self.cache_use, name, getattr(self.cache_use, name) + amount)

    def check_length(self, folder: str, length: int) -> None:
        """Raises QUOTA_EXCEEDED if a blob of `length` bytes can never be stored."""
        self._check_limit(folder, BlobAmount(counted_bytes(length), 1))

    def put(self, folder: str, name: str, path: Path) -> None:
        """Stores a blob, also if it is stored already: to renew it, and in case that it is damaged.

        Args:
            folder: The tenant's folder.
            name: The blob.
            path: A file with its bytes, which are verified.

        Raises:
            GradruleError: QUOTA_EXCEEDED.
        """
        size = counted_bytes(path.stat().st_size)
        is_new = not self.find(folder, [name])
        if is_new:
            self._reserve(folder, size)
        try:
            with self._reaching_objects():
                try:
                    self.objects.put(object_key(folder, name), path)
                    self._seen_s[folder, name] = time.time()
                except OSError as cause:
                    if cause.errno not in DISK_FULL_ERRORS:
                        raise ObjectStoreError(str(cause)) from cause
                    raise disk_full(cause, f"the file system of {self.objects.url}", "--max-blob-bytes") from cause
        except BaseException:
            if is_new:
                # If the database is away, `collect` counts again later.
                with contextlib.suppress(GradruleError):
                    self._release(folder, size)
            raise
        finally:
            self.maintain()

    def maintain(self) -> None:
        """Reads what the blobs of all tenants take; called at intervals."""
        self._seen_s = {key: seen_s for key, seen_s in list(self._seen_s.items()) if self._is_recent(*key)}
        with contextlib.suppress(GradruleError), self._database.read() as connection:
            self.amounts = _read_amounts(connection)

    def count_again(self) -> None:
        """Counts all objects. Raises `ObjectStoreError`."""
        self._replace_amounts(dict(_blob_objects(self.objects)))

    def collect(self, needed: Callable[[], Collection[BlobKey]], grace_s: float) -> tuple[int, int]:
        """Deletes the objects of blobs that no program needs, and counts the others; servers may run meanwhile.

        Args:
            needed: Returns folder and name of the blobs that stored programs need.
            grace_s: Objects that were stored or renewed within this time stay, because a program may be about to need
                them; at least `MIN_GRACE_S` seconds.

        Returns:
            The number of deleted objects, and their bytes.

        Raises:
            ObjectStoreError: The object store cannot be used, or belongs to another registry.
            GradruleError: The database cannot be used.
        """
        check_owner(self.objects, self.registry_id)
        oldest_s = time.time() - max(grace_s, MIN_GRACE_S)
        found = dict(_blob_objects(self.objects))
        # Read the programs after the objects: a newer program has renewed its blobs, or has found them missing.
        kept = set(needed())
        count = size = 0
        for key, item in list(found.items()):
            if key in kept or item.modified_s > oldest_s:
                continue
            # It may have been renewed since.
            now = self.objects.find([item.key]).get(item.key)
            if now is not None and now.modified_s <= oldest_s:
                self.objects.delete(item.key)
                del found[key]
                count, size = count + 1, size + item.size
        self._replace_amounts(found)
        self.objects.delete_unfinished(oldest_s)
        return count, size

    def _check_limit(self, folder: str, wanted: BlobAmount) -> None:
        """Raises QUOTA_EXCEEDED if a tenant may not have an amount."""
        own = self.limits.get(folder, self._limit)
        limit = BlobAmount(min(own.size, self._limit.size), min(own.count, self._limit.count))
        if wanted.exceeds(limit):
            raise quota_exceeded("one tenant may have", wanted, limit, self._limit, remedy=_REMEDY)

    def _reserve(self, folder: str, size: int) -> None:
        """Counts one more blob. Raises QUOTA_EXCEEDED."""
        with self._database.write() as connection:
            self._database.lock(connection)
            used = _read_amounts(connection)
            wanted = used.get(folder, BlobAmount()).plus(size, 1)
            self._check_limit(folder, wanted)
            total = BlobAmount(sum(item.size for item in used.values()), sum(item.count for item in used.values()))
            if (wanted_of_all := total.plus(size, 1)).exceeds(self._limit):
                raise quota_exceeded("the server keeps", wanted_of_all, self._limit, self._limit, remedy=_REMEDY)
            _write_amounts(connection, {folder: wanted})

    def _release(self, folder: str, size: int) -> None:
        """Counts one blob less."""
        with self._database.write() as connection:
            self._database.lock(connection)
            used = _read_amounts(connection).get(folder, BlobAmount()).plus(-size, -1)
            _write_amounts(connection, {folder: BlobAmount(max(0, used.size), max(0, used.count))})

    def _replace_amounts(self, found: Mapping[BlobKey, StoredObject]) -> None:
        amounts: dict[str, BlobAmount] = {}
        for (folder, _), item in found.items():
            amounts[folder] = amounts.get(folder, BlobAmount()).plus(counted_bytes(item.size), 1)
        with self._database.write() as connection:
            self._database.lock(connection)
            connection.execute(delete(blob_usage))
            _write_amounts(connection, amounts)
        self.amounts = amounts

    @contextlib.contextmanager
    def _reaching_objects(self) -> Iterator[None]:
        """Raises UNAVAILABLE in place of `ObjectStoreError`, whose cause only the log holds."""
        try:
            yield
        except ObjectStoreError as cause:
            self._warning.report(f"the blobs in {self.objects.url} cannot be reached: {cause}")
            raise error(
                errors_pb2.ERROR_REASON_UNAVAILABLE,
                "the server cannot reach the object store that holds its blobs; try again later. Calls whose blobs "
                "are in the server's cache are not affected",
                retry_after_s=_RETRY_AFTER_S,
            ) from cause
        self._warning.report(None)


async def _run_in(slot: contextlib.AsyncExitStack, function: Callable[[], T]) -> T:
    async with slot:
        return await run_in_own_thread("object-store", function)


def _read_amounts(connection: Connection) -> dict[str, BlobAmount]:
    return {row.folder: BlobAmount(row.size, row.number) for row in connection.execute(select(blob_usage))}


def _write_amounts(connection: Connection, amounts: Mapping[str, BlobAmount]) -> None:
    for folder, amount in amounts.items():
        connection.execute(delete(blob_usage).where(blob_usage.c.folder == folder))
        connection.execute(insert(blob_usage).values(folder=folder, number=amount.count, size=amount.size))


def object_key(folder: str, name: str) -> str:
    """Returns the key of a blob's object. `folder`: the tenant's, see `blobs.folder_name`."""
    return f"{folder or _DEFAULT}/{name}"


def counted_bytes(length: int) -> int:
    """Returns the bytes of a blob that count towards limits, as on a disk with blocks of 4 KiB."""
    return -(-length // _BLOCK) * _BLOCK


def _blob_objects(objects: ObjectStore) -> Iterator[tuple[BlobKey, StoredObject]]:
    """Yields each blob with its object; a bucket may have other objects besides."""
    for start in _STARTS:
        for item in objects.iterate(start):
            if match := _OBJECT.fullmatch(item.key):
                yield (match[1] or "", match[2]), item


def open_shared_blobs(
    url: str, data_dir: Path, database: Database, limit: BlobAmount, tenant_transfers: int = MAX_TRANSFERS
) -> SharedBlobs:
    """Opens an object store for blobs.

    Args:
        url: See `open_object_store`.
        data_dir: The data folder of the server.
        database: The registry's database.
        limit: The amount of blobs that all tenants may have.
        tenant_transfers: Number of uploads of one tenant that run at a time, and of fetches.

    Raises:
        StoreError: The object store cannot be used, or belongs to another registry.
    """
    shared = SharedBlobs(open_object_store(url), database, limit, tenant_transfers)
    is_new = claim(shared.objects, shared.registry_id)
    if is_new and any(amount.count for amount in shared.amounts.values()):
        _log.warning(
            "%s is new, but the registry has blobs in an object store: those are missing until clients upload them "
            "again, or until their objects are copied there",
            shared.objects.url,
        )
    if any(path.is_file() for path in (data_dir / BLOBS).rglob("*")):
        _log.warning(
            "the blobs in %s are not used, because --blobs names another place; `gradrule registry copy` copies a "
            "registry with its blobs",
            data_dir / BLOBS,
        )
    try:
        if is_new or not shared.amounts:
            # A backup may have been restored there.
            shared.count_again()
    except (ObjectStoreError, GradruleError) as cause:
        raise StoreError(f"--blobs {shared.objects.url} cannot be used: {cause}") from cause
    return shared
