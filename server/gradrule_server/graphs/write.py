"""Numbers the nodes that have rules and serializes the expanded graph and embedded rules for the engine.

The `Graph` message is wire-compatible with GraphDef.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping

from gradrule.common import op_definitions, op_inference
from gradrule.common.dtypes import as_dt
from gradrule.v1 import graph_pb2
from gradrule.v1.graph_pb2 import AttrValue, Graph, NameAttrList, Versions
from gradrule.v1.tensor_pb2 import Dt, Tensor, TensorShape
from gradrule_server.errors import Reason, error
from gradrule_server.graphs.ir import (
    ARG,
    GRADIENT_ATTR,
    LOOPS,
    Body,
    Limits,
    Node,
    Ref,
    bodies_of,
    nodes_of,
    short_tensor_name,
)
from gradrule_server.graphs.resolution_context import ForeignGradient, Resolved
from gradrule_server.graphs.resolve import FOREIGN_GRADIENT, NO_GRADIENT, VARIABLE_VALUE
from gradrule_server.link.v1.link_pb2 import MarkedNode
from gradrule_server.policy import DROPPED_ATTRS, FAKE_PARAM

GRADIENT_NAME = b"gradrule"
MARK_ATTR = "_gradrule_mark"
# Keeps names of inner nodes of a rule distinct from the rule's variables and results.
_INSIDE = "inside/"


def write_graph(top: Body, rules: Iterable[Body], versions: Versions) -> bytes:
    """Returns the serialized graph, with all functions that the top level and `rules` use."""
    graph = Graph(versions=written_versions(versions))
    for root in (top, *rules):
        for body in bodies_of(root):
            if body is not root:
                _write_function(body, graph.library.function.add())
    for node in top.nodes:
        message = graph.node.add()
        write_node(node, message)
        inputs = [short_tensor_name(top.nodes[producer].name, output) for producer, output in node.inputs]
        if node.controls:
            inputs += [f"^{top.nodes[control].name}" for control in node.controls]
        message.input.extend(inputs)
    return graph.SerializeToString()


def written_versions(versions: Versions) -> Versions:
    """Returns the versions message for a written graph."""
    written = Versions()
    written.CopyFrom(versions)
    # Graphs without a version get the current one: below version 24, TensorFlow reads a placeholder's shape () as
    # unknown and accepts ops that were deprecated later.
    written.producer = written.producer or op_definitions.graph_version()
    return written


def tensor_name(body: Body, ref: Ref) -> str:
    """Returns `node:output`."""
    return f"{body.nodes[ref[0]].name}:{ref[1]}"


def write_node(node: Node, message: graph_pb2.Node) -> None:
    """Writes a node without its inputs."""
    message.name = node.name
    if node.op == FAKE_PARAM and _has_zero(node.attrs["dtype"].type):
        _write_zeros(node, message)
        return
    message.op = node.op
    for name, value in node.attrs.items():
        if name not in DROPPED_ATTRS and (not name.startswith("_") or _is_valid_note(node, name, value)):
            message.attr[name].CopyFrom(value)
    for attr, bodies in node.functions:
        names = [NameAttrList(name=body.name) for body in bodies]
        is_list = attr == "branches"
        value = AttrValue(list=AttrValue.ListValue(func=names)) if is_list else AttrValue(func=names[0])
        message.attr[attr].CopyFrom(value)
    if node.watched:
        message.attr[GRADIENT_ATTR].s = GRADIENT_NAME
    if node.mark is not None:
        message.attr[MARK_ATTR].i = node.mark


def _has_zero(dtype: int) -> bool:
    return dtype not in (Dt.DT_RESOURCE, Dt.DT_VARIANT)


def _write_zeros(node: Node, message: graph_pb2.Node) -> None:
    """Writes zeros in place of a FakeParam, whose kernel returns memory that may hold other callers' data."""
    shape = node.attrs["shape"].shape
    dtype = node.attrs["dtype"].type
    known = TensorShape(dim=[TensorShape.Dim(size=max(dim.size, 0)) for dim in shape.dim])
    message.op = "Const"
    message.attr["dtype"].type = dtype
    message.attr["value"].tensor.CopyFrom(Tensor(dtype=dtype, tensor_shape=known))


def _is_valid_note(node: Node, name: str, value: AttrValue) -> bool:
    if name == "_num_original_outputs":
        return node.op in LOOPS and value.WhichOneof("value") == "i" and 0 <= value.i <= len(node.outputs or ())
    return name == "_lower_using_switch_merge" and value.WhichOneof("value") == "b"


def _write_function(body: Body, message: graph_pb2.Function) -> None:
    signature = message.signature
    signature.name = body.name
    signature.is_stateful = body.is_stateful
    for position, arg in enumerate(body.nodes[: body.arg_count]):
        signature.input_arg.add(name=arg.name, type=as_dt(arg.outputs[0] if arg.outputs else 0))
        for name, value in body.arg_notes[position].items():
            message.arg_attr[position].attr[name].CopyFrom(value)
    layouts: dict[int, list[str]] = {}
    for node in body.nodes[body.arg_count :]:
        target = message.node_def.add()
        write_node(node, target)
        target.input.extend(_inner_name(body, ref, layouts) for ref in node.inputs)
        target.input.extend(
            f"^{body.nodes[control].name}" for control in node.controls if body.nodes[control].op != ARG
        )
    # Give results new, valid names: TensorFlow derives names of nodes from them, and nothing refers to the old names.
    for number, (dtype, ref) in enumerate(zip(body.result_types, body.results, strict=True)):
        name = f"result_{number}"
        signature.output_arg.add(name=name, type=as_dt(dtype))
        message.ret[name] = _inner_name(body, ref, layouts)
    for number, (_, control) in enumerate(body.control_results):
        if body.nodes[control].op != ARG:
            name = f"control_{number}"
            signature.control_output.append(name)
            message.control_ret[name] = body.nodes[control].name


