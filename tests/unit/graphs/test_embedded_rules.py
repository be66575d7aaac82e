"""Tests how gradients that a graph contains are read, checked and expanded."""

from __future__ import annotations

from typing import Any

import pytest

from gradrule.v1 import override_pb2
from gradrule.v1.graph_pb2 import AttrValue, Function, Graph, Node
from gradrule_server import graphs
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.graphs import Expanded, ExpandRequest, Limits, OverrideSpec, expand
from tests.unit.graphs.helpers import FLOAT, call, function, graph, node, placeholder

GRADIENT = "_gradient_op_type"


def selector(op_type: str = "", region: str = "") -> override_pb2.Selector:
    return override_pb2.Selector(op_type=op_type, region_name=region)


def identity_n(name: str, *inputs: str, **notes: Any) -> Node:
    """Returns an IdentityN of floats; notes: `gradient`, `outputs`, `inputs`, `region`."""
    made = node(name, "IdentityN", *inputs, T=AttrValue(list=AttrValue.ListValue(type=[FLOAT.type] * len(inputs))))
    for note, value in notes.items():
        attr = GRADIENT if note == "gradient" else f"_gradrule_{note}"
        made.attr[attr].CopyFrom(AttrValue(i=value) if isinstance(value, int) else AttrValue(s=value.encode()))
    return made


def custom_gradient(name: str, *inputs: str, gradient: str = "G", region: str = "f") -> Node:
    """Returns a custom-gradient node of one result and one input."""
    return identity_n(name, *inputs, gradient=gradient, region=region, outputs=1, inputs=1)


def doubling(name: str = "grad_f", *more: Node) -> Function:
    """Returns a gradient function that computes 2 · dy."""
    return function(name, ["dy"], {"dx": "twice:z:0"}, [node("twice", "AddV2", "dy", "dy"), *more])


def brings(made: Graph, **gradients: str) -> Graph:
    for name, of in gradients.items():
        made.library.registered_gradients.add(gradient_func=of, registered_op_type=name)
    return made


def simple(*functions: Function, **gradients: str) -> Graph:
    """Returns the graph y = f(x), where f is Sign with a custom-gradient node."""
    nodes = [placeholder(), node("s", "Sign", "x"), custom_gradient("y", "s", "x")]
    return brings(graph(*nodes, functions=functions), **gradients)


