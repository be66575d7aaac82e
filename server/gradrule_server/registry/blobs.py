"""Bytes by their SHA-256, one file each: bounded, the least recently used ones go, those that are held stay.

Each tenant has blobs of its own, in a folder of its own; the first tenant's lie in the common folder itself. A file's
time of access is that of its last use, so that a restart knows the order. Its hash is checked when it is first used
after a start, and again where the file was written since: a file with a wrong one is set aside, and asked for anew.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from gradrule.v1 import errors_pb2
from gradrule_server.errors import error
from gradrule_server.policy import check_blob_name, missing_blobs
from gradrule_server.registry.blob_index import (
    UPLOADING,
    Amount,
    BlobFile,
    BlobIndex,
    Stamp,
    stamp_of,
    taken_on_disk,
)
from gradrule_server.registry.files import FULL
from gradrule_server.registry.migrations import sync
from gradrule_server.registry.store import DEFAULT_TENANT

_log = logging.getLogger(__name__)

DAMAGED = ".damaged-"
"""How names of files begin whose bytes are not what their names say."""

# What file systems give to a file at least, and by what it grows, as far as is known before it is written.
_BLOCK = 4096
# The order of uses need not be known to the second after a restart.
_NOTE_EVERY_NS = 60 * 10**9


def folder_name(tenant: str) -> str:
    """The folder of a tenant's blobs within the common one; empty: the common one."""
    # Tenants' names come from tokens and certificates, and may hold what no file's name may.
    return "" if tenant == DEFAULT_TENANT else f"tenant-{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"


class BlobStore:
    """The first tenant's blobs, and by `of` those of others, all below `folder`, which is made where missing.

    Blocking; safe to use from several threads. `capacity`: bytes that all may take on the disk; `count`: how many.
    """

    def __init__(self, folder: Path, capacity: int, count: int = sys.maxsize) -> None:
        self._index = BlobIndex(folder, Amount(capacity, count))
        self._own = self._index.own("")
        self._folder = folder
        self.folder_name = ""
        """Name of the tenant's folder within the common one, by which an engine finds it; empty: the common one."""

    def of(self, tenant: str, capacity: int | None = None, count: int = sys.maxsize) -> BlobStore:
        """A tenant's blobs. `capacity`, `count`: what the tenant may have; all that the server keeps, unless given."""
        view = copy.copy(self)
        view.folder_name = folder_name(tenant)
        view._folder = self._index.folder / view.folder_name
        with self._index.lock:
            view._own = self._index.own(view.folder_name)
            if capacity is not None:
                view._own.most = Amount(capacity, count)
        return view

    def forget(self) -> None:
        """Forgets the tenant's limits; its blobs stay."""
        with self._index.lock:
            own = self._own
            own.most = None
            if not (own.files or own.used.count or own.holders):
                self._index.tenants.pop(self.folder_name, None)

    @property
    def root(self) -> Path:
        """The common folder."""
        return self._index.folder

    @property
    def folder(self) -> Path:
        """The tenant's folder; it may not be there yet."""
        return self._folder

    @property
    def held_bytes(self) -> int:
        """Bytes that all blobs of the tenant take on the disk, uploads under way included."""
        return self._own.used.size

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of the blobs that are not there, each once; the others count as used. MALFORMED_REQUEST for no hash.

        A blob that was not used since the start is there if its file is; it is checked when it is used.
        """
        wanted = _checked(names)
        return [name for name in wanted if not self._is_there(name)]

    def size(self, name: str) -> int:
        """Number of bytes; BLOB_NOT_FOUND."""
        check_blob_name(name)
        with self._index.lock:
            file = self._own.files.get(name)
        if file is None:
            raise missing_blobs([name])
        return file.length

    def read(self, name: str) -> bytes:
        """The bytes; BLOB_NOT_FOUND."""
        with self.held([name]):
            return (self.folder / name).read_bytes()

    def are_verified(self, names: Iterable[str]) -> bool:
        """Whether holding the blobs takes no reading of them: all are there, and unchanged since they were checked."""
        return all(
            (file := self._own.files.get(name)) is not None
            and file.verified is not None
            and file.verified == _stamp(f"{self.folder}/{name}")
            for name in names
        )

    def verify(self, names: Iterable[str]) -> None:
        """Reads those of the blobs that were not checked yet; BLOB_NOT_FOUND."""
        with self.held(names):
            pass

    def keep(self, names: Iterable[str]) -> None:
        """Keeps blobs from going until they are let go as often, whether they are there or come later."""
        with self._index.lock:
            for name in dict.fromkeys(names):
                self._own.holders[name] = self._own.holders.get(name, 0) + 1

    def hold(self, names: Iterable[str]) -> None:
        """Keeps blobs from going until they are let go as often; BLOB_NOT_FOUND, then holding none.

        Reads those that were not checked yet; see `are_verified`.
        """
        wanted = _checked(names)
        self.keep(wanted)
        try:
            gone = [name for name in wanted if not self._is_there(name, is_used=True)]
            if gone:
                raise missing_blobs(gone)
        except BaseException:
            self.let_go(wanted)
            raise

    def let_go(self, names: Iterable[str]) -> None:
        """The other half of `hold` and `keep`."""
        own = self._own
        with self._index.lock:
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
        check_blob_name(name)
        with _room_on_disk(), contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
            sync(self.root)
        return Upload(self, name)

    def reserve(self, size: int, count: int = 0) -> None:
        """Makes room for what is about to come; QUOTA_EXCEEDED where all that is there is held."""
        with self._index.lock:
            self._index.reserve(self.folder_name, size, count)

    def release(self, size: int, count: int) -> None:
        """Counts out what was reserved and did not come."""
        with self._index.lock:
            self._index.adjust(self.folder_name, -size, -count)

    def add(self, name: str, file: Path, reserved: int) -> int:
        """Takes over a complete file whose hash is right, and for which room was reserved; its number of bytes."""
        path = self.folder / name
        with self._index.lock:
            # The file that is there may be damaged without anybody having noticed yet.
            file.rename(path)
            stat = path.stat()
            if name in self._own.files:
                self._index.forget(self.folder_name, name)
            self._own.files[name] = BlobFile(stat.st_size, taken_on_disk(stat), stamp_of(stat))
            self._index.adjust(self.folder_name, taken_on_disk(stat) - reserved, 0)
        return stat.st_size

    def _is_there(self, name: str, *, is_used: bool = False) -> bool:
        """Whether a blob's file is there and, where it `is_used` or was before, has the bytes that its name says."""
        with self._index.lock:
            file = self._own.files.get(name)
        if file is None:
            return False
        path = f"{self.folder}/{name}"
        try:
            stat = os.stat(path)
            now_ns = time.time_ns()
            if now_ns - file.noted_ns > _NOTE_EVERY_NS:
                os.utime(path, ns=(now_ns, stat.st_mtime_ns))
                file.noted_ns = now_ns
            stamp = stamp_of(stat)
            if (is_used or file.verified is not None) and file.verified != stamp:
                if _hash(path) != name:
                    self._set_aside(name, file)
                    return False
                file.verified = stamp
        except FileNotFoundError:
            self._forget(name, file)
            return False
        with self._index.lock:
            if name in self._own.files:
                self._own.files.move_to_end(name)
        return True

    def _set_aside(self, name: str, file: BlobFile) -> None:
        path = self.folder / name
        aside = path.with_name(DAMAGED + name)
        path.rename(aside)
        self._forget(name, file)
        _log.warning("the blob %s is not what was stored; it is kept as %s and asked for anew when needed", path, aside)

    def _forget(self, name: str, file: BlobFile) -> None:
        with self._index.lock:
            # Another may have come meanwhile.
            if self._own.files.get(name) is file:
                self._index.forget(self.folder_name, name)


