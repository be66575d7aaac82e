"""Computes finite differences of a graph's ys with respect to its xs by evaluations on the server."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from gradrule._builder.graph import Graph
from gradrule._builder.graph_sources import GraphLike
from gradrule._builder.names import ByName, bare
from gradrule._builder.notebook_text import names_text, short_repr
from gradrule._comparison.sweep import sent_once
from gradrule._messages import rpc_calls
from gradrule._messages.call_arguments import Feeds, GradYs, ProgramArguments, name_of_tensor
from gradrule._messages.feed_values import tensor_message
from gradrule._messages.request_messages import sent_graph, types_of_graph
from gradrule._results import call_results
from gradrule.common import tensor_codec
from gradrule.common.dtypes import dtype_name, without_ref
from gradrule.common.tensor_codec import Array
from gradrule.errors import GradruleError
from gradrule.v1 import graph_pb2
from gradrule.v1.tensor_pb2 import Dt, Tensor

Steps: TypeAlias = "Generator[rpc_calls.Call[Any], Any, Any]"

MAX_ELEMENTS = 256
DIRECTIONS = 16
_SEED = 0
# Step sizes: about the cube root of the type's epsilon, where rounding and truncation errors are about equal.
_STEPS = {"float64": 1e-5, "float32": 5e-3, "float16": 0.1, "bfloat16": 0.2}
_FORWARD_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FiniteDifferences:
    """Holds central differences of the ys, weighted by their grad_ys, with respect to the xs.

    Attributes:
        gradients: by x, a float64 array of its shape; None if x has more than 256 elements.
        directions: for each of those xs, 16 directions of random signs: an array of shape (16, *shape of x).
        derivatives: for each of those xs, the 16 directional derivatives.
        dtype: element type in which the forward pass ran.
        how: a description of the method.
    """

    gradients: Mapping[str, Array | None]
    directions: Mapping[str, Array]
    derivatives: Mapping[str, Array]
    dtype: str
    how: str

    def __repr__(self) -> str:
        return short_repr(f"<FiniteDifferences of {names_text(self.gradients)}: {self.how}>")

    @property
    def norms(self) -> dict[str, float]:
        """Euclidean norm by x; from directions, an estimate: the root mean square of the derivatives."""
        found = {}
        for x, gradient in self.gradients.items():
            values = self.derivatives[x] if gradient is None else gradient
            scale = len(values) if gradient is None else 1
            found[x] = float(np.linalg.norm(values.ravel()) / np.sqrt(scale))
        return found

    def distance(self, x: str, gradient: Array | None) -> float | None:
        """Returns the norm of a gradient's difference from the finite differences, relative to their norm.

        Args:
            x: Name of the x.
            gradient: An array of the shape of x.

        Returns:
            The relative difference; infinite if the norm of the finite differences is 0; None without a gradient.
        """
        if gradient is None or x not in self.gradients:
            return None
        measured = self.gradients[x]
        if measured is not None:
            return relative(gradient, measured)
        directions = self.directions[x]
        return relative(directions.reshape(len(directions), -1) @ gradient.ravel(), self.derivatives[x])


def relative(value: Array, standard: Array) -> float:
    """Returns the norm of the difference divided by the norm of the standard."""
    distance = float(np.linalg.norm((value - standard).ravel()))
    size = float(np.linalg.norm(standard.ravel()))
    if distance == 0:
        return 0.0
    return distance / size if size else float("inf")


@dataclass
class _Forward:
    """Holds a forward pass: the graph, the feeds, and the ys."""

    graph: GraphLike
    feeds: dict[str, Array]
    ys: Sequence[str]
    dtype: str

    def __post_init__(self) -> None:
        self._source = sent_graph(self.graph)
        # Each call changes one feed; the others are sent once.
        feeds: dict[Any, Any] = {**self.feeds}
        self._sent = sent_once(feeds, self._source)

    def run(self, changed: Mapping[str, Array] | None = None) -> rpc_calls.Call[Any]:
        """Returns the call that evaluates the ys; `changed` replaces feeds."""
        feeds: dict[Any, Any] = {**(self._sent or {}), **(changed or {})}
        return rpc_calls.evaluate(self._source, feeds, None, ProgramArguments(fetches=self.ys))


def measure(
    graph: GraphLike,
    read: Graph,
    feeds: Feeds | None,
    ys: Sequence[str],
    xs: Sequence[str],
    grad_ys: GradYs | None,
    notes: list[str],
) -> Steps:
    """Computes the differences; returns None and adds a note if that is impossible."""
    try:
        return (yield from _measure(graph, read, feeds, ys, xs, grad_ys))
    except GradruleError as refusal:
        notes.append(f"there are no finite differences: {refusal.message}")
    except _NotRepeatableError:
        notes.append("there are no finite differences: the forward gives other values each time")
    return None


class _NotRepeatableError(Exception):
    """Reports that two runs on the same feeds gave different values."""


def _measure(
    graph: GraphLike,
    read: Graph,
    feeds: Feeds | None,
    ys: Sequence[str],
    xs: Sequence[str],
    grad_ys: GradYs | None,
) -> Steps:
    type_of = types_of_graph(read)
    arrays: dict[str, Array] = {}
    for key, value in (feeds or {}).items():
        name = name_of_tensor(key, graph)
        arrays[bare(name)] = call_results.array(tensor_message(value, type_of(name, True), f"feeds[{name!r}]"))
    named = _named_weights(ys, grad_ys, graph)
    # An x inside the graph is fed with its own value, which is fetched first.
    inner = [bare(x) for x in xs if bare(x) not in arrays]
    given: dict[Any, Any] = {**arrays}
    first = yield rpc_calls.evaluate(
        sent_graph(graph), given, None, ProgramArguments(fetches=[*ys, *named.values(), *inner])
    )
    weights = {
        y: np.asarray(first.outputs[named[y]] if y in named else _weight(y, grad_ys, ys, first.outputs[y]), np.float64)
        for y in ys
    }
    arrays.update({x: first.outputs[x] for x in inner})
    forward = yield from _most_precise_forward(graph, read, arrays, ys, first)
    repeated = yield forward.run()
    second = yield forward.run()
    if any(not np.array_equal(repeated.outputs[y], second.outputs[y], equal_nan=True) for y in ys):
        raise _NotRepeatableError
    gradients: ByName[Array | None] = ByName()
    directions: ByName[Array] = ByName()
    derivatives: ByName[Array] = ByName()
    rng = np.random.default_rng(_SEED)
    for x in xs:
        value = forward.feeds[bare(x)]
        if dtype_name(without_ref(read.value_of(x).number)) not in _STEPS:
            continue
        step = _STEPS[_dtype(value)] * max(1.0, float(np.abs(value.astype(np.float64)).max(initial=0.0)))
        if value.size <= MAX_ELEMENTS:
            gradient = np.zeros(value.shape)
            for index in np.ndindex(value.shape):
                unit = np.zeros(value.shape)
                unit[index] = 1.0
                gradient[index] = yield from _derivative(forward, bare(x), unit, step, weights)
            gradients[x] = gradient
            continue
        gradients[x] = None
        directions[x] = rng.choice([-1.0, 1.0], (DIRECTIONS, *value.shape))
        found = []
        for direction in directions[x]:
            found.append((yield from _derivative(forward, bare(x), direction, step, weights)))
        derivatives[x] = np.array(found)
    return FiniteDifferences(gradients, directions, derivatives, forward.dtype, _how(forward, gradients))


def _derivative(
    forward: _Forward, x: str, direction: Array, step: float, weights: Mapping[str, Array]
) -> Generator[rpc_calls.Call[Any], Any, float]:
    """Returns the derivative along a direction, divided by the steps after rounding to the element type."""
    value = forward.feeds[x]
    up, down = ((value + sign * step * direction).astype(value.dtype) for sign in (1, -1))
    taken = (up.astype(np.float64) - down.astype(np.float64))[direction != 0]
    high = yield forward.run({x: up})
    low = yield forward.run({x: down})
    change = 0.0
    for y, weight in weights.items():
        change += float(np.sum((high.outputs[y].astype(np.float64) - low.outputs[y].astype(np.float64)) * weight))
    return change / float(np.mean(np.abs(taken)))


def _most_precise_forward(
    graph: GraphLike, read: Graph, arrays: dict[str, Array], ys: Sequence[str], first: Any
) -> Generator[rpc_calls.Call[Any], Any, _Forward]:
    """Returns the forward pass in float64 if it runs and gives the same ys, else in the graph's own types."""
    own = _Forward(graph, arrays, ys, _narrowest(arrays.values()))
    if own.dtype != "float32":
        return own
    wide_arrays = {
        name: value.astype(np.float64) if _dtype(value) == "float32" else value for name, value in arrays.items()
    }
    wide = _Forward(widened(read), wide_arrays, ys, "float64")
    try:
        answer = yield wide.run()
    except GradruleError:
        # An op does not support float64.
        return own
    for y in ys:
        if not np.allclose(
            answer.outputs[y], first.outputs[y], rtol=_FORWARD_TOLERANCE, atol=_FORWARD_TOLERANCE, equal_nan=True
        ):
            return own
    return wide


