"""Tests that deep graphs need no recursion, and that the garbage collector is enabled again."""

from __future__ import annotations

import gc

from gradrule.v1.graph_pb2 import Graph
from tests.unit.graphs.helpers import expand, graph, node, placeholder, reasons_of


def chain(count: int) -> Graph:
    nodes = [placeholder("n0")]
    nodes += [node(f"n{i}", "Sign" if i % 2 else "Tanh", f"n{i - 1}") for i in range(1, count - 1)]
    return graph(*nodes, node("y", "Neg", nodes[-1].name))


def test_deep_graphs_need_no_recursion() -> None:
    made = chain(30_000)
    assert len(Graph.FromString(expand(made, ["y"]).graph_bytes).node) == 30_000
    made.node[0].CopyFrom(node("n0", "Tanh", "y"))
    assert set(reasons_of(made, ["y"])) == {"GRAPH_CYCLE"}


def test_the_garbage_collector_is_enabled_again() -> None:
    assert gc.isenabled()
    expand(chain(10), ["y"])
    reasons_of(chain(10), ["nothing"])
    assert gc.isenabled()
    gc.disable()
    try:
        expand(chain(10), ["y"])
        assert not gc.isenabled()
    finally:
        gc.enable()
