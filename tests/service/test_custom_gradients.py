"""Custom gradients embedded in a graph by `tf.custom_gradient`, and overrides of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service.answers import assert_close, refused, statuses
from tests.service.custom_gradient_graphs import custom_gradient_nodes, graph_def_with_gradients, graph_with_gradients
from tests.service.graph_defs import load_graph, placeholder

X = np.float32([-2.0, 0.5, 3.0])


@contextlib.contextmanager
def is_refused(reason: str, text: str) -> Iterator[None]:
    """Asserts that the block is refused for this reason with a message that contains the text."""
    with refused(reason) as refusal:
        yield
    refusal.says(text)


Build = Callable[[Callable[..., Any], Sequence[Any]], Any]


def graph_of(build: Build, count: int = 1) -> gr.Graph:
    """Builds `build(custom_gradient, xs)` as a graph of placeholders x0, x1, … and the result y."""
    return graph_with_gradients(lambda custom_gradient: gradients_on_server(custom_gradient, build, count))


def gradients_on_server(custom_gradient: Callable[..., Any], build: Build, count: int) -> None:
    xs = [placeholder(f"x{index}", shape=(None,)) for index in range(count)]
    tf.identity(build(custom_gradient, xs), name="y")


def gradients_in_tensorflow(build: Build, *values: Any) -> list[Any]:
    """Computes gradients of the sum of what `build` makes with TensorFlow's own `custom_gradient`."""
    xs = [tf.constant(value) for value in values]
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = build(tf.custom_gradient, xs)
    return [None if gradient is None else gradient.numpy() for gradient in tape.gradient(y, xs)]


def assert_same(client: Any, build: Build, *values: Any) -> Any:
    names = [f"x{index}" for index in range(len(values))]
    r = client.evaluate(graph_of(build, len(values)), dict(zip(names, values, strict=True)), ys=["y"], xs=names)
    for name, wanted in zip(names, gradients_in_tensorflow(build, *values), strict=True):
        assert (r.gradients[name] is None) == (wanted is None)
        if wanted is not None:
            assert_close(r.gradients[name], wanted)
    return r


def spike(custom_gradient: Callable[..., Any]) -> Callable[..., Any]:
    @custom_gradient
    def spike_fn(v: Any) -> Any:
        def backward(dy: Any) -> Any:
            return dy / (1 + tf.abs(v)) ** 2

        return tf.cast(v > 0, tf.float32), backward

    return spike_fn


def test_function_with_a_custom_gradient(either: Any) -> None:
    def build(custom_gradient: Any, xs: Any) -> Any:
        return 3 * spike(custom_gradient)(2 * xs[0])

    r = assert_same(either, build, X)
    (resolution,) = r.overrides
    assert (resolution.rule, resolution.label, resolution.status) == ("spike_fn", "spike_fn", "active")
    assert resolution.op_type == "IdentityN"


def test_log1pexp_at_100(client: Any) -> None:
    def build(custom_gradient: Any, xs: Any) -> Any:
        @custom_gradient
        def log1pexp(x: Any) -> Any:
            e = tf.exp(x)

            def grad(upstream: Any) -> Any:
                return upstream * (1 - 1 / (1 + e))

            return tf.math.log(1 + e), grad

        return log1pexp(xs[0])

    r = assert_same(client, build, np.float32([100.0, 0.0]))
    assert_close(r.gradients["x0"], np.float32([1.0, 0.5]))


def test_the_product_of_two_arguments(client: Any) -> None:
    def build(custom_gradient: Any, xs: Any) -> Any:
        @custom_gradient
        def bar(x: Any, y: Any) -> Any:
            def grad(upstream: Any) -> Any:
                return y * upstream, x * upstream

            return x * y, grad

        return bar(*xs)

    assert_same(client, build, X, np.float32([4.0, 5.0, 6.0]))


