"""Converts ONNX's RNN, GRU and LSTM to loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gradrule._builder.handles import TensorHandle
from gradrule._models.model_graph import ModelGraph, UnsupportedOpError, Value
from gradrule._models.onnx_calls import Converted, OpCall, converts
from gradrule._models.onnx_functions import LoopBody, add_loop, empty_list, pushed, stacked

_ACTIVATIONS = {"Sigmoid": "Sigmoid", "Tanh": "Tanh", "Relu": "Relu", "Softsign": "Softsign", "Softplus": "Softplus"}
_REFUSES = "activations with parameters, clip, input_forget=1"


@dataclass(slots=True)
class _Step:
    """What one step of one direction uses.

    Attributes:
        model: The graph of the step.
        x: The input's share of all gates, [batch, gates * hidden].
        weight: Recurrent weights, [gates * hidden, hidden].
        bias: Recurrent bias, [gates * hidden].
        peephole: Weights of the cell's state, [3 * hidden]; None without them.
        activations: Op types.
    """

    model: ModelGraph
    x: TensorHandle
    weight: TensorHandle
    bias: TensorHandle
    peephole: TensorHandle | None
    activations: Sequence[str]

    def parts(self, x: TensorHandle, count: int, axis: int = 1) -> tuple[TensorHandle, ...]:
        """Splits gates."""
        return (x,) if count == 1 else self.model.ops("Split", axis, x, num_split=count)

    def recurrent(self, h: TensorHandle) -> TensorHandle:
        """Returns the state's share of all gates."""
        return self.sum(self.model.op("MatMul", h, self.weight, transpose_b=True), self.bias)

    def sum(self, a: TensorHandle, b: TensorHandle) -> TensorHandle:
        """Adds."""
        return self.model.op("AddV2", a, b)

    def product(self, a: TensorHandle, b: TensorHandle) -> TensorHandle:
        """Multiplies."""
        return self.model.op("Mul", a, b)

    def activated(self, place: int, x: TensorHandle) -> TensorHandle:
        """Applies an activation."""
        return self.model.op(self.activations[place], x)


_Cell = Callable[[_Step, Sequence[TensorHandle]], list[TensorHandle]]


def _rnn_step(step: _Step, states: Sequence[TensorHandle]) -> list[TensorHandle]:
    return [step.activated(0, step.sum(step.x, step.recurrent(states[0])))]


def _gru_step(step: _Step, states: Sequence[TensorHandle]) -> list[TensorHandle]:
    """Computes a step that resets the state before it is multiplied."""
    (h,) = states
    xz, xr, xh = step.parts(step.x, 3)
    weights, biases = step.parts(step.weight, 3, axis=0), step.parts(step.bias, 3, axis=0)
    gates = [
        step.activated(0, step.sum(x, step.sum(step.model.op("MatMul", h, weight, transpose_b=True), bias)))
        for x, weight, bias in ((xz, weights[0], biases[0]), (xr, weights[1], biases[1]))
    ]
    reset = step.model.op("MatMul", step.product(gates[1], h), weights[2], transpose_b=True)
    return _updated(step, h, gates[0], step.activated(1, step.sum(xh, step.sum(reset, biases[2]))))


def _gru_linear_step(step: _Step, states: Sequence[TensorHandle]) -> list[TensorHandle]:
    """Computes a step that multiplies the state before it is reset, as PyTorch does."""
    (h,) = states
    xz, xr, xh = step.parts(step.x, 3)
    hz, hr, hh = step.parts(step.recurrent(h), 3)
    z, r = step.activated(0, step.sum(xz, hz)), step.activated(0, step.sum(xr, hr))
    return _updated(step, h, z, step.activated(1, step.sum(xh, step.product(r, hh))))


def _updated(step: _Step, h: TensorHandle, z: TensorHandle, new: TensorHandle) -> list[TensorHandle]:
    # (1 - z) new + z h
    return [step.sum(new, step.product(z, step.model.op("Sub", h, new)))]


def _lstm_step(step: _Step, states: Sequence[TensorHandle]) -> list[TensorHandle]:
    h, c = states
    i, o, f, g = step.parts(step.sum(step.x, step.recurrent(h)), 4)
    if step.peephole is not None:
        pi, po, pf = step.parts(step.peephole, 3, axis=0)
        i, f = step.sum(i, step.product(pi, c)), step.sum(f, step.product(pf, c))
    kept = step.product(step.activated(0, f), c)
    c = step.sum(kept, step.product(step.activated(0, i), step.activated(1, g)))
    if step.peephole is not None:
        o = step.sum(o, step.product(po, c))
    return [step.product(step.activated(0, o), step.activated(2, c)), c]


