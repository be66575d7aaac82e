"""Puts calls of one program behind one another along axis 0, runs them as one, and takes the results apart."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import tensorflow as tf

from gradrule_server.engine.batching.analysis import Layout
from gradrule_server.engine.built import Built
from gradrule_server.engine.run import execute

Results: TypeAlias = "Sequence[tf.Tensor]"
"""What a built function returns for one call."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request, read.

    examples: its rows on axis 0; 0: it cannot run with others. company: calls of equal company can run together.
    """

    request_id: int
    received_ns: int
    started_ns: int
    arguments: Sequence[tf.Tensor]
    examples: int = 0
    company: Hashable = None


def examples_of(built: Built, layout: Layout, arguments: Sequence[tf.Tensor]) -> int:
    """Returns the number of examples of a call; 0 where its arguments do not agree on one, or a param is no number."""
    if any(argument.shape.rank for argument in arguments[len(arguments) - len(built.params) :]):
        return 0
    sizes = {int(arguments[index].shape[0]) for index in _batched(built, layout)}
    return sizes.pop() if len(sizes) == 1 else 0


def company_of(built: Built, layout: Layout, arguments: Sequence[tf.Tensor]) -> Hashable:
    """Returns a key that is equal where shared arguments are equal bit for bit and rows fit together."""
    batched = set(_batched(built, layout))
    defaults = {id(item.default) for item in built.inputs if item.default is not None}
    key: list[Hashable] = []
    for index, argument in enumerate(arguments):
        if index in batched:
            key.append(tuple(argument.shape)[1:])
        elif id(argument) in defaults:
            key.append(id(argument))
        elif not _is_unused(built, index):
            key.append((tuple(argument.shape), _content(argument)))
    return tuple(key)


def run_alone(built: Built, call: Call) -> Results:
    """Returns the results of a call."""
    return execute(built, lambda: built.function(*call.arguments))


def run_together(
    built: Built, layout: Layout, calls: Sequence[Call], size: int, *, strange_rows: bool = False
) -> list[Results]:
    """Returns the results of each call, which are of one company, from one run on `size` examples.

    What is missing to `size` is filled with copies of the last row. strange_rows: with other floats.
    """
    counts = [call.examples for call in calls]
    missing = size - sum(counts)
    batched = set(_batched(built, layout))

    def run() -> Results:
        arguments: list[tf.Tensor] = []
        for index, argument in enumerate(calls[0].arguments):
            if index not in batched:
                arguments.append(argument)
                continue
            parts = [call.arguments[index] for call in calls]
            if missing:
                parts.append(_filling(parts[-1], missing, strange=strange_rows))
            arguments.append(tf.concat(parts, 0))
        if built.fitting is not None:
            built.fitting.check(arguments)
        results: Results = built.function(*arguments)
        return results

    results = execute(built, run)
    if missing:
        counts.append(missing)
    parts = [
        tf.split(result, [rows * count for count in counts]) if rows else [result] * len(counts)
        for result, rows in zip(results, layout.rows, strict=True)
    ]
    return [[part[index] for part in parts] for index in range(len(calls))]


def chunks(calls: Sequence[Call], most: int) -> Iterator[list[Call]]:
    """Cuts calls of one company into runs of at most `most` examples; a call that is larger runs by itself."""
    chunk: list[Call] = []
    for call in calls:
        if chunk and sum(other.examples for other in chunk) + call.examples > most:
            yield chunk
            chunk = []
        chunk.append(call)
    if chunk:
        yield chunk


def allowed_size(examples: int, most: int) -> int:
    """Returns the size that a run is filled up to: 2**n or 3 * 2**n, so that there are few, or `most`.

    Libraries prepare for each size anew. At most a third of a run is filling.
    """
    power = 1 << (examples - 1).bit_length()
    size = power * 3 // 4 if power >= 4 and power * 3 // 4 >= examples else power
    return max(examples, min(size, most))


def _batched(built: Built, layout: Layout) -> list[int]:
    """The arguments that are put behind one another."""
    return [index for index, batched in enumerate(layout.per_example) if batched and not _is_unused(built, index)]


def _is_unused(built: Built, index: int) -> bool:
    return index < len(built.unused) and built.unused[index]


def _content(argument: tf.Tensor) -> Hashable:
    value = argument.numpy()
    return tuple(value.flat) if value.dtype == object else value.tobytes()


def _filling(part: tf.Tensor, count: int, *, strange: bool) -> tf.Tensor:
    rows = tf.repeat(part[-1:], count, 0)
    if not strange or not (part.dtype.is_floating or part.dtype.is_complex):
        return rows
    factors = tf.cast(tf.linspace(-0.75, 1.5, count), part.dtype)
    return rows * tf.reshape(factors, [count] + [1] * (len(part.shape) - 1)) + tf.cast(0.25, part.dtype)
