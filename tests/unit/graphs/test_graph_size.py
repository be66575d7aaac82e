"""Tests the limits for the size of a graph after names, attributes and gradients are copied for each use."""

from __future__ import annotations

import pytest

from gradrule.v1.errors_pb2 import ErrorReason
from gradrule.v1.graph_pb2 import AttrValue, Graph, Node
from gradrule.v1.tensor_pb2 import Dt, Tensor, TensorShape
from gradrule_server.errors import GradruleError
from gradrule_server.graphs import Limits
from tests.unit.graphs.helpers import FLOAT, call, expand, findings_of, function, graph, node, only_finding, placeholder
from tests.unit.graphs.test_embedded_rules import brings, custom_gradient, expanded

LIMIT = ErrorReason.ERROR_REASON_LIMIT_EXCEEDED


def constant(size: int) -> Node:
    shape = TensorShape(dim=[TensorShape.Dim(size=size)])
    value = AttrValue(tensor=Tensor(dtype=Dt.DT_FLOAT, tensor_shape=shape, tensor_content=bytes(4 * size)))
    return node("c", "Const", dtype=FLOAT, value=value)


def calling(names: list[str], elements: int = 1, nodes: int = 1) -> Graph:
    """Returns a chain of calls of a function with a constant."""
    inside = [constant(elements), node("n", "AddV2", "a", "c:output:0", T=FLOAT)]
    inside += [node(f"n{i}", "Neg", f"n{i - 1}:y:0" if i else "n:z:0", T=FLOAT) for i in range(nodes)]
    calls = [placeholder()]
    for name in names:
        calls.append(call(name, "f", calls[-1].name))
    return graph(*calls, functions=[function("f", ["a"], {"r": f"n{nodes - 1}:y:0"}, inside)])


def test_each_function_is_checked_once() -> None:
    """Its calls, each twice as many as those of the function before, would take years to follow."""
    functions = [function("f0", ["a"], {"r": "n:y:0"}, [node("n", "Neg", "a", T=FLOAT)])]
    for level in range(1, 60):
        body = [call("b", f"f{level - 1}", "a"), call("c", f"f{level - 1}", "b:output:0")]
        functions.append(function(f"f{level}", ["a"], {"r": "c:output:0"}, body))
    made = graph(placeholder(), call("y", "f59", "x"), functions=functions)
    found = findings_of(made, ["y"], limits=Limits(call_depth=100))
    assert [item.reason for item in found] == [LIMIT]
    assert "--max-inlined-nodes" in found[0].message
    assert "--max-call-depth" in findings_of(made, ["y"])[-1].message


def test_the_length_of_names_is_limited() -> None:
    longest = "n" * 1024
    expand(graph(placeholder(), node(longest, "Neg", "x")), [longest])
    found = only_finding(graph(placeholder(), node(f"{longest}n", "Neg", "x"), node("y", "Neg", "x")), LIMIT, ["y"])
    assert "1025" in found.message and "1024" in found.message
    assert len(found.message) < 500


def test_names_of_calls_count_for_each_node_inside() -> None:
    names = [f"{i:x<1000}" for i in range(10)]
    made = calling(names, nodes=1_000)
    expand(made, names[-1:], limits=Limits(inlined_bytes=12 << 20))
    found = only_finding(made, LIMIT, names[-1:], limits=Limits(inlined_bytes=9 << 20))
    assert "--max-inlined-bytes" in found.message


def test_names_of_branches_count_too() -> None:
    inside = [node(f"n{i}", "Neg", f"n{i - 1}:y:0" if i else "a", T=FLOAT) for i in range(1_000)]
    branch = function("f", ["a"], {"r": "n999:y:0"}, inside)
    made = graph(placeholder(), placeholder("p", Dt.DT_BOOL), functions=[branch])
    chosen = made.node.add(name="y" * 1000, op="StatelessIf", input=["p", "x"])
    chosen.attr["Tcond"].type = Dt.DT_BOOL
    for name in ("Tin", "Tout"):
        chosen.attr[name].list.type.append(Dt.DT_FLOAT)
    for name in ("then_branch", "else_branch"):
        chosen.attr[name].func.name = "f"
    expand(made, ["y" * 1000], limits=Limits(inlined_bytes=3 << 20))
    only_finding(made, LIMIT, ["y" * 1000], limits=Limits(inlined_bytes=1 << 20))


def test_constants_count_for_each_call() -> None:
    names = [f"c{i}" for i in range(300)]
    assert "--max-inlined-bytes" in only_finding(calling(names, 50_000), LIMIT, names[-1:]).message
    # A single call adds no bytes, however large the constant is.
    expand(calling(["y"], 50_000), ["y"], limits=Limits(inlined_bytes=1_000))


def many_regions(regions: int, nodes: int) -> Graph:
    """Returns a chain of regions that all have the same gradient."""
    chain = [node(f"n{i}", "Neg", f"n{i - 1}:y:0" if i else "dy", T=FLOAT) for i in range(nodes)]
    gradient = function("grad_f", ["dy"], {"dx": f"n{nodes - 1}:y:0"}, chain)
    knots = [
        custom_gradient(f"k{i}", f"k{i - 1}" if i else "x", f"k{i - 1}" if i else "x", region=f"f{i}")
        for i in range(regions)
    ]
    return brings(graph(placeholder(), *knots, node("y", "Neg", f"k{regions - 1}"), functions=[gradient]), G="grad_f")


def test_a_gradient_is_written_once_for_all_regions() -> None:
    found, _ = expanded(many_regions(20, 10))
    assert len(found.embedded_rules) == 20
    assert len({id(data) for data in found.embedded_rules.values()}) == 1
    assert set(found.embedded_rule_nodes.values()) == {11}


@pytest.mark.parametrize("limits", [Limits(inlined_nodes=20_000), Limits(inlined_bytes=100_000)])
def test_gradients_count_for_each_region(limits: Limits) -> None:
    with pytest.raises(GradruleError) as refusal:
        expanded(many_regions(100, 500), limits=limits)
    (finding,) = refusal.value.findings
    assert finding.reason == LIMIT
    assert "--max-inlined" in finding.message and "region" in finding.message


@pytest.mark.parametrize(("sizes", "told"), [([2**31, 2**31], True), ([-1, 4], False), ([2**20], False)])
def test_unused_branch_outputs_are_constants_of_limited_size(sizes: list[int], told: bool) -> None:
    shape = AttrValue(shape=TensorShape(dim=[TensorShape.Dim(size=size) for size in sizes]))
    made = graph(node("y", "FakeParam", dtype=FLOAT, shape=shape))
    if told:
        assert "--max-constant-bytes" in only_finding(made, LIMIT, ["y"]).message
    else:
        expand(made, ["y"])


def test_the_largest_rank_is_a_setting() -> None:
    shape = AttrValue(shape=TensorShape(dim=[TensorShape.Dim(size=1)] * 9))
    made = graph(node("y", "Placeholder", dtype=FLOAT, shape=shape))
    assert any("--max-rank" in found.message for found in findings_of(made, ["y"]))
    expand(made, ["y"], limits=Limits(rank=9))
