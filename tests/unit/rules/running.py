"""Runs rule graphs with local TensorFlow, and makes values for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from gradrule.common import tensor_codec
from gradrule_server.rules import RuleGraph

Array = NDArray[Any]

_VALUES: Mapping[str, list[float]] = {
    "x0": [-2.0, -0.75, 0.0, 0.5, 1.0, 2.5],
    "x1": [0.5, -1.0, 2.0, 0.25, 1.0, -3.0],
    "x2": [1.25, 0.75, -0.5, 3.0, -1.0, 2.0],
    "y0": [-1.0, 0.5, 0.25, 1.0, 2.0, 0.75],
    "y1": [3.0, -0.25, 1.5, 0.5, -2.0, 1.0],
    "dy0": [1.5, -1.0, 0.25, -2.0, 3.0, 0.5],
    "dy1": [-0.5, 2.0, 1.0, 0.75, -1.5, 0.25],
    "default0": [0.25, -0.5, 1.0, 2.0, -0.125, 0.75],
    "default1": [1.0, 0.5, -0.25, -3.0, 0.125, 1.75],
    "default2": [-0.5, 1.5, 0.25, 2.0, -1.125, 0.5],
}


def numpy_type(name: str) -> np.dtype[Any]:
    """NumPy's type of that name, bfloat16 included; strings are objects."""
    return np.dtype({"bfloat16": ml_dtypes.bfloat16, "string": object}.get(name, name))


def number_of(name: str) -> int:
    """The element type's number."""
    return int(tf.as_dtype(name).as_datatype_enum)


def value_for(variable: str, dtype: str, shape: tuple[int, ...]) -> Array:
    """A value with zeros, ones and negative numbers, another for every variable."""
    plain = np.resize(np.array(_VALUES[variable]), shape)
    if dtype == "bool":
        return plain > 0
    if dtype == "string":
        return np.full(shape, b"text", object)
    if dtype.startswith("complex"):
        return (plain + 1j * np.roll(plain, 2)).astype(dtype)
    return plain.astype(numpy_type(dtype))


SALT = 7
"""What stands for a number made of an op's name."""

_STRIDE = 0x9E3779B97F4A7C15


class Draws:
    """Random numbers as docs/reference/expression-language.md defines them, by TensorFlow's public functions."""

    def uniform(self, like: Any, seed: int, k: int = 0, dtype: str = "float64") -> Array:
        return self._draw(tf.random.stateless_uniform, like, seed, k, dtype)

    def normal(self, like: Any, seed: int, k: int = 0, dtype: str = "float64") -> Array:
        return self._draw(tf.random.stateless_normal, like, seed, k, dtype)

    def _draw(self, function: Any, like: Any, seed: int, k: int, dtype: str) -> Array:
        # int64 wraps round, as the definition's "modulo" does.
        salted = np.array([SALT + k * _STRIDE & 2**64 - 1], np.uint64).view(np.int64)[0]
        pair = np.array([seed, salted], np.int64)
        return exact(function(np.shape(like), seed=pair, dtype=dtype, alg="philox").numpy())


def exact(value: Array) -> Array:
    """The same numbers in float64, complex128 or int64, for a reference that adds no rounding of its own."""
    if value.dtype.kind == "c":
        return value.astype(np.complex128)
    if value.dtype.kind in "biuO":
        return value.astype(np.int64) if value.dtype.kind in "iu" else value
    return value.astype(np.float64)


def run(rule_graph: RuleGraph, values: Mapping[str, Any]) -> list[Array | None]:
    """The results, None where there is none; `values` by variable, params as `param/NAME`."""
    graph = tf.Graph()
    with graph.as_default():
        definition = tf.compat.v1.GraphDef.FromString(rule_graph.graph.SerializeToString())
        tf.import_graph_def(definition, name="")
    feeds = {f"{placeholder}:0": values[variable] for variable, placeholder in rule_graph.inputs.items()}
    fetches = [name for name in rule_graph.results if name is not None]
    with tf.compat.v1.Session(graph=graph) as session:
        computed = iter(session.run(fetches, feeds))
    return [None if name is None else np.asarray(next(computed)) for name in rule_graph.results]


def tensor_bytes(value: Array) -> bytes:
    """A tensor message's bytes."""
    return tensor_codec.to_message(value).SerializeToString()
