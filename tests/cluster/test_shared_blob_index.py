"""Tests shared blobs with a registry in PostgreSQL: the tests of the store of blobs, and races between servers."""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.database import open_database
from gradrule_server.registry.programs import NeededBlobs, ProgramRegistry
from gradrule_server.registry.store import Store
from tests.stores import OpenStore, folder_url, open_blobs, shared_of
from tests.unit.registry.test_blobs import (  # noqa: F401
    PAGE,
    name_of,
    put,
    test_unfinished_upload_leaves_nothing,
    test_uploaded_blob_is_present,
)
from tests.unit.registry.test_shared_blobs import create

SERVERS = 3


class Server:
    """The registry and blobs of one server, with connections of its own."""

    def __init__(self, database_url: str, data_dir: Path, url: str, capacity: int) -> None:
        self.store = Store(open_database(database_url, data_dir))
        self.blobs: BlobStore = open_blobs(self.store, data_dir, url, capacity)
        self.programs = ProgramRegistry(self.store, self.blobs)


@pytest.fixture
def servers(tmp_path: Path, database_url: str) -> Iterator[list[Server]]:
    """Returns servers that share a registry and room for eight blobs."""
    url = folder_url(tmp_path)
    with ExitStack() as stack:
        opened = [Server(database_url, tmp_path / f"server{number}", url, 8 * PAGE) for number in range(SERVERS)]
        for server in opened:
            stack.callback(server.store.close)
        yield opened


@pytest.fixture
def open_store(tmp_path: Path, database_url: str) -> Iterator[OpenStore]:
    """Returns a function that opens a store that is counted in PostgreSQL; each call is one start of a server."""
    url, data_dir = folder_url(tmp_path), tmp_path / "data"
    store = Store(open_database(database_url, data_dir))
    yield lambda capacity, count=sys.maxsize: open_blobs(store, data_dir, url, capacity, count)
    store.close()


def test_no_program_loses_its_blob_and_no_limit_is_exceeded_in_races(servers: list[Server], tmp_path: Path) -> None:
    ids, stop = itertools.count(), threading.Event()
    most = 0

    def run(seed: int) -> None:
        rng, server = random.Random(seed), servers[seed % SERVERS]
        own: list[str] = []
        for _ in range(25):
            data = bytes([rng.randrange(20)]) * PAGE
            try:
                put(server.blobs, data)
                program_id = f"p{next(ids)}"
                create(server.programs, program_id, name_of(data))
                own.append(program_id)
            except GradruleError as cause:
                # All room is taken, also by uploads that are running.
                assert cause.reason == errors_pb2.ERROR_REASON_QUOTA_EXCEEDED, cause
            if len(own) > 1:
                server.programs.delete(own.pop(rng.randrange(len(own))))

    def watch() -> None:
        nonlocal most
        while not stop.is_set():
            most = max(most, len(list(shared_of(servers[0].blobs).objects.iterate())))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with ThreadPoolExecutor(2 * SERVERS) as threads:
            for done in [threads.submit(run, seed) for seed in range(2 * SERVERS)]:
                done.result(120)
    finally:
        stop.set()
        watching.join()
    assert 0 < most <= 8
    needed = NeededBlobs(servers[1].store)()
    found = {item.key.rpartition("/")[2] for item in shared_of(servers[0].blobs).objects.iterate()}
    assert needed
    assert {name for _, name in needed} <= found
    for name in found:
        assert name_of((tmp_path / "objects" / "default" / name).read_bytes()) == name


def test_all_servers_may_start_at_once(tmp_path: Path, database_url: str) -> None:
    url = folder_url(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        started = [threads.submit(Server, database_url, tmp_path / f"server{number}", url, PAGE) for number in range(4)]
        opened = [item.result(60) for item in started]
    name = put(opened[0].blobs, b"1")
    assert opened[3].blobs.missing([name]) == []
    for server in opened:
        server.store.close()
