"""Tests which programs XLA compiles, and what a call gets if XLA fails."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule.v1 import errors_pb2
from gradrule_server.engine import jit
from gradrule_server.engine.build import build
from gradrule_server.engine.jit import XlaCall, check_xla
from gradrule_server.errors import GradruleError
from gradrule_server.link.fork_server import engine_environment
from tests.unit.engine.building import prepared

# Prints the names of functions whose results differ with XLA.
_MAXIMA = """
import numpy as np
import tensorflow as tf
x = np.array([[np.nan, 1, 2], [3, np.nan, -1], [5, 6, np.nan]], np.float32)
y = np.zeros_like(x)
for name, run in {
    "reduce_max": lambda x, y: [tf.reduce_max(x), tf.reduce_max(x, 0), tf.reduce_max(x, 1)],
    "reduce_min": lambda x, y: [tf.reduce_min(x), tf.reduce_min(x, 0), tf.reduce_min(x, 1)],
    "maximum": lambda x, y: [tf.maximum(x, y), tf.maximum(y, x)],
    "minimum": lambda x, y: [tf.minimum(x, y), tf.minimum(y, x)],
}.items():
    pairs = zip(tf.function(run)(x, y), tf.function(run, jit_compile=True)(x, y), strict=True)
    if not all(np.array_equal(one, other, equal_nan=True) for one, other in pairs):
        print(name)
"""


def doubled() -> gr.Graph:
    g = gr.Graph()
    g.op_output("Identity", g.placeholder("x", "float32", [None]) * 2.0, name="y")
    return g


def built(*, is_on: bool, device: str = "CPU:0") -> Any:
    request = prepared(doubled()).request
    request.jit = is_on
    return build(request, device=device)


def test_calls_of_a_program_that_asks_for_it_run_with_xla() -> None:
    found = built(is_on=True)
    assert isinstance(found.call, XlaCall)
    assert found.jit
    x = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(found.call([x])[0], 2 * x)
    np.testing.assert_array_equal(found.call.on_device([tf.constant(x)])[0], 2 * x)


@pytest.mark.parametrize(("is_on", "device"), [(False, "CPU:0"), (True, "GPU:0")])
def test_other_programs_and_gpus_do_not_use_xla(is_on: bool, device: str) -> None:
    found = built(is_on=is_on, device=device)
    assert not found.jit and not isinstance(found.call, XlaCall)


def test_each_set_of_shapes_is_compiled_once_and_only_the_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    make = jit._compiled_call

    def counted(function: Any, shapes: Any) -> Any:
        compiled.append(shapes[0][0])
        return make(function, shapes)

    monkeypatch.setattr(jit, "_compiled_call", counted)
    monkeypatch.setattr(jit, "_MAX_SHAPES", 2)
    call = built(is_on=True).call
    for size in (1, 2, 1, 3, 1, 2):
        np.testing.assert_array_equal(call([np.ones(size, np.float32)])[0], np.full(size, 2, np.float32))
    assert compiled == [1, 2, 3, 2]


@pytest.mark.parametrize(
    ("run", "dtype", "reason"),
    [
        (lambda x: tf.exp(x) @ x, tf.float32, ""),
        (lambda x: tf.gather(x, 0), tf.float32, "GatherV2"),
        (lambda x: tf.random.normal([2]) + x, tf.float32, "RandomStandardNormal"),
        (lambda x: tf.cast(x, tf.int32), tf.float32, "casts floats to integers"),
        (lambda x: x // 2, tf.int32, "FloorDiv"),
        (lambda x: tf.pow(x, 2), tf.int32, "computes with integers"),
        (lambda x: x + 1, tf.bfloat16, "computes with bfloat16"),
        (lambda x: tf.while_loop(lambda v: v[0, 0] < 1, lambda v: (v + 1,), (x,)), tf.float32, "While"),
        (lambda x: tf.debugging.check_numerics(x, "no"), tf.float32, "CheckNumerics"),
        (lambda x: tf.raw_ops.ClipByValue(t=x, clip_value_min=1.0, clip_value_max=0.0), tf.float32, "ClipByValue"),
        (lambda x: tf.raw_ops.InvertPermutation(x=x[0]), tf.int32, "InvertPermutation"),
        (lambda x: tf.gradients(tf.sqrt(x), x), tf.float32, "SqrtGrad"),
        (lambda x: tf.gradients(tf.math.rsqrt(x), x), tf.float32, "RsqrtGrad"),
        (lambda x: tf.gradients(tf.math.reciprocal(x), x), tf.float32, "ReciprocalGrad"),
    ],
)
def test_only_programs_of_known_ops_are_compiled(run: Any, dtype: tf.DType, reason: str) -> None:
    function = tf.function(run, input_signature=[tf.TensorSpec([2, 2], dtype)], autograph=False)
    graph = function.get_concrete_function().graph
    with pytest.raises(GradruleError, match=reason) if reason else nullcontext() as caught:
        check_xla(graph)
    if caught is not None:
        assert {finding.reason for finding in caught.value.findings} == {errors_pb2.ERROR_REASON_UNSUPPORTED_OP}
        assert "jit=off" in str(caught.value)


def test_programs_with_very_many_ops_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_MAX_OPS", 2)
    with pytest.raises(GradruleError, match="XLA compiles at most 2") as caught:
        built(is_on=True)
    assert caught.value.reason == errors_pb2.ERROR_REASON_LIMIT_EXCEEDED


def failing_call(plain: Any, message: str = "out of registers") -> Any:
    def fail(arrays: Any) -> Any:
        kind = tf.errors.ResourceExhaustedError if "memory" in message else tf.errors.InternalError
        raise kind(None, None, message)

    call: Any = XlaCall(None, plain)
    call._call_for = lambda arrays: fail
    return call


def test_a_failure_of_xla_is_told_as_such_if_the_kernels_succeed() -> None:
    with pytest.raises(GradruleError, match=r"XLA cannot run the program: out of registers; .* jit=off") as caught:
        failing_call(lambda arrays: arrays)([np.zeros(2)])
    assert caught.value.reason == errors_pb2.ERROR_REASON_EXECUTION_FAILED


def test_a_failure_of_the_program_itself_is_that_of_the_kernels() -> None:
    def fail(arrays: Any) -> Any:
        raise tf.errors.InvalidArgumentError(None, None, "Incompatible shapes")

    with pytest.raises(tf.errors.InvalidArgumentError, match="Incompatible shapes"):
        failing_call(fail)([np.zeros(2)])


def test_a_call_without_memory_does_not_run_again() -> None:
    with pytest.raises(tf.errors.ResourceExhaustedError):
        failing_call(lambda arrays: pytest.fail("it ran again"), "out of memory")([np.zeros(2)])


def test_maxima_and_minima_of_nan_are_nan_with_xla() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MAXIMA], env=engine_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
