"""Provides stores of blobs for tests."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from gradrule_server.registry.blob_index import BlobAmount
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.shared_blobs import MAX_TRANSFERS, SharedBlobStore, open_shared_blobs
from gradrule_server.registry.store import Store

CACHE_BYTES = 1 << 24


def no_blobs() -> BlobStore:
    """Returns a blob store with a capacity of 0 bytes."""
    return BlobStore(Path(tempfile.mkdtemp()), 0)


class OpenStore(Protocol):
    """Opens a store of blobs, as each start of a server does."""

    def __call__(self, capacity: int, count: int = ...) -> BlobStore: ...


def folder_url(path: Path) -> str:
    """Returns the URL of a new shared folder."""
    folder = path / "objects"
    folder.mkdir()
    return folder.as_uri()


@contextlib.contextmanager
def shared_stores(path: Path, url: str) -> Iterator[OpenStore]:
    """Provides a function that opens the blobs of one registry in an object store; all calls share the cache."""
    store = Store(path / "data")
    try:
        yield lambda capacity, count=sys.maxsize: open_blobs(store, path / "data", url, capacity, count)
    finally:
        store.close()


def open_blobs(
    store: Store,
    data_dir: Path,
    url: str,
    capacity: int = 1 << 30,
    count: int = sys.maxsize,
    *,
    cache_bytes: int = CACHE_BYTES,
    tenant_transfers: int = MAX_TRANSFERS,
) -> SharedBlobStore:
    """Opens the blobs of a server. `data_dir`: holds its cache; `store`: the registry that servers share."""
    limit = BlobAmount(capacity, count)
    return open_shared_blobs(url, data_dir, cache_bytes, store.database, limit, tenant_transfers=tenant_transfers)


def stored_files(store: BlobStore) -> set[str]:
    """Returns the names of the blobs and of unfinished uploads that a store has, of the default tenant."""
    if isinstance(store, SharedBlobStore):
        return {item.key.split("/")[1] for item in store.objects.iterate("default/")}
    return {path.name for path in store.folder.iterdir()}
