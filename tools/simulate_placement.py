"""Simulates how the choice of a replica for each request affects cached programs and waiting times.

    make placement                          prints the table of docs/guide/scaling-out.md
    make placement ARGS="--load 0.5"

Requests arrive at random (Poisson) and name programs whose popularity follows Zipf's law. A replica runs one request at
a time, in order. It keeps its most recently used compiled programs; a request of another program compiles it first,
which keeps the replica busy. Uses SimPy.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import simpy

from gradrule.common.placement import preferred


@dataclass(frozen=True)
class Cluster:
    """What is simulated. Times are in seconds.

    Attributes:
        replicas: Number of replicas.
        programs: Number of programs.
        zipf: Exponent of Zipf's law: the popularity of the k-th program is proportional to k**-zipf.
        cached: Number of compiled programs that a replica keeps.
        run_s: Mean time of a run, which is exponentially distributed.
        compile_s: Time of compiling a program.
        load: Rate of arrivals times `run_s`, per replica: the share of time that replicas would be busy without
            compiling.
        requests: Number of requests.
        seed: Seed of all random numbers.
    """

    replicas: int = 16
    programs: int = 2000
    zipf: float = 1.0
    cached: int = 200
    run_s: float = 0.02
    compile_s: float = 0.2
    load: float = 0.3
    requests: int = 100_000
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What was measured after the caches have filled.

    Attributes:
        hit_rate: Share of requests whose program was compiled already.
        p50_s: Median of the time from arrival to answer, seconds.
        p99_s: 99th percentile of this time, seconds.
        busy: Share of time that replicas were busy, with compiling, until the last arrival.
        largest_share: Share of all requests at the replica with most requests, times the number of replicas.
    """

    hit_rate: float
    p50_s: float
    p99_s: float
    busy: float
    largest_share: float


class Replica:
    """Runs requests in order, one at a time, and keeps the most recently used compiled programs."""

    def __init__(self, environment: simpy.Environment, cluster: Cluster) -> None:
        self._cluster = cluster
        self._environment = environment
        self._engine = simpy.Resource(environment, capacity=1)
        self._compiled: OrderedDict[int, None] = OrderedDict()
        self.queued = 0
        self.requests = 0
        self.busy_s = 0.0

    def call(self, program: int, run_s: float) -> Generator[Any, Any, bool]:
        """Runs one request; its value is whether the program was compiled already."""
        self.queued += 1
        self.requests += 1
        with self._engine.request() as turn:
            yield turn
            is_hit = program in self._compiled
            self._compiled[program] = None
            self._compiled.move_to_end(program)
            if len(self._compiled) > self._cluster.cached:
                self._compiled.popitem(last=False)
            duration = run_s + (0.0 if is_hit else self._cluster.compile_s)
            yield self._environment.timeout(duration)
        self.busy_s += duration
        self.queued -= 1
        return is_hit


Placement = Callable[[Sequence[Replica], int, np.random.Generator], Replica]


def at_random(replicas: Sequence[Replica], _: int, rng: np.random.Generator) -> Replica:
    """Chooses any replica, as a client does with `round_robin` over many connections."""
    return replicas[int(rng.integers(len(replicas)))]


def shorter_queue(replicas: Sequence[Replica], _: int, rng: np.random.Generator) -> Replica:
    """Chooses the shorter queue of two random replicas."""
    first, second = at_random(replicas, 0, rng), at_random(replicas, 0, rng)
    return first if first.queued <= second.queued else second


def by_digest(replicas: Sequence[Replica], program: int, _: np.random.Generator) -> Replica:
    """Chooses the replica that a hash of the program and the replica ranks first (rendezvous hashing)."""
    key = (program, len(replicas))
    if key not in _first:
        _first[key] = preferred(str(program), [(index, str(index), 0) for index in range(len(replicas))], 1)[0]
    return replicas[_first[key]]


def by_digest_unless_busy(min_bound: int) -> Placement:
    """Returns the placement of `gradrule.ray`: the next replica in the program's order if the first one is busy.

    Args:
        min_bound: Requests that a replica may have in any case before the next one is tried.
    """

    def place(replicas: Sequence[Replica], program: int, rng: np.random.Generator) -> Replica:
        first = by_digest(replicas, program, rng)
        if first.queued < min_bound:
            return first
        loads = [(replica, str(index), replica.queued) for index, replica in enumerate(replicas)]
        return preferred(str(program), loads, min_bound)[0]

    return place


