"""Requests as bare messages, for what no well-behaved client sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
import numpy as np

from gradrule.v1 import evaluate_pb2, evaluate_pb2_grpc, graph_pb2, program_pb2, tensor_pb2

DT_FLOAT = tensor_pb2.DT_FLOAT
TIMEOUT_S = 30.0


def node(name: str, op: str, *inputs: str, **attrs: graph_pb2.AttrValue) -> graph_pb2.Node:
    """A node as it stands in a graph."""
    return graph_pb2.Node(name=name, op=op, input=inputs, attr=attrs)


def graph(*nodes: graph_pb2.Node, functions: Any = ()) -> graph_pb2.Graph:
    """A graph of these nodes."""
    return graph_pb2.Graph(node=nodes, library=graph_pb2.FunctionLibrary(function=functions))


def placeholder(name: str = "x", dtype: Any = DT_FLOAT) -> graph_pb2.Node:
    """A placeholder of any shape."""
    return node(name, "Placeholder", dtype=graph_pb2.AttrValue(type=dtype))


def sign_graph() -> graph_pb2.Graph:
    """y = sign(x)."""
    return graph(placeholder(), node("y", "Sign", "x"))


def tensor(values: Any) -> tensor_pb2.Tensor:
    """A float32 tensor."""
    array = np.asarray(values, np.float32)
    shape = tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=size) for size in array.shape])
    return tensor_pb2.Tensor(dtype=DT_FLOAT, tensor_shape=shape, tensor_content=array.tobytes())


def feeds(given: Mapping[str, tensor_pb2.Tensor]) -> list[tensor_pb2.NamedTensor]:
    """Feeds of a request."""
    return [
        tensor_pb2.NamedTensor(name=name, value=tensor_pb2.TensorSource(inline_tensor=value))
        for name, value in given.items()
    ]


def request(
    of: graph_pb2.Graph | bytes, given: Mapping[str, tensor_pb2.Tensor] | None = None, **spec: Any
) -> evaluate_pb2.EvaluateRequest:
    """An Evaluate request; fetches y unless `spec` says other."""
    message = evaluate_pb2.EvaluateRequest(feeds=feeds({"x": tensor([1.0])} if given is None else given))
    message.spec.CopyFrom(program_pb2.ProgramSpec(**({"fetches": ["y"]} | spec)))
    if isinstance(of, bytes):
        message.spec.graph.serialized = of
    else:
        message.spec.graph.inline_graph.CopyFrom(of)
    return message


def vjp(**words: Any) -> program_pb2.Vjp:
    """dy/dx unless `words` say other."""
    return program_pb2.Vjp(**({"ys": ["y"], "xs": ["x"]} | words))


def evaluate(channel: grpc.Channel, message: evaluate_pb2.EvaluateRequest, timeout: float = TIMEOUT_S) -> Any:
    """One Evaluate."""
    return evaluate_pb2_grpc.GradientServiceStub(channel).Evaluate(message, timeout=timeout)


def send(channel: grpc.Channel, method: str, data: bytes, timeout: float = TIMEOUT_S) -> bytes:
    """Bytes to a method, `GradientService/Evaluate` for example; the bytes of its answer."""
    answer: bytes = channel.unary_unary(f"/gradrule.v1.{method}")(data, timeout=timeout)
    return answer


def assert_healthy(channel: grpc.Channel) -> None:
    """A good request gets its right answer."""
    answer = evaluate(channel, request(sign_graph(), {"x": tensor([-2.0, 3.0])}))
    assert np.frombuffer(answer.outputs[0].value.inline_tensor.tensor_content, np.float32).tolist() == [-1.0, 1.0]
