"""Implements Adam (Kingma and Ba, 2015, algorithm 1) in NumPy; the server computes only gradients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gradrule.common.tensor_codec import Array

_BETA1 = 0.9
_BETA2 = 0.999
_EPSILON = 1e-8


class Adam:
    """Holds and updates weights. limit: weights stay within ±limit, as latent binary weights do."""

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
