"""Converts gradients that are Python functions of this process to functions of the graph.

`tf.custom_gradient` adds an IdentityN node over results, arguments and variables; this node becomes a region. A node
whose gradient was registered with `tf.RegisterGradient`, under a name that is not an op type, gets a gradient function
of the op's own inputs and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gradrule._builder.graph_lookup import GRADIENT_ATTR
from gradrule._builder.names import UniqueNames
from gradrule._tracing import tf_private
from gradrule._tracing.bodies import (
    Body,
    Definition,
    Library,
    Node,
    data_inputs,
    note_handle,
    referenced,
    renamed,
)
from gradrule.errors import UnsupportedError

REGION_ATTR = "_gradrule_region"
OUTPUTS_ATTR = "_gradrule_outputs"
INPUTS_ATTR = "_gradrule_inputs"

_LOADED_NAME = "custom_gradient"


@dataclass(frozen=True, slots=True)
class GradientNode:
    """Describes a node whose gradient is a Python function of this process.

    Attributes:
        body: The function that contains the node.
        node: The node's definition.
        op: The node's operation in TensorFlow.
        region: Name of the region: the node's first inputs are `y`, the other inputs are `x`. None for a node that is
            not a region: the op's inputs are `x`, its outputs are `y`.
        outputs: Number of `y`.
    """

    body: Body
    node: Node
    op: Any
    region: str | None
    outputs: int

    @property
    def ys(self) -> list[Any]:
        return list(self.op.inputs)[: self.outputs] if self.region else list(self.op.outputs)

    @property
    def xs(self) -> list[Any]:
        return list(self.op.inputs)[self.outputs :] if self.region else list(self.op.inputs)

    def __str__(self) -> str:
        what = f"tf.custom_gradient {self.region!r}" if self.region else f"gradient {_gradient_name(self.op)!r}"
        return f"{what} at node {self.op.name!r}"


def attach_gradients(library: Library) -> None:
    """Traces the gradients of the nodes in all bodies, including gradient functions.

    Raises:
        UnsupportedError: A gradient function cannot be traced, or uses a tensor that cannot be passed to it.
    """
    done: set[str] = set()
    shared: dict[Any, str] = {}
    while pending := [body for name, body in library.bodies.items() if name not in done]:
        for body in pending:
            done.add(body.name)
            for op in body.graph.get_operations():
                if GRADIENT_ATTR in op.node_def.attr and op.name in body.nodes:
                    _attach(library, body, op, shared)


def drop_unused(library: Library) -> None:
    """Removes unused arguments of gradient functions; this is safe because rules pass arguments by name."""
    for body in library.bodies.values():
        if body.gradient_of is not None:
            used = referenced(body.definition)
            kept = [argument for argument in body.definition.signature.input_arg if argument.name in used]
            del body.definition.signature.input_arg[:]
            body.definition.signature.input_arg.extend(kept)


def variable(letter: str, index: int) -> str:
    """Returns the name of a rule's variable: `x`, `x1`, `x2`, …."""
    return f"{letter}{index}" if index else letter


def _gradient_name(op: Any) -> str:
    """Returns the name in the attribute `_gradient_op_type` of an operation."""
    return str(op.get_attr(GRADIENT_ATTR).decode())


def _attach(library: Library, body: Body, op: Any, shared: dict[Any, str]) -> None:
    node, gradient_name = body.nodes[op.name], _gradient_name(op)
    if tf_private.op_definition(gradient_name) is not None:
        return
    try:
        function = tf_private.registered_gradient(gradient_name)
    except LookupError:
        # The name is a rule on the server or a gradient of another process; the server distinguishes them.
        return
    target, requested_name = _target(body, node, op, function)
    key = None if target.region else (gradient_name, op.type, _static(op))
    if key is not None and key in shared:
        node.attr[GRADIENT_ATTR].s = shared[key].encode()
        return
    name = library.unique_gradient(requested_name)
    try:
        graph, output_names = _traced(target, function, name)
    except UnsupportedError:
        if library.runs_forward(body):
            raise
        # Functions such as tf.recompute_grad have no second derivative. Keep the gradient's name: a call that computes
        # this derivative then fails on the server with FOREIGN_GRADIENT.
        return
    if target.region:
        node.attr[REGION_ATTR].s = (name if target.region == _LOADED_NAME else target.region).encode()
        node.attr[OUTPUTS_ATTR].i = target.outputs
        node.attr[INPUTS_ATTR].i = len(target.xs)
    elif key is not None:
        shared[key] = name
    node.attr[GRADIENT_ATTR].s = name.encode()
    library.gradients[name] = name
    _write(library, target, graph, name, output_names)


def _target(body: Body, node: Node, op: Any, function: Any) -> tuple[GradientNode, str]:
    """Returns the target and a requested name for its gradient function."""
    if op.type == "IdentityN" and function is not None:
        custom = tf_private.custom_gradient_of(function)
        if custom is not None:
            return GradientNode(body, node, op, *custom), f"{custom[0]}_gradient"
        if tf_private.is_loaded_gradient(function):
            return GradientNode(body, node, op, _LOADED_NAME, _results_of_loaded(op)), _LOADED_NAME
    return GradientNode(body, node, op, None, len(op.outputs)), _gradient_name(op)


def _results_of_loaded(op: Any) -> int:
    """Returns how many inputs of a loaded IdentityN are results, from the outputs that are used.

    A SavedModel does not store this number, but only the outputs for results have users.
    """
    returned = {tf_private.identity_of(tensor) for tensor in op.graph.outputs}
    used = [
        index
        for index, tensor in enumerate(op.outputs)
        if tensor.consumers() or tf_private.identity_of(tensor) in returned
    ]
    return max(used, default=0) + 1


