"""Calls a program as a function of arrays with derivatives, for the modules of other frameworks."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradrule._bridges.handle_release import release_with, wait_for_releases
from gradrule._builder.names import bare, did_you_mean
from gradrule._builder.specs import TensorSpec
from gradrule._messages import rpc_calls
from gradrule._messages.call_arguments import CallParams
from gradrule._results.call_results import Sparse
from gradrule._rpc.sync_client.forward import ForwardHandle
from gradrule._rpc.sync_client.programs import Program
from gradrule.common.tensor_codec import Array
from gradrule.errors import (
    InvalidDerivativeError,
    MissingFeedError,
    QuotaExceededError,
    UnknownFeedError,
    UnsupportedError,
)

Arrays = list[Array]
Values = Mapping[Any, Any]


class ProgramFunction:
    """A program as a function from its inputs to its ys. Safe to share between threads.

    Attributes:
        inputs: Dtype and shape of each input by name, in the order of positional arguments.
        xs: Names of the inputs that have gradients, in the order of the program's xs.
        ys: Names of the results, in the order of the program's ys.
        specs: Dtype and shape of each y.

    Args:
        program: A program of the sync client, whose xs are inputs and whose ys are among its fetches.
        params: Values of the rules' params by label, for every call.
        timeout: Seconds for each request; default: that of `connect`.

    Raises:
        InvalidDerivativeError: The program has no ys, an x is not an input, or a y is not among its fetches.
        UnsupportedError: `program` is not a program of the sync client.
    """

    def __init__(self, program: Program, params: CallParams | None = None, timeout: float | None = None) -> None:
        if not isinstance(program, Program):
            raise UnsupportedError(
                f"this takes a program, which client.compile returns, not a {type(program).__name__}"
            )
        # Without the groups of the xs: gradients are by x.
        self.program = Program(program._client, program.message)
        # Runs without upstream gradients are forward passes here, so notes about their gradients would be wrong.
        self.program._must_warn = False
        self._must_warn = True
        self._params, self._timeout = params, timeout
        self.inputs: Mapping[str, TensorSpec] = program.inputs
        self._input_of = {self._tensor(name): name for name in self.inputs}
        self._x_names, self._y_names = list(program.xs), list(program.ys)
        if not self._y_names:
            raise InvalidDerivativeError(f"{program.name} has no ys, so it has no gradients: compile it with ys and xs")
        self.specs = list(program.ys.values())
        self.ys = tuple(self._y_names)
        self.xs = tuple(self._input_named_by(x) for x in self._x_names)
        fetched = {self._tensor(name): name for name in program.outputs}
        missing = [y for y in self._y_names if self._tensor(y) not in fetched]
        if missing:
            raise InvalidDerivativeError(
                f"{program.name} does not return its y {missing[0]!r}: compile it with fetches={self._y_names}"
            )
        self._fetches = [fetched[self._tensor(y)] for y in self._y_names]

    def require_repeatable(self) -> None:
        """Raises `UnsupportedError` if a backward pass, which repeats the forward run, would draw other numbers."""
        if not self.program.repeatable:
            raise UnsupportedError(
                f"{self.program.name} draws random numbers, and the backward pass would draw others: feed the numbers, "
                "or use gradrule.torch or eager gradrule.tf, whose backward passes continue the forward run"
            )

    def require_real(self) -> None:
        """Raises `UnsupportedError` for complex inputs and ys, which SciPy and PyTensor do not differentiate by."""
        for name, spec in [*self.inputs.items(), *zip(self.ys, self.specs, strict=True)]:
            if spec.dtype.startswith("complex"):
                raise UnsupportedError(
                    f"{name!r} is {spec.dtype}; gradrule.torch, jax and tf take complex tensors, this module does not"
                )

    def has_gradient(self, name: str) -> bool:
        """Returns whether an input is one of the xs and of a type with gradients."""
        return name in self.xs and has_gradients(self.inputs[name].dtype)

    def bind(self, arguments: Sequence[Any], named: Values) -> dict[str, Any]:
        """Returns the values of a call by input, in the order of the inputs.

        Raises:
            UnknownFeedError: A name is no input, or there are too many arguments.
            MissingFeedError: An input has no value.
        """
        if len(arguments) > len(self.inputs):
            raise UnknownFeedError(
                f"{len(arguments)} arguments, but the program has {len(self.inputs)} inputs: {', '.join(self.inputs)}"
            )
        given = dict(zip(self.inputs, arguments, strict=False))
        for name, value in named.items():
            known = self.input_name(name)
            if known in given:
                raise UnknownFeedError(f"the input {known!r} is given twice")
            given[known] = value
        missing = [name for name, spec in self.inputs.items() if name not in given and not spec.optional]
        if missing:
            raise MissingFeedError(f"no value for the input {missing[0]!r}. Inputs: {', '.join(self.inputs)}")
        return {name: given[name] for name in self.inputs if name in given}

    def input_name(self, name: str) -> str:
        """Returns the name in `inputs` of an input, which may be given by another name. Raises `UnknownFeedError`."""
        known = self._input_of.get(self._tensor(name))
        if known is None:
            raise UnknownFeedError(
                f"{name!r} is no input of the program.{did_you_mean(name, self.inputs)} "
                f"Inputs: {', '.join(self.inputs)}"
            )
        return known

    def run(self, feeds: Values) -> Arrays:
        """Returns the ys."""
        return self._ys_of(self.program.evaluate(feeds, params=self._params, timeout=self._timeout).outputs)

    def run_many(self, feeds: Sequence[Values]) -> list[Arrays]:
        """Returns the ys of several calls, which the server may run together."""
        results = self.program.map(feeds, params=self._params, timeout=self._timeout)
        return [self._ys_of(result.outputs) for result in results]

    def __reduce__(self) -> Any:
        return ProgramFunction, (self.program, self._params, self._timeout)

    def __deepcopy__(self, _: dict[int, Any]) -> ProgramFunction:
        # It does not change, and a copy would need a connection of its own.
        return self

    def forward(self, feeds: Values) -> tuple[Arrays, ForwardRun | None]:
        """Returns the ys and the forward run that the server keeps.

        If the server keeps too many already, and running again gives the same values, it keeps none.
        """
        try:
            handle = self.program.forward(feeds, params=self._params, timeout=self._timeout)
        except QuotaExceededError:
            # Results that only refer to one another hold runs, too.
            gc.collect()
            wait_for_releases()
            try:
                handle = self.program.forward(feeds, params=self._params, timeout=self._timeout)
            except QuotaExceededError:
                if not self.program.repeatable:
                    raise
                return self.run(feeds), None
        return self._ys_of(handle.outputs), ForwardRun(self, handle)

    def value_and_gradients(self, feeds: Values) -> tuple[Arrays, Arrays]:
        """Returns the ys, and the gradients of their sum by each x."""
        self._warn_once()
        result = self.program.evaluate(feeds, params=self._params, timeout=self._timeout)
        return self._ys_of(result.outputs), self._dense(result.gradients, feeds)

    def run_and_pull_back(self, feeds: Values, grad_ys: Sequence[Any]) -> tuple[Arrays, Arrays]:
        """Returns the ys and the gradient by each x.

        grad_ys: One upstream gradient for each y; None for ys that are integers.
        """
        upstream = self._upstream(grad_ys)
        result = self.program.evaluate(feeds, grad_ys=upstream, params=self._params, timeout=self._timeout)
        return self._ys_of(result.outputs), self._dense(result.gradients, feeds)

    def pull_back(self, feeds: Values, grad_ys: Sequence[Any]) -> Arrays:
        """As `run_and_pull_back`, but returns only the gradients."""
        return self.run_and_pull_back(feeds, grad_ys)[1]

    def pull_back_many(self, feeds: Sequence[Values], grad_ys: Sequence[Sequence[Any]]) -> list[Arrays]:
        """Returns the gradients of several calls, which the server may run together."""
        upstream = [self._upstream(one) for one in grad_ys]
        results = self.program.map(feeds, grad_ys=upstream, params=self._params, timeout=self._timeout)
        return [self._dense(result.gradients, one) for result, one in zip(results, feeds, strict=True)]

    def push_forward(self, feeds: Values, tangents: Values) -> list[Array | None]:
        """Returns the Jacobian-vector product for each y, None for ys that are integers.

        tangents: By input; inputs without one are constants.
        """
        named: dict[Any, Any] = {self._x_of(name): tangent for name, tangent in tangents.items()}
        products = self.program.jvp(feeds, named, params=self._params, timeout=self._timeout)
        return [products[y] for y in self._y_names]

    def jacobian(self, feeds: Values) -> list[dict[str, Array | None]]:
        """Returns for each y the Jacobian by each x, by input, of the shape (*shape of y, *shape of x).

        None if y does not depend on x.
        """
        found = self.program.jacobian(feeds, params=self._params, timeout=self._timeout)
        return [{name: found[y][x] for x, name in zip(self._x_names, self.xs, strict=True)} for y in self._y_names]

    def pull_back_again(
        self, feeds: Values, grad_ys: Sequence[Any], vectors: Values, *, every_order: bool = True
    ) -> Arrays:
        """Returns the gradient by each x of the sum of `pull_back(feeds, grad_ys)` times `vectors`, by input.

        every_order: As in `Program.hvp`. Custom gradients of the frameworks apply to every differentiation.
        """
        named: dict[Any, Any] = {self._x_of(name): vector for name, vector in vectors.items()}
        upstream = self._upstream(grad_ys)
        products = self.program.hvp(
            feeds, named, grad_ys=upstream, params=self._params, every_order=every_order, timeout=self._timeout
        )
        return self._dense(products, feeds)

    def _tensor(self, name: str) -> str:
        return bare(self.program.message.aliases.get(name, name))

    def _input_named_by(self, x: str) -> str:
        name = self._input_of.get(self._tensor(x))
        if name is None:
            raise InvalidDerivativeError(
                f"the x {x!r} is no input of the program, so nothing can be given for it. "
                f"Inputs: {', '.join(self.inputs)}"
            )
        return name

    def _x_of(self, name: str) -> str:
        return self._x_names[self.xs.index(name)]

    def _warn_once(self) -> None:
        """Warns of the program's notes, which concern gradients of the sum of the ys."""
        if self._must_warn:
            self._must_warn = False
            rpc_calls.warn_of(self.program.notes)

    def _upstream(self, grad_ys: Sequence[Any]) -> dict[Any, Any]:
        if all(np.size(value) == 1 for value in grad_ys if value is not None):
            # The gradient of numbers is that of their sum, up to factors.
            self._warn_once()
        return {y: value for y, value in zip(self._y_names, grad_ys, strict=True) if value is not None}

    def _ys_of(self, outputs: Mapping[str, Any]) -> Arrays:
        return [outputs[name] for name in self._fetches]

    def _dense(self, gradients: Mapping[str, Any], feeds: Values) -> Arrays:
        return [
            _as_array(gradients[x], feeds.get(name, 0), self.inputs[name])
            for x, name in zip(self._x_names, self.xs, strict=True)
        ]


