"""Makes programs differentiable functions of JAX arrays.

    import gradrule as gr
    import gradrule.jax

    program = client.compile(graph, fetches=["loss"], ys=["loss"], xs=["w"], overrides={"Sign": "ste_sign"})
    loss = gradrule.jax.remote(program)
    jax.jit(jax.grad(lambda w: loss(x=x, w=w)))(w)

It needs JAX: `pip install 'gradrule[jax]'`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gradrule._bridges.jax_arrays import JAX
from gradrule._bridges.local_rules import LocalRule
from gradrule._bridges.program_function import Arrays, ProgramFunction, RemoteCallable
from gradrule._builder.rules import RuleLike
from gradrule._messages.call_arguments import CallParams
from gradrule._rpc.sync_client.programs import Program
from gradrule.errors import (
    FeedDtypeError,
    FeedShapeError,
    InvalidDerivativeError,
    InvalidOverrideError,
    UnsupportedError,
)

__all__ = ["RemoteFunction", "remote", "surrogate"]


def remote(program: Program, *, params: CallParams | None = None, timeout: float | None = None) -> RemoteFunction:
    """Returns a program as a differentiable function of JAX arrays.

    It works under `jit`, `vmap`, `grad`, `jvp`, `vjp`, `jacrev` and `jacfwd`, and in second derivatives whose outer one
    is in reverse mode, such as `grad` of `grad`; `jax.hessian`, whose outer one is in forward mode, works for programs
    without overrides. Under `vmap`, the calls of a batch are sent together, and the server runs them together if that
    changes no result (docs/design/batching.md). The program's overrides apply.

    Args:
        program: A program of `client.compile`, whose xs are inputs and whose ys are among its fetches. With ys or xs of
            float64, JAX needs `jax_enable_x64`.
        params: Values of the rules' params by label, for every call.
        timeout: Seconds for each request; default: that of `connect`.

    Returns:
        The function. Its arguments are the program's inputs, by name or in their order, with the dtypes and shapes of
        `program.inputs`. It returns the y as an array, or a dict of arrays if there are several. If the program does
        not tell the shape of a y, one call with zeros is sent for each new shape of the inputs, to learn it.

    Raises:
        InvalidDerivativeError: The program has no ys, an x is not an input, or a y is not among its fetches.
        UnsupportedError: `program` is not a program of the sync client, it draws random numbers, or it needs
            JAX's 64-bit types, which are off.
    """
    return RemoteFunction(ProgramFunction(program, params, timeout))


def surrogate(
    rule: RuleLike, forward: str | Callable[[Any], Any] = "heaviside", **params: Any
) -> Callable[[Any], jax.Array]:
    """Returns an elementwise function with a rule as its gradient, computed by JAX without a server.

    `surrogate("fast_sigmoid", slope=10.0)` is a step whose gradient is that of a fast sigmoid, as spiking networks use;
    `surrogate("ste_sign", "sign")` a sign with a straight-through estimator.

    Args:
        rule: The name of an elementwise rule of the catalogue, a formula, or a `gr.Rule`.
        forward: The function itself: "heaviside" (1 where x > 0, otherwise 0), "sign", "round" (halves to even), or a
            function of an array that returns one of the same shape and dtype.
        **params: Values of the rule's params: numbers or arrays.

    Returns:
        A function of an array of a floating type, a `jax.custom_vjp`, which returns an array of the same dtype and
        shape. 16-bit types are computed in float32 and rounded once. It works under `jit`, `vmap` and `grad` of `grad`.

    Raises:
        UnknownRuleError: The catalogue has no such rule.
        UnsupportedError: The rule runs on a server only, as rules for LRP do, which need the op's weights.
        InvalidOverrideError: `forward` is no function, nor the name of one.
        GradruleError: The formula or a param is invalid.
    """
    local = LocalRule(rule, params)
    function = _FORWARD.get(forward) if isinstance(forward, str) else forward
    if not callable(function):
        raise InvalidOverrideError(f"forward is a function, or one of {', '.join(_FORWARD)}; not {forward!r}")

    def run(x: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        y = function(x)
        return y, (x, y)

    def pull_back(kept: tuple[Any, Any], dy: Any) -> tuple[jax.Array]:
        x, y = kept
        values = {"x0": x, "y0": y, "dy0": dy}
        if local.uses_default:
            values["default0"] = jax.vjp(function, x)[1](dy)[0]
        return (local.gradient(JAX, str(x.dtype), values),)

    with_rule: Any = jax.custom_vjp(function)
    with_rule.defvjp(run, pull_back)

    def call(x: Any) -> jax.Array:
        found: jax.Array = with_rule(jnp.asarray(x))
        return found

    return call


_FORWARD: Mapping[str, Callable[[Any], Any]] = {
    "heaviside": lambda x: (x > 0).astype(x.dtype),
    "sign": jnp.sign,
    "round": jnp.round,
}


class RemoteFunction(RemoteCallable):
    """A program as a function of JAX arrays, which `remote` returns."""

    def __init__(self, function: ProgramFunction) -> None:
        for name, spec in [*function.inputs.items(), *zip(function.ys, function.specs, strict=True)]:
            if spec.dtype != "string" and jax.dtypes.canonicalize_dtype(np.dtype(spec.dtype)) != np.dtype(spec.dtype):
                raise UnsupportedError(
                    f"{name!r} is {spec.dtype}, which JAX has only after jax.config.update('jax_enable_x64', True)"
                )
        super().__init__(function)
        function.require_repeatable()
        self._signatures: dict[tuple[str, ...], _Signature] = {}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Runs the program; see `remote`.

        Raises:
            UnknownFeedError: A name is no input of the program, or there are too many arguments.
            MissingFeedError: An input has no value.
            FeedDtypeError: An array has another dtype than its input.
            FeedShapeError: An array has another shape than its input.
            GradruleError: As in `program.evaluate`; under `jit`, JAX raises an error of its own with the same message.
        """
        function = self._function
        given = function.bind(arguments, named)
        arrays = [_checked(name, value, function) for name, value in given.items()]
        names = tuple(given)
        signature = self._signatures.get(names)
        if signature is None:
            signature = self._signatures[names] = _Signature(function, names)
        ys = _evaluate.bind(*arrays, signature=signature, depth=0)
        return ys[0] if len(ys) == 1 else dict(zip(function.ys, ys, strict=True))


