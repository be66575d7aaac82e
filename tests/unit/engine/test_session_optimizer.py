"""Tests that optimizers of sessions compute what Keras's do, and that they are freed."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradrule import optimizers
from gradrule.v1 import session_pb2
from gradrule_server.engine.program import FunctionCall
from gradrule_server.engine.session_optimizer import NAMES, StepOptimizer
from gradrule_server.errors import GradruleError, reason_name


def graphs_alive() -> int:
    gc.collect()
    return sum(type(item).__name__ == "FuncGraph" for item in gc.get_objects())


def test_optimizer_names_equal_those_of_the_client() -> None:
    assert set(NAMES) == set(optimizers.__all__) - {"Optimizer", "OptimizerState"}


@pytest.mark.parametrize("name", NAMES)
def test_sparse_and_dense_gradients(name: str) -> None:
    message = getattr(optimizers, name)().message()
    values = {"a": tf.constant([1.0, 2.0]), "e": tf.ones([4, 2])}
    ours = StepOptimizer(message, values)
    theirs = getattr(keras.optimizers, name)()
    variables = [keras.Variable(value) for value in values.values()]
    for step in range(3):
        dense = tf.constant([0.1 * step, 0.2])
        sparse = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 1]), tf.constant([4, 2]))
        values.update(ours.step(message, values, {"a": dense, "e": sparse}))
        theirs.apply_gradients([(dense, variables[0]), (sparse, variables[1])])
    for value, variable in zip(values.values(), variables, strict=True):
        np.testing.assert_allclose(value, variable.value, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_restored_slots_continue(name: str) -> None:
    message = getattr(optimizers, name)(**({"momentum": 0.9} if name == "SGD" else {})).message()
    gradients = {"a/w": tf.reshape(tf.range(6.0), [3, 2]), "b": tf.range(3.0)}
    values = {name: tf.ones_like(gradient) for name, gradient in gradients.items()}
    whole = StepOptimizer(message, values)
    values.update(whole.step(message, values, gradients))
    half = StepOptimizer(message, values)
    half.restore(whole.slots)
    assert whole.variables == half.variables == ["a/w", "b"]
    for _ in range(2):
        wanted, got = (one.step(message, values, gradients) for one in (whole, half))
        for name in values:
            np.testing.assert_array_equal(got[name], wanted[name])
        values = wanted


def test_only_small_updates_without_branches_run_on_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    message = optimizers.RMSprop(centered=True).message()
    slices = tf.IndexedSlices(tf.ones([3, 2]), tf.constant([1, 1, 4]), tf.constant([6, 2]))
    executors = []
    run = FunctionCall.on_device

    def recorded(call: FunctionCall, arguments: Sequence[Any]) -> list[tf.Tensor]:
        with_branch = "StatelessIf" in {op.type for op in call._function.graph.get_operations()}
        executors.append((with_branch, call._single_threaded))
        return run(call, arguments)

    monkeypatch.setattr(FunctionCall, "on_device", recorded)
    for gradient in (slices, tf.ones([6, 2])):
        StepOptimizer(message, {"table": tf.ones([6, 2])}).step(
            message, {"table": tf.ones([6, 2])}, {"table": gradient}
        )
    assert executors == [(True, False), (False, True)]


def test_steps_of_one_kind_build_one_function() -> None:
    """Slices of other lengths, other learning rates and assigned values need no other function."""
    message = optimizers.Adam().message()
    values = {"a": tf.ones([3]), "e": tf.ones([4, 2])}
    ours = StepOptimizer(message, values)
    for rows in (1, 2, 3):
        slices = tf.IndexedSlices(tf.ones([rows, 2]), tf.range(rows), tf.constant([4, 2]))
        new = ours.step(optimizers.Adam(0.1 * rows).message(), values, {"a": tf.ones([3]), "e": slices})
        values = {name: value + 1 for name, value in new.items()}
    assert len(ours._updates) == 1
    (call,) = ours._updates.values()
    assert isinstance(call, FunctionCall)


def test_slots_fit_the_same_optimizer_on_the_same_shapes() -> None:
    values = {"a": tf.ones([3])}
    ours = StepOptimizer(optimizers.Adam(0.1).message(), values)
    assert ours.fits(optimizers.Adam(0.5).message(), values)
    assert not ours.fits(optimizers.Adam(0.1, beta_1=0.5).message(), values)
    assert not ours.fits(optimizers.Adam(0.1).message(), {"a": tf.ones([4])})
    assert not ours.fits(optimizers.Adam(0.1).message(), {"b": tf.ones([3])})


def test_step_without_learning_rate_uses_keras_default() -> None:
    values, gradients = {"a": tf.zeros([1])}, {"a": tf.ones([1])}
    bare = session_pb2.Optimizer(name="SGD")
    ours = StepOptimizer(optimizers.SGD(7.0).message(), values)
    values.update(ours.step(optimizers.SGD(7.0).message(), values, gradients))
    values.update(ours.step(bare, values, gradients))
    np.testing.assert_allclose(values["a"], [-7.01], rtol=1e-6)


def test_deleted_optimizer_leaves_no_memory() -> None:
    message = optimizers.Adam(0.1).message()
    before = graphs_alive()
    for _ in range(3):
        values = {"a": tf.ones([3])}
        StepOptimizer(message, values).step(message, values, values)
    assert graphs_alive() == before


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("Adagard", {}, ["'Adagard'", "Adagrad"]),
        ("Optimizer", {}, ["'Optimizer'"]),
        ("Adam", {"beta1": 0.9}, ["'beta1'", "beta_1"]),
        ("Adam", {"use_ema": 1.0}, ["'use_ema'"]),
        ("Adam", {"learning_rate": float("nan")}, ["learning_rate", "nan"]),
        ("SGD", {"nesterov": 0.5}, ["nesterov", "0 or 1"]),
        ("SGD", {"momentum": 7.0}, ["SGD", "momentum"]),
    ],
)
def test_settings_that_keras_refuses_are_refused(name: str, settings: dict[str, float], words: list[str]) -> None:
    with pytest.raises(GradruleError) as caught:
        StepOptimizer(session_pb2.Optimizer(name=name, settings=settings), {"a": tf.ones([1])})
    assert reason_name(caught.value.reason) == "INVALID_OPTIMIZER"
    for word in words:
        assert word in caught.value.message
