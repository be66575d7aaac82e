"""Makes programs differentiable functions of TensorFlow tensors.

    import gradrule as gr
    import gradrule.tf

    program = client.compile(graph, fetches=["loss"], ys=["loss"], xs=["w"], overrides={"Sign": "ste_sign"})
    loss = gradrule.tf.remote(program)
    with tf.GradientTape() as tape:
        value = loss(x=x, w=w)
    tape.gradient(value, w)

It needs TensorFlow. `gradrule.keras.RemoteLayer` runs part of a Keras model with its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradrule._bridges.program_function import Arrays, ForwardRun, ProgramFunction, RemoteCallable
from gradrule._bridges.tf_functions import listed, run_on_host, without_derivative
from gradrule._messages.call_arguments import CallParams
from gradrule._rpc.sync_client.programs import Program
from gradrule.errors import InvalidDerivativeError

__all__ = ["RemoteFunction", "remote"]

_NO_THIRD = "gradrule gives first and second derivatives, not third ones"


def remote(program: Program, *, params: CallParams | None = None, timeout: float | None = None) -> RemoteFunction:
    """Returns a program as a differentiable function of TensorFlow tensors.

    `tf.GradientTape`, also nested for second derivatives, works with it, eagerly and within `tf.function`, but not
    under XLA. The program's overrides apply.

    Args:
        program: A program of `client.compile`, whose xs are inputs and whose ys are among its fetches.
        params: Values of the rules' params by label, for every call.
        timeout: Seconds for each request; default: that of `connect`.

    Returns:
        The function. Its arguments are the program's inputs, by name or in their order: tensors, variables or values
        with the dtypes and shapes of `program.inputs`. It returns the y as a tensor, or a dict of tensors if there are
        several.

    Raises:
        InvalidDerivativeError: The program has no ys, an x is not an input, or a y is not among its fetches.
        UnsupportedError: `program` is not a program of the sync client.
    """
    return RemoteFunction(ProgramFunction(program, params, timeout))


class RemoteFunction(RemoteCallable):
    """A program as a function of TensorFlow tensors, which `remote` returns."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Runs the program; see `remote`.

        Raises:
            UnknownFeedError: A name is no input of the program, or there are too many arguments.
            MissingFeedError: An input has no value.
            UnsupportedError: The program draws random numbers, within `tf.function`.
            GradruleError: As in `program.evaluate`; within `tf.function`, TensorFlow raises an error of its own with
                the same message.
        """
        function = self._function
        given = function.bind(arguments, named)
        tensors = [tf.convert_to_tensor(value, function.inputs[name].dtype) for name, value in given.items()]
        ys = _evaluated(_Call(function, tuple(given)), tensors)
        return ys[0] if len(ys) == 1 else dict(zip(function.ys, ys, strict=True))


class _Call:
    """The inputs that a call gives, and the forward run for its backward pass."""

    def __init__(self, function: ProgramFunction, names: tuple[str, ...]) -> None:
        self.function, self.names = function, names
        self.y_specs = [tf.TensorSpec(spec.shape, spec.dtype) for spec in function.specs]
        self.run: ForwardRun | None = None
        # An optional input need not be given.
        self._positions = [names.index(x) for x in function.xs if x in names]

    def feeds(self, arrays: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.names, arrays, strict=True))

    def like_xs(self, tensors: Sequence[Any]) -> list[Any]:
        return [tf.TensorSpec(tensors[position].shape, tensors[position].dtype) for position in self._positions]

    def spread(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns gradients of the xs as one for each tensor; None for tensors of types without gradients."""
        found: list[Any] = [None] * len(self.names)
        for position, gradient in zip(self._positions, gradients, strict=True):
            found[position] = gradient
        return found

    def of_given(self, gradients: Arrays) -> Arrays:
        """Returns the gradients by the xs that the call gives, of those by all xs."""
        return [gradient for x, gradient in zip(self.function.xs, gradients, strict=True) if x in self.names]

    def guarded(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the tensors so that a gradient by one that is not among the xs is an error, not a silent None."""
        xs = self.function.xs
        return [
            _without_gradient(name, xs, tensor) if name not in xs and _has_gradients(tensor.dtype) else tensor
            for name, tensor in zip(self.names, tensors, strict=True)
        ]

    def directions(self, values: Sequence[Any]) -> dict[str, Any]:
        named = zip((self.names[position] for position in self._positions), values, strict=True)
        return {name: value for name, value in named if self.function.has_gradient(name)}


def _evaluated(call: _Call, tensors: Sequence[Any]) -> list[Any]:
    """Runs the program: tensors → ys."""
    function, is_eager = call.function, tf.executing_eagerly()
    if not is_eager:
        function.require_repeatable()

    def forward(*arrays: Any) -> Arrays:
        # A node inside tf.function may run several times before the backward pass.
        if is_eager:
            ys, call.run = function.forward(call.feeds(arrays))
            return ys
        return function.run(call.feeds(arrays))

    @tf.custom_gradient
    def evaluate(*given: Any) -> tuple[Any, Callable[..., Any]]:
        ys = run_on_host(forward, given, call.y_specs)

        def backward(*grad_ys: Any) -> list[Any]:
            gradients = call.spread(_pulled_back(call, given, _upstream(ys, grad_ys)))
            # Zeros for the others, so that `guarded` learns of the request.
            return [
                tf.zeros_like(tensor) if gradient is None and _has_gradients(tensor.dtype) else gradient
                for gradient, tensor in zip(gradients, given, strict=True)
            ]

        return ys, backward

    return listed(evaluate(*call.guarded(tensors)))


def _without_gradient(name: str, xs: Sequence[str], tensor: Any) -> Any:
    @tf.custom_gradient
    def identity(value: Any) -> tuple[Any, Callable[..., Any]]:
        def backward(_: Any) -> Any:
            raise InvalidDerivativeError(
                f"the input {name!r} is not one of the program's xs, {', '.join(xs)}: compile it with this x, or give "
                f"tf.stop_gradient({name})"
            )

        return tf.identity(value), backward

    return identity(tensor)


def _once(compute: Callable[..., Arrays], specs: Sequence[Any]) -> Callable[..., list[Any]]:
    return without_derivative(lambda *given: run_on_host(compute, given, specs), _NO_THIRD)


def _pulled_back(call: _Call, tensors: Sequence[Any], grad_ys: Sequence[Any]) -> list[Any]:
    """Pulls upstream gradients back: tensors, grad_ys → the gradient by each x."""
    function, count = call.function, len(tensors)

    def compute(*arrays: Any) -> Arrays:
        if call.run is None:
            function.require_repeatable()
        source = function if call.run is None else call.run
        upstream = _without_integers(function, arrays[count:])
        return call.of_given(source.pull_back(call.feeds(arrays[:count]), upstream))

    @tf.custom_gradient
    def pull_back(*given: Any) -> tuple[Any, Callable[..., Any]]:
        gradients = run_on_host(compute, given, call.like_xs(tensors))

        def again(*vectors: Any) -> list[Any]:
            by_x = _second(call, given[:count], given[count:], vectors)
            return [*call.spread(by_x), *_pushed_forward(call, given[:count], given[count:], vectors)]

        return gradients, again

    return listed(pull_back(*tensors, *grad_ys))


def _second(call: _Call, tensors: Sequence[Any], grad_ys: Sequence[Any], vectors: Sequence[Any]) -> list[Any]:
    """Returns the gradient by each x of the sum of a pull-back times vectors."""
    function, count, ys = call.function, len(tensors), len(grad_ys)

    def compute(*arrays: Any) -> Arrays:
        function.require_repeatable()
        feeds, upstream = call.feeds(arrays[:count]), _without_integers(function, arrays[count : count + ys])
        return call.of_given(function.pull_back_again(feeds, upstream, call.directions(arrays[count + ys :])))

    specs = call.like_xs(tensors)
    return without_derivative(lambda *given: run_on_host(compute, given, specs), _NO_THIRD)(
        *tensors, *grad_ys, *vectors
    )


def _pushed_forward(call: _Call, tensors: Sequence[Any], grad_ys: Sequence[Any], vectors: Sequence[Any]) -> list[Any]:
    """Returns the Jacobian-vector product for each y; None for ys of a type without gradients."""
    count = len(tensors)
    wanted = [index for index, grad_y in enumerate(grad_ys) if _has_gradients(grad_y.dtype)]

    def compute(*arrays: Any) -> Arrays:
        found = call.function.push_forward(call.feeds(arrays[:count]), call.directions(arrays[count:]))
        return [np.asarray(found[index]) for index in wanted]

    specs = [tf.TensorSpec(grad_ys[index].shape, grad_ys[index].dtype) for index in wanted]
    found = (
        without_derivative(lambda *given: run_on_host(compute, given, specs), _NO_THIRD)(*tensors, *vectors)
        if wanted
        else []
    )
    products = dict(zip(wanted, found, strict=True))
    return [products.get(index) for index in range(len(grad_ys))]


def _upstream(ys: Sequence[Any], grad_ys: Sequence[Any]) -> list[Any]:
    return [tf.zeros_like(y) if grad_y is None else grad_y for y, grad_y in zip(ys, grad_ys, strict=True)]


def _without_integers(function: ProgramFunction, grad_ys: Sequence[Any]) -> list[Any]:
    """Returns upstream gradients, None for ys of a type without gradients."""
    return [
        grad_y if _has_gradients(tf.as_dtype(spec.dtype)) else None
        for spec, grad_y in zip(function.specs, grad_ys, strict=True)
    ]


def _has_gradients(dtype: Any) -> bool:
    return bool(dtype.is_floating or dtype.is_complex)
