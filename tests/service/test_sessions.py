"""Sessions: training compared with Keras, state that a graph assigns, limits, and cleanup."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import keras
import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule.v1 import evaluate_pb2, program_pb2, session_pb2
from tests.processes import engines, resident_bytes
from tests.service import raw
from tests.service.answers import assert_close, provokes, refused
from tests.service.servers import RunningServer, running_server
from tests.service.streams import error_reason
from tests.waiting import wait_until

RNG = np.random.default_rng(7)
X = RNG.normal(size=(16, 3)).astype(np.float32)
T = RNG.normal(size=(16, 2)).astype(np.float32)
W = RNG.normal(size=(3, 2)).astype(np.float32)


def linear() -> gr.Graph:
    """Makes loss = mean((x·w + b - t)²)."""
    g = gr.Graph()
    x, t = g.placeholder("x", "float32", [None, 3]), g.placeholder("t", "float32", [None, 2])
    w, b = g.variable("w", W), g.variable("b", np.zeros(2, np.float32))
    y = g.op("AddV2", g.op("MatMul", x, w), b, name="y")
    g.op("Mean", g.op("Square", g.op("Sub", y, t)), g.constant([0, 1]), name="loss")
    return g


def train_with_keras(optimizer: Any, steps: int) -> tuple[list[float], dict[str, Any]]:
    """Returns losses and variables of the same model trained by Keras."""
    w, b = keras.Variable(W), keras.Variable(np.zeros(2, np.float32))
    losses = []
    for _ in range(steps):
        with tf.GradientTape() as tape:
            tape.watch([w.value, b.value])
            loss = tf.reduce_mean(tf.square(tf.matmul(X, w.value) + b.value - T))
        gradients = tape.gradient(loss, [w.value, b.value])
        optimizer.apply_gradients(zip(gradients, [w, b], strict=True))
        losses.append(float(loss))
    return losses, {"w": np.asarray(w.value), "b": np.asarray(b.value)}


OPTIMIZERS: dict[str, tuple[gr.optimizers.Optimizer, Callable[[], Any]]] = {
    "SGD": (gr.optimizers.SGD(0.1), lambda: keras.optimizers.SGD(0.1)),
    "nesterov": (
        gr.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    ),
    "clipped": (gr.optimizers.SGD(0.5, clipnorm=0.01), lambda: keras.optimizers.SGD(0.5, clipnorm=0.01)),
    "RMSprop": (gr.optimizers.RMSprop(0.01, momentum=0.5), lambda: keras.optimizers.RMSprop(0.01, momentum=0.5)),
    "Adam": (gr.optimizers.Adam(0.05, amsgrad=True), lambda: keras.optimizers.Adam(0.05, amsgrad=True)),
    "AdamW": (gr.optimizers.AdamW(0.05), lambda: keras.optimizers.AdamW(0.05)),
    **{
        name: (getattr(gr.optimizers, name)(0.02), functools.partial(getattr(keras.optimizers, name), 0.02))
        for name in ("Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion", "Adafactor", "Lamb")
    },
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_those_of_keras(client: Any, name: str) -> None:
    ours, theirs = OPTIMIZERS[name]
    losses, variables = train_with_keras(theirs(), 5)
    with client.session(linear()) as s:
        got = [s.step({"x": X, "t": T}, "loss", ours) for _ in range(5)]
        assert [result.step for result in got] == [1, 2, 3, 4, 5]
        assert_close(np.array([result.loss for result in got]), np.float32(losses), rtol=1e-4)
        for variable, value in variables.items():
            assert_close(s.read(variable)[variable], value, rtol=1e-3)


def test_optimizers_have_the_defaults_of_keras() -> None:
    for name in gr.optimizers.__all__:
        if name not in ("Optimizer", "OptimizerState"):
            config = getattr(keras.optimizers, name)().get_config()
            settings = getattr(gr.optimizers, name)().message().settings
            assert {key: float(config[key]) for key in settings} == pytest.approx(dict(settings))


def test_async_client_gives_the_same_steps(aio_client: Any) -> None:
    losses, variables = train_with_keras(keras.optimizers.Adam(0.05), 3)
    with aio_client.session(linear()) as s:
        got = [s.step({"x": X, "t": T}, "loss", gr.optimizers.Adam(0.05), fetches=["y"]) for _ in range(3)]
        assert_close(np.array([result.loss for result in got]), np.float32(losses), rtol=1e-4)
        assert got[0].outputs["y"].shape == (16, 2)
        assert_close(s.read()["w"], variables["w"], rtol=1e-3)
        s.assign({"b": [1.0, 2.0]})
        assert_close(s.save().variables["b"], np.float32([1, 2]))


def test_calls_made_at_the_same_time_run_one_after_the_other(server: RunningServer) -> None:
    rate = gr.schedules.PiecewiseConstantDecay([1, 2, 3], [0.4, 0.3, 0.2, 0.1])
    losses, variables = train_with_keras(
        keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([1, 2, 3], [0.4, 0.3, 0.2, 0.1])), 6
    )

    async def train() -> tuple[list[gr.StepResult], Any]:
        async with gr.aio.connect(server.target) as client, client.session(linear()) as s:
            steps = (s.step({"x": X, "t": T}, "loss", gr.optimizers.SGD(rate)) for _ in range(6))
            return await asyncio.gather(*steps), await s.read()

    def train_in_threads() -> tuple[list[gr.StepResult], Any]:
        with gr.connect(server.target) as client, client.session(linear()) as s, ThreadPoolExecutor(6) as pool:
            steps = [pool.submit(s.step, {"x": X, "t": T}, "loss", gr.optimizers.SGD(rate)) for _ in range(6)]
            return sorted((step.result() for step in steps), key=lambda result: result.step), s.read()

    for results, read in (asyncio.run(train()), train_in_threads()):
        assert [result.step for result in results] == [1, 2, 3, 4, 5, 6]
        assert_close(np.array([result.loss for result in results]), np.float32(losses), rtol=1e-4)
        assert_close(read["w"], variables["w"], rtol=1e-3)


def test_learning_rate_may_change_between_steps(client: Any) -> None:
    with client.session(linear()) as s:
        optimizer = keras.optimizers.Adam(0.1)
        locally_first, _ = train_with_keras(optimizer, 1)
        first = s.step({"x": X, "t": T}, "loss", gr.optimizers.Adam(0.1))
        assert_close(first.loss, np.float32(locally_first[0]), rtol=1e-5)
        before = s.read("w")["w"]
        s.step({"x": X, "t": T}, "loss", gr.optimizers.Adam(1e-9))
        assert_close(s.read("w")["w"], before)


SCHEDULES: dict[str, tuple[Any, Any]] = {
    name: (getattr(gr.schedules, name)(**settings), getattr(keras.optimizers.schedules, name)(**settings))
    for name, settings in {
        "ExponentialDecay": {"initial_learning_rate": 0.1, "decay_steps": 7, "decay_rate": 0.8},
        "InverseTimeDecay": {"initial_learning_rate": 0.1, "decay_steps": 7, "decay_rate": 0.8, "staircase": True},
        "PiecewiseConstantDecay": {"boundaries": [10, 20], "values": [0.1, 0.05, 0.01]},
        "PolynomialDecay": {"initial_learning_rate": 0.1, "decay_steps": 9, "power": 2.0, "cycle": True},
        "CosineDecay": {
            "initial_learning_rate": 0.0,
            "decay_steps": 30,
            "alpha": 0.1,
            "warmup_target": 0.1,
            "warmup_steps": 6,
        },
        "CosineDecayRestarts": {"initial_learning_rate": 0.1, "first_decay_steps": 8, "m_mul": 0.7, "alpha": 0.05},
    }.items()
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_with_a_schedule_equal_those_of_keras(client: Any, name: str) -> None:
    ours, theirs = SCHEDULES[name]
    losses, variables = train_with_keras(keras.optimizers.Adam(theirs), 50)
    for schedule in (ours, theirs):
        with client.session(linear()) as s:
            got = [s.step({"x": X, "t": T}, "loss", gr.optimizers.Adam(schedule)).loss for _ in range(50)]
            assert_close(np.array(got), np.float32(losses), rtol=1e-4)
            assert_close(s.read("w")["w"], variables["w"], rtol=1e-3)


def test_learning_rate_is_any_function_of_completed_steps(either: Any) -> None:
    seen = []

    def rate(step: int) -> float:
        seen.append(step)
        return 0.1 / (1 + step)

    feeds = {"x": X, "t": T}
    with either.session(linear()) as s:
        s.step(feeds, "loss", gr.optimizers.SGD(rate))
        with refused("MISSING_FEED"):
            s.step({"x": X}, "loss", gr.optimizers.SGD(rate))
        before = s.read("b")["b"]
        slope = s.evaluate(feeds, ys="loss", xs="b").gradients["b"]
        s.step(feeds, "loss", gr.optimizers.SGD(rate))
        assert_close(s.read("b")["b"], before - np.float32(0.05) * slope, rtol=1e-5)
    assert seen == [0, 1, 1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gr.optimizers.SGD(-1.0), ["SGD: learning_rate is -1", ">= 0"]),
        (lambda: gr.optimizers.Adam(beta_1=2.0), ["Adam: beta_1 is 2", ">= 0 and <= 1"]),
        (lambda: gr.optimizers.Adam("fast"), ["learning_rate is 'fast'", "a function"]),
        (lambda: gr.optimizers.Adam(lambda step: None), ["returned None for step 0"]),
        (lambda: gr.optimizers.Adam(lambda step: 1 // step), ["failed at step 0", "division"]),
        (lambda: gr.optimizers.Adam(float("nan")), ["learning_rate is nan", "finite"]),
        (lambda: gr.optimizers.Adam(epsilon="small"), ["epsilon is 'small'"]),
        (keras.optimizers.Adam, ["gradrule.optimizers", "gr.optimizers.Adam(...)"]),
    ],
    ids=["negative rate", "beta", "text", "no number", "failure", "nan", "epsilon", "Keras"],
)
def test_settings_out_of_range_are_refused(client: Any, make: Any, words: list[str]) -> None:
    with client.session(linear()) as s:
        before = s.read()
        with refused("INVALID_OPTIMIZER") as refusal:
            s.step({"x": X, "t": T}, "loss", make())
        refusal.says(*words)
        assert all((s.read(name)[name] == before[name]).all() for name in before)


def test_settings_of_schedules_are_checked() -> None:
    for make, words in (
        (lambda: gr.schedules.CosineDecay(0.1, 0), "decay_steps is 0"),
        (lambda: gr.schedules.CosineDecayRestarts(0.1, 5, t_mul=0.5), "t_mul is 0.5"),
        (lambda: gr.schedules.PiecewiseConstantDecay([3, 2], [1.0, 2.0, 3.0]), "increasing"),
        (lambda: gr.schedules.PiecewiseConstantDecay([3], [1.0]), "one value more"),
    ):
        with pytest.raises(gr.errors.InvalidOptimizerError, match=words):
            make()


@pytest.mark.parametrize("name", [*SCHEDULES, "restarts of equal length"])
def test_schedules_equal_those_of_keras(name: str) -> None:
    equal = {"initial_learning_rate": 0.1, "first_decay_steps": 5, "t_mul": 1.0, "m_mul": 0.9}
    ours, theirs = SCHEDULES.get(name) or (
        gr.schedules.CosineDecayRestarts(**equal),
        keras.optimizers.schedules.CosineDecayRestarts(**equal),
    )
    steps = [*range(40), 1000]
    np.testing.assert_allclose([ours(step) for step in steps], [float(theirs(step)) for step in steps], rtol=2e-5)


STATEFUL = {
    "momentum": gr.optimizers.SGD(0.1, momentum=0.9),
    "centered": gr.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "amsgrad": gr.optimizers.Adam(gr.schedules.ExponentialDecay(0.05, 3, 0.5), amsgrad=True),
    "Nadam": gr.optimizers.Nadam(0.02),
    "Ftrl": gr.optimizers.Ftrl(0.02),
    "Adafactor": gr.optimizers.Adafactor(0.02),
    "Lamb": gr.optimizers.Lamb(0.02),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_saved_session_continues_as_if_it_had_not_ended(client: Any, tmp_path: Path, name: str) -> None:
    feeds, optimizer = {"x": X, "t": T}, STATEFUL[name]
    with client.session(linear()) as s:
        whole = [s.step(feeds, "loss", optimizer) for _ in range(8)]
        wanted = s.read()
    with client.session(linear()) as s:
        for _ in range(4):
            s.step(feeds, "loss", optimizer)
        s.save().save(tmp_path / "half.pb")
    with client.session(gr.load(tmp_path / "half.pb")) as s:
        rest = [s.step(feeds, "loss", optimizer) for _ in range(4)]
        assert [one.step for one in rest] == [5, 6, 7, 8]
        assert [one.loss for one in rest] == [one.loss for one in whole[4:]]
        for variable, value in wanted.items():
            np.testing.assert_array_equal(s.read(variable)[variable], value)


def test_state_of_the_optimizer(either: Any) -> None:
    feeds, adam = {"x": X, "t": T}, gr.optimizers.Adam(0.1)
    with either.session(linear()) as s:
        assert s.save().optimizer_state is None
        s.step(feeds, "loss", adam)
        assert s.save(optimizer_state=False).optimizer_state is None
        graph = s.save()
    state, shapes = graph.optimizer_state, {"w": (3, 2), "b": (2,)}
    assert (state.name, state.step, set(state.variables)) == ("Adam", 1, {"w", "b"})
    assert state.settings["learning_rate"] == 0.1
    wanted = {f"{name}/{slot}": shape for name, shape in shapes.items() for slot in ("momentum", "velocity")}
    assert {name: value.shape for name, value in state.slots.items()} == {"iteration": (), **wanted}
    assert state.slots["iteration"] == 1
    with either.session(graph) as s:
        # Another setting starts with new slots, as in one session; the count of steps continues.
        assert s.step(feeds, "loss", gr.optimizers.Adam(0.1, beta_1=0.8)).step == 2
        assert s.save().optimizer_state.slots["iteration"] == 1


def test_state_of_an_optimizer_with_large_slots(client: Any) -> None:
    g = gr.Graph()
    table = np.zeros((200, 200), np.float32)
    g.op("Sum", g.variable("w", table), g.constant([0, 1]), name="loss")
    optimizer = gr.optimizers.SGD(1.0, momentum=0.5)
    with client.session(g) as s:
        s.step({}, "loss", optimizer)
        saved = s.save()
    with client.session(saved) as s:
        s.step({}, "loss", optimizer)
        assert_close(s.read()["w"], table - 2.5)


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"slots": {}}, "INVALID_OPTIMIZER", ["'iteration' is missing"]),
        ({"more": {"w/speed": np.zeros(2)}}, "INVALID_OPTIMIZER", ["'w/speed' is none", "w/momentum"]),
        ({"more": {"w/momentum": np.zeros(2, np.float32)}}, "INVALID_OPTIMIZER", ["w/momentum", "(3, 2)", "(2,)"]),
        ({"more": {"w/momentum": np.zeros((3, 2))}}, "INVALID_OPTIMIZER", ["w/momentum", "float32", "float64"]),
        ({"variables": ["w", "q"]}, "UNKNOWN_TENSOR", ["'q'"]),
        ({"variables": []}, "INVALID_OPTIMIZER", ["names no variables"]),
        ({"name": "Adma"}, "INVALID_OPTIMIZER", ["Adma"]),
        ({"settings": {"learning_rate": -1.0}}, "INVALID_OPTIMIZER", ["learning_rate"]),
        ({"step": -5}, "INVALID_OPTIMIZER", ["step is -5"]),
    ],
    ids=["missing", "unknown", "shape", "type", "variable", "no variables", "name", "rate", "step"],
)
def test_wrong_states_are_refused(client: Any, change: dict[str, Any], reason: str, words: list[str]) -> None:
    with client.session(linear()) as s:
        s.step({"x": X, "t": T}, "loss", gr.optimizers.SGD(0.1, momentum=0.9))
        graph = s.save()
    state = graph.optimizer_state
    changed = {"slots": {**state.slots, **change.pop("more", {})}, **change}
    graph.optimizer_state = dataclasses.replace(state, **changed)
    with refused(reason) as refusal, client.session(graph):
        pass
    refusal.says(*words)


def test_a_loss_of_several_elements_is_refused(either: Any) -> None:
    """Neither the shape that the graph knows nor the one of the values has one element."""
    with either.session(linear()) as s:
        before = s.read()
        with refused("INVALID_DERIVATIVE") as refusal:
            s.step({"x": X, "t": T}, "y", gr.optimizers.SGD(1.0), variables=["b"])
        refusal.says("'y'", str(list((X @ W).shape)), "mean", "sum")
        assert refusal.error.details[0].field == "step.loss"
        after = s.read()
        assert all(np.array_equal(after[name], before[name]) for name in before)
        # One row of one feature: the shape [1, 1] of a value is that of one number.
        assert s.step({"x": X, "t": T}, "loss", gr.optimizers.SGD(0.1)).step == 1


def test_a_loss_of_shape_1_is_one_number(client: Any) -> None:
    g = gr.Graph()
    g.multiply(g.placeholder("x", "float32", [None]), g.variable("w", np.float32(2.0)), name="y")
    with client.session(g) as s:
        assert s.step({"x": [3.0]}, "y", gr.optimizers.SGD(1.0), fetches=["y:0"]).loss.tolist() == [6.0]
        assert s.read()["w"] == -1.0
        with refused("INVALID_DERIVATIVE"):
            s.step({"x": [3.0, 4.0]}, "y", gr.optimizers.SGD(1.0))
        assert s.read()["w"] == -1.0


def test_overrides_apply_in_steps(client: Any) -> None:
    g = gr.Graph()
    x, t = g.placeholder("x", "float32", [None, 3]), g.placeholder("t", "float32", [None, 2])
    y = g.op("MatMul", x, g.op("Sign", g.variable("w", W)), name="y")
    g.op("Mean", g.op("Square", g.op("Sub", y, t)), g.constant([0, 1]), name="loss")
    target = X @ np.asarray([[1, -1], [-1, 1], [1, 1]], np.float32)
    feeds = {"x": X, "t": target}
    with client.session(g, overrides={"Sign": "ste"}) as s:
        losses = [float(s.step(feeds, "loss", gr.optimizers.SGD(0.2)).loss) for _ in range(60)]
        assert losses[-1] == 0.0
        assert s.step(feeds, "loss", gr.optimizers.SGD(0.2), fetches=["y"]).overrides[0].rule == "ste"
    with client.session(g) as s:
        s.step(feeds, "loss", gr.optimizers.SGD(0.2))
        # TensorFlow's own gradient of Sign is zero.
        assert_close(s.read()["w"], W)


def test_sparse_gradients_update_only_their_rows(client: Any) -> None:
    table = RNG.normal(size=(6, 2)).astype(np.float32)

    def build() -> None:
        embedding = tf.compat.v1.get_variable("table", initializer=tf.constant(table), use_resource=True)
        ids = tf.compat.v1.placeholder(tf.int32, (None,), name="ids")
        tf.reduce_sum(tf.square(tf.nn.embedding_lookup(embedding, ids)), name="loss")

    with tf.Graph().as_default() as graph:
        build()
    with client.session(graph.as_graph_def()) as s:
        s.step({"ids": [1, 1, 4]}, "loss", gr.optimizers.SGD(0.1))
        expected = table.copy()
        np.subtract.at(expected, [1, 1, 4], 0.2 * table[[1, 1, 4]])
        assert_close(s.read()["table"], expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["RMSprop", "Adagrad", "Adam"])
def test_fifty_steps_of_a_gathered_variable_equal_those_of_keras(client: Any, name: str) -> None:
    """Keras treats slices in its own way: with Adam, rows that are not gathered keep their slots."""
    settings = {"centered": True, "momentum": 0.5} if name == "RMSprop" else {}
    values = RNG.normal(size=(6, 2)).astype(np.float32)
    g = gr.Graph()
    rows = g.gather_v2(g.variable("table", values), g.placeholder("ids", "int64", [None]), 0)
    g.op("Sum", g.op("Square", rows), [0, 1], name="loss")
    table, theirs = keras.Variable(values), getattr(keras.optimizers, name)(0.05, **settings)
    with client.session(g) as s:
        for step in range(50):
            ids = np.array([step % 6, 1, 1])
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(tf.gather(table.value, ids)))
            theirs.apply_gradients([(tape.gradient(loss, table.value), table)])
            s.step({"ids": ids}, "loss", getattr(gr.optimizers, name)(0.05, **settings))
        assert_close(s.read()["table"], np.asarray(table.value), rtol=1e-5)


def test_results_go_by_aliases(either: Any) -> None:
    graph = linear()
    graph.aliases.update(rows="x", total="loss")
    with either.session(graph) as s:
        r = s.evaluate({"rows": X, "t": T}, ["total"], ys="total", xs=["rows"])
        assert (list(r.outputs), list(r.gradients)) == (["total"], ["rows"])
        step = s.step({"rows": X, "t": T}, "total", gr.optimizers.SGD(0.1), fetches=["total"])
        assert list(step.outputs) == ["total"]
        assert step.outputs["loss"] == step.outputs["total"] == step.loss == r.outputs["total"]


def test_assignments_of_the_graph_persist(client: Any) -> None:
    """A moving average, as in batch normalization, and a counter."""

    def build() -> None:
        v1 = tf.compat.v1
        mean = v1.get_variable("mean", initializer=tf.zeros([3]), use_resource=True, trainable=False)
        count = v1.get_variable("count", initializer=tf.constant(0), use_resource=True, trainable=False)
        w = v1.get_variable("w", initializer=tf.ones([3]), use_resource=True)
        x = v1.placeholder(tf.float32, (None, 3), name="x")
        moved = mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(x, axis=0))
        with tf.control_dependencies([moved, count.assign_add(1)]):
            tf.reduce_sum((x - tf.reduce_mean(x, axis=0)) * w, name="loss")
        tf.identity(mean, name="now")

    with tf.Graph().as_default() as graph:
        build()
    with client.session(graph.as_graph_def()) as s:
        expected = np.zeros(3, np.float32)
        for _ in range(3):
            s.step({"x": X}, "loss", gr.optimizers.SGD(0.0))
            expected = 0.9 * expected + 0.1 * X.mean(axis=0)
        s.evaluate({"x": X}, fetches=["loss"])
        expected = 0.9 * expected + 0.1 * X.mean(axis=0)
        values = s.read()
        assert_close(values["mean"], expected, rtol=1e-5)
        assert values["count"] == 4
        assert_close(s.evaluate(fetches=["now"]).outputs["now"], expected, rtol=1e-5)
        assert s.read("count")["count"] == 4


def small_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(5, activation="silu"),
            keras.layers.BatchNormalization(momentum=0.7),
            keras.layers.Dense(2),
        ]
    )


def normalized_model() -> keras.Model:
    """Makes a model that assigns a normalized kernel, and reads it, in each step."""
    keras.utils.set_random_seed(3)
    hidden = keras.layers.SpectralNormalization(keras.layers.Dense(5, activation="tanh"))
    return keras.Sequential([keras.layers.Input((3,)), hidden, keras.layers.Dense(2)])


@pytest.mark.parametrize("make", [small_model, normalized_model], ids=lambda make: make.__name__)
def test_traced_keras_model_trains_as_in_keras(client: Any, make: Callable[[], keras.Model]) -> None:
    """Batch norm statistics are assigned and not trained; silu has a custom gradient."""
    model, twin = make(), make()

    def loss_of(model: keras.Model, x: Any, t: Any) -> Any:
        return tf.reduce_mean(tf.square(model(x, training=True) - t))

    graph = gr.trace(lambda x, t: {"loss": loss_of(model, x, t)}, tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2]))
    paths = [variable.path for variable in model.variables]
    optimizer = keras.optimizers.Adam(0.05)
    with client.session(graph) as s:
        for _ in range(50):
            with tf.GradientTape() as tape:
                loss = loss_of(twin, X, T)
            gradients = tape.gradient(loss, [variable.value for variable in twin.trainable_variables])
            optimizer.apply_gradients(zip(gradients, twin.trainable_variables, strict=True))
            result = s.step({"x": X, "t": T}, "loss", gr.optimizers.Adam(0.05))
            assert_close(result.loss, loss.numpy(), rtol=1e-4)
        trained = s.read()
        for path, variable in zip(paths, twin.variables, strict=True):
            np.testing.assert_allclose(trained[path], variable.value, rtol=1e-3, atol=1e-4)


def test_random_initial_values_are_drawn_once(client: Any) -> None:
    with tf.Graph().as_default() as graph:
        v1 = tf.compat.v1
        w = v1.get_variable("w", initializer=tf.random.normal([50]), use_resource=True)
        v1.get_variable("twice", initializer=2 * w.initial_value, use_resource=True)
        tf.identity(w, name="y")
    with client.session(graph.as_graph_def()) as s:
        first = s.read()
        assert_close(first["twice"], 2 * first["w"])
        assert_close(s.read()["w"], first["w"])
        assert_close(s.evaluate(fetches=["y"]).outputs["y"], first["w"])
        assert np.unique(first["w"]).size == 50


def test_variables_of_a_session_can_be_fed_and_differentiated(client: Any) -> None:
    with client.session(linear(), variables={"b": [1.0, 1.0]}) as s:
        r = s.evaluate({"x": X, "t": T}, fetches=["y"], ys=["loss"], xs=["w", "x"])
        whole = client.evaluate(linear(), {"x": X, "t": T, "b": [1.0, 1.0]}, ["y"], ys=["loss"], xs=["w", "x"])
        assert_close(r.outputs["y"], whole.outputs["y"])
        assert_close(r.gradients["w"], whole.gradients["w"])
        assert_close(r.gradients["x"], whole.gradients["x"])
        fed = s.evaluate({"x": X, "b": [0.0, 0.0]}, fetches=["y"]).outputs["y"]
        assert_close(fed, X @ W, rtol=1e-4)
        assert_close(s.read()["b"], np.float32([1, 1]))


def test_large_variables_are_uploaded_as_blobs(either: Any) -> None:
    g = gr.Graph()
    table = np.arange(40_000, dtype=np.float32).reshape(200, 200)
    g.op("Sum", g.variable("w", table), g.constant([0, 1]), name="loss")
    with either.session(g) as s:
        s.step({}, "loss", gr.optimizers.SGD(1.0))
        assert_close(s.read()["w"], table - 1)


@provokes("INVALID_OPTIMIZER")
def test_failed_requests_change_no_variable(client: Any) -> None:
    feeds = {"x": X, "t": T}
    with client.session(linear()) as s:
        before = s.read()
        with refused("INVALID_OPTIMIZER"):
            s.step(feeds, "loss", "adam")
        with refused("INVALID_OPTIMIZER") as refusal:
            s.step(feeds, "loss", gr.optimizers.SGD(0.1, clipnorm=1.0, clipvalue=1.0))
        refusal.says("SGD", "clip")
        with refused("UNKNOWN_TENSOR") as refusal:
            s.step(feeds, "los", gr.optimizers.SGD(0.1))
        refusal.says("'los'", "loss")
        with refused("UNKNOWN_TENSOR"):
            s.step(feeds, "loss", gr.optimizers.SGD(0.1), variables=["ww"])
        with refused("INVALID_DERIVATIVE"):
            s.step(feeds, "x", gr.optimizers.SGD(0.1))
        with refused("MISSING_FEED"):
            s.step({"x": X}, "loss", gr.optimizers.SGD(0.1))
        with refused("FEED_SHAPE"):
            s.assign({"b": [1.0, 2.0], "w": np.ones((2, 2), np.float32)})
        with refused("FEED_DTYPE"):
            s.assign({"w": W.astype(np.float64) + 0.1})
        with refused("UNKNOWN_TENSOR"):
            s.read("q")
        after = s.read()
        assert all((before[name] == after[name]).all() for name in before)
        assert s.step(feeds, "loss", gr.optimizers.SGD(0.1)).step == 1


def test_step_after_its_deadline_changes_nothing(tmp_path: Path) -> None:
    def build() -> None:
        v1 = tf.compat.v1
        w = v1.get_variable("w", initializer=tf.ones([]), use_resource=True)
        n = v1.placeholder(tf.int32, (), name="n")
        _, last = tf.while_loop(lambda i, _: i < n, lambda i, v: (i + 1, tf.sin(v)), [0, w])
        tf.identity(last, name="loss")

    with tf.Graph().as_default() as graph:
        build()
    with (
        running_server(tmp_path) as server,
        gr.connect(server.target) as client,
        client.session(graph.as_graph_def()) as s,
    ):
        s.step({"n": 1}, "loss", gr.optimizers.SGD(1.0))
        before = s.read()["w"]
        with refused("DEADLINE_EXCEEDED"):
            s.step({"n": 300_000}, "loss", gr.optimizers.SGD(1.0), timeout=0.2)
        try:
            after = s.read(timeout=60)["w"]
        except gr.errors.SessionLostError:
            # A call that runs too long is ended with its engine.
            return
        assert after == before


def test_variable_without_value_is_reported(client: Any) -> None:
    g = linear()
    del g.variables["b"]
    with client.session(g) as s:
        with refused("MISSING_FEED") as refusal:
            s.evaluate({"x": X}, fetches=["y"])
        refusal.says("'b'")
        with refused("MISSING_FEED"):
            s.read("b")
        s.assign({"b": [0.0, 0.0]})
        assert_close(s.evaluate({"x": X}, fetches=["y"]).outputs["y"], X @ W, rtol=1e-4)


def test_session_that_cannot_start_is_refused(either: Any) -> None:
    g = linear()
    g.op("Sign", g.placeholder("q", "float32", [None]), name="unused")
    with refused("UNKNOWN_TENSOR"), either.session(g, variables={"nope": 1.0}):
        pass
    with refused("UNAVAILABLE"):
        either.session(linear()).read()


class RawSession:
    """Sends plain session messages."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method: Any = channel.stream_stream("/gradrule.v1.SessionService/RunSession")
        self.call: Any = method(iter(self._outgoing.get, None), timeout=60)

    def ask(self, data: bytes) -> session_pb2.RunSessionResponse:
        self._outgoing.put(data)
        return session_pb2.RunSessionResponse.FromString(next(self.call))


