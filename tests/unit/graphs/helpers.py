"""Builds small graphs, and traces graphs with TensorFlow as a reference for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule.v1.errors_pb2 import ErrorReason
from gradrule.v1.graph_pb2 import AttrValue, Function, Graph, NameAttrList, Node
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server import graphs
from gradrule_server.errors import Finding, GradruleError, reason_name

FLOAT = AttrValue(type=Dt.DT_FLOAT)


def node(name: str, op: str, *inputs: str, **attrs: AttrValue) -> Node:
    return Node(name=name, op=op, input=list(inputs), attr=attrs)


def placeholder(name: str = "x", dtype: Dt.ValueType = Dt.DT_FLOAT) -> Node:
    return node(name, "Placeholder", dtype=AttrValue(type=dtype))


def function(
    name: str, args: Sequence[str], results: Mapping[str, str], nodes: Sequence[Node], **control_ret: str
) -> Function:
    """Returns a function of float arguments and results."""
    made = Function(node_def=nodes, ret=results, control_ret=control_ret)
    made.signature.name = name
    for arg in args:
        made.signature.input_arg.add(name=arg, type=Dt.DT_FLOAT)
    for result in results:
        made.signature.output_arg.add(name=result, type=Dt.DT_FLOAT)
    made.signature.control_output.extend(control_ret)
    return made


def call(name: str, of: str, *inputs: str, results: int = 1, data_inputs: int | None = None) -> Node:
    """Returns a `PartitionedCall` of float arguments and results."""
    count = len(inputs) if data_inputs is None else data_inputs
    return node(
        name,
        "PartitionedCall",
        *inputs,
        f=AttrValue(func=NameAttrList(name=of)),
        Tin=AttrValue(list=AttrValue.ListValue(type=[Dt.DT_FLOAT] * count)),
        Tout=AttrValue(list=AttrValue.ListValue(type=[Dt.DT_FLOAT] * results)),
    )


def graph(*nodes: Node, functions: Sequence[Function] = ()) -> Graph:
    made = Graph(node=nodes)
    made.library.function.extend(functions)
    return made


def expand(of: Graph, fetches: Sequence[str] = (), **request: Any) -> graphs.Expanded:
    limits = request.pop("limits", None)
    return graphs.expand(of, graphs.ExpandRequest(fetches=list(fetches), **request), limits)


def nodes_of(expanded: graphs.Expanded) -> dict[str, Node]:
    """Returns the nodes at the top level of an expanded graph, by name."""
    return {item.name: item for item in Graph.FromString(expanded.graph_bytes).node}


def findings_of(of: Graph, fetches: Sequence[str] = (), **request: Any) -> list[Finding]:
    with pytest.raises(GradruleError) as caught:
        expand(of, fetches, **request)
    return list(caught.value.findings)


def reasons_of(of: Graph, fetches: Sequence[str] = (), **request: Any) -> list[str]:
    return [reason_name(finding.reason) for finding in findings_of(of, fetches, **request)]


def only_finding(of: Graph, reason: ErrorReason.ValueType, fetches: Sequence[str] = (), **request: Any) -> Finding:
    findings = findings_of(of, fetches, **request)
    assert [reason_name(finding.reason) for finding in findings] == [reason_name(reason)], findings
    return findings[0]


def traced(made: Callable[..., Any], *specs: tf.TensorSpec) -> tuple[Graph, list[str], list[str]]:
    """Returns the graph of a `tf.function`, and the names of its placeholders and outputs."""
    concrete = tf.function(made, autograph=False).get_concrete_function(*specs)
    message = Graph.FromString(concrete.graph.as_graph_def().SerializeToString())
    return message, [item.name for item in concrete.inputs], [item.name for item in concrete.outputs]


def run(of: Graph | bytes, fetches: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
    """Runs a graph with TensorFlow."""
    data = of if isinstance(of, bytes) else of.SerializeToString()
    with tf.Graph().as_default() as imported:
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(data), name="")
        full = {name if ":" in name else f"{name}:0": value for name, value in feeds.items()}
        with tf.compat.v1.Session(graph=imported) as session:
            result: list[Any] = session.run(list(fetches), full)
            return result


def assert_same_outputs(of: Graph, fetches: Sequence[str], feeds: Mapping[str, Any]) -> graphs.Expanded:
    """Expands a graph; asserts that TensorFlow computes the same from both graphs."""
    expanded = expand(of, fetches)
    wanted = run(of, [name if ":" in name else f"{name}:0" for name in fetches], feeds)
    got = run(expanded.graph_bytes, [expanded.tensor_names[name] for name in fetches], feeds)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    return expanded
