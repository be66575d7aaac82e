"""Regions: a rule for a subgraph, like `tf.custom_gradient`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service.answers import assert_close, refused, statuses
from tests.service.graph_defs import build_graph, placeholder

X = np.float32([100.0, -2.0, 0.5])


def naive_log1pexp(scale: bool = False) -> gr.Graph:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    e = g.op("Exp", x, name="e")
    out = g.op("Log", g.op("AddV2", e, g.constant(np.float32(1)), name="sum"), name="out")
    g.op("Mul", out, g.constant(np.float32(2)), name="y")
    return g


def test_log1pexp_as_a_region(either: Any) -> None:
    overrides = [gr.Override("log1pexp", region=gr.Region(inputs=["x"], outputs=["out"]))]
    r = either.evaluate(naive_log1pexp(), {"x": X}, ys=["y"], xs=["x"], overrides=overrides)
    assert_close(r.gradients["x"], np.float32(2 / (1 + np.exp(-X.astype(np.float64)))))
    assert np.isnan(either.evaluate(naive_log1pexp(), {"x": X}, ys=["y"], xs=["x"]).gradients["x"][0])
    (resolution,) = r.overrides
    assert (resolution.node, resolution.nodes, resolution.label) == ("out", ("e", "sum", "out"), "out")


def test_region_with_two_inputs_and_outputs_equals_custom_gradient(client: Any) -> None:
    @tf.custom_gradient
    def rotate(a: Any, b: Any) -> Any:
        def backward(da: Any, db: Any) -> Any:
            return 3 * da + b * db, a * da - db

        return (a * b, tf.sin(a) + b), backward

    a, b = np.float32([1.0, 2.0]), np.float32([0.5, -1.0])
    with tf.GradientTape() as tape:
        at, bt = tf.constant(a), tf.constant(b)
        tape.watch([at, bt])
        first, second = rotate(at, bt)
        loss = tf.reduce_sum(first * first + second)
    wanted = tape.gradient(loss, [at, bt])

    g = gr.Graph()
    x, z = g.placeholder("a", "float32", [None]), g.placeholder("b", "float32", [None])
    product = g.op("Mul", x, z, name="product")
    shifted = g.op("AddV2", g.op("Sin", x, name="sin"), z, name="shifted")
    g.reduce_sum(product * product + shifted, name="y")
    rule = gr.Rule("(3 * dy0 + x1 * dy1, x0 * dy0 - dy1)")
    region = gr.Region([x, z], [product, shifted])
    r = client.evaluate(
        g, {"a": a, "b": b}, ys=["y"], xs=["a", "b"], overrides=[gr.Override(rule, region=region, label="rotate")]
    )
    assert_close(r.gradients["a"], wanted[0].numpy())
    assert_close(r.gradients["b"], wanted[1].numpy())
    assert r.overrides[0].label == "rotate"


def test_region_has_priority_over_its_nodes_and_can_use_its_default_gradient(either: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    g.op("Tanh", g.op("Relu", x, name="r"), name="y")
    region = gr.Override(gr.Rule("2 * default"), region=gr.Region(["x"], ["y"]))
    inner = gr.Override(gr.Rule("1000 * dy"), op_type="Relu", optional=True)
    r = either.evaluate(g, {"x": [0.5, -1.0]}, ys=["y"], xs=["x"], overrides=[inner, region])
    assert_close(r.gradients["x"], np.float32([2 * (1 - np.tanh(0.5) ** 2), 0]))
    assert statuses(r) == {"y": "active"}
    assert r.default_gradient_nodes == []


def test_op_rule_on_a_region(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    g.op("Sign", g.op("Floor", x, name="f"), name="y")
    overrides = [gr.Override("Tanh", region=gr.Region(["x"], ["y"]))]
    r = client.evaluate(g, {"x": [0.5, -1.5]}, ys=["y"], xs=["x"], overrides=overrides)
    # Tanh's gradient is dy (1 - y²), and y is a sign.
    assert_close(r.gradients["x"], np.float32([1, 0]))
    with refused("RULE_NOT_APPLICABLE"):
        client.evaluate(
            g, {"x": [0.5]}, ys=["y"], xs=["x"], overrides=[gr.Override("MatMul", region=gr.Region(["x"], ["y"]))]
        )


def test_regions_inside_functions_and_loops(client: Any) -> None:
    @tf.function
    def soft(v: Any) -> Any:
        return tf.math.log(tf.exp(v, name="e") + 1.0, name="l")

    def in_call() -> None:
        tf.identity(soft(placeholder("x")), name="y")

    def in_loop() -> None:
        x = placeholder("x")
        _, out = tf.while_loop(
            lambda i, v: i < 2,
            lambda i, v: (i + 1, tf.math.log(tf.exp(tf.identity(v, name="v"), name="e") + 1.0, name="l")),
            [0, x],
            name="loop",
        )
        tf.identity(out, name="y")

    for build in (in_call, in_loop):
        g = build_graph(build)
        plain = client.evaluate(g, {"x": [0.5, -1.0]}, ys=["y"], xs=["x"])
        # TensorFlow numbers the nodes of a loop's body: l_0.
        by_name = {name.rpartition("/")[2].split("_")[0]: name for name in plain.default_gradient_nodes}
        overrides = [gr.Override("log1pexp", region=gr.Region([by_name.get("v", "x")], [by_name["l"]]))]
        r = client.evaluate(g, {"x": [0.5, -1.0]}, ys=["y"], xs=["x"], overrides=overrides)
        assert_close(r.gradients["x"], plain.gradients["x"])
        assert by_name["l"] in statuses(r)
        assert by_name["e"] not in r.default_gradient_nodes
        large = client.evaluate(g, {"x": [200.0]}, ys=["y"], xs=["x"], overrides=overrides)
        assert_close(large.gradients["x"], np.float32([1]))


def branching() -> gr.Graph:
    g = gr.Graph()
    x, w = g.placeholder("x", "float32", [None]), g.placeholder("w", "float32", [None])
    a = g.op("Relu", x, name="a")
    b = g.op("Mul", a, w, name="b")
    c = g.op("Tanh", b, name="c")
    g.op("AddV2", c, a, name="y")
    return g


@pytest.mark.parametrize(
    ("inputs", "outputs", "xs", "reason", "says"),
    [
        (["x"], ["c"], ["x"], "INVALID_OVERRIDE", "'a' inside it is used outside, by y"),
        (["a"], ["c"], ["x", "w"], "INVALID_OVERRIDE", "'w' enters it"),
        (["c"], ["a"], ["x"], "INVALID_OVERRIDE", "does not depend"),
        (["x"], ["nope"], ["x"], "UNKNOWN_TENSOR", "nope"),
        (["a"], ["c"], ["b"], "INVALID_OVERRIDE", "inside it is used outside"),
    ],
)
def test_invalid_region_is_refused(
    client: Any, inputs: list[str], outputs: list[str], xs: list[str], reason: str, says: str
) -> None:
    override = gr.Override(gr.Rule("each(zeros_like(x))"), region=gr.Region(inputs, outputs))
    with refused(reason) as refusal:
        client.evaluate(branching(), {"x": [1.0], "w": [2.0]}, ys=["y"], xs=xs, overrides=[override])
    refusal.says(says)


def test_unrequested_weights_may_stay_inside_a_region(client: Any) -> None:
    override = gr.Override(gr.Rule("7 * dy"), region=gr.Region(["a"], ["c"]))
    r = client.evaluate(branching(), {"x": [1.0], "w": [2.0]}, ys=["y"], xs=["x"], overrides=[override])
    assert_close(r.gradients["x"], np.float32([8]))


def test_overlapping_regions_are_refused(client: Any) -> None:
    overrides = [
        gr.Override(gr.Rule("(dy, None)"), region=gr.Region(["a", "w"], ["c"]), label="one"),
        gr.Override(gr.Rule("dy"), region=gr.Region(["b"], ["c"]), label="two"),
    ]
    with refused("INVALID_OVERRIDE") as refusal:
        client.evaluate(branching(), {"x": [1.0], "w": [2.0]}, ys=["y"], xs=["x"], overrides=overrides)
    refusal.says("overlap", "'one'", "'two'", "'c'")


def test_neighbouring_regions_are_independent(client: Any) -> None:
    g = gr.Graph()
    v = g.placeholder("x", "float32", [None])
    for name in ("a", "b", "c"):
        v = g.op("Sign", v, name=name)
    pairs = [("x", "a", 2), ("a", "b", 3), ("b", "c", 5)]
    overrides = [gr.Override(gr.Rule(f"{k} * dy"), region=gr.Region([i], [o])) for i, o, k in pairs]
    r = client.evaluate(g, {"x": [1.0]}, ys=["c"], xs=["x", "a", "b"], overrides=overrides)
    assert [float(r.gradients[name][0]) for name in ("x", "a", "b")] == [30.0, 15.0, 5.0]


def test_dependent_inputs_of_a_region_are_independent_variables(client: Any) -> None:
    """out = x · h with h = x²: the subgraph's gradients are h and x, whatever comes before."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    h = g.op("Square", x, name="h")
    g.op("Mul", x, h, name="out")
    override = gr.Override(gr.Rule("each(default)"), region=gr.Region(["x", "h"], ["out"]))
    r = client.evaluate(g, {"x": [2.0]}, ys=["out"], xs=["x"], overrides=[override])
    assert_close(r.gradients["x"], np.float32([12]))