def test_several_results_and_an_integer_argument(client: Any) -> None:
    def build(custom_gradient: Any, xs: Any) -> Any:
        @custom_gradient
        def both(x: Any, n: Any, z: Any) -> Any:
            scale = tf.cast(n, tf.float32)

            def backward(da: Any, db: Any) -> Any:
                return 10 * da * scale, None, 100 * db + x

            return (x * scale, x + z), backward

        first, second = both(xs[0], tf.constant(3), xs[1])
        return first * first + tf.sin(second)

    assert_same(client, build, X, np.float32([4.0, 5.0, 6.0]))


def test_gradient_that_uses_results_and_returns_none(client: Any) -> None:
    def build(custom_gradient: Any, xs: Any) -> Any:
        @custom_gradient
        def root(x: Any, z: Any) -> Any:
            y = tf.sqrt(tf.abs(x)) + 0 * z

            def backward(dy: Any) -> Any:
                return dy / y, None

            return y, backward

        return root(*xs)

    r = assert_same(client, build, X, X)
    assert r.gradients["x1"] is None


def test_a_constant_gradient(client: Any) -> None:
    def build(custom_gradient: Any, xs: Any) -> Any:
        @custom_gradient
        def odd(x: Any) -> Any:
            return tf.reduce_sum(x), lambda _: tf.constant([100.0, 100.0, 100.0])

        return odd(xs[0])

    assert_close(assert_same(client, build, X).gradients["x0"], np.float32([100, 100, 100]))


def test_custom_gradient_in_a_function(client: Any) -> None:
    def build(custom_gradient: Any, xs: Any) -> Any:
        @tf.function(autograph=False)
        def inner(x: Any) -> Any:
            return 3 * spike(custom_gradient)(2 * x)

        @tf.function(autograph=False)
        def outer(x: Any) -> Any:
            return inner(x) * inner(x + 1)

        return outer(xs[0])

    r = assert_same(client, build, X)
    assert len(r.overrides) == 2
    assert all("/" in resolution.node for resolution in r.overrides)


def test_custom_gradient_in_a_loop(client: Any) -> None:
    def build(custom_gradient: Any, xs: Any) -> Any:
        def step(n: Any, v: Any, total: Any) -> Any:
            fired = spike(custom_gradient)(v - 0.5)
            return n + 1, 0.9 * v * (1 - fired) + xs[0], total + fired * v

        return tf.while_loop(lambda n, v, total: n < 4, step, (tf.constant(0), xs[0], tf.zeros_like(xs[0])))[2]

    assert_same(client, build, np.float32([-0.3, 0.3, 0.7]))


def test_custom_gradient_in_a_branch(client: Any) -> None:
    def build(custom_gradient: Any, xs: Any) -> Any:
        x = xs[0]
        return tf.cond(tf.reduce_sum(x) > 0, lambda: 2 * spike(custom_gradient)(x), lambda: x * x)

    assert_same(client, build, X)
    assert_same(client, build, -X)


def test_gradient_that_contains_calls_loops_and_branches(client: Any) -> None:
    def build(custom_gradient: Any, xs: Any) -> Any:
        @tf.function(autograph=False)
        def halved(v: Any) -> Any:
            return v / 2

        @custom_gradient
        def f(x: Any) -> Any:
            def backward(dy: Any) -> Any:
                grown = tf.while_loop(lambda n, v: n < 3, lambda n, v: (n + 1, v * x + halved(v)), (tf.constant(0), dy))
                return tf.cond(tf.reduce_sum(x) > 0, lambda: grown[1], lambda: halved(halved(dy)))

            return tf.sign(x), backward

        return f(xs[0]) * f(2 * xs[0])

    assert_same(client, build, X)
    assert_same(client, build, -X)


def test_custom_gradient_of_a_single_op(client: Any) -> None:
    def build(custom_gradient: Any) -> None:
        tf.identity(spike(custom_gradient)(placeholder("x")), name="y")

    graph_def = graph_def_with_gradients(build)
    name = graph_def.library.registered_gradients[0].registered_op_type
    graph_def.node.add(name="s", op="Sign", input=["x"]).attr["_gradient_op_type"].s = name.encode()
    r = client.evaluate(load_graph(graph_def), {"x": X}, ys=["s"], xs=["x"])
    assert_close(r.gradients["x"], 1 / (1 + np.abs(X)) ** 2)
    assert (r.overrides[0].rule, r.overrides[0].op_type) == (name, "Sign")


