"""Tests names, feeds, control dependencies and pruning of expanded graphs."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gradrule.v1.graph_pb2 import AttrValue, Function, Graph, NameAttrList
from gradrule.v1.override_pb2 import Selector
from gradrule.v1.tensor_pb2 import Dt, Tensor, TensorShape
from gradrule_server import graphs
from gradrule_server.errors import Reason
from gradrule_server.graphs.ir import Limits
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
    run,
)

INNER = function("inner", ["a"], {"r": "s:y:0"}, [node("s", "Sign", "a"), node("t", "Relu", "a")])


def gradients(expanded: graphs.Expanded, y: str, x: str, feeds: dict[str, object]) -> object:
    """Runs `tf.gradients` on the expanded graph, with TensorFlow's own gradient for every node."""
    made = tf.compat.v1.GraphDef.FromString(expanded.graph_bytes)
    for item in made.node:
        item.attr.pop("_gradient_op_type", None)
    with tf.Graph().as_default() as imported:
        tf.import_graph_def(made, name="")
        tensor = imported.get_tensor_by_name
        gradient = tf.gradients(tensor(expanded.tensor_names[y]), tensor(expanded.tensor_names[x]))[0]
        if gradient is None:
            return None
        with tf.compat.v1.Session(graph=imported) as session:
            return session.run(gradient, feeds)


def test_inlined_nodes_are_named_after_their_call() -> None:
    made = graph(placeholder(), call("c", "inner", "x"), node("y", "Tanh", "c"), functions=[INNER])
    expanded = expand(made, ["y"])
    assert set(nodes_of(expanded)) == {"x", "c/s", "y"}
    assert expanded.tensor_names == {"y": "y:0"}


def test_inlined_nodes_get_unused_names() -> None:
    made = graph(
        placeholder(),
        call("c", "inner", "x"),
        node("c/s", "Tanh", "c"),
        node("c/s_1", "Tanh", "c/s"),
        functions=[INNER],
    )
    expanded = expand(
        made, ["c/s_1"], ys=["c/s_1"], xs=["x"], overrides=[graphs.OverrideSpec(Selector(op_type="Sign"), label="o")]
    )
    assert {name: item.op for name, item in nodes_of(expanded).items()} == {
        "x": "Placeholder",
        "c/s": "Tanh",
        "c/s_1": "Tanh",
        "c/s_2": "Sign",
    }
    assert [mark.node for mark in expanded.marks] == ["c/s_2"]


def test_nodes_that_no_result_needs_are_removed() -> None:
    made = graph(placeholder(), placeholder("z"), node("y", "Tanh", "x"), node("w", "Add", "z", "y"))
    expanded = expand(made, ["y"])
    assert set(nodes_of(expanded)) == {"x", "y"}
    assert [item.name for item in expanded.inputs] == ["x"]
    assert expanded.placeholders == ["x", "z"]
    for more in ({"xs": ["z"]}, {"grad_y_tensors": ["z"]}, {"fed": ["z"]}):
        assert [item.name for item in expand(made, ["y"], **more).inputs] == ["x", "z"]
    stopped = expand(made, ["y"], stop_gradients=["z", "y"])
    assert [item.name for item in stopped.inputs] == ["x"]
    assert stopped.tensor_names == {"y": "y:0"}


def test_inputs_have_type_shape_and_default() -> None:
    shape = TensorShape(dim=[TensorShape.Dim(size=-1), TensorShape.Dim(size=3)])
    source = placeholder()
    source.attr["shape"].shape.CopyFrom(shape)
    made = graph(
        source,
        placeholder("n", Dt.DT_INT32),
        node("d", "PlaceholderWithDefault", "x", shape=AttrValue(shape=shape)),
        node("y", "Reshape", "d", "n"),
    )
    plain = expand(made, ["y:0"])
    assert [(item.name, item.dtype, item.optional) for item in plain.inputs] == [
        ("x", Dt.DT_FLOAT, False),
        ("n", Dt.DT_INT32, False),
        ("d", Dt.DT_FLOAT, True),
    ]
    assert plain.inputs[0].shape == shape
    assert plain.inputs[1].shape.unknown_rank
    assert plain.dtypes["y:0"] == Dt.DT_FLOAT
    fed = expand(made, ["y"], fed=["d"])
    assert [(item.name, item.optional) for item in fed.inputs] == [("n", False), ("d", False)]
    assert fed.inputs[1].shape == shape
    assert nodes_of(fed)["d"].op == "Placeholder"


