"""A call whose structure was seen before takes a shorter code path; its result must equal that of full parsing."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2

import gradrule as gr
from gradrule.v1 import evaluate_pb2, tensor_pb2
from tests.service import raw
from tests.service.servers import RunningServer

GOOD = raw.tensor([[-2.0, 0.5], [0.1, 3.0]])


@pytest.fixture(scope="module")
def program(client: Any) -> gr.Program:
    """Makes a constant times x of shape (2, n), and its gradient."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [2, None])
    g.multiply(g.op_output("Sign", x), g.constant(np.float32(3)), name="y")
    return client.compile(g, fetches=["y"], ys=["y"], xs=["x"], overrides={"Sign": "ste_sign"})


def request_of(program: gr.Program, tensor: tensor_pb2.Tensor = GOOD, *, known: bool = True) -> bytes:
    """Makes a call by the program's name. A name without its prefix has an unknown structure."""
    name = program.name if known else program.name.removeprefix("programs/")
    return evaluate_pb2.EvaluateRequest(program=name, feeds=raw.feeds({"x": tensor})).SerializeToString()


def outcome(channel: grpc.Channel, data: bytes) -> Any:
    """Returns the answer without times, or the reason and text of the refusal."""
    try:
        answer = evaluate_pb2.EvaluateResponse.FromString(raw.send(channel, "GradientService/Evaluate", data))
    except grpc.RpcError as refusal:
        details = dict[str, Any](refusal.trailing_metadata())["grpc-status-details-bin"]
        info = error_details_pb2.ErrorInfo()
        assert status_pb2.Status.FromString(details).details[0].Unpack(info)
        return info.reason, refusal.details()
    answer.ClearField("timings")
    return answer.SerializeToString(deterministic=True)


def truncated() -> tensor_pb2.Tensor:
    tensor = tensor_pb2.Tensor()
    tensor.CopyFrom(GOOD)
    tensor.tensor_content = tensor.tensor_content[:-1]
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        GOOD,
        raw.tensor(np.ones((2, 200_000))),
        raw.tensor(np.ones((3, 1))),
        raw.tensor(1.0),
        truncated(),
        tensor_pb2.Tensor(dtype=tensor_pb2.DT_DOUBLE, tensor_shape=GOOD.tensor_shape, tensor_content=bytes(32)),
        tensor_pb2.Tensor(dtype=tensor_pb2.DT_FLOAT, tensor_shape=GOOD.tensor_shape, float_val=[1, 2, 3, 4]),
        tensor_pb2.Tensor(),
    ],
    ids=["good", "large", "shape", "rank", "truncated", "dtype", "listed", "empty"],
)
def test_both_code_paths_give_equal_results(
    channel: grpc.Channel, program: gr.Program, tensor: tensor_pb2.Tensor
) -> None:
    """Answers and refusals are equal, including their texts."""
    outcome(channel, request_of(program))
    assert outcome(channel, request_of(program, tensor)) == outcome(channel, request_of(program, tensor, known=False))


def test_invalid_tensor_message_is_refused_and_the_next_call_works(channel: grpc.Channel, program: gr.Program) -> None:
    """Only the engine parses the tensor."""
    good = outcome(channel, request_of(program))
    data = request_of(program)
    # The tensor's dtype field gets a wire type that does not exist.
    broken = data.replace(b"\x08\x01\x12", b"\x0f\x01\x12", 1)
    assert broken != data
    reason, text = outcome(channel, broken)
    assert (reason, text) == outcome(
        channel, request_of(program, known=False).replace(b"\x08\x01\x12", b"\x0f\x01\x12")
    )
    assert reason == "MALFORMED_REQUEST"
    assert outcome(channel, data) == good


def test_deleted_program_is_not_found(client: Any, channel: grpc.Channel) -> None:
    """However often it was called before."""
    g = gr.Graph()
    g.op_output("Tanh", g.placeholder("x", "float32", None), name="y")
    program = client.compile(g, fetches=["y"])
    for _ in range(3):
        assert isinstance(outcome(channel, request_of(program)), bytes)
    client.delete_program(program.name)
    assert outcome(channel, request_of(program))[0] == "PROGRAM_NOT_FOUND"


def test_calls_continue_after_an_engine_was_killed(
    server: RunningServer, channel: grpc.Channel, program: gr.Program
) -> None:
    """The next engine loads the program."""
    good = outcome(channel, request_of(program))
    server.kill_engines()
    assert outcome(channel, request_of(program)) == good
    assert outcome(channel, request_of(program)) == good
