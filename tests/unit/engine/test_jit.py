"""Tests the choice between TensorFlow's kernels and XLA. The tests set results and times of the runs."""

from __future__ import annotations

import queue
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule_server.engine import jit
from gradrule_server.engine.jit import JitChoice, JitCompiler, ShapeVariant, refusal_reason
from gradrule_server.link.fork_server import engine_environment
from gradrule_server.link.v1 import link_pb2

_SLOW_S, _FAST_S = 0.01, 0.0

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


class Compiler:
    """Compiles at once, on the thread of the call."""

    after_s = 0.02

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.chosen = 0

    def compile(self, choice: JitChoice, variant: ShapeVariant) -> None:
        self.reasons.append(reason := choice.prepare(variant))
        if reason:
            choice.refuse(reason)

    def report_chosen(self, choice: JitChoice) -> None:
        self.chosen += 1

    def report_dropped(self, key: str) -> None:
        self.chosen -= 1

    def report_refused(self, key: str, reason: str) -> None:
        self.reasons.append(reason)


def taking(seconds: float, offset: float = 0.0) -> Callable[[Any], Any]:
    def call(arguments: Any) -> Any:
        time.sleep(seconds)
        return [arguments[0] * np.float32(2) + np.float32(offset)]

    return call


def doubled() -> Any:
    return tf.function(lambda x: [x * 2], input_signature=[tf.TensorSpec([None])]).get_concrete_function()


def answers(choice: JitChoice, count: int, size: int = 8) -> list[bool]:
    """Runs `count` calls; returns for each whether it ran with XLA."""
    found = []
    for number in range(count):
        x = np.full(size, number, np.float32)
        (result,), is_compiled = choice.run([x])
        np.testing.assert_allclose(result, 2 * x, rtol=1e-5)
        found.append(is_compiled)
    return found


def made(monkeypatch: pytest.MonkeyPatch, compiled: Callable[[Any], Any]) -> tuple[JitChoice, Compiler]:
    monkeypatch.setattr(jit, "compiled_call", lambda function, arrays: compiled)
    compiler = Compiler()
    return JitChoice("digest/1", doubled(), taking(_SLOW_S), compiler, lambda position, argument: False), compiler


def test_xla_is_chosen_for_shapes_where_it_is_faster_and_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, compiler = made(monkeypatch, taking(_FAST_S))
    found = answers(choice, 40)
    assert not any(found[:4]) and all(found[-10:])
    assert compiler.reasons == [""] and compiler.chosen == 1
    assert not choice.run([np.zeros(3, np.float32)])[1]


def test_samples_do_not_copy_the_values_that_the_program_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.full(1000, 2, np.float32)
    # The bytes of the weights do not reduce the number of samples.
    monkeypatch.setattr(jit, "_MAX_SAMPLE_BYTES", weights.nbytes)
    compared: list[list[np.ndarray]] = []

    def compiled(arguments: Any) -> Any:
        compared.append(arguments)
        return taking(_FAST_S)(arguments)

    monkeypatch.setattr(jit, "compiled_call", lambda function, arrays: compiled)
    compiler = Compiler()
    choice = JitChoice("digest/1", doubled(), taking(_SLOW_S), compiler, lambda position, argument: argument is weights)
    given = np.ones(8, np.float32)
    while not compiler.reasons:
        assert not choice.run([given, weights])[1]
    assert len(compared) == 2
    for x, w in compared:
        assert w is weights
        assert not np.shares_memory(x, given)


def test_xla_is_not_chosen_where_it_is_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, compiler = made(monkeypatch, taking(2 * _SLOW_S))
    assert not any(answers(choice, 40)[-10:])
    # The reason is reported to the front end.
    assert compiler.reasons[0] == "" and "of the time" in compiler.reasons[1]
    assert not compiler.chosen


def test_xla_is_not_used_if_results_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, compiler = made(monkeypatch, taking(_FAST_S, offset=0.01))
    assert not any(answers(choice, 30))
    assert compiler.reasons == ["result 0 is another with XLA"]


def test_a_call_that_fails_with_xla_runs_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def failing(arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise tf.errors.InternalError(None, None, "out of registers")
        return taking(_FAST_S)(arguments)

    choice, compiler = made(monkeypatch, failing)
    assert not any(answers(choice, 60)[-10:])
    assert not compiler.chosen


def test_programs_whose_runs_are_short_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, compiler = made(monkeypatch, taking(_FAST_S))
    monkeypatch.setattr(jit, "_LEAST_RUN_NS", 10**9)
    assert not any(answers(choice, 30))
    assert not compiler.reasons


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
    found = refusal_reason(function.get_concrete_function())
    assert reason in found and bool(found) is bool(reason)


def test_maxima_and_minima_of_nan_are_nan_with_xla() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MAXIMA], env=engine_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


class Frames:
    """Records the notices that are sent; fails for the notices of some programs."""

    def __init__(self, *failing: str) -> None:
        self.notices: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._failing = failing

    def send(self, kind: Any, number: int, payload: bytes) -> None:
        notice = link_pb2.JitNotice.FromString(payload)
        if notice.key in self._failing:
            raise OSError("no room")
        self.notices.put((notice.key, notice.outcome))


class Prepared:
    """Replaces a `JitChoice`; the test sets what `prepare` does."""

    reason = ""

    def __init__(self, key: str, prepare: Callable[[ShapeVariant], str]) -> None:
        self.key = key
        self.prepare = prepare
        self.refused: list[str] = []

    def refuse(self, reason: str) -> None:
        self.refused.append(reason)


def test_a_program_that_fails_does_not_keep_others_from_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_priority(nice: int) -> None:
        raise PermissionError("no")

    def compiled(variant: ShapeVariant) -> str:
        variant.compiled = taking(_FAST_S)
        return ""

    def failing(variant: ShapeVariant) -> str:
        raise RuntimeError("no thread is left")

    monkeypatch.setattr(jit, "lower_priority", no_priority)
    frames: Any = Frames("unreported")
    compiler = JitCompiler(frames, 1.0)
    # A call that fails with XLA as soon as it is compiled leaves nothing compiled.
    choices: list[Any] = [
        Prepared("unreported", compiled),
        Prepared("failing", failing),
        Prepared("dropped", lambda _: ""),
        Prepared("good", compiled),
    ]
    for choice in choices:
        compiler.compile(choice, ShapeVariant())
    outcomes = [frames.notices.get(timeout=60) for _ in range(6)]
    done, wrong = link_pb2.JitNotice.OUTCOME_COMPILED, link_pb2.JitNotice.OUTCOME_REFUSED
    assert outcomes[1::2] == [("failing", wrong), ("dropped", done), ("good", done)]
    assert [choice.refused for choice in choices] == [["OSError"], ["RuntimeError"], [], []]
