"""Rules of the catalogue on real graphs: randomness, params per call, code rules, and their descriptions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service.answers import assert_close, refused
from tests.service.graph_defs import build_graph, placeholder

X = np.linspace(-1, 1, 12).reshape(3, 4).astype(np.float32)


def gradients_of(client: Any, node: str, seed: float) -> Any:
    g = gr.Graph()
    g.op("Identity", g.placeholder("x", "float32", [None, 4]), name=node)
    return client.evaluate(
        g,
        {"x": X},
        ys=[node],
        xs=["x"],
        overrides={"Identity": "gradient_noise"},
        params={"Identity": {"seed": seed, "step": 0}},
    )


def test_random_rules_repeat_by_seed_and_differ_by_node(either: Any) -> None:
    one = gradients_of(either, "a", 7).gradients["x"]
    np.testing.assert_array_equal(one, gradients_of(either, "a", 7).gradients["x"])
    assert np.abs(one - gradients_of(either, "a", 8).gradients["x"]).min() > 0
    assert np.abs(one - gradients_of(either, "b", 7).gradients["x"]).min() > 0
    assert len(np.unique(one)) == one.size


def test_random_rule_without_seed_and_step_is_refused(client: Any) -> None:
    g = gr.Graph()
    g.op("Identity", g.placeholder("x", "float32", [None]), name="y")
    with refused("MISSING_PARAM") as refusal:
        client.evaluate(g, {"x": [1.0]}, ys=["y"], xs=["x"], overrides={"Identity": "gradient_noise"})
    refusal.says("seed")


def test_new_params_do_not_recompile(either: Any) -> None:
    first = gradients_of(either, "compiled_once", 1)
    later = [gradients_of(either, "compiled_once", seed) for seed in (2, 3, 4)]
    assert {r.digests.program for r in later} == {first.digests.program}
    assert [r.timings.compile for r in later] == [0, 0, 0]


def test_deeplift_multipliers_sum_to_the_difference_of_the_output(client: Any) -> None:
    """Checks DeepLIFT's completeness: multipliers times input differences add up to the output difference."""
    rng = np.random.default_rng(3)
    w1, w2, b = rng.normal(size=(4, 5)), rng.normal(size=(5, 1)), rng.normal(size=5)

    def build() -> None:
        x = placeholder("x", tf.float64, (None, 4))
        h = tf.nn.relu(tf.matmul(x, tf.constant(w1)) + tf.constant(b))
        tf.matmul(tf.tanh(h), tf.constant(w2), name="y")

    g = build_graph(build)
    x, baseline = rng.normal(size=(3, 4)), 0.3
    overrides = {"@activation": ("deeplift_rescale", {"baseline": baseline})}
    r = client.evaluate(g, {"x": x}, fetches=["y"], ys=["y"], xs=["x"], overrides=overrides)
    reference = client.evaluate(g, {"x": np.full((3, 4), baseline)}, fetches=["y"]).outputs["y"]
    explained = (r.gradients["x"] * (x - baseline)).sum(1, keepdims=True)
    np.testing.assert_allclose(explained, r.outputs["y"] - reference, rtol=1e-10)
    other = client.evaluate(
        g, {"x": x}, ys=["y"], xs=["x"], overrides=overrides, params={"@activation": {"baseline": -1.0}}
    )
    reference = client.evaluate(g, {"x": np.full((3, 4), -1.0)}, fetches=["y"]).outputs["y"]
    np.testing.assert_allclose(
        (other.gradients["x"] * (x + 1)).sum(1, keepdims=True), r.outputs["y"] - reference, rtol=1e-10
    )


def test_deeplift_on_an_op_directly_after_an_input(client: Any) -> None:
    g = gr.Graph()
    g.op("Relu", g.placeholder("x", "float64", [None]), name="y")
    r = client.evaluate(
        g, {"x": np.float64([2.0])}, ys=["y"], xs=["x"], overrides={"Relu": ("deeplift_rescale", {"baseline": -2.0})}
    )
    np.testing.assert_allclose(r.gradients["x"], [0.5])


def test_random_rules_can_be_sampled_without_a_node(either: Any) -> None:
    words: dict[str, Any] = {"x": np.zeros(50, np.float32), "params": {"seed": 3}}
    one = either.sample_rule("stochastic_spike_operator", **words).gradients["dx"]
    np.testing.assert_array_equal(one, either.sample_rule("stochastic_spike_operator", **words).gradients["dx"])
    assert len(np.unique(one)) > 40


