"""Whether calls of a program may run together: proved by the analysis, then tried."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from gradrule_server.engine.batching.analysis import Layout, Refusal, analyse
from gradrule_server.engine.batching.merging import Call, Results, allowed_size, run_together
from gradrule_server.engine.built import Built
from gradrule_server.errors import GradruleError

_log = logging.getLogger(__name__)

# Kernels for other sizes add in another order. In units of the last place of the tensor's largest element.
_MOST_UNITS = 1024
_MOST_DIFFERENCE = 0.1


@dataclass(slots=True)
class Proof:
    """What is known of a program. Thread-safe.

    layout: how its calls are put together; None: not analysed yet, or refused. refusal: why its calls never run
    together; empty: nothing is known against it. is_proven: they do.
    """

    layout: Layout | None = None
    refusal: str = ""
    is_proven: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def analyse(self, built: Built) -> Layout | None:
        """Returns how calls are put together, if they may be; analyses the program at the first call."""
        with self.lock:
            if self.layout is None and not self.refusal:
                try:
                    found = analyse(built)
                except Exception:
                    # A fault of the analysis must not cost a call its answer.
                    _log.exception("the analysis of a program failed; its calls do not run together")
                    found = Refusal("the analysis failed")
                if isinstance(found, Layout):
                    self.layout = found
                else:
                    self.refuse(found.reason)
            return self.layout

    def refuse(self, reason: str) -> None:
        """Calls do not run together any more."""
        self.layout, self.is_proven, self.refusal = None, False, reason

    def attempt(self, built: Built, layout: Layout, calls: Sequence[Call], alone: Sequence[Results]) -> None:
        """Runs calls together that have run alone: it is proven or refused then.

        Among them are rows of other values, so that a result in which rows meet is another, even if all calls are
        equal.
        """
        examples = sum(call.examples for call in calls)
        size = allowed_size(examples + 1, 2 * examples)
        try:
            try:
                together = run_together(built, layout, calls, size, strange_rows=True)
            except GradruleError:
                # The program may refuse values like those.
                together = run_together(built, layout, calls, size)
        except GradruleError as cause:
            self.refuse(f"calls that succeed alone fail together: {cause.message}")
            return
        for ours, theirs in zip(alone, together, strict=True):
            for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                if not is_close(one, other):
                    self.refuse(f"result {number} is another when calls run together")
                    return
        self.is_proven = True


def is_close(one: tf.Tensor, other: tf.Tensor) -> bool:
    """Returns whether two tensors are equal up to the rounding of sums in another order; integers exactly."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not (one.dtype.is_floating or one.dtype.is_complex):
        return bool(np.array_equal(one.numpy(), other.numpy()))
    wide = tf.complex128 if one.dtype.is_complex else tf.float64
    a, b = tf.cast(one, wide).numpy(), tf.cast(other, wide).numpy()
    finite = np.isfinite(a)
    if not (np.array_equal(finite, np.isfinite(b)) and np.array_equal(a[~finite], b[~finite], equal_nan=True)):
        return False
    most = np.max(np.abs(a[finite]), initial=0)
    tolerance = min(_MOST_UNITS * _epsilon(one.dtype), _MOST_DIFFERENCE)
    return bool(np.all(np.abs(a[finite] - b[finite]) <= tolerance * most))


def _epsilon(dtype: tf.DType) -> float:
    found: Any = ml_dtypes.finfo  # Has no types.
    return float(found(dtype.real_dtype.as_numpy_dtype).eps)
