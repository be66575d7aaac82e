"""Provides stores of blobs for tests."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from gradrule_server.registry.blob_index import CACHE_SETTING, BlobAmount
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.data_folder import BLOB_CACHE
from gradrule_server.registry.shared_blobs import MAX_TRANSFERS, SharedBlobs, open_shared_blobs
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
) -> BlobStore:
    """Opens the blobs of a server. `data_dir`: holds its cache; `store`: the registry that servers share."""
    shared = open_shared_blobs(url, data_dir, store.database, BlobAmount(capacity, count), tenant_transfers)
    return BlobStore(data_dir / BLOB_CACHE, cache_bytes, bytes_setting=CACHE_SETTING, shared=shared)


def stored_files(store: BlobStore) -> set[str]:
    """Returns the names of the blobs and of unfinished uploads that a store has, of the default tenant."""
    if store.shared is not None:
        return {item.key.split("/")[1] for item in store.shared.objects.iterate("default/")}
    return {path.name for path in store.folder.iterdir()}


def shared_of(store: BlobStore) -> SharedBlobs:
    """Returns the blobs in the object store of a store that has one."""
    assert store.shared is not None
    return store.shared
