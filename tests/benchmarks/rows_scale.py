"""Rows of a server that holds much: a call costs as much as on an empty server."""

from __future__ import annotations

import contextlib

import grpc

import gradrule as gr
from tests.benchmarks import work
from tests.benchmarks.attacks import make_tokens
from tests.benchmarks.contenders import EVALUATE, TIMEOUT_S, request_of
from tests.benchmarks.context import Against, Bench, cpu_rows, measured
from tests.benchmarks.measure import Row
from tests.service.servers import RunningServer

_BAR = 1.1
_LIMITS = (
    *("--max-rules", "20000", "--tenant-rules", "20000"),
    *("--max-programs", "2000", "--tenant-programs", "2000", "--max-connections", "4000"),
)


def scale(bench: Bench) -> list[Row]:
    """A tiny call of a server with many rules, programs, connections and tenants, against one of an empty server."""
    rules, programs, connections = (10_000, 1000, 1000) if bench.is_full else (1000, 50, 200)
    found: list[Row] = []
    with contextlib.ExitStack() as stack:
        empty, full = (stack.enter_context(bench.own_server(*_LIMITS)) for _ in range(2))
        start = stack.enter_context(bench.contenders())
        contenders = {"empty": start("wire", "tiny", empty), "full": start("wire", "tiny", full)}

        def measure(what: str, note: str = "") -> None:
            # Connections are looked at once a second, so a round must take about as long.
            samples = measured(contenders, bench.counts, calls=5 * bench.counts.tiny_calls)
            text = f"processor time of a tiny call, {what}"
            found.extend(
                cpu_rows("scale", samples, [Against("full", "empty", text, "an empty server", _BAR)], note=note)
            )

        _add_rules(full, rules)
        measure(f"{rules:,} rules")
        _add_programs(full, programs)
        measure(f"{programs:,} programs besides")
        _add_connections(full, connections, stack)
        note = "" if bench.is_full else "smaller form; --full takes 10,000 rules, 1,000 programs and 1,000 connections"
        measure(f"{connections:,} connections besides", note)
    return found + _tenants(bench, 100 if bench.is_full else 20)


def _tenants(bench: Bench, count: int) -> list[Row]:
    """A tiny call of one tenant of many, each of whom has an engine, against one of a server's only tenant."""
    with contextlib.ExitStack() as stack:
        start = stack.enter_context(bench.contenders())
        contenders = {}
        for name, tenants in (("one", 1), ("many", count)):
            file = bench.folder / f"tokens-{name}.json"
            tokens = make_tokens(file, [f"tenant-{number}" for number in range(tenants)])
            server = stack.enter_context(bench.own_server("--tokens", str(file), "--max-engines", str(count + 1)))
            contenders[name] = start("client", "tiny", server, tokens[0])
            for token in tokens[1:]:
                with gr.connect(server.target, token=token, timeout=TIMEOUT_S) as client:
                    work.tiny().evaluate(client)
        samples = measured(contenders, bench.counts, calls=5 * bench.counts.tiny_calls)
        text = f"processor time of a tiny call, {count} tenants with an engine each, Python client"
        note = "" if count == 100 else "smaller form; --full takes 100 tenants"
        return cpu_rows("scale", samples, [Against("many", "one", text, "a server of one tenant", _BAR)], note=note)


def _add_rules(server: RunningServer, count: int) -> None:
    with gr.connect(server.target, timeout=TIMEOUT_S) as client:
        for number in range(count):
            client.create_rule(f"rule_{number}", f"dy * {number}.0")


def _add_programs(server: RunningServer, count: int) -> None:
    with gr.connect(server.target, timeout=TIMEOUT_S) as client:
        for seed in range(count):
            work.layers(30, seed).compile(client)


def _add_connections(server: RunningServer, count: int, stack: contextlib.ExitStack) -> None:
    """Opens connections that stay open; each has made a call."""
    request = request_of(server.target, work.tiny())
    for _ in range(count):
        # Channels of one process share a connection unless told otherwise.
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = stack.enter_context(grpc.insecure_channel(server.target, options=options))
        channel.unary_unary(EVALUATE)(request, timeout=TIMEOUT_S)
