"""Calls programs as differentiable functions of PyTorch tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gradrule._bridges.program_function import Arrays, ForwardRun, ProgramFunction, RemoteCallable, has_shape
from gradrule._bridges.torch_arrays import array_of, tensor_of
from gradrule._builder.specs import TensorSpec
from gradrule._messages.call_arguments import CallParams
from gradrule._rpc.sync_client.programs import Program
from gradrule.errors import FeedDtypeError, FeedShapeError, InvalidDerivativeError, UnknownFeedError, UnsupportedError


def remote(program: Program, *, params: CallParams | None = None, timeout: float | None = None) -> RemoteFunction:
    """Returns a program as a differentiable function of torch tensors.

    `backward`, `torch.autograd.grad` (with `create_graph` for second derivatives), `torch.func.vjp`, `jvp`, `vmap`,
    `jacrev` and `jacfwd` work with it. The first backward pass continues the forward run that the server has kept, so
    ops that draw random numbers get the gradients of the numbers that were drawn; other derivatives of such programs
    are refused. The server keeps the run until the result is no longer referred to. The program's overrides apply.
    `torch.compile` runs the call between two graphs, so that it does not work with `fullgraph=True`.

    Args:
        program: A program of `client.compile`, whose xs are inputs and whose ys are among its fetches.
        params: Values of the rules' params by label, for every call.
        timeout: Seconds for each request; default: that of `connect`.

    Returns:
        The function. Its arguments are the program's inputs, by name or in their order: tensors of the dtypes and
        shapes of `program.inputs`, on any device, or values that a call of the program takes. It returns the y as a
        tensor, or a dict of tensors if there are several; they are on the device of the first tensor.

    Raises:
        InvalidDerivativeError: The program has no ys, an x is not an input, or a y is not among its fetches.
        UnsupportedError: `program` is not a program of the sync client.
    """
    return RemoteFunction(ProgramFunction(program, params, timeout))


def remote_module(
    program: Program,
    *,
    params: CallParams | None = None,
    timeout: float | None = None,
    **weights: Any,
) -> RemoteModule:
    """Returns a program as a module, some of whose inputs are parameters.

    Args:
        program: As for `remote`.
        params: As for `remote`.
        timeout: As for `remote`.
        **weights: Initial values of the inputs that become parameters: arrays, lists or tensors. Lists get the input's
            dtype.

    Returns:
        A module with a `torch.nn.Parameter` for each of these inputs, named as the input with `_` for `.` and `/`.
        Calls give the other inputs.

    Raises:
        UnknownFeedError: A weight is no input of the program.
        FeedDtypeError: A weight has another dtype than its input.
        FeedShapeError: A weight has another shape than its input.
        GradruleError: As for `remote`.
    """
    return RemoteModule(remote(program, params=params, timeout=timeout), weights)


class RemoteFunction(RemoteCallable):
    """A program as a function of torch tensors, which `remote` returns."""

    @torch.compiler.disable(reason="it calls a server")  # type: ignore[untyped-decorator]
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Runs the program; see `remote`.

        Raises:
            UnknownFeedError: A name is no input of the program, or there are too many arguments.
            MissingFeedError: An input has no value.
            InvalidDerivativeError: A tensor requires a gradient, and its input is not one of the program's xs, or it is
                in a list.
            UnsupportedError: A tensor has no data on a device, or is sparse.
            GradruleError: As in `program.evaluate`; `backward` raises such errors too.
        """
        function = self._function
        given = function.bind(arguments, named)
        names = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
        tensors = [given[name] for name in names]
        constants = {name: _kept(name, value) for name, value in given.items() if name not in names}
        with_gradient = [name for name, tensor in zip(names, tensors, strict=True) if tensor.requires_grad]
        wants_gradient = torch.is_grad_enabled() and bool(with_gradient)
        if wants_gradient and not set(with_gradient) <= set(function.xs):
            other = next(name for name in with_gradient if name not in function.xs)
            raise InvalidDerivativeError(
                f"the input {other!r} requires a gradient and is not one of the program's xs, "
                f"{', '.join(function.xs)}: compile it with this x, or give {other}.detach()"
            )
        call = _Call(function, names, constants, wants_gradient)
        ys = _Forward.apply(call, *tensors)
        return ys[0] if len(ys) == 1 else dict(zip(function.ys, ys, strict=True))


