"""Rules that work element by element are refused on ops that move elements, also where the shapes would allow them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule_server.errors import GradruleError, reason_name
from tests.service.graph_defs import build_graph, placeholder
from tests.unit.engine.building import differentiate

X = np.random.default_rng(3).normal(size=(3, 3)).astype(np.float32)
DY = np.random.default_rng(4).normal(size=(3, 3)).astype(np.float32)
ORDER = [2, 0, 1]

MOVES: dict[str, Callable[[Any], Any]] = {
    "Transpose": tf.transpose,
    "ReverseV2": lambda x: tf.reverse(x, [0]),
    "ReverseSequence": lambda x: tf.reverse_sequence(x, [3, 2, 1], 1, 0),
    "Roll": lambda x: tf.roll(x, 1, 0),
    "StridedSlice": lambda x: x[::-1],
    "GatherV2": lambda x: tf.gather(x, ORDER),
    "GatherNd": lambda x: tf.gather_nd(x, [[index] for index in ORDER]),
    "ScatterNd": lambda x: tf.scatter_nd([[index] for index in ORDER], x, [3, 3]),
    "UnsortedSegmentSum": lambda x: tf.math.unsorted_segment_sum(x, ORDER, 3),
    "TopKV2": lambda x: tf.raw_ops.TopKV2(input=x, k=3).values,
    "Einsum": lambda x: tf.einsum("ij->ji", x),
    "SparseSegmentSum": lambda x: tf.raw_ops.SparseSegmentSum(data=x, indices=ORDER, segment_ids=[0, 1, 2]),
    "CropAndResize": lambda x: tf.image.crop_and_resize(x[tf.newaxis, ..., tf.newaxis], [[1, 0, 0, 1]], [0], [3, 3])[
        0, ..., 0
    ],
    "DynamicStitch": lambda x: tf.dynamic_stitch([ORDER], [x]),
}
# Their output has the shape of the input only if no element moves.
STAYS: dict[str, Callable[[Any], Any]] = {
    "Reshape": lambda x: tf.reshape(x, [3, 3]),
    "Slice": lambda x: tf.slice(x, [0, 0], [3, 3]),
    "Pad": lambda x: tf.pad(x, [[0, 0], [0, 0]]),
    "Tile": lambda x: tf.tile(x, [1, 1]),
    "Identity": tf.identity,
}


def run(build: Callable[[Any], Any], rule: str, op_type: str, grad_y: Any = DY) -> Any:
    graph = build_graph(lambda: tf.multiply(build(placeholder("x", shape=(3, 3))), 1.0, name="y"))
    return differentiate(graph, {"x": X}, grad_y, {op_type: rule})[1]["x"]


def refusal(build: Callable[[Any], Any], rule: str, op_type: str, grad_y: Any = DY) -> str:
    with pytest.raises(GradruleError) as caught:
        run(build, rule, op_type, grad_y)
    assert reason_name(caught.value.reason) == "RULE_NOT_APPLICABLE"
    return caught.value.message


@pytest.mark.parametrize("rule", ["ste", "first(3 * dy)", "first(where(dy > 0, default, 0))", "first(dy * sign(y))"])
@pytest.mark.parametrize("op_type", MOVES)
def test_elementwise_rules_are_refused_where_elements_move(op_type: str, rule: str) -> None:
    if op_type in ("ScatterNd", "DynamicStitch"):
        rule = f"(None, {rule.removeprefix('first(').removesuffix(')')}{', None' * (op_type == 'ScatterNd')})"
        rule = rule.replace("ste", "dy").replace("default", "default1")
    message = refusal(MOVES[op_type], rule, op_type)
    assert "may move elements" in message
    assert op_type in message


@pytest.mark.parametrize("op_type", MOVES)
def test_rules_that_scale_the_own_gradient_are_right_where_elements_move(op_type: str) -> None:
    with tf.GradientTape() as tape:
        x = tf.Variable(X)
        y = MOVES[op_type](x)
    wanted = 3 * tf.convert_to_tensor(tape.gradient(y, x, tf.constant(DY))).numpy()
    rule = {"ScatterNd": "(None, 3 * default1, None)", "DynamicStitch": "(None, 3 * default1)"}
    found = run(MOVES[op_type], rule.get(op_type, "first(3 * default)"), op_type)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("op_type", STAYS)
def test_elementwise_rules_apply_where_no_element_can_move(op_type: str) -> None:
    np.testing.assert_array_equal(run(STAYS[op_type], "first(3 * dy)", op_type), 3 * DY)


@pytest.mark.parametrize("rule", ["Identity", "rectgrad", "gradient_reversal", "gradient_scale", "deeplift_rescale"])
def test_rules_of_the_catalogue_and_gradients_of_other_ops_are_refused(rule: str) -> None:
    assert "Transpose" in refusal(lambda x: tf.raw_ops.ConjugateTranspose(x=x, perm=[1, 0]), rule, "ConjugateTranspose")


def test_the_gradient_of_one_result_is_no_gradient_of_each_reduced_element() -> None:
    assert "one number" in refusal(tf.reduce_mean, "first(3 * dy)", "Mean", np.float32(2))
    np.testing.assert_array_equal(run(tf.reduce_mean, "first(dy * ones_like(x))", "Mean", np.float32(2)), 2 + 0 * X)
    np.testing.assert_array_equal(run(tf.reduce_sum, "first(3 * dy)", "Sum", np.float32(2)), 6 + 0 * X)


def test_updates_of_a_scatter_move_and_its_tensor_does_not() -> None:
    def scatter(x: Any) -> Any:
        return tf.tensor_scatter_nd_add(tf.zeros_like(x), [[index] for index in ORDER], x)

    assert "input 2" in refusal(scatter, "(dy, None, dy)", "TensorScatterAdd")
    np.testing.assert_array_equal(run(scatter, "(dy, None, 2 * default2)", "TensorScatterAdd"), 2 * DY[ORDER])


def test_rules_apply_to_moves_without_a_gradient() -> None:
    """A rule is the only gradient that they can have; at one element, no element moves."""
    np.testing.assert_array_equal(run(tf.random.shuffle, "ste", "RandomShuffle"), DY)
