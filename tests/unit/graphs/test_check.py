"""Tests that each error of a graph is reported with its reason, its node and a hint."""

from __future__ import annotations

import pytest
import tensorflow as tf

from gradrule.v1.graph_pb2 import AttrValue, Function, Graph, NameAttrList, Node
from gradrule.v1.tensor_pb2 import Dt, Tensor, TensorShape
from gradrule_server import graphs
from gradrule_server.errors import GradruleError, Reason, reason_name
from tests.unit.graphs.helpers import (
    FLOAT,
    call,
    expand,
    findings_of,
    function,
    graph,
    node,
    nodes_of,
    only_finding,
    placeholder,
    reasons_of,
)

IDENTITY = function("id", ["a"], {"r": "i:output:0"}, [node("i", "Identity", "a")])


def test_attributes_that_follow_from_inputs_are_filled_in() -> None:
    expanded = expand(graph(placeholder(), node("y", "AddN", "x", "x")), ["y"])
    attrs = nodes_of(expanded)["y"].attr
    assert (attrs["T"].type, attrs["N"].i) == (Dt.DT_FLOAT, 2)
    assert expanded.dtypes["y"] == Dt.DT_FLOAT


@pytest.mark.parametrize("data", [b"garbage", b"\x0a\xff", b"\x0a\x03\x0a\x01\xff"])
def test_bytes_that_are_not_a_graph_are_refused(data: bytes) -> None:
    with pytest.raises(GradruleError) as caught:
        graphs.parse(data)
    assert caught.value.reason == Reason.ERROR_REASON_INVALID_GRAPH


@pytest.mark.parametrize("name", ["", "a b", "_a", "a:0", "a\u00e9", "^a", "a\n"])
def test_names_that_tensorflow_rejects_are_refused(name: str) -> None:
    finding = only_finding(graph(placeholder(name)), Reason.ERROR_REASON_INVALID_GRAPH)
    assert finding.node == name


def test_duplicate_nodes_and_functions_are_refused() -> None:
    made = graph(placeholder(), placeholder(), functions=[IDENTITY, IDENTITY])
    assert reasons_of(made, ["x"]) == ["DUPLICATE_NODE", "DUPLICATE_NODE"]


def test_functions_need_names() -> None:
    assert reasons_of(graph(placeholder(), functions=[Function()]), ["x"]) == ["INVALID_GRAPH"]


def test_node_with_the_name_of_an_argument_is_refused() -> None:
    body = function("f", ["a"], {"r": "a"}, [node("a", "NoOp")])
    assert "DUPLICATE_NODE" in reasons_of(graph(placeholder(), call("y", "f", "x"), functions=[body]), ["y"])


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("weigths", "'weights'"),
        ("weights:1", "it has 1"),
        ("weights:x", "not exist"),
        ("^weigths", "'weights'"),
        ("", "not exist"),
    ],
)
def test_dangling_inputs_are_refused(text: str, hint: str) -> None:
    made = graph(
        placeholder("weights"), node("y", "Identity", text, T=FLOAT) if text[:1] != "^" else node("y", "NoOp", text)
    )
    finding = only_finding(made, Reason.ERROR_REASON_DANGLING_INPUT)
    assert finding.node == "y"
    assert hint in finding.message


@pytest.mark.parametrize("text", ["i", "i:outptu:0", "i:output:1", "i:output:0:0", "a:1", "b", ""])
def test_dangling_inputs_in_functions_are_refused(text: str) -> None:
    body = function("f", ["a"], {"r": "j:output:0"}, [node("i", "Identity", "a"), node("j", "Identity", text, T=FLOAT)])
    finding = only_finding(
        graph(placeholder(), call("y", "f", "x"), functions=[body]), Reason.ERROR_REASON_DANGLING_INPUT
    )
    assert "'f'" in finding.message


def test_dangling_results_are_refused() -> None:
    body = function("f", ["a"], {"r": "nobody:output:0"}, [], done="nobody")
    made = graph(placeholder(), call("y", "f", "x"), functions=[body])
    assert reasons_of(made, ["y"]) == ["DANGLING_INPUT", "DANGLING_INPUT"]


