"""Builds requests as plain messages, for what no client sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
import numpy as np

from gradrule.v1 import evaluate_pb2, evaluate_pb2_grpc, graph_pb2, program_pb2, tensor_pb2

DT_FLOAT = tensor_pb2.DT_FLOAT
TIMEOUT_S = 30.0


def node(name: str, op: str, *inputs: str, **attrs: graph_pb2.AttrValue) -> graph_pb2.Node:
    """Makes a graph node."""
    return graph_pb2.Node(name=name, op=op, input=inputs, attr=attrs)


def graph(*nodes: graph_pb2.Node, functions: Any = ()) -> graph_pb2.Graph:
    """Makes a graph of these nodes."""
    return graph_pb2.Graph(node=nodes, library=graph_pb2.FunctionLibrary(function=functions))


def placeholder(name: str = "x", dtype: Any = DT_FLOAT) -> graph_pb2.Node:
    """Makes a placeholder of any shape."""
    return node(name, "Placeholder", dtype=graph_pb2.AttrValue(type=dtype))


def sign_graph() -> graph_pb2.Graph:
    """Makes y = sign(x)."""
    return graph(placeholder(), node("y", "Sign", "x"))


def tensor(values: Any) -> tensor_pb2.Tensor:
    """Makes a float32 tensor."""
    array = np.asarray(values, np.float32)
    shape = tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=size) for size in array.shape])
    return tensor_pb2.Tensor(dtype=DT_FLOAT, tensor_shape=shape, tensor_content=array.tobytes())


def feeds(given: Mapping[str, tensor_pb2.Tensor]) -> list[tensor_pb2.NamedTensor]:
    """Makes the feeds of a request."""
    return [
        tensor_pb2.NamedTensor(name=name, value=tensor_pb2.TensorSource(inline_tensor=value))
        for name, value in given.items()
    ]


def request(
    of: graph_pb2.Graph | bytes, given: Mapping[str, tensor_pb2.Tensor] | None = None, **spec: Any
) -> evaluate_pb2.EvaluateRequest:
    """Makes an EvaluateRequest that fetches y, unless `spec` says otherwise."""
    message = evaluate_pb2.EvaluateRequest(feeds=feeds({"x": tensor([1.0])} if given is None else given))
    message.spec.CopyFrom(program_pb2.ProgramSpec(**({"fetches": ["y"]} | spec)))
    if isinstance(of, bytes):
        message.spec.graph.serialized = of
    else:
        message.spec.graph.inline_graph.CopyFrom(of)
    return message


def vjp(**words: Any) -> program_pb2.Vjp:
    """Asks for dy/dx, unless `words` say otherwise."""
    return program_pb2.Vjp(**({"ys": ["y"], "xs": ["x"]} | words))


def evaluate(channel: grpc.Channel, message: evaluate_pb2.EvaluateRequest, timeout: float = TIMEOUT_S) -> Any:
    """Sends one EvaluateRequest."""
    return evaluate_pb2_grpc.GradientServiceStub(channel).Evaluate(message, timeout=timeout)


def send(channel: grpc.Channel, method: str, data: bytes, timeout: float = TIMEOUT_S) -> bytes:
    """Sends bytes to a method such as `GradientService/Evaluate` and returns the bytes of the answer."""
    answer: bytes = channel.unary_unary(f"/gradrule.v1.{method}")(data, timeout=timeout)
    return answer


def assert_healthy(channel: grpc.Channel) -> None:
    """Checks that a valid request gets the right answer."""
    answer = evaluate(channel, request(sign_graph(), {"x": tensor([-2.0, 3.0])}))
    assert np.frombuffer(answer.outputs[0].value.inline_tensor.tensor_content, np.float32).tolist() == [-1.0, 1.0]
