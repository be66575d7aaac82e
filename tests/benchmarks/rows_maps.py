"""Rows of another override map on a network that the server knows, and of many maps and programs on one server.

Processor time is that of all processes of the server, and of those that it has waited for. Memory is that of engines:
anonymous and shared pages.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

import gradrule as gr
from tests.benchmarks import maps_work, peers
from tests.benchmarks.context import Bench
from tests.benchmarks.measure import Line, Row, Samples, Table, rounded
from tests.benchmarks.usage import roles
from tests.processes import engines
from tests.service.servers import RunningServer

_MIB = 2**20
_TIMEOUT_S = 600.0
_MEMORY_LIMIT = 2 * 1024 * _MIB
_LIMIT_FLAGS = ("--memory-limit", str(_MEMORY_LIMIT))
_LOCAL = "TensorFlow alone from nothing: trace, gradients, first run"
_BAR = 0.3
_MAPS = 10
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """What one new map cost: processor seconds by part of the server, and memory of the engines after it, in MiB."""

    parts: dict[str, float]
    client: float
    wall: float
    memory: float

    @property
    def server(self) -> float:
        """Processor seconds of all processes of the server."""
        return sum(self.parts.values())


def network(name: str, is_frozen: bool) -> Callable[[Bench], list[Line]]:
    """Returns what measures the rows of one network."""
    return functools.partial(_network, name=name, is_frozen=is_frozen)


def _network(bench: Bench, *, name: str, is_frozen: bool) -> list[Line]:
    """The first, second and tenth map of a network, against TensorFlow alone."""
    title = f"{maps_work.TITLES[name]}, {'frozen' if is_frozen else 'from Keras'}"
    ours, theirs = [], []
    for _ in range(bench.counts.map_rounds):
        made = maps_work.network(name, is_frozen=is_frozen)
        theirs.append(_local(bench, made))
        with bench.own_server("--spares", "0") as server:
            # What a server does for its first program is no part of a network's cost.
            _warm_up(server)
            ours.append(_costs(server, made, _MAPS))
    rows: list[Line] = []
    for label, place, bar in (("first", 0, None), ("second", 1, _BAR), ("tenth", 9, _BAR)):
        seconds = Samples(tuple(costs[place].server for costs in ours))
        rows.append(
            Row("maps", f"{label} override map: {title}", _LOCAL, "s", seconds, Samples(tuple(theirs)), bar, note=_NOTE)
        )
    middle = Samples(tuple(statistics.median(cost.server for cost in costs[1:]) for costs in ours))
    rows.append(Row("maps", f"median of maps 2 to 10: {title}", _LOCAL, "s", middle, Samples(tuple(theirs)), _BAR))
    # The median of the steps: an engine that is replaced on the way must not hide what a map takes.
    grown = Samples(tuple(_growth([cost.memory for cost in costs[1:]]) for costs in ours))
    first = Samples(tuple(max(costs[0].memory, 0.1) for costs in ours))
    rows.append(
        Row(
            "maps",
            f"engine memory per further map: {title}",
            "engines after the first map",
            "MiB",
            grown,
            first,
            most=3.0,
        )
    )
    cells = [_cells(number, cost) for number, cost in enumerate(ours[0], 1)]
    return [*rows, Table("maps", f"new maps: {title}", _COLUMNS, cells)]


def _growth(memory: Sequence[float]) -> float:
    """Returns the median of the steps between consecutive values."""
    return statistics.median(after - before for before, after in itertools.pairwise(memory))


_NOTE = "the gradient of the input; processor time of all processes of the server, the client's is in the table below"
_COLUMNS = ("map", "server, s", "front end", "engine", "workers, ended", "client", "elapsed, s", "engines, MiB")


def _cells(number: int, cost: Cost) -> list[str]:
    parts = dict(cost.parts)
    known = [parts.pop(part, 0.0) for part in ("front end", "engine")]
    shown = [cost.server, *known, sum(parts.values()), cost.client, cost.wall]
    return [str(number), *(f"{value:.2f}" for value in shown), f"{cost.memory:,.0f}"]


def _local(bench: Bench, made: maps_work.Network) -> float:
    """Returns the processor seconds of TensorFlow alone, in a process that has only imported it."""
    file = "-"
    if made.frozen:
        file = str(bench.folder / f"{made.name}.pb")
        Path(file).write_bytes(made.frozen)
    command = peers.module("maps_work", made.name, file)
    done = subprocess.run(command, cwd=peers.ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return sum(json.loads(done.stdout.splitlines()[-1]).values())


def _warm_up(server: RunningServer) -> None:
    with gr.connect(server.target, timeout=_TIMEOUT_S) as client:
        graph, overrides = maps_work.small(10_000)
        client.evaluate(graph, {"x": np.ones((1, 4), np.float32)}, ys=["y"], xs=["x"], overrides=overrides)


def _costs(server: RunningServer, made: maps_work.Network, count: int) -> list[Cost]:
    """Returns what each of the first maps costs, in their order."""
    with gr.connect(server.target, timeout=_TIMEOUT_S) as client:
        return [
            _cost(server, functools.partial(made.evaluate, client, overrides))
            for overrides in islice(maps_work.maps(made.name), count)
        ]


def _cost(server: RunningServer, call: Callable[[], object]) -> Cost:
    before, own, started = _processor_s(server), time.process_time(), time.perf_counter()
    call()
    wall, own = time.perf_counter() - started, time.process_time() - own
    parts = {part: seconds - before.get(part, 0.0) for part, seconds in _processor_s(server).items()}
    return Cost(parts, own, wall, _engine_mib(server))


def _processor_s(server: RunningServer) -> dict[str, float]:
    """Returns processor seconds by part of the server; those of processes that have ended count for their parents."""
    found: dict[str, float] = {}
    for pid, part in roles(server.process.pid).items():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[part] = found.get(part, 0.0) + sum(map(int, fields[11:13])) / _TICK
            found["ended"] = found.get("ended", 0.0) + sum(map(int, fields[13:15])) / _TICK
    return found


def _engine_mib(server: RunningServer) -> float:
    """Returns the anonymous and shared memory of the engines."""
    total = 0
    for pid in engines(server.process.pid):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in status if line.startswith(("RssAnon:", "RssShmem:")))
    return total / 1024


@dataclass
class _Long:
    """What a long row of new programs met."""

    refused: list[str]
    memory: list[float]
    front_end_s: list[float]
    engines: set[int]


def _long(server: RunningServer, calls: Iterator[Callable[[gr.Client], object]]) -> _Long:
    """Makes the calls one by one, and goes on after refusals."""
    found = _Long([], [], [], set())
    with gr.connect(server.target, timeout=_TIMEOUT_S) as client:
        for call in calls:
            before = time.clock_gettime_ns((~server.process.pid << 3) | 2)
            try:
                call(client)
            except gr.GradruleError as refusal:
                found.refused.append(f"{refusal.reason}: {refusal}"[:200])
            found.front_end_s.append((time.clock_gettime_ns((~server.process.pid << 3) | 2) - before) / 1e9)
            found.memory.append(_engine_mib(server))
            found.engines.update(engines(server.process.pid))
    return found


def many_maps(bench: Bench) -> list[Line]:
    """Many different maps on the frozen ResNet50, on an engine of 2 GiB."""
    count = bench.counts.maps
    made = maps_work.network("resnet50", is_frozen=True)
    with bench.own_server(*_LIMIT_FLAGS) as server:
        overrides = islice(maps_work.maps(made.name), count)
        found = _long(server, (functools.partial(_evaluate, made, item) for item in overrides))
    what = f"{count} different maps on a frozen ResNet50, --memory-limit 2GiB"
    note = f"{what}: {len(found.engines)} engines were used; the first refusals: {'; '.join(found.refused[:3]) or '-'}"
    all_maps = Samples((float(count),))
    most = Samples((max(found.memory),))
    return [
        Row(
            "maps", f"refusals, {what}", "maps", "", Samples((float(len(found.refused)),)), all_maps, most=0, note=note
        ),
        Row("maps", f"most memory of engines, {what}", "the limit", "MiB", most, Samples((2048.0,)), 1.0),
    ]


def _evaluate(made: maps_work.Network, overrides: Sequence[gr.Override], client: gr.Client) -> None:
    made.evaluate(client, overrides)


def many_programs(bench: Bench) -> list[Line]:
    """Many different programs of five nodes on one server: memory of the engine, processor time of the front end."""
    count = bench.counts.map_programs
    feeds = {"x": np.ones((1, 4), np.float32)}

    def evaluate(seed: int, client: gr.Client) -> None:
        graph, overrides = maps_work.small(seed)
        client.evaluate(graph, feeds, fetches=["y"], ys=["y"], xs=["x"], overrides=overrides)

    with bench.own_server("--spares", "0", *_LIMIT_FLAGS) as server:
        _warm_up(server)
        found = _long(server, (functools.partial(evaluate, seed) for seed in range(count)))
    some = max(count // 10, 1)
    grown = (found.memory[-1] - found.memory[some]) / (count - 1 - some)
    early, late = (
        statistics.median(part) * 1e3 for part in (found.front_end_s[1 : 1 + some], found.front_end_s[-some:])
    )
    what = f"{count} different programs of 5 nodes"
    growth = ", ".join(str(rounded(value)) for value in found.memory[:: max(count // 6, 1)])
    note = f"{what}: {len(found.engines)} engines, {len(found.refused)} refused; MiB of engines on the way: {growth}"
    return [
        Row(
            "maps",
            f"engine memory per further program, {what}",
            "engines at the first",
            "MiB",
            Samples((grown,)),
            Samples((found.memory[0],)),
            most=0.3,
            note=note,
        ),
        Row(
            "maps",
            f"front end's processor time for one of the last {some} of {what}",
            f"one of the first {some}",
            "ms",
            Samples((late,)),
            Samples((early,)),
            1.1,
        ),
        Row(
            "maps",
            f"refusals, {what}",
            "programs",
            "",
            Samples((float(len(found.refused)),)),
            Samples((float(count),)),
            most=0,
        ),
    ]