def _checked(name: str, value: Any, function: ProgramFunction) -> Any:
    spec = function.inputs[name]
    if not hasattr(value, "dtype"):
        value = np.asarray(value, np.dtype(spec.dtype))
    if np.dtype(value.dtype) != np.dtype(spec.dtype):
        raise FeedDtypeError(f"the input {name!r} is {spec.dtype}, not {np.dtype(value.dtype).name}")
    if spec.shape is not None and (
        len(spec.shape) != len(value.shape)
        or any(size not in (None, found) for size, found in zip(spec.shape, value.shape, strict=True))
    ):
        raise FeedShapeError(f"the input {name!r} has shape {spec.shape}, not {tuple(value.shape)}")
    return jnp.asarray(value)


class _Signature:
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
        """Returns one upstream gradient for each y of the program, of one for each y with a gradient."""
        found = dict(zip(self.ys, grad_ys, strict=True))
        return [found.get(index) for index in range(len(self.function.ys))]

    def gradients(self, gradients: Arrays) -> Arrays:
        """Returns the gradients of the arguments that have one, of those by each x of the program."""
        found = dict(zip(self.function.xs, gradients, strict=True))
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
            self._shapes[key] = [np.shape(y) for y in self.function.run(self.feeds(zeros))]
        return self._shapes[key]


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
    compute: Callable[[_Signature, list[list[list[Any]]]], list[Arrays]]
    like_ys: bool
    counts: Callable[[_Signature], tuple[int, ...]]


def _split(values: Sequence[Any], signature: _Signature, operation: _Operation) -> list[list[Any]]:
    lists, start = [], 0
    for count in (len(signature.names), *operation.counts(signature)):
        lists.append(list(values[start : start + count]))
        start += count
    return lists


