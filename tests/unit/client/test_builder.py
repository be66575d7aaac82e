"""Tests that TensorFlow reads built graphs as meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule._builder.names import UniqueNames, glob_pattern
from gradrule.v1 import graph_pb2
from gradrule.v1.tensor_pb2 import Dt


def run(graph: gr.Graph, fetches: list[Any], feeds: dict[str, Any]) -> Any:
    """The graph's values, by TensorFlow."""
    with tf.Graph().as_default():
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(graph.to_bytes()), name="")
        with tf.compat.v1.Session() as session:
            return session.run([fetch.name for fetch in fetches], {f"{name}:0": value for name, value in feeds.items()})


X = np.float32([[0.5, -2.0, 3.0], [1.5, 0.25, -1.0]])

CASES: dict[str, tuple[Callable[[gr.Graph, Any], Any], Callable[[Any], Any]]] = {
    "add": (lambda g, x: x + 1, lambda x: x + 1),
    "radd": (lambda g, x: 1.5 + x, lambda x: 1.5 + x),
    "sub": (lambda g, x: x - 2, lambda x: x - 2),
    "rsub": (lambda g, x: 2 - x, lambda x: 2 - x),
    "mul": (lambda g, x: 3 * x * x, lambda x: 3 * x * x),
    "div": (lambda g, x: x / 2, lambda x: x / 2),
    "rdiv": (lambda g, x: 1 / x, lambda x: 1 / x),
    "pow": (lambda g, x: x**2, lambda x: x**2),
    "rpow": (lambda g, x: 2**x, lambda x: 2**x),
    "matmul": (lambda g, x: x @ np.ones((3, 2), np.float32), lambda x: x @ tf.ones((3, 2))),
    "rmatmul": (lambda g, x: np.ones((1, 2), np.float32) @ x, lambda x: tf.ones((1, 2)) @ x),
    "array on the left": (lambda g, x: np.float64([1, 2, 3]) * x, lambda x: tf.constant([1.0, 2.0, 3.0]) * x),
    "neg": (lambda g, x: -x, lambda x: -x),
    "abs": (lambda g, x: abs(x), abs),
    "less": (lambda g, x: x < 1, lambda x: x < 1),
    "less_equal": (lambda g, x: x <= 1.5, lambda x: x <= 1.5),
    "greater": (lambda g, x: x > 1, lambda x: x > 1),
    "greater_equal": (lambda g, x: x <= 1.5, lambda x: x <= 1.5),
    "where": (lambda g, x: g.where(x > 0, x, 0), lambda x: tf.where(x > 0, x, 0.0)),
    "cast": (lambda g, x: g.cast(x, "int64"), lambda x: tf.cast(x, tf.int64)),
    "reshape": (lambda g, x: g.reshape(x, [3, -1]), lambda x: tf.reshape(x, [3, -1])),
    "concat": (lambda g, x: g.concat([x, x, X], 1), lambda x: tf.concat([x, x, X], 1)),
    "stack": (lambda g, x: g.stack([x, x], axis=1), lambda x: tf.stack([x, x], axis=1)),
    "unstack": (lambda g, x: g.unstack(x, num=2)[1], lambda x: tf.unstack(x)[1]),
    "split": (lambda g, x: g.split(x, 3, axis=1)[2], lambda x: tf.split(x, 3, axis=1)[2]),
    "split sizes": (lambda g, x: g.split(x, [1, 2], 1)[1], lambda x: tf.split(x, [1, 2], 1)[1]),
    "gather": (lambda g, x: g.gather(x, [1, 0, 1]), lambda x: tf.gather(x, [1, 0, 1])),
    "squeeze": (lambda g, x: g.squeeze(g.expand_dims(x, 0), axis=0), lambda x: x),
    "one_hot": (lambda g, x: g.one_hot([0, 2], 3), lambda x: tf.one_hot([0, 2], 3)),
    "top_k": (lambda g, x: g.top_k(x, 2)[1], lambda x: tf.math.top_k(x, 2)[1]),
    "reduce_sum": (lambda g, x: g.reduce_sum(x), tf.reduce_sum),
    "reduce_mean": (lambda g, x: g.reduce_mean(x, axis=1), lambda x: tf.reduce_mean(x, axis=1)),
    "reduce_max": (
        lambda g, x: g.reduce_max(x, [0, 1], keepdims=True),
        lambda x: tf.reduce_max(x, [0, 1], keepdims=True),
    ),
    "reduce_min": (lambda g, x: g.reduce_min(x, keepdims=True), lambda x: tf.reduce_min(x, keepdims=True)),
    "reduce_prod": (lambda g, x: g.reduce_prod(x, axis=(0,)), lambda x: tf.reduce_prod(x, axis=(0,))),
    "reduce_any": (lambda g, x: g.reduce_any(x > 2), lambda x: tf.reduce_any(x > 2)),
    "reduce_all": (lambda g, x: g.reduce_all(x > 2, 0), lambda x: tf.reduce_all(x > 2, 0)),
    "add_n flat": (lambda g, x: g.op("AddN", x, x, x), lambda x: 3 * x),
    "by name": (lambda g, x: g.op("MatMul", b=x, a=x, transpose_b=True), lambda x: tf.matmul(x, x, transpose_b=True)),
    "conv2d": (
        lambda g, x: g.conv2d(
            g.reshape(x, [1, 2, 3, 1]), np.ones((2, 2, 1, 1), np.float32), strides=[1, 1, 1, 1], padding="SAME"
        ),
        lambda x: tf.nn.conv2d(tf.reshape(x, [1, 2, 3, 1]), tf.ones((2, 2, 1, 1)), 1, "SAME"),
    ),
    "stop_gradient": (lambda g, x: g.stop_gradient(x), tf.identity),
    "clip": (lambda g, x: g.clip_by_value(x, -1, 1), lambda x: tf.clip_by_value(x, -1, 1)),
    "pad": (lambda g, x: g.pad(x, [[1, 0], [0, 2]]), lambda x: tf.pad(x, [[1, 0], [0, 2]])),
    "argmax": (lambda g, x: g.argmax(x, 1), lambda x: tf.argmax(x, 1)),
    "batch matmul": (
        lambda g, x: (
            g.placeholder_with_default(np.ones((2, 2, 2), np.float32), shape=[2, 2, 2]) @ np.ones((2, 2, 1), "f4")
        ),
        lambda x: tf.ones((2, 2, 2)) @ tf.ones((2, 2, 1)),
    ),
    "ints and floats mixed": (lambda g, x: g.add(1, 2.5), lambda x: tf.constant(3.5)),
    "int64 handle": (lambda g, x: g.argmax(x, 1) + 1, lambda x: tf.argmax(x, 1) + 1),
    "float64 array": (lambda g, x: g.sqrt(np.float64([4.0])), lambda x: tf.sqrt(tf.constant([4.0], tf.float64))),
    "constants": (lambda g, x: g.constant([1, 2]), lambda x: tf.constant([1, 2])),
    "constant with dtype": (
        lambda g, x: g.constant([1, 2], dtype="bfloat16"),
        lambda x: tf.constant([1, 2], tf.bfloat16),
    ),
    "string": (lambda g, x: g.op("StringLength", ["ab", "c"]), lambda x: tf.strings.length(["ab", "c"])),
}


