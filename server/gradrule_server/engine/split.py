"""A program in two parts: forward once, pull back as often as wanted."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine.allowed import check_ops
from gradrule_server.engine.backward import Backward, row_of, stacked_layout
from gradrule_server.engine.question import checked_upstream
from gradrule_server.errors import error

Layout = list[tuple[tuple[str, ...], str]]


class SplitProgram:
    """Forward and backward part of a vector-Jacobian product as functions of their own. Thread-safe.

    What `forward` saves stays on the device; it is a list of tensors, some of them TensorLists and optionals, whose
    meaning is this object's. Params are arguments of the forward part, and saved where the backward part needs them.
    """

    def __init__(self, function: Any, output_count: int, backward: Backward, *, trusted: bool) -> None:
        self._function = function
        self._output_count = output_count
        self._backward = backward
        self._trusted = trusted
        self._pull_backs: dict[bool, Any] = {}
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
        fed, ys = self._backward.fed, self._backward.ys
        given = [grad_ys[index] for index in fed if index in grad_ys]
        if stacked and not given:
            raise error(
                errors_pb2.ERROR_REASON_INVALID_DERIVATIVE,
                "many pull-backs at once take their number from grad_ys, and none is given",
                field="grad_ys",
            )
        count = tf.shape(given[0])[:1] if stacked else tf.zeros([0], tf.int32)
        values = []
        # What is saved begins with the shapes of the ys.
        for index, shape in zip(fed, saved, strict=False):
            value = grad_ys.get(index)
            if value is None:
                checked_upstream(ys[index], None)
                value = tf.ones(tf.concat([count, shape], 0), ys[index].tensor.dtype)
            values.append(value)
        # Tracing one and the same function in two threads is not safe.
        with self._lock:
            function = self._pull_backs.get(stacked)
            if function is None:
                function = self._pull_backs[stacked] = self._traced(saved, stacked=stacked)
        return list(function(*values, *saved))

    def _traced(self, saved: Sequence[tf.Tensor], *, stacked: bool) -> Any:
        backward, count = self._backward, len(self._backward.fed)

        def pull_back(*arguments: tf.Tensor) -> list[tf.Tensor]:
            values, captures = list(arguments[:count]), arguments[2 * count :]
            if not stacked:
                return backward.once(values, captures)
            return backward.stacked(tf.shape(values[0])[0], row_of(values), captures)

        specs = [self._spec(index, stacked=stacked) for index in backward.fed]
        specs += [tf.TensorSpec(None, value.dtype) for value in saved]
        function = tf.function(pull_back, input_signature=specs, autograph=False).get_concrete_function()
        if not self._trusted:
            check_ops(function.graph)
        return function

    def _spec(self, index: int, *, stacked: bool) -> tf.TensorSpec:
        y = self._backward.ys[index].tensor
        return tf.TensorSpec(tf.TensorShape([None]).concatenate(y.shape) if stacked else y.shape, y.dtype)
