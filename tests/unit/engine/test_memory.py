"""Tests the engine's memory limit, and the measured bytes of saved tensors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule.v1 import errors_pb2, program_pb2
from gradrule_server.engine import memory
from gradrule_server.engine.build import build
from gradrule_server.engine.memory import MemoryCheck, memory_error
from gradrule_server.engine.memory_estimate import saved_bytes
from gradrule_server.engine.tf_errors import out_of_memory
from gradrule_server.errors import GradruleError
from tests.service.derivative_cases import CASES, W, graph_for_function
from tests.service.graph_defs import build_graph
from tests.unit.engine.building import arguments, prepared, run_forward, split

_OOM = "OOM when allocating tensor with shape[10000000000] and type float on /device:CPU:0 by allocator cpu"


@pytest.mark.parametrize(
    ("cause", "is_so"),
    [
        (tf.errors.ResourceExhaustedError(None, None, _OOM), True),
        (tf.errors.ResourceExhaustedError(None, None, "the table is full"), False),
        (tf.errors.InvalidArgumentError(None, None, "cannot allocate"), False),
        (tf.errors.UnknownError(None, None, "Out of memory"), False),
    ],
)
def test_errors_that_report_missing_memory_are_recognised(cause: tf.errors.OpError, is_so: bool) -> None:
    assert out_of_memory(cause) is is_so


@pytest.mark.parametrize(("limit", "words"), [(2**31, "of 2 GiB (--memory-limit)"), (0, "the machine's memory")])
def test_memory_error_names_the_limit(monkeypatch: pytest.MonkeyPatch, limit: int, words: str) -> None:
    monkeypatch.setattr(memory._ProcessLimit, "bytes", limit)
    found = memory_error("40 GB of zeros")
    assert found.reason == errors_pb2.ERROR_REASON_MEMORY_EXCEEDED
    assert words in found.message
    assert "40 GB of zeros" in found.message


def _outer_product() -> None:
    rows = tf.reshape(tf.compat.v1.placeholder(tf.float32, [None, 1000], name="x"), [-1])
    tf.reduce_sum(rows[:, tf.newaxis] * rows, name="y")


def _tokens() -> None:
    tokens = tf.reshape(tf.compat.v1.placeholder(tf.float32, [None, 100, 8], name="x"), [-1, 8])
    for _ in range(20):
        tokens = tf.tanh(tokens)
    tf.reshape(tokens, [-1, 100, 8], name="y")


@pytest.mark.parametrize(
    ("graph", "fits", "limit"), [(_outer_product, (1, 1000), 1 << 26), (_tokens, (1000, 100, 8), 1 << 28)]
)
def test_calls_whose_known_sizes_a_reshape_folds_are_refused(graph: Any, fits: Any, limit: int) -> None:
    """Tensors between two Reshapes have a hundred times the size of the argument, or more."""
    built = build(prepared(build_graph(graph), vjp=program_pb2.Vjp(ys=["y"], xs=["x"])).request)
    found = MemoryCheck(built.graph, limit)
    found.check([np.ones(fits, np.float32)])
    with pytest.raises(GradruleError, match="running this would take about"):
        found.check([np.ones((10 * fits[0], *fits[1:]), np.float32)])


@pytest.mark.parametrize(("times", "is_refused"), [(3, True), (200, False)])
def test_sizes_that_are_folded_again_and_again(times: int, is_refused: bool) -> None:
    """Beyond 64 bits TensorFlow knows no sizes; running such a call fails."""

    def chain() -> None:
        value = tf.compat.v1.placeholder(tf.float32, [None, 1000], name="x")
        for _ in range(times):
            value = tf.tile(tf.reshape(value, [-1, 1]), [1, 1000])
        tf.identity(value, name="y")

    found = MemoryCheck(build(prepared(build_graph(chain)).request).graph, 1 << 30)
    with pytest.raises(GradruleError, match="running this would take about") if is_refused else nullcontext():
        found.check([np.ones((1, 1000), np.float32)])


def test_sizes_that_are_split_again_do_not_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that clearly fits needs no import of the graph."""
    built = build(prepared(build_graph(_tokens), vjp=program_pb2.Vjp(ys=["y"], xs=["x"])).request)
    found = MemoryCheck(built.graph, 1 << 28)
    monkeypatch.setattr(MemoryCheck, "_need", lambda *arguments: pytest.fail("the graph was imported"))
    found.check([np.ones((1000, 100, 8), np.float32)])


def bytes_for(name: str, rows: int) -> int:
    """Returns the bytes that are saved for `rows` rows of x."""
    program = prepared(graph_for_function(CASES[name]), vjp=program_pb2.Vjp(ys=["y"], xs=["x"]))
    built = split(program)
    assert built.two_parts is not None
    _, saved = run_forward(built, arguments(program, built, {"x": np.full((rows, 3), 0.1, np.float32), "w": W}))
    return saved_bytes(saved)


@pytest.mark.parametrize("name", ["loop", "nested_loops", "branch", "branch_in_loop", "scan", "mapped"])
def test_saved_bytes_of_loops_and_branches_grow_with_inputs(name: str) -> None:
    small, large = bytes_for(name, 100), bytes_for(name, 1100)
    # At least one float for each element of x.
    assert large - small >= 4 * 3 * 1000
    assert large < 200 * small


def test_lists_and_optionals_count_by_their_content() -> None:
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