def test_a_fed_tensor_is_not_computed() -> None:
    made = graph(placeholder(), node("h", "Exp", "x"), node("y", "Tanh", "h"))
    expanded = expand(made, ["y", "h"], fed=["h:0"])
    assert set(nodes_of(expanded)) == {"h", "y"}
    assert [item.name for item in expanded.inputs] == ["h"]
    assert run(expanded.graph_bytes, ["y:0", expanded.tensor_names["h"]], {"h": 0.0}) == [0.0, 0.0]
    assert gradients(expand(made, ["y"], xs=["h"], fed=["h"]), "y", "h", {"h:0": 0.0}) == 1.0


def test_feeding_some_outputs_of_a_node() -> None:
    made = graph(
        placeholder(),
        node("axis", "Const", dtype=AttrValue(type=Dt.DT_INT32), value=AttrValue(tensor=Tensor(dtype=Dt.DT_INT32))),
        node("h", "Split", "axis", "x", num_split=AttrValue(i=3)),
        node("y", "AddN", "h", "h:1", "h:2"),
        node("late", "NoOp", "^h"),
        node("z", "Identity", "y", "^late"),
    )
    x = np.array([1.0, 2.0, 3.0], np.float32)
    fed = expand(made, ["z", "h", "h:1", "h:2"], fed=["h:1"])
    assert [item.name for item in fed.inputs] == ["x", "h:1"]
    got = run(fed.graph_bytes, [fed.tensor_names[name] for name in ("z", "h", "h:1", "h:2")], {"x": x, "h:1": [50.0]})
    assert [list(value) for value in got] == [[54.0], [1.0], [50.0], [3.0]]
    all_fed = expand(made, ["z"], fed=["h", "h:1", "h:2"])
    assert "x" not in nodes_of(all_fed)
    assert "axis" not in nodes_of(all_fed)
    both = expand(made, ["z"], fed=["h:2", "h"])
    assert list(run(both.graph_bytes, ["z:0"], {"x": x, "h:0": [10.0], "h:2": [0.5]})[0]) == [12.5]


def test_a_fed_call_output_changes_nothing_inside_the_call() -> None:
    body = function("f", ["a"], {"r": "e:y:0", "s": "t:y:0"}, [node("e", "Exp", "a"), node("t", "Tanh", "e:y:0")])
    made = graph(placeholder(), call("c", "f", "x", results=2), node("y", "AddN", "c", "c:1"), functions=[body])
    expanded = expand(made, ["y"], fed=["c"])
    assert run(expanded.graph_bytes, ["y:0"], {"x": 0.0, "c:0": 10.0})[0] == pytest.approx(10 + np.tanh(1.0))


def test_gradient_with_respect_to_a_call_output_is_that_of_its_uses_outside() -> None:
    body = function("f", ["a"], {"r": "e:y:0", "s": "t:y:0"}, [node("e", "Exp", "a"), node("t", "Neg", "e:y:0")])
    made = graph(placeholder(), call("c", "f", "x", results=2), node("y", "AddN", "c", "c:1"), functions=[body])
    assert gradients(expand(made, ["y"], ys=["y"], xs=["c"]), "y", "c", {"x:0": 0.0}) == 1.0
    passed = function("g", ["a"], {"r": "a"}, [])
    made = graph(placeholder(), call("c", "g", "x"), node("y", "AddN", "c", "x"), functions=[passed])
    assert gradients(expand(made, ["y"], ys=["y"], xs=["c"]), "y", "c", {"x:0": 0.0}) == 1.0
    assert gradients(expand(made, ["y"], ys=["y"], xs=["x"]), "y", "x", {"x:0": 0.0}) == 2.0


