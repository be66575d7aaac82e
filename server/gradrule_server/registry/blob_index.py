"""Indexes the blobs of all tenants: their sizes, limits, and the order in which unused blobs are removed."""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.policy.faults import BLOB_NAME
from gradrule_server.registry.data_folder import sync_to_disk

UPLOADING = ".upload-"
"""Prefix of the names of incomplete files, which are removed at the next start."""

KEPT = ".kept-"
"""Prefix of the names of files that `kept_values` keeps, which are removed at the next start."""

CACHE_SETTING = "--blob-cache-bytes"
"""The setting that limits the files of a cache; programs need none of them all the time."""

_FOLDER = re.compile(r"tenant-[0-9a-f]{32}")
_STAT_BLOCK = 512

BlobKey = tuple[str, str]
"""A tenant's folder and the name of a blob."""

FileStamp = tuple[int, int, int]
"""Identifies the content of a file: inode, size, time of the last change."""


@dataclass(slots=True)
class BlobFile:
    """The file of a blob.

    Attributes:
        length: Its size in bytes.
        disk_bytes: The bytes that it takes on the disk.
        verified: Its stamp when its hash was last verified.
        stored_use_ns: The time of its last use that is stored in the file's metadata.
    """

    length: int
    disk_bytes: int
    verified: FileStamp | None = None
    stored_use_ns: int = 0


@dataclass(slots=True)
class BlobAmount:
    """An amount of blobs: `size` in bytes on the disk, and `count` of files. Running uploads count."""

    size: int = 0
    count: int = 0

    def exceeds(self, limit: BlobAmount) -> bool:
        return self.size > limit.size or self.count > limit.count

    def plus(self, size: int, count: int) -> BlobAmount:
        return BlobAmount(self.size + size, self.count + count)


@dataclass(slots=True)
class TenantBlobs:
    """The blobs of one tenant.

    Attributes:
        files: The files by name, least recently used first.
        pins: Number of pins of each blob, by name; pinned blobs are not removed.
        used: The amount of the tenant's blobs.
        limit: The tenant's limit; None: unknown, because the tenant is not loaded.
    """

    files: OrderedDict[str, BlobFile] = field(default_factory=OrderedDict)
    pins: dict[str, int] = field(default_factory=dict)
    used: BlobAmount = field(default_factory=BlobAmount)
    limit: BlobAmount | None = None

    def next_removable(self, needed: Collection[str]) -> str | None:
        """Returns the least recently used blob that is neither pinned nor `needed`; None if there is none."""
        return next((name for name in self.files if name not in self.pins and name not in needed), None)


@dataclass(slots=True)
class BlobCacheUse:
    """How the files of an object store's blobs were used since the start; all 0 without an object store.

    Attributes:
        hits: Blobs that calls needed, and that had a file.
        fetches: Blobs that were fetched.
        failures: Fetches that failed.
        fetched_bytes: Bytes that were fetched, also by fetches that failed.
        fetch_s: Seconds that the fetches took.
        held_bytes: Bytes that the files take on the disk now.
    """

    hits: int = 0
    fetches: int = 0
    failures: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    held_bytes: int = 0


