"""Concatenates calls of one program along axis 0, runs them as one, and splits the results."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gradrule.common.tensor_packing import Packing
from gradrule_server.engine.batching.analysis import Layout
from gradrule_server.engine.comparison import is_inexact
from gradrule_server.engine.large_tensors import AnswerArea
from gradrule_server.engine.program import Arrays, BuiltProgram
from gradrule_server.engine.tf_errors import TENSORFLOW_ERRORS, translate_error


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
    sizes = {int(arguments[index].shape[0]) for index in _batched(built, layout)}
    return sizes.pop() if len(sizes) == 1 else 0


def group_key_for(built: BuiltProgram, layout: Layout, arguments: Arrays) -> Hashable:
    """Returns a key that is equal for calls whose shared arguments have the same bits and whose rows have one shape."""
    batched = set(_batched(built, layout))
    key: list[Hashable] = []
    for index, argument in enumerate(arguments):
        if index in batched:
            key.append(argument.shape[1:])
        elif not (_is_unused(built, index) or built.feed_plan.is_default(index, argument)):
            key.append((index, _identity(argument)))
    return tuple(key)


def run(built: BuiltProgram, arguments: Arrays) -> Arrays:
    """Returns the results of a built function."""
    try:
        return built.call(arguments)
    except TENSORFLOW_ERRORS as cause:
        raise translate_error(cause) from cause


def run_together(
    built: BuiltProgram, layout: Layout, calls: Sequence[BatchedCall], size: int, *, other_values: bool = False
) -> list[Arrays]:
    """Runs calls with the same `group_key` together, on `size` examples; returns the results of each.

    What is missing to `size` is filled with copies of the last row. other_values: with other floats.
    """
    counts = [call.examples for call in calls]
    missing = size - sum(counts)
    batched = set(_batched(built, layout))
    arguments: list[np.ndarray] = []
    for index, argument in enumerate(calls[0].arguments):
        if index not in batched:
            arguments.append(argument)
            continue
        parts = [call.arguments[index] for call in calls]
        if missing:
            parts.append(_filling(parts[-1], missing, other_values=other_values))
        arguments.append(np.concatenate(parts))
    if built.memory_check is not None:
        built.memory_check.check(arguments)
    results = run(built, arguments)
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


def chunks(calls: Sequence[BatchedCall], most: int) -> Iterator[list[BatchedCall]]:
    """Splits calls with the same `group_key` into runs of at most `most` examples; a larger call runs alone."""
    chunk: list[BatchedCall] = []
    for call in calls:
        if chunk and sum(other.examples for other in chunk) + call.examples > most:
            yield chunk
            chunk = []
        chunk.append(call)
    if chunk:
        yield chunk


def allowed_size(examples: int, most: int) -> int:
    """Returns the size to which a run is padded: 2**n or 3 * 2**n, so that there are few sizes, or `most`.

    Libraries prepare for each size anew. At most a third of a run is filling.
    """
    power = 1 << (examples - 1).bit_length()
    size = power * 3 // 4 if power >= 4 and power * 3 // 4 >= examples else power
    return max(examples, min(size, most))


def _batched(built: BuiltProgram, layout: Layout) -> list[int]:
    """Returns the arguments that are concatenated."""
    return [index for index, batched in enumerate(layout.per_example) if batched and not _is_unused(built, index)]


def _is_unused(built: BuiltProgram, index: int) -> bool:
    return index < len(built.unused) and built.unused[index]


def _identity(value: np.ndarray) -> Hashable:
    """Returns a key that is equal for arrays with the same bits."""
    argument = np.asarray(value)
    content = tuple(argument.flat) if argument.dtype.hasobject else argument.tobytes()
    return argument.shape, content


def _filling(part: np.ndarray, count: int, *, other_values: bool) -> np.ndarray:
    rows = np.repeat(part[-1:], count, 0)
    if not other_values or not is_inexact(part):
        return rows
    factors = np.linspace(-0.75, 1.5, count).reshape([count] + [1] * (part.ndim - 1))
    return np.asarray(rows * factors + 0.25).astype(part.dtype)
