"""Tests contexts of the builder: no override is lost without an error."""

from __future__ import annotations

from typing import Any

import pytest

import gradrule as gr
from gradrule._messages import call_arguments, request_messages


def graph() -> tuple[gr.Graph, gr.TensorHandle]:
    g = gr.Graph()
    return g, g.placeholder("x", "float32", [None])


def test_a_context_without_a_node_of_its_op_type_is_refused() -> None:
    g, x = graph()
    with (
        pytest.raises(gr.errors.UnmatchedOverrideError, match=r"'Relu'.*only Relu6, Sign\. Did you mean 'Relu6'") as e,
        g.gradient_override_map({"Relu": "r", "Sign": "s"}),
    ):
        g.relu6(g.sign(x))
    assert [detail.field for detail in e.value.details] == ["gradient_override_map['Relu']"]


def test_an_empty_context_names_every_op_type_without_a_node() -> None:
    g, x = graph()
    g.sign(x)
    with (
        pytest.raises(gr.errors.UnmatchedOverrideError, match="nor any other node") as e,
        g.gradient_override_map({"Sign": "s", "Relu": gr.Rule("dy")}),
    ):
        pass
    assert "gradient_override_map['Relu']" in str(e.value)
    # The context is left: nodes made later are not given its rule.
    assert "_gradient_op_type" not in g.sign(x).node.attrs


def test_nodes_of_an_inner_context_count_for_the_outer_one() -> None:
    g, x = graph()
    with g.gradient_override_map({"Sign": "outer"}), g.gradient_override_map({"Sign": "inner"}):
        y = g.sign(x)
    assert y.node.attrs["_gradient_op_type"].s == b"inner"


def test_an_inner_context_counts_its_own_nodes_only() -> None:
    g, x = graph()
    with g.gradient_override_map({"Sign": "outer"}):
        g.sign(x)
        with pytest.raises(gr.errors.UnmatchedOverrideError), g.gradient_override_map({"Sign": "inner"}):
            g.relu(x)


def test_optional_contexts_may_match_no_node() -> None:
    g, x = graph()
    with g.gradient_override_map({"Relu": "r"}, optional=True), g.gradient_override_map({}):
        g.sign(x)


def test_an_error_inside_a_context_is_raised_unchanged() -> None:
    g, _ = graph()
    with pytest.raises(ZeroDivisionError), g.gradient_override_map({"Sign": "s"}):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [("Sign", gr.errors.InvalidOverrideError), ({3: "r"}, gr.errors.UnknownOpTypeError)],
)
def test_overrides_that_are_not_a_map_are_refused(overrides: Any, kind: type[Exception]) -> None:
    g, _ = graph()
    with pytest.raises(kind), g.gradient_override_map(overrides):
        pass


@pytest.mark.parametrize("value", [gr.Rule("2 * dy"), ("ste", {"threshold": 2.0})], ids=["rule", "params"])
def test_bytes_that_would_lose_an_override_are_refused(value: Any) -> None:
    g, x = graph()
    with g.gradient_override_map({"Sign": value}):
        g.sign(x, name="s")
    with pytest.raises(gr.errors.InvalidOverrideError, match=r"node 's' the rule .*only the name"):
        g.to_bytes()
    with pytest.raises(gr.errors.InvalidOverrideError, match="'s'"):
        gr.Rule(graph=g).definition()
    spec, _ = request_messages.program_spec(g, call_arguments.ProgramArguments(ys="s", xs="x"))
    assert [override.selector.node for override in spec.overrides] == ["s"]
    assert [node.name for node in gr.Graph.from_bytes(spec.graph.serialized).find()] == ["x", "s"]


def test_a_context_gives_one_override_to_all_of_its_nodes() -> None:
    g, x = graph()
    for optional in (False, True):
        with g.gradient_override_map({"Sign": ("ste", {"threshold": 2.0})}, optional=optional):
            g.sign(x)
            g.sign(x)
    spec, _ = request_messages.program_spec(g, call_arguments.ProgramArguments(ys="Sign", xs="x"))
    found = [(list(one.selector.nodes), one.optional, one.part_of_graph) for one in spec.overrides]
    assert found == [(["Sign", "Sign_1"], False, True), (["Sign_2", "Sign_3"], True, True)]


def test_optional_contexts_mark_their_nodes() -> None:
    g, x = graph()
    with g.gradient_override_map({"Sign": "ste"}), g.gradient_override_map({"Relu": "r"}, optional=True):
        assert "_gradrule_optional" not in g.sign(x).node.attrs
        assert g.relu(x).node.attrs["_gradrule_optional"].b


def test_bytes_hold_names_of_rules() -> None:
    g, x = graph()
    with g.gradient_override_map({"Sign": "ste"}):
        g.sign(x, name="s")
    assert gr.Graph.from_bytes(g.to_bytes()).node("s").attrs["_gradient_op_type"].s == b"ste"