class RemoteModule(torch.nn.Module):
    """A program as a module, which `remote_module` returns."""

    def __init__(self, function: RemoteFunction, weights: Mapping[str, Any]) -> None:
        super().__init__()
        self._remote = function
        inputs = function._function.inputs
        self._parameter_of: dict[str, str] = {}
        for name, value in weights.items():
            name = function._function.input_name(name)
            tensor = _weight(name, value, inputs[name])
            own = self._parameter_of[name] = name.replace(".", "_").replace("/", "_")
            if hasattr(self, own):
                raise UnsupportedError(f"the input {name!r} cannot be the parameter {own!r}: the module has that name")
            has_gradient = function._function.has_gradient(name)
            self.register_parameter(own, torch.nn.Parameter(tensor, requires_grad=has_gradient))

    def extra_repr(self) -> str:
        weights = ", ".join(f"{name}={tuple(parameter.shape)}" for name, parameter in self.named_parameters())
        return f"{self._remote!r}, {weights}"

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Runs the program with the parameters. arguments: the other inputs, in their order or by name."""
        others = [name for name in self._remote._function.inputs if name not in self._parameter_of]
        if len(arguments) > len(others):
            raise UnknownFeedError(f"{len(arguments)} arguments, but the inputs without a parameter are {others}")
        own = {name: getattr(self, attribute) for name, attribute in self._parameter_of.items()}
        given = dict(zip(others, arguments, strict=False))
        twice = [name for name in named if name in given or name in own]
        if twice:
            raise UnknownFeedError(f"the input {twice[0]!r} is given twice, or is a parameter of the module")
        return self._remote(**given, **named, **own)


class _Call:
    """One call of a function: what is not a tensor, and the forward run for the backward pass.

    Attributes:
        names: Inputs given as tensors, in the order of the tensors.
        xs: Positions of the tensors that have gradients, in the order of the function's xs.
        run: The forward run that the server keeps; None if no backward pass was expected.
    """

    def __init__(
        self, function: ProgramFunction, names: Sequence[str], constants: Mapping[str, Any], wants_gradient: bool
    ) -> None:
        self.function, self.names = function, list(names)
        self.wants_gradient = wants_gradient
        self.run: ForwardRun | None = None
        self._constants = constants

    def again(self, tensors: Sequence[torch.Tensor | None]) -> _Call:
        """Returns the same call for other tensors, with a forward run of its own."""
        wants_gradient = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in tensors
        )
        return _Call(self.function, self.names, self._constants, wants_gradient)

    def source(self) -> ForwardRun | ProgramFunction:
        """Returns what pulls back: the kept forward run, or the program, which runs again."""
        if self.run is not None:
            return self.run
        self.function.require_repeatable()
        return self.function

    def feeds(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        return {**self._constants, **{name: array_of(tensor) for name, tensor in zip(self.names, tensors, strict=True)}}

    def by_tensor(self, gradients: Arrays, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Returns gradients of the xs as one for each tensor; None for tensors that are no xs."""
        found = dict(zip(self.function.xs, gradients, strict=True))
        return [
            tensor_of(found[name], tensor).to(tensor.dtype) if name in found else None
            for name, tensor in zip(self.names, tensors, strict=True)
        ]

    def directions(self, given: Sequence[torch.Tensor | None]) -> dict[str, Any]:
        """Returns the directions of the xs, by input, of one direction for each tensor."""
        return {
            name: array_of(direction)
            for name, direction in zip(self.names, given, strict=True)
            if direction is not None and self.function.has_gradient(name)
        }