PLACEMENTS: dict[str, Placement] = {
    "at random": at_random,
    "shorter queue of two": shorter_queue,
    "by digest": by_digest,
    "by digest, unless busy (`min_bound` 2)": by_digest_unless_busy(2),
    "by digest, unless busy (`min_bound` 8)": by_digest_unless_busy(8),
}

_OVERLOADED_S = 10.0

_first: dict[tuple[int, int], int] = {}


def simulate(cluster: Cluster, place: Placement) -> Outcome:
    """Simulates a cluster; the first half of the requests fills the caches and is not counted."""
    rng = np.random.default_rng(cluster.seed)
    weights = np.arange(1, cluster.programs + 1) ** -cluster.zipf
    programs = rng.choice(cluster.programs, size=cluster.requests, p=weights / weights.sum())
    runs = rng.exponential(cluster.run_s, cluster.requests)
    gaps = rng.exponential(cluster.run_s / (cluster.load * cluster.replicas), cluster.requests)
    environment = simpy.Environment()
    replicas = [Replica(environment, cluster) for _ in range(cluster.replicas)]
    times, hits = np.zeros(cluster.requests), np.zeros(cluster.requests, bool)
    counted = slice(cluster.requests // 2, None)
    busy_s: list[tuple[float, float]] = []

    def record_busy() -> None:
        busy_s.append((environment.now, sum(replica.busy_s for replica in replicas)))

    def send(index: int) -> Generator[Any, Any, None]:
        arrived = environment.now
        replica = place(replicas, int(programs[index]), rng)
        hits[index] = yield from replica.call(int(programs[index]), float(runs[index]))
        times[index] = environment.now - arrived

    def arrive() -> Generator[Any, Any, None]:
        for index in range(cluster.requests):
            yield environment.timeout(float(gaps[index]))
            if index == counted.start:
                record_busy()
                for replica in replicas:
                    replica.requests = 0
            environment.process(send(index))
        record_busy()

    environment.process(arrive())
    environment.run()
    (start_s, before_s), (end_s, after_s) = busy_s
    return Outcome(
        hit_rate=float(hits[counted].mean()),
        p50_s=float(np.percentile(times[counted], 50)),
        p99_s=float(np.percentile(times[counted], 99)),
        busy=(after_s - before_s) / (end_s - start_s) / cluster.replicas,
        largest_share=max(replica.requests for replica in replicas) / (cluster.requests / 2) * cluster.replicas,
    )


def table(clusters: Sequence[tuple[str, Cluster]]) -> str:
    """Returns a Markdown table of every placement in every cluster."""
    lines = [
        "| cluster | placement | compiled already | median | p99 | busy | most requests at one replica |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, cluster in clusters:
        for name, place in PLACEMENTS.items():
            found = simulate(cluster, place)
            lines.append(
                f"| {title} | {name} | {found.hit_rate:.1%} | {_time(found.p50_s)} | {_time(found.p99_s)} "
                f"| {found.busy:.0%} | {found.largest_share:.1f} × mean |"
            )
    return "\n".join(lines)


def _time(seconds: float) -> str:
    # Queues that grow without limit have no meaningful time: it depends on the number of requests.
    return f"{seconds * 1000:.0f} ms" if seconds < _OVERLOADED_S else "overloaded"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field, default in vars(Cluster()).items():
        parser.add_argument(f"--{field.replace('_', '-')}", type=type(default), default=default)
    base = Cluster(**vars(parser.parse_args()))
    print(f"{base}\n")
    clusters = [(f"load {load}", replace(base, load=load)) for load in (0.1, 0.3, 0.5, 0.7)]
    clusters += [(f"{replicas} replicas", replace(base, replicas=replicas)) for replicas in (4, 64)]
    clusters += [(f"Zipf {zipf}", replace(base, zipf=zipf)) for zipf in (0.7, 1.3)]
    print(table(clusters))


if __name__ == "__main__":
    main()