@pytest.mark.parametrize("case", CASES)
def test_values_equal_tensorflows(case: str) -> None:
    build, reference = CASES[case]
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 3])
    (got,) = run(g, [build(g, x)], {"x": X})
    wanted = reference(tf.constant(X)).numpy()
    assert np.asarray(got).dtype == wanted.dtype
    np.testing.assert_allclose(np.asarray(got).astype(complex), wanted.astype(complex), rtol=1e-6)


def test_placeholder_shapes() -> None:
    g = gr.Graph()
    for name, shape in (("a", None), ("b", []), ("c", [None, 2]), ("d", 3)):
        g.placeholder(name, "float32", shape)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(g.to_bytes()), name="")
        shapes = [graph.get_tensor_by_name(f"{name}:0").shape for name in "abcd"]
    assert [None if shape.rank is None else shape.as_list() for shape in shapes] == [None, [], [None, 2], [3]]
    assert [spec.shape for spec in g.inputs.values()] == [None, (), (None, 2), (3,)]


def test_constant_takes_value_and_dtype_in_tensorflows_order() -> None:
    g = gr.Graph()
    half = g.constant(0.5, "float64")
    assert (half.name, half.dtype) == ("Const:0", "float64")
    with pytest.raises(TypeError, match="positional"):
        g.constant(0.5, "float64", "half")  # type: ignore[call-arg]  # names are keyword-only
    assert g.constant([1, 2], "bfloat16", name="pair").name == "pair:0"


def test_names_are_tensorflows() -> None:
    wished = ["Sign", "Sign", "sign", "Sign_1", "Sign_1", "a/Sign", "a/Sign", "Sign"]
    names = UniqueNames()
    with tf.Graph().as_default() as graph:
        assert [names.make(name) for name in wished] == [graph.unique_name(name) for name in wished]


def test_name_scopes() -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32")
    with g.name_scope("layer") as scope:
        first = g.sign(x)
        with g.name_scope("inner"):
            second = g.sign(x, name="s")
    with g.name_scope("layer"):
        third = g.sign(x)
    with g.name_scope(scope):
        fourth = g.sign(x)
    assert [handle.name for handle in (first, second, third, fourth)] == [
        "layer/Sign:0",
        "layer/inner/s:0",
        "layer_1/Sign:0",
        "layer/Sign_1:0",
    ]
    assert g.sign(x).name == "Sign:0"


