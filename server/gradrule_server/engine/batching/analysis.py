"""Proves that a built function treats each example of a batch independently.

The proof, for every number B of examples: with per-example arguments of B rows, row i of each per-example result
depends on row i of those arguments only, and all other results do not depend on them. So calls can be concatenated
along axis 0, and each gets its rows. The analysis covers the whole function as TensorFlow built it, with gradients and
rules. An op that is not known to keep examples apart counts as mixing them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from gradrule_server.engine import tf_private
from gradrule_server.engine.batching.op_rules import ELEMENTWISE, RULES
from gradrule_server.engine.batching.shape_arithmetic import MAX_NUMBERS, NUMERIC
from gradrule_server.engine.batching.values import (
    UNKNOWN,
    Extent,
    Mixed,
    NotPerExample,
    PerExample,
    Shape,
    Sizes,
    Uniform,
    Unranked,
    Value,
    as_array,
    multiplied,
    value_from_numbers,
)
from gradrule_server.engine.derivatives import SPARSE
from gradrule_server.engine.graph_import import IMPORT_SCOPE
from gradrule_server.engine.program import BuiltProgram, Input
from gradrule_server.policy.op_tables import ops_with

# Larger functions are not analysed: it takes about 20 µs for each op.
MAX_OPS = 50_000

# Examples that run together at most: with more, sizes could be too large for their type.
MAX_EXAMPLES = 512

# Largest number of each type. The analysis does not follow numbers of other types.
_MOST_NUMBERS = {tf.bool: 1, tf.int32: 2**31 - 1, tf.int64: 2**63 - 1}

# Ops whose result follows from shapes alone.
_SHAPE_OPS = ops_with("reads_shape")


@dataclass(frozen=True, slots=True)
class Layout:
    """How calls of a function are merged and their results split.

    per_example: for each argument, whether axis 0 counts examples; other arguments must be equal in all calls.
    rows: for each result, its number of rows per example; 0: it is the same for all calls.
    """

    per_example: tuple[bool, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Calls may not run together. reason: the reason, as text."""

    reason: str


def analyse(built: BuiltProgram) -> Layout | Refusal:
    """Returns how calls may be merged, or why they may not."""
    found = _unsuited(built)
    if found is not None:
        return Refusal(found)
    arguments = [*built.inputs, *built.grad_ys, *built.directions]
    values: list[Value] = [_argument(item) for item in arguments]
    # Calls with params of another rank run alone (`merging.count_examples`).
    values += [Uniform(()) for _ in built.params]
    if not any(isinstance(value, PerExample) for value in values):
        return Refusal("no input has an axis 0 of any size")
    graph = built.graph
    # The inputs after the arguments are captured constants.
    values += [Uniform(_shape(tensor)) for tensor in graph.inputs[len(values) :]]
    known: dict[str, list[Value]] = {
        tensor.op.name: [value] for tensor, value in zip(graph.inputs, values, strict=True)
    }
    for op in _needed(graph, built.graph.outputs):
        if op.name not in known:
            try:
                known[op.name] = _results(op, [known[tensor.op.name][tensor.value_index] for tensor in op.inputs])
            except (NotPerExample, IndexError, ValueError) as cause:
                # Rules fail for contradictory axes and sizes, as the function will.
                why = str(cause) if isinstance(cause, NotPerExample) else "takes sizes that do not fit"
                known[op.name] = [Mixed(f"{op.type} {_name(op)!r} {why}")] * len(op.outputs)
            if op.op_def.is_stateful and op.type != "Assert":
                return Refusal(f"{op.type} {_name(op)!r} is random or has effects")
            if op.type == "Assert":
                checked = known[op.inputs[0].op.name][op.inputs[0].value_index]
                if not isinstance(checked, Uniform):
                    reason = checked.reason if isinstance(checked, Mixed) else "it checks the examples"
                    return Refusal(f"Assert {_name(op)!r} checks something that depends on the batch: {reason}")
    rows = []
    for tensor in built.graph.outputs:
        value = known[tensor.op.name][tensor.value_index]
        if isinstance(value, PerExample):
            rows.append(value.rows)
        elif isinstance(value, Uniform):
            rows.append(0)
        else:
            return Refusal(value.reason if isinstance(value, Mixed) else "a result is the number of examples")
    count = len(arguments) + len(built.params)
    return Layout(tuple(isinstance(value, PerExample) for value in values[:count]), tuple(rows))


