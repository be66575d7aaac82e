"""Graphs that would take too much memory or time are refused before they are parsed."""

from __future__ import annotations

import json
import tracemalloc

import pytest

import gradrule as gr
from gradrule._builder import graph_formats
from gradrule.v1.graph_pb2 import Graph
from gradrule_gateway import graphs
from gradrule_gateway.problems import Problem


@pytest.mark.parametrize(
    "body",
    [
        b"\x0a\x00" * 2_000_000,
        b"\x0a\x02\x1a\x00" * 1_000_000,
        b'{"node": [' + b",".join([b"{}"] * 3_500_000) + b"]}",
        b'{"node": [' + b",".join([b"[]"] * 3_500_000) + b"]}",
        b'{"node": [{"input": [' + b",".join([b'"a"'] * 7_000_000) + b"]}]}",
        b"node {}" + b"node<>" * 3_500_000,
    ],
    ids=["nodes", "inputs", "JSON objects", "JSON lists", "JSON strings", "text"],
)
def test_a_graph_of_many_tiny_parts_is_refused_without_much_memory(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Problem) as refusal:
            graphs.describe(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refusal.value.reason == "LIMIT_EXCEEDED"
    assert peak < 64 << 20


@pytest.mark.parametrize("kind", ["nodes", "nodes of functions"])
def test_a_graph_of_too_many_nodes_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = gr.Graph()
    x = graph.placeholder("x", "float32", [])
    for _ in range(9):
        x = graph.op("Square", x)
    data = graph.to_bytes()
    if kind != "nodes":
        message = Graph.FromString(data)
        function = message.library.function.add()
        function.signature.name = "f"
        function.node_def.extend(message.node)
        del message.node[1:]
        data = message.SerializeToString()
    monkeypatch.setattr(graphs, "_MAX_NODES", 11)
    graphs.describe(data)
    monkeypatch.setattr(graphs, "_MAX_NODES", 9)
    with pytest.raises(Problem, match="at most 9") as refusal:
        graphs.describe(data)
    assert refusal.value.reason == "LIMIT_EXCEEDED"


def test_the_structure_of_a_picture_has_the_same_limits() -> None:
    with pytest.raises(Problem) as refusal:
        graphs.draw(b"", b"\x0a\x00" * 2_000_000)
    assert (refusal.value.reason, refusal.value.violations[0].field) == ("LIMIT_EXCEEDED", "structure")


def test_the_page_gets_the_number_of_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MAX_NAMES", 2)
    graph = gr.Graph()
    for name in "abc":
        graph.placeholder(name, "float32", [])
    facts = json.loads(graphs.describe(graph.to_bytes())[2])
    assert (facts["nodes"], facts["nodeCount"]) == (["a", "b"], 3)


def node(size: int) -> bytes:
    """Returns a graph with one node, whose encoding has `size` bytes."""
    name = b"x" * (size - 15)
    return b"\x0a%c\x0a%c%b\x12\x0bPlaceholder" % (size, len(name), name)


@pytest.mark.parametrize("sign", "#{")
def test_bytes_whose_first_node_has_the_length_of_a_sign_of_text(sign: str) -> None:
    data = node(ord(sign))
    assert data[1:2] == sign.encode()
    assert len(Graph.FromString(data).node) == 1
    assert graph_formats.kind_of(data) == "bytes"


@pytest.mark.parametrize(("text", "kind"), [(b"\n# a\nnode {}", "text"), (b"\n{\n}", "JSON"), (b"\nnode{}", "text")])
def test_text_may_start_with_an_empty_line(text: bytes, kind: str) -> None:
    assert graph_formats.kind_of(text) == kind