def attr_of(handle: Any) -> str | None:
    attrs = handle.node.attrs
    return attrs["_gradient_op_type"].s.decode() if "_gradient_op_type" in attrs else None


def test_gradient_override_map_writes_what_tensorflow_writes() -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32")
    with g.gradient_override_map({"Sign": "Outer", "Relu": "Rectify"}):
        a = g.sign(x)
        with g.gradient_override_map({"Sign": "Inner"}):
            b, c = g.sign(x), g.relu(x)
        d = g.sign(x)
    e = g.sign(x)
    assert [attr_of(handle) for handle in (a, b, c, d, e)] == ["Outer", "Inner", "Rectify", "Outer", None]
    assert g.node_overrides == ()


def test_gradient_override_map_with_params_and_rules() -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32")
    inline = gr.Rule("2 * dy")
    with g.gradient_override_map({"Sign": ("ste", {"threshold": 2.0}), "Relu": inline}):
        g.sign(x, name="s")
        g.relu(x, name="r")
        with g.gradient_override_map({"Sign": "Inner"}):
            g.sign(x, name="t")
    found = {override.selector.node: override for override in g.node_overrides}
    assert set(found) == {"s", "r"}
    assert (found["s"].rule, found["s"].params) == ("ste", {"threshold": 2.0})
    assert found["r"].rule is inline


def test_gradient_override_map_refuses_invalid_rules_at_the_call() -> None:
    g = gr.Graph()
    with (
        pytest.raises(gr.errors.UnknownOpTypeError, match=r"'Matmul' is neither.*Did you mean 'MatMul'"),
        g.gradient_override_map({"Matmul": "r"}),
    ):
        pass
    bad: Any = {"Sign": 3}
    with pytest.raises(gr.errors.InvalidOverrideError, match="Sign"), g.gradient_override_map(bad):
        pass


def refusal_cases() -> dict[str, tuple[Callable[[gr.Graph, Any], Any], type[Exception], str]]:
    errors = gr.errors
    return {
        "op type": (lambda g, x: g.op("Sing", x), errors.UnknownOpTypeError, "'Sing'.*Did you mean"),
        "method": (lambda g, x: g.sing(x), AttributeError, "sing"),
        "too few": (lambda g, x: g.op("MatMul", x), errors.TypeMismatchError, r"2 inputs \(a, b\); 1 is given"),
        "types": (lambda g, x: g.matmul(x, g.cast(x, "float64")), errors.TypeMismatchError, "float64, not float32"),
        "attr": (
            lambda g, x: g.op("MatMul", x, x, transposeb=True),
            errors.InvalidAttrError,
            "Did you mean 'transpose_b'",
        ),
        "attr kind": (lambda g, x: g.matmul(x, x, transpose_b="yes"), errors.InvalidAttrError, "'transpose_b'.*bool"),
        "attr missing": (lambda g, x: g.op("Cast", x), errors.InvalidAttrError, "DstT"),
        "attr dtype": (lambda g, x: g.cast(x, "float33"), errors.InvalidAttrError, "float33"),
        "placeholder dtype": (lambda g, x: g.placeholder("p", "flaot32"), errors.InvalidAttrError, "flaot32"),
        "ragged": (lambda g, x: g.constant([[1], [1, 2]]), errors.InvalidTensorError, "ragged"),
        "lossy": (lambda g, x: g.gather(x, [0, 1]) + "a", errors.InvalidTensorError, "strings"),
        "float axis": (lambda g, x: g.reduce_sum(x, 0.5), errors.GradruleError, "axis|reduction|Tidx"),
        "name": (lambda g, x: g.sign(x, name="a b"), errors.InvalidGraphError, "'a b'"),
        "other graph": (lambda g, x: gr.Graph().sign(x), errors.InvalidGraphError, "another graph"),
        "no such tensor": (lambda g, x: g.tensor("xx"), errors.UnknownTensorError, "Did you mean 'x'"),
        "no such output": (lambda g, x: g.tensor("x:1"), errors.UnknownTensorError, "1 outputs"),
        "no such node": (lambda g, x: g.node("y"), errors.UnknownTensorError, "'y'"),
        "bool of a tensor": (lambda g, x: 1 if x > 0 else 0, TypeError, "where"),
        "iteration": (lambda g, x: list(x), TypeError, "unstack"),
    }


@pytest.mark.parametrize("case", refusal_cases())
def test_refusals(case: str) -> None:
    build, kind, says = refusal_cases()[case]
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 3])
    with pytest.raises(kind, match=says):
        build(g, x)


def test_a_refused_node_leaves_the_graph_usable() -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 3])
    with pytest.raises(gr.errors.TypeMismatchError):
        g.op("LogicalNot", x)
    (got,) = run(g, [g.sign(x)], {"x": X})
    np.testing.assert_array_equal(got, np.sign(X))


