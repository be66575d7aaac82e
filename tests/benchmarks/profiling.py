"""Where the time of a call goes: by process, layer, library and Python function. `make bench ARGS="--rows profile"`.

All figures are processor time or counts, for one call. Of several rounds the cheapest one counts: other work on the
machine can only add to it. A layer is a difference between two contenders that have all other layers in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.benchmarks import sampling
from tests.benchmarks.context import MIB, Bench, Sample, measured
from tests.benchmarks.measure import Line, Table
from tests.benchmarks.usage import Usage

_KINDS = ("client", "stream", "wire", "echo aio", "echo sync", "session", "function", "hop")
_NAMES = {
    "client": "Python client",
    "stream": "raw bytes over a stream",
    "wire": "raw bytes, unary",
    "echo aio": "bare unary echo (aio server)",
    "echo sync": "bare unary echo (sync server)",
    "session": 'TensorFlow\'s Session("grpc://…")',
    "function": "TensorFlow in one process, no wire",
    "hop": "a frame to a process and back, no gRPC",
}


def tiny(bench: Bench) -> list[Line]:
    """Profiles a tiny call."""
    return _profile(bench, "profile", "tiny", "a tiny call", bench.counts.profile_calls)


def large(bench: Bench) -> list[Line]:
    """Profiles a call with a large tensor."""
    size = bench.counts.large_bytes
    calls = max(2, bench.counts.profile_calls // 50)
    return _profile(bench, "profile-large", f"large:{size // 4}", f"{size / MIB:g} MiB in and out", calls)


def _profile(bench: Bench, group: str, work: str, what: str, calls: int) -> list[Line]:
    with bench.contenders() as start:
        contenders = {kind: start(kind, work) for kind in _KINDS}
        found = measured(contenders, bench.counts, calls=calls, steady=True)
        syscalls = {kind: sampling.syscalls(item, calls) for kind, item in contenders.items()}
        tables: list[Line] = [
            _by_process(group, what, found, syscalls),
            _by_layer(group, what, {kind: cheapest(samples) for kind, samples in found.items()}),
        ]
        seconds = bench.counts.profile_s
        for kind in ("wire", "client"):
            tables += sampling.tables(
                group, f"{what}, {_NAMES[kind]}", contenders[kind], cheapest(found[kind]), seconds
            )
    return tables


def cheapest(samples: Sequence[Sample]) -> dict[str, Usage]:
    """Returns what the parts used in the round that took each the least processor time."""
    parts = dict.fromkeys(part for sample in samples for part in sample.used)
    zero = Usage()
    return {
        part: min((sample.used.get(part, zero) for sample in samples), key=lambda item: item.cpu_ns) for part in parts
    }


def _by_process(
    group: str, what: str, found: Mapping[str, Sequence[Sample]], syscalls: Mapping[str, Mapping[str, float]]
) -> Table:
    cells = []
    for kind, samples in found.items():
        for part, used in cheapest(samples).items():
            calls = syscalls[kind].get(part)
            if used.cpu_ns < 1000 and not calls:
                continue
            cells.append(
                [
                    _NAMES[kind],
                    part,
                    _number(used.cpu_ns / 1e3),
                    _number(used.waits),
                    _number(used.preemptions),
                    _number(used.page_faults),
                    "" if calls is None else _number(calls),
                ]
            )
    columns = ("contender", "process", "CPU µs", "waits", "preemptions", "page faults", "system calls")
    return Table(group, f"{what}: by process, for one call", columns, cells)


def _by_layer(group: str, what: str, used: Mapping[str, Mapping[str, Usage]]) -> Table:
    def cpu(kind: str, part: str) -> float:
        return used[kind].get(part, Usage()).cpu_ns / 1e3

    hop_front, hop_engine = cpu("hop", "front end"), cpu("hop", "engine")
    layers = {
        "client codec: NumPy to bytes and back": cpu("client", "client") - cpu("wire", "client"),
        "wire, client's side: gRPC": cpu("wire", "client"),
        "wire, server's side: gRPC": cpu("echo aio", "server"),
        "front end: all that is not gRPC or the hop": cpu("wire", "front end") - cpu("echo aio", "server") - hop_front,
        "hop, front end's side": hop_front,
        "hop, engine's side": hop_engine,
        "engine: all that is not the hop or TensorFlow": cpu("wire", "engine") - hop_engine - cpu("function", "client"),
        "TensorFlow": cpu("function", "client"),
    }
    total = sum(layers.values())
    floor = cpu("echo aio", "client") + cpu("echo aio", "server")
    cells = [[name, _number(value), f"{value / total:.0%}", f"{value / floor:.2f}"] for name, value in layers.items()]
    cells.append(["all", _number(total), "100%", f"{total / floor:.2f}"])
    return Table(group, f"{what}: by layer", ("layer", "CPU µs", "share", "of a bare echo"), cells)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"
