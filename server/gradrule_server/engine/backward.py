"""Builds the backward part of a program as a separate function, for many upstream gradients at once and for Jacobians.

Many upstream gradients run one after the other, in a loop. `tf.vectorized_map` would not work for the stacks of loops
and for many kernels, and would take the memory of all of them together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.checks import MAX_ANSWER_BYTES, check_ops, require_bytes, require_same
from gradrule_server.engine.derivatives import (
    DENSE,
    NOT_DIFFERENTIABLE,
    SPARSE,
    UNCONNECTED,
    WIDTHS,
    DerivativeLayout,
    Derivatives,
    DifferentiationRequest,
    NamedTensor,
    build_gradients,
    checked_upstream,
    split_tensors,
)
from gradrule_server.engine.differentiation import Differentiation
from gradrule_server.errors import error

Row = Callable[[tf.Tensor], Sequence[tf.Tensor]]
"""Makes, from its number, one upstream gradient for each fed y."""
Part = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""Returns, from the number of a row, the part of one gradient that is kept."""


class Backward:
    """The function from upstream gradients of the ys in `fed` to the gradients by all xs.

    It is built inside the graph of the forward part and captures the tensors that it needs from there, in the order of
    `captures`. `layout`: layout of its gradients. `shapes`: shapes of the fed ys.
    """

    def __init__(self, request: DifferentiationRequest, fed: Sequence[int], differentiation: Differentiation) -> None:
        self.fed = tuple(fed)
        self.ys = request.ys
        self.xs = [(x.name, x.tensor.dtype, x.tensor.shape) for x in request.xs]
        self.layout: DerivativeLayout = []
        # Computed in the forward part, so that the backward part does not keep a y only for its shape.
        self.shapes = [tf.shape(request.ys[index].tensor) for index in fed]

        def pull_back(*grad_ys: tf.Tensor) -> list[tf.Tensor]:
            upstream = list(request.upstream)
            for index, grad_y, shape in zip(self.fed, grad_ys, self.shapes, strict=True):
                upstream[index] = checked_upstream(request.ys[index], grad_y, shape)
            derivatives = Derivatives()
            with differentiation.active():
                gradients = build_gradients(request.with_ys(request.ys, upstream))
            for x, gradient in zip(request.xs, gradients, strict=True):
                derivatives.add_gradient(x, gradient, dense=request.dense)
            self.layout = derivatives.layout
            return derivatives.tensors

        specs = [tf.TensorSpec(request.ys[i].tensor.shape, request.ys[i].tensor.dtype) for i in self.fed]
        self.function: Any = tf.function(pull_back, input_signature=specs, autograph=False).get_concrete_function()

    @property
    def captures(self) -> list[tf.Tensor]:
        """Tensors of the forward part that it needs."""
        return list(self.function.captured_inputs)

    def run_once(self, grad_ys: Sequence[tf.Tensor], captures: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Runs the backward part once; returns the tensors of `layout`."""
        return tf_private.call_with_captures(self.function, grad_ys, captures)

    def run_dense(self, grad_ys: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Runs the backward part once; returns dense gradients by the xs that have one."""
        return self._dense(self.run_once(grad_ys, self.captures))

    def run_stacked(
        self, count: tf.Tensor, row: Row, captures: Sequence[tf.Tensor], part: Part | None = None
    ) -> list[tf.Tensor]:
        """Runs the backward part `count` (int32) times; returns dense gradients by the xs that have one, on axis 0.

        `row` is called once even for a `count` of 0. The first row gives the size of the answer: MESSAGE_TOO_LARGE is
        raised before the others run. `part`: keeps one example of each gradient, and frees the rest after each run.
        """
        xs = [x for x, (_, form) in zip(self.xs, self.layout, strict=True) if WIDTHS[form]]
        steps = tf.maximum(count, 1)
        axes = slice(None) if part is None else slice(1, None)
        arrays = [tf.TensorArray(dtype, steps, element_shape=shape[axes]) for _, dtype, shape in xs]

        def step(index: tf.Tensor, *filled: tf.TensorArray) -> tuple[Any, ...]:
            rows = self._dense(self.run_once(row(index), captures))
            rows = rows if part is None else [part(index, value) for value in rows]
            sizes = [tf.size(value, out_type=tf.int64) * value.dtype.size for value in rows]
            size = tf.cast(count, tf.int64) * tf.add_n(sizes or [tf.constant(0, tf.int64)])
            index = require_bytes(index, size, MAX_ANSWER_BYTES, "all these gradients together")
            return index + 1, *(array.write(index, value) for array, value in zip(filled, rows, strict=True))

        def more(index: tf.Tensor, *_: tf.TensorArray) -> tf.Tensor:
            return index < steps

        _, *filled = tf.while_loop(more, step, (0, *arrays))
        return [array.stack()[:count] for array in filled]

    def _dense(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        found: list[tf.Tensor] = []
        for (_, _, shape), (_, form, parts) in zip(self.xs, split_tensors(self.layout, tensors), strict=True):
            if form == SPARSE:
                value = tf.convert_to_tensor(tf.IndexedSlices(*parts))
                value.set_shape(shape)
                found.append(value)
            else:
                found += parts
        return found


def stacked_layout(layout: DerivativeLayout) -> DerivativeLayout:
    """Returns the layout of stacked gradients, where slices are dense."""
    return [(names, DENSE if form == SPARSE else form) for names, form in layout]


def rows_from(stacks: Sequence[tf.Tensor]) -> Row:
    """Returns a function that gives rows of the stacks, and zeros beyond their end."""

    def row(index: tf.Tensor) -> Sequence[tf.Tensor]:
        return [tf.reduce_sum(stack[index : index + 1], axis=0) for stack in stacks]

    return row


def stacked_vjp(
    request: DifferentiationRequest, stacks: Sequence[tf.Tensor | None], differentiation: Differentiation
) -> Derivatives:
    """Builds gradients for many upstream gradients: `stacks`, one per fed y, have one more axis in front."""
    fed = [index for index, stack in enumerate(stacks) if stack is not None and request.ys[index].is_differentiable]
    backward = Backward(request, fed, differentiation)
    given = [stack for stack in stacks if stack is not None]
    count = tf.shape(given[0])[0]
    row = rows_from([stack for stack in (stacks[index] for index in fed) if stack is not None])
    return Derivatives(stacked_layout(backward.layout), backward.run_stacked(count, row, backward.captures))


def jacobian(
    request: DifferentiationRequest, differentiation: Differentiation, *, batched: bool, mixes_samples: bool = False
) -> Derivatives:
    """Builds for each y and x the Jacobian, of shape (y's shape, x's shape), from the rows of an identity matrix.

    batched: axis 0 of all ys and xs counts examples; the shape is then (examples, rest of y's shape, rest of x's
    shape), and the values are the blocks of the whole Jacobian in which both have the same example. Raises
    INVALID_DERIVATIVE if a y is complex, or if a y and an x have different numbers of examples.

    mixes_samples: As in `ExampleJacobians`.
    """
    derivatives = Derivatives()
    for y in request.ys:
        if y.tensor.dtype.is_complex:
            raise error(
                errors_pb2.ERROR_REASON_INVALID_DERIVATIVE,
                f"y {y.name!r} is {y.tensor.dtype.name}: a complex y has no Jacobian here; ask for its real and "
                f"imaginary parts",
                field="ys",
            )
        _add_jacobians(y, request, differentiation, derivatives, batched=batched, mixes_samples=mixes_samples)
    return derivatives


def _add_jacobians(
    y: NamedTensor,
    request: DifferentiationRequest,
    differentiation: Differentiation,
    derivatives: Derivatives,
    *,
    batched: bool,
    mixes_samples: bool,
) -> None:
    """Adds the Jacobians of one y."""
    if not y.is_differentiable:
        for x in request.xs:
            derivatives.add((y.name, x.name), NOT_DIFFERENTIABLE)
        return
    for value in (y, *(x for x in request.xs if x.is_differentiable)) if batched else ():
        _require_examples(value, y)
    about_y = DifferentiationRequest(
        request.graph, [y], request.xs, [None], request.stop_gradients, unconnected_is_zero=False
    )
    backward = Backward(about_y, [0], differentiation)
    connected = [x for x, (_, form) in zip(request.xs, backward.layout, strict=True) if WIDTHS[form]]
    shape = tf.shape(y.tensor)
    count = tf.reduce_prod(shape[1 if batched else 0 :])
    for x in connected if batched else ():
        where = f"batched Jacobian of {y.name!r} by {x.name!r}: axis 0, which counts the examples of both,"
        reason = errors_pb2.ERROR_REASON_INVALID_DERIVATIVE
        count = require_same(count, tf.shape(x.tensor)[:1], shape[:1], reason, where)
    # Refused before it is computed: a Jacobian is often too large to send.
    sizes = [tf.size(x.tensor, out_type=tf.int64) * x.tensor.dtype.size for x in connected]
    size = tf.cast(count, tf.int64) * tf.add_n(sizes or [tf.constant(0, tf.int64)])
    count = require_bytes(count, size, MAX_ANSWER_BYTES, f"the Jacobian of {y.name!r}")
    if batched:
        found = iter(ExampleJacobians(backward, y.tensor, count, mixes_samples=mixes_samples).stacks())
    else:
        found = iter(backward.run_stacked(count, lambda index: [_unit(index, count, y.tensor)], backward.captures))
    for x, (_, form) in zip(request.xs, backward.layout, strict=True):
        names = (y.name, x.name)
        if WIDTHS[form]:
            derivatives.add(names, DENSE, [tf.reshape(next(found), _jacobian_shape(y, x, batched=batched))])
        elif form == UNCONNECTED and request.unconnected_is_zero:
            zeros = tf.zeros(_jacobian_shape(y, x, batched=batched), x.tensor.dtype)
            derivatives.add(names, DENSE, [zeros])
        else:
            derivatives.add(names, form)


def _unit(index: tf.Tensor, count: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns an upstream gradient of a y with `count` elements that is 1 for one of them."""
    unit = tf.reshape(tf.one_hot(index, count, dtype=y.dtype), tf.shape(y))
    unit.set_shape(y.shape)
    return unit


class ExampleJacobians:
    """Computes the Jacobian of each example, from upstream gradients for all examples together where that is right.

    One run of the backward part for each element of an example of the y gives that row of all Jacobians, if the
    gradient of an example depends on no other example. Two further runs check this: in the first, a random half of the
    examples keeps the upstream gradient of a random row, and the other half gets another, random one; in the second,
    the halves are exchanged. Independent examples have the gradients of their rows, whatever the rules are, also rules
    that are not linear in dy. If one has not, each example is computed by itself, with upstream gradients that are
    zero for all others. So is each example if a rule is known to mix examples: the check could miss a rule that does so
    for some upstream gradients only.

    A dependence between two examples is seen if they are in different halves. So it is certainly seen if each example
    depends on all others, if there are two examples, or if all depend on one; a single pair among many examples that is
    dependent is seen with probability 1/2 or more.

    Args:
        backward: The function from the upstream gradient of the y to the gradients by the xs.
        y: The y.
        count: Number of elements of an example of the y, int32.
        mixes_samples: Whether a rule may compute the gradient of an example from upstream gradients of others.
    """

    def __init__(self, backward: Backward, y: tf.Tensor, count: tf.Tensor, *, mixes_samples: bool) -> None:
        self._backward = backward
        self._mixes_samples = mixes_samples
        self._y = y
        self._count = count
        self._examples = tf.shape(y)[0]

    def stacks(self) -> list[tf.Tensor]:
        """Returns for each connected x a tensor of shape (examples, count, rest of x's shape)."""
        if self._mixes_samples:
            return self._one_by_one()
        backward, count = self._backward, self._count
        stacks = backward.run_stacked(count, lambda row: [self._upstream(self._row(row))], backward.captures)
        if not stacks:
            return stacks
        # A single example depends on no other one.
        is_checked = tf.logical_and(self._examples > 1, count > 0)
        is_right = tf.cond(is_checked, lambda: self._are_independent(stacks), lambda: tf.constant(True))

        def together() -> list[tf.Tensor]:
            return [tf.transpose(stack, tf.concat([[1, 0], tf.range(2, tf.rank(stack))], 0)) for stack in stacks]

        chosen = tf.cond(is_right, together, self._one_by_one)
        return list(chosen) if isinstance(chosen, list | tuple) else [chosen]

    def _row(self, row: tf.Tensor) -> tf.Tensor:
        return tf.one_hot(row, self._count, dtype=self._y.dtype)

    def _upstream(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the upstream gradient that has these rows, or this row for all examples."""
        shape = tf.stack([self._examples, self._count])
        upstream = tf.reshape(tf.broadcast_to(rows, shape), tf.shape(self._y))
        upstream.set_shape(self._y.shape)
        return upstream

    def _one_by_one(self) -> list[tf.Tensor]:
        """Computes rows of the whole Jacobian, and keeps the part of the example that they belong to."""
        total = self._examples * self._count

        def part(index: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
            example = index // tf.maximum(self._count, 1)
            # A sum over at most one example, since there may be none.
            return tf.reduce_sum(gradient[example : example + 1], axis=0)

        stacks = self._backward.run_stacked(
            total, lambda index: [_unit(index, total, self._y)], self._backward.captures, part
        )
        shape = [self._examples, self._count]
        return [tf.reshape(stack, tf.concat([shape, tf.shape(stack)[1:]], 0)) for stack in stacks]

    def _are_independent(self, stacks: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns whether no example depends on another one, as far as two runs with random halves show."""
        half = tf.argsort(tf.random.uniform([self._examples])) < self._examples // 2
        # One row for all examples, whose effects then add up. Each element differs from 0 and 1.
        signs = tf.sign(tf.random.uniform([self._count], -1, 1))
        other = tf.cast(tf.where(signs < 0, -1.0, 1.0) * tf.random.uniform([self._count], 2, 3), self._y.dtype)
        found: list[tf.Tensor] = []
        for kept in (half, tf.logical_not(half)):
            # One run after the other, so that they do not need memory at the same time.
            with tf.control_dependencies(found):
                row = tf.random.uniform([], maxval=tf.maximum(self._count, 1), dtype=tf.int32)
                upstream = self._upstream(tf.where(kept[:, tf.newaxis], self._row(row), other))
            gradients = self._backward.run_dense([upstream])
            found += [_are_equal(gradient, stack[row], kept) for gradient, stack in zip(gradients, stacks, strict=True)]
        return tf.reduce_all(tf.stack(found))


def _are_equal(found: tf.Tensor, wanted: tf.Tensor, compared: tf.Tensor) -> tf.Tensor:
    """Returns whether the examples of `compared` (bool) are equal in two gradients. NaN equals NaN.

    The two are results of the same operations on the same numbers, and equal on a CPU. Kernels of GPUs may add numbers
    in another order, so a difference of four units in the last place of the example's largest gradient is allowed.
    """
    if found.dtype.is_complex:
        found, wanted = (tf.stack([tf.math.real(value), tf.math.imag(value)], -1) for value in (found, wanted))
    rest = tf.range(1, tf.rank(wanted))
    largest = tf.reduce_max(tf.where(tf.math.is_finite(wanted), tf.abs(wanted), 0), rest, keepdims=True)
    unit = ml_dtypes.finfo(found.dtype.as_numpy_dtype).eps  # type: ignore[no-untyped-call]
    allowed = largest * tf.cast(4 * unit, found.dtype)
    both_nan = tf.logical_and(tf.math.is_nan(found), tf.math.is_nan(wanted))
    equal = tf.equal(found, wanted) | both_nan | (tf.abs(found - wanted) <= allowed)
    ignored = tf.logical_not(tf.reshape(compared, tf.concat([tf.shape(compared), tf.ones_like(rest)], 0)))
    return tf.reduce_all(tf.logical_or(equal, ignored))


def _jacobian_shape(y: NamedTensor, x: NamedTensor, *, batched: bool) -> tf.Tensor:
    return tf.concat([tf.shape(y.tensor), tf.shape(x.tensor)[1 if batched else 0 :]], 0)


def _require_examples(value: NamedTensor, y: NamedTensor) -> None:
    """Raises INVALID_DERIVATIVE if axis 0 of a tensor cannot count the same examples as axis 0 of the y."""
    shape, examples = value.tensor.shape, y.tensor.shape
    fits = shape.rank != 0 and (not shape.rank or not examples.rank or shape[:1].is_compatible_with(examples[:1]))
    if not fits:
        raise error(
            errors_pb2.ERROR_REASON_INVALID_DERIVATIVE,
            f"batched Jacobian of {y.name!r}: {value.name!r} has shape {shape}; axis 0 of each y and x counts the "
            f"examples, and all have as many",
            field="xs" if value is not y else "ys",
        )


class TwoPartProgram:
    """Forward and backward part of a vector-Jacobian product as separate functions. Thread-safe.

    The function of the program is the forward part. The tensors that it saves stay on the device; some are TensorLists
    and optionals, and only this object understands them. Params are arguments of the forward part, which saves those
    that the backward part needs.
    """

    def __init__(self, backward: Backward, *, trusted: bool) -> None:
        self._backward = backward
        self._trusted = trusted
        self._pull_backs: dict[bool, Any] = {}
        self._lock = threading.Lock()

    @property
    def layout(self) -> DerivativeLayout:
        """Layout of the tensors of one pull-back: x and form (`derivatives.WIDTHS` tensors each)."""
        return self._backward.layout

    @property
    def stacked_layout(self) -> DerivativeLayout:
        """Layout of the tensors of stacked pull-backs: gradients are dense."""
        return stacked_layout(self._backward.layout)

    def backward(
        self, saved: Sequence[tf.Tensor], grad_ys: Mapping[int, tf.Tensor], *, stacked: bool = False
    ) -> list[tf.Tensor]:
        """Runs the backward part; returns the tensors of `layout`, or of `stacked_layout`.

        grad_ys: upstream gradients by the index of the y, of its type; a y without one gets ones. stacked: all of them
        have one more axis in front, of the same size. Raises INVALID_DERIVATIVE. TensorFlow raises the error of a
        failed check if a shape differs from that of the y (FEED_SHAPE, see `checks.failed_check`).
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
        # The saved tensors start with the shapes of the ys.
        for index, shape in zip(fed, saved, strict=False):
            value = grad_ys.get(index)
            if value is None:
                checked_upstream(ys[index], None)
                value = tf.ones(tf.concat([count, shape], 0), ys[index].tensor.dtype)
            values.append(value)
        # Two threads must not trace the same function.
        with self._lock:
            function = self._pull_backs.get(stacked)
            if function is None:
                function = self._pull_backs[stacked] = self._trace(saved, stacked=stacked)
        return tf_private.call_with_captures(function, [*values, *saved], function.captured_inputs)

    def _trace(self, saved: Sequence[tf.Tensor], *, stacked: bool) -> Any:
        backward, count = self._backward, len(self._backward.fed)

        def pull_back(*arguments: tf.Tensor) -> list[tf.Tensor]:
            values, captures = list(arguments[:count]), arguments[2 * count :]
            if not stacked:
                return backward.run_once(values, captures)
            return backward.run_stacked(tf.shape(values[0])[0], rows_from(values), captures)

        specs = [self._spec(index, stacked=stacked) for index in backward.fed]
        specs += [tf.TensorSpec(None, value.dtype) for value in saved]
        function = tf.function(pull_back, input_signature=specs, autograph=False).get_concrete_function()
        if not self._trusted:
            check_ops(function.graph)
        return function

    def _spec(self, index: int, *, stacked: bool) -> tf.TensorSpec:
        y = self._backward.ys[index].tensor
        return tf.TensorSpec(tf.TensorShape([None]).concatenate(y.shape) if stacked else y.shape, y.dtype)