class _Forward(torch.autograd.Function):
    """Runs the program: (call, tensors) → ys."""

    @staticmethod
    def forward(call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        feeds = call.feeds(tensors)
        if call.wants_gradient:
            ys, call.run = call.function.forward(feeds)
        else:
            ys = call.function.run(feeds)
        like = tensors[0] if tensors else torch.empty(())
        return tuple(tensor_of(y, like) for y in ys)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        call, *tensors = inputs
        ctx.call = call
        ctx.ys = [(y.shape, y.dtype, y.device) for y in output]
        # Tells a tensor without a tangent from one whose tangent is zero.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*(y for y in output if not (y.is_floating_point() or y.is_complex())))

    @staticmethod
    def backward(ctx: Any, *grad_ys: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors
        upstream = [
            (torch.zeros(shape, dtype=dtype, device=device) if grad_y is None else grad_y)
            if dtype.is_floating_point or dtype.is_complex
            else None
            for grad_y, (shape, dtype, device) in zip(grad_ys, ctx.ys, strict=True)
        ]
        return None, *_PullBack.apply(ctx.call, len(tensors), *tensors, *upstream)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        tensors, call = ctx.saved_tensors, ctx.call
        for name, tensor, tangent in zip(call.names, tensors, tangents, strict=True):
            if tangent is not None and tensor.is_floating_point() and name not in call.function.xs:
                raise InvalidDerivativeError(
                    f"the input {name!r} has a tangent and is not one of the program's xs, "
                    f"{', '.join(call.function.xs)}: compile it with this x"
                )
        return tuple(_PushForward.apply(call, len(tensors), *tensors, *tangents))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: _Call, *tensors: torch.Tensor) -> tuple[Any, Any]:
        rows = _rows(info.batch_size, in_dims[1:], tensors)
        if not rows:
            raise UnsupportedError("vmap over no examples: the shapes of the ys are not known")
        if not _are_plain(tensors):
            return _stacked_rows([_Forward.apply(call.again(row), *row) for row in rows])
        results = call.function.run_many([call.feeds(row) for row in rows])
        ys = tuple(tensor_of(np.stack(column), tensors[0]) for column in zip(*results, strict=True))
        return ys, (0,) * len(ys)


class _PullBack(torch.autograd.Function):
    """Pulls upstream gradients back: (call, number of tensors, tensors, grad_ys) → one gradient for each tensor.

    The derivative of the result by the upstream gradients is a Jacobian-vector product, that by the tensors a
    Hessian-vector product.
    """

    @staticmethod
    def forward(call: _Call, count: int, *given: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors, grad_ys = given[:count], _arrays(given[count:])
        feeds = call.feeds(tensors)
        return tuple(call.by_tensor(call.source().pull_back(feeds, grad_ys), tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor | None, ...]) -> None:
        ctx.call, ctx.count, *given = inputs
        ctx.save_for_backward(*given)
        ctx.save_for_forward(*given)

    @staticmethod
    def backward(ctx: Any, *vectors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call, count = ctx.call, ctx.count
        tensors, grad_ys = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        return None, None, *_Again.apply(call, count, *tensors, *grad_ys, *vectors)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(_NO_FORWARD_AGAIN)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], call: _Call, count: int, *given: torch.Tensor
    ) -> tuple[Any, Any]:
        tensors, dims = given[:count], in_dims[2:]
        if not _are_plain(given):
            rows = _rows(info.batch_size, dims, given)
            return _stacked_rows([_PullBack.apply(call, count, *row) for row in rows])
        if call.run is not None and all(dim is None for dim in dims[:count]):
            stacked = [
                None if grad_y is None else _stacked(grad_y, dim, info.batch_size)
                for grad_y, dim in zip(given[count:], dims[count:], strict=True)
            ]
            found = call.by_tensor(call.run.pull_back_stacked(call.feeds(tensors), _arrays(stacked)), tensors)
        else:
            call.function.require_repeatable()
            rows = _rows(info.batch_size, dims, given)
            results = call.function.pull_back_many(
                [call.feeds(row[:count]) for row in rows],
                [_arrays(row[count:]) for row in rows],
            )
            columns = [np.stack(column) for column in zip(*results, strict=True)]
            found = call.by_tensor(columns, tensors)
        return tuple(found), tuple(None if gradient is None else 0 for gradient in found)


class _PushForward(torch.autograd.Function):
    """Pushes tangents forward: (call, number of tensors, tensors, tangents) → one tangent for each y."""

    @staticmethod
    def forward(call: _Call, count: int, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        tensors = given[:count]
        call.function.require_repeatable()
        products = call.function.push_forward(call.feeds(tensors), call.directions(given[count:]))
        return tuple(None if product is None else tensor_of(product, tensors[0]) for product in products)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor | None, ...]) -> None:
        ctx.call, ctx.count, *given = inputs
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, *grad_ys: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call, count = ctx.call, ctx.count
        tensors, tangents = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        by_tensor = _Again.apply(call, count, *tensors, *grad_ys, *tangents)[:count]
        by_tangent = [
            None if tangent is None else gradient
            for tangent, gradient in zip(tangents, _PullBack.apply(call, count, *tensors, *grad_ys), strict=True)
        ]
        return None, None, *by_tensor, *by_tangent

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(_NO_FORWARD_AGAIN)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], call: _Call, count: int, *given: torch.Tensor | None
    ) -> tuple[Any, Any]:
        rows = _rows(info.batch_size, in_dims[2:], given)
        return _stacked_rows([_PushForward.apply(call, count, *row) for row in rows])


