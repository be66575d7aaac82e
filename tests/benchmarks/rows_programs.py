"""Rows of programs that differ from the tiny one: long computing, large graphs, many examples at once."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.benchmarks import peers, work
from tests.benchmarks.context import Against, Bench, cpu_rows, measured, rows, used_by_part
from tests.benchmarks.measure import Line, Row, Samples, in_turns_of
from tests.benchmarks.usage import Usage, resident_bytes, tree, usage

CLIENTS = 64
_TIMEOUT_S = 600.0
_ALONE = "TensorFlow alone, same graph"
_COMPUTE_LAYERS = 12


def compute(bench: Bench) -> list[Row]:
    """A program that computes for 200 ms or more, against the same function in one process."""
    with bench.contenders() as start:
        what = f"compute:{bench.counts.compute_size}:{_COMPUTE_LAYERS}"
        found = measured({kind: start(kind, what) for kind in ("client", "function")}, bench.counts, calls=2, warm_up=2)
    peer = "the same function in process"
    return [
        *rows("compute", found, [Against("client", "function", "compute-bound program, Python client", peer, 1.03)]),
        *cpu_rows(
            "compute", found, [Against("client", "function", "processor time of a compute-bound program", peer, 1.03)]
        ),
    ]


def inline(bench: Bench) -> list[Row]:
    """A large graph in the request, sent before, against the same program by name."""
    made: list[Row] = []
    for kind, which in (("chain", "all run"), ("aside", "a handful run")):
        with bench.contenders() as start:
            name = f"{kind}:{bench.counts.inline_nodes}"
            kinds = ("wire inline", "wire", "client inline", "client")
            found = measured(
                {item: start(item, name) for item in kinds}, bench.counts, calls=bench.counts.inline_calls, warm_up=2
            )
        what = f"second Evaluate with an inline graph of {bench.counts.inline_nodes:,} nodes, {which}"
        made += rows(
            "inline",
            found,
            [
                Against("wire inline", "wire", f"{what}, raw bytes", "by program name", 1.5),
                Against("client inline", "client", f"{what}, Python client", "by program name", 1.5),
            ],
        )
    return made


def batching(bench: Bench) -> list[Line]:
    """64 clients, one example each, one program: with dynamic batching and without."""
    peer = "the same without dynamic batching"
    width, steps, wide = bench.counts.batched_network
    made: list[Line] = []
    with bench.own_server("--max-batch-size", "1") as alone:
        for work_name, network in (
            (f"recurrent:{width}:{steps}", f"a recurrent network of {steps} steps"),
            (f"perceptron:{wide}", f"two layers of {wide:,} units"),
        ):
            with bench.contenders() as start:
                # One asyncio client keeps 64 requests under way, as 64 clients would, for less processor time.
                pair = {"with": start("wire", work_name), "without": start("wire", work_name, alone)}
                calls = bench.counts.examples
                # TensorFlow's libraries prepare for each size of run on each thread, which takes seconds altogether.
                found = measured(pair, bench.counts, calls=calls, in_flight=CLIENTS, warm_up=2 * calls)
            what = f"requests per second, {CLIENTS} clients, one example each, {network}"
            used = "; ".join(f"{name} {used_by_part(found[name])}" for name in pair)
            note = f"processor time of a request, µs: {used}"
            made += rows("batching", found, [Against("with", "without", what, peer, 4.0)], rates=True, note=note)
    return made


@dataclass(frozen=True)
class Taken:
    """What a graph took up to its first result, in seconds: elapsed time, and processor time of all processes."""

    wall: float
    cpu: float


def compiling(bench: Bench) -> list[Row]:
    """From a new graph to its first result, by size of the graph."""
    small, big = (1000, 100_000) if bench.is_full else bench.counts.compile_nodes
    note = "" if big == 100_000 else f"smaller form: {small:,} and {big:,} nodes; --full takes 1,000 and 100,000"
    seeds = iter(range(1_000_000))
    steps: dict[str, Callable[[], Taken]] = {}

    def ours(nodes: int) -> Taken:
        # The seed is in the weights, so that no cache knows the graph.
        return _ours(bench, work.layers(nodes, next(seeds)))

    for nodes in (small, big):
        steps[f"ours {nodes}"] = functools.partial(ours, nodes)
        steps[f"alone {nodes}"] = functools.partial(_alone, bench, "tensorflow", "mlp", str(nodes))
    # Its weights are random, so that no cache knows it either.
    steps["ours resnet50"] = lambda: _ours(bench, work.resnet())
    steps["alone resnet50"] = functools.partial(_alone, bench, "resnet50", "", "0")
    # Whatever a server does for its first program is no part of a graph's cost.
    ours(100)
    found = in_turns_of(steps, rounds=bench.counts.starts, budget_s=bench.counts.budget_s)

    def growth(kind: str) -> Samples:
        pairs = zip(found[f"{kind} {small}"], found[f"{kind} {big}"], strict=True)
        return Samples(tuple(math.log(large.cpu / little.cpu) / math.log(big / small) for little, large in pairs))

    def seconds(graph: str, peer: str, of: str, note: str = "") -> list[Row]:
        """Returns a row of elapsed time and one of processor time."""
        return [
            Row(
                "compile",
                what,
                peer,
                "s",
                Samples(tuple(getattr(item, unit) for item in found[f"ours {of}"])),
                Samples(tuple(getattr(item, unit) for item in found[f"alone {of}"])),
                1.15,
                note=note,
            )
            for what, unit in ((graph, "wall"), (f"processor time to the {graph}", "cpu"))
        ]

    what = f"exponent of processor time to the first result, {small:,} to {big:,} nodes"
    return [
        Row("compile", what, _ALONE, "", growth("ours"), growth("alone"), most=1.15, note=note),
        *seconds(f"first result of a graph of {big:,} nodes", _ALONE, str(big), note),
        *seconds("first result of a ResNet50, gradient of the image", _ALONE, "resnet50"),
    ]


def _ours(bench: Bench, what: work.Work) -> Taken:
    import gradrule as gr

    server = bench.gradrule.process.pid
    with gr.connect(bench.gradrule.target, timeout=_TIMEOUT_S) as client:
        before = {pid: usage(pid) for pid in tree(server)}
        own, started = time.process_time(), time.perf_counter()
        what.evaluate(client)
        wall, own = time.perf_counter() - started, time.process_time() - own
        used = sum(usage(pid).cpu_ns - before.get(pid, Usage()).cpu_ns for pid in tree(server))
    return Taken(wall, own + used / 1e9)


def _alone(bench: Bench, stage: str, kind: str, nodes: str) -> Taken:
    command = peers.module("scaling_work", stage, kind, nodes, str(bench.folder))
    done = subprocess.run(command, cwd=peers.ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    parts = json.loads(done.stdout.splitlines()[-1])
    first = [parts["import and tf.gradients"], parts["first run"]]
    return Taken(sum(part["wall"] for part in first), sum(part["seconds"] for part in first))


def memory(bench: Bench) -> list[Row]:
    """The server's memory after many requests over many programs, against that after few."""
    import gradrule as gr

    programs, few, many = (1000, 1000, 100_000) if bench.is_full else (bench.counts.programs, *bench.counts.requests)
    # A cache that holds all programs grows until it holds them: in the smaller form it holds half of them.
    flags = () if bench.is_full else ("--program-cache", str(max(1, programs // 2)))
    with bench.own_server(*flags) as server, gr.connect(server.target, timeout=_TIMEOUT_S) as client:
        compiled = [work.layers(30, seed) for seed in range(programs)]
        made = [item.compile(client) for item in compiled]
        at: list[float] = []
        done = 0
        for until in (few, many):
            # Calls of one program come in a row: a program that the cache has lost is compiled once, not at each call.
            share = (until - done) // programs
            for program, item in zip(made, compiled, strict=True):
                for _ in range(share):
                    program.evaluate(item.feeds)
            done = until
            at.append(resident_bytes(tree(server.process.pid)) / 2**20)
    short = f"smaller form: {few:,} and {many:,} requests over {programs:,} programs, a cache of {programs // 2}"
    return [
        Row(
            "memory",
            f"memory of the server after {many:,} requests over {programs:,} programs",
            f"after {few:,}",
            "MiB",
            Samples((at[1],)),
            Samples((at[0],)),
            1.1,
            note="" if bench.is_full else f"{short}; --full takes 100,000 over 1,000",
        )
    ]
