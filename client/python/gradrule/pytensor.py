"""Makes programs functions of PyTensor variables, which PyMC differentiates.

    import gradrule as gr
    import gradrule.pytensor

    program = client.compile(graph, fetches=["logp"], ys=["logp"], xs=["theta"])
    logp = gradrule.pytensor.remote(program)
    with pymc.Model():
        theta = pymc.Flat("theta", shape=3)
        pymc.Potential("likelihood", logp(theta=theta))
        trace = pymc.sample(cores=1)

It needs PyTensor: `pip install 'gradrule[pytensor]'`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

try:
    import pytensor.tensor as pt
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("gradrule.pytensor needs PyTensor: pip install 'gradrule[pytensor]'") from missing
from pytensor.gradient import DisconnectedType, grad_undefined
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.tensor.rewriting.basic import register_specialize

from gradrule._bridges.program_function import ProgramFunction, RemoteCallable, has_gradients
from gradrule._messages.call_arguments import CallParams
from gradrule._messages.feed_values import array_of
from gradrule._rpc.sync_client.programs import Program
from gradrule.common.dtypes import NUMBERS
from gradrule.errors import UnsupportedError

__all__ = ["RemoteFunction", "remote"]


def remote(program: Program, *, params: CallParams | None = None, timeout: float | None = None) -> RemoteFunction:
    """Returns a program as a differentiable function of PyTensor variables.

    `pytensor.grad` and its gradient, and `pytensor.gradient.Rop`, work with it, and so do PyMC's NUTS and Laplace
    approximations. The program's overrides apply. Calls in processes that PyMC forks are refused, because gRPC
    does not work there: sample with `cores=1`, or with `mp_ctx="forkserver"` or `"spawn"`.

    Args:
        program: A program of `client.compile`, whose xs are inputs and whose ys are among its fetches.
        params: Values of the rules' params by label, for every call.
        timeout: Seconds for each request; default: that of `connect`.

    Returns:
        The function. Its arguments are the program's inputs, by name or in their order: variables or values, which are
        cast to the dtypes of `program.inputs`. It returns the y as a variable, or a dict of variables if there are
        several.

    Raises:
        InvalidDerivativeError: The program has no ys, an x is not an input, or a y is not among its fetches.
        UnsupportedError: `program` is not a program of the sync client, it draws random numbers, has complex
            tensors, or does not tell the rank of a y.
    """
    function = ProgramFunction(program, params, timeout)
    function.require_repeatable()
    function.require_real()
    for name, spec in [*function.inputs.items(), *zip(function.ys, function.specs, strict=True)]:
        if spec.dtype not in _DTYPES:
            raise UnsupportedError(f"{name!r} is {spec.dtype}, which PyTensor does not have: add a Cast to the graph")
    for y, spec in zip(function.ys, function.specs, strict=True):
        if spec.shape is None:
            raise UnsupportedError(f"the program does not tell the rank of {y!r}, which PyTensor needs")
    return RemoteFunction(function)


class RemoteFunction(RemoteCallable):
    """A program as a function of PyTensor variables, which `remote` returns."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Returns the variables of the ys; see `remote`.

        Raises:
            UnknownFeedError: A name is no input of the program, or there are too many arguments.
            MissingFeedError: An input has no value.
        """
        function = self._function
        given = function.bind(arguments, named)
        variables = [_variable(name, value, function) for name, value in given.items()]
        ys = _Evaluate(function, tuple(given)).make_node(*variables).outputs
        return ys[0] if len(ys) == 1 else dict(zip(function.ys, ys, strict=True))


class _RemoteOp(Op):
    """Base of the ops: two ops of one remote function with the same inputs are equal, and PyTensor merges them."""

    __props__ = ("_function", "_names")

    def __init__(self, function: ProgramFunction, names: tuple[str, ...]) -> None:
        self._function, self._names = function, names
        self._xs = [x for x in function.xs if x in names and function.has_gradient(x)]

    def _feeds(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self._names, values, strict=False))

    def _spread(self, gradients: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Returns gradients of the xs as one for each input."""
        found = dict(zip(self._xs, gradients, strict=True))
        why = "it is not one of the program's xs, or has integers"
        return [
            found[name] if name in found else grad_undefined(self, index, variable, why)
            for index, (name, variable) in enumerate(zip(self._names, inputs, strict=False))
        ]

    def _of_xs(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns the gradients by the xs of the op, of those by all xs of the program."""
        found = dict(zip(self._function.xs, gradients, strict=True))
        return [found[x] for x in self._xs]

    def _upstream(self, values: Sequence[Any]) -> list[Any]:
        """Returns upstream gradients, None for ys that are integers."""
        return [
            value if has_gradients(spec.dtype) else None
            for spec, value in zip(self._function.specs, values, strict=True)
        ]


class _Evaluate(_RemoteOp):
    """Computes the ys of the inputs."""

    def make_node(self, *inputs: Any) -> Apply:
        return Apply(self, list(inputs), [_type(spec)() for spec in self._function.specs])

    def perform(self, node: Apply, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        for storage, y in zip(outputs, self._function.run(self._feeds(inputs)), strict=True):
            storage[0] = np.asarray(y)

    def L_op(self, inputs: Sequence[Any], outputs: Sequence[Any], output_grads: Sequence[Any]) -> list[Any]:
        upstream = [
            pt.zeros_like(y) if isinstance(grad.type, DisconnectedType) else pt.cast(grad, y.dtype)
            for y, grad in zip(outputs, output_grads, strict=True)
        ]
        gradients = _PullBack(self._function, self._names).make_node(*inputs, *upstream).outputs
        return self._spread(gradients, inputs)

    def R_op(self, inputs: Sequence[Any], eval_points: Sequence[Any]) -> list[Any]:
        tangents = [
            pt.zeros_like(variable) if point is None else pt.cast(point, variable.dtype)
            for variable, point in zip(inputs, eval_points, strict=True)
        ]
        found: list[Any] = _PushForward(self._function, self._names).make_node(*inputs, *tangents).outputs
        return found


class _PullBack(_RemoteOp):
    """Computes the gradient by each x of the inputs and one upstream gradient for each y."""

    def make_node(self, *inputs: Any) -> Apply:
        by_name = dict(zip(self._names, inputs, strict=False))
        return Apply(self, list(inputs), [by_name[x].type() for x in self._xs])

    def perform(self, node: Apply, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        feeds, upstream = self._feeds(inputs), self._upstream(inputs[len(self._names) :])
        found = self._of_xs(self._function.pull_back(feeds, upstream))
        for storage, gradient in zip(outputs, found, strict=True):
            storage[0] = np.asarray(gradient)

    def L_op(self, inputs: Sequence[Any], outputs: Sequence[Any], output_grads: Sequence[Any]) -> list[Any]:
        count = len(self._names)
        vectors = [
            pt.zeros_like(x) if isinstance(grad.type, DisconnectedType) else pt.cast(grad, x.dtype)
            for x, grad in zip(outputs, output_grads, strict=True)
        ]
        again = _PullBackAgain(self._function, self._names).make_node(*inputs, *vectors).outputs
        by_x = dict(zip(self._xs, vectors, strict=True))
        tangents = [by_x.get(name, pt.zeros_like(v)) for name, v in zip(self._names, inputs, strict=False)]
        pushed = _PushForward(self._function, self._names).make_node(*inputs[:count], *tangents).outputs
        by_y = [
            product
            if has_gradients(spec.dtype)
            else grad_undefined(self, count + index, inputs[count + index], "integers")
            for index, (spec, product) in enumerate(zip(self._function.specs, pushed, strict=True))
        ]
        return [*self._spread(again, inputs), *by_y]


class _EvaluateAndPullBack(_RemoteOp):
    """Computes the ys and then the gradients of `_PullBack`, of the same inputs, with one request."""

    def make_node(self, *inputs: Any) -> Apply:
        ys = _Evaluate(self._function, self._names).make_node(*inputs[: len(self._names)])
        gradients = _PullBack(self._function, self._names).make_node(*inputs)
        return Apply(self, list(inputs), [variable.type() for variable in [*ys.outputs, *gradients.outputs]])

    def perform(self, node: Apply, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        feeds, upstream = self._feeds(inputs), self._upstream(inputs[len(self._names) :])
        ys, gradients = self._function.run_and_pull_back(feeds, upstream)
        for storage, value in zip(outputs, [*ys, *self._of_xs(gradients)], strict=True):
            storage[0] = np.asarray(value)


def _merge_requests(fgraph: FunctionGraph, node: Apply) -> dict[Variable, Variable] | None:
    """Replaces the ys and their gradients at the same point, as samplers need them, by one op."""
    op = node.op
    inputs, upstream = node.inputs[: len(op._names)], node.inputs[len(op._names) :]
    # Upstream gradients that are computed could depend on the ys.
    if not all(isinstance(value, Constant) for value in upstream):
        return None
    evaluate = _Evaluate(op._function, op._names)
    users = (user for variable in inputs for user, _ in fgraph.clients[variable] if isinstance(user, Apply))
    found = next((user for user in users if user.op == evaluate and user.inputs == inputs), None)
    if found is None:
        return None
    merged = _EvaluateAndPullBack(op._function, op._names).make_node(*node.inputs)
    return dict(zip([*found.outputs, *node.outputs], merged.outputs, strict=True))


register_specialize(node_rewriter([_PullBack])(_merge_requests))


class _PullBackAgain(_RemoteOp):
    """Computes the gradient by each x of the sum of a pull-back times vectors: inputs, upstream gradients, vectors."""

    def make_node(self, *inputs: Any) -> Apply:
        by_name = dict(zip(self._names, inputs, strict=False))
        return Apply(self, list(inputs), [by_name[x].type() for x in self._xs])

    def perform(self, node: Apply, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        function, count = self._function, len(self._names)
        upstream = self._upstream(inputs[count : count + len(function.ys)])
        directions = dict(zip(self._xs, inputs[count + len(function.ys) :], strict=True))
        found = self._of_xs(function.pull_back_again(self._feeds(inputs), upstream, directions))
        for storage, gradient in zip(outputs, found, strict=True):
            storage[0] = np.asarray(gradient)


class _PushForward(_RemoteOp):
    """Computes Jacobian-vector products of the inputs and one tangent for each input."""

    def make_node(self, *inputs: Any) -> Apply:
        return Apply(self, list(inputs), [_type(spec)() for spec in self._function.specs])

    def perform(self, node: Apply, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        function = self._function
        tangents = dict(zip(self._names, inputs[len(self._names) :], strict=True))
        found = function.push_forward(self._feeds(inputs), {x: tangents[x] for x in self._xs})
        for storage, product, spec, tangent in zip(outputs, found, function.specs, node.outputs, strict=True):
            # Integers have no tangent; PyTensor wants a value nevertheless.
            none = np.zeros((0,) * tangent.type.ndim, spec.dtype)
            storage[0] = none if product is None else np.asarray(product)


# Element types of PyTensor's tensors, as NumPy names them.
_DTYPES = frozenset(
    [
        "bool",
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
        "float16",
        "float32",
        "float64",
    ]
)


def _variable(name: str, value: Any, function: ProgramFunction) -> Any:
    dtype = function.inputs[name].dtype
    if isinstance(value, Variable):
        return pt.cast(value, dtype)
    return pt.as_tensor_variable(array_of(value, NUMBERS[dtype], f"the input {name!r}"))


def _type(spec: Any) -> Any:
    return pt.TensorType(spec.dtype, shape=spec.shape)
