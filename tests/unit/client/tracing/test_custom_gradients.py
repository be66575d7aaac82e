"""`tf.custom_gradient` in a traced graph: what its gradient was in the process that traced it, it is in any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.unit.client.tracing.interpreter import Interpreter

SPEC = ("float32", [3])
X = np.array([-1.5, 0.25, 2.0], np.float32)


@tf.custom_gradient
def spike_fn(x: Any) -> Any:
    def grad(dy: Any) -> Any:
        return dy / (1.0 + 10.0 * tf.abs(x)) ** 2

    return tf.cast(x > 0, x.dtype), grad


@tf.custom_gradient
def log1pexp(x: Any) -> Any:
    e = tf.exp(x)

    def grad(upstream: Any) -> Any:
        return upstream * (1 - 1 / (1 + e))

    return tf.math.log(1 + e), grad


@tf.custom_gradient
def two_in_two_out(a: Any, b: Any) -> Any:
    def grad(da: Any, db: Any) -> Any:
        return 2.0 * da + b, None

    return (a * b, a - b), grad


@tf.custom_gradient
def outer_fn(x: Any) -> Any:
    """Its gradient has a custom gradient of its own."""

    @tf.custom_gradient
    def inner_fn(dy: Any, x: Any) -> Any:
        def second(upstream: Any) -> Any:
            return 7.0 * upstream, 11.0 * upstream * x

        return dy * x, second

    def grad(dy: Any) -> Any:
        return inner_fn(dy, x)

    return tf.square(x), grad


def nested_function(x: Any) -> Any:
    @tf.function
    def inner(v: Any) -> Any:
        return spike_fn(v) * v

    return inner(inner(x) + x)


def in_loop(x: Any) -> Any:
    return tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v + 0.5 * spike_fn(v) + log1pexp(v)), [0, x])[1]


def in_branch(x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0, lambda: spike_fn(x) * x, lambda: log1pexp(x))


def with_outer_tensor(x: Any) -> Any:
    """The gradient uses a tensor that the loop's body does not."""
    slope = tf.reduce_sum(tf.abs(x)) + 1.0

    @tf.custom_gradient
    def sloped(v: Any) -> Any:
        return tf.sign(v), lambda dy: dy * slope

    return tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, v * 0.5 + sloped(v)), [0, x])[1]


def with_outer_tensor_deep(x: Any) -> Any:
    """Two functions, a loop and a branch lie between the tensor and the gradient."""
    slope = tf.stop_gradient(tf.reduce_sum(tf.abs(x))) + 1.0

    @tf.custom_gradient
    def sloped(v: Any) -> Any:
        return tf.sign(v), lambda dy: dy * slope

    @tf.function
    def inner(v: Any) -> Any:
        return tf.cond(tf.reduce_sum(v) > 100.0, lambda: v, lambda: sloped(v) + v)

    def body(i: Any, v: Any) -> Any:
        return i + 1, inner(v) * 0.5

    return tf.while_loop(lambda i, v: i < 2, body, [0, x])[1] + inner(x)


def with_lambda(x: Any) -> Any:
    return tf.custom_gradient(lambda v: (tf.round(v), lambda dy: 3.0 * dy))(x)


def with_constant(x: Any) -> Any:
    return scaled(x)


LARGE = tf.constant(np.linspace(1.0, 2.0, 300).astype(np.float32).reshape(3, 100))


@tf.custom_gradient
def scaled(x: Any) -> Any:
    return tf.identity(x), lambda dy: dy * tf.reduce_sum(LARGE, 1)


def sparse_gradient(x: Any) -> Any:
    @tf.custom_gradient
    def picked(v: Any) -> Any:
        def grad(dy: Any) -> Any:
            return tf.IndexedSlices(dy * 2.0, tf.constant([0, 2]), tf.constant([3]))

        return tf.gather(v, [0, 2]), grad

    return tf.reduce_sum(picked(x)) * x


def loop_in_gradient(x: Any) -> Any:
    @tf.custom_gradient
    def looped(v: Any) -> Any:
        def grad(dy: Any) -> Any:
            return tf.while_loop(lambda i, g: i < 3, lambda i, g: (i + 1, g * v + spike_fn(g)), [0, dy])[1]

        return tf.identity(v), grad

    return looped(x) * x


CASES: list[Callable[..., Any]] = [
    spike_fn, log1pexp, nested_function, in_loop, in_branch, with_outer_tensor, with_outer_tensor_deep, with_lambda,
    with_constant, sparse_gradient, loop_in_gradient, tf.nn.silu, tf.nn.elu, outer_fn,
    lambda x: tf.add_n(two_in_two_out(x, 2.0 * x)) * x,
    tf.recompute_grad(lambda x: tf.sin(x) * x),
]  # fmt: skip


def local(fn: Callable[..., Any], x: Any, second: bool = False) -> Any:
    """The same gradient by TensorFlow, in this process, op by op."""
    tf.config.run_functions_eagerly(True)
    try:
        return eager(fn, x, second)
    finally:
        tf.config.run_functions_eagerly(False)


