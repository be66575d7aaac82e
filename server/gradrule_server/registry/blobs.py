"""Bytes by their SHA-256, one file each: bounded, the least recently used ones go, those that are held stay.

A file's time of change is that of its last use, so that a restart knows the order.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

from gradrule.v1 import errors_pb2
from gradrule_server.errors import Finding, GradruleError, Resource, error

RESOURCE_TYPE = "gradrule.v1.Blob"

_NAME = re.compile(r"[0-9a-f]{64}")
_UPLOADING = ".upload-"
_SHOWN = 5


class BlobStore:
    """The blobs in `folder`, which is made where missing. Blocking; safe to use from several threads."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder = folder
        self._capacity = capacity
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._holders: dict[str, int] = {}
        self._bytes = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = []
        for path in folder.iterdir():
            if path.name.startswith(_UPLOADING):
                path.unlink()
            elif _NAME.fullmatch(path.name):
                stat = path.stat()
                found.append((stat.st_mtime_ns, path.name, stat.st_size))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self._bytes += size

    @property
    def held_bytes(self) -> int:
        """Bytes of all blobs, uploads under way included."""
        return self._bytes

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of the blobs that are not there, each once; the others count as used. MALFORMED_REQUEST for no hash."""
        wanted = dict.fromkeys(names)
        for name in wanted:
            check_name(name)
        with self._lock:
            for name in wanted:
                self._use(name)
            return [name for name in wanted if name not in self._sizes]

    def size(self, name: str) -> int:
        """Number of bytes; BLOB_NOT_FOUND."""
        check_name(name)
        with self._lock:
            size = self._sizes.get(name)
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
        with self._lock:
            gone = [name for name in wanted if name not in self._sizes]
            if gone:
                raise not_found(gone)
            for name in wanted:
                self._use(name)
                self._holders[name] = self._holders.get(name, 0) + 1

    def let_go(self, names: Iterable[str]) -> None:
        """The other half of `hold`."""
        with self._lock:
            for name in dict.fromkeys(names):
                self._holders[name] -= 1
                if not self._holders[name]:
                    del self._holders[name]

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
        return Upload(self, name)

    def reserve(self, size: int) -> None:
        """Makes room for bytes that are about to come; QUOTA_EXCEEDED where all that is there is held."""
        with self._lock:
            for name in list(self._sizes):
                if self._bytes + size <= self._capacity:
                    break
                if name not in self._holders:
                    self._remove(name)
            if self._bytes + size > self._capacity:
                raise error(
                    errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
                    f"the server keeps at most {self._capacity} bytes of blobs, and what is there is in use; delete "
                    "programs, or start the server with a larger --max-blob-bytes",
                )
            self._bytes += size

    def release(self, size: int) -> None:
        """Bytes that were reserved did not come."""
        with self._lock:
            self._bytes -= size

    def add(self, name: str, file: Path, size: int) -> None:
        """Takes over a complete file, whose bytes were reserved."""
        with self._lock:
            if name in self._sizes:
                self._bytes -= size
                self._use(name)
                file.unlink()
                return
            file.rename(self.folder / name)
            self._sizes[name] = size

    def _use(self, name: str) -> None:
        if name in self._sizes:
            self._sizes.move_to_end(name)
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.folder / name)

    def _remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)
        self._bytes -= self._sizes.pop(name)


class Upload:
    """A blob on its way in; `close` before `finish` leaves nothing behind. Safe to use from several threads."""

    def __init__(self, store: BlobStore, name: str) -> None:
        self._store = store
        self._name = name
        self._lock = threading.Lock()
        self._hash = hashlib.sha256()
        self._size = 0
        handle, path = tempfile.mkstemp(prefix=_UPLOADING, dir=store.folder)
        self._path: Path | None = Path(path)
        self._file = os.fdopen(handle, "wb")

    def write(self, data: bytes) -> None:
        """The next bytes; QUOTA_EXCEEDED. After `close` they go nowhere."""
        with self._lock:
            if self._path is None:
                return
            self._store.reserve(len(data))
            self._size += len(data)
            self._hash.update(data)
            self._file.write(data)

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
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._store.add(self._name, self._path, self._size)
        self._path = None

    def close(self) -> None:
        """Takes back what was not finished."""
        with self._lock:
            if self._path is not None:
                self._file.close()
                self._path.unlink(missing_ok=True)
                self._path = None
                self._store.release(self._size)


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
