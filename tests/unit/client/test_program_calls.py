"""Calls of a program written by plan say what the message would, and every check holds after the first call."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradrule as gr
from gradrule._messages import request_messages
from gradrule._messages.program_calls import ProgramEncoder
from gradrule.v1 import evaluate_pb2, program_pb2, tensor_pb2

TYPES = {
    "x": tensor_pb2.DT_FLOAT,
    "h": tensor_pb2.DT_BFLOAT16,
    "i": tensor_pb2.DT_INT64,
    "s": tensor_pb2.DT_STRING,
    "n": tensor_pb2.DT_INT4,
}


def program() -> program_pb2.Program:
    inputs = [tensor_pb2.TensorSpec(name=name, dtype=number) for name, number in TYPES.items()]
    y = tensor_pb2.TensorSpec(name="y", dtype=tensor_pb2.DT_FLOAT)
    return program_pb2.Program(name="programs/p", inputs=inputs, ys=[y], aliases={"image": "x"})


def sent(encoder: ProgramEncoder, feeds: Any, **more: Any) -> evaluate_pb2.EvaluateRequest:
    parts, _ = encoder.encode(feeds, **more)
    return evaluate_pb2.EvaluateRequest.FromString(b"".join(parts))


@pytest.fixture
def encoder() -> ProgramEncoder:
    return ProgramEncoder(program())


@pytest.mark.parametrize(
    "feeds",
    [
        {"x": np.float32([[1, 2], [3, 4]])},
        {"x": np.arange(6, dtype=np.float32).reshape(2, 3).T},
        {"x": np.arange(6, dtype=">f4")},
        {"x": np.arange(12, dtype=np.float32)[::3]},
        {"x": np.float32(3)},
        {"x": np.zeros((0, 3), np.float32)},
        {"x": np.arange(40_000, dtype=np.float32).reshape(200, 200).T},
        {"x": [1, 2.5]},
        {"image": [[1]], "i": [1, 2]},
        {"x:0": np.float32([1]), "i": np.int64([2])},
        {"h": np.arange(5).astype(ml_dtypes.bfloat16)},
        {"s": ["a", b"bc"]},
        {"n": np.array([1, -2], ml_dtypes.int4)},
        {"unknown": np.float64([1])},
        {"x": gr.Blob(np.float32([1, 2]))},
        {},
        None,
    ],
    ids=str,
)
def test_the_bytes_of_a_call_equal_those_of_its_message(encoder: ProgramEncoder, feeds: Any) -> None:
    type_of = request_messages.types_of_specs(program().inputs)
    expected = request_messages.evaluate_request(feeds, type_of, graph=program())
    for _ in range(3):
        assert sent(encoder, feeds) == expected


def test_other_fields_of_a_call_equal_those_of_its_message(encoder: ProgramEncoder) -> None:
    call: dict[str, Any] = {"params": {"ste": {"a": 2.0}}, "grad_ys": {"y": [1, 2]}, "stacked_grad_ys": True}
    found = sent(encoder, {"x": [1]}, **call)
    type_of = request_messages.types_of_specs([*program().inputs, *program().ys])
    call["grad_ys"] = {"y": [1, 2]}
    assert found == request_messages.evaluate_request({"x": [1]}, type_of, graph=program(), **call)


def test_blobs_of_a_call_are_returned(encoder: ProgramEncoder) -> None:
    x, y = gr.Blob(np.float32([1, 2])), gr.Blob(np.float32([3]))
    _, blobs = encoder.encode({"x": x, "i": [1]}, grad_ys=[y])
    assert set(blobs) == {x.sha256, y.sha256}


def test_values_are_checked_in_later_calls_too(encoder: ProgramEncoder) -> None:
    for _ in range(2):
        sent(encoder, {"x": np.float32([1, 2])})
        with pytest.raises(gr.errors.FeedDtypeError, match=r"feeds\['x'\] is an array of float64"):
            sent(encoder, {"x": np.float64([1, 0.1])})
        with pytest.raises(gr.errors.FeedDtypeError, match="int64"):
            sent(encoder, {"i": np.float32([1, 2])})
        with pytest.raises(gr.errors.InvalidTensorError, match=r"feeds\['x'\] is None"):
            sent(encoder, {"x": None})
        with pytest.raises(gr.errors.InvalidTensorError, match="feeds is a dict"):
            sent(encoder, [1])


def test_a_large_array_is_not_copied(encoder: ProgramEncoder) -> None:
    array = np.ones(1 << 20, np.float32)
    for _ in range(2):
        parts, _ = encoder.encode({"x": array})
        assert np.shares_memory(np.frombuffer(parts[-1], np.float32), array)


def test_the_number_of_cached_heads_is_limited(encoder: ProgramEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradrule._messages.program_calls._MAX_HEADS", 8)
    for size in range(100):
        assert len(sent(encoder, {"x": np.ones(size, np.float32)}).feeds) == 1
        assert len(encoder._heads) <= 8
