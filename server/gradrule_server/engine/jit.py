"""Runs programs that allow it with XLA, for each set of shapes for which XLA is faster than TensorFlow's kernels.

1. Calls are counted. After `after_s` seconds of run time in total, XLA compiles the program in the background and runs
   it on copies of the arguments of two calls. If the results differ by more than rounding, XLA is not used.
2. The next calls alternate between TensorFlow and XLA, and are timed.
3. If XLA takes at most 0.8 of the time, it runs all further calls of these shapes.

Programs are compiled one at a time. The front end must know what is being compiled: if that ends the engine, its next
process does not try it again.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import queue
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from gradrule_server.engine.comparison import is_close, magnitude
from gradrule_server.engine.program import Arrays, BuiltProgram, GraphCall, SessionCall
from gradrule_server.link.framing import FrameSocket, Kind
from gradrule_server.link.operating_system import lower_priority
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy.op_tables import trait_values

_log = logging.getLogger(__name__)

# Limits on what is compiled.
_MAX_OPS = 1000
_MAX_COMPILED = 32
_MAX_REFUSED = 1024
# Priority of the threads that compile, as for `nice`.
_NICE = 10

_MAX_SHAPES = 4
_SAMPLES = 2
_MAX_SAMPLE_BYTES = 64 * 1024 * 1024
_LEAST_RUN_NS = 100_000
_TIMED_RUNS = 9
_MAX_TIME_RATIO = 0.8
# Allowed difference in units of the last place of the tensor's largest element, which counts as at least this part of
# the call's largest number.
_MAX_UNITS = 64
_FLOOR = 0.01

_XLA = trait_values("xla")
# Half precision is left out: XLA keeps intermediate results in float32.
_DTYPES = frozenset({tf.bool, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.float32, tf.float64})

_Outcome = link_pb2.JitNotice
Shapes = tuple[tuple[int, ...], ...]


class Phase(enum.Enum):
    """State of the calls of one set of shapes."""

    COUNTING = enum.auto()
    COMPILING = enum.auto()
    TIMING = enum.auto()
    CHOSEN = enum.auto()
    REFUSED = enum.auto()


@dataclass(slots=True, eq=False)
class ShapeVariant:
    """State of a program for arguments of one set of shapes."""

    phase: Phase = Phase.COUNTING
    calls: int = 0
    run_ns: int = 0
    samples: list[tuple[Arrays, Arrays]] = field(default_factory=list)
    """Arguments and results of calls."""
    sample_bytes: int = 0
    """Bytes of the samples without the values that the program holds."""
    compiled: GraphCall | None = None
    times: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    """Nanoseconds of runs without XLA and with it."""

    def refuse(self) -> None:
        """Stops the use of XLA for these shapes, and frees its memory."""
        self.phase, self.compiled = Phase.REFUSED, None
        self.samples.clear()


class JitChoice:
    """Runs one program. Thread-safe.

    key: of the program. plain: runs it without XLA. function: what XLA compiles. is_default: returns, for an argument's
    position and value, whether the program holds that value.
    """

    def __init__(
        self,
        key: str,
        function: Any,
        plain: GraphCall,
        compiler: JitCompiler,
        is_default: Callable[[int, Any], bool],
    ) -> None:
        self.key = key
        self._function = function
        self._plain = plain
        self._compiler = compiler
        self._is_default = is_default
        self._variants: dict[Shapes, ShapeVariant] = {}
        self._lock = threading.Lock()
        self.reason = refusal_reason(function)
        """Reason why XLA is not used for any shapes; empty if there is none."""

    def run(self, arguments: Arrays) -> tuple[Arrays, bool]:
        """Returns the results, and whether XLA computed them."""
        variant = None if self.reason else self._variant(arguments)
        if variant is None:
            return self._plain(arguments), False
        compiled = variant.compiled
        if compiled is not None and (variant.phase is Phase.CHOSEN or self._is_turn_of_xla(variant)):
            try:
                return self._timed(variant, compiled, arguments, variant.times[1]), True
            except tf.errors.OpError as cause:
                # The call runs again without XLA and gets its answer or its own error.
                _log.warning("a program fails with XLA and runs without it from now on: %s", cause)
                self._refuse(variant)
        if variant.phase is Phase.TIMING:
            return self._timed(variant, self._plain, arguments, variant.times[0]), False
        if variant.phase is Phase.COUNTING:
            return self._counted(variant, arguments), False
        return self._plain(arguments), False

    def prepare(self, variant: ShapeVariant) -> str:
        """Compiles for the shapes of a variant and compares results; returns why XLA is not used, or an empty string.

        Takes seconds.
        """
        samples = variant.samples
        compiled = compiled_call(self._function, samples[0][0])
        for arguments, wanted in samples:
            least = _FLOOR * max(map(magnitude, (*arguments, *wanted)), default=0.0)
            for number, (found, result) in enumerate(zip(compiled(arguments), wanted, strict=True)):
                if not is_close(result, found, _MAX_UNITS, least):
                    return f"result {number} is another with XLA"
        with self._lock:
            variant.compiled, variant.phase, variant.samples = compiled, Phase.TIMING, []
        return ""

    def refuse(self, reason: str) -> None:
        """Stops the use of XLA for this program."""
        with self._lock:
            self.reason = reason
            variants = list(self._variants.values())
        self._refuse(*variants)

    def _refuse(self, *variants: ShapeVariant) -> None:
        with self._lock:
            was_chosen = self._is_chosen()
            for variant in variants:
                variant.refuse()
            is_dropped = was_chosen and not self._is_chosen()
        if is_dropped:
            self._compiler.report_dropped(self.key)

    def _is_chosen(self) -> bool:
        return any(variant.phase is Phase.CHOSEN for variant in self._variants.values())

    def _variant(self, arguments: Arrays) -> ShapeVariant | None:
        shapes = tuple([argument.shape for argument in arguments])
        found = self._variants.get(shapes)
        if found is None:
            with self._lock:
                if len(self._variants) < _MAX_SHAPES:
                    found = self._variants.setdefault(shapes, ShapeVariant())
        return found

    def _counted(self, variant: ShapeVariant, arguments: Arrays) -> Arrays:
        started = time.perf_counter_ns()
        results = self._plain(arguments)
        taken = time.perf_counter_ns() - started
        with self._lock:
            variant.calls += 1
            # The first run optimizes the graph.
            variant.run_ns += taken if variant.calls > 1 else 0
            if variant.phase is not Phase.COUNTING or variant.run_ns < self._compiler.after_s * 1e9:
                return results
            if variant.run_ns < _LEAST_RUN_NS * variant.calls:
                # Most of so short a run is the cost of the call itself.
                variant.refuse()
                return results
            # The memory of other arguments is reused after the answer.
            sample = [
                argument if self._is_default(position, argument) else np.array(argument)
                for position, argument in enumerate(arguments)
            ]
            variant.samples.append((sample, results))
            new = [copy for copy, argument in zip(sample, arguments, strict=True) if copy is not argument]
            variant.sample_bytes += sum(array.nbytes for array in (*new, *results))
            if len(variant.samples) < _SAMPLES and variant.sample_bytes < _MAX_SAMPLE_BYTES:
                return results
            variant.phase = Phase.COMPILING
        self._compiler.compile(self, variant)
        return results

    def _is_turn_of_xla(self, variant: ShapeVariant) -> bool:
        return variant.phase is Phase.TIMING and len(variant.times[1]) < len(variant.times[0])

    def _timed(self, variant: ShapeVariant, call: GraphCall, arguments: Arrays, times: list[int]) -> Arrays:
        if variant.phase is not Phase.TIMING:
            return call(arguments)
        started = time.perf_counter_ns()
        results = call(arguments)
        times.append(time.perf_counter_ns() - started)
        refusal = ""
        with self._lock:
            if variant.phase is Phase.TIMING and min(map(len, variant.times)) >= _TIMED_RUNS:
                without, with_xla = (statistics.median(times) for times in variant.times)
                if with_xla <= _MAX_TIME_RATIO * without:
                    variant.phase = Phase.CHOSEN
                else:
                    variant.refuse()
                    refusal = f"XLA takes {with_xla / without:.2f} of the time, {_MAX_TIME_RATIO} is the most"
        if refusal:
            self._compiler.report_refused(self.key, refusal)
        elif variant.phase is Phase.CHOSEN:
            self._compiler.report_chosen(self)
        return results


class JitCompiler:
    """Compiles on a thread of its own. Thread-safe.

    after_s: how long calls of a program with the same shapes run before it is compiled; 0: none is.
    """

    def __init__(self, frames: FrameSocket, after_s: float) -> None:
        self._frames = frames
        self.after_s = after_s
        self._work: queue.SimpleQueue[tuple[weakref.ref[JitChoice], ShapeVariant]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._compiled: weakref.WeakSet[object] = weakref.WeakSet()
        self._refused: set[str] = set()

    def allow(self, key: str, built: BuiltProgram) -> None:
        """Allows XLA to compile a program, if it runs in a session: on a CPU and in one part."""
        call = None if built.two_parts is not None else built.call
        if self.after_s and isinstance(call, SessionCall):
            built.jit = JitChoice(key, built.function, call, self, built.feed_plan.is_default)

    def refuse(self, digest: str) -> None:
        """Forbids XLA to compile programs whose keys start with `digest`."""
        with self._lock:
            if len(self._refused) < _MAX_REFUSED:
                self._refused.add(digest)

    def compile(self, choice: JitChoice, variant: ShapeVariant) -> None:
        """Queues the compilation for the shapes of a variant."""
        self._work.put((weakref.ref(choice), variant))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="jit", daemon=True)
                self._thread.start()

    def report_chosen(self, choice: JitChoice) -> None:
        """Tells the front end that calls of the program run with XLA."""
        self._report(choice.key, _Outcome.OUTCOME_CHOSEN)

    def report_dropped(self, key: str) -> None:
        """Tells the front end that no call of a program runs with XLA any more."""
        self._report(key, _Outcome.OUTCOME_UNSPECIFIED)

    def report_refused(self, key: str, reason: str) -> None:
        """Tells the front end why calls of a program do not run with XLA."""
        self._report(key, _Outcome.OUTCOME_REFUSED, reason)

    def _run(self) -> None:
        while True:
            found, variant = self._work.get()
            choice = found()
            if choice is not None:
                try:
                    self._compile(choice, variant)
                except Exception as cause:
                    # The thread must go on: other programs are queued.
                    _log.exception("compiling a program with XLA failed; it runs without")
                    # The front end may have closed the socket.
                    with contextlib.suppress(OSError):
                        choice.refuse(type(cause).__name__)
            del choice, variant

    def _compile(self, choice: JitChoice, variant: ShapeVariant) -> None:
        reason = self._refusal(choice)
        if not reason:
            self._report(choice.key, _Outcome.OUTCOME_COMPILING)
            reason = _prepare_in_background(choice, variant)
            self._report(choice.key, _Outcome.OUTCOME_REFUSED if reason else _Outcome.OUTCOME_COMPILED, reason)
        if reason:
            choice.refuse(reason)
        elif (compiled := variant.compiled) is not None:
            # `compiled` is None if a call has failed with XLA in the meantime.
            self._compiled.add(compiled)

    def _refusal(self, choice: JitChoice) -> str:
        if choice.key.partition("/")[0] in self._refused:
            return "an engine ended while it was compiled"
        if len(self._compiled) >= _MAX_COMPILED:
            return f"the engine holds {_MAX_COMPILED} compiled programs"
        return choice.reason

    def _report(self, key: str, outcome: link_pb2.JitNotice.Outcome.ValueType, reason: str = "") -> None:
        notice = link_pb2.JitNotice(key=key, outcome=outcome, reason=reason)
        self._frames.send(Kind.JIT_NOTICE, 0, notice.SerializeToString())


def _prepare_in_background(choice: JitChoice, variant: ShapeVariant) -> str:
    try:
        return _in_background(lambda: choice.prepare(variant))
    except tf.errors.OpError as cause:
        return f"XLA refuses it: {cause.message.splitlines()[0]}"
    except Exception as cause:
        # The program runs without XLA; no call waits for this thread.
        _log.exception("compiling a program with XLA failed; it runs without")
        return type(cause).__name__


def _in_background(work: Callable[[], str]) -> str:
    """Runs a function on a thread of lower priority; returns its result.

    XLA's own threads have the priority of the one that starts them. A thread cannot take its priority back, so it ends.
    """
    found: Future[str] = Future()

    def run() -> None:
        with contextlib.suppress(OSError):
            lower_priority(_NICE)
        try:
            found.set_result(work())
        except Exception as cause:
            found.set_exception(cause)

    thread = threading.Thread(target=run, name="jit-compile", daemon=True)
    thread.start()
    thread.join()
    return found.result()


def refusal_reason(function: Any) -> str:
    """Returns why XLA may not compile a function; empty if it may."""
    ops = function.graph.get_operations()
    if len(ops) > _MAX_OPS:
        return f"it has {len(ops)} ops; at most {_MAX_OPS} are compiled"
    for op in ops:
        if op.type not in _XLA:
            return f"its op {op.name!r} ({op.type}) is none of those that are compiled"
        dtype = next((tensor.dtype for tensor in (*op.inputs, *op.outputs) if tensor.dtype not in _DTYPES), None)
        if dtype is not None:
            return f"its op {op.name!r} ({op.type}) computes with {dtype.name}"
        # Kernels and XLA differ for floats outside the integer type's range.
        if op.type == "Cast" and op.inputs[0].dtype.is_floating and op.outputs[0].dtype.is_integer:
            return f"its op {op.name!r} casts floats to integers"
        if _XLA[op.type] == "floats" and not op.outputs[0].dtype.is_floating:
            return f"its op {op.name!r} ({op.type}) computes with integers"
    return ""


def compiled_call(function: Any, arrays: Sequence[np.ndarray]) -> SessionCall:
    """Returns a call of a function that XLA compiles at its first run, for arguments of these shapes.

    It runs in a session of its own: what XLA compiled is freed with the session.
    """
    specs = [tf.TensorSpec(array.shape, tensor.dtype) for array, tensor in zip(arrays, function.inputs, strict=True)]

    def run(*arguments: tf.Tensor) -> Any:
        return function(*arguments)

    compiled = tf.function(run, input_signature=specs, jit_compile=True, autograph=False).get_concrete_function()
    with tf.Graph().as_default() as graph:
        inputs = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]
        outputs = list(compiled(*inputs))
    return SessionCall(graph, inputs, outputs, single_threaded=True)