def two_spikes(custom_gradient: Any, xs: Any) -> Any:
    @tf.function(autograph=False)
    def inner(x: Any) -> Any:
        return spike(custom_gradient)(tf.tanh(x))

    return 3 * inner(xs[0]) + tf.sin(spike(custom_gradient)(xs[0]))


def test_region_is_overridden_by_name(either: Any) -> None:
    g = graph_of(two_spikes)
    rule = gr.Rule("scale * x * dy", params=["scale"])
    override = gr.Override(rule, region="spike_fn", params={"scale": 2.0})
    r = either.evaluate(g, {"x0": X}, ys=["y"], xs=["x0"], overrides=[override])
    t = np.tanh(X)
    fired = (X > 0).astype(np.float32)
    assert_close(r.gradients["x0"], 3 * 2 * t * (1 - t * t) + np.cos(fired) * 2 * X)
    assert {resolution.label for resolution in r.overrides} == {"spike_fn"}
    r = either.evaluate(g, {"x0": X}, ys=["y"], xs=["x0"], overrides=[override], params={"spike_fn": {"scale": 0.0}})
    assert_close(r.gradients["x0"], np.zeros(3, np.float32))


def softened(custom_gradient: Any, xs: Any) -> Any:
    @custom_gradient
    def soft(x: Any, z: Any) -> Any:
        e = tf.exp(x)

        def backward(dy: Any) -> Any:
            return 7 * dy * e, 11 * dy

        return tf.nn.relu(e * z), backward

    return soft(tf.sin(xs[0]), xs[1])


def test_default_rule_of_a_region_differentiates_its_nodes(client: Any) -> None:
    def plain(_: Any, xs: Any) -> Any:
        return tf.nn.relu(tf.exp(tf.sin(xs[0])) * xs[1])

    z = np.float32([1.0, -1.0, 2.0])
    feeds = {"x0": X, "x1": z}
    g = graph_of(softened, 2)
    assert_same(client, softened, X, z)
    r = client.evaluate(g, feeds, ys=["y"], xs=["x0", "x1"], overrides=[gr.Override("default", region="soft")])
    for name, wanted in zip(("x0", "x1"), gradients_in_tensorflow(plain, X, z), strict=True):
        assert_close(r.gradients[name], wanted)
    # Overrides of the nodes inside then apply.
    overrides = [gr.Override("default", region="soft"), gr.Override("ste", op_type="Relu")]
    r = client.evaluate(g, feeds, ys=["y"], xs=["x1"], overrides=overrides)
    assert_close(r.gradients["x1"], np.exp(np.sin(X)))


def test_rule_of_a_region_can_use_the_default_gradient(client: Any) -> None:
    g = graph_of(softened, 2)
    z = np.float32([1.0, -1.0, 2.0])
    rule = gr.Rule("(2 * default, default1)")
    r = client.evaluate(g, {"x0": X, "x1": z}, ys=["y"], xs=["x0", "x1"], overrides=[gr.Override(rule, region="soft")])
    through = (z > 0) * np.exp(np.sin(X))
    assert_close(r.gradients["x0"], 2 * through * z * np.cos(X))
    assert_close(r.gradients["x1"], through)


def test_nodes_inside_are_off_the_path(client: Any) -> None:
    g = graph_of(softened, 2)
    feeds = {"x0": X, "x1": X}
    inside = gr.Override(gr.Rule("1000 * dy"), op_type="Relu", optional=True)
    r = client.evaluate(g, feeds, ys=["y"], xs=["x0"], overrides=[inside])
    assert_close(r.gradients["x0"], gradients_in_tensorflow(softened, X, X)[0])
    assert {resolution.status for resolution in r.overrides if resolution.op_type == "Relu"} == {"off_path"}
    with is_refused("INACTIVE_OVERRIDE", "off the path"):
        client.evaluate(g, feeds, ys=["y"], xs=["x0"], overrides={"Relu": "ste"})


