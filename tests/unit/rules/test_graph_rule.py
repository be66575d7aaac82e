"""Tests rules that are given as graphs, made and run by TensorFlow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gradrule.v1 import graph_pb2, rule_pb2, tensor_pb2
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.limits import NodeLimits
from gradrule_server.rules import Param, RuleContent, Signature
from tests.samples import size
from tests.unit.rules.running import exact, number_of, numpy_type, run

FLOAT, DOUBLE, INT, HALF, BFLOAT16 = (
    number_of(name) for name in ("float32", "float64", "int32", "float16", "bfloat16")
)
ONE = Signature((FLOAT,), (FLOAT,))
TWO = Signature((FLOAT, FLOAT), (FLOAT,))
X = np.array([-1.0, 0.5, 2.0], np.float32)
DY = np.array([1.0, 2.0, 3.0], np.float32)


def made(build: Callable[[Callable[..., tf.Tensor]], None]) -> bytes:
    """The bytes of a graph; `build` gets a function that makes placeholders."""
    graph = tf.Graph()
    with graph.as_default():
        build(lambda name, dtype=tf.float32: tf.compat.v1.placeholder(dtype, name=name))
    return bytes(graph.as_graph_def().SerializeToString())


def named(value: tf.Tensor, name: str) -> None:
    tf.identity(value, name=name)


def quantize_grad(variable: Callable[..., tf.Tensor]) -> None:
    x, dy = variable("x"), variable("dy")
    named(tf.where(tf.abs(x) <= 1.0, dy, tf.zeros_like(dy)), "dx")


def scaled(variable: Callable[..., tf.Tensor]) -> None:
    named(variable("dy") * variable("alpha") + tf.cast(variable("beta", tf.float64), tf.float32), "dx")


def twice(variable: Callable[..., tf.Tensor]) -> None:
    named(variable("dy"), "dx")
    named(variable("x"), "dx0")


def refused(content: Callable[[], object]) -> tuple[str, GradruleError]:
    with pytest.raises(GradruleError) as caught:
        content()
    return reason_name(caught.value.reason), caught.value


def test_graph_rule_runs() -> None:
    definition = rule_pb2.RuleDefinition(graph=rule_pb2.GraphSource(serialized=made(quantize_grad)))
    graph = RuleContent.from_definition(definition).bind(ONE)
    assert set(graph.inputs) == {"x0", "dy0"}
    assert graph.shape_sources == (frozenset({"graph"}),)
    (result,) = run(graph, {"x0": X, "dy0": DY})
    np.testing.assert_array_equal(np.asarray(result), [1, 2, 0])


def test_inline_graph_is_the_same_rule() -> None:
    serialized = made(quantize_grad)
    inline = graph_pb2.Graph.FromString(serialized)
    content = RuleContent.from_definition(rule_pb2.RuleDefinition(graph=rule_pb2.GraphSource(inline_graph=inline)))
    (result,) = run(content.bind(ONE), {"x0": X, "dy0": DY})
    np.testing.assert_array_equal(np.asarray(result), [1, 2, 0])
    assert content.per_sample is None
    again = RuleContent.from_definition(content.to_definition())
    assert again.digest == content.digest


def test_params_are_fed_as_float64() -> None:
    content = RuleContent(graph_bytes=made(scaled), params=(Param("alpha", 2.0), Param("beta"), Param("unused")))
    graph = content.bind(ONE)
    assert set(graph.inputs) == {"dy0", "param/alpha", "param/beta"}
    types = {node.name: node.attr["dtype"].type for node in graph.graph.node if node.op == "Placeholder"}
    assert types[graph.inputs["param/alpha"]] == types[graph.inputs["param/beta"]] == DOUBLE
    (result,) = run(graph, {"dy0": DY, "param/alpha": np.float64(0.5), "param/beta": np.float64(1)})
    np.testing.assert_allclose(np.asarray(result), [1.5, 2, 2.5])


def test_input_without_a_result_is_not_connected() -> None:
    def both(variable: Callable[..., tf.Tensor]) -> None:
        dy = variable("dy0")
        named(dy * variable("x1"), "dx0")
        named(dy * variable("x0"), "dx1")

    def second(variable: Callable[..., tf.Tensor]) -> None:
        named(variable("dy") + variable("default1"), "dx1")

    first, other = run(RuleContent(graph_bytes=made(both)).bind(TWO), {"x0": X, "x1": 2 * X, "dy0": DY})
    np.testing.assert_allclose(np.asarray(first), DY * 2 * X)
    np.testing.assert_allclose(np.asarray(other), DY * X)
    content = RuleContent(graph_bytes=made(second))
    assert content.uses_default
    assert content.bind(TWO).results == (None, "dx1:0")


def test_missing_types_follow_the_op() -> None:
    graph = graph_pb2.Graph()
    graph.node.add(name="dy", op="Placeholder")
    graph.node.add(name="dx", op="Identity", input=["dy"]).attr["T"].type = tensor_pb2.DT_DOUBLE
    content = RuleContent(graph_bytes=graph.SerializeToString())
    (result,) = run(content.bind(Signature((DOUBLE,), (DOUBLE,))), {"dy0": DY.astype(np.float64)})
    np.testing.assert_array_equal(np.asarray(result), DY)


def test_unneeded_nodes_are_removed() -> None:
    def with_more(variable: Callable[..., tf.Tensor]) -> None:
        quantize_grad(variable)
        named(variable("something_else") * 2.0, "unused")

    graph = RuleContent(graph_bytes=made(with_more)).bind(ONE)
    assert not [node for node in graph.graph.node if node.name in ("unused", "something_else")]


def test_placeholder_of_a_param_gets_an_unused_name() -> None:
    def taken(variable: Callable[..., tf.Tensor]) -> None:
        named(tf.identity(variable("dy"), name="param/alpha") * variable("alpha"), "dx")

    graph = RuleContent(graph_bytes=made(taken), params=(Param("alpha"),)).bind(ONE)
    (result,) = run(graph, {"dy0": DY, "param/alpha": np.float64(3)})
    np.testing.assert_allclose(np.asarray(result), 3 * DY)


def squares(variable: Callable[..., tf.Tensor]) -> None:
    named(variable("dy") * tf.square(1000.0 * variable("x")) / 1e6, "dx")


def test_the_placeholders_of_params_have_different_names() -> None:
    def build(variable: Callable[..., tf.Tensor]) -> None:
        taken = tf.identity(variable("dy"), name="fed/a")
        named(taken * variable("a") - variable("a_"), "dx")

    graph = RuleContent(graph_bytes=made(build), params=(Param("a"), Param("a_"))).bind(ONE)
    (result,) = run(graph, {"x0": X, "dy0": DY, "param/a": np.float64(2), "param/a_": np.float64(1)})
    np.testing.assert_array_equal(np.asarray(result), 2 * DY - 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("typed", [True, False])
def test_16_bit_types_are_computed_in_float32(dtype: str, typed: bool) -> None:
    """The squares overflow float16, and bfloat16 would round four times."""
    graph = graph_pb2.Graph.FromString(made(squares))
    for node in graph.node:
        if node.op == "Placeholder" and not typed:
            del node.attr["dtype"]
    content = RuleContent(graph_bytes=graph.SerializeToString())
    number = number_of(dtype)
    bound = content.bind(Signature((number,), (number,)))
    x, dy = (value.astype(numpy_type(dtype)) for value in (X, DY / 3))
    (result,) = run(bound, {"x0": x, "dy0": dy})
    wanted = (exact(dy) * exact(x) ** 2).astype(numpy_type(dtype))
    np.testing.assert_array_equal(np.asarray(result), wanted)
    assert np.asarray(result).dtype == numpy_type(dtype)
    # The same rule on float32 has no conversion.
    assert "Cast" not in {node.op for node in content.bind(ONE).graph.node}


def test_types_that_a_graph_states_are_kept() -> None:
    def in_half(variable: Callable[..., tf.Tensor]) -> None:
        named(variable("dy", tf.float16) * tf.square(tf.constant(1000.0, tf.float16) * variable("x", tf.float16)), "dx")

    bound = RuleContent(graph_bytes=made(in_half)).bind(Signature((HALF,), (HALF,)))
    (result,) = run(bound, {"x0": X.astype(np.float16), "dy0": DY.astype(np.float16)})
    assert np.isinf(np.asarray(result)).all()


def test_each_placeholder_is_converted_by_its_own_type() -> None:
    def mixed(variable: Callable[..., tf.Tensor]) -> None:
        named(tf.cast(variable("dy", tf.bfloat16), tf.float32) * variable("x1"), "dx0")
        named(variable("default1") * variable("alpha"), "dx1")

    content = RuleContent(graph_bytes=made(mixed), params=(Param("alpha"),))
    bound = content.bind(Signature((BFLOAT16, FLOAT), (BFLOAT16,)))
    small = DY.astype(numpy_type("bfloat16"))
    values = {"dy0": small, "x1": X, "default1": DY, "param/alpha": np.float64(0.5)}
    first, second = run(bound, values)
    np.testing.assert_array_equal(np.asarray(first), (exact(small) * X).astype(numpy_type("bfloat16")))
    np.testing.assert_array_equal(np.asarray(second), 0.5 * DY)


def in_tuple(variable: Callable[..., tf.Tensor]) -> None:
    named(variable("dy"), "dx0")
    named(tf.square(variable("x1")), "dx1")


def shape_of_dy(variable: Callable[..., tf.Tensor]) -> None:
    dy = variable("dy")
    named(variable("x") + tf.ones(tf.shape(dy)) + tf.raw_ops.OnesLike(x=dy), "dx")


@pytest.mark.parametrize(
    ("node", "build"),
    [
        ("dx", lambda variable: named(1 - tf.square(variable("y")), "dx")),
        ("dx1", in_tuple),
        ("dx", shape_of_dy),
    ],
)
def test_gradient_that_drops_dy_is_refused(node: str, build: Callable[..., None]) -> None:
    reason, error = refused(lambda: RuleContent(graph_bytes=made(build)))
    assert reason == "INVALID_RULE"
    assert error.findings[0].node == node
    assert "_ignore_dy=True" in error.message
    # It may have been stored before it was refused.
    RuleContent(graph_bytes=made(build), checked=True).bind(TWO if node == "dx1" else ONE)


@pytest.mark.parametrize(
    "build",
    [
        lambda variable: named(tf.zeros_like(variable("x")), "dx"),
        lambda variable: named(tf.zeros(tf.shape(variable("x"))), "dx"),
        lambda variable: named(tf.where(variable("dy") > 0, variable("x"), 0), "dx"),
        lambda variable: named(variable("default") * 2, "dx"),
    ],
)
def test_zeros_and_uses_of_dy_need_no_attribute(build: Callable[..., None]) -> None:
    RuleContent(graph_bytes=made(build)).bind(ONE)


def test_ignoring_dy_is_said_by_an_attribute() -> None:
    graph = graph_pb2.Graph.FromString(made(lambda variable: named(1 - tf.square(variable("y")), "dx")))
    next(node for node in graph.node if node.name == "dx").attr["_ignore_dy"].b = True
    (result,) = run(RuleContent(graph_bytes=graph.SerializeToString()).bind(ONE), {"y0": X})
    np.testing.assert_allclose(np.asarray(result), 1 - X**2)
    graph = graph_pb2.Graph.FromString(made(quantize_grad))
    next(node for node in graph.node if node.name == "dx").attr["_ignore_dy"].b = True
    reason, error = refused(lambda: RuleContent(graph_bytes=graph.SerializeToString()))
    assert reason == "INVALID_RULE"
    assert "without dy and default" in error.message


@pytest.mark.parametrize(
    ("reason", "words", "build"),
    [
        ("INVALID_RULE", "no result", lambda variable: named(variable("dy"), "result")),
        ("INVALID_RULE", "Did you mean 'alpha'", lambda variable: named(variable("dy") * variable("alhpa"), "dx")),
        ("INVALID_RULE", "only a constant", lambda variable: named(tf.constant(0.0), "dx")),
        ("INVALID_RULE", "dx and dx0", twice),
        ("INVALID_RULE", "'x' and 'x0'", lambda variable: named(variable("x") + variable("x0"), "dx")),
        (
            "INVALID_RULE",
            "not 'PlaceholderWithDefault'",
            lambda variable: named(variable("dy") * tf.compat.v1.placeholder_with_default(1.0, [], name="alpha"), "dx"),
        ),
    ],
)
def test_invalid_graph_is_refused(reason: str, words: str, build: Callable[..., None]) -> None:
    found, error = refused(lambda: RuleContent(graph_bytes=made(build), params=(Param("alpha"),)))
    assert found == reason
    assert words in error.message


def test_malformed_bytes_are_refused() -> None:
    assert refused(lambda: RuleContent(graph_bytes=b"\xff\xff\xff"))[0] == "INVALID_GRAPH"
    assert refused(lambda: RuleContent(graph_bytes=b""))[0] == "INVALID_RULE"
    graph = graph_pb2.Graph()
    graph.node.add(name="dx", op="Identity", input=["dz"])
    reason, error = refused(lambda: RuleContent(graph_bytes=graph.SerializeToString()))
    assert reason == "DANGLING_INPUT"
    assert error.findings[0].node == "dx"
    graph.node.add(name="dz", op="Identity", input=["dx"])
    assert refused(lambda: RuleContent(graph_bytes=graph.SerializeToString()))[0] == "GRAPH_CYCLE"
    graph.node.add(name="dz", op="Identity", input=["dx"])
    assert refused(lambda: RuleContent(graph_bytes=graph.SerializeToString()))[0] == "DUPLICATE_NODE"


def test_deep_graph_is_accepted() -> None:
    graph = graph_pb2.Graph()
    graph.node.add(name="dy", op="Placeholder")
    for number in range(5000):
        graph.node.add(name=f"n{number}", op="Identity", input=[f"n{number - 1}" if number else "dy"])
    graph.node.add(name="dx", op="Identity", input=["n4999"])
    assert len(RuleContent(graph_bytes=graph.SerializeToString()).bind(ONE).graph.node) == 5002


def test_graph_that_does_not_fit_the_op_is_refused() -> None:
    content = RuleContent(graph_bytes=made(quantize_grad))
    reason, error = refused(lambda: content.bind(Signature((DOUBLE,), (DOUBLE,))))
    assert reason == "RULE_NOT_APPLICABLE"
    assert "'x' is float32, but x0 of the op is float64" in error.message
    second = RuleContent(graph_bytes=made(lambda variable: named(variable("x1") * variable("dy"), "dx")))
    assert refused(lambda: second.bind(ONE))[0] == "RULE_ARITY"
    third = RuleContent(graph_bytes=made(lambda variable: named(variable("dy"), "dx2")))
    assert "dx2, but the op has 2 inputs (x0, x1)" in refused(lambda: third.bind(TWO))[1].message
    assert refused(lambda: content.bind(Signature((INT,), (FLOAT,))))[0] in ("RULE_ARITY", "RULE_NOT_APPLICABLE")
    integer = RuleContent(graph_bytes=made(lambda variable: named(variable("dy"), "dx1")))
    assert refused(lambda: integer.bind(Signature((FLOAT, INT), (FLOAT,))))[0] == "RULE_ARITY"


VALID = made(quantize_grad)


@given(st.binary(max_size=60), st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=6))
@settings(max_examples=size(100, 300), deadline=None)
def test_any_bytes_are_a_rule_or_a_typed_error(noise: bytes, changes: list[tuple[int, int]]) -> None:
    changed = bytearray(VALID)
    for position, byte in changes:
        changed[position] = byte
    for serialized in (noise, bytes(changed), VALID + noise):
        try:
            RuleContent(graph_bytes=serialized).bind(ONE)
        except GradruleError as error:
            assert error.message


def test_missing_attributes_follow_from_the_inputs() -> None:
    graph = graph_pb2.Graph.FromString(made(quantize_grad))
    for node in graph.node:
        if node.op in ("Abs", "LessEqual", "SelectV2", "Identity"):
            del node.attr["T"]
    content = RuleContent(graph_bytes=graph.SerializeToString())
    (result,) = run(content.bind(ONE), {"x0": X, "dy0": DY})
    np.testing.assert_array_equal(np.asarray(result), [1, 2, 0])


def test_ops_that_do_not_exist_and_functions_are_refused() -> None:
    graph = graph_pb2.Graph.FromString(made(quantize_grad))
    next(node for node in graph.node if node.op == "Abs").op = "Absolute"
    reason, error = refused(lambda: RuleContent(graph_bytes=graph.SerializeToString()))
    assert reason == "UNKNOWN_OP_TYPE"
    assert "'Absolute'" in error.message

    @tf.function
    def inner(dy: tf.Tensor) -> tf.Tensor:
        return 2.0 * dy

    reason, error = refused(lambda: RuleContent(graph_bytes=made(lambda variable: named(inner(variable("dy")), "dx"))))
    assert reason == "INVALID_RULE"
    assert "inner" in error.message


def test_error_for_incompatible_inputs_names_the_node() -> None:
    graph = graph_pb2.Graph.FromString(made(quantize_grad))
    next(node for node in graph.node if node.op == "Abs").input[0] = "x:3"
    reason, error = refused(lambda: RuleContent(graph_bytes=graph.SerializeToString()).bind(ONE))
    assert (reason, error.findings[0].node) == ("DANGLING_INPUT", "Abs")


def test_dilated_depthwise_convolutions_are_refused_in_rules() -> None:
    def build(variable: Callable[..., tf.Tensor]) -> None:
        x, w = variable("x0"), variable("x1")
        y = tf.raw_ops.DepthwiseConv2dNative(
            input=x, filter=w, strides=[1, 1, 1, 1], padding="SAME", dilations=[1, 2, 2, 1]
        )
        named(variable("dy") * y, "dx0")

    definition = rule_pb2.RuleDefinition(graph=rule_pb2.GraphSource(serialized=made(build)))
    (finding,) = RuleContent.from_definition(definition).check_nodes(NodeLimits())
    assert reason_name(finding.reason) == "UNSUPPORTED_OP"
    assert "dilations [1, 2, 2, 1]" in finding.message
