"""Computes a ReLU network's gradient with respect to pixels, plain and with guided backpropagation.

Springenberg et al., "Striving for Simplicity", 2015: at every ReLU the gradient is also cut where it is negative.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradrule.cli.demo.data import CLASSES, Digits
from gradrule.cli.demo.networks import Network
from gradrule.common.tensor_codec import Array

if TYPE_CHECKING:
    from gradrule import Client

GUIDED = {"Relu": "guided_relu"}


def one_of_each(digits: Digits) -> Array:
    """Returns the index of the first test digit of each class."""
    return np.array([np.flatnonzero(digits.test_labels == label)[0] for label in range(CLASSES)])


def gradients(client: Client, network: Network, weights: dict[str, Array], x: Array, labels: Array) -> list[Array]:
    """Returns gradients of the labels' logits with respect to x, shape (n, 64): TensorFlow's, then guided."""
    found = []
    feeds: dict[Any, Any] = {"x": x, "labels": labels, **weights}
    for overrides in (None, GUIDED):
        program = client.compile(network.graph, ys=["score"], xs=["x"], overrides=overrides)
        found.append(np.asarray(program.evaluate(feeds).gradients["x"]))
    return found
