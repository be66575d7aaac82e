"""Converts models in ONNX's format to graphs."""

from __future__ import annotations

from gradrule import errors as client_errors
from gradrule.common import tensor_codec
from gradrule.v1 import errors_pb2, graph_pb2, rule_pb2
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.policy import Limits, check_parsed_size

_FIELD = "spec.graph"


def is_onnx(source: rule_pb2.GraphSource) -> bool:
    """Returns whether a graph is an ONNX model. Raises MALFORMED_REQUEST for a format that is unknown or misplaced."""
    if source.format == rule_pb2.GRAPH_FORMAT_UNSPECIFIED:
        return False
    if source.HasField("inline_graph") or source.format not in rule_pb2.GraphFormat.values():
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
            f"the graph's format is {source.format}; set GRAPH_DEF or ONNX for bytes or a blob, and none for a message",
            field=f"{_FIELD}.format",
        )
    return source.format == rule_pb2.GRAPH_FORMAT_ONNX


def to_graph(data: bytes, limits: Limits) -> tuple[graph_pb2.Graph, dict[str, str]]:
    """Converts a model to a graph whose variables have initial values.

    Returns:
        The graph, and the names of its tensors by the model's names of values.

    Raises:
        GradruleError: INVALID_GRAPH, UNSUPPORTED, LIMIT_EXCEEDED, or the reason of another error of the conversion.
    """
    # Most workers never need the package, whose import takes as long as ten small programs.
    import onnx

    from gradrule._models.onnx_graph import convert

    check_parsed_size(data, onnx.ModelProto, limits, field=_FIELD)
    try:
        model = convert(data)
    except client_errors.GradruleError as cause:
        raise GradruleError(
            [
                Finding(errors_pb2.ErrorReason.Value(f"ERROR_REASON_{item.reason}"), item.message, item.node, _FIELD)
                for item in cause.details
            ]
        ) from None
    graph = model.message
    taken = {node.name for node in graph.node}
    for name, value in model.variables.items():
        message = tensor_codec.to_message(value)
        first = f"{name}/initial_value"
        while first in taken:
            first += "_"
        initial = graph.node.add(name=first, op="Const")
        initial.attr["dtype"].type = message.dtype
        initial.attr["value"].tensor.CopyFrom(message)
        assign = graph.node.add(name=f"{name}/Assign", op="AssignVariableOp", input=[name, initial.name])
        assign.attr["dtype"].type = message.dtype
    # Names of variables stand for their values.
    names = {name: tensor for name, tensor in model.names.items() if name not in model.variables}
    return graph, {name: tensor.removesuffix(":0") for name, tensor in names.items()}
