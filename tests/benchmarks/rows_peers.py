"""Rows against other services that compute gradients, by their own clients: NumPy in and out."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks.context import MIB, PEERS, PEERS_PYTHON, Against, Bench, measured, rows
from tests.benchmarks.measure import Failed, Line, Row, Skipped
from tests.benchmarks.peers import PeerFailed

IN_FLIGHT = 32
_SIZES = {"umbridge": (MIB,), "tesseract-core": (MIB, 16 * MIB), "pytriton": (MIB, 16 * MIB)}
"""UM-Bridge sends numbers as text: 16 MiB of them take half a minute."""


def peers(bench: Bench) -> list[Line]:
    """The tiny program, one call after the other and 32 at a time, and large vectors; gradrule by its Python client."""
    lines: list[Line] = []
    for peer in PEERS:
        if not PEERS_PYTHON.exists():
            lines.append(
                Skipped("peers", "the same work", peer, "not installed; `make bench` installs it in .venv-bench")
            )
            continue
        try:
            for measured_rows in _against(bench, peer):
                lines += measured_rows
        except PeerFailed as failure:
            kind = Skipped if failure.name == peer else Failed
            lines.append(kind("peers", "the same work", peer, str(failure)))
    return lines


def _against(bench: Bench, peer: str) -> Iterator[list[Row]]:
    counts = bench.counts
    with bench.contenders() as start:
        pair = {kind: start(kind, "tiny") for kind in ("client", peer)}
        found = measured(pair, counts, calls=max(4, counts.tiny_calls // 4))
        yield rows("peers", found, [Against("client", peer, "tiny program, p50, Python client", peer, 1.0)])
        found = measured(pair, counts, calls=max(4, counts.rate_calls // 4), in_flight=IN_FLIGHT)
        what = f"requests per second, {IN_FLIGHT} in flight, Python client"
        yield rows("peers", found, [Against("client", peer, what, peer, 1.0)], rates=True)
    for size in _SIZES[peer]:
        if size > counts.large_bytes:
            continue
        with bench.contenders() as start:
            pair = {kind: start(kind, f"large:{size // 4}") for kind in ("client", peer)}
            found = measured(pair, counts, calls=1 if size > MIB else counts.large_calls, warm_up=1)
        what = f"{size / MIB:g} MiB in, as much gradient out, Python client"
        yield rows("peers", found, [Against("client", peer, what, peer, 1.0)])
