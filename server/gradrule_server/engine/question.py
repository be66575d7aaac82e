"""What is differentiated, as tensors, and the form that answers have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine.checks import require_same
from gradrule_server.errors import error

UNCONNECTED = "unconnected"
NOT_DIFFERENTIABLE = "not_differentiable"
DENSE = "dense"
SPARSE = "sparse"

WIDTHS = {DENSE: 1, SPARSE: 3, UNCONNECTED: 0, NOT_DIFFERENTIABLE: 0}
"""How many tensors an answer of each form consists of."""


@dataclass(frozen=True, slots=True)
class Named:
    """A y or an x, under the name asked."""

    name: str
    tensor: tf.Tensor

    @property
    def is_differentiable(self) -> bool:
        """Floating or complex."""
        return bool(self.tensor.dtype.is_floating or self.tensor.dtype.is_complex)


@dataclass(frozen=True, slots=True)
class Question:
    """ys and xs of `graph`.

    `upstream`: of each y, None for ones. `unconnected_is_zero`: zeros where not connected. `dense`: slices come whole.
    """

    graph: tf.Graph
    ys: Sequence[Named]
    xs: Sequence[Named]
    upstream: Sequence[tf.Tensor | None]
    stop_gradients: Sequence[tf.Tensor]
    unconnected_is_zero: bool
    dense: bool = False

    def of(self, ys: Sequence[Named], upstream: Sequence[tf.Tensor | None]) -> Question:
        """The same about other ys, or other upstream gradients."""
        return replace(self, ys=ys, upstream=upstream)


@dataclass(slots=True)
class Answers:
    """Tensors with their layout. Per entry: names asked (an x, a y, or a y and an x), and the form."""

    layout: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    tensors: list[tf.Tensor] = field(default_factory=list)

    def add(self, names: tuple[str, ...], form: str, tensors: Sequence[tf.Tensor] = ()) -> None:
        """One more entry."""
        self.layout.append((names, form))
        self.tensors += tensors

    def add_gradient(self, x: Named, gradient: Any, *, whole: bool = False) -> None:
        """The gradient by x, as TensorFlow gave it, or `whole` where that is slices."""
        if not x.is_differentiable:
            self.add((x.name,), NOT_DIFFERENTIABLE)
        elif gradient is None:
            self.add((x.name,), UNCONNECTED)
        elif isinstance(gradient, tf.IndexedSlices):
            shape = tf.shape(x.tensor, out_type=tf.int64) if gradient.dense_shape is None else gradient.dense_shape
            if whole:
                slices = tf.IndexedSlices(gradient.values, gradient.indices, shape)
                self.add((x.name,), DENSE, [tf.convert_to_tensor(slices)])
            else:
                self.add((x.name,), SPARSE, [gradient.values, gradient.indices, shape])
        else:
            self.add((x.name,), DENSE, [gradient])


def checked_upstream(
    y: Named, grad_y: tf.Tensor | None, shape: tf.Tensor | None = None, field: str = "grad_ys"
) -> tf.Tensor | None:
    """A y's upstream gradient; INVALID_DERIVATIVE, FEED_SHAPE where it does not fit.

    `shape`: the y's, where it is at hand without the y.
    """
    where = f"grad_y of {y.name!r}"
    if grad_y is None:
        if y.tensor.dtype.is_complex:
            raise error(
                errors_pb2.ERROR_REASON_INVALID_DERIVATIVE,
                f"y {y.name!r} is {y.tensor.dtype.name}: a complex y needs a grad_y",
                field="ys",
            )
        return None
    if grad_y.dtype != y.tensor.dtype:
        raise error(
            errors_pb2.ERROR_REASON_INVALID_DERIVATIVE,
            f"{where} is {grad_y.dtype.name}, but the y is {y.tensor.dtype.name}",
            field=field,
        )
    if not grad_y.shape.is_compatible_with(y.tensor.shape):
        raise error(
            errors_pb2.ERROR_REASON_FEED_SHAPE,
            f"{where} has shape {grad_y.shape}, but the y has {y.tensor.shape}",
            field=field,
        )
    return same_shape(grad_y, y.tensor, where, shape)


def same_shape(value: tf.Tensor, like: tf.Tensor, where: str, shape: tf.Tensor | None = None) -> tf.Tensor:
    """`value`, if at run time it has the shape of `like`, which is `shape`; FEED_SHAPE otherwise."""
    if value.shape.is_fully_defined() and like.shape.is_fully_defined():
        return value
    wanted = tf.shape(like) if shape is None else shape
    checked = require_same(value, tf.shape(value), wanted, errors_pb2.ERROR_REASON_FEED_SHAPE, where)
    checked.set_shape(like.shape)
    return checked
