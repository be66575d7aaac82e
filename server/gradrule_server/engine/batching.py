"""Runs the requests of one frame: together if the program may merge them, else one by one.

Calls of one program are merged into one run: arguments are concatenated along axis 0, and results are split. The
program declares that the results of an example do not depend on other examples. The first merged runs are compared with
single ones; a program whose results differ is not merged again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine.arguments import ArgumentReader, CallArguments
from gradrule_server.engine.derivatives import WIDTHS
from gradrule_server.engine.program import Arrays, BuiltProgram
from gradrule_server.engine.run import respond
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.batching import unpack_batch
from gradrule_server.link.framing import FrameSocket, Kind
from gradrule_server.link.messages import split_values
from gradrule_server.link.v1 import link_pb2

_log = logging.getLogger(__name__)

COMPARED_RUNS = 3
"""Number of merged runs of a program that are compared with single ones before calls run together."""

# Kernels for other sizes add in another order. Allowed difference, in units of the last place of the tensor's largest
# element.
_MOST_UNITS = 1024
_MOST_UNITS_AMONG_OTHERS = 16
# The largest element counts as at least this part of the call's largest number: small differences of large numbers have
# the rounding errors of these.
_FLOOR = 0.01
# Largest allowed difference of types with few bits, relative to the same number.
_MOST_DIFFERENCE = 0.1


@dataclass(frozen=True, slots=True)
class BatchedCall:
    """The arguments of one request.

    examples: number of rows on axis 0; 0: it cannot run with others. group_key: calls with equal keys can run together.
    """

    request_id: int
    received_ns: int
    started_ns: int
    given: CallArguments
    examples: int = 0
    group_key: Hashable = None

    @property
    def arguments(self) -> Arrays:
        """The arguments of the built function."""
        return self.given.values


@dataclass(slots=True)
class MergedRuns:
    """Whether calls of a program run together. Thread-safe.

    merged: the arguments that are concatenated; the others must be equal in all calls. names: the results, as messages
    name them. compared: number of merged runs that were compared with single ones. refusal: why calls do not run
    together any more; empty if they may.
    """

    merged: frozenset[int]
    names: Sequence[str]
    compared: int = 0
    refusal: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def are_equal(self) -> bool:
        """Whether enough merged runs were compared, and all gave the results of single ones."""
        return self.compared >= COMPARED_RUNS and not self.refusal

    def refuse(self, reason: str) -> None:
        """Stops running calls together."""
        self.refusal = self.refusal or reason

    def compare(self, built: BuiltProgram, calls: Sequence[BatchedCall], alone: Sequence[Arrays]) -> None:
        """Runs calls together, and compares the results with those of single runs, `alone`."""
        with self.lock:
            try:
                difference = _find_difference(built, self, calls, alone)
            except GradruleError as cause:
                difference = f"calls that succeed alone fail together: {cause.message}"
            except ValueError as cause:
                difference = str(cause)
            except Exception:
                # These calls are answered; other calls of the frame still have to run.
                _log.exception("merged calls could not be compared with single ones")
                difference = "merged calls could not be compared with single ones"
            self.compared += 1
            if difference:
                self.refuse(difference)


def create_merged_runs(built: BuiltProgram) -> MergedRuns:
    """Returns the state of a program that declares batching, before its first run.

    Raises UNSUPPORTED if no input has examples, or if a result has a fixed size along axis 0.
    """
    arguments = [*built.inputs, *built.grad_ys, *built.directions]
    merged = frozenset(
        index
        for index, item in enumerate(arguments)
        if item.default is None and item.shape.rank and item.shape[0] is None and not _is_unused(built, index)
    )
    problem = ""
    if not merged:
        problem = "no input that a result depends on has an axis 0 of any size"
    names = _result_names(built)
    for name, tensor in zip(names, built.graph.outputs, strict=True):
        if tensor.shape.rank == 0 or (tensor.shape.rank and tensor.shape[0] is not None):
            problem = f"{name} has the shape {tensor.shape}, so its axis 0 does not count examples"
    if problem:
        raise error(
            errors_pb2.ERROR_REASON_UNSUPPORTED,
            f"batching: {problem}; compile the program without batching",
            field="spec.batching",
        )
    return MergedRuns(merged, names)


def _result_names(built: BuiltProgram) -> list[str]:
    derivatives = [
        f"the derivative {' by '.join(map(repr, names))}" for names, form in built.layout for _ in range(WIDTHS[form])
    ]
    return [*(f"output {name!r}" for name in built.outputs), *derivatives]


def count_examples(built: BuiltProgram, runs: MergedRuns, arguments: Arrays) -> int:
    """Returns the number of examples of a call; 0 if its arguments disagree, or if a param is not a scalar."""
    if any(np.ndim(argument) for argument in arguments[len(arguments) - len(built.params) :]):
        return 0
    sizes = {int(arguments[index].shape[0]) for index in runs.merged}
    return sizes.pop() if len(sizes) == 1 else 0


def group_key_for(built: BuiltProgram, runs: MergedRuns, arguments: Arrays) -> Hashable:
    """Returns a key that is equal for calls whose shared arguments have the same bits and whose rows have one shape."""
    key: list[Hashable] = []
    for index, argument in enumerate(arguments):
        if index in runs.merged:
            key.append(argument.shape[1:])
        elif not (_is_unused(built, index) or isinstance(argument, tf.Tensor)):
            # A kept tensor is the same in all calls.
            key.append((index, _identity(argument)))
    return tuple(key)


def run_together(
    built: BuiltProgram, runs: MergedRuns, calls: Sequence[BatchedCall], size: int, *, other_values: bool = False
) -> list[Arrays]:
    """Runs calls with the same `group_key` together, on `size` examples; returns the results of each.

    Missing rows up to `size` are copies of the last row. other_values: with other floats. Raises `ValueError` if a
    result does not have one row for each example.
    """
    counts = [call.examples for call in calls]
    missing_rows = size - sum(counts)
    arguments: list[np.ndarray] = []
    for index, argument in enumerate(calls[0].arguments):
        if index not in runs.merged:
            arguments.append(argument)
            continue
        parts = [call.arguments[index] for call in calls]
        if missing_rows:
            parts.append(_padding_rows(parts[-1], missing_rows, other_values=other_values))
        arguments.append(np.concatenate(parts))
    results = built.run(arguments)
    for name, result in zip(runs.names, results, strict=True):
        if np.shape(result)[:1] != (size,):
            raise ValueError(f"{name} has the shape {np.shape(result)}, not one row for each of {size} examples")
    answers: list[Arrays] = []
    start = 0
    for count in counts:
        answers.append([result[start : start + count] for result in results])
        start += count
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


def _find_difference(
    built: BuiltProgram, runs: MergedRuns, calls: Sequence[BatchedCall], alone: Sequence[Arrays]
) -> str:
    """Returns which result differs between calls that ran together and alone; empty if none does.

    The first call also runs among rows of other values, and must give the same results up to the last four bits: a
    result that mixes rows is found even if all calls are equal. Raises as `run_together` does.
    """
    examples = sum(call.examples for call in calls)
    size = padded_size(examples + 1, 2 * examples)
    together = run_together(built, runs, calls, size)
    (among_others,) = _run_among_others(built, runs, calls[:1], size)
    for call, ours, theirs in zip(calls, alone, together, strict=True):
        least = _FLOOR * max(map(_magnitude, (*call.arguments, *ours)), default=0.0)
        pairs = [(ours, theirs, _MOST_UNITS)]
        if call is calls[0]:
            pairs.append((theirs, among_others, _MOST_UNITS_AMONG_OTHERS))
        for one, other, units in pairs:
            for name, a, b in zip(runs.names, one, other, strict=True):
                if not is_close(a, b, units, least):
                    return f"{name} differs when calls run together"
    return ""


def _run_among_others(built: BuiltProgram, runs: MergedRuns, calls: Sequence[BatchedCall], size: int) -> list[Arrays]:
    try:
        return run_together(built, runs, calls, size, other_values=True)
    except GradruleError:
        # The program may check its values and refuse these.
        return run_together(built, runs, calls, size)


def _is_unused(built: BuiltProgram, index: int) -> bool:
    return index < len(built.unused) and built.unused[index]


def _identity(value: np.ndarray) -> Hashable:
    """Returns a key that is equal for arrays with the same bits."""
    argument = np.asarray(value)
    content = tuple(argument.flat) if argument.dtype.hasobject else argument.tobytes()
    return argument.shape, content


def _padding_rows(part: np.ndarray, count: int, *, other_values: bool) -> np.ndarray:
    rows = np.repeat(part[-1:], count, 0)
    if not other_values or not _is_inexact(part):
        return rows
    factors = np.linspace(-0.75, 1.5, count).reshape([count] + [1] * (part.ndim - 1))
    return np.asarray(rows * factors + 0.25).astype(part.dtype)


def is_close(first: Any, second: Any, units: float, least: float) -> bool:
    """Returns whether two results are equal up to rounding; integers exactly.

    units: how far floats may be apart, in units of the last place of the largest of them, or of `least`.
    """
    one, other = np.asarray(first), np.asarray(second)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not _is_inexact(one):
        return bool(np.array_equal(one, other))
    finfo: Any = ml_dtypes.finfo  # Has no types.
    tolerance = min(units * float(finfo(one.dtype).eps), _MOST_DIFFERENCE) * max(_magnitude(one), least)
    return bool(np.allclose(_wide(one), _wide(other), rtol=0, atol=tolerance, equal_nan=True))


def _magnitude(value: Any) -> float:
    """Returns the largest finite absolute value of a tensor of floats; 0 of other types."""
    array = np.asarray(value)
    if not _is_inexact(array):
        return 0.0
    values = np.abs(_wide(array))
    return float(np.max(values, initial=0.0, where=np.isfinite(values)))


def _is_inexact(array: np.ndarray) -> bool:
    """Returns whether an array holds floats or complex numbers, those of `ml_dtypes` too."""
    return array.dtype.kind in "fc" or (array.dtype.kind == "V" and "float" in array.dtype.name)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


class BatchRunner:
    """Runs RUN_BATCH frames. Thread-safe.

    find_program: finds a program by its key. answering: a context that answers a request with the error that is raised
    within it.
    """

    def __init__(
        self,
        frames: FrameSocket,
        reader: ArgumentReader,
        find_program: Callable[[str], BuiltProgram],
        answering: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        self._frames = frames
        self._reader = reader
        self._find_program = find_program
        self._answering = answering

    def run(self, number: int, payload: bytes | memoryview) -> None:
        """Runs all requests of a frame, which are of one program; then sends a notice that the frame is done.

        The caller must send an error as the FAULT of the frame: the front end answers the remaining requests with it.
        """
        most, requests = unpack_batch(payload)
        notice = link_pb2.BatchNotice()
        calls: list[BatchedCall] = []
        built: BuiltProgram | None = None
        for request_id, part in requests:
            with self._answering(request_id):
                received = split_values(part)
                request = link_pb2.RunRequest.FromString(received.message)
                notice.key = request.key
                built = self._find_program(request.key)
                started_ns = time.monotonic_ns()
                given = self._reader.read(built, request, received.values)
                group = _group_of(built, given.values)
                calls.append(BatchedCall(request_id, received.received_ns, started_ns, given, *group))
        if built is not None:
            self._run(built, calls, most, notice)
        self._frames.send(Kind.BATCH_NOTICE, number, notice.SerializeToString())

    def _run(self, built: BuiltProgram, calls: Sequence[BatchedCall], most: int, notice: link_pb2.BatchNotice) -> None:
        groups: dict[object, list[BatchedCall]] = {}
        for call in calls:
            # Calls that run alone go first, so that they do not wait for the batches.
            groups.setdefault(call.group_key if call.examples else None, []).append(call)
        for call in groups.pop(None, []):
            self._answer_alone(built, call)
        runs = built.merged_runs
        if runs is None:
            return
        is_merged = False
        for group in groups.values():
            for chunk in split_calls(group, most):
                is_merged |= len(chunk) > 1
                self._answer_chunk(built, runs, chunk, most)
        notice.reason = runs.refusal
        if runs.refusal:
            notice.outcome = link_pb2.BatchNotice.OUTCOME_REFUSED
        elif runs.are_equal and (is_merged or len(calls) < 2):
            notice.outcome = link_pb2.BatchNotice.OUTCOME_EQUAL

    def _answer_chunk(self, built: BuiltProgram, runs: MergedRuns, calls: Sequence[BatchedCall], most: int) -> None:
        if len(calls) == 1 or runs.refusal:
            for call in calls:
                self._answer_alone(built, call)
        elif not runs.are_equal:
            done = [(call, results) for call in calls if (results := self._answer_alone(built, call)) is not None]
            if len(done) > 1:
                runs.compare(built, [call for call, _ in done], [results for _, results in done])
        else:
            examples = sum(call.examples for call in calls)
            try:
                parts = run_together(built, runs, calls, padded_size(examples, most))
            except Exception as cause:
                if not isinstance(cause, GradruleError):
                    _log.exception("calls failed together; they run alone")
                # One call may be invalid, or they may be too large together: alone, each gets its own answer.
                done_alone = [self._answer_alone(built, call) is not None for call in calls]
                if all(done_alone):
                    runs.refuse("calls that succeed alone failed together")
                return
            for call, results in zip(calls, parts, strict=True):
                self._answer(built, call, results, examples)

    def _answer_alone(self, built: BuiltProgram, call: BatchedCall) -> Arrays | None:
        """Runs and answers one call; returns its results, None if it failed."""
        with self._answering(call.request_id):
            results = built.run(call.arguments)
            self._answer(built, call, results, 0)
            return results
        return None

    def _answer(self, built: BuiltProgram, call: BatchedCall, results: Arrays, batch_size: int) -> None:
        with self._answering(call.request_id):
            answer = respond(built, results, call.given, call.received_ns, call.started_ns, batch_size)
            self._frames.send(Kind.RAN, call.request_id, answer)


def _group_of(built: BuiltProgram, arguments: Arrays) -> tuple[int, Hashable]:
    """Returns the number of examples of a call and its group; 0 if it cannot run with others."""
    runs = built.merged_runs
    examples = 0 if runs is None or runs.refusal else count_examples(built, runs, arguments)
    return examples, group_key_for(built, runs, arguments) if runs is not None and examples else None