def test_positions_and_patterns_count_a_region_as_one_node(client: Any) -> None:
    def build(custom_gradient: Any, xs: Any) -> Any:
        @custom_gradient
        def f(x: Any) -> Any:
            return tf.nn.relu(tf.nn.relu(x)), lambda dy: 5 * dy

        return tf.sin(f(tf.nn.relu(xs[0])))

    g = graph_of(build)
    double = gr.Rule("2 * dy")
    last = gr.Override(double, op_type="Relu", position="nearest_ys")
    r = client.evaluate(g, {"x0": X}, ys=["y"], xs=["x0"], overrides=[last])
    assert_close(r.gradients["x0"], 2 * 5 * np.cos(np.maximum(X, 0)))
    # Only the outer Relu feeds the region, which counts as one node.
    through = [gr.Override("default", region="f"), gr.Override(double, pattern=("Relu", "Relu"))]
    r = client.evaluate(g, {"x0": X}, ys=["y"], xs=["x0"], overrides=through)
    assert [len(resolution.nodes) for resolution in r.overrides if resolution.nodes] == [2]


def test_override_by_op_type_applies_to_the_region(client: Any) -> None:
    g = graph_of(softened, 2)
    override = gr.Override(gr.Rule("(x * dy, None)"), op_type="IdentityN")
    r = client.evaluate(g, {"x0": X, "x1": X}, ys=["y"], xs=["x0", "x1"], overrides=[override])
    assert_close(r.gradients["x0"], np.sin(X) * np.cos(X))
    assert r.gradients["x1"] is None


def test_override_of_an_unknown_region_is_refused(client: Any) -> None:
    g = graph_of(two_spikes)
    with is_refused("UNMATCHED_OVERRIDE", "'spike_fn'"):
        client.evaluate(g, {"x0": X}, ys=["y"], xs=["x0"], overrides=[gr.Override("ste", region="spike_f")])
    plain = graph_of(lambda _, xs: tf.sin(xs[0]))
    with is_refused("UNMATCHED_OVERRIDE", "none"):
        client.evaluate(plain, {"x0": X}, ys=["y"], xs=["x0"], overrides=[gr.Override("ste", region="f")])
    with is_refused("INVALID_OVERRIDE", "op_type"):
        both = gr.Override("ste", region="spike_fn", op_type="IdentityN")
        client.evaluate(g, {"x0": X}, ys=["y"], xs=["x0"], overrides=[both])


def broken(change: Callable[[Any], None]) -> gr.Graph:
    graph_def = graph_def_with_gradients(lambda custom_gradient: gradients_on_server(custom_gradient, softened, 2))
    change(graph_def)
    return load_graph(graph_def)


def _no_function(graph_def: Any) -> None:
    graph_def.library.registered_gradients[0].gradient_func = "elsewhere"


def _no_registration(graph_def: Any) -> None:
    for node in custom_gradient_nodes(graph_def):
        node.attr["_gradient_op_type"].s = b"CustomGradient-7"


def _registration_like_tensorflow(graph_def: Any) -> None:
    signature = graph_def.library.function[0].signature
    function = graph_def.library.function[0]
    for arg in signature.input_arg:
        for node in function.node_def:
            node.input[:] = [f"args_{name}" if name == arg.name else name for name in node.input]
        arg.name = f"args_{arg.name}"


def _too_many_results(graph_def: Any) -> None:
    custom_gradient_nodes(graph_def)[0].attr["_gradrule_outputs"].i = 40


def _no_counts(graph_def: Any) -> None:
    del custom_gradient_nodes(graph_def)[0].attr["_gradrule_inputs"]


def _gradient_for_a_non_input(graph_def: Any) -> None:
    custom_gradient_nodes(graph_def)[0].attr["_gradrule_inputs"].i = 1


