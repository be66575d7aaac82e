"""Bytes by their SHA-256, one file each: bounded, the least recently used ones go, those that are held stay.

Each tenant has blobs of its own, in a folder of its own; the first tenant's lie in the common folder itself. A file's
time of change is that of its last use, so that a restart knows the order.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import os
import re
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gradrule.v1 import errors_pb2
from gradrule_server.errors import Finding, GradruleError, Resource, error
from gradrule_server.registry.migrations import sync
from gradrule_server.registry.store import DEFAULT_TENANT

RESOURCE_TYPE = "gradrule.v1.Blob"
BLOBS = "blobs"
"""The common folder's name within the data folder."""
UPLOADING = ".upload-"
"""How names of files begin that are not complete yet; what is left of them goes at the next start."""

_NAME = re.compile(r"[0-9a-f]{64}")
_FOLDER = re.compile(r"tenant-[0-9a-f]{32}")
_SHOWN = 5
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_OWN = "--tenant-blob-bytes"


def folder_name(tenant: str) -> str:
    """The folder of a tenant's blobs within the common one; empty: the common one."""
    # Tenants' names come from tokens and certificates, and may hold what no file's name may.
    return "" if tenant == DEFAULT_TENANT else f"tenant-{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"


@dataclass(slots=True)
class _Own:
    """What one tenant has. `sizes`: least recently used first; `capacity`: None while the tenant is not known."""

    sizes: OrderedDict[str, int] = field(default_factory=OrderedDict)
    holders: dict[str, int] = field(default_factory=dict)
    size: int = 0
    capacity: int | None = None

    def oldest(self) -> str | None:
        """What would go next."""
        return next((name for name in self.sizes if name not in self.holders), None)


