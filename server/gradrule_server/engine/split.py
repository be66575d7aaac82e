"""A program in two parts: forward once, pull back as often as wanted."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine.backward import Backward, row_of, stacked_layout
from gradrule_server.engine.question import checked_upstream
from gradrule_server.errors import error

Layout = list[tuple[tuple[str, ...], str]]


class SplitProgram:
    """Forward and backward part of a vector-Jacobian product as functions of their own. Thread-safe.

    What `forward` saves stays on the device; it is a list of tensors, some of them TensorLists and optionals, whose
    meaning is this object's. Params are arguments of the forward part, and saved where the backward part needs them.
    """

    def __init__(self, function: Any, output_count: int, backward: Backward) -> None:
        self._function = function
        self._output_count = output_count
        self._backward = backward
        self._pull_backs: dict[tuple[frozenset[int], bool], Any] = {}
        self._lock = threading.Lock()

    @property
    def layout(self) -> Layout:
        """Of a single pull-back's tensors: x and form (`question.WIDTHS` tensors each)."""
        return self._backward.layout

    @property
    def stacked_layout(self) -> Layout:
        """Of many pull-backs at once: dense where there is a gradient at all."""
        return stacked_layout(self._backward.layout)

    def forward(self, arguments: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Takes what `Built.function` takes; returns the fetches, and what pulling back needs."""
        results = list(self._function(*arguments))
        return results[: self._output_count], results[self._output_count :]

    def backward(
        self, saved: Sequence[tf.Tensor], grad_ys: Mapping[int, tf.Tensor], *, stacked: bool = False
    ) -> list[tf.Tensor]:
        """The tensors of `layout`, or of `stacked_layout`.

        grad_ys: by index among the ys, of the y's type; a y without one gets ones. stacked: all of them have one more
        axis in front, of one size. Raises INVALID_DERIVATIVE; TensorFlow's error of a failed check where a shape is
        not the y's (FEED_SHAPE, see `checks.failed_check`).
        """
        given = [index for index in self._backward.fed if index in grad_ys]
        if stacked and not given:
            raise error(
                errors_pb2.ERROR_REASON_INVALID_DERIVATIVE,
                "many pull-backs at once take their number from grad_ys, and none is given",
                field="grad_ys",
            )
        values = [grad_ys[index] for index in given]
        key = (frozenset(given), stacked)
        # Tracing one and the same function in two threads is not safe.
        with self._lock:
            function = self._pull_backs.get(key)
            if function is None:
                function = self._pull_backs[key] = self._traced(saved, given, stacked=stacked)
        return list(function(*values, *saved))

    def _traced(self, saved: Sequence[tf.Tensor], given: Sequence[int], *, stacked: bool) -> Any:
        backward = self._backward
        for index in backward.fed:
            if index not in given:
                checked_upstream(backward.ys[index], None)

        def pull_back(*arguments: tf.Tensor) -> list[tf.Tensor]:
            values = dict(zip(given, arguments, strict=False))
            rest = arguments[len(given) :]
            shapes = dict(zip(backward.fed, rest, strict=False))
            captures = rest[len(backward.fed) :]

            def ones(index: int) -> tf.Tensor:
                return tf.ones(shapes[index], backward.ys[index].tensor.dtype)

            if not stacked:
                return backward.once([values.get(i, ones(i)) for i in backward.fed], captures)
            pull = row_of(list(values.values()))

            def row(number: tf.Tensor) -> Sequence[tf.Tensor]:
                rows = dict(zip(given, pull(number), strict=True))
                return [rows[i] if i in rows else ones(i) for i in backward.fed]

            return backward.stacked(tf.shape(next(iter(values.values())))[0], row, captures)

        specs = [self._spec(index, stacked=stacked) for index in given]
        specs += [tf.TensorSpec(None, value.dtype) for value in saved]
        return tf.function(pull_back, input_signature=specs, autograph=False).get_concrete_function()

    def _spec(self, index: int, *, stacked: bool) -> tf.TensorSpec:
        y = self._backward.ys[index].tensor
        return tf.TensorSpec(tf.TensorShape([None]).concatenate(y.shape) if stacked else y.shape, y.dtype)