def _on_another_op(graph_def: Any) -> None:
    node = next(node for node in graph_def.node if node.op == "Sin")
    node.attr["_gradrule_outputs"].i = node.attr["_gradrule_inputs"].i = 1


def _other_types(graph_def: Any) -> None:
    function = graph_def.library.function[0]
    for arg in (*function.signature.input_arg, *function.signature.output_arg):
        arg.type = tf.float64.as_datatype_enum
    for node in function.node_def:
        for attr in ("T", "dtype"):
            if attr in node.attr:
                node.attr[attr].type = tf.float64.as_datatype_enum
        if node.op == "Const":
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(7.0, tf.float64))


def _calls_itself(graph_def: Any) -> None:
    function = graph_def.library.function[0]
    function.node_def[0].op = function.signature.name


@pytest.mark.parametrize(
    ("change", "reason", "text"),
    [
        (_no_function, "INVALID_GRAPH", "'elsewhere'"),
        (_no_registration, "FOREIGN_GRADIENT", "gr.trace"),
        (_registration_like_tensorflow, "FOREIGN_GRADIENT", "gr.load"),
        (_too_many_results, "INVALID_GRAPH", "_gradrule_outputs"),
        (_no_counts, "INVALID_GRAPH", "_gradrule_inputs"),
        (_on_another_op, "INVALID_GRAPH", "IdentityN"),
        (_gradient_for_a_non_input, "RULE_ARITY", "dx1"),
        (_other_types, "RULE_NOT_APPLICABLE", "float64"),
        (_calls_itself, "GRAPH_CYCLE", "themselves"),
    ],
)
def test_invalid_custom_gradient_is_refused(client: Any, change: Callable[[Any], None], reason: str, text: str) -> None:
    with is_refused(reason, text):
        client.evaluate(broken(change), {"x0": X, "x1": X}, ys=["y"], xs=["x0", "x1"])


def test_status_of_an_override_off_the_path(client: Any) -> None:
    def build(custom_gradient: Any, xs: Any) -> Any:
        return tf.sin(xs[0]) + 0 * tf.stop_gradient(spike(custom_gradient)(xs[0]))

    r = assert_same(client, build, X)
    assert list(statuses(r).values()) == ["off_path"]


def test_compiled_programs_keep_custom_gradients(client: Any) -> None:
    def build(custom_gradient: Any, xs: Any) -> Any:
        return 3 * spike(custom_gradient)(2 * xs[0])

    g = graph_of(build)
    first = client.compile(g, ys=["y"], xs=["x0"])
    assert first.digests.program == client.compile(g, ys=["y"], xs=["x0"]).digests.program
    assert_close(first(x0=X).gradients["x0"], gradients_in_tensorflow(build, X)[0])


def test_rule_with_a_rule_for_its_own_gradient(either: Any) -> None:
    inner = gr.Rule("each(dy0)", params={"b": 3.0})
    gradient = gr.Rule("(b * dy * x2, None, dy * y)", params={"b": 2.0}, gradient=inner)
    created = either.create_rule("SoftSign", "dy * exp(x)", gradient=gradient)
    try:
        is_refused = either.get_rule("SoftSign")
        assert is_refused.digest == created.digest
        assert is_refused.gradient is not None and is_refused.gradient.gradient is not None
        assert is_refused.gradient.expression == "(b * dy * x2, None, dy * y)"
        assert is_refused.params == {"b": 2.0}
        g = gr.Graph()
        g.op("Sign", g.placeholder("x", "float32", [None]), name="y")
        r = either.evaluate(g, {"x": X}, ys=["y"], xs=["x"], overrides={"Sign": "SoftSign"})
        assert_close(r.gradients["x"], np.exp(X))
        r = either.evaluate(g, {"x": X}, ys=["y"], xs=["x"], overrides={"Sign": gr.Rule("dy * x", gradient=gradient)})
        assert_close(r.gradients["x"], X)
    finally:
        either.delete_rule("SoftSign")