def _narrowest(values: Any) -> str:
    found = {_dtype(value) for value in values} & _STEPS.keys()
    return max(found, key=lambda dtype: _STEPS[dtype], default="float64")


def _dtype(value: Array) -> str:
    return str(value.dtype.name)


def _named_weights(ys: Sequence[str], grad_ys: GradYs | None, graph: GraphLike) -> dict[str, str]:
    """Returns the names of the grad_ys that are tensors of the graph, by y."""
    named = {}
    for y in ys:
        value = _given(y, grad_ys, ys, graph)
        if value is not None and (isinstance(value, str) or type(value).__name__ in ("TensorHandle", "Node")):
            named[y] = name_of_tensor(value, graph)
    return named


def _weight(y: str, grad_ys: GradYs | None, ys: Sequence[str], output: Array) -> Any:
    value = _given(y, grad_ys, ys, None)
    return np.ones(output.shape) if value is None else np.asarray(value, np.float64)


def _given(y: str, grad_ys: GradYs | None, ys: Sequence[str], graph: GraphLike | None) -> Any:
    if grad_ys is None:
        return None
    if isinstance(grad_ys, Mapping):
        return next((value for key, value in grad_ys.items() if bare(name_of_tensor(key, graph)) == bare(y)), None)
    return grad_ys[list(ys).index(y)]


