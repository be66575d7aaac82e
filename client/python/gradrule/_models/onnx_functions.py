"""Writes graphs as functions, and adds the nodes that call them: If and While."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gradrule._builder.graph import Graph
from gradrule._builder.handles import TensorHandle
from gradrule._models.model_graph import ModelGraph
from gradrule.common.dtypes import as_dt, dtype_name
from gradrule.v1 import graph_pb2


@dataclass(slots=True)
class LoopBody:
    """One iteration of a loop.

    Attributes:
        model: The graph of an iteration.
        number: Placeholder of the iteration's number, int64.
        values: Placeholders of the loop's values.
        invariants: Placeholders of the tensors that stay.
        results: The next values; before them whether another iteration follows, if the loop has such a condition.
    """

    model: ModelGraph
    number: TensorHandle
    values: Sequence[TensorHandle]
    invariants: Sequence[TensorHandle]
    results: Sequence[TensorHandle]


def add_function(
    model: ModelGraph, name: str, body: Graph, arguments: Sequence[TensorHandle | int], results: Sequence[TensorHandle]
) -> str:
    """Adds a graph as a function; returns its name.

    Args:
        model: The graph that gets the function, and the functions that `body` calls.
        name: The function's name; invalid characters are replaced, and it is made unique.
        body: The graph.
        arguments: Placeholders of `body`; or the element types of arguments that it does not use.
        results: Tensors of `body`.
    """
    function = graph_pb2.Function()
    signature = function.signature
    known = model.function_names
    base = re.sub(r"[^A-Za-z0-9_]", "_", name)
    signature.name = base
    while signature.name in known:
        signature.name = f"{base}_{len(known)}"
    known.add(signature.name)
    own: dict[str, str] = {}
    for position, argument in enumerate(arguments):
        arg = f"arg{position}"
        if isinstance(argument, TensorHandle):
            own[argument.name.removesuffix(":0")] = arg
            signature.input_arg.add(name=arg, type=as_dt(argument.number))
        else:
            signature.input_arg.add(name=arg, type=as_dt(argument))
    outputs: dict[str, list[str]] = {}

    def reference(text: str) -> str:
        node, _, index = text.partition(":")
        return own.get(node) or outputs[node][int(index or 0)]

    for node in body.messages():
        if node.name in own:
            continue
        outputs[node.name] = [
            f"{node.name}:{arg.name}:{index}"
            for arg in body.definition(node.op).outputs
            for index in range(_count(node, arg.number_attr, arg.type_list_attr))
        ]
        copy = function.node_def.add()
        copy.CopyFrom(node)
        del copy.input[:]
        copy.input.extend(reference(text) for text in node.input)
    for position, result in enumerate(results):
        signature.output_arg.add(name=f"result{position}", type=as_dt(result.number))
        function.ret[f"result{position}"] = reference(result.name)
    for inner in body.functions():
        model.graph.add_function(inner)
    model.graph.add_function(function)
    return signature.name


def _count(node: graph_pb2.Node, number_attr: str, type_list_attr: str) -> int:
    if number_attr:
        return node.attr[number_attr].i
    return len(node.attr[type_list_attr].list.type) if type_list_attr else 1


def add_loop(
    model: ModelGraph,
    name: str,
    count: TensorHandle,
    values: Sequence[TensorHandle],
    invariants: Sequence[TensorHandle],
    iteration: LoopBody,
    running: TensorHandle | None = None,
) -> list[TensorHandle]:
    """Adds a While node; returns the last values.

    Args:
        model: The graph.
        name: Names the functions.
        count: The greatest number of iterations, int64, scalar.
        values: The first values; their element types stay.
        invariants: Tensors that all iterations use.
        iteration: One iteration.
        running: Whether the first iteration runs, bool, scalar, if the loop has such a condition.
    """
    # TensorFlow's gradient of While takes the first two inputs as a counter and the maximum number of iterations.
    first = [model.constant(0, "int32"), model.constant(-1, "int32"), model.constant(0, "int64"), count]
    flags = [] if running is None else [running]
    inputs = [*first, *flags, *values, *invariants]
    types = [dtype_name(item.number) for item in inputs]
    condition = model.nested()
    own = [condition.graph.placeholder(f"in{place}", dtype, None) for place, dtype in enumerate(types)]
    more = condition.op("Less", own[2], own[3])
    if flags:
        more = condition.op("LogicalAnd", more, own[4])
    names = [add_function(model, f"{name}_cond", condition.graph, own, [more])]
    body = iteration.model
    counter, most, limit = (
        body.graph.placeholder(f"loop/{text}", types[place], None)
        for text, place in (("counter", 0), ("most", 1), ("limit", 3))
    )
    unused = [body.graph.placeholder("loop/running", "bool", None)] if flags else []
    numbers = [
        body.op("AddV2", item, body.constant(1, dtype))
        for item, dtype in ((counter, "int32"), (iteration.number, "int64"))
    ]
    own = [counter, most, iteration.number, limit, *unused, *iteration.values, *iteration.invariants]
    results = [numbers[0], most, numbers[1], limit, *iteration.results, *iteration.invariants]
    names.append(add_function(model, f"{name}_body", body.graph, own, results))
    node = model.ops(
        "While",
        inputs,
        cond=names[0],
        body=names[1],
        T=types,
        output_shapes=[None] * len(inputs),
        _num_original_outputs=len(inputs),
    )
    start = len(first) + len(flags)
    return list(node[start : start + len(values)])


def add_condition(
    model: ModelGraph,
    condition: TensorHandle,
    inputs: Sequence[TensorHandle],
    functions: Sequence[str],
    types: Sequence[str],
) -> list[TensorHandle]:
    """Adds an If node; returns its results. `functions`: those of the two branches. `types`: of the results."""
    return list(
        model.ops(
            "If",
            condition,
            list(inputs),
            then_branch=functions[0],
            else_branch=functions[1],
            Tin=[dtype_name(item.number) for item in inputs],
            Tout=list(types),
            output_shapes=[None] * len(types),
        )
    )


def empty_list(model: ModelGraph, dtype: str) -> TensorHandle:
    """Adds an empty list of tensors."""
    return model.op("EmptyTensorList", model.constant(-1, "int32"), model.constant(-1, "int32"), element_dtype=dtype)


def pushed(model: ModelGraph, items: TensorHandle, item: TensorHandle) -> TensorHandle:
    """Appends a tensor to a list."""
    return model.op("TensorListPushBack", items, item, element_dtype=dtype_name(item.number))


def stacked(model: ModelGraph, items: TensorHandle, dtype: str) -> TensorHandle:
    """Returns the tensors of a list, all of one shape, along a new first axis."""
    return model.op("TensorListStack", items, model.constant(-1, "int32"), element_dtype=dtype, num_elements=-1)
