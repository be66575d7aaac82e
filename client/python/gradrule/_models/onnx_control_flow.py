"""Converts ONNX's If, Loop and Scan to TensorFlow's If and While."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradrule._builder.handles import TensorHandle
from gradrule._models.model_graph import UnsupportedOpError, Value
from gradrule._models.onnx_calls import Converted, OpCall, Tensor, converts
from gradrule._models.onnx_functions import LoopBody, add_condition, add_function, add_loop, empty_list, pushed, stacked

if TYPE_CHECKING:
    from gradrule._models.onnx_graph import Body

_MOST_ITERATIONS = 2**62


@converts(
    "If", nodes="If; with a known condition: the nodes of the branch", refuses="branches whose results differ in rank"
)
def _if(call: OpCall) -> Converted:
    model, known = call.model, call.array(0)
    graphs = [call.attr("then_branch"), call.attr("else_branch")]
    if known is not None:
        branch = call.body.child(graphs[0] if known.reshape(-1)[0] else graphs[1], is_inline=True)
        branch.convert()
        return [branch.tensor_or_value(item.name) for item in branch.graph.output]
    branches = [call.body.child(graph) for graph in graphs]
    results: list[list[Value]] = []
    for branch in branches:
        branch.convert()
        results.append([branch.value(item.name) for item in branch.graph.output])
    for place, (first, second) in enumerate(zip(*results, strict=True)):
        if (first.rank, first.dtype) != (second.rank, second.dtype):
            raise UnsupportedOpError(f"whose branches have results {place} of different types or numbers of axes")
    captured = list(dict.fromkeys(name for branch in branches for name in branch.captured))
    inputs = [model.natural(call.body.value(name)) for name in captured]
    functions = [
        add_function(
            model,
            f"{call.node.name or 'If'}_{text}",
            branch.model.graph,
            [branch.captured.get(name, item.number) for name, item in zip(captured, inputs, strict=True)],
            [branch.model.natural(value) for value in values],
        )
        for text, branch, values in zip(("then", "else"), branches, results, strict=True)
    ]
    condition = call.op("Reshape", call.x(), model.int32())
    outputs = add_condition(model, condition, inputs, functions, [value.dtype for value in results[0]])
    return [Value(output, value.rank) for output, value in zip(outputs, results[0], strict=True)]


def _placeholder(body: Body, name: str, dtype: str, rank: int) -> TensorHandle:
    handle = body.model.graph.placeholder(f"in/{len(body.tensors)}", dtype, None)
    body.tensors[name] = Tensor(dtype, None, value=Value(handle, rank))
    return handle


def _loop(
    call: OpCall,
    body: Body,
    iteration: TensorHandle,
    values: Sequence[tuple[TensorHandle, TensorHandle]],
    count: TensorHandle,
    first_output: int,
    running: TensorHandle | None,
) -> list[Value]:
    """Converts the body, and adds the loop.

    Args:
        call: The node.
        body: The body, with placeholders for all of its inputs.
        iteration: The placeholder of the iteration's number.
        values: The loop's values: the first ones, and their placeholders.
        count: The greatest number of iterations.
        first_output: Position of the first value in the body's outputs; later outputs than the values are collected.
        running: As for `add_loop`; the body's first output is then the next one.

    Returns:
        The last values, and the collected ones along a new first axis.
    """
    model, inner = call.model, body.model
    outputs = [inner.natural(value) for value in (body.value(item.name) for item in body.graph.output)]
    ranks = [body.value(item.name).rank for item in body.graph.output]
    following = outputs[first_output : first_output + len(values)]
    for (start, _), result in zip(values, following, strict=True):
        if start.number != result.number:
            raise UnsupportedOpError("with a value whose element type changes")
    collected = outputs[first_output + len(values) :]
    types = [Value(item, 0).dtype for item in collected]
    lists = [inner.graph.placeholder(f"in/list{place}", "variant", None) for place in range(len(collected))]
    grown = [pushed(inner, items, item) for items, item in zip(lists, collected, strict=True)]
    captured = list(body.captured)
    flag = [] if running is None else [inner.op("Reshape", outputs[0], inner.int32())]
    last = add_loop(
        model,
        call.node.name or call.node.op_type,
        count,
        [*(start for start, _ in values), *(empty_list(model, dtype) for dtype in types)],
        [model.natural(call.body.value(name)) for name in captured],
        LoopBody(
            inner,
            iteration,
            [*(own for _, own in values), *lists],
            [body.captured[name] for name in captured],
            [*flag, *following, *grown],
        ),
        running,
    )
    found = [Value(item, rank) for item, rank in zip(last, ranks[first_output:], strict=False)][: len(values)]
    for items, dtype, rank in zip(last[len(values) :], types, ranks[first_output + len(values) :], strict=True):
        found.append(Value(stacked(model, items, dtype), rank + 1))
    return found


@converts("Loop", nodes="While", refuses="sequences; a rank that changes")
def _loop_op(call: OpCall) -> Converted:
    model, body = call.model, call.body.child(call.attr("body"))
    names = [item.name for item in body.graph.input]
    iteration = _placeholder(body, names[0], "int64", 0)
    condition = call.op("Reshape", call.x(1), model.int32()) if call.has(1) else model.constant(True, "bool")
    # The body runs only while its condition holds.
    body.tensors[names[1]] = Tensor("bool", (), value=Value(body.model.constant(True, "bool"), 0))
    values = [
        (call.x(place), _placeholder(body, name, call.dtype(place), call.rank(place)))
        for place, name in enumerate(names[2:], 2)
    ]
    body.convert()
    for place, item in enumerate(body.graph.output[1 : 1 + len(values)], 2):
        if body.value(item.name).rank != call.rank(place):
            raise UnsupportedOpError("with a value whose number of axes changes")
    count = call.op("Reshape", call.x(0), model.int32()) if call.has(0) else model.constant(_MOST_ITERATIONS, "int64")
    return _loop(call, body, iteration, values, count, 1, condition)


@converts("Scan", nodes="While", refuses="a rank that changes")
def _scan(call: OpCall) -> Converted:
    model, body = call.model, call.body.child(call.attr("body"))
    scanned = int(call.attr("num_scan_inputs"))
    states = len(call) - scanned
    names = [item.name for item in body.graph.input]
    iteration = body.model.graph.placeholder("in/iteration", "int64", None)
    values = [
        (call.x(place), _placeholder(body, names[place], call.dtype(place), call.rank(place)))
        for place in range(states)
    ]
    axes = call.attr("scan_input_axes") or [0] * scanned
    directions = call.attr("scan_input_directions") or [0] * scanned
    count: TensorHandle | None = None
    for place in range(scanned):
        rank = call.rank(states + place)
        x = _first(call, call.x(states + place), int(axes[place]) % rank, rank)
        if directions[place]:
            x = call.op("ReverseV2", x, [0])
        if count is None:
            count = call.op("GatherV2", call.op("Shape", x, out_type="int64"), 0, 0)
        # The whole input goes into the body, which takes one element of it.
        hidden = f"{names[states + place]}/scanned"
        call.body.tensors[f"{call.node.output[0]}/{hidden}"] = Tensor(
            call.dtype(states + place), None, value=Value(x, rank)
        )
        whole = body.value(f"{call.node.output[0]}/{hidden}")
        item = body.model.op("GatherV2", whole.handle, iteration, 0)
        body.tensors[names[states + place]] = Tensor(whole.dtype, None, value=Value(item, rank - 1))
    assert count is not None
    body.convert()
    results = _loop(call, body, iteration, values, count, 0, None)
    output_axes = call.attr("scan_output_axes") or [0] * (len(results) - states)
    output_directions = call.attr("scan_output_directions") or [0] * (len(results) - states)
    for place, result in enumerate(results[states:]):
        y = call.op("ReverseV2", result.handle, [0]) if output_directions[place] else result.handle
        axis = int(output_axes[place]) % result.rank
        if axis:
            order = [*range(1, result.rank)]
            order.insert(axis, 0)
            y = call.op("Transpose", y, model.int32(*order))
        results[states + place] = Value(y, result.rank)
    return results


def _first(call: OpCall, x: TensorHandle, axis: int, rank: int) -> TensorHandle:
    if axis == 0:
        return x
    return call.op("Transpose", x, call.model.int32(axis, *(other for other in range(rank) if other != axis)))