def _unsuited(built: BuiltProgram) -> str | None:
    """Returns why calls of the program may never run together, without reading its ops; None if no reason is known."""
    if built.unbatched:
        return "the program asks for it"
    if built.updates or built.two_parts is not None:
        return "it is part of a session or a forward handle"
    if built.stacked:
        return "it pulls back many gradients at once"
    if any(form == SPARSE for _, form in built.layout):
        return "a gradient is sparse"
    return f"it has more than {MAX_OPS} ops" if len(built.graph.get_operations()) > MAX_OPS else None


def _argument(item: Input) -> Value:
    if item.shape.rank is None:
        return Mixed(f"input {item.name!r} may have any rank")
    shape = tuple(item.shape)
    if item.default is None and shape and shape[0] is None:
        return PerExample(1, shape[1:])
    return Uniform(shape)


def _needed(graph: tf.Graph, outputs: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Returns the ops that run, producers first: those on which outputs depend, and those with effects."""
    pending = [tensor.op for tensor in outputs]
    pending += [op for op in graph.get_operations() if op.op_def.is_stateful]
    needed: set[str] = set()
    while pending:
        op = pending.pop()
        if op.name not in needed:
            needed.add(op.name)
            pending += [tensor.op for tensor in op.inputs]
            pending += op.control_inputs
    return [op for op in graph.get_operations() if op.name in needed]


def _results(op: tf.Operation, inputs: list[Value]) -> list[Value]:
    """Returns the values of an op's outputs. Raises `NotPerExample` if it may mix examples."""
    shapes = [_shape(tensor) for tensor in op.outputs]
    if op.type == "Const":
        return [_constant(op, shapes[0])]
    if op.type in _SHAPE_OPS:
        return _checked_numbers(op, _of_shapes(op, inputs, shapes))
    if tf_private.runs_functions(op.type):
        raise NotPerExample("runs functions, which are not analysed")
    for value in inputs:
        if isinstance(value, Mixed):
            return [value] * len(shapes)
    if all(isinstance(value, Uniform) for value in inputs):
        return _uniform_results(op, inputs, shapes)
    numeric, rule = NUMERIC.get(op.type), RULES.get(op.type)
    if numeric is not None and all(isinstance(value, Uniform | Sizes) for value in inputs):
        try:
            return _checked_numbers(op, _listed(numeric(inputs, op.get_attr)))
        except NotPerExample:
            if rule is None:
                raise
    if rule is None:
        raise NotPerExample("is not known to keep examples apart")
    results = _listed(rule(inputs, op.get_attr, shapes))
    for value, shape in zip(results, shapes, strict=True):
        if isinstance(value, PerExample) and shape is not None and (not shape or shape[0] is not None):
            raise NotPerExample("gives a fixed number of rows")
        if isinstance(value, PerExample) and not tf.TensorShape([None, *value.tail]).is_compatible_with(shape):
            raise NotPerExample("gives another shape than the analysis expects")
    return results


def _checked_numbers(op: tf.Operation, results: list[Value]) -> list[Value]:
    """Returns the results. Raises `NotPerExample` if numbers may be too large for their type."""
    for tensor, value in zip(op.outputs, results, strict=True):
        numbers = value.numbers if isinstance(value, Uniform | Sizes) else None
        if numbers is None:
            continue
        if not tensor.shape.is_compatible_with(numbers.shape):
            raise NotPerExample("gives another shape than the analysis expects")
        most = _MOST_NUMBERS.get(tensor.dtype, -1)
        for number in numbers.flat:
            size = number.factor * MAX_EXAMPLES if isinstance(number, Extent) else number
            if isinstance(size, int) and not -most <= size <= most:
                raise NotPerExample("gives numbers that may be too large for their type")
    return results


def _uniform_results(op: tf.Operation, inputs: list[Value], shapes: list[Shape | None]) -> list[Value]:
    """Returns the results of an op whose inputs do not depend on the batch: its results do not depend on it either."""
    numeric = NUMERIC.get(op.type)
    if numeric is not None and all(isinstance(value, Uniform) and value.numbers is not None for value in inputs):
        try:
            return _checked_numbers(op, _listed(numeric(inputs, op.get_attr)))
        except (NotPerExample, ValueError, IndexError):
            pass  # Its numbers are not followed; its shape is still known.
    if op.type in ELEMENTWISE and shapes == [None]:
        # TensorFlow does not know that params have rank 0.
        return [Uniform(_broadcast([value.shape for value in inputs if isinstance(value, Uniform)]))]
    return [Uniform(shape) for shape in shapes]


def _broadcast(shapes: Sequence[Shape | None]) -> Shape | None:
    if None in shapes:
        return None
    try:
        sizes: list[Any] = list(shapes)
        return np.broadcast_shapes(*sizes)
    except (TypeError, ValueError):
        return None  # A size that is not known, or sizes that do not fit.


def _listed(results: Value | list[Value]) -> list[Value]:
    return results if isinstance(results, list) else [results]


def _constant(op: tf.Operation, shape: Shape | None) -> Value:
    dtype = op.outputs[0].dtype
    if (dtype.is_integer or dtype.is_bool) and (op.outputs[0].shape.num_elements() or 0) <= MAX_NUMBERS:
        array = tf.make_ndarray(op.get_attr("value"))
        numbers = np.empty(array.shape, object)
        numbers[...] = array.tolist()
        return Uniform(tuple(array.shape), numbers)
    return Uniform(shape)


def _of_shapes(op: tf.Operation, inputs: list[Value], shapes: list[Shape | None]) -> list[Value]:
    """Returns results that follow from shapes: shapes themselves, and tensors of zeros or ones."""
    results: list[Value] = []
    for tensor, value in zip(op.inputs, inputs, strict=True):
        shape = _shape(tensor)
        if op.type in ("OnesLike", "ZerosLike"):
            is_apart = isinstance(value, PerExample | Uniform | Unranked)
            results.append(value if is_apart and not isinstance(value, Uniform) else _filled(value, shape))
            continue
        sizes = _sizes(value, shape)
        if op.type == "Rank":
            results.append(value_from_numbers(np.array(len(sizes), object)))
        elif op.type == "Size":
            total: Any = 1
            for size in sizes:
                total = multiplied(total, size)
            results.append(value_from_numbers(np.array(total, object)))
        else:
            results.append(value_from_numbers(as_array(sizes)))
    return results


def _filled(value: Value, shape: Shape | None) -> Value:
    if isinstance(value, Uniform) or (shape is not None and None not in shape):
        return Uniform(shape)
    raise NotPerExample("has a shape that depends on the batch")


def _sizes(value: Value, shape: Shape | None) -> list[Any]:
    """Returns the sizes of a tensor's axes."""
    if isinstance(value, PerExample):
        return [Extent(value.rows), *(UNKNOWN if size is None else size for size in value.tail)]
    if isinstance(value, Sizes):
        return list(value.numbers.shape)
    if shape is not None and None not in shape:
        return list(shape)
    if isinstance(value, Uniform) and (shape is not None or value.shape is not None):
        known = shape if value.shape is None else value.shape
        return [UNKNOWN if size is None else size for size in known or ()]
    if isinstance(value, Mixed):
        raise NotPerExample(f"asks for the shape of a tensor that is not per example: {value.reason}")
    raise NotPerExample("asks for the shape of a tensor whose rank is not known")


def _shape(tensor: tf.Tensor) -> Shape | None:
    return None if tensor.shape.rank is None else tuple(tensor.shape)


def _name(op: tf.Operation) -> str:
    """Returns the op's name in the uploaded graph."""
    return str(op.name).removeprefix(IMPORT_SCOPE)
