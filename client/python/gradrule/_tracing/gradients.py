"""Gradients that live in this process become functions of the graph.

A node that `tf.custom_gradient` left (an IdentityN over results, arguments and variables) becomes a region: see
`Region` below for what is written. A node whose gradient was registered with `tf.RegisterGradient` under a name that
is no op type's gets the same, with the op's own inputs and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gradrule._builder.names import UniqueNames
from gradrule._tracing import tf_private
from gradrule._tracing.bodies import GRADIENT_ATTR, Body, Definition, Library, Node, data_inputs, note_handle
from gradrule._tracing.editing import referenced, renamed
from gradrule.errors import UnsupportedError

REGION_ATTR = "_gradrule_region"
OUTPUTS_ATTR = "_gradrule_outputs"
INPUTS_ATTR = "_gradrule_inputs"

_LOADED_NAME = "custom_gradient"


@dataclass(frozen=True, slots=True)
class Site:
    """A node with a gradient of this process, and what the gradient function's variables are.

    A region (region is its name): `y` are the first inputs of the node, `x` the others. Otherwise `x` are the op's
    inputs and `y` its outputs.
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
        what = f"tf.custom_gradient {self.region!r}" if self.region else f"gradient {_wish(self.op)!r}"
        return f"{what} at node {self.op.name!r}"


def attach_gradients(library: Library) -> None:
    """Traces the gradients of all nodes of all bodies, those of the gradient functions included."""
    done: set[str] = set()
    shared: dict[Any, str] = {}
    while pending := [body for name, body in library.bodies.items() if name not in done]:
        for body in pending:
            done.add(body.name)
            for op in body.graph.get_operations():
                if GRADIENT_ATTR in op.node_def.attr and op.name in body.nodes:
                    _attach(library, body, op, shared)


def drop_unused(library: Library) -> None:
    """Takes arguments that nothing uses from gradient functions: they are named, so none is needed for its place."""
    for body in library.bodies.values():
        if body.gradient_of is not None:
            used = referenced(body.definition)
            kept = [argument for argument in body.definition.signature.input_arg if argument.name in used]
            del body.definition.signature.input_arg[:]
            body.definition.signature.input_arg.extend(kept)


def variable(letter: str, index: int) -> str:
    """`x, x1, x2, …`."""
    return f"{letter}{index}" if index else letter


def _wish(op: Any) -> str:
    return str(op.get_attr(GRADIENT_ATTR).decode())


def _attach(library: Library, body: Body, op: Any, shared: dict[Any, str]) -> None:
    node, wish = body.nodes[op.name], _wish(op)
    if tf_private.op_definition(wish) is not None:
        return
    try:
        function = tf_private.registered_gradient(wish)
    except LookupError:
        # A rule of the server's, or a gradient of another process, which the server tells apart.
        return
    site, wished_name = _site(body, node, op, function)
    key = None if site.region else (wish, op.type, _static(op))
    if key is not None and key in shared:
        node.attr[GRADIENT_ATTR].s = shared[key].encode()
        return
    name = library.unique_gradient(wished_name)
    try:
        graph, output_names = _traced(site, function, name)
    except UnsupportedError:
        if library.runs_forward(body):
            raise
        # A derivative of second order, which functions such as tf.recompute_grad do not have. The name that stays is
        # one of another process to the server, which refuses it where somebody asks for that derivative.
        return
    if site.region:
        node.attr[REGION_ATTR].s = (name if site.region == _LOADED_NAME else site.region).encode()
        node.attr[OUTPUTS_ATTR].i = site.outputs
        node.attr[INPUTS_ATTR].i = len(site.xs)
    elif key is not None:
        shared[key] = name
    node.attr[GRADIENT_ATTR].s = name.encode()
    library.gradients[name] = name
    _write(library, site, graph, name, output_names)


