"""Builds graphs and data for the tests of all frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np

import gradrule as gr
from gradrule.cli.demo import data
from gradrule.cli.demo.networks import Network, binary_network

RNG = np.random.default_rng(14)
X: Any = RNG.normal(size=(4, 3))
W: Any = RNG.normal(size=(3, 2))
BATCH: Any = RNG.normal(size=(5, 4, 3))


def smooth_graph() -> gr.Graph:
    """Returns y = tanh(x w)², of shape (n, 2), and z, the sum of tanh(x w), in float64; x is (n, 3) and w (3, 2)."""
    g = gr.Graph()
    x, w = g.placeholder("x", "float64", [None, 3]), g.placeholder("w", "float64", [3, 2])
    h = g.op_output("Tanh", g.matmul(x, w))
    g.multiply(h, h, name="y")
    g.reduce_sum(h, axis=[0, 1], name="z")
    return g


def complex_graph() -> gr.Graph:
    """Returns y = Re(exp(z) w conj(z)), with complex z and w of shape (3,)."""
    g = gr.Graph()
    z, w = g.placeholder("z", "complex128", [3]), g.placeholder("w", "complex128", [3])
    h = g.op_output("Mul", g.op_output("Mul", g.op_output("Exp", z), w), g.op_output("Conj", z))
    g.op("Real", h, Tout="float64", name="y")
    return g


Z: Any = RNG.normal(size=3) + 1j * RNG.normal(size=3)


def binary_graph() -> gr.Graph:
    """Returns loss = sum(sign(x w)), in float32, with an unknown number of rows."""
    g = gr.Graph()
    x, w = g.placeholder("x", "float32", [None, 3]), g.placeholder("w", "float32", [3, 2])
    g.reduce_sum(g.op_output("Sign", g.matmul(x, w)), axis=[0, 1], name="loss")
    return g


def straight_through(x: Any, w: Any) -> tuple[Any, Any]:
    """Returns the gradients of `binary_graph` by x and w where the sign passes gradients for inputs in [-1, 1]."""
    passed = (np.abs(x @ w) <= 1).astype(x.dtype)
    return passed @ w.T, x.T @ passed


def digits_network() -> Network:
    """Returns a network with binary weights and activations for 8×8 handwritten digits."""
    return binary_network(0, hidden=(128,))


DIGITS = data.load(0)
BATCHES = np.random.default_rng(1).integers(0, len(DIGITS.train_x), size=(120, 64))
"""Indices of the examples of each training step."""

WANTED_ACCURACY = 0.85
"""What a network trained for these steps reaches on the test digits; an untrained one has 0.1."""


def accuracy(program: Any, weights: dict[str, Any]) -> float:
    """Returns the share of the test digits that a program with these weights recognises."""
    feeds = {"x": DIGITS.test_x, "labels": DIGITS.test_labels, **weights}
    logits = program.evaluate(feeds).outputs["logits"]
    return float(np.mean(np.argmax(logits, axis=1) == DIGITS.test_labels))
