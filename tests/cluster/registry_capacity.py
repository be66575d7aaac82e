"""Measures what PostgreSQL carries as a registry: `python -m tests.cluster.registry_capacity`.

Prints the table of docs/guide/scaling-out.md. Eight registries in this process stand for eight servers. The database
syncs each change to the disk.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from gradrule_server.registry.postgres_database import PostgresDatabase
from gradrule_server.registry.store import ProgramContent, ProgramRow, RuleRow, Store
from tests.cluster.postgres import running_postgres

SERVERS = 8
SECONDS = 5.0
GRAPH_BYTES = 16_384
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def processor_s(parent: int) -> float:
    """Returns the processor time of a process and its children that have not ended, in seconds."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent in (int(stat.parent.name), int(fields[1])):
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS_PER_S


def measure(stores: list[Store], postgres: int, work: Callable[[Store, int], object]) -> tuple[float, float, float]:
    """Calls `work` with each store in a thread of its own, again and again.

    Returns:
        Calls per second; milliseconds of one call; milliseconds of the database's processor time per call.
    """
    numbers = count()
    done = [0] * len(stores)
    ends_at = time.monotonic() + SECONDS

    def run(index: int) -> None:
        while time.monotonic() < ends_at:
            work(stores[index], next(numbers))
            done[index] += 1

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(stores))]
    started, before = time.monotonic(), processor_s(postgres)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    duration, calls = time.monotonic() - started, sum(done)
    used = processor_s(postgres) - before
    return calls / duration, len(stores) * duration / calls * 1000, used / calls * 1000


def add_rule(store: Store, number: int) -> None:
    """Stores one rule, as `create_rule` does."""
    store.add_rule(RuleRow(f"rule{number}", b"\x0a\x02dy", "", number))


def add_program(store: Store, number: int) -> None:
    """Stores one program with a graph of its own, as `compile` does."""
    identity = hashlib.sha256(str(number).encode()).hexdigest()
    graph = (identity.encode() * (GRAPH_BYTES // len(identity)))[:GRAPH_BYTES]
    row = ProgramRow(f"p{number}", identity, b"", number)
    store.add_program(row, ProgramContent(b"", graph, b""))


def read_program(store: Store, number: int) -> None:
    """Reads one program with its graph, as the first use on a server does."""
    program_id = f"p{number % 32}"
    row = store.program(program_id)
    if row is None or store.program_content(program_id, row.identity) is None:
        sys.exit(f"{program_id} is gone")


def rows() -> Iterator[str]:
    """Yields the lines of the table."""
    yield "| what | calls per second | one call | processor time of the database | one core carries per second |"
    yield "|---|---|---|---|---|"
    with running_postgres(fsync="on", full_page_writes="on") as postgres:
        url = postgres.create_database()
        stores = [Store(PostgresDatabase(url)) for _ in range(SERVERS)]
        works: dict[str, Callable[[Store, int], object]] = {
            "look for changes of other servers": lambda store, _: store.usage(["default"]),
            "store a rule": add_rule,
            f"store a program with a graph of {GRAPH_BYTES // 1024} KiB": add_program,
            "read such a program": read_program,
        }
        try:
            for title, work in works.items():
                rate, call_ms, database_ms = measure(stores, postgres.pid, work)
                yield f"| {title} | {rate:.0f} | {call_ms:.1f} ms | {database_ms:.2f} ms | {1000 / database_ms:.0f} |"
        finally:
            for store in stores:
                store.close()


if __name__ == "__main__":
    for line in rows():
        print(line, flush=True)
