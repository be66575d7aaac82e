"""Collects the fuzzer's starting points: a real request for each use case, and graphs made by TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, seed, settings

from gradrule.common import tensor_codec
from gradrule.v1 import (
    admin_pb2,
    blob_pb2,
    evaluate_pb2,
    graph_pb2,
    override_pb2,
    program_pb2,
    rule_pb2,
    session_pb2,
    tensor_pb2,
)
from tests.service import generated, nested_graphs, nested_programs
from tests.service.graph_defs import build_graph_def, placeholder

_USES = Path(__file__).parents[2] / "contract" / "uses"
_FILES = (admin_pb2, rule_pb2, program_pb2, evaluate_pb2, blob_pb2, session_pb2)
_PREFIX = "/gradrule.v1."

NESTED = 40
FLAT = 60


@dataclass(frozen=True)
class Method:
    """Describes one RPC: `GradientService/Evaluate`, its message types, and which sides stream."""

    name: str
    request: type[Message]
    response: type[Message]
    requests_stream: bool
    responses_stream: bool

    @property
    def path(self) -> str:
        return _PREFIX + self.name


@cache
def methods() -> dict[str, Method]:
    """Returns every RPC of the protos."""
    services: list[ServiceDescriptor] = [
        service for file in _FILES for service in file.DESCRIPTOR.services_by_name.values()
    ]
    return {
        method.name: method
        for service in services
        for method in (_method(service, descriptor) for descriptor in service.methods)
    }


def _method(service: ServiceDescriptor, descriptor: MethodDescriptor) -> Method:
    return Method(
        name=f"{service.name}/{descriptor.name}",
        request=message_factory.GetMessageClass(descriptor.input_type),
        response=message_factory.GetMessageClass(descriptor.output_type),
        requests_stream=descriptor.client_streaming,
        responses_stream=descriptor.server_streaming,
    )


@dataclass(frozen=True)
class Seeds:
    """Holds requests by RPC as bytes, graphs as `EvaluateRequest`s, and the strings in them."""

    requests: dict[str, tuple[bytes, ...]]
    graphs: tuple[bytes, ...]
    words: tuple[str, ...]


@cache
def seeds(number: int) -> Seeds:
    """Returns the seeds of a number, equal for equal numbers."""
    requests: dict[str, list[bytes]] = {name: [] for name in methods()}
    for path in sorted(_USES.glob("*.json")):
        use = json.loads(path.read_text())
        name = use["rpc"].replace(".", "/")
        if name in requests:
            message = json_format.ParseDict(use["request"], methods()[name].request(), ignore_unknown_fields=True)
            requests[name].append(message.SerializeToString())
    graphs = (*_flat(number), *_nested(number), _with_variables())
    return Seeds(
        requests={name: tuple(found) or (b"",) for name, found in requests.items()},
        graphs=tuple(message.SerializeToString() for message in graphs),
        words=_words(graphs),
    )


def _flat(number: int) -> list[evaluate_pb2.EvaluateRequest]:
    """Makes graphs and rules with hypothesis."""
    found: list[evaluate_pb2.EvaluateRequest] = []

    @seed(number)
    @settings(
        max_examples=FLAT,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(generated.cases())
    def collect(case: generated.Case) -> None:
        overrides = []
        for node, rule in case.overrides:
            override = override_pb2.GradientOverride(selector=override_pb2.Selector(node=node))
            if rule.op_rule:
                override.rule = rule.expression
            else:
                override.definition.expression = rule.expression
            overrides.append(override)
        found.append(request(case.graph_def, case.feeds, ["y"], case.xs, overrides))

    collect()
    return found


def _nested(number: int) -> list[evaluate_pb2.EvaluateRequest]:
    """Makes nested functions, loops and branches."""
    found = []
    for index in range(NESTED):
        chance = Random(f"{number}/{index}")
        program = nested_programs.generate(chance)
        feeds: dict[str, Any] = {name: np.linspace(-1, 1, program.size) for name in program.top.params}
        xs = list(feeds)
        feeds["rows"] = np.ones((program.n_rows, program.size))
        feeds["k"] = np.int32(1)
        override = override_pb2.GradientOverride(
            selector=override_pb2.Selector(op_type=chance.choice(nested_programs.UNARY)), optional=True
        )
        override.definition.expression = "5 * dy"
        graph_def = nested_graphs.graph_def(program, static=chance.random() < 0.5)
        found.append(request(graph_def, feeds, ["y0"], xs, [override]))
    return found


def _with_variables() -> evaluate_pb2.EvaluateRequest:
    """Makes a graph that assigns variables."""

    def build() -> None:
        x = placeholder("x")
        weight = tf.compat.v1.get_variable("w", initializer=tf.constant([2.0]), use_resource=True)
        count = tf.compat.v1.get_variable("n", initializer=tf.constant(0.0), use_resource=True)
        with tf.control_dependencies([count.assign_add(1.0)]):
            tf.reduce_sum(x * weight * count.read_value(), name="y")

    return request(build_graph_def(build), {"x": np.ones(3, np.float32)}, ["y"], ["x"], [])


def request(
    graph_def: Any,
    feeds: dict[str, Any],
    ys: list[str],
    xs: list[str],
    overrides: Sequence[override_pb2.GradientOverride],
) -> evaluate_pb2.EvaluateRequest:
    """Makes a request that fetches the ys and differentiates them."""
    message = evaluate_pb2.EvaluateRequest(
        feeds=[
            tensor_pb2.NamedTensor(
                name=name, value=tensor_pb2.TensorSource(inline_tensor=tensor_codec.to_message(np.asarray(value)))
            )
            for name, value in feeds.items()
        ]
    )
    message.spec.CopyFrom(
        program_pb2.ProgramSpec(fetches=ys, vjp=program_pb2.Vjp(ys=ys, xs=xs), overrides=list(overrides))
    )
    message.spec.graph.serialized = graph_def.SerializeToString()
    return message


def _words(graphs: Sequence[evaluate_pb2.EvaluateRequest]) -> tuple[str, ...]:
    """Returns names of nodes, functions, op types and attributes that occur in a graph."""
    found = {
        "x",
        "y",
        "w",
        "y:0",
        "x:0",
        "ste",
        "ste_sign",
        "builtin/ste",
        "Sign",
        "Relu",
        "Identity",
        "default",
        "grad",
    }
    for message in graphs[:: max(1, len(graphs) // 25)]:
        graph = graph_pb2.Graph.FromString(message.spec.graph.serialized)
        found.update(node.name for node in graph.node)
        found.update(function.signature.name for function in graph.library.function)
        found.update(node.op for node in graph.node)
    return tuple(sorted(found))
