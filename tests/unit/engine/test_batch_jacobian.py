"""Batched Jacobians: graphs that mix examples give the blocks of the whole Jacobian, others are computed together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule.v1 import program_pb2
from gradrule_server.engine.backward import ExampleJacobians
from gradrule_server.engine.build import build
from tests.service.graph_defs import build_graph, placeholder
from tests.unit.engine.building import arguments, prepared

Function = Callable[[Any], Any]


def loop(x: Any) -> Any:
    """Multiplies x with itself in a loop."""
    return tf.while_loop(lambda i, _: i < 3, lambda i, value: (i + 1, value * tf.tanh(x) + x), [0, x])[1]


def branch(x: Any) -> Any:
    return tf.cond(tf.size(x) > 1, lambda: tf.exp(x), lambda: -x)


def kernel(columns: int) -> Any:
    return np.random.default_rng(7).normal(size=(3, columns))


INDEPENDENT: dict[str, Function] = {
    "dense": lambda x: tf.tanh(tf.matmul(x, tf.constant(kernel(5), x.dtype))),
    "losses": lambda x: tf.reduce_sum(tf.square(x), 1),
    "softmax": tf.nn.softmax,
    "loop": loop,
    "branch": branch,
    "gather": lambda x: tf.gather(x, [2, 0, 0], axis=1),
    "convolution": lambda x: tf.nn.conv1d(
        x[:, :, tf.newaxis], tf.constant(kernel(1)[:, :, np.newaxis], x.dtype), 1, "SAME"
    ),
    "infinite": lambda x: tf.sqrt(tf.maximum(x - 1, 0)),
    "undefined": lambda x: tf.math.log(x - x),
    "zero": lambda x: tf.stop_gradient(x) + 0 * x,
    "layer norm": lambda x: (x - tf.reduce_mean(x, 1, keepdims=True)) / tf.math.reduce_std(x, 1, keepdims=True),
}


def batch_norm(x: Any) -> Any:
    mean, variance = tf.nn.moments(x, [0])
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


MIXED: dict[str, Function] = {
    "mean": lambda x: x * tf.reduce_mean(x, 0),
    "minus mean": lambda x: x - tf.reduce_mean(x, 0, keepdims=True),
    "batch norm": batch_norm,
    "softmax": lambda x: tf.nn.softmax(x, 0),
    "products": lambda x: tf.matmul(tf.matmul(x, x, transpose_b=True), x),
    "maximum": lambda x: x / tf.reduce_max(x),
    "neighbours": lambda x: x * tf.roll(x, 1, 0),
    "first": lambda x: x * x[:1],
    "sums": lambda x: tf.cumsum(x, 0),
    "one output": lambda x: tf.concat([x, tf.zeros_like(x), x * tf.reduce_sum(x, 0)], 1),
    "loop": lambda x: loop(x) * tf.reduce_mean(loop(x), 0),
    "branch": lambda x: tf.cond(tf.reduce_sum(x) > -1e9, lambda: x + tf.reduce_sum(x), lambda: x),
    # The gradients of the examples add up to zero in each output.
    "normalised": lambda x: tf.nn.softmax(tf.nn.softmax(x, 0), 1),
}


def jacobian_of(function: Function, value: Any, overrides: dict[str, str] | None = None) -> Callable[[], Any]:
    """Returns a function that computes y's batched Jacobian by x, as an engine does."""

    def build_y() -> None:
        tf.identity(function(placeholder("x", value.dtype, (None, 3))), name="y")

    graph = build_graph(build_y)
    asked = program_pb2.Jacobian(ys=["y"], xs=["x"], batched=True)
    program = prepared(graph, overrides, jacobian=asked)
    built = build(program.request)
    given = arguments(program, built, {"x": value})

    def run() -> Any:
        return built.function(*given)[-1].numpy()

    return run


def blocks(function: Function, value: Any) -> Any:
    """Returns the diagonal blocks of the whole Jacobian, computed by a gradient tape."""
    with tf.GradientTape(persistent=True) as tape:
        x = tf.constant(value)
        tape.watch(x)
        y = function(x)
    whole = tape.jacobian(y, x, experimental_use_pfor=False).numpy()
    return np.stack([whole[example][..., example, :] for example in range(len(value))])