def start() -> bytes:
    graph = linear()
    request = session_pb2.RunSessionRequest()
    request.start.graph.serialized = graph.to_bytes()
    for name, value in graph.variables.items():
        request.start.variables.add(name=name).value.inline_tensor.CopyFrom(raw.tensor(value))
    return request.SerializeToString()


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff", b"", session_pb2.RunSessionRequest(read=session_pb2.ReadRequest()).SerializeToString()],
)
def test_session_must_begin_with_start(channel: grpc.Channel, data: bytes) -> None:
    session = RawSession(channel)
    with pytest.raises(grpc.RpcError) as failure:
        session.ask(data)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_malformed_message_does_not_end_the_session(channel: grpc.Channel) -> None:
    session = RawSession(channel)
    assert [spec.name for spec in session.ask(start()).started.variables] == ["w", "b"]
    for data in (b"\xff\xff", b"", start()):
        assert error_reason(session.ask(data)) == "MALFORMED_REQUEST"
    request = session_pb2.RunSessionRequest(read=session_pb2.ReadRequest())
    assert len(session.ask(request.SerializeToString()).read.variables) == 2
    session.call.cancel()


def test_calls_of_a_session_have_its_graph_and_overrides(channel: grpc.Channel) -> None:
    def ask(**kind: Any) -> session_pb2.RunSessionResponse:
        return session.ask(session_pb2.RunSessionRequest(**kind).SerializeToString())

    session, other = RawSession(channel), RawSession(channel)
    session.ask(start())
    other.ask(start())
    call = evaluate_pb2.EvaluateRequest(feeds=raw.feeds({"x": raw.tensor(X)}))
    call.spec.fetches.append("y")
    call.spec.vjp.ys.append("y")
    call.spec.vjp.xs.append("b")
    assert ask(call=call).evaluate.outputs[0].name == "y"
    call.run_timeout.seconds = -1
    assert error_reason(ask(call=call)) == "DEADLINE_EXCEEDED"
    call.run_timeout.seconds = 1 << 62
    assert ask(call=call).evaluate.outputs[0].name == "y"
    graph, override, variable = program_pb2.ProgramSpec(), program_pb2.ProgramSpec(), program_pb2.ProgramSpec()
    graph.graph.serialized = b""
    override.overrides.add()
    variable.variables.add(name="b")
    for spec in (graph, override, variable, program_pb2.ProgramSpec(no_gradient=program_pb2.NO_GRADIENT_ZERO)):
        wrong = evaluate_pb2.EvaluateRequest(spec=spec)
        wrong.MergeFrom(call)
        for answer in (ask(call=wrong), ask(forward=evaluate_pb2.ForwardRequest(evaluate=wrong))):
            assert error_reason(answer) == "MALFORMED_REQUEST"
            assert spec.ListFields()[0][0].name in answer.status.message
    for wrong in (evaluate_pb2.EvaluateRequest(program="programs/p"), evaluate_pb2.EvaluateRequest()):
        assert error_reason(ask(call=wrong)) == "MALFORMED_REQUEST"
    kept = ask(forward=evaluate_pb2.ForwardRequest(evaluate=call)).forward
    assert [item.name for item in kept.evaluate.outputs] == ["y"]
    pull_back = evaluate_pb2.PullBackRequest(handle=kept.handle)
    stolen = other.ask(session_pb2.RunSessionRequest(pull_back=pull_back).SerializeToString())
    assert error_reason(stolen) == "HANDLE_EXPIRED"
    [gradient] = ask(pull_back=pull_back).pull_back.gradients
    assert (gradient.x, gradient.WhichOneof("value")) == ("b", "dense")
    close = evaluate_pb2.CloseHandleRequest(handle=kept.handle)
    assert ask(close_handle=close).WhichOneof("response") == "close_handle"
    assert error_reason(ask(pull_back=pull_back)) == "HANDLE_EXPIRED"
    for opened in (session, other):
        opened.call.cancel()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ("--max-sessions", "2", "--max-session-bytes", "1MiB", "--max-handle-bytes", "1KiB")
    with running_server(tmp_path_factory.mktemp("small"), flags) as running:
        yield running


