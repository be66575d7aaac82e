"""Trains through the server, which computes the gradients; the optimizer runs here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gradrule.cli.demo.data import Digits
from gradrule.cli.demo.networks import Network
from gradrule.common.tensor_codec import Array

if TYPE_CHECKING:
    from gradrule import Client

_BETA1 = 0.9
_BETA2 = 0.999
_EPSILON = 1e-8
_BATCH = 64
# Called after each step with the number of steps done, the loss and the latest test accuracy.
Progress = Callable[[int, float, float], None]


class Adam:
    """Updates weights by Adam (Kingma and Ba, 2015, algorithm 1).

    Args:
        weights: Initial weights by name; copied.
        limit: Weights stay within ±limit, as latent binary weights do; None: no limit.
    """

    def __init__(self, weights: Mapping[str, Array], limit: float | None = None) -> None:
        self.weights = {name: value.copy() for name, value in weights.items()}
        self._limit = limit
        self._mean = {name: np.zeros_like(value) for name, value in weights.items()}
        self._square = {name: np.zeros_like(value) for name, value in weights.items()}
        self._steps = 0

    def step(self, gradients: Mapping[str, Array], learning_rate: float) -> None:
        """Updates every weight with its gradient, which has the same shape."""
        self._steps += 1
        correct_mean = 1 - _BETA1**self._steps
        correct_square = 1 - _BETA2**self._steps
        for name, weight in self.weights.items():
            gradient = gradients[name]
            mean, square = self._mean[name], self._square[name]
            mean += (1 - _BETA1) * (gradient - mean)
            square += (1 - _BETA2) * (gradient * gradient - square)
            weight -= learning_rate * (mean / correct_mean) / (np.sqrt(square / correct_square) + _EPSILON)
            if self._limit is not None:
                np.clip(weight, -self._limit, self._limit, out=weight)


@dataclass(frozen=True)
class TrainingOptions:
    """Holds the options of training.

    Attributes:
        epochs: Number of passes over the training data.
        learning_rate: Initial learning rate; it decreases to zero along a cosine.
        weight_limit: Weights stay within ±weight_limit; None: no limit.
    """

    epochs: int
    learning_rate: float
    weight_limit: float | None = None

    def steps(self, digits: Digits) -> int:
        """Returns the number of steps; an incomplete last batch of an epoch is dropped."""
        return self.epochs * (len(digits.train_x) // _BATCH)


@dataclass
class TrainingResult:
    """Holds the results of training.

    Attributes:
        weights: Weights by name.
        losses: Training loss of each step.
        accuracies: Pairs of step and test accuracy.
        seconds: Time of the steps, without tests.
        device: Device of the server.
    """

    weights: dict[str, Array] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    device: str = ""

    @property
    def accuracy(self) -> float:
        """Returns the test accuracy after the last step."""
        return self.accuracies[-1][1]


def train(
    client: Client,
    network: Network,
    digits: Digits,
    options: TrainingOptions,
    *,
    overrides: dict[str, str] | None,
    seed: int,
    progress: Progress,
) -> TrainingResult:
    """Trains with the server's gradients under the overrides, and tests after each epoch."""
    step = client.compile(network.graph, ys=["loss"], xs=list(network.weights), fetches=["loss"], overrides=overrides)
    classify = client.compile(network.graph, fetches=["logits"])
    optimizer = Adam(network.weights, options.weight_limit)
    rng = np.random.default_rng(seed)
    result = TrainingResult(optimizer.weights)
    total = options.steps(digits)

    def feeds(**values: Array) -> dict[Any, Any]:
        return {**values, **optimizer.weights}

    def test() -> None:
        logits = classify.evaluate(feeds(x=digits.test_x)).outputs["logits"]
        right = np.argmax(logits, axis=1) == digits.test_labels
        result.accuracies.append((len(result.losses), float(np.mean(right))))

    test()
    for _ in range(options.epochs):
        order = rng.permutation(len(digits.train_x))
        for first in range(0, len(order) - _BATCH + 1, _BATCH):
            batch = order[first : first + _BATCH]
            started = time.perf_counter()
            evaluated = step.evaluate(feeds(x=digits.train_x[batch], labels=digits.train_labels[batch]))
            decay = 0.5 * (1 + math.cos(math.pi * len(result.losses) / total))
            gradients = {name: np.asarray(evaluated.gradients[name]) for name in optimizer.weights}
            optimizer.step(gradients, options.learning_rate * decay)
            result.seconds += time.perf_counter() - started
            result.losses.append(float(evaluated.outputs["loss"]))
            result.device = evaluated.device
            if first + 2 * _BATCH > len(order):
                test()
            progress(len(result.losses), result.losses[-1], result.accuracy)
    return result