def _primitive(operation: _Operation) -> Primitive:
    """Makes an operation known to JAX. Each array has `depth` batch axes in front."""
    primitive = Primitive(f"gradrule_{operation.name}")
    primitive.multiple_results = True

    def result_types(avals: Sequence[Any], signature: _Signature, depth: int) -> list[jax.ShapeDtypeStruct]:
        batch = avals[0].shape[:depth]
        arguments = avals[: len(signature.names)]
        if operation.like_ys:
            shapes = signature.y_shapes([aval.shape[depth:] for aval in arguments])
            wanted = range(len(shapes)) if operation is EVALUATE else signature.ys
            dtypes = [np.dtype(spec.dtype) for spec in signature.function.specs]
            return [jax.ShapeDtypeStruct((*batch, *shapes[index]), dtypes[index]) for index in wanted]
        return [jax.ShapeDtypeStruct(arguments[position].shape, arguments[position].dtype) for position in signature.xs]

    def on_host(signature: _Signature, depth: int, types: Sequence[Any], values: Sequence[Any]) -> Arrays:
        arrays = [np.asarray(value) for value in values]
        batch = arrays[0].shape[:depth] if arrays else ()
        size = math.prod(batch)
        flat = [array.reshape(size, *array.shape[depth:]) for array in arrays]
        calls = [_split([array[index] for array in flat], signature, operation) for index in range(size)]
        rows = operation.compute(signature, calls) if calls else []
        return [
            np.asarray(np.stack([row[index] for row in rows]) if rows else np.empty(0)).reshape(type_.shape)
            for index, type_ in enumerate(types)
        ]

    def implementation(*values: Any, signature: _Signature, depth: int) -> list[jax.Array]:
        types = result_types(values, signature, depth)
        return [jnp.asarray(array) for array in on_host(signature, depth, types, values)]

    def callback(*values: Any, signature: _Signature, depth: int) -> Any:
        types = result_types(values, signature, depth)
        return jax.pure_callback(lambda *given: on_host(signature, depth, types, given), types, *values)

    def batched(values: Sequence[Any], dims: Sequence[Any], signature: _Signature, depth: int) -> tuple[Any, Any]:
        size = next(value.shape[dim] for value, dim in zip(values, dims, strict=True) if dim is not None)
        moved = [
            jnp.broadcast_to(value, (size, *value.shape)) if dim is None else jnp.moveaxis(value, dim, 0)
            for value, dim in zip(values, dims, strict=True)
        ]
        found = primitive.bind(*moved, signature=signature, depth=depth + 1)
        return found, [0] * len(found)

    def abstract(*avals: Any, signature: _Signature, depth: int) -> list[Any]:
        types = result_types(avals, signature, depth)
        return [jax.core.ShapedArray(type_.shape, type_.dtype) for type_ in types]

    primitive.def_impl(implementation)
    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, mlir.lower_fun(callback, multiple_results=True))
    return primitive


def _run_all(signature: _Signature, calls: list[list[list[Any]]]) -> list[Arrays]:
    function = signature.function
    if len(calls) == 1:
        return [function.run(signature.feeds(calls[0][0]))]
    return function.run_many([signature.feeds(arguments) for arguments, *_ in calls])


def _pull_all(signature: _Signature, calls: list[list[list[Any]]]) -> list[Arrays]:
    function = signature.function
    feeds = [signature.feeds(arguments) for arguments, _ in calls]
    upstream = [signature.upstream(grad_ys) for _, grad_ys in calls]
    is_one = len(calls) == 1
    found = [function.pull_back(feeds[0], upstream[0])] if is_one else function.pull_back_many(feeds, upstream)
    return [signature.gradients(gradients) for gradients in found]


def _push_all(signature: _Signature, calls: list[list[list[Any]]]) -> list[Arrays]:
    found = [
        signature.function.push_forward(signature.feeds(arguments), signature.by_position(tangents))
        for arguments, tangents in calls
    ]
    return [[np.asarray(products[index]) for index in signature.ys] for products in found]


def _differentiate_pull(signature: _Signature, calls: list[list[list[Any]]]) -> list[Arrays]:
    found = [
        signature.function.pull_back_again(
            signature.feeds(arguments), signature.upstream(grad_ys), signature.by_position(vectors)
        )
        for arguments, grad_ys, vectors in calls
    ]
    return [signature.gradients(gradients) for gradients in found]