def forbid_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets Jacobians of single examples be NaN, unless they are computed together."""

    def one_by_one(self: ExampleJacobians) -> list[tf.Tensor]:
        shape = [self._examples, self._count]
        xs = [x for x, (_, form) in zip(self._backward.xs, self._backward.layout, strict=True) if form == "dense"]
        return [tf.fill([*shape, 3], tf.constant(np.nan, dtype)) for _, dtype, _ in xs]

    monkeypatch.setattr(ExampleJacobians, "_one_by_one", one_by_one)


def examples(count: int, dtype: Any = np.float64) -> Any:
    return tf.constant(np.random.default_rng(count).normal(size=(count, 3)), dtype)


TOLERANCES = {tf.float64: 1e-9, tf.float32: 1e-4, tf.bfloat16: 0.2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_examples_are_computed_together(name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With zero, infinite and undefined gradients too, and each time."""
    forbid_whole(monkeypatch)
    run = jacobian_of(INDEPENDENT[name], value := examples(5, dtype))
    if name == "undefined":
        for _ in range(5):
            assert np.isnan(np.asarray(run(), np.float64)).all()
        return
    wanted = blocks(INDEPENDENT[name], value).astype(np.float64)
    for _ in range(5):
        found = run()
        assert found.shape == wanted.shape
        np.testing.assert_allclose(
            found.astype(np.float64), wanted, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype], equal_nan=True
        )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", MIXED)
def test_examples_that_depend_on_others_give_blocks_of_the_whole_jacobian(name: str, dtype: Any) -> None:
    value = examples(4, dtype)
    wanted = blocks(MIXED[name], value).astype(np.float64)
    run = jacobian_of(MIXED[name], value)
    scale = np.abs(wanted).max()
    for _ in range(8):
        assert np.abs(run().astype(np.float64) - wanted).max() <= TOLERANCES[dtype] * scale


@pytest.mark.parametrize("count", [2, 33])
@pytest.mark.parametrize("name", MIXED)
def test_dependence_is_seen_in_batches_of_any_size(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of many calls; two examples are always in different halves."""
    forbid_whole(monkeypatch)
    run = jacobian_of(MIXED[name], examples(count))
    for _ in range(20):
        assert np.isnan(run()).all()


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("name", ["mean", "softmax"])
def test_single_example_is_not_checked(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Jacobian is the whole one."""
    forbid_whole(monkeypatch)
    value = examples(count)
    found = jacobian_of(MIXED[name], value)()
    assert found.shape == (count, 3, 3)
    if count:
        np.testing.assert_allclose(found, blocks(MIXED[name], value), rtol=1e-9, atol=1e-12)


def test_rules_that_are_not_linear_in_the_upstream_gradient_are_computed_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guided backpropagation sets negative upstream gradients to zero."""
    forbid_whole(monkeypatch)
    value, weights = examples(6), kernel(3)
    run = jacobian_of(lambda x: tf.matmul(tf.nn.relu(x), tf.constant(weights)), value, {"Relu": "guided_relu"})
    local = (value.numpy() > 0)[:, np.newaxis, :] * np.maximum(weights.T, 0)
    for _ in range(5):
        np.testing.assert_allclose(run(), local, rtol=1e-12)


@pytest.mark.parametrize(
    "rule", ["first(dy * (sum(dy * dy) > 2))", "first(dy * (min(abs(sum(dy, axis=1))) > 0.5))", "gradient_normalize"]
)
def test_examples_are_computed_one_by_one_with_rules_that_mix_them(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two do so for some upstream gradients only, which a check with random ones can miss."""
    monkeypatch.setattr(ExampleJacobians, "_are_independent", lambda *_: tf.constant(True))
    weights = kernel(3)
    found = jacobian_of(lambda x: tf.matmul(tf.tanh(x), tf.constant(weights)), examples(6), {"Tanh": rule})()
    units = np.eye(3) @ weights.T
    if rule == "gradient_normalize":
        units /= np.linalg.norm(units, axis=1, keepdims=True) + 1e-6
    elif "axis" in rule:
        units *= 0
    else:
        units *= np.square(units).sum(1, keepdims=True) > 2
    np.testing.assert_allclose(found, np.broadcast_to(units, (6, 3, 3)), rtol=1e-9)


def test_single_pair_of_dependent_examples_among_many_is_seen_in_half_of_the_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weakest case of the check; halves are new in each call."""
    forbid_whole(monkeypatch)
    dependent = np.zeros((32, 32))
    dependent[3, 7] = 1.0
    run = jacobian_of(lambda x: x + tf.matmul(tf.constant(dependent), x), examples(32))
    seen = sum(bool(np.isnan(run()).all()) for _ in range(60))
    # With probability 1/2 each, fewer than 10 or more than 50 are seen once in ten million runs of this test.
    assert 10 <= seen <= 50
