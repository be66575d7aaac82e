"""Simulates how the choice of a replica for each request affects cached programs and waiting times.

    make placement                          prints the table of docs/guide/scaling-out.md
    make placement ARGS="--load 0.5"

Requests arrive at random (Poisson) and name programs whose popularity follows Zipf's law. A replica runs one request at
a time, in order. It keeps its most recently used compiled programs; a request of another program compiles it first,
which keeps the replica busy. Uses SimPy.
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import simpy

from gradrule.common.placement import Load, preferred


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
        is_overloaded: Whether more than 1 % of the requests of the last quarter were added to the queues. Times then
            have no meaning, because they depend on the number of requests.
        p50_s: Median of the time from arrival to answer, seconds.
        p99_s: 99th percentile of this time, seconds.
        busy: Share of time that replicas were busy, with compiling, until the last arrival.
        largest_share: Share of all requests at the replica with most requests, times the number of replicas.
    """

    hit_rate: float
    is_overloaded: bool
    p50_s: float
    p99_s: float
    busy: float
    largest_share: float


class Replica:
    """Runs requests in order, one at a time, and keeps the most recently used compiled programs."""

    def __init__(self, environment: simpy.Environment, cluster: Cluster) -> None:
        self.compile_s = 0.0
        self._cached = cluster.cached
        self._environment = environment
        self._engine = simpy.Resource(environment, capacity=1)
        self._compiled: OrderedDict[int, None] = OrderedDict()
        self.queued = 0
        self.queued_of: Counter[int] = Counter()
        self.requests = 0
        self.busy_s = 0.0

    def call(self, program: int, run_s: float) -> Generator[Any, Any, bool]:
        """Runs one request; its value is whether the program was compiled already."""
        self.queued += 1
        self.queued_of[program] += 1
        self.requests += 1
        with self._engine.request() as turn:
            yield turn
            is_hit = program in self._compiled
            self._compiled[program] = None
            self._compiled.move_to_end(program)
            if len(self._compiled) > self._cached:
                self._compiled.popitem(last=False)
            duration = run_s + (0.0 if is_hit else self.compile_s)
            yield self._environment.timeout(duration)
        self.busy_s += duration
        self.queued -= 1
        self.queued_of[program] -= 1
        return is_hit


_NO_BOUND = 1 << 30

Placement = Callable[[Sequence[Replica], int, np.random.Generator], Replica]


def at_random(replicas: Sequence[Replica], _: int, rng: np.random.Generator) -> Replica:
    """Chooses any replica, as a client does with `round_robin` over many connections."""
    return replicas[int(rng.integers(len(replicas)))]


def shorter_queue(replicas: Sequence[Replica], _: int, rng: np.random.Generator) -> Replica:
    """Chooses the shorter queue of two random replicas."""
    first, second = at_random(replicas, 0, rng), at_random(replicas, 0, rng)
    return first if first.queued <= second.queued else second


@functools.cache
def first_replica(program: int, replicas: int) -> int:
    """Returns the replica that a hash of the program and the replica ranks first (rendezvous hashing)."""
    idle = [Load(index, str(index), 0, 0) for index in range(replicas)]
    return preferred(str(program), idle, program_bound=1, replica_bound=1)[0]


def by_digest(replicas: Sequence[Replica], program: int, _: np.random.Generator) -> Replica:
    """Chooses the program's first replica."""
    return replicas[first_replica(program, len(replicas))]


def by_digest_unless_busy(*, program_bound: int = _NO_BOUND, replica_bound: int = _NO_BOUND) -> Placement:
    """Returns the placement of `gradrule.ray`: the next replica in the program's order if the first one is busy.

    Args:
        program_bound: Requests of the program that a replica may have in any case before the next one is tried.
        replica_bound: Requests of all programs that a replica may have in any case before the next one is tried.
    """

    def place(replicas: Sequence[Replica], program: int, rng: np.random.Generator) -> Replica:
        first = by_digest(replicas, program, rng)
        if first.queued_of[program] < program_bound and first.queued < replica_bound:
            return first
        loads = [
            Load(replica, str(index), replica.queued_of[program], replica.queued)
            for index, replica in enumerate(replicas)
        ]
        return preferred(str(program), loads, program_bound=program_bound, replica_bound=replica_bound)[0]

    return place


