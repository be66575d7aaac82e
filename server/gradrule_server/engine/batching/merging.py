"""Merges calls of one program into one run: concatenates arguments along axis 0, and splits the results.

Calls are merged only if the analysis proves that this changes no result, and a trial run confirms it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from gradrule.common.tensor_packing import Packing
from gradrule_server.engine.batching.analysis import Layout, Refusal, analyse
from gradrule_server.engine.comparison import is_close, is_inexact, magnitude
from gradrule_server.engine.large_tensors import AnswerArea
from gradrule_server.engine.program import Arrays, BuiltProgram
from gradrule_server.engine.tf_errors import TENSORFLOW_ERRORS, translate_error
from gradrule_server.errors import GradruleError

_log = logging.getLogger(__name__)

# Kernels for other sizes add in another order. Allowed difference, in units of the last place of the tensor's largest
# element.
_MOST_UNITS = 1024
_MOST_UNITS_AMONG_OTHERS = 16
# The largest element counts as at least this part of the call's largest number: small differences of large numbers have
# the rounding errors of these.
_FLOOR = 0.01


@dataclass(frozen=True, slots=True)
class BatchedCall:
    """The arguments of one request.

    examples: number of rows on axis 0; 0: it cannot run with others. group_key: calls with equal keys can run together.
    packing: how its answer is packed. answer_area: shared memory for large results.
    """

    request_id: int
    received_ns: int
    started_ns: int
    arguments: Arrays
    examples: int = 0
    group_key: Hashable = None
    packing: Packing | None = None
    answer_area: AnswerArea | None = None


def count_examples(built: BuiltProgram, layout: Layout, arguments: Arrays) -> int:
    """Returns the number of examples of a call; 0 if its arguments disagree, or if a param is not a scalar."""
    if any(np.ndim(argument) for argument in arguments[len(arguments) - len(built.params) :]):
        return 0
    sizes = {int(arguments[index].shape[0]) for index in _merged_arguments(built, layout)}
    return sizes.pop() if len(sizes) == 1 else 0


def group_key_for(built: BuiltProgram, layout: Layout, arguments: Arrays) -> Hashable:
    """Returns a key that is equal for calls whose shared arguments have the same bits and whose rows have one shape."""
    batched = set(_merged_arguments(built, layout))
    key: list[Hashable] = []
    for index, argument in enumerate(arguments):
        if index in batched:
            key.append(argument.shape[1:])
        elif not (_is_unused(built, index) or built.feed_plan.is_default(index, argument)):
            key.append((index, _identity(argument)))
    return tuple(key)


def run_on_arrays(built: BuiltProgram, arguments: Arrays) -> Arrays:
    """Runs a built function; returns its results. Translates the errors of TensorFlow."""
    try:
        return built.call(arguments)
    except TENSORFLOW_ERRORS as cause:
        raise translate_error(cause, built.naming_run(arguments), built.inputs_of) from cause


def run_together(
    built: BuiltProgram, layout: Layout, calls: Sequence[BatchedCall], size: int, *, other_values: bool = False
) -> list[Arrays]:
    """Runs calls with the same `group_key` together, on `size` examples; returns the results of each.

    Missing rows up to `size` are copies of the last row. other_values: with other floats.
    """
    counts = [call.examples for call in calls]
    missing_rows = size - sum(counts)
    batched = set(_merged_arguments(built, layout))
    arguments: list[np.ndarray] = []
    for index, argument in enumerate(calls[0].arguments):
        if index not in batched:
            arguments.append(argument)
            continue
        parts = [call.arguments[index] for call in calls]
        if missing_rows:
            parts.append(_padding_rows(parts[-1], missing_rows, other_values=other_values))
        arguments.append(np.concatenate(parts))
    if built.memory_check is not None:
        built.memory_check.check(arguments)
    results = run_on_arrays(built, arguments)
    for number, (result, rows) in enumerate(zip(results, layout.rows, strict=True)):
        if rows and np.shape(result)[:1] != (rows * size,):
            raise ValueError(
                f"result {number} has shape {np.shape(result)}, not {rows} rows for each of {size} examples"
            )
    answers: list[Arrays] = []
    start = 0
    for count in counts:
        end = start + count
        answers.append(
            [
                result[rows * start : rows * end] if rows else result
                for result, rows in zip(results, layout.rows, strict=True)
            ]
        )
        start = end
    return answers


def split_calls(calls: Sequence[BatchedCall], most: int) -> Iterator[list[BatchedCall]]:
    """Splits calls with the same `group_key` into runs of at most `most` examples; a larger call runs alone."""
    chunk: list[BatchedCall] = []
    for call in calls:
        if chunk and sum(other.examples for other in chunk) + call.examples > most:
            yield chunk
            chunk = []
        chunk.append(call)
    if chunk:
        yield chunk


def padded_size(examples: int, most: int) -> int:
    """Returns the size to which a run is padded: 2**n or 3 * 2**n, so that there are few sizes, or `most`.

    Libraries prepare for each size anew. At most a third of a run is padding.
    """
    power = 1 << (examples - 1).bit_length()
    size = power * 3 // 4 if power >= 4 and power * 3 // 4 >= examples else power
    return max(examples, min(size, most))


def _merged_arguments(built: BuiltProgram, layout: Layout) -> list[int]:
    """Returns the arguments that are concatenated."""
    return [index for index, batched in enumerate(layout.per_example) if batched and not _is_unused(built, index)]


def _is_unused(built: BuiltProgram, index: int) -> bool:
    return index < len(built.unused) and built.unused[index]


def _identity(value: np.ndarray) -> Hashable:
    """Returns a key that is equal for arrays with the same bits."""
    argument = np.asarray(value)
    content = tuple(argument.flat) if argument.dtype.hasobject else argument.tobytes()
    return argument.shape, content


def _padding_rows(part: np.ndarray, count: int, *, other_values: bool) -> np.ndarray:
    rows = np.repeat(part[-1:], count, 0)
    if not other_values or not is_inexact(part):
        return rows
    factors = np.linspace(-0.75, 1.5, count).reshape([count] + [1] * (part.ndim - 1))
    return np.asarray(rows * factors + 0.25).astype(part.dtype)


@dataclass(slots=True)
class BatchingProof:
    """State of the decision for one program. Thread-safe.

    layout: how its calls are merged; None: not analysed yet, or refused. refusal: why its calls never run together;
    empty if there is no reason. is_proven: whether they run together.
    """

    layout: Layout | None = None
    refusal: str = ""
    is_proven: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def analyse(self, built: BuiltProgram) -> Layout | None:
        """Returns how calls are merged, None if they may not be. Analyses the program at the first call."""
        with self.lock:
            if self.layout is None and not self.refusal:
                try:
                    found = analyse(built)
                except Exception:
                    # The call is answered even if the analysis fails.
                    _log.exception("the analysis of a program failed; its calls do not run together")
                    found = Refusal("the analysis failed")
                if isinstance(found, Layout):
                    self.layout = found
                else:
                    self.refuse(found.reason)
            return self.layout

    def refuse(self, reason: str) -> None:
        """Stops running calls together."""
        self.layout, self.is_proven, self.refusal = None, False, reason

    def attempt(
        self, built: BuiltProgram, layout: Layout, calls: Sequence[BatchedCall], alone: Sequence[Arrays]
    ) -> None:
        """Runs calls together that have run alone, and compares: sets `is_proven` or `refusal`.

        The first call also runs among rows of other values, and must give the same results up to the last four bits: a
        result that mixes rows is found even if all calls are equal.
        """
        try:
            found = _find_difference(built, layout, calls, alone)
        except GradruleError as cause:
            found = f"calls that succeed alone fail together: {cause.message}"
        except Exception:
            # These calls are answered; other calls of the frame still have to run.
            _log.exception("the trial of a program failed; its calls do not run together")
            found = "the trial failed"
        if found:
            self.refuse(found)
        elif not self.refusal:
            self.is_proven = True


def _find_difference(built: BuiltProgram, layout: Layout, calls: Sequence[BatchedCall], alone: Sequence[Arrays]) -> str:
    """Returns which results differ between calls that ran together and alone; empty if none does."""
    examples = sum(call.examples for call in calls)
    size = padded_size(examples + 1, 2 * examples)
    together = run_together(built, layout, calls, size)
    (among_others,) = _run_among_others(built, layout, calls[:1], size)
    for call, ours, theirs in zip(calls, alone, together, strict=True):
        least = _FLOOR * max(map(magnitude, (*call.arguments, *ours)), default=0.0)
        pairs = [(ours, theirs, _MOST_UNITS)]
        if call is calls[0]:
            pairs.append((theirs, among_others, _MOST_UNITS_AMONG_OTHERS))
        for one, other, units in pairs:
            for number, (a, b) in enumerate(zip(one, other, strict=True)):
                if not is_close(a, b, units, least):
                    return f"result {number} is another when calls run together"
    return ""


def _run_among_others(built: BuiltProgram, layout: Layout, calls: Sequence[BatchedCall], size: int) -> list[Arrays]:
    try:
        return run_together(built, layout, calls, size, other_values=True)
    except GradruleError:
        # The program may check its values and refuse these.
        return run_together(built, layout, calls, size)
