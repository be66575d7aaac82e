"""What blobs there are, of each tenant and of all: how much they take, how they are bounded, which goes first."""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.registry.migrations import sync

UPLOADING = ".upload-"
"""How names of files begin that are not complete yet; what is left of them goes at the next start."""
NAME = re.compile(r"[0-9a-f]{64}")

_FOLDER = re.compile(r"tenant-[0-9a-f]{32}")
_STAT_BLOCK = 512

Stamp = tuple[int, int, int]
"""By which a file that was written is known: inode, size, time of the last change."""


@dataclass(slots=True)
class BlobFile:
    """A blob. `length`: its bytes; `taken`: those it takes on the disk; `verified`: the stamp its hash was right at.

    `noted_ns`: the time of its last use as the disk has it.
    """

    length: int
    taken: int
    verified: Stamp | None = None
    noted_ns: int = 0


@dataclass(slots=True)
class Amount:
    """How much there is, or may be: `size` is bytes on the disk, `count` files. Uploads under way count."""

    size: int = 0
    count: int = 0

    def exceeds(self, most: Amount) -> bool:
        return self.size > most.size or self.count > most.count

    def plus(self, size: int, count: int) -> Amount:
        return Amount(self.size + size, self.count + count)


@dataclass(slots=True)
class TenantBlobs:
    """What one tenant has. `files`: least recently used first; `most`: None while the tenant is not known."""

    files: OrderedDict[str, BlobFile] = field(default_factory=OrderedDict)
    holders: dict[str, int] = field(default_factory=dict)
    used: Amount = field(default_factory=Amount)
    most: Amount | None = None

    def oldest(self) -> str | None:
        """What would go next."""
        return next((name for name in self.files if name not in self.holders), None)


class BlobIndex:
    """All tenants' blobs, by the names of their folders."""

    def __init__(self, folder: Path, most: Amount) -> None:
        self.folder = folder
        self.most = most
        self.lock = threading.Lock()
        self.used = Amount()
        self.tenants: dict[str, TenantBlobs] = {"": TenantBlobs()}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync(folder.parent)
        for name in self._read(""):
            self._read(name)

    def own(self, name: str) -> TenantBlobs:
        """What lies in a folder."""
        return self.tenants.setdefault(name, TenantBlobs())

    def reserve(self, name: str, size: int, count: int) -> None:
        """Makes room in a folder; QUOTA_EXCEEDED."""
        own = self.own(name)
        most = self.most
        if own.most is not None:
            most = Amount(min(own.most.size, most.size), min(own.most.count, most.count))
        while own.used.plus(size, count).exceeds(most) and (oldest := own.oldest()) is not None:
            self.remove(name, oldest)
        wanted = own.used.plus(size, count)
        if wanted.exceeds(most):
            raise _full("one tenant may have", wanted, most, self.most)
        # The tenant that has most gives first.
        while (wanted := self.used.plus(size, count)).exceeds(self.most):
            by_count = wanted.size <= self.most.size
            able = [
                (item.used.count if by_count else item.used.size, folder)
                for folder, item in self.tenants.items()
                if item.oldest() is not None
            ]
            if not able:
                raise _full("the server keeps", wanted, self.most, self.most)
            _, folder = max(able)
            self.remove(folder, self.own(folder).oldest() or "")
        self.adjust(name, size, count)

    def adjust(self, name: str, size: int, count: int) -> None:
        """Counts bytes and files in, or out."""
        own = self.own(name)
        own.used, self.used = own.used.plus(size, count), self.used.plus(size, count)

    def remove(self, name: str, blob: str) -> None:
        """Removes a blob."""
        (self.folder / name / blob).unlink(missing_ok=True)
        self.forget(name, blob)

    def forget(self, name: str, blob: str) -> None:
        """Counts a blob out whose file is gone."""
        self.adjust(name, -self.own(name).files.pop(blob).taken, -1)

    def _read(self, name: str) -> list[str]:
        """Reads what lies in a folder; the names of tenants' folders in it."""
        found, folders = [], []
        with os.scandir(self.folder / name) as entries:
            for entry in entries:
                if entry.name.startswith(UPLOADING):
                    os.unlink(entry.path)
                elif NAME.fullmatch(entry.name):
                    stat = entry.stat()
                    # Older releases kept the time of the last use as that of the last change.
                    found.append((max(stat.st_atime_ns, stat.st_mtime_ns), entry.name, stat))
                elif _FOLDER.fullmatch(entry.name) and entry.is_dir():
                    folders.append(entry.name)
        files = self.own(name).files
        for _, blob, stat in sorted(found, key=lambda item: item[:2]):
            files[blob] = BlobFile(stat.st_size, taken_on_disk(stat))
        self.adjust(name, sum(file.taken for file in files.values()), len(files))
        return folders


def taken_on_disk(stat: os.stat_result) -> int:
    """Bytes that a file takes on the disk; no fewer than it has, where the disk stores them smaller."""
    return max(stat.st_size, stat.st_blocks * _STAT_BLOCK)


def stamp_of(stat: os.stat_result) -> Stamp:
    """A file's stamp."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _full(who: str, wanted: Amount, most: Amount, of_server: Amount) -> GradruleError:
    if wanted.count > most.count:
        setting = "--max-blobs" if most.count == of_server.count else "--tenant-blobs"
        bound = f"{most.count} blobs"
    else:
        setting = "--max-blob-bytes" if most.size == of_server.size else "--tenant-blob-bytes"
        bound = f"{most.size} bytes of blobs"
    return error(
        errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
        f"{who} at most {bound}, and what is there is in use; delete programs, or start the server with a larger "
        f"{setting}",
    )
