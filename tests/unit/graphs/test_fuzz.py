"""Tests that any bytes give a graph that TensorFlow reads, or a typed error."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.core.protobuf import rewriter_config_pb2

from gradrule.common.dtypes import as_dt
from gradrule.v1.graph_pb2 import AttrValue, Graph, Node
from gradrule.v1.override_pb2 import Selector
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server import graphs
from gradrule_server.errors import GradruleError, reason_name
from tests.samples import size
from tests.unit.graphs.helpers import traced

OVERRIDES = [
    graphs.OverrideSpec(Selector(op_type="Sign"), rule_index=0, rule_name="r", label="s", optional=True),
    graphs.OverrideSpec(Selector(node="**/w*"), rule_index=-1, label="w", optional=True, index=1),
]


@functools.cache
def seed() -> tuple[Graph, list[str]]:
    """Returns a graph with calls, a loop and a branch."""

    @tf.function(autograph=False)
    def inner(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.sign(x) * x, tf.nn.relu(x)

    def program(x: tf.Tensor) -> tf.Tensor:
        looped = tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, inner(v)[0]), [0, inner(x)[1]])[1]
        return tf.cond(tf.reduce_sum(x) > 0.0, lambda: inner(looped)[0], lambda: looped)

    made, _, outputs = traced(program, tf.TensorSpec([3], tf.float32, name="x"))
    return made, outputs


def outcome(data: bytes, fetches: list[str]) -> str:
    """Returns `ok` or the first reason; other exceptions fail the test."""
    try:
        made = graphs.parse(data)
        request = graphs.ExpandRequest(fetches=fetches, ys=fetches, xs=["x"], overrides=OVERRIDES)
        expanded = graphs.expand(made, request, graphs.Limits(nodes=2000, inlined_nodes=5000))
    except GradruleError as error:
        assert error.findings
        assert all(finding.message for finding in error.findings)
        return reason_name(error.reason)
    assert set(expanded.tensor_names) == set(fetches) | {"x"}
    Graph.FromString(expanded.graph_bytes)
    return "ok"


@settings(max_examples=size(100, 300), deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    assert outcome(data, ["y"]) in {"INVALID_GRAPH", "UNKNOWN_TENSOR", "UNKNOWN_OP_TYPE"}


@settings(max_examples=size(100, 300), deadline=None)
@given(st.data())
def test_flipped_bytes(data: st.DataObject) -> None:
    made, outputs = seed()
    damaged = bytearray(made.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] = data.draw(st.integers(0, 255))
    outcome(bytes(damaged), outputs)


def mutate(data: st.DataObject, made: Graph) -> None:
    """Makes one change as faulty clients do."""
    bodies = [made.node, *(function.node_def for function in made.library.function)]
    nodes = data.draw(st.sampled_from(bodies))
    node: Node = data.draw(st.sampled_from(list(nodes)))
    every = [item for body in bodies for item in body]
    other: Node = data.draw(st.sampled_from(every))
    kind = data.draw(st.integers(0, 9))
    if kind == 0:
        node.op = data.draw(st.sampled_from(["Sign", "Nope", "", other.op]))
    elif kind == 1:
        node.name = data.draw(st.sampled_from([other.name, "", "a/b", "x"]))
    elif kind == 2 and node.input:
        node.input[data.draw(st.integers(0, len(node.input) - 1))] = data.draw(
            st.sampled_from([other.name, f"{other.name}:1", f"^{other.name}", f"{other.name}:output:0", "", ":", "^"])
        )
    elif kind == 3:
        node.input.append(data.draw(st.sampled_from([other.name, f"^{other.name}", f"{other.name}:z:0"])))
    elif kind == 4 and node.input:
        del node.input[data.draw(st.integers(0, len(node.input) - 1))]
    elif kind == 5 and node.attr:
        del node.attr[data.draw(st.sampled_from(sorted(node.attr)))]
    elif kind == 6 and node.attr and other.attr:
        value = other.attr[data.draw(st.sampled_from(sorted(other.attr)))]
        copy = AttrValue()
        copy.CopyFrom(value)
        node.attr[data.draw(st.sampled_from(sorted(node.attr)))].CopyFrom(copy)
    elif kind == 7:
        copied = nodes.add()
        copied.CopyFrom(other)
        copied.name = data.draw(st.sampled_from([other.name, "fresh"]))
    elif kind == 8 and made.library.function:
        function = data.draw(st.sampled_from(list(made.library.function)))
        for field in (function.signature.input_arg, function.signature.output_arg):
            if field:
                data.draw(st.sampled_from(list(field))).type = as_dt(data.draw(st.integers(0, 40)))
    elif kind == 9 and len(nodes) > 1:
        del nodes[data.draw(st.integers(0, len(nodes) - 1))]


@settings(max_examples=size(200, 600), deadline=None)
@given(st.data())
def test_mutated_graphs(data: st.DataObject) -> None:
    original, outputs = seed()
    made = Graph()
    made.CopyFrom(original)
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(data, made)
    outcome(made.SerializeToString(), outputs)


OPS = {"Add": 2, "Mul": 2, "Maximum": 2, "Sign": 1, "Tanh": 1, "Neg": 1, "f": 1, "g": 2}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 99), st.integers(0, 99)), max_size=25), st.data()
)
def test_random_graphs_compute_the_same(steps: list[tuple[str, int, int]], data: st.DataObject) -> None:
    """Compares random graphs of ops and calls, with nodes in any order, with NumPy."""
    made = Graph()
    made.node.add(name="x", op="Placeholder").attr["dtype"].type = Dt.DT_FLOAT
    for name, args, op in (("f", ["a"], "Tanh"), ("g", ["a", "b"], "Sub")):
        function = made.library.function.add()
        function.signature.name = name
        for arg in args:
            function.signature.input_arg.add(name=arg, type=Dt.DT_FLOAT)
        function.signature.output_arg.add(name="r", type=Dt.DT_FLOAT)
        inner = function.node_def.add(name="n", op=op, input=args)
        inner.attr["T"].type = Dt.DT_FLOAT
        function.ret["r"] = "n:y:0" if name == "f" else "n:z:0"
    x = np.array([-1.5, 0.0, 0.25], np.float32)
    numpy = {"Add": np.add, "Mul": np.multiply, "Maximum": np.maximum, "Sign": np.sign, "Tanh": np.tanh}
    numpy |= {"Neg": np.negative, "f": np.tanh, "g": np.subtract}
    values = [x]
    names = ["x"]
    for number, (op, *sources) in enumerate(steps):
        chosen = [source % len(values) for source in sources[: OPS[op]]]
        made.node.add(name=f"n{number}", op=op, input=[names[source] for source in chosen])
        values.append(numpy[op](*(values[source] for source in chosen)))
        names.append(f"n{number}")
    order = data.draw(st.permutations(range(len(made.node))))
    shuffled = Graph(node=[made.node[position] for position in order], library=made.library)
    expanded = graphs.expand(shuffled, graphs.ExpandRequest(fetches=names, ys=[names[-1]], xs=["x"]))
    with tf.Graph().as_default():
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(_without_marks(expanded.graph_bytes)), name="")
        # The arithmetic optimizer makes maximum(2 v, v) the smaller of the two.
        config = tf.compat.v1.ConfigProto()
        config.graph_options.rewrite_options.arithmetic_optimization = rewriter_config_pb2.RewriterConfig.OFF
        with tf.compat.v1.Session(config=config) as session:
            got = session.run([expanded.tensor_names[name] for name in names], {"x:0": x})
    for one, other in zip(got, values, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def _without_marks(data: bytes) -> bytes:
    made = Graph.FromString(data)
    for node in made.node:
        node.attr.pop("_gradient_op_type", None)
    return made.SerializeToString()