def _pull_along(signature: _Signature, calls: list[list[list[Any]]]) -> list[Arrays]:
    if signature.function.program.overrides:
        raise NotImplementedError(
            "forward mode of a gradient with overrides: use reverse mode for the outer derivative, jax.jacrev or "
            "jax.grad; a rule's gradient need not have a symmetric derivative"
        )
    # Second derivatives are symmetric, so that the derivative along a vector is its pull-back.
    return _differentiate_pull(signature, calls)


def _push_along(signature: _Signature, calls: list[list[list[Any]]]) -> list[Arrays]:
    raise NotImplementedError("forward mode of forward mode: use reverse mode for one of them, jax.jacrev or jax.grad")


def _n_xs(signature: _Signature) -> int:
    return len(signature.xs)


def _n_ys(signature: _Signature) -> int:
    return len(signature.ys)


# With J the Jacobian of the ys by the xs at the arguments a:
EVALUATE = _Operation("evaluate", _run_all, True, lambda signature: ())
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

_evaluate, _push, _pull = _primitive(EVALUATE), _primitive(PUSH), _primitive(PULL)
_again, _pull_along_, _push_along_ = _primitive(AGAIN), _primitive(PULL_ALONG), _primitive(PUSH_ALONG)


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero


def _some(tangents: Sequence[Any]) -> list[Any] | None:
    """Returns tangents with zeros instantiated; None if all are zero."""
    return None if all(map(_is_zero, tangents)) else [ad.instantiate_zeros(tangent) for tangent in tangents]


def _along_xs(signature: _Signature, tangents: Sequence[Any]) -> list[Any] | None:
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


def _evaluate_jvp(primals: Any, tangents: Any, *, signature: _Signature, depth: int) -> tuple[Any, Any]:
    ys = _evaluate.bind(*primals, signature=signature, depth=depth)
    along = _along_xs(signature, tangents)
    found = _zeros(ys)
    if along is not None:
        pushed = _push.bind(*primals, *along, signature=signature, depth=depth)
        for index, tangent in zip(signature.ys, pushed, strict=True):
            found[index] = tangent
    return ys, found


def _linear_jvp(linear: Primitive, along: Primitive) -> Callable[..., tuple[Any, Any]]:
    """Returns the rule of an operation that is linear in its second list."""

    def rule(primals: Any, tangents: Any, *, signature: _Signature, depth: int) -> tuple[Any, Any]:
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

    def rule(cotangents: Any, *values: Any, signature: _Signature, depth: int) -> list[Any]:
        given = values[: len(signature.names)]
        found = other.bind(*given, *map(ad.instantiate_zeros, cotangents), signature=signature, depth=depth)
        return [None] * len(given) + list(found)

    return rule


def _along_transpose(upstream_is_given: bool) -> Callable[..., list[Any]]:
    """Returns the transpose, in the directions, of a derivative by the arguments.

    upstream_is_given: whether the second list has upstream gradients, and not tangents.
    """

    def rule(cotangents: Any, *values: Any, signature: _Signature, depth: int) -> list[Any]:
        count = len(signature.names)
        second = values[count : len(values) - len(signature.xs)]
        if any(map(ad.is_undefined_primal, [*values[:count], *second])):
            raise NotImplementedError(_NO_THIRD)
        instantiated = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
        pair = [*second, *instantiated] if upstream_is_given else [*instantiated, *second]
        found = _again.bind(*values[:count], *pair, signature=signature, depth=depth)
        return [None] * (count + len(second)) + list(found)

    return rule


_NO_THIRD = "gradrule gives first and second derivatives, not third ones"


def _no_third(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(_NO_THIRD)


ad.primitive_jvps[_evaluate] = _evaluate_jvp
ad.primitive_jvps[_push] = _linear_jvp(_push, _push_along_)
ad.primitive_jvps[_pull] = _linear_jvp(_pull, _pull_along_)
ad.primitive_transposes[_push] = _linear_transpose(_pull)
ad.primitive_transposes[_pull] = _linear_transpose(_push)
ad.primitive_transposes[_pull_along_] = _along_transpose(upstream_is_given=True)
ad.primitive_transposes[_push_along_] = _along_transpose(upstream_is_given=False)
for _differentiated in (_again, _pull_along_, _push_along_):
    ad.primitive_jvps[_differentiated] = _no_third
