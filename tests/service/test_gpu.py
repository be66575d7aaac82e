"""A server on a GPU gives the results of NumPy. `make gpu-check` runs these tests where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import gradrule as gr
from tests.service.servers import running_server

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]


@pytest.fixture(scope="module")
def gpu_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gr.Client]:
    """Returns a client of a server on the first GPU."""
    with (
        running_server(tmp_path_factory.mktemp("gpu"), ["--device", "gpu:0"]) as server,
        gr.connect(server.target) as client,
    ):
        yield client


def sign_of_product() -> gr.Graph:
    """Makes loss = sum(sign(x·w)·x·w) in float64, so that no product is rounded to TensorFloat-32."""
    g = gr.Graph()
    x = g.placeholder("x", "float64", [None, 64])
    w = g.placeholder("w", "float64", [64, 32])
    product = g.op("MatMul", x, w, name="product")
    signed = g.op("Mul", g.op("Sign", product, name="sign"), product, name="signed")
    g.op("Sum", signed, g.constant(np.array([0, 1], np.int32), name="axes"), name="loss")
    return g


def test_rule_on_the_gpu_agrees_with_numpy(gpu_client: gr.Client) -> None:
    random = np.random.default_rng(7)
    x, w = random.normal(size=(16, 64)), random.normal(size=(64, 32))
    r = gpu_client.evaluate(
        sign_of_product(),
        feeds={"x": x, "w": w},
        fetches=["loss"],
        ys=["loss"],
        xs=["x", "w"],
        overrides={"Sign": gr.Rule("where(abs(x) <= 1, dy, 0)")},
    )
    product = x @ w
    upstream = np.sign(product) + np.where(np.abs(product) <= 1, product, 0)
    np.testing.assert_allclose(np.asarray(r.outputs["loss"]), np.abs(product).sum(), rtol=1e-12)
    np.testing.assert_allclose(np.asarray(r.gradients["x"]), upstream @ w.T, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(np.asarray(r.gradients["w"]), x.T @ upstream, rtol=1e-10, atol=1e-10)
    assert r.device.upper().startswith("GPU:0")


def test_compiled_program_stays_on_the_gpu(gpu_client: gr.Client) -> None:
    program = gpu_client.compile(sign_of_product(), ys=["loss"], xs=["x"], overrides={"Sign": "ste_sign"})
    x, w = np.ones((2, 64)), np.zeros((64, 32))
    answers = [program(x=x, w=w) for _ in range(3)]
    for answer in answers:
        np.testing.assert_array_equal(np.asarray(answer.gradients["x"]), np.zeros((2, 64)))
        assert answer.device.upper().startswith("GPU:0")
