"""Runs an expanded graph with resolved overrides, one op after the other, and differentiates it on a tape.

`Exploration` runs all branches and some turns of each loop instead of those that the values choose: it tells which
matches are on a path from the ys to the xs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradrule.v1.tensor_pb2 import Dt
from tests.generated import tape
from tests.generated.expanded import FLOATS, Body, Call, Expanded, Node, Ref
from tests.generated.requests import Request
from tests.generated.resolution import Resolution, Unit
from tests.generated.rules import DEFAULT, Site
from tests.generated.tape import Array, Gradients, Pass, Record, Value, cast, constant, where, zeros_like

NUMPY: Mapping[int, Any] = {
    Dt.DT_DOUBLE: np.float64,
    Dt.DT_FLOAT: np.float32,
    Dt.DT_INT32: np.int32,
    Dt.DT_BOOL: np.bool_,
}

OwnGradient = Callable[[Sequence[Value], Sequence[Value], Any], Sequence[Value | None]]
"""From inputs, outputs and upstream gradients to gradients of the inputs."""


def _relu_gradient(xs: Sequence[Value], ys: Sequence[Value], dys: Any) -> Sequence[Value | None]:
    return [where(ys[0].data > 0, dys[0], zeros_like(ys[0]))]


def _maximum_gradient(xs: Sequence[Value], ys: Sequence[Value], dys: Any) -> Sequence[Value | None]:
    first, zeros = xs[0].data >= xs[1].data, zeros_like(ys[0])
    return [where(first, dys[0], zeros), where(first, zeros, dys[0])]


def _none(xs: Sequence[Value], ys: Sequence[Value], dys: Any) -> Sequence[Value | None]:
    return [None] * len(xs)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


OPS: Mapping[str, tuple[Callable[..., Any], OwnGradient]] = {
    "Tanh": (np.tanh, lambda xs, ys, dys: [dys[0] * (1 - ys[0] * ys[0])]),
    "Sigmoid": (_sigmoid, lambda xs, ys, dys: [dys[0] * ys[0] * (1 - ys[0])]),
    "Relu": (lambda x: np.maximum(x, 0), _relu_gradient),
    "Sin": (np.sin, lambda xs, ys, dys: [dys[0] * tape.cos(xs[0])]),
    "Square": (np.square, lambda xs, ys, dys: [dys[0] * (2 * xs[0])]),
    "Neg": (np.negative, lambda xs, ys, dys: [-dys[0]]),
    "Abs": (np.abs, lambda xs, ys, dys: [dys[0] * tape.sign(xs[0])]),
    "Sign": (np.sign, lambda xs, ys, dys: [zeros_like(xs[0])]),
    "Floor": (np.floor, _none),
    "Identity": (np.array, lambda xs, ys, dys: [dys[0]]),
    "StopGradient": (np.array, _none),
    "AddV2": (np.add, lambda xs, ys, dys: [dys[0], dys[0]]),
    "Sub": (np.subtract, lambda xs, ys, dys: [dys[0], -dys[0]]),
    "Mul": (np.multiply, lambda xs, ys, dys: [dys[0] * xs[1], dys[0] * xs[0]]),
    "Maximum": (np.maximum, _maximum_gradient),
    "MatMul": (
        np.matmul,
        lambda xs, ys, dys: [
            tape.matmul(dys[0], tape.transpose(xs[1])),
            tape.matmul(tape.transpose(xs[0]), dys[0]),
        ],
    ),
    "BiasAdd": (np.add, lambda xs, ys, dys: [dys[0], tape.total(dys[0], 0)]),
    "Greater": (np.greater, _none),
    "Less": (np.less, _none),
    "LogicalAnd": (np.logical_and, _none),
    "IdentityN": (lambda *xs: xs, lambda xs, ys, dys: dys),
}
LOOP_TURNS = 4


@dataclass
class _Frame:
    """One run of a body."""

    body: Body
    args: Sequence[Value]
    nodes: dict[int, Sequence[Value]] = field(default_factory=dict)
    units: dict[Unit, Sequence[Value]] = field(default_factory=dict)
    constants: dict[Ref, Value] = field(default_factory=dict)


class Interpreter:
    """Computes the values of one request, on a tape."""

    def __init__(self, graph: Expanded, resolution: Resolution, request: Request) -> None:
        self._graph = graph
        self._feeds = request.feeds
        self._stopped = {graph.tensors(name)[0][1] for name in request.stopped}
        self._node_units = {unit.item: unit for unit in resolution.units if unit.is_node}
        self._units: dict[int, list[Unit]] = {}
        for unit in sorted([*resolution.units, *_unmatched_calls(graph, resolution, request)], key=_from_inside):
            if not unit.is_node:
                self._units.setdefault(id(unit.body), []).append(unit)
        self._top = _Frame(graph.top, ())
        self.wrong_arity: set[int] = set()

    def value(self, name: str) -> Value:
        """A tensor of the top level."""
        return self._view(self._top, self._graph.tensors(name)[0][1], None)

    def _visit(self, record: Record) -> bool:
        """Whether gradients pass through a record."""
        return True

    def gradients(self, ys: Sequence[Value], upstream: Gradients, xs: Sequence[Value], stage: Pass) -> Gradients:
        return tape.gradients(ys, upstream, xs, stage, visit=self._visit)

    def _partial(self, ys: Sequence[Value], upstream: Gradients, xs: Sequence[Value], stage: Pass) -> Gradients:
        return tape.gradients(ys, upstream, xs, stage, partial=True, visit=self._visit)

    def _view(self, frame: _Frame, ref: Ref, consumer: int | None, within: Unit | None = None) -> Value:
        """A tensor as a consumer sees it: behind the units that end with it and do not hold the consumer."""
        value = self._node(frame, ref[0])[ref[1]]
        for unit in self._units.get(id(frame.body), ()):
            if unit is within:
                break
            if ref in unit.outputs and consumer not in unit.members:
                value = self._unit(frame, unit)[unit.outputs.index(ref)]
        if frame is self._top and ref in self._stopped and consumer is not None:
            if ref not in frame.constants:
                frame.constants[ref] = self._blocked(value)
            return frame.constants[ref]
        return value

    def _blocked(self, value: Value) -> Value:
        return constant(value)

    def _unit(self, frame: _Frame, unit: Unit) -> Sequence[Value]:
        if unit not in frame.units:
            member = min(unit.members)
            xs = [self._view(frame, ref, member) for ref in unit.inputs]
            raw = [self._view(frame, ref, None, within=unit) for ref in unit.outputs]

            def own(dys: Gradients, stage: Pass) -> Gradients:
                return self._partial(raw, dys, xs, stage)

            # A call without a match, which the xs name, has a tensor of its own and nothing else.
            if unit.rule.is_default and (self._fine or unit.override < 0):
                frame.units[unit] = [self._passed(unit, value) for value in raw]
                return frame.units[unit]
            record = Record(xs, own, origin=unit, every_order=unit.every_order, through=raw)
            if not unit.rule.is_default:
                record.rule = self._rule(unit, record)
            frame.units[unit] = [record.give(value.data) for value in raw]
        return frame.units[unit]

    def _passed(self, unit: Unit, value: Value) -> Value:
        """An output, by itself, of a unit that keeps its own gradient: others may depend on the xs and it may not."""
        return Record([value], lambda dys, stage: [dys[0]], origin=unit).give(value.data)

    def _rule(self, unit: Unit, record: Record) -> tape.Pull:
        def rule(upstream: Gradients, stage: Pass) -> Gradients:
            if unit.rule.arity == "none":
                self.wrong_arity.add(unit.override)
                return [None] * len(record.inputs)
            dys = [zeros_like(y) if dy is None else dy for y, dy in zip(record.outputs, upstream, strict=True)]
            xs = list(record.inputs)
            if unit.is_step:
                xs = [xs[0] - xs[1]]

            def own() -> list[Value]:
                if unit.is_step:
                    return [zeros_like(xs[0])]
                found = record.own(list(dys), stage)
                return [zeros_like(x) if dx is None else dx for x, dx in zip(xs, found, strict=True)]

            gradients = unit.rule.python(Site(xs, record.outputs, dys, own, unit.params))
            if unit.is_step and gradients[0] is not None:
                dx = gradients[0]
                return [tape.sum_to(dx, record.inputs[0]), tape.sum_to(-dx, record.inputs[1])]
            return gradients

        return rule

    def _node(self, frame: _Frame, index: int) -> Sequence[Value]:
        if index not in frame.nodes:
            node = frame.body.nodes[index]
            if index < frame.body.arguments:
                frame.nodes[index] = [frame.args[index]]
            else:
                inputs = [self._view(frame, ref, index) for ref in node.inputs]
                frame.nodes[index] = self._container(node, inputs) if node.bodies else self._op(node, inputs)
        return frame.nodes[index]

    def _op(self, node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
        if node.op == "Placeholder":
            return [Value(np.asarray(self._feeds[node.name]))]
        if node.op == "Const":
            return [Value(_array(node.attrs["value"].tensor))]
        unit = self._node_units.get(node)
        has_rule = unit is not None and not unit.rule.is_default
        record = Record(inputs, lambda dys, stage: (), origin=unit, blocks=node.op == "StopGradient" and not has_rule)
        if node.op == "Cast":
            dtype = NUMPY[node.dtypes[0]]
            results: list[Any] = [inputs[0].data.astype(dtype)]
            record.own = lambda dys, stage: [_cast_back(dys[0], inputs[0])]
        else:
            compute, own = OPS[node.op]
            computed = compute(*[value.data for value in inputs])
            results = list(computed) if isinstance(computed, tuple) else [computed]
            record.own = lambda dys, stage: own(inputs, record.outputs, dys)
        if unit is not None and not unit.rule.is_default:
            record.every_order = unit.every_order
            record.rule = self._rule(unit, record)
        return [record.give(result) for result in results]

    def _container(self, node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
        """A loop or branch: what comes out is what its bodies give, unless it has a rule as a whole."""
        runs = self._runs(node, inputs)
        unit = self._node_units.get(node)
        flat = [value for results in runs for value in results]
        record = Record(flat, lambda dys, stage: list(dys) * len(runs), origin=unit, fills=self._fills)
        self._widen(record, inputs)
        if unit is not None and not unit.rule.is_default:
            record.inputs, record.through = inputs, runs[0]
            record.own = lambda dys, stage: self._partial(flat, list(dys) * len(runs), inputs, stage)
            record.every_order = unit.every_order
            record.rule = self._rule(unit, record)
        return [record.give(value.data) for value in runs[0]]

    _fills = True
    _fine = False

    def _widen(self, record: Record, inputs: Sequence[Value]) -> None:
        """For explorations: lets all of a loop's or branch's outputs depend on all of its inputs."""

    def _runs(self, node: Node, inputs: Sequence[Value]) -> list[Sequence[Value]]:
        """The results of the bodies that run; one list, unless all branches are explored."""
        if not node.is_loop:
            count = len(node.bodies)
            index = int(inputs[0].data)
            if node.op == "StatelessIf":
                index = 0 if index else 1
            chosen = node.bodies[index if 0 <= index < count else count - 1]
            return [self._run(chosen, inputs[1:])]
        states, turns = inputs, 0
        while self._goes_on(node, states):
            states, turns = self._run(node.bodies[1], states), turns + 1
            if turns > LOOP_TURNS:
                raise ValueError("the loop does not end")
        return [states]

    def _goes_on(self, node: Node, states: Sequence[Value]) -> bool:
        return bool(self._run(node.bodies[0], states)[0].data)

    def _run(self, body: Body, args: Sequence[Value]) -> Sequence[Value]:
        frame = _Frame(body, args)
        return [self._view(frame, ref, None) for ref in body.results]


class Exploration(Interpreter):
    """Finds the units that gradients reach, whatever the values.

    fine: dependence is followed tensor by tensor. Otherwise all outputs of a loop or branch that gets a gradient have
    one, and all its inputs count as depending on the xs: what TensorFlow asks for at most.
    """

    def __init__(self, graph: Expanded, resolution: Resolution, request: Request, *, fine: bool) -> None:
        super().__init__(graph, resolution, request)
        self._fine, self._fills = fine, not fine
        self.reached: set[Unit] = set()
        self._reaches: dict[int, bool] = {}
        self._xs: set[int] = set()
        with np.errstate(all="ignore"):
            xs, ys = ([self.value(name) for name in names] for names in (request.xs, request.ys))
            self._xs.update(map(id, xs))
            self.gradients(ys, [Value(np.ones_like(y.data)) if y.is_float else None for y in ys], xs, Pass.FIRST)

    def _widen(self, record: Record, inputs: Sequence[Value]) -> None:
        if self._fine:
            return
        flat = list(record.inputs)
        record.sources = inputs
        record.inputs = [*flat, *inputs]
        own = record.own
        record.own = lambda dys, stage: [*own(dys, stage), *(zeros_like(x) if x.is_float else None for x in inputs)]

    def _partial(self, ys: Sequence[Value], upstream: Gradients, xs: Sequence[Value], stage: Pass) -> Gradients:
        if self._fine:
            return super()._partial(ys, upstream, xs, stage)
        # Own gradients of a unit are asked by all of its inputs, whether these depend on the xs or not.
        kept = self._xs, self._reaches
        self._xs, self._reaches = self._xs | {id(x) for x in xs}, {}
        try:
            return super()._partial(ys, upstream, xs, stage)
        finally:
            self._xs, self._reaches = kept

    def _blocked(self, value: Value) -> Value:
        record = Record([value], lambda dys, stage: [None], blocks=True)
        return record.give(value.data)

    def _visit(self, record: Record) -> bool:
        if not any(self._depends(value) for value in record.sources or record.inputs):
            return False
        # Of a StopGradient that keeps its own gradient, no gradient passes.
        if record.origin is not None and not record.blocks:
            self.reached.add(record.origin)
        return True

    def _depends(self, value: Value) -> bool:
        record = value.record
        if id(value) in self._xs or record is None or not value.is_float:
            return id(value) in self._xs
        if record.serial not in self._reaches:
            blocked = self._fine and record.blocks
            entered = record.enters and not self._fine
            self._reaches[record.serial] = entered or (
                not blocked and any(self._depends(source) for source in record.sources or record.inputs)
            )
        return self._reaches[record.serial]

    def _runs(self, node: Node, inputs: Sequence[Value]) -> list[Sequence[Value]]:
        if not node.is_loop:
            entered = [self._entered(value) for value in inputs]
            return [self._run(body, entered[1:]) for body in node.bodies]
        states = inputs
        for _ in range(len(inputs) + 1):
            states = self._run(node.bodies[1], [self._entered(value) for value in states])
        return [states]

    def _entered(self, value: Value) -> Value:
        return Record([value], lambda dys, stage: [dys[0]], enters=True).give(value.data)


def _unmatched_calls(graph: Expanded, resolution: Resolution, request: Request) -> list[Unit]:
    """Units without a rule for calls that the xs name: their outputs are not the tensors that nodes inside use."""
    matched = {unit.item for unit in resolution.units}
    names = {name.split(":")[0] for name in request.xs}
    calls = [item for item in graph.top.items if isinstance(item, Call) and not item.around and item.name in names]
    return [
        Unit(graph.top, frozenset(call.members), call.inputs, call.results, DEFAULT, call, "", -1, True, {}, call)
        for call in calls
        if call not in matched
    ]


def _from_inside(unit: Unit) -> tuple[int, bool, int]:
    """Inner units before those that hold them."""
    return len(unit.members), isinstance(unit.item, Call), -len(unit.shown.around)


def _cast_back(dy: Value | None, like: Value) -> Value | None:
    return None if dy is None or not dy.is_float or not like.is_float else cast(dy, like.data.dtype)


def _array(tensor: Any) -> Array:
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    return np.frombuffer(tensor.tensor_content, NUMPY[tensor.dtype]).reshape(shape).copy()


__all__ = ["FLOATS", "Exploration", "Interpreter"]
