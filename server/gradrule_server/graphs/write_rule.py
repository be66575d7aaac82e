"""From the expanded gradient that a graph brings along to the graph of a rule."""

from __future__ import annotations

from gradrule._dtypes import as_dt
from gradrule.v1.graph_pb2 import AttrValue, Graph, Versions
from gradrule.v1.tensor_pb2 import TensorShape
from gradrule_server.graphs.ir import ARG, Body
from gradrule_server.graphs.write import write_node, written_versions

# Keeps the names of what is inside apart from those of the rule's variables and results.
_INSIDE = "inside/"


def write_rule(body: Body, versions: Versions) -> bytes:
    """The rule's bytes: its arguments are placeholders `x`, `y`, `dy`, …, its results nodes `dx`, ….

    Loops and branches name functions that are not part of it: they are written with the graph.
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
        # What the function does besides is done before its results are used.
        message.input.extend(f"^{_name(body, control)}" for _, control in body.control_results)
    return graph.SerializeToString(deterministic=True)


def _name(body: Body, index: int) -> str:
    node = body.nodes[index]
    return node.name if node.op == ARG else f"{_INSIDE}{node.name}"