def _how(forward: _Forward, gradients: Mapping[str, Array | None]) -> str:
    ways = []
    if any(gradient is not None for gradient in gradients.values()):
        ways.append("along every element")
    many = [bare(x) for x, gradient in gradients.items() if gradient is None]
    if many:
        ways.append(f"along {DIRECTIONS} random directions of {', '.join(many)} (norms are estimates)")
    return f"central differences in {forward.dtype}, {' and '.join(ways) or 'of nothing'}"


def widened(graph: Graph) -> Graph:
    """Returns the graph with float64 for every float32, constants and variables included.

    The result cannot run if one of its ops does not support float64.
    """
    message = graph_pb2.Graph.FromString(graph.to_bytes_without_overrides())
    for node in message.node:
        _widen_node(node)
    for function in message.library.function:
        for argument in (*function.signature.input_arg, *function.signature.output_arg):
            if argument.type == Dt.DT_FLOAT:
                argument.type = Dt.DT_DOUBLE
        for attr in function.attr.values():
            _widen_attr(attr)
        for node in function.node_def:
            _widen_node(node)
    wide = Graph.from_bytes(message.SerializeToString(deterministic=True))
    for name, array in graph.variables.items():
        wide.variables[name] = array.astype(np.float64) if array.dtype == np.float32 else array
    return wide


def _widen_node(node: graph_pb2.Node) -> None:
    for attr in node.attr.values():
        _widen_attr(attr)


def _widen_attr(attr: graph_pb2.AttrValue) -> None:
    match attr.WhichOneof("value"):
        case "type" if attr.type == Dt.DT_FLOAT:
            attr.type = Dt.DT_DOUBLE
        case "tensor":
            _widen_tensor(attr.tensor)
        case "func":
            for inner in attr.func.attr.values():
                _widen_attr(inner)
        case "list":
            for index, number in enumerate(attr.list.type):
                if number == Dt.DT_FLOAT:
                    attr.list.type[index] = Dt.DT_DOUBLE
            for tensor in attr.list.tensor:
                _widen_tensor(tensor)
            for function in attr.list.func:
                for inner in function.attr.values():
                    _widen_attr(inner)


def _widen_tensor(tensor: Tensor) -> None:
    if tensor.dtype == Dt.DT_FLOAT:
        tensor.CopyFrom(tensor_codec.to_message(tensor_codec.to_numpy(tensor).astype(np.float64)))