class _Again(torch.autograd.Function):
    """Differentiates a pull-back: (call, number of tensors, tensors, grad_ys, vectors) → gradients by both."""

    @staticmethod
    def forward(call: _Call, count: int, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        function = call.function
        function.require_repeatable()
        tensors = [tensor for tensor in given[:count] if tensor is not None]
        grad_ys = given[count : len(given) - count]
        vectors = call.directions(given[len(given) - count :])
        feeds = call.feeds(tensors)
        again = function.pull_back_again(feeds, _arrays(grad_ys), vectors)
        pushed = function.push_forward(feeds, vectors)
        by_y = [None if like is None else tensor_of(y, like) for y, like in zip(pushed, grad_ys, strict=True)]
        return *call.by_tensor(again, tensors), *by_y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor | None, ...]) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> Any:
        raise UnsupportedError(
            "gradrule gives first and second derivatives: not third ones, nor the derivative of a second one by its "
            "vector, which torch.autograd.functional.hvp takes: use torch.autograd.functional.vhp"
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], call: _Call, count: int, *given: torch.Tensor | None
    ) -> tuple[Any, Any]:
        rows = _rows(info.batch_size, in_dims[2:], given)
        return _stacked_rows([_Again.apply(call, count, *row) for row in rows])


_NO_FORWARD_AGAIN = (
    "gradrule has no forward mode of a derivative: use reverse mode for the outer one, torch.func.jacrev or "
    "torch.autograd.grad"
)


def _kept(name: str, value: Any) -> Any:
    """Returns a copy of a value that is no tensor: the backward pass reads it, and the user may change it before."""
    if isinstance(value, list | tuple) and _has_gradients(value):
        raise InvalidDerivativeError(
            f"the input {name!r} is a {type(value).__name__} with tensors that require gradients, which would be lost: "
            "give torch.stack of it"
        )
    return copy.deepcopy(value)


def _has_gradients(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_has_gradients(part) for part in value)
    return isinstance(value, torch.Tensor) and not _are_plain([value])


def _are_plain(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Returns whether nothing differentiates or maps further what is computed of these tensors."""
    return not any(
        tensor is not None
        and (
            torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            or (torch.is_grad_enabled() and tensor.requires_grad)
        )
        for tensor in tensors
    )


def _stacked_rows(rows: Sequence[Sequence[torch.Tensor | None]]) -> tuple[Any, Any]:
    """Returns the results of each entry of a batch stacked, and their batch axes, for `vmap`."""
    columns = [None if column[0] is None else torch.stack(list(column)) for column in zip(*rows, strict=True)]
    return tuple(columns), tuple(None if column is None else 0 for column in columns)


def _rows(
    size: int, dims: Sequence[int | None], tensors: Sequence[torch.Tensor | None]
) -> list[tuple[torch.Tensor | None, ...]]:
    """Returns the arguments of each call of a batch. dims: position of the batch axis; None: not batched."""
    return [
        tuple(
            tensor if dim is None or tensor is None else tensor.select(dim, index)
            for tensor, dim in zip(tensors, dims, strict=True)
        )
        for index in range(size)
    ]


def _stacked(tensor: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """Returns a tensor with its batch axis in front."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _arrays(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    return [None if tensor is None else array_of(tensor) for tensor in tensors]


def _weight(name: str, value: Any, spec: TensorSpec) -> torch.Tensor:
    """Returns the initial value of a parameter, which does not share memory with `value`."""
    dtype = spec.dtype
    if isinstance(value, torch.Tensor):
        tensor = value.detach().clone()
    elif isinstance(value, np.ndarray):
        tensor = tensor_of(value.copy(), torch.empty(()))
    else:
        tensor = tensor_of(np.array(value, np.dtype(dtype)), torch.empty(()))
    if array_of(tensor).dtype != np.dtype(dtype):
        raise FeedDtypeError(f"the weight {name!r} is {array_of(tensor).dtype.name}, but the input is {dtype}")
    if not has_shape(spec, tensor.shape):
        raise FeedShapeError(f"the weight {name!r} has shape {tuple(tensor.shape)}, but the input has {spec.shape}")
    return tensor
