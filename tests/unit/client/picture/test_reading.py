"""Tests what is read from a graph: nodes by the names that overrides use, wires, and the path."""

from __future__ import annotations

import pytest

import gradrule as gr
from gradrule._picture.facts import collect_facts
from gradrule._picture.reading import Structure, read_structure
from gradrule.v1.graph_pb2 import Graph
from tests.unit.client.picture.made import explained, function, graph, nested, node, took


def structure(of: bytes) -> Structure:
    return read_structure(Graph.FromString(of))


def wires(of: Structure) -> set[tuple[str, str]]:
    return {(of.leaves[wire.source].name, of.leaves[wire.target].name) for wire in of.wires}


def on_path(of: bytes, **said: list[gr.Resolution] | list[str]) -> set[str]:
    found = structure(of)
    facts = collect_facts(found, explained(of, **said))
    return {
        f"{leaf.function}:{leaf.name}" for leaf, fact in zip(found.leaves, facts.leaves, strict=True) if fact.on_path
    }


PATH = {
    ":x", ":block/in", ":block/call", "outer:block/call/call", "outer:block/call/i", "inner:block/call/call/s",
    "inner:block/call/call/m", ":loop", "body:loop/s", ":if", "yes:if/s", "no:if/z", ":y",
}  # fmt: skip


def test_functions_loops_and_branches_are_expanded_at_each_use() -> None:
    found = structure(nested())
    names = [leaf.name for leaf in found.leaves]
    assert sorted(names) == [
        "aside", "block/call", "block/call/call", "block/call/call/m", "block/call/call/s", "block/call/i", "block/in",
        "if", "if/s", "if/z", "loop", "loop/more", "loop/one", "loop/s", "loop/s", "loop/three", "pred", "start",
        "stop", "x", "y",
    ]  # fmt: skip
    assert {leaf.name for leaf in found.leaves if leaf.calls} == {"block/call", "block/call/call", "loop", "if"}


def test_wires_lead_through_arguments_and_results() -> None:
    assert wires(structure(nested())) == {
        ("x", "block/in"), ("block/in", "block/call/call/s"), ("block/in", "block/call/call/m"),
        ("block/call/call/s", "block/call/call/m"), ("block/call/call/m", "block/call/call"),
        ("block/call/call", "block/call/i"), ("block/call/i", "block/call"),
        ("start", "loop/more"), ("loop/one", "loop/more"), ("loop/more", "loop"), ("start", "loop/s"),
        ("loop/three", "loop/s"), ("block/call", "loop/s"), ("loop/s", "loop"),
        ("x", "pred"), ("start", "pred"), ("pred", "if"), ("loop", "if/s"), ("loop", "if/z"),
        ("if/s", "if"), ("if/z", "if"), ("x", "aside"), ("x", "stop"), ("if", "y"), ("stop", "y"),
    }  # fmt: skip


def test_the_path_is_computed_for_each_tensor() -> None:
    # The loop's counter, its condition, the branch's index and the stopped gradient are off it.
    assert on_path(nested()) == PATH


def test_a_tensor_reaches_another_variable_of_a_loop_in_a_later_round() -> None:
    body = function(
        "body", ["a", "b"], {"a_": "i:output:0", "b_": "n:y:0"}, node("i", "Identity", "a"), node("n", "Neg", "a")
    )
    cond = function("cond", ["a", "b"], {"c": "l:output:0"}, node("l", "Const"))
    swapped = function("body", ["a", "b"], {"a_": "b", "b_": "n:y:0"}, node("n", "Neg", "a"))
    for one, reached in ((body, True), (swapped, True)):
        of = graph(
            node("x", "Placeholder"),
            node("c", "Const"),
            node("loop", "While", "x", "c", cond="cond", body="body"),
            node("y", "Identity", "loop:1"),
            functions=[one, cond],
        )
        assert (":y" in on_path(of)) is reached
    # The second variable never reaches the first.
    of = graph(
        node("c", "Const"),
        node("x", "Placeholder"),
        node("loop", "While", "c", "x", cond="cond", body="body"),
        node("y", "Identity", "loop:0"),
        functions=[body, cond],
    )
    assert on_path(of) == set()


def test_nodes_that_the_server_does_not_report_are_off_the_path() -> None:
    said = ["block/in", "block/call/call/m", "block/call/i", "loop/s", "if/s", "y"]
    overrides = [took("block/call/call/s", "ste_sign", function="inner")]
    assert on_path(nested(), overrides=overrides, default_gradient_nodes=said) == PATH - {"no:if/z"}


def test_nodes_that_the_server_reports_are_on_the_path() -> None:
    assert ":aside" in on_path(nested(), default_gradient_nodes=["aside", "y"])