@provokes("QUOTA_EXCEEDED")
def test_number_and_bytes_of_sessions_are_limited(small: RunningServer) -> None:
    with gr.connect(small.target) as client:
        with client.session(linear()), client.session(linear()):
            with refused("QUOTA_EXCEEDED") as refusal, client.session(linear()):
                pass
            refusal.says("2 sessions")
        g = gr.Graph()
        g.op("Sum", g.variable("w", np.ones(200_000, np.float32)), g.constant([0]), name="loss")

        def free() -> Any:
            try:
                with client.session(g) as s:
                    with refused("QUOTA_EXCEEDED") as refusal:
                        s.step({}, "loss", gr.optimizers.Adam(0.1))
                    refusal.says("slots", "max-session-bytes")
                    assert_close(s.read()["w"], np.ones(200_000, np.float32))
                    return s.step({}, "loss", gr.optimizers.SGD(1.0)).step
            except gr.errors.QuotaExceededError:
                # The closed sessions may still count.
                return None

        assert wait_until(free, "room for a session") == 1
        g = gr.Graph()
        g.op("Sum", g.variable("w", np.ones(400_000, np.float32)), g.constant([0]), name="loss")
        with refused("QUOTA_EXCEEDED"), client.session(g):
            pass


def test_forward_that_exceeds_the_bytes_of_handles_changes_no_variable(small: RunningServer) -> None:
    def build() -> None:
        x = tf.compat.v1.placeholder(tf.float32, [None], "x")
        v = tf.compat.v1.get_variable("v", initializer=tf.constant(0.0), use_resource=True)
        with tf.control_dependencies([v.assign_add(1.0)]):
            tf.square(x, name="y")

    with tf.Graph().as_default() as graph:
        build()
    fits, too_large = np.ones(4, np.float32), np.ones(1000, np.float32)

    with gr.connect(small.target) as client:

        def started() -> Any:
            try:
                return client.session(graph.as_graph_def()).__enter__()
            except gr.errors.QuotaExceededError:
                # The closed sessions of other tests may still count.
                return None

        with wait_until(started, "room for a session") as s:
            kept = s.forward({"x": fits}, ys="y", xs="x")
            for _ in range(2):
                with refused("QUOTA_EXCEEDED") as refusal:
                    s.forward({"x": too_large}, ys="y", xs="x")
                refusal.says("handle would keep", "max-handle-bytes")
                assert s.read("v")["v"] == 1
            assert_close(kept.vjp()["x"], 2 * fits)
            kept.close()
            s.forward({"x": fits}, ys="y", xs="x").close()
            assert s.read("v")["v"] == 2


