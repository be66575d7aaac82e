"""The bytes that a forward part keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule.v1 import program_pb2
from gradrule_server.engine.memory import saved_bytes
from tests.service.derivative_cases import CASES, W, graph_of
from tests.unit.engine.building import arguments, prepared, split


def held(name: str, rows: int) -> int:
    """Bytes saved for so many rows of x."""
    program = prepared(graph_of(CASES[name]), vjp=program_pb2.Vjp(ys=["y"], xs=["x"]))
    built = split(program)
    assert built.two_parts is not None
    _, saved = built.two_parts.forward(arguments(program, built, {"x": np.full((rows, 3), 0.1, np.float32), "w": W}))
    return saved_bytes(saved)


@pytest.mark.parametrize("name", ["loop", "nested_loops", "branch", "branch_in_loop", "scan", "mapped"])
def test_what_loops_and_branches_keep_grows_with_what_goes_in(name: str) -> None:
    small, large = held(name, 100), held(name, 1100)
    # At least one float for each element of x.
    assert large - small >= 4 * 3 * 1000
    assert large < 200 * small


def test_lists_and_optionals_are_counted_by_what_they_hold() -> None:
    def list_of(value: Any, count: int) -> tf.Tensor:
        handle = tf.raw_ops.TensorListReserve(element_shape=-1, num_elements=count, element_dtype=value.dtype)
        for index in range(count):
            handle = tf.raw_ops.TensorListSetItem(input_handle=handle, index=index, item=value)
        return handle

    inner = list_of(tf.zeros([5], tf.float64), 3)
    assert saved_bytes([inner]) == 3 * 5 * 8
    assert saved_bytes([list_of(inner, 2), tf.zeros([2, 2])]) == 2 * 3 * 5 * 8 + 16
    assert saved_bytes([list_of(tf.zeros([1]), 0)]) == 0
    optional = tf.raw_ops.OptionalFromValue(components=[tf.zeros([7], tf.int32)])
    assert saved_bytes([optional, tf.raw_ops.OptionalNone()]) == 28
    assert saved_bytes([tf.stack([inner, inner])]) == 2 * 3 * 5 * 8
    assert saved_bytes([tf.constant([b"abc", b""])]) == 2 * 24 + 3
