"""A server converts ONNX models that requests hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gradrule.common import tensor_codec
from gradrule.v1 import (
    blob_pb2,
    blob_pb2_grpc,
    evaluate_pb2,
    program_pb2,
    program_pb2_grpc,
    rule_pb2,
    rule_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from tests.service import raw
from tests.service.answers import assert_close, keeps_engine, refused_raw
from tests.service.servers import running_server

RANDOM = np.random.default_rng(5)
WEIGHT = RANDOM.normal(size=(4, 3)).astype(np.float32)
LARGE = RANDOM.normal(size=(512, 512)).astype(np.float32)
X = RANDOM.normal(size=(2, 4)).astype(np.float32)


def model(*nodes: Any, weights: dict[str, Any] | None = None, output: str = "y:out", opset: int = 21) -> bytes:
    """Returns the bytes of a model with the input `/in`, float32 [N, 4]."""
    given = {"w": WEIGHT} if weights is None else weights
    graph = helper.make_graph(
        list(nodes),
        "model",
        [helper.make_tensor_value_info("/in", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["N", "M"])],
        [numpy_helper.from_array(value, name) for name, value in given.items()],
    )
    data: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]).SerializeToString()
    return data


def simple() -> bytes:
    """Returns y = relu(in · w), whose names are no names of nodes in TensorFlow."""
    return model(
        helper.make_node("MatMul", ["/in", "w"], ["/a/MatMul_output_0"], name="/a/MatMul"),
        helper.make_node("Relu", ["/a/MatMul_output_0"], ["y:out"], name="/a/Relu"),
    )


def request(data: bytes, value: Any = X, **spec: Any) -> evaluate_pb2.EvaluateRequest:
    """Returns a request that fetches `y:out` and asks for its gradients with respect to `/in` and `w`."""
    spec = {"fetches": ["y:out"], "vjp": program_pb2.Vjp(ys=["y:out"], xs=["/in", "w"])} | spec
    made = raw.request(data, {"/in": tensor_codec.to_message(value)}, **spec)
    made.spec.graph.format = rule_pb2.GRAPH_FORMAT_ONNX
    return made


def values(tensors: Any) -> dict[str, Any]:
    return {item.name: tensor_codec.to_numpy(item.value.inline_tensor) for item in tensors}


def assert_right(answer: Any, weight: Any = WEIGHT, value: Any = X) -> None:
    product = value @ weight
    assert_close(values(answer.outputs)["y:out"], np.maximum(product, 0))
    wanted = (product > 0).astype(np.float32)
    gradients = {item.x: tensor_codec.to_numpy(item.dense) for item in answer.gradients}
    assert_close(gradients["/in"], wanted @ weight.T)
    assert_close(gradients["w"], value.T @ wanted)


def test_a_model_gives_outputs_and_gradients_under_its_own_names(channel: grpc.Channel) -> None:
    assert_right(raw.evaluate(channel, request(simple())))


def test_nodes_may_have_names_that_initial_values_would_get(channel: grpc.Channel) -> None:
    data = model(
        helper.make_node("MatMul", ["/in", "w"], ["h"], name="w/initial_value"),
        helper.make_node("Relu", ["h"], ["y:out"]),
    )
    assert_right(raw.evaluate(channel, request(data)))


def test_overrides_name_operations_of_the_model(channel: grpc.Channel) -> None:
    made = request(simple(), fetches=["/a/MatMul_output_0"])
    made.spec.overrides.add(rule="ste").selector.op_type = "Relu"
    answer = raw.evaluate(channel, made)
    assert_close(values(answer.outputs)["/a/MatMul_output_0"], X @ WEIGHT)
    gradients = {item.x: tensor_codec.to_numpy(item.dense) for item in answer.gradients}
    assert_close(gradients["/in"], np.ones((2, 3), np.float32) @ WEIGHT.T)


def test_a_model_may_be_a_blob(channel: grpc.Channel) -> None:
    data = model(
        helper.make_node("MatMul", ["/in", "w"], ["h"]),
        helper.make_node("MatMul", ["h", "large"], ["p"]),
        helper.make_node("Relu", ["p"], ["y:out"]),
        weights={"w": LARGE[:4], "large": LARGE},
    )
    digest = hashlib.sha256(data).hexdigest()
    parts = [blob_pb2.UploadBlobRequest(sha256=digest), blob_pb2.UploadBlobRequest(data=data)]
    blob_pb2_grpc.BlobServiceStub(channel).UploadBlob(iter(parts), timeout=60)
    made = request(b"", vjp=program_pb2.Vjp(ys=["y:out"], xs=["/in"]))
    made.spec.graph.blob_sha256 = digest
    wanted = np.maximum(X @ LARGE[:4] @ LARGE, 0)
    np.testing.assert_allclose(values(raw.evaluate(channel, made).outputs)["y:out"], wanted, atol=1e-5 * wanted.max())


def test_values_of_variables_replace_those_of_the_model(channel: grpc.Channel) -> None:
    other = -2 * WEIGHT
    given = raw.feeds({"w": tensor_codec.to_message(other)})
    assert_right(raw.evaluate(channel, request(simple(), variables=given)), other)


def test_stored_programs_outlive_the_server(tmp_path: Path) -> None:
    made = request(simple())
    for _ in range(2):
        with running_server(tmp_path) as server, grpc.insecure_channel(server.target) as channel:
            if made.HasField("spec"):
                stored = program_pb2.CompileProgramRequest(spec=made.spec, program_id="model")
                program_pb2_grpc.ProgramServiceStub(channel).CompileProgram(stored, timeout=60)
                made.program = "programs/model"
            assert_right(raw.evaluate(channel, made))


@pytest.mark.parametrize(
    ("data", "reason", "words"),
    [
        pytest.param(simple()[:-40], "INVALID_GRAPH", ["ONNX"], id="truncated"),
        pytest.param(b"\x08\x07", "INVALID_GRAPH", ["ONNX"], id="no graph"),
        pytest.param(
            model(helper.make_node("Nonsense", ["/in"], ["y:out"], name="n")),
            "INVALID_GRAPH",
            ["Nonsense", "n"],
            id="unknown op",
        ),
        pytest.param(
            model(
                helper.make_node("SequenceConstruct", ["/in"], ["h"], name="n"),
                helper.make_node("ConcatFromSequence", ["h"], ["y:out"], name="m", axis=0),
            ),
            "UNSUPPORTED",
            ["Sequence"],
            id="unsupported op",
        ),
    ],
)
@keeps_engine
def test_wrong_models_are_refused(channel: grpc.Channel, data: bytes, reason: str, words: list[str]) -> None:
    with refused_raw(reason) as refusal:
        raw.evaluate(channel, request(data))
    refusal.says(*words)
    assert set(refusal.fields) == {"spec.graph"}


def test_external_data_is_refused(channel: grpc.Channel) -> None:
    made = onnx.ModelProto.FromString(simple())
    weight = made.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="/etc/hostname")
    with refused_raw("UNSUPPORTED") as refusal:
        raw.evaluate(channel, request(made.SerializeToString()))
    refusal.says("/etc/hostname", "only bytes")


def large(*nodes: Any) -> bytes:
    """Returns a model whose last value `h` has 10¹⁰ elements, of which it adds up all."""
    total = helper.make_node("ReduceSum", ["h"], ["s"], keepdims=0)
    return model(*nodes, total, helper.make_node("Add", ["/in", "s"], ["y:out"]))


def constant(name: str, *values: int) -> Any:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(values, np.int64), name))


def scalar(name: str, value: float) -> Any:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.float32(value), name))


def nested(depth: int) -> bytes:
    """Returns a model with `If` inside of `If`."""
    body = [helper.make_node("Identity", ["/in"], ["v"])]
    for level in range(depth):
        output = helper.make_tensor_value_info("v", TensorProto.FLOAT, ["N", 4])
        branch = helper.make_graph(body, f"g{level}", [], [output])
        body = [
            helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array(True), "c")),
            helper.make_node("If", ["c"], ["v"], then_branch=branch, else_branch=branch),
        ]
    return model(*body, helper.make_node("Identity", ["v"], ["y:out"]))


def huge_initialiser() -> bytes:
    made = onnx.ModelProto.FromString(simple())
    weight = made.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.dims[:] = [100_000, 100_000]
    data: bytes = made.SerializeToString()
    return data


BOMBS: dict[str, Callable[[], bytes]] = {
    "ConstantOfShape": lambda: large(
        constant("n", 100_000, 100_000), helper.make_node("ConstantOfShape", ["n"], ["h"])
    ),
    "Expand": lambda: large(
        constant("n", 100_000, 100_000), scalar("c", 1), helper.make_node("Expand", ["c", "n"], ["h"])
    ),
    "Tile": lambda: large(
        constant("n", 100_000, 100_000),
        helper.make_node("ConstantOfShape", ["o"], ["c"]),
        helper.make_node("Tile", ["c", "n"], ["h"]),
        constant("o", 1, 1),
    ),
    "Range": lambda: large(
        scalar("a", 0), scalar("b", 1e10), scalar("c", 1), helper.make_node("Range", ["a", "b", "c"], ["h"])
    ),
    "nested": lambda: nested(12),
    "an initialiser without values": huge_initialiser,
    "a cycle": lambda: model(
        helper.make_node("Add", ["/in", "y:out"], ["h"]), helper.make_node("Relu", ["h"], ["y:out"])
    ),
}


@pytest.mark.parametrize("name", BOMBS)
@keeps_engine
def test_a_hostile_model_costs_one_request(channel: grpc.Channel, name: str) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        raw.evaluate(channel, request(BOMBS[name](), vjp=program_pb2.Vjp()), timeout=60)
    assert refusal.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_a_session_trains_the_initialisers_of_a_model(channel: grpc.Channel) -> None:
    data = model(
        helper.make_node("MatMul", ["/in", "w"], ["h"]),
        helper.make_node("ReduceMean", ["h"], ["y:out"], keepdims=1),
    )
    start = session_pb2.StartSession(graph=request(data).spec.graph)
    step = session_pb2.StepRequest(
        feeds=raw.feeds({"/in": tensor_codec.to_message(X)}),
        loss="y:out",
        fetches=["y:out"],
        optimizer=session_pb2.Optimizer(name="SGD", settings={"learning_rate": 0.5}),
    )
    requests = [
        session_pb2.RunSessionRequest(start=start),
        session_pb2.RunSessionRequest(step=step),
        session_pb2.RunSessionRequest(read=session_pb2.ReadRequest(variables=["w"])),
    ]
    stub = session_pb2_grpc.SessionServiceStub(channel)
    started, stepped, read = stub.RunSession(iter(requests), timeout=120)
    assert [item.name for item in started.started.variables] == ["w"]
    assert_close(values(stepped.step.outputs)["y:out"], np.mean(X @ WEIGHT, keepdims=True))
    gradient = np.repeat(X.sum(0)[:, None], 3, axis=1) / 6
    assert_close(values(read.read.variables)["w"], WEIGHT - 0.5 * gradient)


def test_the_format_belongs_to_bytes(channel: grpc.Channel) -> None:
    made = raw.request(raw.sign_graph())
    made.spec.graph.format = rule_pb2.GRAPH_FORMAT_ONNX
    with refused_raw("MALFORMED_REQUEST") as refusal:
        raw.evaluate(channel, made)
    assert refusal.fields == ["spec.graph.format"]
    made = raw.request(raw.sign_graph().SerializeToString())
    made.spec.graph.format = rule_pb2.GRAPH_FORMAT_GRAPH_DEF
    raw.evaluate(channel, made)


def test_graphs_of_rules_are_graph_defs(channel: grpc.Channel) -> None:
    made = rule_pb2.CreateRuleRequest(rule=rule_pb2.Rule(name="rules/R"))
    made.rule.definition.graph.serialized, made.rule.definition.graph.format = simple(), rule_pb2.GRAPH_FORMAT_ONNX
    with refused_raw("UNSUPPORTED"):
        rule_pb2_grpc.RuleServiceStub(channel).CreateRule(made, timeout=60)
