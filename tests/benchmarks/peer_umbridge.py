"""The bench's work as a UM-Bridge model: `python -m tests.benchmarks.peer_umbridge PORT SIZE`."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import umbridge

from tests.benchmarks import peer_gradient


class Model(umbridge.Model):  # type: ignore[misc]
    """A vector of `size` numbers, or the tiny work for 0."""

    def __init__(self, size: int) -> None:
        super().__init__("forward")
        self._size = size

    def get_input_sizes(self, config: Any) -> list[int]:
        return [self._size] if self._size else [8, 12]

    def get_output_sizes(self, config: Any) -> list[int]:
        return [self._size or 1]

    def __call__(self, parameters: Any, config: Any) -> Any:
        if self._size:
            return [np.sign(np.asarray(parameters[0])).tolist()]
        y, _, _ = peer_gradient.tiny(*self._matrices(parameters), 1.0)
        return [[float(y)]]

    def gradient(self, out_wrt: int, in_wrt: int, parameters: Any, sens: Any, config: Any) -> Any:
        if self._size:
            return peer_gradient.vector(np.asarray(parameters[0]), np.asarray(sens)).tolist()
        _, dx, dw = peer_gradient.tiny(*self._matrices(parameters), sens[0])
        return np.ravel(dw if in_wrt else dx).tolist()

    def supports_evaluate(self) -> bool:
        return True

    def supports_gradient(self) -> bool:
        return True

    @staticmethod
    def _matrices(parameters: Any) -> tuple[Any, Any]:
        return np.reshape(parameters[0], (2, 4)), np.reshape(parameters[1], (4, 3))


if __name__ == "__main__":
    umbridge.serve_models([Model(int(sys.argv[2]))], int(sys.argv[1]))