@provokes("SESSION_LOST")
def test_session_is_lost_with_its_engine(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, gr.connect(server.target) as client, client.session(linear()) as s:
        s.step({"x": X, "t": T}, "loss", gr.optimizers.SGD(0.1))
        handle = s.forward({"x": X}, ys="y", xs="w")
        os.kill(server.session_engine_pid(), signal.SIGKILL)
        with refused("SESSION_LOST"):
            handle.vjp()
        handle.close()
        for _ in range(2):
            with refused("SESSION_LOST"):
                s.read()
        with client.session(linear()) as another:
            assert another.step({"x": X, "t": T}, "loss", gr.optimizers.SGD(0.1)).step == 1


_TRAINS = """
import sys
import numpy as np
import gradrule as gr
g = gr.Graph()
g.op("Sum", g.op("Square", g.variable("w", np.ones(20_000_000, np.float32))), g.constant([0]), name="loss")
client = gr.connect(sys.argv[1], timeout=120)
with client.session(g) as s:
    while True:
        s.step({}, "loss", gr.optimizers.Adam(0.01))
        print("step", flush=True)
"""


def test_killed_clients_leave_no_memory(tmp_path: Path) -> None:
    """Freed memory is reused: the first client makes the engine grow, and no later one does, though each has 80 MB of
    variables and twice as much of slots.
    """

    def train_until_killed() -> None:
        with subprocess.Popen(
            [sys.executable, "-c", _TRAINS, server.target], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as trainer:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == b"step\n"
            trainer.send_signal(signal.SIGKILL)
        # The server's only session slot is free as soon as the killed session is gone.
        with gr.connect(server.target) as client:
            wait_until(lambda: has_room(client), "room for another session")

    def has_room(client: gr.Client) -> bool | None:
        try:
            with client.session(linear()):
                return True
        except gr.errors.QuotaExceededError:
            return None

    def largest() -> int:
        # While a step of a killed client runs, the next session uses another engine.
        sizes = [0]
        for pid in engines(server.process.pid):
            with contextlib.suppress(FileNotFoundError):
                sizes.append(resident_bytes(pid))
        return max(sizes)

    def settled() -> int | None:
        before = largest()
        time.sleep(0.5)
        return before if abs(largest() - before) < 1e6 else None

    with running_server(tmp_path, ("--max-sessions", "1")) as server:
        train_until_killed()
        # A step may still run.
        first = wait_until(settled, "engines at rest")
        assert first > 240e6, "variables and slots of one session"
        for _ in range(3):
            train_until_killed()
            wait_until(lambda: largest() < first + 60e6 or None, "memory where it was")


def test_a_loss_that_is_not_fetched_is_not_returned(channel: Any) -> None:
    """Clients of other languages may not ask for the loss."""
    session = RawSession(channel)
    session.ask(start())
    step = session_pb2.StepRequest(
        feeds=raw.feeds({"x": raw.tensor(X), "t": raw.tensor(T)}),
        loss="loss",
        optimizer=session_pb2.Optimizer(name="SGD", settings={"learning_rate": 0.1}),
        fetches=["y"],
    )
    answer = session.ask(session_pb2.RunSessionRequest(step=step).SerializeToString())
    assert [output.name for output in answer.step.outputs] == ["y"]
    assert answer.step.step == 1
    session.call.cancel()
