"""Convolutions for which TensorFlow has no right gradient on the CPU have one, or are refused.

The reference is a convolution of each group with a filter that NumPy filled with zeros, in local TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.graphs import Limits
from tests.service.graph_defs import build_graph_def, load_graph, placeholder
from tests.unit.engine.building import prepared
from tests.unit.engine.second_order import twice, twice_locally

RNG = np.random.default_rng(5)

CASES: Mapping[str, tuple[int, dict[str, Any]]] = {
    "grouped": (2, {"strides": [1, 1, 1, 1], "padding": "SAME"}),
    "one_channel_per_group": (4, {"strides": [1, 1, 1, 1], "padding": "VALID"}),
    "grouped_strides": (2, {"strides": [1, 2, 1, 1], "padding": "VALID"}),
    "dilated": (1, {"strides": [1, 1, 1, 1], "padding": "SAME", "dilations": [1, 2, 3, 1]}),
    "grouped_dilated": (2, {"strides": [1, 1, 1, 1], "padding": "VALID", "dilations": [1, 2, 1, 1]}),
    "explicit": (
        2,
        {
            "strides": [1, 1, 1, 1],
            "padding": "EXPLICIT",
            "explicit_paddings": [0, 0, 1, 2, 0, 1, 0, 0],
            "dilations": [1, 2, 2, 1],
        },
    ),
}


def values(groups: int) -> tuple[Any, Any]:
    return RNG.normal(size=(2, 7, 8, 4)), RNG.normal(size=(3, 2, 4 // groups, 8))


def by_group(groups: int, attributes: Mapping[str, Any]) -> Callable[[Any, Any], Any]:
    """Returns the convolution, made of ungrouped ones without dilations, which local TensorFlow differentiates."""
    plain = {name: value for name, value in attributes.items() if name != "dilations"}
    high, wide = attributes.get("dilations", [1, 1, 1, 1])[1:3]
    holes = np.zeros((3, 2, (3 - 1) * high + 1, (2 - 1) * wide + 1))
    for row, column in np.ndindex(3, 2):
        holes[row, column, row * high, column * wide] = 1

    def convolution(x: Any, w: Any) -> Any:
        full = tf.einsum("hwij,hwyx->yxij", w, tf.constant(holes, w.dtype))
        parts = zip(tf.split(x, groups, 3), tf.split(full, groups, 3), strict=True)
        return tf.concat([tf.raw_ops.Conv2D(input=one, filter=kernel, **plain) for one, kernel in parts], 3)

    return convolution


def graph_of(x: Any, w: Any, attributes: Mapping[str, Any], op: Any = tf.raw_ops.Conv2D) -> Any:
    def build() -> None:
        given = placeholder("x", x.dtype, x.shape), placeholder("w", w.dtype, w.shape)
        tf.identity(op(input=given[0], filter=given[1], **attributes), name="y")

    return build_graph_def(build)


def assert_close(found: Sequence[Any], wanted: Sequence[Any], dtype: str) -> None:
    for value, expected in zip(found, wanted, strict=True):
        assert (value is None) == (expected is None)
        if value is not None:
            np.testing.assert_allclose(value, expected, rtol=1e-10 if dtype == "float64" else 1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_convolutions_equal_those_of_each_group(case: str, dtype: str) -> None:
    groups, attributes = CASES[case]
    x, w = (value.astype(dtype) for value in values(groups))
    local = by_group(groups, attributes)
    shape = local(x, w).shape
    dy, seed = RNG.normal(size=shape).astype(dtype), RNG.normal(size=x.shape).astype(dtype)
    graph = graph_of(x, w, attributes)
    assert_close(
        twice(graph.SerializeToString(), {"x": x, "w": w}, "y", dy, seed), twice_locally(local, [x, w], dy, seed), dtype
    )


def depthwise(x: Any, w: Any) -> None:
    y = tf.raw_ops.DepthwiseConv2dNative(
        input=x, filter=w, strides=[1, 1, 1, 1], padding="SAME", dilations=[1, 2, 2, 1]
    )
    tf.identity(y, name="y")


@pytest.mark.parametrize("trusted", [False, True])
def test_dilated_depthwise_convolutions_are_refused(trusted: bool) -> None:
    """Its forward kernel fails, but its gradient kernels ignore the dilations."""

    def build() -> None:
        depthwise(placeholder("x", shape=(1, 8, 8, 2)), placeholder("w", shape=(3, 3, 2, 1)))

    with pytest.raises(GradruleError, match=r"'Depthwise\w*' .* dilations \[1, 2, 2, 1\]") as caught:
        prepared(load_graph(build_graph_def(build)), limits=Limits(trusted=trusted))
    assert reason_name(caught.value.reason) == "UNSUPPORTED_OP"
