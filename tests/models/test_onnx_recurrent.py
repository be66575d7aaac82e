"""Compares LSTM and GRU with sequences of several lengths with NumPy: onnx has no node cases of these."""

from __future__ import annotations

import numpy as np
import pytest

import gradrule as gr
from tests.models.onnx_running import Array, run_locally
from tests.unit.models.onnx_models import node, onnx_model

_RANDOM = np.random.default_rng(3)
_STEPS, _BATCH, _INPUTS, _HIDDEN = 4, 3, 2, 5


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _lstm_step(x: Array, r: Array, b: Array, states: list[Array]) -> list[Array]:
    h, c = states
    i, o, f, g = np.split(x + h @ r.T + b, 4, axis=1)
    c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
    return [_sigmoid(o) * np.tanh(c), c]


def _gru_step(x: Array, r: Array, b: Array, states: list[Array]) -> list[Array]:
    (h,) = states
    xz, xr, xh = np.split(x, 3, axis=1)
    hz, hr, hh = np.split(h @ r.T + b, 3, axis=1)
    z, new = _sigmoid(xz + hz), np.tanh(xh + _sigmoid(xr + hr) * hh)
    return [(1 - z) * new + z * h]


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("op_type", "gates", "count"), [("LSTM", 4, 2), ("GRU", 3, 1)])
def test_sequences_of_several_lengths(op_type: str, gates: int, count: int, direction: str) -> None:
    directions = 2 if direction == "bidirectional" else 1
    x = _RANDOM.normal(size=(_STEPS, _BATCH, _INPUTS))
    w = _RANDOM.normal(size=(directions, gates * _HIDDEN, _INPUTS))
    r = _RANDOM.normal(size=(directions, gates * _HIDDEN, _HIDDEN))
    b = _RANDOM.normal(size=(directions, 2 * gates * _HIDDEN))
    lengths = np.array([4, 1, 3], np.int32)
    first = _RANDOM.normal(size=(directions, _BATCH, _HIDDEN))
    expected = np.zeros((_STEPS, directions, _BATCH, _HIDDEN))
    last = np.zeros((directions, _BATCH, _HIDDEN))
    step = _lstm_step if op_type == "LSTM" else _gru_step
    for place in range(directions):
        own, bias = np.split(b[place], 2)
        for example, length in enumerate(lengths):
            states = [first[place, example : example + 1] for _ in range(count)]
            steps = range(length)
            for number in reversed(steps) if direction == "reverse" or place else steps:
                share = x[number, example : example + 1] @ w[place].T + own
                states = step(share, r[place], bias, states)
                expected[number, place, example] = states[0]
            last[place, example] = states[0]
    inputs = "x w r b lengths h0" + (" h0" if count == 2 else "")
    more = {"linear_before_reset": 1} if op_type == "GRU" else {}
    outputs = "y h c" if count == 2 else "y h"
    nodes = [node(op_type, inputs, outputs, direction=direction, hidden_size=_HIDDEN, **more)]
    values = {"w": w, "r": r, "b": b, "lengths": lengths, "h0": first}
    model = onnx_model(nodes, {"x": (np.float64, x.shape)}, ["y", "h"], values, opset=21)
    y, h = run_locally(gr.from_onnx(model.SerializeToString()), {"x": x}, ["y", "h"])
    np.testing.assert_allclose(y, expected, atol=1e-12)
    np.testing.assert_allclose(h, last, atol=1e-12)