def eager(fn: Callable[..., Any], x: Any, second: bool) -> Any:
    source = tf.constant(x)
    with tf.GradientTape() as outer:
        outer.watch(source)
        with tf.GradientTape() as tape:
            tape.watch(source)
            y = fn(source)
        first = tape.gradient(y, source)
    if second:
        return outer.gradient(first, source)
    return y.numpy(), tf.convert_to_tensor(first).numpy()


@pytest.mark.parametrize("fn", CASES, ids=lambda fn: getattr(fn, "__name__", "recomputed"))
@pytest.mark.parametrize("x", [X, np.abs(X)], ids=["mixed", "positive"])
def test_the_gradient_is_the_traced_one(fn: Callable[..., Any], x: Any) -> None:
    graph = gr.trace(lambda x: tf.identity(fn(x)), SPEC)
    value, (gradient,) = Interpreter(graph).gradients_of("output", ["x"], {"x": x})
    expected_value, expected = local(fn, x)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_the_second_order_has_the_inner_custom_gradient() -> None:
    graph = gr.trace(outer_fn, SPEC)
    _, (second,) = Interpreter(graph).gradients_of("output", ["x"], {"x": X}, second=True)
    # The inner function's second argument is x: its own custom gradient, 11 · upstream · x, holds.
    np.testing.assert_allclose(second, local(outer_fn, X, second=True), rtol=1e-6)
    np.testing.assert_allclose(second, 11 * X, rtol=1e-6)


def regions(graph: gr.Graph) -> dict[str, Any]:
    message = tf.compat.v1.GraphDef.FromString(graph.to_bytes())
    bodies = [message.node, *(function.node_def for function in message.library.function)]
    return {
        node.attr["_gradrule_region"].s.decode(): node
        for nodes in bodies
        for node in nodes
        if "_gradrule_region" in node.attr
    }


def function(graph: gr.Graph, node: Any) -> Any:
    library = tf.compat.v1.GraphDef.FromString(graph.to_bytes()).library
    registered = {item.registered_op_type: item.gradient_func for item in library.registered_gradients}
    name = registered[node.attr["_gradient_op_type"].s.decode()]
    return next(item for item in library.function if item.signature.name == name)


def arguments(found: Any) -> tuple[list[str], list[str]]:
    return [item.name for item in found.signature.input_arg], [item.name for item in found.signature.output_arg]


def test_attributes_and_gradient_function_of_a_region() -> None:
    graph = gr.trace(log1pexp, SPEC)
    node = regions(graph)["log1pexp"]
    assert node.op == "IdentityN"
    assert (node.attr["_gradrule_outputs"].i, node.attr["_gradrule_inputs"].i) == (1, 1)
    # The result, the argument, and e, which the gradient captured.
    assert list(node.input) == ["Log", "x", "Exp"]
    assert list(node.attr["T"].list.type) == [1, 1, 1]
    inputs, outputs = arguments(function(graph, node))
    assert sorted(inputs) == ["dy", "x1"]
    assert outputs == ["dx"]


def test_several_inputs_and_outputs() -> None:
    graph = gr.trace(two_in_two_out, SPEC, SPEC)
    node = regions(graph)["two_in_two_out"]
    assert (node.attr["_gradrule_outputs"].i, node.attr["_gradrule_inputs"].i) == (2, 2)
    inputs, outputs = arguments(function(graph, node))
    assert sorted(inputs) == ["dy", "x1"]
    assert outputs == ["dx"]


def test_names_of_regions() -> None:
    assert set(regions(gr.trace(with_lambda, SPEC))) == {"lambda"}
    assert set(regions(gr.trace(in_loop, SPEC))) == {"spike_fn", "log1pexp"}


def test_each_call_is_a_separate_region() -> None:
    graph = gr.trace(lambda x: spike_fn(x) + spike_fn(2.0 * x), SPEC)
    found = graph.find(op_type="IdentityN")
    names = {node.attrs["_gradient_op_type"].s for node in found}
    assert len(found) == len(names) == 2


@pytest.mark.parametrize("own", ["tf.Variable", "argument"])
def test_variables_in_a_custom_gradient(own: str) -> None:
    """The linear polynomial of TensorFlow's page: (1, 1, 1) for x, (6, 3) for the weights."""
    weights = tf.Variable([1.0, 2.0], name="weights")

    @tf.custom_gradient
    def linear_poly(x: Any) -> Any:
        poly = weights[1] * x + weights[0]

        def grad_fn(dpoly: Any, variables: Any) -> Any:
            grad_xs = dpoly * variables[0][1] if own == "tf.Variable" else dpoly * weights.read_value()[1]
            return grad_xs / 2.0, [tf.stack([2.0 * tf.reduce_sum(dpoly), tf.reduce_sum(dpoly)])]

        return poly, grad_fn

    graph = gr.trace(linear_poly, SPEC)
    assert list(graph.variables) == ["weights"]
    _, (dx, dw) = Interpreter(graph).gradients_of("output", ["x", "weights"], {"x": np.array([1, 2, 3], np.float32)})
    np.testing.assert_allclose(dx, [1, 1, 1])
    np.testing.assert_allclose(dw, [6, 3])
    message = tf.compat.v1.GraphDef.FromString(graph.to_bytes())
    found = function(graph, regions(graph)["linear_poly"])
    # A rule reads nothing by itself.
    assert tf.resource.as_datatype_enum not in [item.type for item in found.signature.input_arg]
    assert all(node.op != "ReadVariableOp" for item in message.library.function for node in item.node_def)