def test_tensor_used_twice_is_one_input_of_a_region(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    g.op("AddV2", g.op("Mul", x, x, name="m"), g.constant(np.float32(1)), name="y")
    override = gr.Override(gr.Rule("each(default)"), pattern=("Mul", "AddV2"))
    assert_close(
        client.evaluate(g, {"x": [3.0]}, ys=["y"], xs=["x"], overrides=[override]).gradients["x"], np.float32([6])
    )
    twice = gr.Override(gr.Rule("each(default)"), region=gr.Region(["x"], ["y", "y"]))
    with refused("INVALID_OVERRIDE") as refusal:
        client.evaluate(g, {"x": [3.0]}, ys=["y"], xs=["x"], overrides=[twice])
    refusal.says("'y' is named twice")


def branches() -> gr.Graph:
    def build() -> None:
        x, z = placeholder("x", shape=(2,)), placeholder("z", shape=(2,))
        b = 3.0 * z
        tf.identity(
            tf.cond(tf.reduce_sum(x) > 0, lambda: tf.multiply(tf.sin(x, name="h"), b, name="o"), lambda: x), name="y"
        )

    return build_graph(build)


def test_arguments_of_a_branch_depend_on_the_xs(client: Any) -> None:
    words: dict[str, Any] = {"ys": ["y"], "xs": ["x", "z"]}
    feeds = {"x": np.float32([1, 2]), "z": np.float32([3, 4])}
    plain = client.evaluate(branches(), feeds, **words)
    inner = {name.rpartition("/")[2].split("_")[0]: name for name in plain.default_gradient_nodes if "/" in name}
    override = gr.Override(gr.Rule("dy"), region=gr.Region([inner["h"]], [inner["o"]]))
    with refused("INVALID_OVERRIDE") as refusal:
        client.evaluate(branches(), feeds, overrides=[override], **words)
    refusal.says("enters it from outside")
    # Arguments have names like all tensors, so they can be inputs of a region.
    argument = refusal.message.partition("the region is invalid: '")[2].partition("'")[0]
    both = gr.Override(gr.Rule("each(default)"), region=gr.Region([inner["h"], argument], [inner["o"]]))
    r = client.evaluate(branches(), feeds, overrides=[both], **words)
    for name in ("x", "z"):
        assert_close(r.gradients[name], plain.gradients[name])


def test_region_around_a_branch_has_priority_over_its_nodes(client: Any) -> None:
    feeds = {"x": np.float32([1, 2]), "z": np.float32([3, 4])}
    region = gr.Override(gr.Rule("(7 * dy, None)"), region=gr.Region(["x", "z"], ["y"]))
    inside = gr.Override(gr.Rule("100 * dy"), op_type="Sin", optional=True)
    r = client.evaluate(branches(), feeds, ys=["y"], xs=["x"], overrides=[region, inside])
    assert_close(r.gradients["x"], np.float32([7, 7]))
    assert set(statuses(r).values()) == {"active"}
