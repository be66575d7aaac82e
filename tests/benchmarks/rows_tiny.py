"""Rows of tiny and large calls of a program by its name."""

from __future__ import annotations

from dataclasses import replace

from tests.benchmarks.context import MIB, Against, Bench, cpu_rows, measured, rows
from tests.benchmarks.measure import Row

IN_FLIGHT = 32
_SYNC, _AIO, _SESSION = "bare unary echo (sync server)", "bare unary echo (aio server)", 'Session("grpc://…")'


def tiny(bench: Bench) -> list[Row]:
    """A tiny program, one call after the other."""
    with bench.contenders() as start:
        kinds = ("stream", "wire", "client", "echo sync", "echo aio", "session")
        found = measured({kind: start(kind, "tiny") for kind in kinds}, bench.counts, calls=bench.counts.tiny_calls)
    timed = rows(
        "tiny",
        found,
        [
            Against("stream", "echo sync", "tiny program over a persistent stream, p50, raw bytes", _SYNC, 1.0),
            Against("stream", "echo aio", "tiny program over a persistent stream, p50, raw bytes", _AIO, 1.0),
            Against("wire", "echo sync", "tiny program, unary Evaluate, p50, raw bytes", _SYNC, 1.6),
            Against("wire", "echo aio", "tiny program, unary Evaluate, p50, raw bytes", _AIO, 1.6),
            Against("client", "echo sync", "tiny program, p50, Python client", _SYNC, 1.6),
            Against("client", "session", "tiny program, p50, Python client", _SESSION, 0.9),
        ],
    )
    what = "processor time of a tiny call, client + front end + engine"
    return timed + cpu_rows(
        "tiny",
        found,
        [
            Against("wire", "echo sync", f"{what}, raw bytes", _SYNC, 3.0),
            Against("wire", "echo aio", f"{what}, raw bytes", _AIO, 3.0),
            Against("client", "echo sync", f"{what}, Python client", _SYNC, 3.0),
            Against("client", "echo aio", f"{what}, Python client", _AIO, 3.0),
        ],
    )


def rate(bench: Bench) -> list[Row]:
    """The same with 32 requests under way."""
    with bench.contenders() as start:
        kinds = ("wire", "stream", "client", "echo sync", "echo aio", "session")
        found = measured(
            {kind: start(kind, "tiny") for kind in kinds},
            bench.counts,
            calls=bench.counts.rate_calls,
            in_flight=IN_FLIGHT,
        )
    what = f"requests per second, {IN_FLIGHT} in flight"
    return rows(
        "rate",
        found,
        [
            Against("wire", "echo sync", f"{what}, raw bytes", _SYNC, 0.6),
            Against("wire", "echo aio", f"{what}, raw bytes", _AIO, 0.6),
            Against("stream", "echo sync", f"{what}, raw bytes over a stream", _SYNC, 0.6),
            Against("client", "echo sync", f"{what}, Python client", _SYNC),
            Against("client", "session", f"{what}, Python client", _SESSION, 1.0),
        ],
        rates=True,
    )


def large(bench: Bench) -> list[Row]:
    """16 MiB in, 16 MiB of gradient out."""
    return _large(bench, "large", bench.counts.large_bytes, bench.counts.large_calls)


def huge(bench: Bench) -> list[Row]:
    """100 MiB in, 100 MiB of gradient out."""
    return _large(bench, "huge", bench.counts.huge_bytes, max(1, bench.counts.large_calls // 5))


def _large(bench: Bench, group: str, size: int, calls: int) -> list[Row]:
    kinds = ("wire", "client", "echo sync", "echo aio", "session")
    with bench.contenders() as start:
        contenders = {kind: start(kind, f"large:{size // 4}") for kind in kinds}
        found = measured(contenders, bench.counts, calls=calls, warm_up=2)
    what = f"{size / MIB:g} MiB in, as much gradient out"
    timed = rows(
        group,
        found,
        [
            Against("wire", "echo sync", f"{what}, raw bytes", _SYNC, 1.2),
            Against("wire", "echo aio", f"{what}, raw bytes", _AIO, 1.2),
            Against("client", "echo sync", f"{what}, Python client", _SYNC, 1.2),
            Against("client", "session", f"{what}, Python client", _SESSION, 0.9),
        ],
    )
    what = f"processor time of {size / MIB:g} MiB in and out"
    return timed + cpu_rows(
        group,
        found,
        [
            Against("wire", "echo sync", f"{what}, raw bytes", _SYNC, 1.5),
            Against("wire", "echo aio", f"{what}, raw bytes", _AIO, 1.5),
            Against("client", "echo sync", f"{what}, Python client", _SYNC, 1.5),
        ],
    )


def shared_memory(bench: Bench) -> list[Row]:
    """16 MiB and 100 MiB from a client on the same host, which shares memory with the server."""
    counts = bench.counts
    return [
        *_shared_memory(bench, counts.large_bytes, counts.large_calls),
        *_shared_memory(bench, counts.huge_bytes, counts.large_calls),
    ]


def _shared_memory(bench: Bench, size: int, calls: int) -> list[Row]:
    with bench.contenders() as start:
        contenders = {kind: start(kind, f"large:{size // 4}") for kind in ("client shared", "echo sync", "echo aio")}
        # The first call asks for memory, and the second one touches it for the first time.
        found = measured(contenders, bench.counts, calls=calls, warm_up=3)
    what = f"{size / MIB:g} MiB each way through shared memory, Python client"
    against = [
        Against("client shared", "echo sync", what, _SYNC, 0.3),
        Against("client shared", "echo aio", what, _AIO, 0.3),
    ]
    cpu = [replace(item, work=f"processor time of {item.work}") for item in against]
    return rows("shared-memory", found, against) + cpu_rows("shared-memory", found, cpu)