def test_a_variable_that_only_the_gradient_uses_in_a_loop() -> None:
    slope = tf.Variable(4.0, name="slope")

    @tf.custom_gradient
    def sloped(v: Any) -> Any:
        def grad(dy: Any) -> Any:
            return tf.while_loop(lambda i, g: i < 2, lambda i, g: (i + 1, g * slope), [0, dy])[1]

        return tf.sign(v), grad

    def fn(x: Any) -> Any:
        return tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, v + sloped(v)), [0, x])[1]

    graph = gr.trace(fn, SPEC)
    assert graph.variables == {"slope": 4.0}
    _, (gradient,) = Interpreter(graph).gradients_of("output", ["x"], {"x": X})
    np.testing.assert_allclose(gradient, np.full(3, 17.0**2))


def test_a_gathered_variable_in_a_gradient() -> None:
    table = tf.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], name="table")

    @tf.custom_gradient
    def looked_up(x: Any) -> Any:
        return tf.identity(x), lambda dy: dy * tf.reduce_sum(tf.gather(table, [2, 0, 1]), 1)

    graph = gr.trace(looked_up, SPEC)
    _, (gradient,) = Interpreter(graph).gradients_of("output", ["x"], {"x": X})
    np.testing.assert_allclose(gradient, [11, 3, 7])


def guided(op: Any, dy: Any) -> Any:
    return tf.where((dy > 0) & (op.outputs[0] > 0), dy, tf.zeros_like(dy))


def test_registered_gradients_are_traced() -> None:
    def fn(x: Any) -> Any:
        with tf.compat.v1.get_default_graph().gradient_override_map(
            {"Relu": "GradruleReferenceGuided", "Sign": "Identity"}
        ):
            return tf.nn.relu(x) * -x + tf.nn.relu(x + 1.0) + tf.sign(x)

    tf.RegisterGradient("GradruleReferenceGuided")(guided)
    graph = gr.trace(fn, SPEC)
    relus = graph.find(op_type="Relu")
    names = {node.attrs["_gradient_op_type"].s.decode() for node in relus}
    assert len(relus) == 2
    assert names == {"GradruleReferenceGuided"}
    (sign,) = graph.find(op_type="Sign")
    assert sign.attrs["_gradient_op_type"].s == b"Identity"
    found = function(graph, relus[0].message)
    assert arguments(found) == (["dy", "y"], ["dx"])
    _, (gradient,) = Interpreter(graph).gradients_of("output", ["x"], {"x": X})
    # relu(x)·-x: the upstream -x is cut where it is negative, so only relu(x)·-1 is left; Sign's is taken as it is by
    # the reference, which differentiates ops by their own gradients.
    expected = -np.maximum(X, 0) + (X + 1 > 0)
    np.testing.assert_allclose(gradient, expected)


def test_a_gradient_that_needs_another_tensor_of_the_graph() -> None:
    held: list[Any] = []
    tf.RegisterGradient("GradruleReferenceHolding")(lambda op, dy: dy * held[0])

    def fn(x: Any) -> Any:
        held[:] = [tf.exp(x)]
        with tf.compat.v1.get_default_graph().gradient_override_map({"Sign": "GradruleReferenceHolding"}):
            return tf.sign(x)

    with pytest.raises(gr.errors.UnsupportedError, match=r"GradruleReferenceHolding.*'Sign'.*'Exp:0'"):
        gr.trace(fn, SPEC)


def test_gradient_functions_that_fail() -> None:
    def broken(x: Any) -> Any:
        def grad(dy: Any) -> Any:
            raise RuntimeError("out of luck")

        return tf.identity(x), grad

    with pytest.raises(gr.errors.UnsupportedError, match=r"'broken' at node 'IdentityN'.*out of luck"):
        gr.trace(tf.custom_gradient(broken), SPEC)


def test_gradient_names_of_other_processes_are_kept() -> None:
    def fn(x: Any) -> Any:
        with tf.compat.v1.get_default_graph().gradient_override_map({"Sign": "ste_sign"}):
            return tf.sign(x)

    (sign,) = gr.trace(fn, SPEC).find(op_type="Sign")
    assert sign.attrs["_gradient_op_type"].s == b"ste_sign"