class _Shelf:
    """All tenants' blobs, by the names of their folders."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder = folder
        self.capacity = capacity
        self.lock = threading.Lock()
        self.size = 0
        self.tenants: dict[str, _Own] = {"": _Own()}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync(folder.parent)
        self._read("")
        for path in folder.iterdir():
            if _FOLDER.fullmatch(path.name) and path.is_dir():
                self._read(path.name)

    def own(self, name: str) -> _Own:
        """What lies in a folder."""
        return self.tenants.setdefault(name, _Own())

    def reserve(self, name: str, size: int) -> None:
        """Makes room in a folder; QUOTA_EXCEEDED."""
        own = self.own(name)
        capacity = self.capacity if own.capacity is None else min(own.capacity, self.capacity)
        while own.size + size > capacity and (oldest := own.oldest()) is not None:
            self.remove(name, oldest)
        if own.size + size > capacity:
            raise _full("one tenant may have", capacity, "--max-blob-bytes" if capacity == self.capacity else _OWN)
        # Whoever has most gives first.
        while self.size + size > self.capacity:
            able = [(item.size, folder) for folder, item in self.tenants.items() if item.oldest() is not None]
            if not able:
                raise _full("the server keeps", self.capacity, "--max-blob-bytes")
            _, folder = max(able)
            self.remove(folder, self.own(folder).oldest() or "")
        self.adjust(name, size)

    def adjust(self, name: str, size: int) -> None:
        """Counts bytes in, or out."""
        self.own(name).size += size
        self.size += size

    def remove(self, name: str, blob: str) -> None:
        """Lets one go."""
        (self.folder / name / blob).unlink(missing_ok=True)
        self.adjust(name, -self.own(name).sizes.pop(blob))

    def _read(self, name: str) -> None:
        found = []
        for path in (self.folder / name).iterdir():
            if path.name.startswith(UPLOADING):
                path.unlink()
            elif _NAME.fullmatch(path.name):
                stat = path.stat()
                found.append((stat.st_mtime_ns, path.name, stat.st_size))
        for _, blob, size in sorted(found):
            self.own(name).sizes[blob] = size
            self.adjust(name, size)


class BlobStore:
    """The first tenant's blobs, and by `of` those of others, all below `folder`, which is made where missing.

    Blocking; safe to use from several threads.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        self._shelf = _Shelf(folder, capacity)
        self._own = self._shelf.own("")
        self.folder_name = ""
        """Name of the tenant's folder within the common one, by which an engine finds it; empty: the common one."""

    def of(self, tenant: str, capacity: int | None = None) -> BlobStore:
        """A tenant's blobs. `capacity`: bytes that the tenant may have; all that the server keeps, unless given."""
        view = copy.copy(self)
        view.folder_name = folder_name(tenant)
        with self._shelf.lock:
            view._own = self._shelf.own(view.folder_name)
            if capacity is not None:
                view._own.capacity = capacity
        return view

    def forget(self) -> None:
        """The tenant is not at hand any more: what is known of its limits goes, its blobs stay."""
        with self._shelf.lock:
            self._own.capacity = None
            if not (self._own.sizes or self._own.size or self._own.holders):
                self._shelf.tenants.pop(self.folder_name, None)

    @property
    def root(self) -> Path:
        """The common folder."""
        return self._shelf.folder

    @property
    def folder(self) -> Path:
        """The tenant's folder; it may not be there yet."""
        return self._shelf.folder / self.folder_name

    @property
    def held_bytes(self) -> int:
        """Bytes of all blobs of the tenant, uploads under way included."""
        return self._own.size

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of the blobs that are not there, each once; the others count as used. MALFORMED_REQUEST for no hash."""
        wanted = dict.fromkeys(names)
        for name in wanted:
            check_name(name)
        with self._shelf.lock:
            for name in wanted:
                self._use(name)
            return [name for name in wanted if name not in self._own.sizes]

    def size(self, name: str) -> int:
        """Number of bytes; BLOB_NOT_FOUND."""
        check_name(name)
        with self._shelf.lock:
            size = self._own.sizes.get(name)
        if size is None:
            raise not_found([name])
        return size

    def read(self, name: str) -> bytes:
        """The bytes; BLOB_NOT_FOUND."""
        with self.held([name]):
            return (self.folder / name).read_bytes()

    def hold(self, names: Iterable[str]) -> None:
        """Keeps blobs from going until they are let go as often; BLOB_NOT_FOUND, then holding none."""
        wanted = dict.fromkeys(names)
        for name in wanted:
            check_name(name)
        own = self._own
        with self._shelf.lock:
            gone = [name for name in wanted if name not in own.sizes]
            if gone:
                raise not_found(gone)
            for name in wanted:
                self._use(name)
                own.holders[name] = own.holders.get(name, 0) + 1

    def let_go(self, names: Iterable[str]) -> None:
        """The other half of `hold`."""
        own = self._own
        with self._shelf.lock:
            for name in dict.fromkeys(names):
                own.holders[name] -= 1
                if not own.holders[name]:
                    del own.holders[name]

    @contextlib.contextmanager
    def held(self, names: Iterable[str]) -> Iterator[None]:
        """Within this context the blobs stay; BLOB_NOT_FOUND."""
        wanted = list(names)
        self.hold(wanted)
        try:
            yield
        finally:
            self.let_go(wanted)

    def upload(self, name: str) -> Upload:
        """Room for the bytes of a blob; MALFORMED_REQUEST for no hash."""
        check_name(name)
        with _room_on_disk(), contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
            sync(self.root)
        return Upload(self, name)

    def reserve(self, size: int) -> None:
        """Makes room for bytes that are about to come; QUOTA_EXCEEDED where all that is there is held."""
        with self._shelf.lock:
            self._shelf.reserve(self.folder_name, size)

    def release(self, size: int) -> None:
        """Bytes that were reserved did not come."""
        with self._shelf.lock:
            self._shelf.adjust(self.folder_name, -size)

    def add(self, name: str, file: Path, size: int) -> None:
        """Takes over a complete file, whose bytes were reserved."""
        with self._shelf.lock:
            if name in self._own.sizes:
                file.unlink()
                self._shelf.adjust(self.folder_name, -size)
                self._use(name)
                return
            file.rename(self.folder / name)
            self._own.sizes[name] = size

    def _use(self, name: str) -> None:
        if name in self._own.sizes:
            self._own.sizes.move_to_end(name)
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.folder / name)


class Upload:
    """A blob on its way in; `close` before `finish` leaves nothing behind. Safe to use from several threads.

    QUOTA_EXCEEDED where the disk is full.
    """

    def __init__(self, store: BlobStore, name: str) -> None:
        self._store = store
        self._name = name
        self._lock = threading.Lock()
        self._hash = hashlib.sha256()
        self._size = 0
        with _room_on_disk():
            handle, path = tempfile.mkstemp(prefix=UPLOADING, dir=store.folder)
        self._path: Path | None = Path(path)
        # Not buffered: what a full disk did not take would be written again by `close`.
        self._file = os.fdopen(handle, "wb", buffering=0)

    def write(self, data: bytes) -> None:
        """The next bytes; QUOTA_EXCEEDED. After `close` they go nowhere."""
        with self._lock:
            if self._path is None:
                return
            self._store.reserve(len(data))
            self._size += len(data)
            self._hash.update(data)
            with _room_on_disk():
                left = memoryview(data)
                while left:
                    left = left[self._file.write(left) :]

    def finish(self) -> int:
        """Keeps the blob; its number of bytes. BLOB_MISMATCH where the bytes have another hash."""
        with self._lock:
            self._finish()
        return self._size

    def _finish(self) -> None:
        if self._path is None:
            return
        if self._hash.hexdigest() != self._name:
            raise error(
                errors_pb2.ERROR_REASON_BLOB_MISMATCH,
                f"the {self._size} bytes that came have the SHA-256 {self._hash.hexdigest()}, not {self._name}",
                field="sha256",
            )
        with _room_on_disk():
            os.fsync(self._file.fileno())
            self._file.close()
            self._store.add(self._name, self._path, self._size)
            self._path = None
            sync(self._store.folder)

    def close(self) -> None:
        """Takes back what was not finished."""
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
                    self._store.release(self._size)


@contextlib.contextmanager
def _room_on_disk() -> Iterator[None]:
    """QUOTA_EXCEEDED where the disk takes no more."""
    try:
        yield
    except OSError as cause:
        if cause.errno not in _FULL:
            raise
        raise error(
            errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
            f"the disk that the server keeps blobs on is full ({cause.strerror}); whoever runs the server makes room "
            "there, or starts it with a smaller --max-blob-bytes, so that unused blobs go earlier",
        ) from cause


def check_name(name: str) -> None:
    """MALFORMED_REQUEST for what is no SHA-256 in hex."""
    if _NAME.fullmatch(name) is None:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
            f"{name[:80]!r} is no SHA-256: 64 of 0-9 and a-f",
            field="sha256",
        )


def not_found(names: Iterable[str]) -> GradruleError:
    """BLOB_NOT_FOUND; a resource names each."""
    gone = list(names)
    shown = ", ".join(gone[:_SHOWN]) + (f", and {len(gone) - _SHOWN} more" if len(gone) > _SHOWN else "")
    finding = Finding(
        errors_pb2.ERROR_REASON_BLOB_NOT_FOUND,
        f"the server does not have the blob{'s' if len(gone) > 1 else ''} {shown}; upload what is missing, and send "
        "the request again",
    )
    return GradruleError([finding], resources=[Resource(RESOURCE_TYPE, name) for name in gone])


def _full(who: str, capacity: int, setting: str) -> GradruleError:
    return error(
        errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
        f"{who} at most {capacity} bytes of blobs, and what is there is in use; delete programs, or start the server "
        f"with a larger {setting}",
    )