def _site(body: Body, node: Node, op: Any, function: Any) -> tuple[Site, str]:
    """The site, and a name for its gradient function."""
    if op.type == "IdentityN" and function is not None:
        custom = tf_private.custom_gradient_of(function)
        if custom is not None:
            return Site(body, node, op, *custom), f"{custom[0]}_gradient"
        if tf_private.is_loaded_gradient(function):
            return Site(body, node, op, _LOADED_NAME, _results_of_loaded(op)), _LOADED_NAME
    return Site(body, node, op, None, len(op.outputs)), _wish(op)


def _results_of_loaded(op: Any) -> int:
    """How many inputs of a loaded IdentityN are results: those that something uses.

    A SavedModel does not say it. Only results are ever used behind the node, and none of them gets a gradient.
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


def _traced(site: Site, function: Any, name: str) -> tuple[Any, list[str]]:
    """The gradient as a function graph, of upstream gradients and what it captured, and the names of its outputs."""
    names = []
    with site.body.graph.as_default():
        graph = tf_private.FuncGraph(name)
    with graph.as_default():
        upstream: list[Any] = []
        for index, y in enumerate(site.ys):
            if _is_differentiable(y):
                upstream.append(tf.compat.v1.placeholder(y.dtype, y.shape, name=variable("dy", index)))
            else:
                upstream.append(None)
        graph.inputs = [tensor for tensor in upstream if tensor is not None]
        rest = [None] * (len(site.op.outputs) - len(upstream))
        try:
            gradients = None if function is None else function(site.op, *upstream, *rest)
        except Exception as cause:
            raise UnsupportedError(f"{site}: its gradient function cannot be traced: {cause}") from cause
        gradients = _as_list(site, gradients)[site.outputs if site.region else 0 :]
        for index, (x, gradient) in enumerate(zip(site.xs, gradients, strict=True)):
            if gradient is not None and _is_differentiable(x):
                dense = tf.convert_to_tensor(gradient, dtype=x.dtype)
                graph.outputs.append(tf.identity(dense, name=variable("dx", index)))
                names.append(variable("dx", index))
    return graph, names


def _as_list(site: Site, gradients: Any) -> list[Any]:
    wanted = len(site.op.inputs)
    if gradients is None:
        return [None] * wanted
    found = list(gradients) if isinstance(gradients, list | tuple) else [gradients]
    if len(found) != wanted:
        extra = site.outputs if site.region else 0
        raise UnsupportedError(
            f"{site}: its gradient function gives {len(found) - extra} gradients for {wanted - extra} inputs"
        )
    return found


def _is_differentiable(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _write(library: Library, site: Site, graph: Any, name: str, output_names: list[str]) -> None:
    """Adds the gradient function to the library, its arguments named as a rule's variables."""
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
            arguments.append(_variable_of(library, site, outer, further))
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
    body.gradient_of = (site.body, site.node)
    library.add(body)


def _reference(argument: str | None, constants: set[str]) -> str | None:
    return f"{argument}:output:0" if argument in constants else argument


def _variable_of(library: Library, site: Site, outer: Any, further: dict[Any, str]) -> str:
    """The rule variable that a captured tensor is; one that is none yet becomes a further input of the region."""
    body = site.body
    inside = outer if getattr(outer, "graph", None) is body.graph else body.captured(outer)
    key = tf_private.identity_of(outer if inside is None else inside)
    for letter, tensors in (("x", site.xs), ("y", site.ys)):
        for index, tensor in enumerate(tensors):
            if tf_private.identity_of(tensor) == key:
                return variable(letter, index)
    if key in further:
        return further[key]
    if not site.region:
        raise UnsupportedError(
            f"{site}: its gradient function uses the tensor {getattr(outer, 'name', outer)!r}, which is neither an "
            "input nor an output of the node; write the function with tf.custom_gradient"
        )
    index = len(data_inputs(site.node)) - site.outputs
    library.append_to_region(body, site.node, outer)
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
