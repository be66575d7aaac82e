"""Builds gradients, and gradients of gradients, in the graph of the forward part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.checks import require_same_shape
from gradrule_server.engine.differentiation import Differentiation, DifferentiationStage
from gradrule_server.engine.tf_errors import clean_message, error_message
from gradrule_server.errors import error

_T = TypeVar("_T")

UNCONNECTED = "unconnected"
NOT_DIFFERENTIABLE = "not_differentiable"
DENSE = "dense"
SPARSE = "sparse"

WIDTHS = {DENSE: 1, SPARSE: 3, UNCONNECTED: 0, NOT_DIFFERENTIABLE: 0}
"""Number of tensors of a derivative, by its form."""

DerivativeLayout: TypeAlias = list[tuple[tuple[str, ...], str]]
"""For each derivative its names (an x, a y of a JVP, or y and x of a Jacobian) and its form."""


def split_tensors(layout: DerivativeLayout, tensors: Iterable[_T]) -> Iterator[tuple[tuple[str, ...], str, list[_T]]]:
    """Yields the names, the form and the tensors of each derivative. `tensors`: those of all, in order."""
    rest = iter(tensors)
    for names, form in layout:
        yield names, form, [next(rest) for _ in range(WIDTHS[form])]


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A y or an x, with its name in the request."""

    name: str
    tensor: tf.Tensor

    @property
    def is_differentiable(self) -> bool:
        """Whether its type is floating or complex."""
        return bool(self.tensor.dtype.is_floating or self.tensor.dtype.is_complex)


@dataclass(frozen=True, slots=True)
class DifferentiationRequest:
    """The ys and xs of `graph` whose derivatives are requested.

    `upstream`: gradient of each y, None for ones. `unconnected_is_zero`: gives zeros for an x that is not connected.
    `dense`: gives dense tensors instead of slices.
    """

    graph: tf.Graph
    ys: Sequence[NamedTensor]
    xs: Sequence[NamedTensor]
    upstream: Sequence[tf.Tensor | None]
    stop_gradients: Sequence[tf.Tensor]
    unconnected_is_zero: bool
    dense: bool = False

    def with_ys(self, ys: Sequence[NamedTensor], upstream: Sequence[tf.Tensor | None]) -> DifferentiationRequest:
        """Returns the request with other ys and upstream gradients."""
        return replace(self, ys=ys, upstream=upstream)


@dataclass(slots=True)
class Derivatives:
    """Tensors of derivatives, with their layout."""

    layout: DerivativeLayout = field(default_factory=list)
    tensors: list[tf.Tensor] = field(default_factory=list)

    def add(self, names: tuple[str, ...], form: str, tensors: Sequence[tf.Tensor] = ()) -> None:
        """Adds a derivative."""
        self.layout.append((names, form))
        self.tensors += tensors

    def add_gradient(self, x: NamedTensor, gradient: Any, *, dense: bool = False) -> None:
        """Adds the gradient by `x` that TensorFlow built. `dense`: makes slices dense."""
        if not x.is_differentiable:
            self.add((x.name,), NOT_DIFFERENTIABLE)
        elif gradient is None:
            self.add((x.name,), UNCONNECTED)
        elif isinstance(gradient, tf.IndexedSlices):
            shape = tf.shape(x.tensor, out_type=tf.int64) if gradient.dense_shape is None else gradient.dense_shape
            if dense:
                slices = tf.IndexedSlices(gradient.values, gradient.indices, shape)
                self.add((x.name,), DENSE, [tf.convert_to_tensor(slices)])
            else:
                self.add((x.name,), SPARSE, [gradient.values, gradient.indices, shape])
        else:
            self.add((x.name,), DENSE, [gradient])