def _recurrent(call: OpCall, cell: _Cell, gates: int, defaults: Sequence[str], states: int) -> Converted:
    """Converts a recurrent operation.

    Args:
        call: The node.
        cell: Adds one step; takes and returns the states, the output first.
        gates: Number of gates.
        defaults: ONNX's default activations of one direction.
        states: Number of states.
    """
    hidden, direction = call.attr("hidden_size"), call.attr("direction")
    directions = 2 if direction == "bidirectional" else 1
    activations = [name.decode() if isinstance(name, bytes) else name for name in call.attr("activations") or []]
    activations = activations or [*defaults] * directions
    unknown = [name for name in activations if name not in _ACTIVATIONS]
    if unknown or call.attr("activation_alpha") or call.attr("activation_beta"):
        raise UnsupportedOpError(f"with activations {activations}; those without parameters are: {list(_ACTIVATIONS)}")
    if call.attr("clip") is not None or call.attr("input_forget", 0):
        raise UnsupportedOpError("with clip or input_forget")
    x = call.x()
    is_batch_first = bool(call.attr("layout", 0))
    if is_batch_first:
        x = call.op("Transpose", x, [1, 0, 2])
    size = call.known_shape(2)[2]
    if hidden is not None and hidden != size:
        raise UnsupportedOpError(f"with hidden_size {hidden} and weights for {size}")
    model = call.model
    sizes = call.op("Shape", x)
    batch = call.op("GatherV2", sizes, 1, 0)
    lengths = call.x(4) if call.has(4) else None
    collected, last = [], []
    for place in range(directions):
        is_reverse = direction == "reverse" or place == 1
        weight, recurrent = _at(call, call.x(1), place), _at(call, call.x(2), place)
        own_bias, bias = call.const(np.zeros(1)), call.const(np.zeros(gates * size))
        if call.has(3):
            own_bias, bias = model.ops("Split", 0, _at(call, call.x(3), place), num_split=2)
        ordered = _reversed(call, x, lengths) if is_reverse else x
        share = call.op("AddV2", call.op("BatchMatMulV2", ordered, weight, adj_y=True), own_bias)
        zeros = call.op("Fill", call.op("Pack", [batch, model.constant(size, "int32")]), call.const(0))
        first = []
        for state in range(states):
            given = call.x(5 + state) if call.has(5 + state) else None
            if given is not None and is_batch_first:
                given = call.op("Transpose", given, [1, 0, 2])
            first.append(zeros if given is None else _at(call, given, place))
        peephole = _at(call, call.x(7), place) if states == 2 and call.has(7) else None
        invariants = [item for item in (share, recurrent, bias, peephole, lengths) if item is not None]
        iteration = _iteration(
            call,
            cell,
            first,
            invariants,
            peephole is not None,
            lengths is not None,
            [_ACTIVATIONS[name] for name in activations[place * len(defaults) :][: len(defaults)]],
        )
        count = call.op("GatherV2", call.op("Shape", x, out_type="int64"), 0, 0)
        *final, items = add_loop(
            model,
            call.node.name or call.node.op_type,
            count,
            [*first, empty_list(model, call.dtype())],
            invariants,
            iteration,
        )
        outputs = stacked(model, items, call.dtype())
        collected.append(_reversed(call, outputs, lengths) if is_reverse else outputs)
        last.append(final)
    # [steps, directions, batch, hidden], or with layout=1 [batch, steps, directions, hidden]
    y = call.op("Pack", collected, axis=2 if is_batch_first else 1)
    if is_batch_first:
        y = call.op("Transpose", y, [1, 0, 2, 3])
    ends = [
        call.op("Pack", [final[state] for final in last], axis=1 if is_batch_first else 0) for state in range(states)
    ]
    return [Value(y, 4), *(Value(end, 3) for end in ends)]


def _at(call: OpCall, x: TensorHandle, place: int) -> TensorHandle:
    return call.op("GatherV2", x, call.const(place, "int32"), 0)


def _reversed(call: OpCall, x: TensorHandle, lengths: TensorHandle | None) -> TensorHandle:
    if lengths is None:
        return call.op("ReverseV2", x, [0])
    return call.op("ReverseSequence", x, lengths, seq_dim=0, batch_dim=1)


def _iteration(
    call: OpCall,
    cell: _Cell,
    first: Sequence[TensorHandle],
    invariants: Sequence[TensorHandle],
    has_peephole: bool,
    has_lengths: bool,
    activations: Sequence[str],
) -> LoopBody:
    model = call.model.nested()
    number = model.graph.placeholder("in/iteration", "int64", None)
    states = [model.graph.placeholder(f"in/state{place}", call.dtype(), None) for place in range(len(first))]
    items = model.graph.placeholder("in/items", "variant", None)
    own = [
        model.graph.placeholder(f"in/invariant{place}", Value(item, 0).dtype, None)
        for place, item in enumerate(invariants)
    ]
    x = model.op("GatherV2", own[0], number, 0)
    following = cell(_Step(model, x, own[1], own[2], own[3] if has_peephole else None, activations), states)
    output = following[0]
    if has_lengths:
        # Beyond the end of a sequence, states stay and outputs are 0.
        runs = model.op("ExpandDims", model.op("Less", model.op("Cast", number, DstT="int32"), own[-1]), 1)
        output = model.op("SelectV2", runs, output, model.constant(0, call.dtype()))
        following = [model.op("SelectV2", runs, new, old) for new, old in zip(following, states, strict=True)]
    return LoopBody(model, number, [*states, items], own, [*following, pushed(model, items, output)])


@converts("RNN", nodes="While", refuses=_REFUSES)
def _rnn(call: OpCall) -> Converted:
    return _recurrent(call, _rnn_step, 1, ["Tanh"], 1)


@converts("GRU", nodes="While", refuses=_REFUSES)
def _gru(call: OpCall) -> Converted:
    cell = _gru_linear_step if call.attr("linear_before_reset") else _gru_step
    return _recurrent(call, cell, 3, ["Sigmoid", "Tanh"], 1)


@converts("LSTM", nodes="While", refuses=_REFUSES)
def _lstm(call: OpCall) -> Converted:
    return _recurrent(call, _lstm_step, 4, ["Sigmoid", "Tanh", "Tanh"], 2)
