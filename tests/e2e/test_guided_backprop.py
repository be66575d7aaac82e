"""Guided backpropagation of a convolutional digit classifier gives the published picture (arXiv:1412.6806).

The network is trained on the server, and NumPy computes its gradients a second time from the paper.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

import gradrule as gr
from gradrule.cli.demo import data, pictures
from gradrule.cli.demo.networks import Network, relu_network
from gradrule.cli.demo.training import TrainingOptions, train
from tests.service.answers import assert_close

Array = np.ndarray[Any, Any]


class Explained:
    """Holds a trained network, one digit of each class, and plain and guided gradients of their labels' logits."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.digits = data.load(seed=0)
        self.network: Network = relu_network(seed=0)
        run = train(
            client, self.network, self.digits, TrainingOptions(epochs=3, learning_rate=0.003), overrides=None, seed=0,
            progress=lambda *_: None,
        )  # fmt: skip
        self.accuracy, self.weights = run.accuracy, run.weights
        chosen = pictures.one_of_each(self.digits)
        self.x, self.labels = self.digits.test_x[chosen], self.digits.test_labels[chosen]
        self.feeds = {"x": self.x, "labels": self.labels, **self.weights}
        self.relus = [node.name for node in self.network.graph.find(op_type="Relu")]

    def gradients(self, overrides: Any, xs: list[str]) -> list[Array]:
        r = self.client.evaluate(self.network.graph, self.feeds, ys=["score"], xs=xs, overrides=overrides)
        return [np.asarray(r.gradients[x]) for x in xs]


@pytest.fixture(scope="module")
def explained(client: Any) -> Explained:
    found = Explained(client)
    assert found.accuracy > 0.9
    return found


def padded(x: Array, size: int, stride: int) -> tuple[Array, int]:
    """Applies TensorFlow's SAME padding to a square image; returns it and the padding before it."""
    out = -(-x.shape[1] // stride)
    total = max((out - 1) * stride + size - x.shape[1], 0)
    return np.pad(x, ((0, 0), (total // 2, total - total // 2), (total // 2, total - total // 2), (0, 0))), total // 2


def convolved(x: Array, kernel: Array, stride: int) -> Array:
    size = kernel.shape[0]
    wide, _ = padded(x, size, stride)
    out = -(-x.shape[1] // stride)
    y = np.zeros((len(x), out, out, kernel.shape[3]))
    for row, column in np.ndindex(size, size):
        part = wide[:, row : row + stride * out : stride, column : column + stride * out : stride]
        y += part @ kernel[row, column]
    return y


def convolved_back(dy: Array, kernel: Array, stride: int, like: Array) -> Array:
    size = kernel.shape[0]
    wide, before = padded(np.zeros_like(like), size, stride)
    out = dy.shape[1]
    for row, column in np.ndindex(size, size):
        part = dy @ kernel[row, column].T
        wide[:, row : row + stride * out : stride, column : column + stride * out : stride] += part
    side = like.shape[1]
    return wide[:, before : before + side, before : before + side]


def by_hand(explained: Explained, guided: bool) -> Array:
    """Computes the gradient of the labels' logits by the pixels, layer by layer."""
    weights = {name: np.asarray(value, np.float64) for name, value in explained.weights.items()}
    image_ = explained.x.astype(np.float64).reshape(-1, data.SIDE, data.SIDE, 1)
    first = convolved(image_, weights["kernel1"], 1) + weights["kernel1_bias"]
    second = convolved(np.maximum(first, 0), weights["kernel2"], 2) + weights["kernel2_bias"]
    flat = np.maximum(second, 0).reshape(len(image_), -1)
    third = flat @ weights["dense"] + weights["dense_bias"]

    def through_relu(dy: Array, x: Array) -> Array:
        return dy * (x > 0) * ((dy > 0) if guided else 1)

    d = np.eye(data.CLASSES)[explained.labels] @ weights["logits_w"].T
    d = through_relu(d, third) @ weights["dense"].T
    d = through_relu(d.reshape(second.shape), second)
    d = through_relu(convolved_back(d, weights["kernel2"], 2, first), first)
    return convolved_back(d, weights["kernel1"], 1, image_).reshape(len(image_), -1)


def test_both_pictures_equal_the_computation_from_the_paper(explained: Explained) -> None:
    (plain,) = explained.gradients(None, ["x"])
    (guided,) = explained.gradients(pictures.GUIDED, ["x"])
    for got, is_guided in ((plain, False), (guided, True)):
        wanted = by_hand(explained, is_guided)
        assert_close(got, wanted.astype(np.float32), rtol=1e-3)
    assert np.linalg.norm(guided - plain) > 0.3 * np.linalg.norm(plain)


def test_relu_passes_only_positive_gradients(explained: Explained) -> None:
    """At every layer a guided relu passes the plain gradient's form without its negative part."""
    graph = explained.network.graph
    inputs = [graph.node(name).inputs[0] for name in explained.relus]
    xs = [*inputs, *explained.relus]
    plain, guided = explained.gradients(None, xs), explained.gradients(pictures.GUIDED, xs)
    values = explained.client.evaluate(graph, explained.feeds, fetches=inputs).outputs
    count = len(inputs)
    assert count == 3
    for layer, name in enumerate(inputs):
        leaving, arriving = guided[layer], guided[count + layer]
        assert leaving.min() >= 0
        assert plain[layer].min() < 0
        assert_close(leaving, arriving * (values[name] > 0) * (arriving > 0))
        # Negative gradients do arrive: the layers between create them, and the next relu stops them.
        assert arriving.min() < 0


def test_preset_gives_the_same_gradients(explained: Explained) -> None:
    (by_rule,) = explained.gradients(pictures.GUIDED, ["x"])
    (by_preset,) = explained.gradients(gr.Preset("guided_backprop"), ["x"])
    np.testing.assert_array_equal(by_preset, by_rule)


def test_compare_reports_the_first_difference(explained: Explained) -> None:
    found = explained.client.compare(
        explained.network.graph,
        explained.feeds,
        ys="score",
        xs="x",
        overrides={"guided": pictures.GUIDED},
        finite_differences=False,
    )
    first = found.first_differences["guided"]
    last = explained.network.graph.node(explained.relus[-1])
    assert first.tensor == last.inputs[0]
    assert [item.node for item in first.rules] == [last.name]


def test_guided_gradients_are_zero_without_ink(explained: Explained, tmp_path: Path) -> None:
    (plain,) = explained.gradients(None, ["x"])
    (guided,) = explained.gradients(pictures.GUIDED, ["x"])
    path = tmp_path / "saliency.png"
    pictures.saliency({"digit": explained.x, "gradient": plain, "guided": guided}, explained.labels, path)
    drawn = image.imread(path)
    assert drawn.shape[1] > drawn.shape[0] > 300
    # The corners of the images contain no ink.
    ink = explained.x > -1
    outside = {
        name: np.abs(value)[~ink].mean() / np.abs(value)[ink].mean()
        for name, value in (("plain", plain), ("guided", guided))
    }
    assert outside["guided"] < 1
