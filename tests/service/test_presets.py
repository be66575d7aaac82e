"""Presets, the batch norm folding that they need, and their descriptions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service.answers import assert_close, dense, refused, rules_by_node
from tests.service.graph_defs import build_graph, placeholder

RNG = np.random.default_rng(5)
IMAGES = RNG.normal(size=(2, 6, 6, 2))
KERNEL = RNG.normal(size=(3, 3, 2, 4))
DEPTHWISE = RNG.normal(size=(3, 3, 2, 2))
HEAD = RNG.normal(size=(36 * 4, 3))


def network(*, bias: bool = True, norm: str = "", dtype: Any = tf.float64, kernel: str = "conv") -> gr.Graph:
    """Makes a convolution, an optional batch norm, a relu and a dense layer."""

    def build() -> None:
        x = placeholder("x", dtype, (None, 6, 6, 2))
        if kernel == "conv":
            h = tf.nn.conv2d(x, tf.constant(KERNEL, dtype), 1, "SAME", name="conv")
        else:
            h = tf.nn.depthwise_conv2d(x, tf.constant(DEPTHWISE, dtype), [1, 1, 1, 1], "SAME", name="conv")
        if bias:
            h = tf.nn.bias_add(h, tf.constant([0.5, -0.25, 0.0, 1.0], dtype), name="bias")
        scale, offset = [1.5, -0.5, 2.0, 0.25], [0.1, 0.2, -0.3, 0.0]
        mean, variance = [0.5, 0.0, -1.0, 2.0], [1.0, 0.25, 4.0, 0.5]
        if norm == "fused":
            h, *_ = tf.compat.v1.nn.fused_batch_norm(
                h, scale, offset, mean, variance, epsilon=1e-3, is_training=False, name="norm"
            )
        elif norm == "plain":
            values = (tf.constant(value, dtype) for value in (mean, variance, offset, scale))
            h = tf.nn.batch_normalization(h, *values, 1e-3, name="norm")
        h = tf.nn.relu(h, name="relu")
        head = tf.matmul(tf.reshape(h, (-1, 36 * 4)), tf.constant(HEAD, dtype), name="head")
        tf.identity(tf.nn.bias_add(head, tf.constant([1.0, 2.0, 3.0], dtype), name="logits"), name="y")

    return build_graph(build)


def test_presets_are_listed(either: Any) -> None:
    presets = {preset.name: preset for preset in either.list_presets()}
    assert {"epsilon_plus", "guided_backprop", "excitation_backprop", "epsilon_gamma_box"} <= set(presets)
    plus = presets["epsilon_plus"]
    assert any("lrp_zplus" in line for line in plus.overrides)
    assert plus.description
    assert plus.reference
    assert {param.name for param in plus.params} >= {"eps"}
    box = {param.name: param for param in presets["epsilon_gamma_box"].params}
    assert box["low"].default is None


def test_relevance_is_conserved_without_biases(client: Any) -> None:
    """The relevance of every layer sums to that of the output."""

    def build() -> None:
        x = placeholder("x", tf.float64, (None, 6, 6, 2))
        h = tf.nn.relu(tf.nn.conv2d(x, tf.constant(KERNEL), 1, "SAME", name="conv"))
        h = tf.nn.avg_pool2d(h, 2, 2, "VALID")
        tf.matmul(tf.reshape(h, (-1, 36)), tf.constant(np.abs(HEAD[:36])), name="y")

    g = build_graph(build)
    y = client.evaluate(g, {"x": IMAGES}, fetches=["y"]).outputs["y"]
    for name in ("epsilon_plus", "epsilon_plus_flat", "epsilon_alpha2_beta1", "excitation_backprop"):
        # The stabilizer absorbs relevance where an output is small.
        preset = gr.Preset(name, eps=1e-12)
        r = client.evaluate(g, {"x": IMAGES}, ys=["y"], xs=["x"], grad_ys={"y": y}, overrides=preset)
        np.testing.assert_allclose(r.gradients["x"].sum((1, 2, 3)), y.sum(1), rtol=1e-9, err_msg=name)


def test_additions_within_activations_are_no_sums(client: Any) -> None:
    """PReLU is relu(x) - a * relu(-x). Its gradient is kept where x is as small as the stabilizer of sums, too."""

    def build() -> None:
        x = placeholder("x", tf.float64, (None,))
        tf.add(tf.nn.relu(x), -0.25 * tf.nn.relu(-x), name="y")

    x = [1e-6, -1e-6, 1e-3, -1e-3, 2.0, -2.0]
    r = client.evaluate(
        build_graph(build), {"x": x}, ys=["y"], xs=["x"], overrides=gr.Preset("excitation_backprop", eps=1e-6)
    )
    np.testing.assert_array_equal(r.gradients["x"], [1.0, 0.25, 1.0, 0.25, 1.0, 0.25])


def test_user_overrides_have_priority_over_a_preset(either: Any) -> None:
    own = gr.Override("linearize", op_type="Relu", label="own")
    overrides = [gr.Preset("epsilon_plus", eps=1e-3), own]
    r = either.evaluate(network(), {"x": IMAGES}, ys=["y"], xs=["x"], overrides=overrides)
    assert rules_by_node(r) == {"bias": "lrp_zplus", "relu": "linearize", "logits": "lrp_epsilon"}
    assert {item.label for item in r.overrides} == {"epsilon_plus", "own"}


def test_rule_of_a_node_has_priority_over_a_preset(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    with g.gradient_override_map({"Relu": "linearize"}):
        inner = g.op("Relu", x, name="own")
    g.op("Relu", inner, name="y")
    r = client.evaluate(g, {"x": [-1.0, 2.0]}, ys=["y"], xs=["x"], overrides=gr.Preset("deconvnet"))
    assert rules_by_node(r) == {"own": "linearize", "y": "deconvnet"}


def test_params_of_a_preset_may_change_per_call(either: Any) -> None:
    g = network()
    one = either.evaluate(g, {"x": IMAGES}, ys=["y"], xs=["x"], overrides=gr.Preset("epsilon_plus", eps=1.0))
    words: dict[str, Any] = {"ys": ["y"], "xs": ["x"], "overrides": gr.Preset("epsilon_plus")}
    other = either.evaluate(g, {"x": IMAGES}, params={"epsilon_plus": {"eps": 1.0}}, **words)
    assert_close(one.gradients["x"], other.gradients["x"])
    assert one.digests.program == other.digests.program
    plain = either.evaluate(g, {"x": IMAGES}, **words)
    assert np.abs(plain.gradients["x"] - one.gradients["x"]).max() > 1e-3


@pytest.mark.parametrize(
    ("preset", "reason", "says"),
    [
        (gr.Preset("epsilon_pluss"), "UNKNOWN_RULE", "'epsilon_plus'"),
        (gr.Preset("epsilon_plus", epss=1), "UNKNOWN_PARAM", "'eps'"),
        (gr.Preset("epsilon_plus", eps=-1), "INVALID_PARAM", "eps"),
        (gr.Preset("epsilon_gamma_box"), "MISSING_PARAM", "low"),
    ],
    ids=str,
)
def test_invalid_preset_is_refused(client: Any, preset: gr.Preset, reason: str, says: str) -> None:
    with refused(reason) as refusal:
        client.evaluate(network(), {"x": IMAGES}, ys=["y"], xs=["x"], overrides=preset)
    refusal.says(says)


def test_preset_that_matches_nothing_is_reported(either: Any) -> None:
    g = gr.Graph()
    g.op("Sin", g.placeholder("x", "float32", [None]), name="y")
    words: dict[str, Any] = {"ys": ["y"], "xs": ["x"]}
    with refused("UNMATCHED_OVERRIDE") as refusal:
        either.evaluate(g, {"x": [1.0]}, overrides=gr.Preset("guided_backprop"), **words)
    refusal.says("guided_backprop")
    r = either.evaluate(g, {"x": [1.0]}, overrides=gr.Preset("guided_backprop", optional=True), **words)
    assert r.overrides == []


@pytest.mark.parametrize(
    ("bias", "norm", "dtype", "kernel"),
    [
        (True, "fused", tf.float32, "conv"),
        (False, "fused", tf.float32, "conv"),
        (True, "plain", tf.float64, "conv"),
        (False, "plain", tf.float64, "depthwise"),
        (True, "fused", tf.float32, "depthwise"),
        (False, "fused", tf.float16, "conv"),
    ],
)
def test_batch_norms_are_folded(client: Any, bias: bool, norm: str, dtype: Any, kernel: str) -> None:
    g = network(bias=bias, norm=norm, dtype=dtype, kernel=kernel)
    x = IMAGES.astype(dtype.as_numpy_dtype)
    words: dict[str, Any] = {"fetches": ["y"], "ys": ["y"], "xs": ["x"]}
    plain = client.evaluate(g, {"x": x}, **words)
    folded = client.evaluate(g, {"x": x}, rewrites=("fold_batch_norm",), **words)
    tolerance = {tf.float16: 2e-2, tf.float32: 1e-4, tf.float64: 1e-10}[dtype]
    assert len(folded.rewritten) == 1
    assert folded.rewritten[0].startswith("norm")
    for got, wanted in ((folded.outputs["y"], plain.outputs["y"]), (folded.gradients["x"], plain.gradients["x"])):
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())
    # Patterns find the linear op and its bias under the names that the user knows.
    r = client.evaluate(
        g, {"x": x}, rewrites=("fold_batch_norm",), overrides=gr.Preset("epsilon_plus"), ys=["y"], xs=["x"]
    )
    assert set(rules_by_node(r)) == {folded.rewritten[0], "relu", "logits"}
    pair = next(item for item in r.overrides if item.rule == "lrp_zplus")
    assert pair.nodes == ({"conv": "conv", "depthwise": "conv"}[kernel], folded.rewritten[0])


def test_gradients_of_weights_are_right_after_folding(client: Any) -> None:
    def build() -> None:
        x, w = placeholder("x", tf.float64, (None, 3)), placeholder("w", tf.float64, (3, 4))
        mean, variance, offset, scale = (tf.constant(row, tf.float64) for row in np.abs(RNG.normal(size=(4, 4))))
        h = tf.nn.batch_normalization(tf.matmul(x, w), mean, variance, offset, scale, 1e-3)
        tf.reduce_sum(tf.tanh(h), name="y")

    g = build_graph(build)
    feeds = {"x": RNG.normal(size=(5, 3)), "w": RNG.normal(size=(3, 4))}
    words: dict[str, Any] = {"ys": ["y"], "xs": ["x", "w"]}
    plain = client.evaluate(g, feeds, **words)
    folded = client.evaluate(g, feeds, rewrites="fold_batch_norm", **words)
    assert len(folded.rewritten) == 1
    for name in ("x", "w"):
        np.testing.assert_allclose(dense(folded.gradients[name]), dense(plain.gradients[name]), rtol=1e-10)


def test_training_batch_norms_and_unknown_rewrites_are_refused(client: Any) -> None:
    def build() -> None:
        x = placeholder("x", tf.float32, (None, 6, 6, 2))
        h = tf.nn.conv2d(x, tf.constant(KERNEL, tf.float32), 1, "SAME")
        y, *_ = tf.compat.v1.nn.fused_batch_norm(h, [1.0] * 4, [0.0] * 4, is_training=True)
        tf.identity(y, name="y")

    g = build_graph(build)
    r = client.evaluate(g, {"x": IMAGES.astype(np.float32)}, fetches=["y"], rewrites=["fold_batch_norm"])
    assert r.rewritten == []
    with refused("UNSUPPORTED") as refusal:
        client.evaluate(g, {"x": IMAGES.astype(np.float32)}, fetches=["y"], rewrites=["fold_batchnorm"])
    refusal.says("'fold_batch_norm'")


def affine(scale: Any, shift: Any) -> gr.Graph:
    def build() -> None:
        x = placeholder("x", tf.float64, (3, 4))
        linear = tf.matmul(x, tf.constant(HEAD[:4]))
        tf.identity(linear * tf.constant(scale) + tf.constant(shift), name="y")

    return build_graph(build)


@pytest.mark.parametrize(
    ("scale", "shift", "folds"),
    [
        (np.arange(1.0, 4.0), np.ones(3), True),
        (np.arange(1.0, 4.0).reshape(1, 3), np.ones((1, 3)), True),
        (np.arange(1.0, 4.0).reshape(3, 1), np.ones((3, 1)), False),
        (np.float64(2), np.float64(1), False),
    ],
    ids=["channels", "row", "column", "scalar"],
)
def test_only_per_channel_affine_ops_are_folded(client: Any, scale: Any, shift: Any, folds: bool) -> None:
    x = RNG.normal(size=(3, 4))
    words: dict[str, Any] = {"fetches": ["y"], "ys": ["y"], "xs": ["x"]}
    plain = client.evaluate(affine(scale, shift), {"x": x}, **words)
    folded = client.evaluate(affine(scale, shift), {"x": x}, rewrites=["fold_batch_norm"], **words)
    assert bool(folded.rewritten) == folds
    np.testing.assert_allclose(folded.outputs["y"], plain.outputs["y"])
    np.testing.assert_allclose(folded.gradients["x"], plain.gradients["x"])


def test_order_of_preset_and_overrides_is_part_of_the_program(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    with g.gradient_override_map({"Relu": "default"}):
        inner = g.op("Relu", x)
    g.op("Neg", inner, name="y")
    preset = gr.Preset("guided_backprop", optional=True)
    override = gr.Override("builtin/guided_relu", op_type="Relu", label="guided_backprop", optional=True)
    for overrides, wanted in ((preset, -1.0), (override, 0.0), (preset, -1.0)):
        r = client.evaluate(g, {"x": [2.0]}, ys=["y"], xs=["x"], overrides=overrides)
        assert float(r.gradients["x"][0]) == wanted


def test_params_of_a_preset_are_its_own(channel: Any) -> None:
    from gradrule.v1 import evaluate_pb2
    from tests.service import raw
    from tests.service.answers import refused_raw

    request = evaluate_pb2.EvaluateRequest()
    request.spec.graph.serialized = network().to_bytes()
    request.spec.vjp.ys.append("y")
    request.spec.vjp.xs.append("x")
    override = request.spec.overrides.add()
    override.preset.name = "epsilon_plus"
    override.params["eps"].number = 1.0
    with refused_raw("UNKNOWN_PARAM"):
        raw.send(channel, "GradientService/Evaluate", request.SerializeToString())