def test_data_input_after_control_input_is_refused() -> None:
    only_finding(graph(placeholder(), node("y", "Identity", "^x", "x")), Reason.ERROR_REASON_INVALID_GRAPH)


def test_cycles_name_their_nodes() -> None:
    made = graph(
        placeholder(),
        node("a", "Add", "x", "c"),
        node("b", "Tanh", "a"),
        node("c", "Tanh", "b"),
        node("after", "Tanh", "c"),
        node("self", "NoOp", "^self"),
    )
    first, second = findings_of(made, ["x"])
    assert {reason_name(item.reason) for item in (first, second)} == {"GRAPH_CYCLE"}
    chain = first.message.split(": ")[1].rstrip(".").split(" → ")
    assert chain[0] == chain[-1]
    assert set(chain) == {"'a'", "'b'", "'c'"}
    assert chain.index("'b'") - chain.index("'a'") in (1, -2)
    assert "'self' → 'self'" in second.message


def test_two_cycles_are_two_findings() -> None:
    made = graph(*(node(f"{c}{i}", "Tanh", f"{c}{1 - i}", T=FLOAT) for c in "ab" for i in (0, 1)))
    assert reasons_of(made) == ["GRAPH_CYCLE"] * 2


def test_recursive_functions_are_refused() -> None:
    f = function("f", ["a"], {"r": "c:output:0"}, [call("c", "g", "a")])
    g = function("g", ["a"], {"r": "c:output:0"}, [call("c", "f", "a")])
    by_name = function("h", ["a"], {"r": "c:r:0"}, [node("c", "h", "a")])
    finding = only_finding(
        graph(placeholder(), call("y", "f", "x"), functions=[f, g, by_name]), Reason.ERROR_REASON_GRAPH_CYCLE
    )
    assert "'f'" in finding.message
    assert "'g'" in finding.message
    only_finding(graph(placeholder(), node("y", "h", "x"), functions=[by_name]), Reason.ERROR_REASON_GRAPH_CYCLE)


def test_recursion_through_a_function_attribute_is_refused() -> None:
    f = Function()
    f.signature.name = "f"
    f.signature.attr.add(name="F", type="func")
    inner = f.node_def.add()
    inner.CopyFrom(call("c", "f", results=0))
    inner.attr["f"].func.attr["F"].placeholder = "F"
    outer = node("y", "f", F=AttrValue(func=NameAttrList(name="f")))
    only_finding(graph(outer, functions=[f]), Reason.ERROR_REASON_GRAPH_CYCLE)


def test_recursion_with_attributes_that_grow_is_refused() -> None:
    f = Function()
    f.signature.name = "f"
    f.signature.attr.add(name="F", type="func")
    inner = f.node_def.add()
    inner.CopyFrom(call("c", "f", results=0))
    inner.attr["f"].func.attr["F"].func.name = "f"
    inner.attr["f"].func.attr["F"].func.attr["F"].placeholder = "F"
    outer = node("y", "f", F=AttrValue(func=NameAttrList(name="f")))
    only_finding(graph(outer, functions=[f]), Reason.ERROR_REASON_LIMIT_EXCEEDED)


def test_unknown_op_type_is_refused_with_a_suggestion() -> None:
    finding = only_finding(graph(placeholder(), node("y", "Matmul", "x", "x")), Reason.ERROR_REASON_UNKNOWN_OP_TYPE)
    assert "'MatMul'" in finding.message
    assert finding.node == "y"


