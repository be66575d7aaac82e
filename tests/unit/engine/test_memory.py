"""Tests the engine's memory limit, and the measured bytes of saved tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule.v1 import errors_pb2, program_pb2
from gradrule_server.engine import memory
from gradrule_server.engine.build import build
from gradrule_server.engine.kept_bytes import saved_bytes
from gradrule_server.engine.memory import memory_error
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


def _limited(build_nodes: Any, limit: int) -> None:
    request = prepared(build_graph(build_nodes)).request
    request.memory_limit = limit
    build(request)


def _constant_and_argument() -> None:
    x = tf.compat.v1.placeholder(tf.float32, [1 << 10, 64], name="x")
    tf.identity(tf.reduce_sum(x @ tf.constant(np.random.default_rng(0).random((64, 1 << 12), np.float32))), name="y")


def _result() -> None:
    x = tf.compat.v1.placeholder(tf.float32, [1 << 10, 1], name="x")
    tf.identity(x * tf.ones([1, 320]), name="y")


@pytest.mark.parametrize("graph", [_constant_and_argument, _result])
def test_programs_whose_arguments_constants_and_results_exceed_the_limit_are_refused(graph: Any) -> None:
    """Both take 1.25 MiB."""
    _limited(graph, 0)
    _limited(graph, 3 << 19)
    with pytest.raises(
        GradruleError, match=r"results take 1\.2\d MiB; an engine has 1 MiB .* The largest .*: 1"
    ) as caught:
        _limited(graph, 1 << 20)
    assert caught.value.reason == errors_pb2.ERROR_REASON_MEMORY_EXCEEDED


def _same_memory_thrice() -> None:
    x = tf.compat.v1.placeholder(tf.float32, [1 << 18], name="x")
    tf.reshape(tf.identity(x), [1 << 9, 1 << 9], name="y")


def _large_between() -> None:
    x = tf.compat.v1.placeholder(tf.float32, [1 << 10], name="x")
    tf.reduce_sum(x[:, tf.newaxis] * x, name="y")


@pytest.mark.parametrize("graph", [_same_memory_thrice, _large_between])
def test_views_and_what_exists_only_during_a_run_do_not_count(graph: Any) -> None:
    _limited(graph, 3 << 19)


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