def test_deeplift_inside_a_loop_is_refused(client: Any) -> None:
    def build() -> None:
        x = placeholder("x", tf.float32, (None,))
        _, y = tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, tf.nn.relu(v)), [0, x])
        tf.identity(y, name="y")

    with refused("RULE_NOT_APPLICABLE") as refusal:
        client.evaluate(build_graph(build), {"x": [1.0]}, ys=["y"], xs=["x"], overrides={"Relu": "deeplift_rescale"})
    refusal.says("loop")


def test_feedback_alignment_keeps_the_gradient_of_weights(client: Any) -> None:
    g = gr.Graph()
    x, w = g.placeholder("x", "float32", [None, 4]), g.placeholder("w", "float32", [4, 2])
    g.op("MatMul", x, w, name="y")
    feeds = {"x": X, "w": np.ones((4, 2), np.float32)}
    words: dict[str, Any] = {"ys": ["y"], "xs": ["x", "w"]}
    plain = client.evaluate(g, feeds, **words)
    r = client.evaluate(g, feeds, overrides={"MatMul": "feedback_alignment"}, **words)
    assert_close(r.gradients["w"], plain.gradients["w"])
    # Every row is multiplied by the same fixed matrix, whatever the weights are.
    assert_close(r.gradients["x"], np.broadcast_to(r.gradients["x"][0], (3, 4)).copy())
    moved = client.evaluate(g, feeds | {"w": 5 * feeds["w"]}, overrides={"MatMul": "feedback_alignment"}, **words)
    assert_close(moved.gradients["x"], r.gradients["x"])
    assert np.abs(r.gradients["x"] - plain.gradients["x"]).max() > 1e-3


def test_code_rule_on_an_unsupported_op_is_refused(client: Any) -> None:
    g = gr.Graph()
    g.op("Tanh", g.placeholder("x", "float32", [None]), name="y")
    with refused("RULE_NOT_APPLICABLE") as refusal:
        client.evaluate(g, {"x": [1.0]}, ys=["y"], xs=["x"], overrides={"Tanh": "lrp_epsilon"})
    refusal.says("lrp_epsilon", "'y'", "Tanh")


def test_code_rules_can_be_sampled_on_an_op(either: Any) -> None:
    w = np.float32([[1, -1], [2, 0.5]])
    sample = either.sample_rule("lrp_0", x=np.float32([[1, 2]]), x1=w, op_type="MatMul")
    # Relevance 1 for each output; y = (5, 0): the first is divided, the second has no contributions to divide.
    assert_close(sample.gradients["dx"], np.float32([[1 / 5, 4 / 5]]))
    pooled = either.sample_rule(
        "maxpool_as_avgpool",
        x=np.arange(16, dtype=np.float32).reshape(1, 4, 4, 1),
        op_type="MaxPool",
        attrs={"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"},
    )
    assert_close(pooled.gradients["dx"], np.full((1, 4, 4, 1), 0.25, np.float32))
    with refused("RULE_NOT_APPLICABLE"):
        either.sample_rule("lrp_0", x=np.float32([[1, 2]]), x1=w)


@pytest.mark.parametrize(
    ("rule", "params", "says"),
    [
        ("ste_sign", {"clip": -1.0}, "> 0"),
        ("lrp_gamma", {"gamma": float("nan")}, "gamma"),
        ("lsq", {"qn": 1.5}, "qn"),
    ],
)
def test_params_outside_their_range_are_refused(client: Any, rule: str, params: dict[str, float], says: str) -> None:
    g = gr.Graph()
    g.op("Sign", g.placeholder("x", "float32", [None]), name="y")
    with refused("INVALID_PARAM") as refusal:
        client.evaluate(g, {"x": [1.0]}, ys=["y"], xs=["x"], overrides={"Sign": (rule, params)})
    refusal.says(says)


def test_rule_reports_its_description(either: Any) -> None:
    rule = either.get_rule("fast_sigmoid")
    assert (rule.kind, rule.family, rule.true_gradient, rule.hides_builtin) == ("builtin", "surrogate", False, False)
    assert rule.formula == rule.expression
    (slope,) = rule.param_infos
    assert (slope.name, slope.default, slope.range) == ("slope", 25.0, "> 0")
    code = either.get_rule("lrp_epsilon")
    assert code.expression is None
    assert "vjp" in code.formula
    assert either.get_rule("log1pexp").true_gradient


def test_optimizer_keeps_the_maximum(client: Any) -> None:
    """TensorFlow 2.21's arithmetic optimizer turns this maximum into a minimum."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    a = g.op("Add", x, x)
    g.op("Maximum", g.op("Add", a, a), a, name="y")
    assert_close(client.evaluate(g, {"x": [-1.5, 0.25]}, fetches=["y"]).outputs["y"], np.float32([-3, 1]))