PLACEMENTS: dict[str, Placement] = {
    "at random": at_random,
    "shorter of two queues": shorter_queue,
    "by digest": by_digest,
    "unless 2 calls": by_digest_unless_busy(replica_bound=2),
    "unless 8 calls": by_digest_unless_busy(replica_bound=8),
    "unless 2 of the program or 8 calls (default)": by_digest_unless_busy(program_bound=2, replica_bound=8),
}

_OVERLOADED = 0.01
"""Growth of the queues per request from which a cluster counts as overloaded."""


def simulate(cluster: Cluster, place: Placement) -> Outcome:
    """Simulates a cluster.

    The first half of the requests fills the caches and is not counted. Compiling takes no time in it; otherwise the
    queues of the start would last longer than the simulation.
    """
    rng = np.random.default_rng(cluster.seed)
    weights = np.arange(1, cluster.programs + 1) ** -cluster.zipf
    programs = rng.choice(cluster.programs, size=cluster.requests, p=weights / weights.sum())
    runs = rng.exponential(cluster.run_s, cluster.requests)
    gaps = rng.exponential(cluster.run_s / (cluster.load * cluster.replicas), cluster.requests)
    environment = simpy.Environment()
    replicas = [Replica(environment, cluster) for _ in range(cluster.replicas)]
    times, hits = np.zeros(cluster.requests), np.zeros(cluster.requests, bool)
    counted = slice(cluster.requests // 2, None)
    last_quarter = cluster.requests * 3 // 4
    states: list[np.ndarray[Any, Any]] = []

    def record_state() -> None:
        busy_s, queued = (sum(getattr(replica, name) for replica in replicas) for name in ("busy_s", "queued"))
        states.append(np.array([environment.now, busy_s, queued]))

    def send(index: int) -> Generator[Any, Any, None]:
        arrived = environment.now
        replica = place(replicas, int(programs[index]), rng)
        hits[index] = yield from replica.call(int(programs[index]), float(runs[index]))
        times[index] = environment.now - arrived

    def arrive() -> Generator[Any, Any, None]:
        for index in range(cluster.requests):
            yield environment.timeout(float(gaps[index]))
            if index == counted.start:
                for replica in replicas:
                    replica.requests = 0
                    replica.compile_s = cluster.compile_s
            if index in (counted.start, last_quarter):
                record_state()
            environment.process(send(index))
        record_state()

    environment.process(arrive())
    environment.run()
    duration_s, busy_s, _ = states[2] - states[0]
    growth = states[2][2] - states[1][2]
    return Outcome(
        hit_rate=float(hits[counted].mean()),
        is_overloaded=bool(growth > _OVERLOADED * (cluster.requests - last_quarter)),
        p50_s=float(np.percentile(times[counted], 50)),
        p99_s=float(np.percentile(times[counted], 99)),
        busy=float(busy_s / duration_s / cluster.replicas),
        largest_share=max(replica.requests for replica in replicas) / (cluster.requests / 2) * cluster.replicas,
    )


def rows(clusters: Sequence[tuple[str, Cluster]]) -> Iterator[str]:
    """Yields the lines of a Markdown table of every placement in every cluster."""
    yield f"| cluster | {' | '.join(PLACEMENTS)} |"
    yield "|---" * (len(PLACEMENTS) + 1) + "|"
    for title, cluster in clusters:
        yield f"| {title} | {' | '.join(_cell(simulate(cluster, place)) for place in PLACEMENTS.values())} |"


def _cell(found: Outcome) -> str:
    p99 = "overloaded" if found.is_overloaded else f"{found.p99_s * 1000:,.0f} ms"
    return f"{p99}, {found.hit_rate:.0%}"


def main() -> None:
    """Prints the table, line by line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field, default in vars(Cluster()).items():
        parser.add_argument(f"--{field.replace('_', '-')}", type=type(default), default=default)
    base = Cluster(**vars(parser.parse_args()))
    print(base)
    print("\np99 of the time from arrival to answer, and share of requests whose program was compiled already\n")
    clusters = [(f"load {load}", replace(base, load=load)) for load in (0.1, 0.3, 0.5, 0.7)]
    clusters.append(("1 program, 4 replicas, load 0.7", replace(base, programs=1, replicas=4, load=0.7)))
    clusters += [(f"{replicas} replicas", replace(base, replicas=replicas)) for replicas in (4, 64)]
    clusters += [(f"Zipf {zipf}", replace(base, zipf=zipf)) for zipf in (0.7, 1.3)]
    for line in rows(clusters):
        print(line, flush=True)


if __name__ == "__main__":
    main()