def checked_upstream(
    y: NamedTensor, grad_y: tf.Tensor | None, shape: tf.Tensor | None = None, field: str = "grad_ys"
) -> tf.Tensor | None:
    """Returns the upstream gradient of a y. Raises INVALID_DERIVATIVE or FEED_SHAPE if it does not fit.

    `shape`: shape of the y, if it is known without the y.
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
    return require_same_shape(grad_y, y.tensor, errors_pb2.ERROR_REASON_FEED_SHAPE, where, shape)


Directions = Sequence[tf.Tensor | None]
"""For each x a tensor of its type and shape, or None."""


def vjp(request: DifferentiationRequest, differentiation: Differentiation) -> Derivatives:
    """Builds the gradient of the ys, weighted by their upstream gradients, by each x."""
    with differentiation.active():
        gradients = build_gradients(request)
    derivatives = Derivatives()
    for x, gradient in zip(request.xs, gradients, strict=True):
        derivatives.add_gradient(x, gradient, dense=request.dense)
    return derivatives


def jvp(request: DifferentiationRequest, tangents: Directions, differentiation: Differentiation) -> Derivatives:
    """Builds for each y the sum over xs of dy/dx · tangent, of the type and shape of the y.

    A vector-Jacobian product is linear in the upstream gradients, so its derivative by them, at zero, is its transpose:
    the Jacobian-vector product. An x without a tangent is a constant.
    """
    ys = [y for y in request.ys if y.is_differentiable]
    # Gradient functions may leave out what constant zeros give, so these are no constants.
    zeros = [tf.identity(tf.zeros_like(y.tensor)) for y in ys]
    gradients = _gradients_along(request.with_ys(ys, zeros), tangents, "tangent", differentiation)
    pushed: list[Any] = [None] * len(ys)
    if gradients:
        columns = DifferentiationRequest(
            request.graph,
            [gradient for gradient, _ in gradients],
            [NamedTensor(y.name, zero) for y, zero in zip(ys, zeros, strict=True)],
            [tangent for _, tangent in gradients],
            (),
            unconnected_is_zero=False,
        )
        with differentiation.active(DifferentiationStage.TRANSPOSE):
            pushed = build_gradients(columns)
    derivatives, found = Derivatives(), iter(zip(zeros, pushed, strict=True))
    for y in request.ys:
        if not y.is_differentiable:
            derivatives.add((y.name,), NOT_DIFFERENTIABLE)
            continue
        zero, tangent = next(found)
        derivatives.add_gradient(y, zero if tangent is None else tf.convert_to_tensor(tangent))
    return derivatives


def hvp(request: DifferentiationRequest, vectors: Directions, differentiation: Differentiation) -> Derivatives:
    """Builds the gradient by each x of the sum over xs of (d sum(ys · grad_ys) / dx) · vector: reverse over reverse.

    An x without a vector has a vector of zeros.
    """
    gradients = _gradients_along(request, vectors, "vector", differentiation)
    again = request.with_ys([gradient for gradient, _ in gradients], [vector for _, vector in gradients])
    with differentiation.active(DifferentiationStage.AGAIN):
        products = build_gradients(again)
    derivatives = Derivatives()
    for x, product in zip(request.xs, products, strict=True):
        derivatives.add_gradient(x, product)
    return derivatives


def build_gradients(request: DifferentiationRequest, xs: Sequence[NamedTensor] | None = None) -> list[Any]:
    """Builds the gradient by each x (default: the xs of the request): a tensor, slices, or None if not connected.

    They are built in the current graph, which may differ from the graph of the request. Raises INVALID_DERIVATIVE.
    """
    pairs = [(y, upstream) for y, upstream in zip(request.ys, request.upstream, strict=True) if y.is_differentiable]
    values = [x.tensor for x in (request.xs if xs is None else xs)]
    if not pairs:
        return [tf.zeros_like(value) if request.unconnected_is_zero else None for value in values]
    is_zero = request.unconnected_is_zero
    try:
        return tf_private.gradients_from(
            request.graph,
            [y.tensor for y, _ in pairs],
            values,
            [upstream for _, upstream in pairs],
            request.stop_gradients,
            tf.UnconnectedGradients.ZERO if is_zero else tf.UnconnectedGradients.NONE,
        )
    except (ValueError, TypeError, LookupError, NotImplementedError, tf.errors.OpError) as cause:
        raise error(
            errors_pb2.ERROR_REASON_INVALID_DERIVATIVE,
            f"TensorFlow cannot differentiate this: {clean_message(error_message(cause))}",
        ) from cause


def dense(gradient: Any, like: tf.Tensor) -> tf.Tensor:
    """Returns slices as a tensor of the shape of `like`; returns a tensor unchanged."""
    if isinstance(gradient, tf.IndexedSlices) and gradient.dense_shape is None:
        gradient = tf.IndexedSlices(gradient.values, gradient.indices, tf.shape(like, out_type=gradient.indices.dtype))
    value: tf.Tensor = tf.convert_to_tensor(gradient)
    value.set_shape(like.shape)
    return value


def _gradients_along(
    request: DifferentiationRequest, directions: Directions, what: str, differentiation: Differentiation
) -> list[tuple[NamedTensor, tf.Tensor]]:
    """Builds the gradients by the xs that have a direction, to be differentiated again; pairs each with its direction.

    An x without a gradient is left out. `what`: names directions in errors.
    """
    moved = [
        (x, require_same_shape(direction, x.tensor, errors_pb2.ERROR_REASON_FEED_SHAPE, f"{what} of {x.name!r}"))
        for x, direction in zip(request.xs, directions, strict=True)
        if direction is not None
    ]
    before = len(request.graph.get_operations())
    with differentiation.active():
        found = build_gradients(request, [x for x, _ in moved])
        gradients = [
            (NamedTensor(x.name, dense(gradient, x.tensor)), direction)
            for (x, direction), gradient in zip(moved, found, strict=True)
            if gradient is not None
        ]
    tf_private.use_gradrule_gradients(request.graph.get_operations()[before:])
    return gradients
