"""Finite differences of a graph's ys with respect to its xs, taken by evaluations on the server."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from gradrule import _calls, _results
from gradrule._dtypes import base, name_of
from gradrule._graph import Graph
from gradrule._names import bare
from gradrule._requests import Feeds, GradYs, Words, name_of_tensor, tensor_message, types_of_graph
from gradrule._results import ByName
from gradrule._sources import GraphLike
from gradrule._tensors import Array
from gradrule._widen import widened
from gradrule.errors import GradruleError

Steps: TypeAlias = "Generator[_calls.Call[Any], Any, Any]"

MOST_ELEMENTS = 256
DIRECTIONS = 16
_SEED = 0
# The cube root of the spacing of the type's numbers near 1, where rounding and curvature cost about the same.
_STEPS = {"float64": 1e-5, "float32": 5e-3, "float16": 0.1, "bfloat16": 0.2}
_SAME_FORWARD = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class FiniteDifferences:
    """Central differences of the ys, weighted by their grad_ys, with respect to the xs.

    gradients: by x, along every element; None where these are many, and `derivatives` are taken along `directions` of
    random signs instead. dtype: in which the forward was run. how: the same in words.
    """

    gradients: Mapping[str, Array | None]
    directions: Mapping[str, Array]
    derivatives: Mapping[str, Array]
    dtype: str
    how: str

    @property
    def norms(self) -> dict[str, float]:
        """By x. Along directions it is estimated: the mean square of the derivatives is the norm's square."""
        found = {}
        for x, gradient in self.gradients.items():
            values = self.derivatives[x] if gradient is None else gradient
            scale = len(values) if gradient is None else 1
            found[x] = float(np.linalg.norm(values.ravel()) / np.sqrt(scale))
        return found

    def distance(self, x: str, gradient: Array | None) -> float | None:
        """How far a gradient is from the differences, relative to them; None where there is none or no such x."""
        if gradient is None or x not in self.gradients:
            return None
        measured = self.gradients[x]
        if measured is not None:
            return relative(gradient, measured)
        directions = self.directions[x]
        return relative(directions.reshape(len(directions), -1) @ gradient.ravel(), self.derivatives[x])


def relative(value: Array, standard: Array) -> float:
    """Norm of the difference by that of the standard."""
    distance = float(np.linalg.norm((value - standard).ravel()))
    size = float(np.linalg.norm(standard.ravel()))
    if distance == 0:
        return 0.0
    return distance / size if size else float("inf")


@dataclass
class _Forward:
    """The forward as it is run: the graph, what is fed, and the weights of the ys."""

    graph: GraphLike
    feeds: dict[str, Array]
    ys: Sequence[str]
    dtype: str

    def run(self, changed: Mapping[str, Array] | None = None) -> _calls.Call[Any]:
        feeds: dict[Any, Any] = {**self.feeds, **(changed or {})}
        return _calls.evaluate(self.graph, feeds, None, Words(fetches=self.ys))


def measure(
    graph: GraphLike,
    read: Graph,
    feeds: Feeds | None,
    ys: Sequence[str],
    xs: Sequence[str],
    grad_ys: GradYs | None,
    notes: list[str],
) -> Steps:
    """The differences, or None after noting why there are none."""
    try:
        return (yield from _measure(graph, read, feeds, ys, xs, grad_ys))
    except GradruleError as refusal:
        notes.append(f"there are no finite differences: {refusal.message}")
    except _NotRepeatableError:
        notes.append("there are no finite differences: the forward gives other values each time")
    return None


class _NotRepeatableError(Exception):
    """Two runs on the same feeds differ."""


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
        arrays[bare(name)] = _results.array(tensor_message(value, type_of(name, True), f"feeds[{name!r}]"))
    named = _named_weights(ys, grad_ys, graph)
    # An x inside the graph has a value of its own, and is fed with it from here on.
    inner = [bare(x) for x in xs if bare(x) not in arrays]
    given: dict[Any, Any] = {**arrays}
    first = yield _calls.evaluate(graph, given, None, Words(fetches=[*ys, *named.values(), *inner]))
    weights = {
        y: np.asarray(first.outputs[named[y]] if y in named else _weight(y, grad_ys, ys, first.outputs[y]), np.float64)
        for y in ys
    }
    arrays.update({x: first.outputs[x] for x in inner})
    forward = yield from _best_forward(graph, read, arrays, ys, first)
    again = yield forward.run()
    once_more = yield forward.run()
    if any(not np.array_equal(again.outputs[y], once_more.outputs[y], equal_nan=True) for y in ys):
        raise _NotRepeatableError
    gradients: ByName[Array | None] = ByName()
    directions: ByName[Array] = ByName()
    derivatives: ByName[Array] = ByName()
    rng = np.random.default_rng(_SEED)
    for x in xs:
        value = forward.feeds[bare(x)]
        if name_of(base(read.value_of(x).number)) not in _STEPS:
            continue
        step = _STEPS[_dtype(value)] * max(1.0, float(np.abs(value.astype(np.float64)).max(initial=0.0)))
        if value.size <= MOST_ELEMENTS:
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
) -> Generator[_calls.Call[Any], Any, float]:
    """Along a direction, by the steps that the element type could really take."""
    value = forward.feeds[x]
    up, down = ((value + sign * step * direction).astype(value.dtype) for sign in (1, -1))
    taken = (up.astype(np.float64) - down.astype(np.float64))[direction != 0]
    high = yield forward.run({x: up})
    low = yield forward.run({x: down})
    change = 0.0
    for y, weight in weights.items():
        change += float(np.sum((high.outputs[y].astype(np.float64) - low.outputs[y].astype(np.float64)) * weight))
    return change / float(np.mean(np.abs(taken)))


def _best_forward(
    graph: GraphLike, read: Graph, arrays: dict[str, Array], ys: Sequence[str], first: Any
) -> Generator[_calls.Call[Any], Any, _Forward]:
    """In float64 where the graph can be run so and gives the same, else in its own types."""
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
        # An op that has no float64.
        return own
    for y in ys:
        if not np.allclose(answer.outputs[y], first.outputs[y], rtol=_SAME_FORWARD, atol=_SAME_FORWARD, equal_nan=True):
            return own
    return wide


def _narrowest(values: Any) -> str:
    found = {_dtype(value) for value in values} & _STEPS.keys()
    return max(found, key=lambda dtype: _STEPS[dtype], default="float64")


def _dtype(value: Array) -> str:
    return str(value.dtype.name)


def _named_weights(ys: Sequence[str], grad_ys: GradYs | None, graph: GraphLike) -> dict[str, str]:
    """The grad_ys that are tensors of the graph."""
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