def _inner_name(body: Body, ref: Ref, layouts: dict[int, list[str]]) -> str:
    """Returns `arg` or `node:output_name:index`."""
    node = body.nodes[ref[0]]
    if node.op == ARG:
        return node.name
    if ref[0] not in layouts:
        layouts[ref[0]] = _output_names(node)
    return f"{node.name}:{layouts[ref[0]][ref[1]]}"


def _output_names(node: Node) -> list[str]:
    op = op_definitions.find(node.op)
    if op is None:
        raise AssertionError(f"{node.op} passed the checks")
    slices = op_inference.output_slices(op, node.attrs)
    return [f"{name}:{index}" for name, (_, count) in slices.items() for index in range(count)]


def mark_nodes(
    roots: Iterable[Body], resolved: Mapping[int, Resolved], variable_values: Collection[Node]
) -> list[MarkedNode]:
    """Sets `mark` of all nodes that have matches, and returns the marks. Nodes that share a match share a mark.

    Args:
        roots: The bodies.
        resolved: The matches, by id() of the node.
        variable_values: Nodes of written values of variables.
    """
    marks: list[MarkedNode] = []
    if variable_values:
        marks.append(MarkedNode(rule=VARIABLE_VALUE))
    for node in variable_values:
        node.mark = 0
    numbers: dict[int, int] = {}
    for _, node in itertools.chain.from_iterable(map(nodes_of, roots)):
        found = resolved.get(id(node))
        if not found:
            continue
        if id(found[0]) not in numbers:
            numbers[id(found[0])] = len(marks)
            last = len(marks) + len(found) - 1
            for item in found:
                number = len(marks)
                if isinstance(item, ForeignGradient):
                    marks.append(MarkedNode(rule=FOREIGN_GRADIENT, node=item.node, foreign=item.name))
                else:
                    item.mark = number
                    otherwise = number + 1 if number < last else None
                    marks.append(
                        MarkedNode(
                            rule=item.rule if item.depends_on_xs else NO_GRADIENT,
                            node=item.resolution.node,
                            outputs=item.outputs,
                            inputs=item.inputs,
                            rank=item.rank,
                            otherwise=otherwise,
                            op_type=item.resolution.op_type if item.outputs else "",
                            is_step=item.is_step,
                            every_order=item.every_order,
                        )
                    )
        node.mark = numbers[id(found[0])]
    return marks


def write_embedded_rules(
    bodies: Mapping[str, Body], labels: Mapping[tuple[str, str], int], versions: Versions, limits: Limits
) -> dict[int, bytes]:
    """Returns the serialized graphs of the embedded rules by index; indices of one gradient share the bytes object.

    Raises LIMIT_EXCEEDED for too many nodes or bytes: the engine receives one copy per label.
    """
    nodes = sum(len(bodies[name].nodes) for name, _ in labels)
    if nodes > limits.inlined_nodes:
        raise error(
            Reason.ERROR_REASON_LIMIT_EXCEEDED,
            f"embedded gradients of the graph have {nodes} nodes, once for each region that they belong to; "
            f"{limits.inlined_nodes} is the most (--max-inlined-nodes)",
        )
    written = {name: _write_rule(body, versions) for name, body in bodies.items()}
    added = sum(len(written[name]) for name, _ in labels) - sum(map(len, written.values()))
    if added > limits.inlined_bytes:
        raise error(
            Reason.ERROR_REASON_LIMIT_EXCEEDED,
            f"embedded gradients of the graph belong to so many regions that they take {added} bytes more; "
            f"{limits.inlined_bytes} is the most (--max-inlined-bytes)",
        )
    return {index: written[name] for (name, _), index in labels.items()}


def _write_rule(body: Body, versions: Versions) -> bytes:
    """Returns a rule's serialized graph: arguments are placeholders `x`, `y`, `dy`, …, results are nodes `dx`, ….

    Functions of loops and branches are not included; they are written with the graph.
    """
    graph = Graph(versions=written_versions(versions))
    unknown = AttrValue(shape=TensorShape(unknown_rank=True))
    for node in body.nodes:
        message = graph.node.add()
        if node.op == ARG:
            message.name, message.op = node.name, "Placeholder"
            message.attr["dtype"].type = as_dt((node.outputs or (0,))[0])
            message.attr["shape"].CopyFrom(unknown)
            continue
        write_node(node, message)
        message.name = f"{_INSIDE}{node.name}"
        message.input.extend(f"{_name(body, ref[0])}:{ref[1]}" for ref in node.inputs)
        message.input.extend(f"^{_name(body, control)}" for control in node.controls)
    for name, dtype, ref in zip(body.result_names, body.result_types, body.results, strict=True):
        message = graph.node.add(name=name, op="Identity", input=[f"{_name(body, ref[0])}:{ref[1]}"])
        message.attr["T"].type = as_dt(dtype)
        # Control outputs of the function run before its results are used.
        message.input.extend(f"^{_name(body, control)}" for _, control in body.control_results)
    return graph.SerializeToString(deterministic=True)


def _name(body: Body, index: int) -> str:
    node = body.nodes[index]
    return node.name if node.op == ARG else f"{_INSIDE}{node.name}"