def test_handles_are_keys() -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32")
    y = g.identity(x)
    assert x != y
    assert {x: 1, y: 2}[x] == 1


def test_find() -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32")
    with g.name_scope("a"):
        g.sign(x)
        with g.name_scope("b"):
            g.sign(x)
            g.relu(x)
    names = [node.name for node in g.find(op_type="Sign")]
    assert names == ["a/Sign", "a/b/Sign"]
    assert [node.name for node in g.find(node="a/*")] == ["a/Sign"]
    assert [node.name for node in g.find(node="a/**", op_type="Relu")] == ["a/b/Relu"]
    assert [node.name for node in g.find(scope="a/b")] == ["a/b/Sign", "a/b/Relu"]
    assert g.find(op_type="MatMul") == []
    assert g.find(node="x")[0].outputs[0].dtype == "float32"


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("a*", "abc", True),
        ("a*", "a/b", False),
        ("**", "a/b/c", True),
        ("a/**/c", "a/b/b/c", True),
        ("?", "ab", False),
        ("a?c", "a/c", False),
        ("a.c", "abc", False),
    ],
)
def test_globs(pattern: str, name: str, matches: bool) -> None:
    assert bool(glob_pattern(pattern).fullmatch(name)) == matches


def test_a_loaded_graph_keeps_its_bytes_and_can_be_extended() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None], name="x")
        tf.sign(x, name="y")
    data = graph.as_graph_def().SerializeToString()
    g = gr.Graph.from_bytes(data)
    assert g.to_bytes() == data
    y = g.tensor("y:0")
    assert (y.dtype, len(g)) == ("float32", 2)
    z = g.sign(y + 1, name="y")
    assert z.name == "y_1:0"
    (got,) = run(g, [z], {"x": [-3.0, 1.0]})
    assert got.tolist() == [0.0, 1.0]


def test_types_of_a_loaded_graph_are_tensorflows() -> None:
    @tf.function
    def inner(v: tf.Tensor) -> tf.Tensor:
        return tf.cast(v, tf.float64)

    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4], name="x")
        inner(x) + 1
        tf.math.top_k(x, 2)
        tf.while_loop(lambda n, v: n < 3, lambda n, v: (n + 1, v * 2.0), [0, x])
    g = gr.Graph.from_bytes(graph.as_graph_def().SerializeToString())
    for op in graph.get_operations():
        assert [handle.dtype for handle in g.outputs_of(op.name)] == [
            {"half": "float16"}.get(tensor.dtype.name, tensor.dtype.name) for tensor in op.outputs
        ]


def test_a_function_of_the_graph_can_be_called() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None])])
    def double(v: tf.Tensor) -> tf.Tensor:
        return 2.0 * v

    with tf.Graph().as_default() as graph:
        double(tf.compat.v1.placeholder(tf.float32, [None], name="x"))
    definition = graph.as_graph_def()
    name = definition.library.function[0].signature.name
    g = gr.Graph.from_bytes(definition.SerializeToString())
    called = g.op(name, g.tensor("x"))
    assert called.dtype == "float32"
    (got,) = run(g, [called], {"x": [1.5]})
    assert got.tolist() == [3.0]


def test_deep_graphs_and_cycles_are_typed_without_recursion() -> None:
    message = graph_pb2.Graph()
    first = message.node.add(name="n0", op="Placeholder")
    first.attr["dtype"].type = Dt.DT_FLOAT
    for index in range(1, 20000):
        message.node.add(name=f"n{index}", op="Neg", input=[f"n{index - 1}"])
    message.node.add(name="a", op="Neg", input=["b"])
    message.node.add(name="b", op="Neg", input=["a"])
    g = gr.Graph.from_bytes(message.SerializeToString())
    assert g.tensor("n19999").dtype == "float32"
    assert g.tensor("a").dtype == "unknown"


def test_outputs_are_the_tensors_that_no_node_uses() -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [2])
    values, _ = g.top_k(x, 1, name="top")
    g.sign(values, name="s")
    g.unstack(x, num=2, name="u")
    assert list(g.outputs) == ["s", "u", "u:1"]
    assert list(g.inputs) == ["x"]


def test_malformed_bytes_are_refused() -> None:
    with pytest.raises(gr.errors.InvalidGraphError):
        gr.Graph.from_bytes(b"\xff\xff garbage")


def test_equal_graphs_have_equal_bytes() -> None:
    def build() -> bytes:
        g = gr.Graph()
        x = g.placeholder("x", "float32", [None, 3])
        g.conv2d(g.reshape(x, [1, 1, -1, 3]), np.ones((1, 1, 3, 2), np.float32), strides=[1] * 4, padding="VALID")
        return g.to_bytes()

    assert build() == build()