def test_nodes_after_an_unknown_op_type_are_checked_too() -> None:
    made = graph(placeholder(), node("y", "Nope", "x"), node("z", "Add", "y", "x"), node("w", "Concat", "z"))
    assert reasons_of(made) == ["UNKNOWN_OP_TYPE", "TYPE_MISMATCH"]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (node("y", "Add", "x", "n"), "TYPE_MISMATCH"),
        (node("y", "Add", "x"), "TYPE_MISMATCH"),
        (node("y", "Tanh", "n"), "TYPE_MISMATCH"),
        (node("y", "Tanh", "x", T=AttrValue(i=1)), "INVALID_ATTR"),
        (node("y", "Tanh", "x", Tt=FLOAT), "INVALID_ATTR"),
        (node("y", "Cast", "x"), "INVALID_ATTR"),
        (node("y", "Tanh", "x", T=AttrValue(placeholder="T")), "INVALID_ATTR"),
        (node("y", "Split", "n", "x", num_split=AttrValue(i=30_000_000)), "LIMIT_EXCEEDED"),
        (call("y", "nobody", "x"), "INVALID_ATTR"),
        (call("y", "id", "x", "x"), "TYPE_MISMATCH"),
        (call("y", "id", "x", results=2), "TYPE_MISMATCH"),
        (node("y", "id", "n"), "TYPE_MISMATCH"),
    ],
)
def test_nodes_with_invalid_inputs_or_attributes_are_refused(wrong: Node, reason: str) -> None:
    findings = findings_of(graph(placeholder(), placeholder("n", Dt.DT_INT32), wrong, functions=[IDENTITY]), ["x"])
    assert reason in [reason_name(finding.reason) for finding in findings]
    assert "'y'" in findings[0].message


def test_result_type_that_differs_from_the_signature_is_refused() -> None:
    body = function("f", ["a"], {"r": "c:y:0"}, [node("c", "Cast", "a", DstT=AttrValue(type=Dt.DT_INT32))])
    only_finding(graph(placeholder(), call("y", "f", "x"), functions=[body]), Reason.ERROR_REASON_TYPE_MISMATCH)


def test_loop_body_with_other_types_is_refused() -> None:
    def body(name: str) -> AttrValue:
        return AttrValue(func=NameAttrList(name=name))

    two = function("two", ["a", "b"], {"r": "a", "s": "b"}, [])
    loop = node("y", "While", "x", cond=body("id"), body=body("two"))
    assert reasons_of(graph(placeholder(), loop, functions=[IDENTITY, two]), ["y"]) == ["TYPE_MISMATCH"] * 2


@pytest.mark.parametrize(
    ("made", "hint"),
    [
        (node("y", "MutexV2"), "creates a resource"),
        (node("y", "TemporaryVariable", dtype=FLOAT, shape=AttrValue(shape=TensorShape())), "use a tensor"),
        (node("y", "Switch", "x", "b"), "version 1"),
        (node("y", "Enter", "x", frame_name=AttrValue(s=b"f")), "version 1"),
        (placeholder("y", Dt.DT_RESOURCE), "feed the value"),
        (placeholder("y", Dt.DT_VARIANT), "feed the value"),
        (node("y", "SymbolicGradient", "x", Tout=AttrValue(list=AttrValue.ListValue(type=[1])),
              f=AttrValue(func=NameAttrList(name="id"))), "'f'"),
        (call("y", "holds_a_placeholder"), "argument"),
    ],
    ids=lambda value: value.op if isinstance(value, Node) else "",
)  # fmt: skip
def test_unsupported_ops_are_refused_with_an_alternative(made: Node, hint: str) -> None:
    inner = function("holds_a_placeholder", [], {"r": "p:output:0"}, [placeholder("p")])
    whole = graph(placeholder(), placeholder("b", Dt.DT_BOOL), made, functions=[IDENTITY, inner])
    finding = only_finding(whole, Reason.ERROR_REASON_UNSUPPORTED_OP, ["y"])
    assert hint in finding.message


def test_unsupported_nodes_that_no_result_needs_are_accepted() -> None:
    saver = node("saver", "MutexV2")
    assert "saver" not in nodes_of(expand(graph(placeholder(), saver), ["x"]))


