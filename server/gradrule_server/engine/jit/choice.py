"""Chooses, for each set of shapes of a program that allows it, between TensorFlow's kernels and XLA.

1. Calls are counted. After `after_s` seconds of run time in total, XLA compiles the program in the background and runs
   it on copies of the arguments of two calls. If the results differ by more than rounding, XLA is not used.
2. The next calls alternate between TensorFlow and XLA, and are timed.
3. If XLA takes at most 0.8 of the time, it runs all further calls of these shapes.
"""

from __future__ import annotations

import enum
import logging
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from gradrule_server.engine.comparison import is_close, magnitude
from gradrule_server.engine.jit.compilation import compiled_call, refusal_reason
from gradrule_server.engine.program import Arrays, GraphCall

_log = logging.getLogger(__name__)

_MOST_SHAPES = 4
_SAMPLES = 2
_MOST_SAMPLE_BYTES = 64 * 1024 * 1024
_LEAST_RUN_NS = 100_000
_TIMED_RUNS = 9
_MOST_OF_TIME = 0.8
# Allowed difference in units of the last place of the tensor's largest element, which counts as at least this part of
# the call's largest number.
_MOST_UNITS = 64
_FLOOR = 0.01

Shapes = tuple[tuple[int, ...], ...]


class Phase(enum.Enum):
    """State of the calls of one set of shapes."""

    COUNTING = enum.auto()
    COMPILING = enum.auto()
    TIMING = enum.auto()
    CHOSEN = enum.auto()
    REFUSED = enum.auto()


class Background(Protocol):
    """Compiles in the background, and reports the outcome to the front end."""

    @property
    def after_s(self) -> float: ...
    def compile(self, choice: JitChoice, variant: ShapeVariant) -> None: ...
    def report_chosen(self, choice: JitChoice) -> None: ...
    def report_dropped(self, key: str) -> None: ...
    def report_refused(self, key: str, reason: str) -> None: ...


@dataclass(slots=True, eq=False)
class ShapeVariant:
    """State of a program for arguments of one set of shapes."""

    phase: Phase = Phase.COUNTING
    calls: int = 0
    run_ns: int = 0
    samples: list[tuple[Arrays, Arrays]] = field(default_factory=list)
    """Arguments and results of calls."""
    compiled: GraphCall | None = None
    times: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    """Nanoseconds of runs without XLA and with it."""

    def refuse(self) -> None:
        """Stops the use of XLA for these shapes, and frees its memory."""
        self.phase, self.compiled = Phase.REFUSED, None
        self.samples.clear()


class JitChoice:
    """Runs one program. Thread-safe.

    key: of the program. plain: runs it without XLA. function: what XLA compiles.
    """

    def __init__(self, key: str, function: Any, plain: GraphCall, background: Background) -> None:
        self.key = key
        self._function = function
        self._plain = plain
        self._background = background
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
                if not is_close(result, found, _MOST_UNITS, least):
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
            self._background.report_dropped(self.key)

    def _is_chosen(self) -> bool:
        return any(variant.phase is Phase.CHOSEN for variant in self._variants.values())

    def _variant(self, arguments: Arrays) -> ShapeVariant | None:
        shapes = tuple([argument.shape for argument in arguments])
        found = self._variants.get(shapes)
        if found is None:
            with self._lock:
                if len(self._variants) < _MOST_SHAPES:
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
            if variant.phase is not Phase.COUNTING or variant.run_ns < self._background.after_s * 1e9:
                return results
            if variant.run_ns < _LEAST_RUN_NS * variant.calls:
                # Most of so short a run is the cost of the call itself.
                variant.refuse()
                return results
            # Copied: the memory of arguments is reused after the answer.
            variant.samples.append(([np.array(argument) for argument in arguments], results))
            if len(variant.samples) < _SAMPLES and _bytes_of(variant.samples) < _MOST_SAMPLE_BYTES:
                return results
            variant.phase = Phase.COMPILING
        self._background.compile(self, variant)
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
                if with_xla <= _MOST_OF_TIME * without:
                    variant.phase = Phase.CHOSEN
                else:
                    variant.refuse()
                    refusal = f"XLA takes {with_xla / without:.2f} of the time, {_MOST_OF_TIME} is the most"
        if refusal:
            self._background.report_refused(self.key, refusal)
        elif variant.phase is Phase.CHOSEN:
            self._background.report_chosen(self)
        return results


def _bytes_of(samples: Sequence[tuple[Arrays, Arrays]]) -> int:
    return sum(array.nbytes for sample in samples for part in sample for array in part)