class BlobIndex:
    """The blobs of all tenants, by the name of the tenant's folder. Callers hold `lock` during each method."""

    def __init__(
        self, folder: Path, limit: BlobAmount, bytes_setting: str, needed: Callable[[], Collection[BlobKey]]
    ) -> None:
        self.folder = folder
        self.limit = limit
        self._needed = needed
        # Read all programs now: later calls read only new ones, while others wait for `lock`.
        needed()
        self.bytes_setting = bytes_setting
        """The setting that limits the bytes of all tenants."""
        self.lock = threading.Lock()
        self.used = BlobAmount()
        self.tenants: dict[str, TenantBlobs] = {"": TenantBlobs()}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_to_disk(folder.parent)
        for name in self._scan_folder(""):
            self._scan_folder(name)

    def tenant(self, folder: str) -> TenantBlobs:
        """Returns the blobs in a tenant's folder."""
        return self.tenants.setdefault(folder, TenantBlobs())

    def reserve(self, folder: str, size: int, count: int) -> None:
        """Reserves an amount for a tenant; removes unused blobs if the reservation exceeds a limit.

        Raises:
            GradruleError: QUOTA_EXCEEDED, if all blobs are pinned, or programs need them.
        """
        own = self.tenant(folder)
        limit = self.limit
        if own.limit is not None:
            limit = BlobAmount(min(own.limit.size, limit.size), min(own.limit.count, limit.count))
        needed: dict[str, set[str]] = {}
        if own.used.plus(size, count).exceeds(limit) or self.used.plus(size, count).exceeds(self.limit):
            # With the lock: a program that is stored meanwhile has its blobs pinned.
            for place, name in self._needed():
                needed.setdefault(place, set()).add(name)

        def next_removable(place: str) -> str | None:
            return self.tenant(place).next_removable(needed.get(place, ()))

        while own.used.plus(size, count).exceeds(limit) and (removable := next_removable(folder)) is not None:
            self.remove(folder, removable)
        wanted = own.used.plus(size, count)
        if wanted.exceeds(limit):
            raise quota_exceeded("one tenant may have", wanted, limit, self.limit, self.bytes_setting)
        # Remove blobs of the tenant with the largest amount first.
        while (wanted := self.used.plus(size, count)).exceeds(self.limit):
            by_count = wanted.size <= self.limit.size
            candidates = [
                (item.used.count if by_count else item.used.size, name)
                for name, item in self.tenants.items()
                if next_removable(name) is not None
            ]
            if not candidates:
                raise quota_exceeded("the server keeps", wanted, self.limit, self.limit, self.bytes_setting)
            _, largest = max(candidates)
            self.remove(largest, next_removable(largest) or "")
        self.adjust(folder, size, count)

    def adjust(self, folder: str, size: int, count: int) -> None:
        """Adds an amount, which may be negative, to the amount that a tenant uses."""
        own = self.tenant(folder)
        own.used, self.used = own.used.plus(size, count), self.used.plus(size, count)

    def remove(self, folder: str, blob: str) -> None:
        """Removes a blob and its file."""
        (self.folder / folder / blob).unlink(missing_ok=True)
        self.forget(folder, blob)

    def forget(self, folder: str, blob: str) -> None:
        """Removes a blob from the index; its file must be gone."""
        self.adjust(folder, -self.tenant(folder).files.pop(blob).disk_bytes, -1)

    def _scan_folder(self, folder: str) -> list[str]:
        """Indexes the blobs in a folder, removes temporary files, and returns the names of tenants' folders in it."""
        found, folders = [], []
        with os.scandir(self.folder / folder) as entries:
            for entry in entries:
                if entry.name.startswith((UPLOADING, KEPT)):
                    os.unlink(entry.path)
                elif BLOB_NAME.fullmatch(entry.name):
                    stat = entry.stat()
                    # Read both times: older releases stored the time of the last use as the time of the last change.
                    found.append((max(stat.st_atime_ns, stat.st_mtime_ns), entry.name, stat))
                elif _FOLDER.fullmatch(entry.name) and entry.is_dir():
                    folders.append(entry.name)
        files = self.tenant(folder).files
        for _, blob, stat in sorted(found, key=lambda item: item[:2]):
            files[blob] = BlobFile(stat.st_size, disk_bytes(stat))
        self.adjust(folder, sum(file.disk_bytes for file in files.values()), len(files))
        return folders


def disk_bytes(stat: os.stat_result) -> int:
    """Returns the bytes that a file takes on the disk, at least its size (some file systems compress)."""
    return max(stat.st_size, stat.st_blocks * _STAT_BLOCK)


def file_stamp(stat: os.stat_result) -> FileStamp:
    """Returns the stamp of a file."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def quota_exceeded(
    who: str,
    wanted: BlobAmount,
    limit: BlobAmount,
    server_limit: BlobAmount,
    bytes_setting: str = "--max-blob-bytes",
    remedy: str = "delete programs",
) -> GradruleError:
    """Returns QUOTA_EXCEEDED, which names the setting of the limit.

    Args:
        who: The beginning of the message, for example "the server keeps".
        wanted: The amount that is not allowed.
        limit: The limit that it exceeds.
        server_limit: The limit of all tenants.
        bytes_setting: The setting that limits the bytes of all tenants.
        remedy: What makes room.
    """
    if wanted.count > limit.count:
        setting = "--max-blobs" if limit.count == server_limit.count else "--tenant-blobs"
        bound = f"{limit.count} blobs"
    else:
        setting = bytes_setting if limit.size == server_limit.size else "--tenant-blob-bytes"
        bound = f"{limit.size} bytes of blobs"
    if setting == CACHE_SETTING:
        return error(
            errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
            f"the server's cache of blobs has room for {bound}, and running calls and uploads need all of it; try "
            f"again later, or start the server with a larger {setting}",
        )
    return error(
        errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
        f"{who} at most {bound}, and all of them are in use; {remedy}, or start the server with a larger {setting}",
    )


def disk_full(cause: OSError, disk: str, setting: str) -> GradruleError:
    """Returns QUOTA_EXCEEDED for a full disk. `setting`: limits what is stored on it."""
    return error(
        errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
        f"{disk} is full ({cause.strerror}); its operator must free space, or start it with a smaller {setting}, so "
        "that unused blobs are removed earlier",
    )