def ancestors(expanded: graphs.Expanded, name: str) -> set[str]:
    """Returns the nodes that must run before a node."""
    written, found, pending = nodes_of(expanded), set(), [name]
    while pending:
        for text in written[pending.pop()].input:
            source = text.removeprefix("^").partition(":")[0]
            if source not in found:
                found.add(source)
                pending.append(source)
    return found


def test_control_inputs_of_a_call_apply_to_all_inner_nodes() -> None:
    zero = node("k", "Const", dtype=FLOAT, value=AttrValue(tensor=Tensor(dtype=Dt.DT_FLOAT)))
    leaf = function("leaf", ["a"], {"r": "k:output:0"}, [zero])
    inside = [call("i", "leaf", "a"), node("n", "Neg", "a"), node("z", "Add", "n:y:0", "i:output:0")]
    outer = function("outer", ["a"], {"r": "z:z:0", "p": "a"}, inside)
    made = graph(
        placeholder(),
        node("first", "NoOp"),
        node("second", "NoOp"),
        call("c", "outer", "x", "^first", "^second", results=2, data_inputs=1),
        functions=[leaf, outer],
    )
    expanded = expand(made, ["c", "c:1"])
    for inner in ("c/i/k", "c/n", "c/z", expanded.tensor_names["c:1"].partition(":")[0]):
        assert {"first", "second"} <= ancestors(expanded, inner), inner
    waiting = call("c", "outer", "x", "^first", results=2, data_inputs=1)
    single = expand(graph(placeholder(), node("first", "NoOp"), waiting, functions=[leaf, outer]), ["c"])
    assert "first" in ancestors(single, "c/i/k")
    assert not {name for name, item in nodes_of(single).items() if item.op == "NoOp"} - {"first"}


def test_control_dependency_on_a_call_waits_for_results_and_side_effects() -> None:
    body = function(
        "f", ["a"], {"r": "n:y:0"}, [node("n", "Neg", "a"), node("effect", "NoOp", "^n"), node("other", "NoOp")],
        done="effect",
    )  # fmt: skip
    outer = function("g", ["a"], {"r": "c:output:0"}, [call("c", "f", "a")], inside="c")
    made = graph(placeholder(), call("c", "g", "x"), node("y", "Tanh", "x", "^c"), functions=[body, outer])
    expanded = expand(made, ["y"])
    assert {"c/c/n", "c/c/effect"} <= ancestors(expanded, "y")
    assert "c/c/other" not in nodes_of(expanded)


def test_side_effects_in_order_as_in_tensorflow(capfd: pytest.CaptureFixture[str]) -> None:
    @tf.function(autograph=False)
    def inner(x: tf.Tensor) -> tf.Tensor:
        tf.print("inner", x)
        return x + 1.0

    @tf.function(autograph=False)
    def outer(x: tf.Tensor) -> tf.Tensor:
        tf.print("before")
        y = inner(x)
        tf.print("between")
        return inner(y)

    concrete = outer.get_concrete_function(tf.TensorSpec([], tf.float32, name="x"))
    made = Graph.FromString(concrete.graph.as_graph_def().SerializeToString())
    fetch = concrete.outputs[0].name
    expanded = expand(made, [fetch], limits=Limits(trusted=True))
    capfd.readouterr()
    run(expanded.graph_bytes, [expanded.tensor_names[fetch]], {"x": 1.0})
    assert capfd.readouterr().err.split("\n")[:4] == ["before", "inner 1", "between", "inner 2"]


def test_list_arguments_of_functions() -> None:
    body = Function(node_def=[node("s", "AddN", "many", "many:1", "one")], ret={"r": "s:sum:0", "all": "many"})
    signature = body.signature
    signature.name = "f"
    signature.input_arg.add(name="many", type_list_attr="L")
    signature.input_arg.add(name="one", type=Dt.DT_FLOAT)
    signature.output_arg.add(name="r", type=Dt.DT_FLOAT)
    signature.output_arg.add(name="all", type_list_attr="L")
    signature.attr.add(name="L", type="list(type)")
    made = graph(
        placeholder(), placeholder("z"), node("c", "f", "x", "x", "z"), node("y", "AddN", "c", "c:2"), functions=[body]
    )
    expanded = expand(made, ["y", "c:1"])
    assert run(expanded.graph_bytes, list(expanded.tensor_names.values()), {"x": 1.0, "z": 5.0}) == [8.0, 1.0]
    body.ret["all"] = "one"
    made.library.function[0].CopyFrom(body)
    only_finding(made, Reason.ERROR_REASON_DANGLING_INPUT, ["y"])


