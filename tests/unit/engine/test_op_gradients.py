"""Ops for which TensorFlow has no right gradient on the CPU have one, or are refused.

The reference of a convolution is one of each group with a filter that NumPy filled with zeros, in local TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule.v1 import evaluate_pb2, program_pb2
from gradrule_server.engine.build import build
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.graphs import Limits
from gradrule_server.link.messages import CallShape
from tests.service.graph_defs import build_graph, build_graph_def, load_graph, placeholder
from tests.unit.engine.building import differentiate, prepared
from tests.unit.engine.second_order import twice, twice_locally

RNG = np.random.default_rng(5)

CASES: Mapping[str, tuple[int, dict[str, Any]]] = {
    "grouped": (2, {"strides": [1, 1, 1, 1], "padding": "SAME"}),
    "one_channel_per_group": (4, {"strides": [1, 1, 1, 1], "padding": "VALID"}),
    "grouped_strides": (2, {"strides": [1, 2, 1, 1], "padding": "VALID"}),
    "dilated": (1, {"strides": [1, 1, 1, 1], "padding": "SAME", "dilations": [1, 2, 3, 1]}),
    "grouped_dilated": (2, {"strides": [1, 1, 1, 1], "padding": "VALID", "dilations": [1, 2, 1, 1]}),
    "explicit": (
        2,
        {
            "strides": [1, 1, 1, 1],
            "padding": "EXPLICIT",
            "explicit_paddings": [0, 0, 1, 2, 0, 1, 0, 0],
            "dilations": [1, 2, 2, 1],
        },
    ),
}


def values(groups: int) -> tuple[Any, Any]:
    return RNG.normal(size=(2, 7, 8, 4)), RNG.normal(size=(3, 2, 4 // groups, 8))


def by_group(groups: int, attributes: Mapping[str, Any]) -> Callable[[Any, Any], Any]:
    """Returns the convolution, made of ungrouped ones without dilations, which local TensorFlow differentiates."""
    plain = {name: value for name, value in attributes.items() if name != "dilations"}
    high, wide = attributes.get("dilations", [1, 1, 1, 1])[1:3]
    holes = np.zeros((3, 2, (3 - 1) * high + 1, (2 - 1) * wide + 1))
    for row, column in np.ndindex(3, 2):
        holes[row, column, row * high, column * wide] = 1

    def convolution(x: Any, w: Any) -> Any:
        full = tf.einsum("hwij,hwyx->yxij", w, tf.constant(holes, w.dtype))
        parts = zip(tf.split(x, groups, 3), tf.split(full, groups, 3), strict=True)
        return tf.concat([tf.raw_ops.Conv2D(input=one, filter=kernel, **plain) for one, kernel in parts], 3)

    return convolution


def graph_of(x: Any, w: Any, attributes: Mapping[str, Any], op: Any = tf.raw_ops.Conv2D) -> Any:
    def build() -> None:
        given = placeholder("x", x.dtype, x.shape), placeholder("w", w.dtype, w.shape)
        tf.identity(op(input=given[0], filter=given[1], **attributes), name="y")

    return build_graph_def(build)


def assert_close(found: Sequence[Any], wanted: Sequence[Any], dtype: str) -> None:
    for value, expected in zip(found, wanted, strict=True):
        assert (value is None) == (expected is None)
        if value is not None:
            np.testing.assert_allclose(value, expected, rtol=1e-10 if dtype == "float64" else 1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_convolutions_equal_those_of_each_group(case: str, dtype: str) -> None:
    groups, attributes = CASES[case]
    x, w = (value.astype(dtype) for value in values(groups))
    local = by_group(groups, attributes)
    shape = local(x, w).shape
    dy, seed = RNG.normal(size=shape).astype(dtype), RNG.normal(size=x.shape).astype(dtype)
    graph = graph_of(x, w, attributes)
    assert_close(
        twice(graph.SerializeToString(), {"x": x, "w": w}, "y", dy, seed), twice_locally(local, [x, w], dy, seed), dtype
    )


@pytest.mark.parametrize("first", [1e9, np.inf])
def test_padding_value_gets_the_sum_of_its_own_elements_only(first: float) -> None:
    """Elements of the data do not enter, not even as a difference of two sums."""

    def build() -> None:
        x, value = placeholder("x", shape=(2,)), placeholder("value", shape=())
        tf.raw_ops.PadV2(input=x, paddings=[[1, 2]], constant_values=value, name="y")

    dy = np.array([1, first, 1, 2, 3], np.float32)
    feeds = {"x": np.ones(2, np.float32), "value": np.float32(5)}
    assert differentiate(build_graph(build), feeds, dy)[1]["value"] == 6


@pytest.mark.parametrize("training", [True, False])
def test_outputs_of_batch_normalisation_in_a_branch_have_gradients(training: bool) -> None:
    """There, no upstream gradient is known as zeros before running."""
    x, statistics = RNG.normal(size=(2, 3, 3, 4)).astype(np.float32), RNG.uniform(1, 2, (2, 4)).astype(np.float32)

    def norm(x: Any, mean: Any, variance: Any) -> Any:
        given = (mean[:0], variance[:0]) if training else (mean, variance)
        ones = tf.ones(4)
        outputs = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=ones, offset=ones, mean=given[0], variance=given[1], is_training=training
        )
        return list(outputs)[:3]

    def local(x: Any, mean: Any, variance: Any) -> Any:
        if training:
            mean, variance = tf.nn.moments(x, [0, 1, 2])
        y = tf.nn.batch_normalization(x, mean, variance, 1.0, 1.0, 1e-4)
        return [y, mean, variance * (18 / 17 if training else 1)]

    def total(outputs: Any) -> Any:
        return tf.add_n([tf.reduce_sum(value**3) for value in outputs])

    def build() -> None:
        xs = placeholder("x", shape=x.shape), placeholder("mean", shape=(4,)), placeholder("variance", shape=(4,))
        outputs = tf.cond(tf.size(xs[0]) > 1, lambda: norm(*xs), lambda: [xs[0], xs[1], xs[2]])
        tf.identity(total(outputs), name="y")

    feeds = {"x": x, "mean": statistics[0], "variance": statistics[1]}
    xs = [tf.constant(value) for value in feeds.values()]
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = total(local(*xs))
    wanted = tape.gradient(y, xs, unconnected_gradients="zero")
    found = differentiate(build_graph(build), feeds, np.float32(1))[1]
    for value, expected in zip(found.values(), wanted, strict=True):
        np.testing.assert_allclose(0 if value is None else value, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("xs", [["x"], ["x", "mean"]])
def test_gradients_of_a_given_mean_and_variance_are_built_only_if_needed(xs: list[str]) -> None:
    """They take ten ops for each normalisation of a network that is not trained. The mean is a constant."""

    def build_y() -> None:
        ones, mean = tf.ones(4), tf.constant([1.0, 2.0, 3.0, 4.0], name="mean")
        x = placeholder("x", shape=(2, 1, 1, 4))
        norm = tf.raw_ops.FusedBatchNormV3(x=x, scale=ones, offset=ones, mean=mean, variance=ones, is_training=False)
        tf.identity(norm.y, name="y")

    graph = build_graph(build_y)
    built = build(prepared(graph, vjp=program_pb2.Vjp(ys=["y"], xs=xs)).request)
    made = {op.type for op in built.function.graph.get_operations()}
    assert ("Rsqrt" in made) == ("mean" in xs)
    if "mean" in xs:
        found = built.function(tf.ones((2, 1, 1, 4)))[-1]
        np.testing.assert_allclose(found, np.full(4, -2 / np.sqrt(1.0001)), rtol=1e-5)


def test_outputs_whose_gradient_tensorflow_ignores_are_refused() -> None:
    def build() -> None:
        loss = tf.raw_ops.CTCLoss(
            inputs=placeholder("x", shape=(5, 2, 4)),
            labels_indices=tf.constant([[0, 0], [1, 0]], tf.int64),
            labels_values=[0, 1],
            sequence_length=[5, 4],
        )
        tf.identity(loss.gradient, name="y")

    x = np.zeros((5, 2, 4), np.float32)
    with pytest.raises(GradruleError, match="none for output 1") as caught:
        differentiate(build_graph(build), {"x": x}, x)
    assert reason_name(caught.value.reason) == "NO_GRADIENT"


def products(x: Any) -> Any:
    return tf.reduce_sum(tf.math.cumprod(x, 1) * tf.range(1.0, 4.0))


def products_one_by_one(x: Any) -> Any:
    a, b, c = tf.unstack(x, axis=1)
    return tf.reduce_sum(a + 2 * a * b + 3 * a * b * c)


def given_statistics(x: Any) -> Any:
    data, mean, variance = x[:, tf.newaxis, tf.newaxis], x[0] + 1, x[1] ** 2 + 1
    ones = tf.ones(3)
    y = tf.raw_ops.FusedBatchNormV3(x=data, scale=ones, offset=ones, mean=mean, variance=variance, is_training=False).y
    return tf.reduce_sum(y**3)


def given_statistics_by_hand(x: Any) -> Any:
    return tf.reduce_sum(((x - x[0] - 1) * tf.math.rsqrt(x[1] ** 2 + 1 + 1e-4) + 1) ** 3)


@pytest.mark.parametrize(
    ("function", "reference"),
    [(products, products_one_by_one), (given_statistics, given_statistics_by_hand)],
    ids=["two_zeros", "given_statistics"],
)
def test_second_derivatives_of_replaced_gradients(function: Any, reference: Any) -> None:
    """Of a product of two zeros and more, and by a given variance."""
    x, vector = np.float32([[0, 0, 2], [0.5, 0, 0], [0, 3, 0]]), RNG.normal(size=(3, 3)).astype(np.float32)
    graph = build_graph(lambda: tf.identity(function(placeholder("x", shape=(3, 3))), name="y"))
    call = CallShape(derivative=evaluate_pb2.DERIVATIVE_HVP)
    built = build(prepared(graph, call=call, vjp=program_pb2.Vjp(ys=["y"], xs=["x"])).request)
    found = built.function(tf.constant(x), tf.constant(vector))[-1]
    with tf.GradientTape() as outer:
        outer.watch(given := tf.constant(x))
        with tf.GradientTape() as inner:
            inner.watch(given)
            y = reference(given)
        product = tf.reduce_sum(inner.gradient(y, given) * vector)
    np.testing.assert_allclose(found, outer.gradient(product, given), rtol=1e-4, atol=1e-4)


def test_products_of_the_jacobian_of_a_batch_mean() -> None:
    """Their upstream gradients start as zeros, like those of outputs without one."""

    def build_mean() -> None:
        none = tf.zeros(0)
        x, ones = placeholder("x", shape=(2, 1, 1, 3)), tf.ones(3)
        norm = tf.raw_ops.FusedBatchNormV3(x=x, scale=ones, offset=ones, mean=none, variance=none, is_training=True)
        tf.identity(norm.batch_mean, name="y")

    call = CallShape(derivative=evaluate_pb2.DERIVATIVE_JVP)
    built = build(prepared(build_graph(build_mean), call=call, vjp=program_pb2.Vjp(ys=["y"], xs=["x"])).request)
    x, tangent = RNG.normal(size=(2, 2, 1, 1, 3)).astype(np.float32)
    found = built.function(tf.constant(x), tf.constant(tangent))[-1]
    np.testing.assert_allclose(found, tangent.mean((0, 1, 2)), rtol=1e-5, atol=1e-6)


def depthwise(x: Any, w: Any) -> None:
    y = tf.raw_ops.DepthwiseConv2dNative(
        input=x, filter=w, strides=[1, 1, 1, 1], padding="SAME", dilations=[1, 2, 2, 1]
    )
    tf.identity(y, name="y")


@pytest.mark.parametrize("trusted", [False, True])
def test_dilated_depthwise_convolutions_are_refused(trusted: bool) -> None:
    """Its forward kernel fails, but its gradient kernels ignore the dilations."""

    def build() -> None:
        depthwise(placeholder("x", shape=(1, 8, 8, 2)), placeholder("w", shape=(3, 3, 2, 1)))

    with pytest.raises(GradruleError, match=r"'Depthwise\w*' .* dilations \[1, 2, 2, 1\]") as caught:
        prepared(load_graph(build_graph_def(build)), limits=Limits(trusted=trusted))
    assert reason_name(caught.value.reason) == "UNSUPPORTED_OP"