def test_equal_names_in_condition_and_body_are_distinguished_by_function() -> None:
    of = nested()
    found = structure(of)
    facts = collect_facts(found, explained(of, overrides=[took("loop/s", "ste_sign", function="body")]))
    ruled = [leaf.function for leaf, fact in zip(found.leaves, facts.leaves, strict=True) if fact.rule is not None]
    assert ruled == ["body"]


def test_a_rule_for_a_whole_call_applies_to_its_nodes() -> None:
    said = explained(
        nested(), overrides=[took("block/call", "Five", op="PartitionedCall")], default_gradient_nodes=["y"]
    )
    found = structure(said.graph)
    path = {
        leaf.name for leaf, fact in zip(found.leaves, collect_facts(found, said).leaves, strict=True) if fact.on_path
    }
    assert {"block/call", "block/call/call/s", "block/call/i"} <= path


def test_all_nodes_of_a_region_get_its_rule() -> None:
    of = graph(node("x", "Placeholder"), node("a", "Exp", "x"), node("b", "Log", "a"), node("y", "Neg", "b"))
    said = explained(
        of, overrides=[took("b", "log1pexp", nodes=("a", "b"), label="soft")], default_gradient_nodes=["y"]
    )
    facts = collect_facts(structure(of), said)
    assert [fact.rule for fact in facts.leaves] == [None, 0, 0, None]
    assert [fact.on_path for fact in facts.leaves] == [True] * 4


def test_inline_rules_are_distinguished_by_labels() -> None:
    of = graph(node("x", "Placeholder"), node("a", "Sign", "x"), node("y", "Neg", "a"))
    said = [took("a", "inline", label="one"), took("y", "inline", label="two"), took("x", "zero", label="no_gradient")]
    assert collect_facts(structure(of), explained(of, overrides=said)).rules == [
        "inline (one)",
        "inline (two)",
        "no gradient: zero",
    ]


def test_nodes_missing_in_the_picture_are_noted() -> None:
    said = explained(nested(), xs=["x", "weight"], overrides=[took("gone", "ste_sign", "off_path")])
    notes = collect_facts(structure(said.graph), said).notes
    assert notes == ["weight is not in the picture", "gone (off path, ste_sign) is not in the picture"]


def test_recursive_functions_are_not_expanded() -> None:
    again = function("again", ["v"], {"r": "call:output:0"}, node("call", "PartitionedCall", "v", f="again"))
    of = graph(node("x", "Placeholder"), node("y", "PartitionedCall", "x", f="again"), functions=[again])
    found = structure(of)
    assert len(found.leaves) < 100
    assert len(found.unexpanded) == 1


def test_expansion_of_exponentially_many_functions_is_limited() -> None:
    doubled = [
        function(f"f{level}", ["v"], {"r": "b:output:0"}, node("a", "PartitionedCall", "v", f=f"f{level + 1}"),
                 node("b", "PartitionedCall", "a:output:0", f=f"f{level + 1}"))
        for level in range(30)
    ]  # fmt: skip
    last = function("f30", ["v"], {"r": "n:y:0"}, node("n", "Neg", "v"))
    of = graph(node("x", "Placeholder"), node("y", "PartitionedCall", "x", f="f0"), functions=[*doubled, last])
    found = structure(of)
    assert len(found.leaves) <= 50_002
    assert found.unexpanded


@pytest.mark.parametrize(
    "of",
    [
        b"",
        graph(node("a", "Neg", "gone"), node("a", "Neg", "a:7"), node("", "", ":", "::", "^", "a:b:c")),
        graph(node("a", "Neg", "b"), node("b", "Neg", "a")),
        graph(
            node("a", "While", cond="cond", body="body"),
            functions=[function("cond", ["p"], {"r": "p"}), function("body", ["q"], {"r": "q"})],
        ),
        graph(node("a/" * 5000 + "a", "Neg"), *(node("a/" * depth + "a", "Neg") for depth in range(200))),
        graph(node("f", "f", "f"), functions=[function("f", [], {"r": "gone:y:0", "s": ""})]),
    ],
    ids=["empty", "names", "cycle", "functions", "deep", "recursion"],
)  # fmt: skip
def test_the_valid_part_of_a_broken_graph_is_drawn(of: bytes) -> None:
    said = explained(of, xs=["a"], ys=["a"])
    assert said.svg().startswith("<svg")
    assert said.html().startswith("<!doctype html>")


def test_bytes_that_are_no_graph_are_refused() -> None:
    with pytest.raises(gr.errors.InvalidGraphError):
        explained(b"\xff\xff\xff").svg()