def test_internal_attributes_that_affect_execution_are_kept_if_valid() -> None:
    made = placeholder()
    made.attr["_output_shapes"].s = b"nonsense"
    made.attr["_class"].list.s.append(b"loc:@x")
    made.device = "/gpu:7"
    loop = node(
        "y", "While", "x", cond=AttrValue(func=NameAttrList(name="c")), body=AttrValue(func=NameAttrList(name="b"))
    )
    loop.attr["_num_original_outputs"].i = 99
    loop.attr["_lower_using_switch_merge"].b = True
    less = function("c", ["a"], {"r": "l:z:0"}, [node("l", "Less", "a", "a")])
    less.signature.output_arg[0].type = Dt.DT_BOOL
    body = function("b", ["a"], {"r": "n:y:0"}, [node("n", "Neg", "a")])
    body.arg_attr[0].attr["_output_shapes"].list.shape.add()
    body.arg_attr[0].attr["_user_specified_name"].s = b"a"
    expanded = expand(graph(made, loop, functions=[less, body]), ["y"])
    written = nodes_of(expanded)
    assert set(written["x"].attr) == {"dtype", "shape"}
    assert not written["x"].device
    assert {key for key in written["y"].attr if key.startswith("_")} == {
        "_gradient_op_type",
        "_lower_using_switch_merge",
    }
    assert len(written["y"].attr["output_shapes"].list.shape) == 1
    library = Graph.FromString(expanded.graph_bytes).library.function
    kept = next(item for item in library if item.signature.name.endswith("body"))
    assert set(kept.arg_attr[0].attr) == {"_output_shapes"}
    assert expanded.scopes == {item.signature.name: "y" for item in library}
    assert kept.node_def[0].attr["_gradient_op_type"].s == b"gradrule"
    assert run(expanded.graph_bytes, ["y:0"], {"x": 2.0}) == [2.0]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("yy", "'y'"),
        ("y:1", "it has 1"),
        ("nothing", "it has none"),
        ("^y", "an operation"),
        ("y:x", "node:output"),
        ("", "node:output"),
        ("c/s", "function call 'c'"),
    ],
)
def test_unknown_tensors_are_refused_with_a_suggestion(name: str, hint: str) -> None:
    made = graph(
        placeholder(), node("y", "Tanh", "x"), node("nothing", "NoOp"), call("c", "inner", "x"), functions=[INNER]
    )
    for field, request in (("fetches[0]", {"fetches": [name]}), ("vjp.xs[1]", {"fetches": ["y"], "xs": ["x", name]})):
        finding = only_finding(made, Reason.ERROR_REASON_UNKNOWN_TENSOR, **request)
        assert hint in finding.message
        assert finding.field == f"spec.{field}"
    assert only_finding(made, Reason.ERROR_REASON_UNKNOWN_FEED, ["y"], fed=[name]).field == "feeds[0]"


def test_feeding_a_tensor_twice_is_refused() -> None:
    made = graph(placeholder(), node("y", "Tanh", "x"))
    assert "twice" in only_finding(made, Reason.ERROR_REASON_UNKNOWN_FEED, ["y"], fed=["x", "x:0"]).message


def test_expansion_does_not_change_the_uploaded_graph() -> None:
    made = graph(placeholder(), call("c", "inner", "x"), node("y", "AddN", "c", "c"), functions=[INNER])
    before = made.SerializeToString(deterministic=True)
    first = expand(made, ["y"], ys=["y"], xs=["x"])
    assert made.SerializeToString(deterministic=True) == before
    assert Graph.FromString(first.graph_bytes) == Graph.FromString(expand(made, ["y"], ys=["y"], xs=["x"]).graph_bytes)
    assert findings_of(graph(), ["y"])[0].reason == Reason.ERROR_REASON_UNKNOWN_TENSOR
