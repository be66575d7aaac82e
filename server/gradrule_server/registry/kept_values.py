"""Keeps large values of programs in files, which compile workers and engines map: each content once per tenant.

A file exists as long as a task or a program refers to it. It is no blob: clients cannot name it, it does not count as
one, and nothing of it survives a restart. The caches of programs count its bytes.
"""

from __future__ import annotations

import itertools
import weakref
from io import FileIO
from pathlib import Path
from weakref import WeakValueDictionary

from gradrule_server.registry.blob_index import KEPT
from gradrule_server.registry.blobs import BlobStore

_serial = itertools.count()


class KeptFile:
    """A file of values in the folder of a tenant's blobs, which is removed with this object.

    Args:
        blobs: The tenant's blobs.
        size: Bytes that will be written.

    Raises:
        GradruleError: QUOTA_EXCEEDED, if the disk is full.
    """

    def __init__(self, blobs: BlobStore, size: int) -> None:
        self._blobs = blobs
        self._written = 0
        self.size = size
        """Its bytes."""
        self.name = f"{KEPT}{next(_serial)}"
        """Its name in the folder."""
        blobs.create_folder()
        path = blobs.folder / self.name
        with blobs.disk_full_as_quota():
            # Do not buffer: after an error of a full disk, closing would write the buffer again.
            self._file = path.open("xb", buffering=0)
        weakref.finalize(self, _remove, self._file, path)

    @property
    def is_complete(self) -> bool:
        """Whether all bytes are written."""
        return self._written == self.size

    def write(self, data: bytes) -> None:
        """Appends bytes; blocks. Raises QUOTA_EXCEEDED if the disk is full, `ValueError` for too many bytes."""
        self._written += len(data)
        if self._written > self.size:
            raise ValueError(f"{self._written} bytes were sent for a file of {self.size}")
        with self._blobs.disk_full_as_quota():
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
        if self.is_complete:
            self._file.close()


def _remove(file: FileIO, path: Path) -> None:
    file.close()
    path.unlink(missing_ok=True)


class KeptValues:
    """The complete files of one tenant, by a name that determines their content."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._files: WeakValueDictionary[str, KeptFile] = WeakValueDictionary()

    def find(self, name: str) -> KeptFile | None:
        """Returns the file of a content; None if there is none."""
        return self._files.get(name)

    def create(self, size: int) -> KeptFile:
        """Returns a new, empty file. `size`: bytes that will be written. Raises QUOTA_EXCEEDED."""
        return KeptFile(self._blobs, size)

    def add(self, name: str, file: KeptFile) -> None:
        """Adds a complete file."""
        self._files[name] = file
