"""One program gives the same numbers through every framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradrule.jax
import gradrule.pytensor
import gradrule.scipy
import gradrule.tf
import gradrule.torch
from tests.bridges import examples
from tests.service.gateways import running_gateway

Gradients = tuple[float, Any, Any]
X, W = np.float32(examples.X), np.float32(examples.W)


def by_grpc(program: Any) -> Gradients:
    result = program(x=X, w=W)
    return float(result.outputs["loss"]), result.gradients["x"], result.gradients["w"]


def by_http(program: Any) -> Gradients:
    """Sends float32 values as JSON numbers, which have enough digits to keep them."""
    with running_gateway(program._client.target) as gateway:
        feeds = {"x": X.tolist(), "w": W.tolist()}
        answer = gateway.post("/v1/evaluate", {"program": program.name, "feeds": feeds}).json
    by_name = {name: np.float32(tensor["values"]) for name, tensor in answer["gradients"].items()}
    return answer["outputs"]["loss"]["values"], by_name["x"], by_name["w"]


def by_torch(program: Any) -> Gradients:
    import torch

    x, w = torch.tensor(X, requires_grad=True), torch.tensor(W, requires_grad=True)
    loss: Any = gradrule.torch.remote(program)(x, w)
    loss.backward()
    return loss.item(), x.grad, w.grad


def by_jax(program: Any) -> Gradients:
    import jax

    value, (by_x, by_w) = jax.value_and_grad(gradrule.jax.remote(program), argnums=(0, 1))(X, W)
    return float(value), by_x, by_w


def by_scipy(program: Any) -> Gradients:
    objective = gradrule.scipy.value_and_grad(program, ["x", "w"])
    value, gradient = objective(objective.pack(x=X, w=W))
    found = objective.unpack(gradient)
    return value, found["x"], found["w"]


def by_pytensor(program: Any) -> Gradients:
    import pytensor
    import pytensor.tensor as pt

    x, w = pt.fmatrix("x"), pt.fmatrix("w")
    loss = gradrule.pytensor.remote(program)(x, w)
    value, by_x, by_w = pytensor.function([x, w], [loss, *pytensor.grad(loss, [x, w])])(X, W)
    return float(value), by_x, by_w


def by_tensorflow(program: Any) -> Gradients:
    import tensorflow as tf

    x, w = tf.constant(X), tf.constant(W)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        loss = gradrule.tf.remote(program)(x, w)
    return float(loss), *tape.gradient(loss, [x, w])


def by_keras(program: Any) -> Gradients:
    """Runs the same layer in a Keras layer on the server."""
    import keras
    import tensorflow as tf

    import gradrule as gr

    class Signs(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.w = self.add_weight(shape=W.shape, name="w")

        def call(self, x: Any) -> Any:
            return tf.reduce_sum(tf.sign(x @ self.w))

    layer = Signs()
    layer.build(X.shape)
    layer.w.assign(W)
    remote = gr.keras.RemoteLayer(layer, program._client, overrides={"Sign": "ste_sign"})
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = remote(x)
    return float(loss), *tape.gradient(loss, [x, layer.w.value])


@pytest.mark.parametrize("way", [by_http, by_torch, by_jax, by_scipy, by_pytensor, by_tensorflow, by_keras])
def test_the_numbers_are_those_of_the_client(binary: Any, way: Callable[[Any], Gradients]) -> None:
    for found, wanted in zip(way(binary), by_grpc(binary), strict=True):
        np.testing.assert_array_equal(np.asarray(found), wanted)