class Upload:
    """A blob on its way in; `close` before `finish` leaves nothing behind. Safe to use from several threads.

    QUOTA_EXCEEDED where the disk is full, or there are too many blobs.
    """

    def __init__(self, store: BlobStore, name: str) -> None:
        self._store = store
        self._name = name
        self._lock = threading.Lock()
        self._hash = hashlib.sha256()
        self._size = 0
        self._reserved = 0
        store.reserve(0, 1)
        try:
            with _room_on_disk():
                handle, path = tempfile.mkstemp(prefix=UPLOADING, dir=store.folder)
        except BaseException:
            store.release(0, 1)
            raise
        self._path: Path | None = Path(path)
        # Not buffered: what a full disk did not take would be written again by `close`.
        self._file = os.fdopen(handle, "wb", buffering=0)

    def write(self, data: bytes) -> None:
        """The next bytes; QUOTA_EXCEEDED. After `close` they go nowhere."""
        with self._lock:
            if self._path is None:
                return
            wanted = -(-(self._size + len(data)) // _BLOCK) * _BLOCK
            self._store.reserve(wanted - self._reserved)
            self._reserved = wanted
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
            self._store.add(self._name, self._path, self._reserved)
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
                    self._store.release(self._reserved, 1)


@contextlib.contextmanager
def _room_on_disk() -> Iterator[None]:
    """QUOTA_EXCEEDED where the disk takes no more."""
    try:
        yield
    except OSError as cause:
        if cause.errno not in FULL:
            raise
        raise error(
            errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
            f"the disk that the server keeps blobs on is full ({cause.strerror}); whoever runs the server makes room "
            "there, or starts it with a smaller --max-blob-bytes, so that unused blobs go earlier",
        ) from cause


def _stamp(path: str) -> Stamp | None:
    try:
        return stamp_of(os.stat(path))
    except FileNotFoundError:
        return None


def _hash(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checked(names: Iterable[str]) -> list[str]:
    """The names, each once; MALFORMED_REQUEST for what is no hash."""
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        check_blob_name(name)
    return wanted