def _static(op: Any) -> tuple[Any, ...]:
    attrs = tuple((key, str(op.node_def.attr[key])) for key in sorted(op.node_def.attr) if key != GRADIENT_ATTR)
    return (attrs, tuple((tensor.dtype, str(tensor.shape)) for tensor in [*op.inputs, *op.outputs]))


def _traced(target: GradientNode, function: Any, name: str) -> tuple[Any, list[str]]:
    """Traces a gradient function.

    Returns the function graph, whose inputs are upstream gradients and captured tensors, and the names of its outputs.
    """
    names = []
    with target.body.graph.as_default():
        graph = tf_private.FuncGraph(name)
    with graph.as_default():
        upstream: list[Any] = []
        for index, y in enumerate(target.ys):
            if _is_differentiable(y):
                upstream.append(tf.compat.v1.placeholder(y.dtype, y.shape, name=variable("dy", index)))
            else:
                upstream.append(None)
        graph.inputs = [tensor for tensor in upstream if tensor is not None]
        rest = [None] * (len(target.op.outputs) - len(upstream))
        try:
            gradients = None if function is None else function(target.op, *upstream, *rest)
        except Exception as cause:
            raise UnsupportedError(f"{target}: its gradient function cannot be traced: {cause}") from cause
        gradients = _as_list(target, gradients)[target.outputs if target.region else 0 :]
        for index, (x, gradient) in enumerate(zip(target.xs, gradients, strict=True)):
            if gradient is not None and _is_differentiable(x):
                dense = tf.convert_to_tensor(gradient, dtype=x.dtype)
                graph.outputs.append(tf.identity(dense, name=variable("dx", index)))
                names.append(variable("dx", index))
    return graph, names


def _as_list(target: GradientNode, gradients: Any) -> list[Any]:
    wanted = len(target.op.inputs)
    if gradients is None:
        return [None] * wanted
    found = list(gradients) if isinstance(gradients, list | tuple) else [gradients]
    if len(found) != wanted:
        extra = target.outputs if target.region else 0
        raise UnsupportedError(
            f"{target}: its gradient function gives {len(found) - extra} gradients for {wanted - extra} inputs"
        )
    return found


def _is_differentiable(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _write(library: Library, target: GradientNode, graph: Any, name: str, output_names: list[str]) -> None:
    """Adds a gradient function to the library, with arguments that are named like a rule's variables."""
    definition = tf_private.definition_of(graph, f"{name}_{id(graph)}")
    definition.signature.name = name
    old_names = [argument.name for argument in definition.signature.input_arg]
    taken = UniqueNames()
    for node in definition.node_def:
        taken.reserve(node.name)
    captured = {tf_private.identity_of(inner): outer for outer, inner in tf_private.captures(graph)}
    arguments: list[str | None] = []
    constants: list[tuple[str, Any]] = []
    used = referenced(definition)
    further: dict[Any, str] = {}
    for tensor, old in zip(graph.inputs, old_names, strict=True):
        outer = captured.get(tf_private.identity_of(tensor))
        if outer is None:
            arguments.append(tensor.op.name)
        elif old not in used:
            arguments.append(None)
        elif tf_private.is_eager(outer) and outer.dtype != tf.resource:
            constants.append((taken.make("captured"), outer))
            arguments.append(constants[-1][0])
        else:
            arguments.append(_variable_of(library, target, outer, further))
    renamed(definition, old_names, arguments)
    _set_outputs(definition, output_names)
    for argument, tensor in zip(definition.signature.input_arg, graph.inputs, strict=True):
        note_handle(argument, tensor)
    constant_names = {constant for constant, _ in constants}
    keep = [
        argument
        for argument, new in zip(list(definition.signature.input_arg), arguments, strict=True)
        if new is not None and new not in constant_names
    ]
    unique = {argument.name: argument for argument in keep}
    del definition.signature.input_arg[:]
    definition.signature.input_arg.extend(unique.values())
    for constant, value in constants:
        node = definition.node_def.add(name=constant, op="Const")
        node.attr["dtype"].type = value.dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
        renamed(definition, [constant], [f"{constant}:output:0"], nodes=False)
    body = Body(definition, graph, [_reference(argument, constant_names) for argument in arguments])
    body.gradient_of = (target.body, target.node)
    library.add(body)


def _reference(argument: str | None, constants: set[str]) -> str | None:
    return f"{argument}:output:0" if argument in constants else argument


def _variable_of(library: Library, target: GradientNode, outer: Any, further: dict[Any, str]) -> str:
    """Returns the rule variable for a captured tensor; adds an input to the region if there is none."""
    body = target.body
    inside = outer if getattr(outer, "graph", None) is body.graph else body.captured(outer)
    key = tf_private.identity_of(outer if inside is None else inside)
    for letter, tensors in (("x", target.xs), ("y", target.ys)):
        for index, tensor in enumerate(tensors):
            if tf_private.identity_of(tensor) == key:
                return variable(letter, index)
    if key in further:
        return further[key]
    if not target.region:
        raise UnsupportedError(
            f"{target}: its gradient function uses the tensor {getattr(outer, 'name', outer)!r}, which is neither an "
            "input nor an output of the node; write the function with tf.custom_gradient"
        )
    index = len(data_inputs(target.node)) - target.outputs
    library.append_to_region(body, target.node, outer)
    further[key] = variable("x", index)
    return further[key]


def _set_outputs(definition: Definition, names: list[str]) -> None:
    results = [definition.ret[output.name] for output in definition.signature.output_arg]
    kinds = [output.type for output in definition.signature.output_arg]
    definition.ret.clear()
    del definition.signature.output_arg[:]
    for name, result, kind in zip(names, results, kinds, strict=True):
        definition.signature.output_arg.add(name=name, type=kind)
        definition.ret[name] = result
