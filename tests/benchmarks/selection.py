"""Processor time of checking, selecting in and expanding large graphs, without an engine.

Run as a module: `python -m tests.benchmarks.selection [--nodes N] [--overrides N] [--json] [--profile] [CASE ...]`.
One line per case: seconds of processor time, microseconds per node, MiB by which the process grew. `--profile` prints
where the time of each case goes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradrule.v1.graph_pb2 import AttrValue, Graph
from gradrule.v1.override_pb2 import POSITION_NEAREST_YS, Position, Region, Selector
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server import graphs
from gradrule_server.errors import GradruleError

_OPS = ("Tanh", "Sign", "Relu", "Neg")
# Nodes per scope, and calls per function in the case of nested calls.
_LAYER = 10
_CALLS = 100
_LEVELS = 12


@dataclass(frozen=True)
class Case:
    """A graph in bytes and what is asked of it."""

    graph: bytes
    nodes: int
    request: graphs.ExpandRequest


def chain(nodes: int) -> Graph:
    """x, unary ops one behind the other in scopes of ten nodes, every tenth an AddV2 with the scope's first node, y."""
    graph = Graph()
    graph.node.add(name="x", op="Placeholder").attr["dtype"].type = Dt.DT_FLOAT
    last = "x"
    for number in range(nodes - 2):
        layer, place = divmod(number, _LAYER)
        name = f"net/layer{layer}/op{place}"
        node = graph.node.add(name=name, op="AddV2" if place == _LAYER - 1 else _OPS[place % len(_OPS)], input=[last])
        if node.op == "AddV2":
            node.input.append(f"net/layer{layer}/op0")
        node.attr["T"].type = Dt.DT_FLOAT
        last = name
    graph.node.add(name="y", op="Identity", input=[last]).attr["T"].type = Dt.DT_FLOAT
    return graph


def nested_calls(levels: int, calls: int) -> Graph:
    """Functions that each call the next so many times, in few kilobytes."""
    graph = Graph()
    graph.node.add(name="x", op="Placeholder").attr["dtype"].type = Dt.DT_FLOAT
    for level in range(levels):
        function = graph.library.function.add()
        function.signature.name = f"f{level}"
        function.signature.input_arg.add(name="a", type=Dt.DT_FLOAT)
        function.signature.output_arg.add(name="r", type=Dt.DT_FLOAT)
        last = "a"
        for number in range(calls):
            op = "Neg" if level == levels - 1 else f"f{level + 1}"
            node = function.node_def.add(name=f"n{number}", op=op, input=[last])
            if op == "Neg":
                node.attr["T"].type = Dt.DT_FLOAT
            last = f"n{number}:{'y' if op == 'Neg' else 'r'}:0"
        function.ret["r"] = last
    graph.node.add(name="y", op="f0", input=["x"])
    return graph


Selecting = Callable[[int, int], Selector]
"""A selector from its number and the number of layers of the graph."""

_SELECTORS: dict[str, Selecting] = {
    "node_regex": lambda number, layers: Selector(node_regex=f"net/layer{number}[0-9]*/(op3|nothing)"),
    "depends_on": lambda number, layers: Selector(
        op_type="Sign", depends_on=[f"net/layer{layers * number // 100}/op2"]
    ),
    "position": lambda number, layers: Selector(
        scope=f"net/layer{number}", op_type="Sign", position=Position(nearest=POSITION_NEAREST_YS)
    ),
    "position in all": lambda number, layers: Selector(op_type="Sign", position=Position(index=number)),
    "pattern": lambda number, layers: Selector(pattern=[_OPS[(number + step) % 4] for step in range(2 + number % 5)]),
    "glob": lambda number, layers: Selector(node=f"**layer{number}*/op?"),
    "scope": lambda number, layers: Selector(scope=f"net/layer{number}"),
    "region": lambda number, layers: Selector(
        region=Region(inputs=[f"net/layer{number}/op1"], outputs=[f"net/layer{number}/op5"])
    ),
    "attrs": lambda number, layers: Selector(
        op_type="Neg", scope=f"net/layer{number}", attrs={"T": AttrValue(type=Dt.DT_FLOAT)}
    ),
}


def _case(graph: Graph, nodes: int, selectors: Sequence[Selector] = ()) -> Case:
    specs = [
        graphs.OverrideSpec(selector, number, "rule", str(number), optional=True, index=number)
        for number, selector in enumerate(selectors)
    ]
    request = graphs.ExpandRequest(fetches=["y"], ys=["y"], xs=["x"], overrides=specs)
    return Case(graph.SerializeToString(), nodes, request)


def cases(nodes: int, overrides: int) -> dict[str, Callable[[], Case]]:
    """All cases by name."""
    layers = (nodes - 2) // _LAYER

    def selecting(make: Selecting) -> Callable[[], Case]:
        return lambda: _case(chain(nodes), nodes, [make(number, layers) for number in range(overrides)])

    def named() -> Case:
        # One node in four, each by its own override: what an explain of 5,000 nodes with 1,250 overridden asks.
        few = nodes // 20
        made = chain(few)
        names = [node.name for node in made.node[1:-1:4]]
        return _case(made, few, [Selector(node=name) for name in names])

    def shallow() -> Case:
        # Two levels of a hundred calls: an expansion that is allowed.
        return _case(nested_calls(2, _CALLS), _CALLS**2)

    return {
        "no override": lambda: _case(chain(nodes), nodes),
        **{kind: selecting(make) for kind, make in _SELECTORS.items()},
        "1 in 4 by name": named,
        "calls, 2 levels": shallow,
        f"calls, {_LEVELS} levels": lambda: _case(nested_calls(_LEVELS, _CALLS), _LEVELS * _CALLS),
    }


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _run(case: Case) -> str:
    try:
        graph = graphs.parse(case.graph)
        found = graphs.expand(graph, case.request)
    except GradruleError as refusal:
        return f"refused: {refusal.findings[0].message[:80]}"
    return f"{len(found.matches)} matches"


def measured(case: Case, profile: cProfile.Profile | None) -> dict[str, float | str]:
    """Processor time and growth of memory of one case."""
    gc.collect()
    before, started = _peak(), time.process_time()
    said = _run(case) if profile is None else str(profile.runcall(_run, case))
    seconds = time.process_time() - started
    return {
        "seconds": seconds,
        "microseconds per node": seconds / case.nodes * 1e6,
        "MiB": _peak() - before,
        "result": said,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line, or one JSON object, per case."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("case", nargs="*")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--overrides", type=int, default=99)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args(arguments)
    known = cases(options.nodes, options.overrides)
    # Definitions of ops are read at the first use; that is no part of a case.
    _run(_case(chain(100), 100))
    for name in options.case or known:
        profile = cProfile.Profile() if options.profile else None
        figures = measured(known[name](), profile)
        if options.json:
            print(json.dumps({"case": name, **figures}), flush=True)
        else:
            numbers = f"{figures['seconds']:8.2f} s {figures['microseconds per node']:8.1f} us/node"
            print(f"{name:18} {numbers} {figures['MiB']:6.0f} MiB  {figures['result']}", flush=True)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
