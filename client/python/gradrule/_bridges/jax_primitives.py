"""Makes the derivatives of programs known to JAX, as primitives.

A primitive has both modes of differentiation, which `jax.custom_vjp` and `jax.custom_jvp` do not have together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gradrule._bridges.program_function import Arrays, ProgramFunction
from gradrule.errors import FeedShapeError, GradruleError, InvalidDerivativeError, UnsupportedError

try:
    # Selects the device that runs a callback of a program for several devices. Not public, so it may be missing.
    from jax._src.callback import _callback_op_sharding as _callback_sharding
except ImportError:
    _callback_sharding = None


class Signature:
    """Which inputs a call gives. One object for each choice, so that JAX compiles once.

    Attributes:
        names: The inputs, in the order of the arguments.
        xs: Positions of the arguments that have gradients.
        ys: Positions of the ys that have gradients.
    """

    def __init__(self, function: ProgramFunction, names: tuple[str, ...]) -> None:
        self.function, self.names = function, names
        floating = [_is_floating(spec.dtype) for spec in function.specs]
        self.ys = [index for index, is_floating in enumerate(floating) if is_floating]
        self.xs = [names.index(x) for x in function.xs if x in names and _is_floating(function.inputs[x].dtype)]
        self._shapes: dict[Any, list[tuple[int, ...]]] = {}

    def feeds(self, arrays: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.names, arrays, strict=True))

    def by_position(self, values: Sequence[Any]) -> dict[str, Any]:
        """Returns one value for each argument with a gradient, by input."""
        return {self.names[position]: value for position, value in zip(self.xs, values, strict=True)}

    def upstream(self, grad_ys: Sequence[Any]) -> list[Any]:
        """Returns one upstream gradient for each y of the program, of JAX's one for each y with a gradient."""
        found = dict(zip(self.ys, map(_conjugated, grad_ys), strict=True))
        return [found.get(index) for index in range(len(self.function.ys))]

    def gradients(self, gradients: Arrays) -> Arrays:
        """Returns JAX's gradients of the arguments that have one, of the program's by each x."""
        found = dict(zip(self.function.xs, map(_conjugated, gradients), strict=True))
        return [found[self.names[position]] for position in self.xs]

    def y_shapes(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Returns the shape of each y for these shapes of the arguments. Asks the server if the program tells none."""
        known = [spec.shape for spec in self.function.specs]
        if all(shape is not None and None not in shape for shape in known):
            return known  # type: ignore[return-value]
        key = tuple(shapes)
        if key not in self._shapes:
            dtypes = [np.dtype(self.function.inputs[name].dtype) for name in self.names]
            zeros = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
            try:
                self._shapes[key] = [np.shape(y) for y in self.function.run(self.feeds(zeros))]
            except GradruleError as cause:
                raise FeedShapeError(
                    f"the program does not tell the shapes of its ys, and a call with zeros, to learn them, failed: "
                    f"{cause.message}"
                ) from cause
        return self._shapes[key]


def _conjugated(value: Any) -> Any:
    """Converts between the gradients of JAX and of TensorFlow, of which one is the other's complex conjugate.

    A small step s changes a real function by Re(sum of g·s) in JAX, and by Re(sum of conj(g)·s) in TensorFlow and
    PyTorch. Tangents, and the vectors of second derivatives, are the same in both.
    """
    return np.conj(value) if np.iscomplexobj(value) else value


def _is_floating(dtype: str) -> bool:
    return dtype != "string" and bool(jnp.issubdtype(np.dtype(dtype), jnp.inexact))


@dataclass(frozen=True)
class _Operation:
    """A function of several lists of arrays: the arguments of a call, then upstream gradients, tangents or vectors.

    Attributes:
        name: Its name in JAX's programs.
        compute: Computes the results of several calls, from the signature and the lists of each call.
        like_ys: Whether there is one result for each y with a gradient (for `evaluate`: each y); otherwise for each
            argument with a gradient.
        counts: The lengths of the lists after the arguments.
    """

    name: str
    compute: Callable[[Signature, list[list[list[Any]]]], list[Arrays]]
    like_ys: bool
    counts: Callable[[Signature], tuple[int, ...]]


def _split(values: Sequence[Any], signature: Signature, operation: _Operation) -> list[list[Any]]:
    lists, start = [], 0
    for count in (len(signature.names), *operation.counts(signature)):
        lists.append(list(values[start : start + count]))
        start += count
    return lists


def _primitive(operation: _Operation) -> Primitive:
    """Makes an operation known to JAX. Each array has `depth` batch axes in front."""
    primitive = Primitive(f"gradrule_{operation.name}")
    primitive.multiple_results = True

    def result_types(avals: Sequence[Any], signature: Signature, depth: int) -> list[jax.ShapeDtypeStruct]:
        batch = avals[0].shape[:depth]
        arguments = avals[: len(signature.names)]
        if operation.like_ys:
            shapes = signature.y_shapes([aval.shape[depth:] for aval in arguments])
            wanted = range(len(shapes)) if operation is _EVALUATE else signature.ys
            dtypes = [np.dtype(spec.dtype) for spec in signature.function.specs]
            return [jax.ShapeDtypeStruct((*batch, *shapes[index]), dtypes[index]) for index in wanted]
        return [jax.ShapeDtypeStruct(arguments[position].shape, arguments[position].dtype) for position in signature.xs]

    def on_host(signature: Signature, depth: int, types: Sequence[Any] | None, values: Sequence[Any]) -> Arrays:
        arrays = [np.asarray(value) for value in values]
        batch = arrays[0].shape[:depth] if arrays else ()
        size = math.prod(batch)
        flat = [array.reshape(size, *array.shape[depth:]) for array in arrays]
        calls = [_split([array[index] for array in flat], signature, operation) for index in range(size)]
        if not calls:
            types = result_types(arrays, signature, depth)
            return [np.zeros(type_.shape, type_.dtype) for type_ in types]
        rows = operation.compute(signature, calls)
        columns = [np.stack([row[index] for row in rows]) for index in range(len(rows[0]))]
        found = [column.reshape((*batch, *column.shape[1:])) for column in columns]
        for type_, array in zip(types or (), found, strict=False):
            if array.shape != type_.shape:
                raise FeedShapeError(
                    f"a result has shape {array.shape}, but {type_.shape} for zeros of the same shapes: jit needs "
                    "shapes that depend on shapes only"
                )
        return found

    def implementation(*values: Any, signature: Signature, depth: int) -> list[jax.Array]:
        return [jnp.asarray(array) for array in on_host(signature, depth, None, values)]

    def callback(*values: Any, signature: Signature, depth: int) -> Any:
        types = result_types(values, signature, depth)
        return jax.pure_callback(lambda *given: on_host(signature, depth, types, given), types, *values)

    lower_callback = mlir.lower_fun(callback, multiple_results=True)

    def lower(context: mlir.LoweringRuleContext, *operands: Any, signature: Signature, depth: int) -> Any:
        # `pure_callback` waits for copies of its arguments, which JAX makes on the threads that run callbacks: if all
        # of them wait, it hangs (jax-ml/jax#24255).
        axes = context.module_context.axis_context
        sharding = None
        if not isinstance(axes, mlir.ShardingContext) or axes.num_devices > 1:
            if _callback_sharding is None:
                return lower_callback(context, *operands, signature=signature, depth=depth)
            sharding = _callback_sharding(axes, None, context.avals_out)
        types = result_types(context.avals_in, signature, depth)
        results, *_ = mlir.emit_python_callback(
            context,
            lambda *given: on_host(signature, depth, types, given),
            None,
            list(operands),
            context.avals_in,
            context.avals_out,
            has_side_effect=False,
            sharding=sharding,
        )
        return results

    def batched(values: Sequence[Any], dims: Sequence[Any], signature: Signature, depth: int) -> tuple[Any, Any]:
        size = next(value.shape[dim] for value, dim in zip(values, dims, strict=True) if dim is not None)
        moved = [
            jnp.broadcast_to(value, (size, *value.shape)) if dim is None else jnp.moveaxis(value, dim, 0)
            for value, dim in zip(values, dims, strict=True)
        ]
        found = primitive.bind(*moved, signature=signature, depth=depth + 1)
        return found, [0] * len(found)

    def abstract(*avals: Any, signature: Signature, depth: int) -> list[Any]:
        types = result_types(avals, signature, depth)
        return [jax.core.ShapedArray(type_.shape, type_.dtype) for type_ in types]

    primitive.def_impl(implementation)
    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, lower)
    return primitive


def _run_all(signature: Signature, calls: list[list[list[Any]]]) -> list[Arrays]:
    function = signature.function
    if len(calls) == 1:
        return [function.run(signature.feeds(calls[0][0]))]
    return function.run_many([signature.feeds(arguments) for arguments, *_ in calls])


def _pull_all(signature: Signature, calls: list[list[list[Any]]]) -> list[Arrays]:
    function = signature.function
    feeds = [signature.feeds(arguments) for arguments, _ in calls]
    upstream = [signature.upstream(grad_ys) for _, grad_ys in calls]
    is_one = len(calls) == 1
    found = [function.pull_back(feeds[0], upstream[0])] if is_one else function.pull_back_many(feeds, upstream)
    return [signature.gradients(gradients) for gradients in found]


def _push_all(signature: Signature, calls: list[list[list[Any]]]) -> list[Arrays]:
    found = [
        signature.function.push_forward(signature.feeds(arguments), signature.by_position(tangents))
        for arguments, tangents in calls
    ]
    return [[np.asarray(products[index]) for index in signature.ys] for products in found]


def _differentiate_pull(signature: Signature, calls: list[list[list[Any]]]) -> list[Arrays]:
    found = [
        signature.function.pull_back_again(
            signature.feeds(arguments), signature.upstream(grad_ys), signature.by_position(vectors)
        )
        for arguments, grad_ys, vectors in calls
    ]
    return [signature.gradients(gradients) for gradients in found]


def _pull_along(signature: Signature, calls: list[list[list[Any]]]) -> list[Arrays]:
    if signature.function.program.overrides:
        raise UnsupportedError(
            "forward mode of a gradient with overrides: use reverse mode for the outer derivative, jax.jacrev or "
            "jax.grad; a rule's gradient need not have a symmetric derivative"
        )
    # Second derivatives are symmetric, so that the derivative along a vector is its pull-back.
    return _differentiate_pull(signature, calls)


def _push_along(signature: Signature, calls: list[list[list[Any]]]) -> list[Arrays]:
    raise UnsupportedError("forward mode of forward mode: use reverse mode for one of them, jax.jacrev or jax.grad")


def _n_xs(signature: Signature) -> int:
    return len(signature.xs)


def _n_ys(signature: Signature) -> int:
    return len(signature.ys)


# With J the Jacobian of the ys by the xs at the arguments a:
_EVALUATE = _Operation("evaluate", _run_all, True, lambda signature: ())
# J · tangents
PUSH = _Operation("push_forward", _push_all, True, lambda s: (_n_xs(s),))
# J transposed · upstream gradients
PULL = _Operation("pull_back", _pull_all, False, lambda s: (_n_ys(s),))
# The gradient by a of the sum of (J transposed · upstream gradients) · vectors
AGAIN = _Operation("pull_back_again", _differentiate_pull, False, lambda s: (_n_ys(s), _n_xs(s)))
# The derivative of J transposed · upstream gradients, by a, along directions
PULL_ALONG = _Operation("pull_back_along", _pull_along, False, lambda s: (_n_ys(s), _n_xs(s)))
# The derivative of J · tangents, by a, along directions
PUSH_ALONG = _Operation("push_forward_along", _push_along, True, lambda s: (_n_xs(s), _n_xs(s)))

EVALUATE, _push, _pull = _primitive(_EVALUATE), _primitive(PUSH), _primitive(PULL)
_again, _pull_along_, _push_along_ = _primitive(AGAIN), _primitive(PULL_ALONG), _primitive(PUSH_ALONG)


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero


def _some(tangents: Sequence[Any]) -> list[Any] | None:
    """Returns tangents with zeros instantiated; None if all are zero."""
    return None if all(map(_is_zero, tangents)) else [ad.instantiate_zeros(tangent) for tangent in tangents]


def _along_xs(signature: Signature, tangents: Sequence[Any]) -> list[Any] | None:
    """Returns the tangents of the arguments with gradients; None if all are zero.

    Raises `InvalidDerivativeError` for a tangent of another argument of a floating type.
    """
    for position, name in enumerate(signature.names):
        if position not in signature.xs and not _is_zero(tangents[position]):
            if tangents[position].dtype == jax.dtypes.float0:
                continue
            raise InvalidDerivativeError(
                f"the input {name!r} is not one of the program's xs, {', '.join(signature.function.xs)}: compile it "
                f"with this x, or give jax.lax.stop_gradient({name})"
            )
    return _some([tangents[position] for position in signature.xs])


def _sum(first: list[Any] | None, second: list[Any] | None) -> list[Any] | None:
    if first is None or second is None:
        return second if first is None else first
    return [a + b for a, b in zip(first, second, strict=True)]


def _zeros(values: Sequence[Any]) -> list[Any]:
    return [ad.Zero(jax.typeof(value).to_tangent_aval()) for value in values]


def _evaluate_jvp(primals: Any, tangents: Any, *, signature: Signature, depth: int) -> tuple[Any, Any]:
    ys = EVALUATE.bind(*primals, signature=signature, depth=depth)
    along = _along_xs(signature, tangents)
    found = _zeros(ys)
    if along is not None:
        pushed = _push.bind(*primals, *along, signature=signature, depth=depth)
        for index, tangent in zip(signature.ys, pushed, strict=True):
            found[index] = tangent
    return ys, found


def _linear_jvp(linear: Primitive, along: Primitive) -> Callable[..., tuple[Any, Any]]:
    """Returns the rule of an operation that is linear in its second list."""

    def rule(primals: Any, tangents: Any, *, signature: Signature, depth: int) -> tuple[Any, Any]:
        count = len(signature.names)
        given, moved = primals[:count], _some(tangents[count:])
        direction = _along_xs(signature, tangents[:count])
        values = linear.bind(*primals, signature=signature, depth=depth)
        total = _sum(
            None if moved is None else linear.bind(*given, *moved, signature=signature, depth=depth),
            None if direction is None else along.bind(*primals, *direction, signature=signature, depth=depth),
        )
        return values, _zeros(values) if total is None else total

    return rule


def _linear_transpose(other: Primitive) -> Callable[..., list[Any]]:
    """Returns the transpose of an operation in its second list: the other operation."""

    def rule(cotangents: Any, *values: Any, signature: Signature, depth: int) -> list[Any]:
        given = values[: len(signature.names)]
        found = other.bind(*given, *map(ad.instantiate_zeros, cotangents), signature=signature, depth=depth)
        return [None] * len(given) + list(found)

    return rule


def _along_transpose(upstream_is_given: bool) -> Callable[..., list[Any]]:
    """Returns the transpose, in the directions, of a derivative by the arguments.

    upstream_is_given: whether the second list has upstream gradients, and not tangents.
    """

    def rule(cotangents: Any, *values: Any, signature: Signature, depth: int) -> list[Any]:
        count = len(signature.names)
        second = values[count : len(values) - len(signature.xs)]
        if any(map(ad.is_undefined_primal, [*values[:count], *second])):
            raise UnsupportedError(_NO_THIRD)
        instantiated = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
        pair = [*second, *instantiated] if upstream_is_given else [*instantiated, *second]
        found = _again.bind(*values[:count], *pair, signature=signature, depth=depth)
        return [None] * (count + len(second)) + list(found)

    return rule


_NO_THIRD = "gradrule gives first and second derivatives, not third ones"


def _no_third(*_: Any, **__: Any) -> Any:
    raise UnsupportedError(_NO_THIRD)


ad.primitive_jvps[EVALUATE] = _evaluate_jvp
ad.primitive_jvps[_push] = _linear_jvp(_push, _push_along_)
ad.primitive_jvps[_pull] = _linear_jvp(_pull, _pull_along_)
ad.primitive_transposes[_push] = _linear_transpose(_pull)
ad.primitive_transposes[_pull] = _linear_transpose(_push)
ad.primitive_transposes[_pull_along_] = _along_transpose(upstream_is_given=True)
ad.primitive_transposes[_push_along_] = _along_transpose(upstream_is_given=False)
for _differentiated in (_again, _pull_along_, _push_along_):
    ad.primitive_jvps[_differentiated] = _no_third