def test_loop_of_version_one_is_refused_with_the_reason() -> None:
    with tf.Graph().as_default() as made:
        tf.compat.v1.disable_control_flow_v2()
        try:
            tf.compat.v1.while_loop(lambda i: i < 3, lambda i: i + 1, [tf.constant(0)], name="old")
        finally:
            tf.compat.v1.enable_control_flow_v2()
    finding = only_finding(
        Graph.FromString(made.as_graph_def().SerializeToString()), Reason.ERROR_REASON_UNSUPPORTED_OP
    )
    assert "version 1" in finding.message


@pytest.mark.parametrize(
    "limits",
    [graphs.Limits(nodes=3), graphs.Limits(inlined_nodes=4), graphs.Limits(call_depth=1)],
    ids=["nodes", "inlined", "depth"],
)
def test_limits_are_enforced(limits: graphs.Limits) -> None:
    outer = function("outer", ["a"], {"r": "c:output:0"}, [call("c", "id", "a")])
    made = graph(placeholder(), call("y", "outer", "x"), functions=[IDENTITY, outer])
    only_finding(made, Reason.ERROR_REASON_LIMIT_EXCEEDED, ["y"], limits=limits)
    expand(made, ["y"], limits=graphs.Limits(nodes=4, inlined_nodes=12, call_depth=2))


def test_exponentially_nested_calls_are_refused_before_they_are_copied() -> None:
    functions = [IDENTITY]
    for level in range(30):
        inner = "id" if level == 0 else f"f{level - 1}"
        calls = [call("b", inner, "a"), call("c", inner, "b:output:0")]
        functions.append(function(f"f{level}", ["a"], {"r": "c:output:0"}, calls))
    made = graph(placeholder(), call("y", "f29", "x"), functions=functions)
    only_finding(made, Reason.ERROR_REASON_LIMIT_EXCEEDED, ["y"])


def test_exponentially_growing_attributes_are_refused() -> None:
    functions = []
    for level in range(30):
        made = Function()
        made.signature.name = f"f{level}"
        made.signature.attr.add(name="F", type="func")
        if level:
            inner = made.node_def.add(name="c", op=f"f{level - 1}")
            for name in ("left", "right"):
                inner.attr["F"].func.name = "f0"
                inner.attr["F"].func.attr[name].placeholder = "F"
        functions.append(made)
    top = node("y", "f29", F=AttrValue(func=NameAttrList(name="f0")))
    assert "LIMIT_EXCEEDED" in reasons_of(graph(placeholder(), top, functions=functions), ["x"])


def test_small_constants_that_expand_to_gigabytes_are_refused() -> None:
    big = Tensor(dtype=Dt.DT_FLOAT, tensor_shape=TensorShape(dim=[TensorShape.Dim(size=2**30)]), float_val=[1.0])
    made = graph(node("c", "Const", value=AttrValue(tensor=big), dtype=FLOAT))
    only_finding(made, Reason.ERROR_REASON_LIMIT_EXCEEDED, ["c"])


def test_constant_whose_type_differs_from_its_node_is_refused() -> None:
    value = AttrValue(tensor=Tensor(dtype=Dt.DT_INT32, int_val=[1]))
    finding = only_finding(graph(node("c", "Const", value=value, dtype=FLOAT)), Reason.ERROR_REASON_INVALID_TENSOR)
    assert finding.node == "c"


def test_all_findings_are_reported_together() -> None:
    made = graph(
        placeholder(),
        placeholder(),
        node("a", "Nope", "x"),
        node("b", "Tanh", "nobody"),
        node("c", "Cast", "x"),
        node("d", "Add", "x"),
        node("e", "NoOp", "^e"),
    )
    assert reasons_of(made, ["nothing"], fed=["nothing"]) == [
        "DUPLICATE_NODE",
        "DANGLING_INPUT",
        "GRAPH_CYCLE",
        "UNKNOWN_OP_TYPE",
        "INVALID_ATTR",
        "TYPE_MISMATCH",
        "UNKNOWN_TENSOR",
        "UNKNOWN_FEED",
    ]


def test_hostile_graphs_get_a_bounded_number_of_findings() -> None:
    made = graph(*(node(f"n{i}", f"Nope{i}") for i in range(3000)))
    assert 100 <= len(findings_of(made)) <= 1000
