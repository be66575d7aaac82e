"""Makes small requests that are expensive to read."""

from __future__ import annotations

from gradrule.v1 import graph_pb2, program_pb2
from tests.service import raw

_FLOAT = graph_pb2.AttrValue(type=raw.DT_FLOAT)


def chain(nodes: int) -> graph_pb2.Graph:
    """Makes a placeholder and a chain of nodes."""
    graph = graph_pb2.Graph()
    graph.node.add(name="n0", op="Placeholder", attr={"dtype": _FLOAT})
    for index in range(1, nodes):
        graph.node.add(name=f"n{index}", op="Tanh", input=[f"n{index - 1}"])
    return graph


def slow_to_select() -> program_pb2.ProgramSpec:
    """Makes a program whose overrides check every node: compiling takes minutes."""
    spec = program_pb2.ProgramSpec(fetches=["n29999"])
    spec.graph.serialized = chain(30_000).SerializeToString()
    spec.vjp.ys.append("n29999")
    spec.vjp.xs.append("n0")
    for index in range(300):
        override = spec.overrides.add(rule="ste", optional=True)
        override.selector.node_regex = f"(n|m)*[0-9]*x{index}"
        override.selector.depends_on.append(f"n{index}")
    return spec


def nested_calls() -> program_pb2.ProgramSpec:
    """Makes 10 kB of functions that call each other twice: 200,000 nodes."""
    graph = graph_pb2.Graph()
    for level in range(12):
        function = graph.library.function.add()
        function.signature.name = f"f{level}"
        function.signature.input_arg.add(name="x", type=raw.DT_FLOAT)
        function.signature.output_arg.add(name="y", type=raw.DT_FLOAT)
        last = "x"
        for index in range(2 if level else 100):
            node = function.node_def.add(name=f"c{index}", input=[last])
            if level:
                node.op = "PartitionedCall"
                node.attr["f"].func.name = f"f{level - 1}"
                node.attr["Tin"].list.type.append(raw.DT_FLOAT)
                node.attr["Tout"].list.type.append(raw.DT_FLOAT)
                last = f"c{index}:output:0"
            else:
                node.op = "Tanh"
                node.attr["T"].type = raw.DT_FLOAT
                last = f"c{index}:y:0"
        function.ret["y"] = last
    graph.node.add(name="x", op="Placeholder", attr={"dtype": _FLOAT})
    call = graph.node.add(name="y", op="PartitionedCall", input=["x"])
    call.attr["f"].func.name = "f11"
    call.attr["Tin"].list.type.append(raw.DT_FLOAT)
    call.attr["Tout"].list.type.append(raw.DT_FLOAT)
    spec = program_pb2.ProgramSpec(fetches=["y"])
    spec.graph.inline_graph.CopyFrom(graph)
    return spec


def tiny_fields() -> bytes:
    """Makes an EvaluateRequest of four million fields: a few kilobytes when compressed."""
    return b"\x30\x01" * 3_990_000