class RuleIndices:
    """Returns new rule indices, like a table of rules."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def add_embedded_rule(self, label: str) -> int:
        self.labels.append(label)
        return len(self.labels) - 1


def expanded(
    made: Graph, *specs: OverrideSpec, ys: str = "y", limits: Limits | None = None
) -> tuple[Expanded, RuleIndices]:
    indices = RuleIndices()
    request = ExpandRequest(ys=[ys], xs=["x"], overrides=specs, add_embedded_rule=indices.add_embedded_rule)
    return expand(made, request, limits), indices


def refused(made: Graph, **more: Any) -> dict[str, str]:
    """Returns the messages by reason."""
    with pytest.raises(GradruleError) as caught:
        expanded(made, **more)
    return {reason_name(item.reason): item.message for item in caught.value.findings}


def test_a_gradient_becomes_the_graph_of_a_rule() -> None:
    found, indices = expanded(simple(doubling(), G="grad_f"))
    assert indices.labels == ["f"]
    (match,) = found.matches
    assert (match.resolution.node, match.resolution.rule, match.resolution.label, match.rule) == ("y", "f", "f", 0)
    (mark,) = found.marks
    assert (mark.outputs, mark.HasField("inputs"), mark.every_order, mark.op_type) == (1, False, True, "IdentityN")
    rule = graphs.parse(found.embedded_rules[0])
    assert [(item.name, item.op) for item in rule.node] == [
        ("dy", "Placeholder"),
        ("inside/twice", "AddV2"),
        ("dx", "Identity"),
    ]
    # The engine gets a mark and none of the client attributes.
    (tied,) = (item for item in graphs.parse(found.graph_bytes).node if item.op == "IdentityN")
    assert {name for name in tied.attr if name.startswith("_")} == {GRADIENT, "_gradrule_mark"}


def test_a_gradient_requested_twice_is_expanded_once() -> None:
    nodes = [
        placeholder(),
        node("a", "Sign", "x"),
        custom_gradient("b", "a", "x"),
        node("c", "Sign", "b"),
        custom_gradient("y", "c", "b"),
    ]
    found, indices = expanded(brings(graph(*nodes, functions=[doubling()]), G="grad_f"))
    assert indices.labels == ["f"]
    assert [match.resolution.node for match in found.matches] == ["b", "y"]


def test_calls_in_a_gradient_are_inlined() -> None:
    inner = function("inner", ["a"], {"r": "n:y:0"}, [node("n", "Neg", "a")])
    gradient = function("grad_f", ["dy"], {"dx": "c:output:0"}, [call("c", "inner", "dy")])
    found, _ = expanded(simple(gradient, inner, G="grad_f"))
    assert [item.op for item in graphs.parse(found.embedded_rules[0]).node] == ["Placeholder", "Neg", "Identity"]


def test_a_gradient_may_use_the_function_whose_gradient_it_is() -> None:
    again = custom_gradient("again", "dy", "dy")
    gradient = function("grad_f", ["dy"], {"dx": "again:output:0"}, [again])
    found, indices = expanded(simple(gradient, G="grad_f"))
    assert indices.labels == ["f"]
    assert [(mark.node, mark.rule) for mark in found.marks] == [("y", 0), ("G/again", 0)]


def test_an_embedded_gradient_may_request_another_one() -> None:
    outer = function(
        "grad_f", ["dy"], {"dx": "inner:output:0"}, [custom_gradient("inner", "dy", "dy", gradient="H", region="h")]
    )
    found, indices = expanded(simple(outer, doubling("grad_h"), G="grad_f", H="grad_h"))
    assert indices.labels == ["f", "h"]
    assert [(mark.node, mark.rule, mark.outputs) for mark in found.marks] == [("y", 0, 1), ("G/inner", 1, 1)]
    # Matches list only nodes of the uploaded graph.
    assert [match.resolution.node for match in found.matches] == ["y"]


def test_gradients_that_request_others_do_not_nest() -> None:
    functions, gradients = [doubling("grad_40")], {"G40": "grad_40"}
    for number in range(40):
        inner = custom_gradient("inner", "dy", "dy", gradient=f"G{number + 1}", region=f"f{number}")
        functions.append(function(f"grad_{number}", ["dy"], {"dx": "inner:output:0"}, [inner]))
        gradients[f"G{number}"] = f"grad_{number}"
    nodes = [placeholder(), node("s", "Sign", "x"), custom_gradient("y", "s", "x", gradient="G0")]
    found, _ = expanded(brings(graph(*nodes, functions=functions), **gradients), limits=Limits(call_depth=32))
    assert len(found.embedded_rules) == 41


def test_overrides_do_not_apply_inside_embedded_gradients() -> None:
    gradient = function("grad_f", ["dy"], {"dx": "n:y:0"}, [node("n", "Neg", "dy")])
    made = simple(gradient, G="grad_f")
    made.node.append(node("z", "Neg", "y"))
    found, _ = expanded(made, OverrideSpec(selector("Neg"), 7, "r", "Neg"), ys="z")
    assert [match.resolution.node for match in found.matches] == ["y", "z"]
    assert [mark.node for mark in found.marks] == ["y", "z"]


def test_override_of_a_named_region_precedes_the_embedded_gradient() -> None:
    spec = OverrideSpec(selector(region="f"), 7, "r", "mine")
    found, indices = expanded(simple(doubling(), G="grad_f"), spec)
    assert indices.labels == []
    (mark,) = found.marks
    assert (mark.rule, mark.outputs, mark.inputs, mark.every_order) == (7, 1, 1, False)


def test_default_on_a_named_region_uses_the_gradients_of_its_nodes() -> None:
    spec = OverrideSpec(selector(region="f"), label="mine")
    (mark,) = expanded(simple(doubling(), G="grad_f"), spec)[0].marks
    assert (mark.rule, mark.outputs) == (graphs.OWN_GRADIENT, 0)


def test_control_outputs_run_before_the_results_of_a_gradient() -> None:
    check = node("check", "Assert", "true:output:0", "dy", T=AttrValue(list=AttrValue.ListValue(type=[FLOAT.type])))
    true = node("true", "Const", dtype=AttrValue(type=10), value=AttrValue(tensor={"dtype": 10, "bool_val": [True]}))
    gradient = function("grad_f", ["dy"], {"dx": "dy"}, [true, check], done="check")
    rule = graphs.parse(expanded(simple(gradient, G="grad_f"))[0].embedded_rules[0])
    (result,) = (item for item in rule.node if item.name == "dx")
    assert list(result.input) == ["dy:0", "^inside/check"]


def test_unsupported_ops_are_refused_in_embedded_gradients() -> None:
    fed = placeholder("fed")
    takes = function("grad_f", ["dy"], {"dx": "m:z:0"}, [fed, node("m", "Mul", "dy", "fed:output:0")])
    assert "'G/fed'" in refused(simple(takes, G="grad_f"))["UNSUPPORTED_OP"]
    # Nodes that no result needs are removed.
    expanded(simple(doubling("grad_f", fed), G="grad_f"))


def test_gradients_count_as_nodes() -> None:
    made = simple(doubling("grad_f", *(node(f"n{index}", "Neg", "dy") for index in range(50))), G="grad_f")
    expanded(made, limits=Limits(inlined_nodes=55))
    assert "inlined" in refused(made, limits=Limits(inlined_nodes=54))["LIMIT_EXCEEDED"]


def test_two_functions_for_one_gradient_name_are_refused() -> None:
    made = brings(simple(doubling(), doubling("other"), G="grad_f"), G="other")
    assert "'G'" in refused(made)["DUPLICATE_NODE"]


@pytest.mark.parametrize(
    ("notes", "word"),
    [
        ({"outputs": 1}, "_gradrule_inputs"),
        ({"inputs": 1}, "_gradrule_outputs"),
        ({"outputs": 0, "inputs": 1}, "_gradrule_outputs"),
        ({"outputs": 1, "inputs": -1}, "_gradrule_inputs"),
        ({"outputs": 1, "inputs": 2}, "3 inputs; it has 2"),
        ({"outputs": 2**62, "inputs": 2**62}, "it has 2"),
        ({"outputs": "many", "inputs": 1}, "_gradrule_outputs"),
        ({"region": "f"}, "_gradrule_outputs"),
    ],
)
def test_invalid_attributes_of_custom_gradient_nodes_are_refused(notes: dict[str, Any], word: str) -> None:
    nodes = [placeholder(), node("s", "Sign", "x"), identity_n("y", "s", "x", gradient="G", **notes)]
    made = brings(graph(*nodes, functions=[doubling()]), G="grad_f")
    assert word in refused(made)["INVALID_GRAPH"]


def test_only_results_of_a_custom_gradient_node_may_be_used() -> None:
    made = simple(doubling(), G="grad_f")
    made.node.append(node("z", "Neg", "y:1"))
    assert "'z' takes output 1 of 'y'" in refused(made)["INVALID_GRAPH"]


def test_a_plain_op_gets_a_gradient_by_name() -> None:
    made = brings(graph(placeholder(), node("y", "Sign", "x"), functions=[doubling()]), G="grad_f")
    made.node[1].attr[GRADIENT].s = b"G"
    found, indices = expanded(made)
    assert (indices.labels, found.matches[0].resolution.label, found.marks[0].outputs) == (["G"], "G", 0)


def test_a_call_gets_a_gradient_by_name() -> None:
    inner = function("inner", ["a"], {"r": "n:y:0"}, [node("n", "Sign", "a")])
    made = brings(graph(placeholder(), call("y", "inner", "x"), functions=[inner, doubling()]), G="grad_f")
    made.node[1].attr[GRADIENT].s = b"G"
    found, _ = expanded(made)
    assert [(match.resolution.node, match.rule) for match in found.matches] == [("y", 0)]