class RemoteCallable:
    """Base of the functions of each framework."""

    def __init__(self, function: ProgramFunction) -> None:
        self._function = function

    @property
    def program(self) -> Program:
        """The program."""
        return self._function.program

    def __repr__(self) -> str:
        function = self._function
        return (
            f"<{type(self).__name__} ({', '.join(function.inputs)}) -> {', '.join(function.ys)}, {self.program.name!r}>"
        )


class ForwardRun:
    """A forward run whose intermediate values the server keeps until nothing refers to this object."""

    def __init__(self, function: ProgramFunction, handle: ForwardHandle) -> None:
        self._function, self._handle = function, handle
        release_with(self, handle)

    def pull_back(self, feeds: Values, grad_ys: Sequence[Any]) -> Arrays:
        """As `ProgramFunction.pull_back`."""
        function = self._function
        gradients = self._handle.vjp(function._upstream(grad_ys))
        return function._dense(gradients, feeds)

    def pull_back_stacked(self, feeds: Values, grad_ys: Sequence[Any]) -> Arrays:
        """Returns the gradients for several upstream gradients, along an additional first axis."""
        function = self._function
        gradients = self._handle.vjp(function._upstream(grad_ys), stacked_grad_ys=True)
        count = next(len(value) for value in grad_ys if value is not None)
        return [
            np.zeros((count, *np.shape(feeds.get(name, 0))), _dtype(function.inputs[name]))
            if gradients[x] is None
            else _as_array(gradients[x], None, function.inputs[name])
            for x, name in zip(function._x_names, function.xs, strict=True)
        ]


def _as_array(gradient: Any, value: Any, spec: TensorSpec) -> Array:
    """Returns a gradient as an array; zeros of the input's shape if no y depends on the input."""
    if gradient is None:
        return np.zeros(np.shape(value), _dtype(spec))
    dense: Array = gradient.to_dense() if isinstance(gradient, Sparse) else gradient
    return dense


def has_shape(spec: TensorSpec, shape: Sequence[int]) -> bool:
    """Returns whether a shape is one of those that a tensor may have."""
    return spec.shape is None or (
        len(spec.shape) == len(shape)
        and all(size in (None, found) for size, found in zip(spec.shape, shape, strict=True))
    )


def has_gradients(dtype: str) -> bool:
    """Returns whether tensors of a type have gradients."""
    return dtype.startswith(("float", "bfloat", "complex"))


def _dtype(spec: TensorSpec) -> np.dtype[Any]:
    return np.dtype(spec.dtype)
