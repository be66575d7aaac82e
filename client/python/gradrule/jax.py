"""Makes programs differentiable functions of JAX arrays.

    import gradrule as gr
    import gradrule.jax

    program = client.compile(graph, fetches=["loss"], ys=["loss"], xs=["w"], overrides={"Sign": "ste_sign"})
    loss = gradrule.jax.remote(program)
    jax.jit(jax.grad(lambda w: loss(x=x, w=w)))(w)

It needs JAX: `pip install 'gradrule[jax]'`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

try:
    import jax
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("gradrule.jax needs JAX: pip install 'gradrule[jax]'") from missing
import jax.numpy as jnp
import numpy as np

from gradrule._bridges.jax_arrays import JAX
from gradrule._bridges.jax_primitives import EVALUATE, Signature
from gradrule._bridges.local_rules import LocalRule
from gradrule._bridges.program_function import ProgramFunction, RemoteCallable, has_shape
from gradrule._builder.rules import RuleLike
from gradrule._messages.call_arguments import CallParams
from gradrule._messages.feed_values import array_of
from gradrule._rpc.sync_client.programs import Program
from gradrule.common.dtypes import NUMBERS
from gradrule.errors import (
    FeedDtypeError,
    FeedShapeError,
    InvalidOverrideError,
    InvalidTensorError,
    UnsupportedError,
)

__all__ = ["RemoteFunction", "remote", "surrogate"]


def remote(program: Program, *, params: CallParams | None = None, timeout: float | None = None) -> RemoteFunction:
    """Returns a program as a differentiable function of JAX arrays.

    It works under `jit`, `vmap`, `grad`, `jvp`, `vjp`, `jacrev` and `jacfwd`, and in second derivatives whose outer one
    is in reverse mode, such as `grad` of `grad`; `jax.hessian`, whose outer one is in forward mode, works for programs
    without overrides. Under `vmap`, the calls of a batch are sent together, and the server runs them together if the
    program declares batching (docs/design/batching.md). The program's overrides apply. Gradients by complex inputs are
    JAX's, which are the complex conjugates of TensorFlow's and PyTorch's.

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
        UnsupportedError: `program` is not a program of the sync client, it draws random numbers, or
            needs JAX's 64-bit types, which are off.
    """
    return RemoteFunction(ProgramFunction(program, params, timeout))


def surrogate(
    rule: RuleLike, forward: str | Callable[[Any], Any] = "heaviside", **params: Any
) -> Callable[[Any], jax.Array]:
    """Returns an elementwise function with a rule as its gradient, computed by JAX without a server.

    `surrogate("fast_sigmoid", slope=10.0)` is a step whose gradient is that of a fast sigmoid, as spiking networks use;
    `surrogate("ste_sign", "sign")` a sign with a straight-through estimator.

    The numbers of a random rule depend on its seed only: give each surrogate a seed of its own.

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
        InvalidTensorError: Raised by calls: `forward` returns no array of the shape and dtype of x.
        GradruleError: The formula or a param is invalid.
    """
    local = LocalRule(rule, params)
    function = _FORWARD.get(forward) if isinstance(forward, str) else forward
    if not callable(function):
        raise InvalidOverrideError(f"forward is a function, or one of {', '.join(_FORWARD)}; not {forward!r}")

    def run(x: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        y = function(x)
        if jnp.shape(y) != x.shape or jnp.result_type(y) != x.dtype:
            raise InvalidTensorError(
                f"the forward function of a surrogate returns an array like x, {x.dtype} of shape {x.shape}; this one "
                f"returned {jnp.result_type(y)} of shape {jnp.shape(y)}"
            )
        return y, (x, y)

    def pull_back(kept: tuple[Any, Any], dy: Any) -> tuple[jax.Array]:
        x, y = kept
        values = {"x0": x, "y0": y, "dy0": dy}
        if local.uses_default:
            values["default0"] = jax.vjp(function, x)[1](dy)[0]
        return (local.gradient(JAX, str(x.dtype), values),)

    def forward_with_rule(x: Any) -> tuple[Any, tuple[Any, Any]]:
        # The result has the rule as its gradient in second derivatives too. The y in the rule has its own.
        return with_rule(x), run(x)[1]

    # Without the defaults of other arguments, as `jnp.round` has.
    with_rule: Any = jax.custom_vjp(lambda x: run(x)[0])
    with_rule.defvjp(forward_with_rule, pull_back)

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
        self._signatures: dict[tuple[str, ...], Signature] = {}

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
            signature = self._signatures[names] = Signature(function, names)
        ys = EVALUATE.bind(*arrays, signature=signature, depth=0)
        return ys[0] if len(ys) == 1 else dict(zip(function.ys, ys, strict=True))


def _checked(name: str, value: Any, function: ProgramFunction) -> Any:
    spec = function.inputs[name]
    if not hasattr(value, "dtype"):
        value = array_of(value, NUMBERS[spec.dtype], f"the input {name!r}")
    if np.dtype(value.dtype) != np.dtype(spec.dtype):
        raise FeedDtypeError(f"the input {name!r} is {spec.dtype}, not {np.dtype(value.dtype).name}")
    if not has_shape(spec, value.shape):
        raise FeedShapeError(f"the input {name!r} has shape {spec.shape}, not {tuple(value.shape)}")
    return jnp.asarray(value)
