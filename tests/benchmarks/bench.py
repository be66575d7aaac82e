"""`make bench`: gradrule against a bare echo and TensorFlow's own server, all in one run on this machine.

Prints a table, and as its last line one JSON object. Ratios count, not times: contenders take turns in every round, and
a ratio is the median over rounds of gradrule's value by the peer's in the same round. Bars are shown, not enforced.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gradrule as gr
    from tests.benchmarks.measure import Row

IN_FLIGHT = 32


@dataclass(frozen=True)
class Counts:
    """How much is measured; no further round begins after `budget_s` seconds of a group of rows."""

    rounds: int
    tiny_calls: int
    rate_calls: int
    large_calls: int
    large_bytes: int
    inline_calls: int
    inline_nodes: int
    rule_calls: int
    budget_s: float


FULL = Counts(7, 200, 1500, 5, 16 * 2**20, 15, 5000, 60, budget_s=20.0)
QUICK = Counts(3, 60, 400, 2, 16 * 2**20, 5, 5000, 20, budget_s=5.0)


@dataclass(frozen=True)
class Targets:
    """Where the contenders listen."""

    client: gr.Client
    echo_sync: str
    echo_aio: str
    tensorflow: str


def tiny_latency(targets: Targets, counts: Counts) -> list[Row]:
    """A tiny program by name, one call after the other."""
    from tests.benchmarks import work
    from tests.benchmarks.contenders import TensorFlowSession, Wire
    from tests.benchmarks.measure import Row, latencies

    tiny = work.tiny()
    program = tiny.compile(targets.client)
    request = tiny.named_request(program)
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(Wire.gradrule(targets.client.target))
        sync = stack.enter_context(Wire.echo(targets.echo_sync))
        aio = stack.enter_context(Wire.echo(targets.echo_aio))
        session = stack.enter_context(contextlib.closing(TensorFlowSession(targets.tensorflow, tiny)))
        found = latencies(
            {
                "wire": ours.call(request),
                "client": lambda: program.evaluate(tiny.feeds),
                "sync": sync.call(request),
                "aio": aio.call(request),
                "tensorflow": session.call,
            },
            rounds=counts.rounds,
            calls=counts.tiny_calls,
            warm_up=max(counts.tiny_calls // 4, 5),
            budget_s=counts.budget_s,
        )
    what = "tiny program by name, p50"
    return [
        Row(f"{what}, raw bytes", "bare echo (sync server)", "µs", found["wire"], found["sync"], 1.6),
        Row(f"{what}, raw bytes", "bare echo (aio server)", "µs", found["wire"], found["aio"], 1.6),
        Row(f"{what}, Python client", 'Session("grpc://…")', "µs", found["client"], found["tensorflow"], 0.9),
    ]


def tiny_rate(targets: Targets, counts: Counts) -> list[Row]:
    """The same with 32 requests in flight."""
    from tests.benchmarks import work
    from tests.benchmarks.contenders import EVALUATE, TensorFlowSession, WireInFlight, client_many
    from tests.benchmarks.echo_server import METHOD as ECHO
    from tests.benchmarks.measure import Row, rates

    tiny = work.tiny()
    program = tiny.compile(targets.client)
    request = tiny.named_request(program)
    with contextlib.ExitStack() as stack:
        loop = stack.enter_context(contextlib.closing(asyncio.new_event_loop()))

        def wire(target: str, method: str) -> WireInFlight:
            return stack.enter_context(contextlib.closing(WireInFlight(target, method, IN_FLIGHT, loop)))

        session = stack.enter_context(contextlib.closing(TensorFlowSession(targets.tensorflow, tiny)))
        found = rates(
            {
                "wire": wire(targets.client.target, EVALUATE).many(request),
                "client": client_many(program, tiny, IN_FLIGHT),
                "sync": wire(targets.echo_sync, ECHO).many(request),
                "aio": wire(targets.echo_aio, ECHO).many(request),
                "tensorflow": session.many(IN_FLIGHT),
            },
            rounds=counts.rounds,
            calls=counts.rate_calls,
            budget_s=counts.budget_s,
        )
    what = f"requests per second, {IN_FLIGHT} in flight"
    return [
        Row(f"{what}, raw bytes", "bare echo (sync server)", "1/s", found["wire"], found["sync"], 0.6, True),
        Row(f"{what}, raw bytes", "bare echo (aio server)", "1/s", found["wire"], found["aio"], 0.6, True),
        Row(f"{what}, Python client", 'Session("grpc://…")', "1/s", found["client"], found["tensorflow"], 1.0, True),
    ]


def large_latency(targets: Targets, counts: Counts) -> list[Row]:
    """16 MiB in, 16 MiB of gradient out."""
    from tests.benchmarks import work
    from tests.benchmarks.contenders import TensorFlowSession, Wire
    from tests.benchmarks.measure import Row, latencies

    large = work.large(counts.large_bytes // 4)
    program = large.compile(targets.client)
    request = large.named_request(program)
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(Wire.gradrule(targets.client.target))
        sync = stack.enter_context(Wire.echo(targets.echo_sync))
        aio = stack.enter_context(Wire.echo(targets.echo_aio))
        session = stack.enter_context(contextlib.closing(TensorFlowSession(targets.tensorflow, large)))
        found = latencies(
            {
                "wire": ours.call(request),
                "client": lambda: program.evaluate(large.feeds),
                "sync": sync.call(request),
                "aio": aio.call(request),
                "tensorflow": session.call,
            },
            rounds=counts.rounds,
            calls=counts.large_calls,
            warm_up=2,
            budget_s=counts.budget_s,
        )
    what = f"{counts.large_bytes / 2**20:g} MiB in, as much gradient out"
    return [
        Row(f"{what}, raw bytes", "bare echo (sync server)", "µs", found["wire"], found["sync"], 1.2),
        Row(f"{what}, raw bytes", "bare echo (aio server)", "µs", found["wire"], found["aio"], 1.2),
        Row(f"{what}, Python client", 'Session("grpc://…")', "µs", found["client"], found["tensorflow"], 1.0),
    ]


def inline_latency(targets: Targets, counts: Counts) -> list[Row]:
    """A large graph in the request, sent before, against the same program by name."""
    from tests.benchmarks import work
    from tests.benchmarks.contenders import Wire
    from tests.benchmarks.measure import Row, latencies

    rows = []
    for on_path, which in ((True, "all run"), (False, "a handful run")):
        chain = work.chain(counts.inline_nodes, on_path=on_path)
        program = chain.compile(targets.client)
        with Wire.gradrule(targets.client.target) as wire:
            found = latencies(
                {
                    "inline": wire.call(chain.inline_request()),
                    "named": wire.call(chain.named_request(program)),
                    "client inline": functools.partial(chain.evaluate, targets.client),
                    "client named": functools.partial(program.evaluate, chain.feeds),
                },
                rounds=counts.rounds,
                calls=counts.inline_calls,
                warm_up=2,
                budget_s=counts.budget_s,
            )
        what = f"second inline Evaluate, {counts.inline_nodes:,} nodes, {which}"
        rows += [
            Row(f"{what}, raw bytes", "by program name", "µs", found["inline"], found["named"], 1.5),
            Row(f"{what}, Python client", "by program name", "µs", found["client inline"], found["client named"], 1.5),
        ]
    return rows


def measure(counts: Counts, device: str = "cpu") -> list[Row]:
    """Starts everything, measures all rows, and ends what it started. `device` is that of `gradrule serve`."""
    import gradrule as gr
    from tests.benchmarks.peers import running
    from tests.benchmarks.rule_cost import rule_cost
    from tests.benchmarks.supervision import supervision

    rows: list[Row] = []
    with (
        gr.local(device=device) as client,
        running("echo_server.py", "sync") as echo_sync,
        running("echo_server.py", "aio") as echo_aio,
        running("tf_server.py", gpu=device != "cpu") as tensorflow,
    ):
        targets = Targets(client, echo_sync, echo_aio, tensorflow)
        for part in (tiny_latency, tiny_rate, large_latency, inline_latency):
            rows += part(targets, counts)
    rows += supervision(rounds=counts.rounds, calls=counts.tiny_calls, budget_s=counts.budget_s)
    # The others have ended: this one runs in this process, and alone.
    rows += rule_cost(rounds=counts.rounds, calls=counts.rule_calls, budget_s=counts.budget_s)
    return rows


def show(rows: Sequence[Row]) -> None:
    """The table."""
    from gradrule.cli import output

    lines = []
    for row in rows:
        bar = "" if row.bar is None else f"{'≥' if row.more_is_better else '≤'} {row.bar:g}"
        verdict = {True: "met", False: "missed", None: ""}[row.met]
        spread = f"{row.ratio:.2f} ({min(row.ratios):.2f}-{max(row.ratios):.2f})"
        ours, theirs = f"{row.ours.median:,.0f} {row.unit}", f"{row.theirs.median:,.0f} {row.unit}"
        lines.append([row.work, ours, row.peer, theirs, spread, bar, verdict])
    output.table(output.console(), "bench", ("work", "gradrule", "peer", "peer's", "ratio (rounds)", "bar", ""), lines)


def summary(rows: Sequence[Row], seconds: float) -> dict[str, Any]:
    """What the last line holds."""
    return {
        "rows": [row.as_json() for row in rows],
        "bars_met": sum(row.met is True for row in rows),
        "bars_missed": sum(row.met is False for row in rows),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "seconds": round(seconds, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and calls: rougher figures, sooner")
    parser.add_argument("--device", default="cpu", help="cpu or gpu:N, as for `gradrule serve` [default: cpu]")
    options = parser.parse_args(arguments)
    from gradrule.cli import output

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    started = time.perf_counter()
    rows = measure(QUICK if options.quick else FULL, options.device)
    show(rows)
    output.print_json(summary(rows, time.perf_counter() - started))
    return 0


if __name__ == "__main__":
    # Run by path: the repository's root is where `tests.benchmarks` is found.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
