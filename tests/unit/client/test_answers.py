"""Tests that answers are read like their messages, without parsing their tensors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from gradrule._results import call_results
from gradrule._results.answers import AnswerReader, labeller
from gradrule.common.tensor_codec import to_message
from gradrule.errors import InternalError, InvalidTensorError
from gradrule.v1 import evaluate_pb2


def answer(outputs: dict[str, Any], gradients: dict[str, Any], queue_ns: int = 1) -> evaluate_pb2.EvaluateResponse:
    found = evaluate_pb2.EvaluateResponse(device="CPU:0")
    for name, value in outputs.items():
        found.outputs.add(name=name).value.inline_tensor.CopyFrom(to_message(value))
    for x, value in gradients.items():
        gradient = found.gradients.add(x=x)
        if value is None:
            gradient.unconnected.SetInParent()
        else:
            gradient.dense.CopyFrom(to_message(value))
    found.timings.queue.FromNanoseconds(queue_ns)
    return found


def read(reader: AnswerReader, message: evaluate_pb2.EvaluateResponse) -> call_results.Result:
    return call_results.Result(reader.read(message.SerializeToString()), call_results.ProgramDetails())


@pytest.fixture
def reader() -> AnswerReader:
    return AnswerReader(labeller(None))


def test_answers_of_any_layout_are_read(reader: AnswerReader) -> None:
    """Values, shapes, types, names, kinds and their number change from one to the next, and back."""
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"y": np.float32([1, 2])}, {"x": np.float32([[3], [4]])}),
        ({"y": np.float32([5, 6])}, {"x": np.float32([[7], [8]])}),
        ({"y": np.float32([5, 6])}, {"x": np.float32([7, 8])}),
        ({"y": np.int32([5, 6])}, {"x": np.float32([7, 8])}),
        ({"z": np.int32([5, 6])}, {"x": None}),
        ({"z": np.int32([5, 6]), "y": np.zeros((0, 3))}, {"x": np.float64(2), "w": None}),
        ({"s": np.array([b"ab", b"c"], object)}, {}),
        ({"s": np.array([b"ab", b"d"], object)}, {}),
        ({}, {}),
        ({"y": np.float32([1, 2])}, {"x": np.float32([[3], [4]])}),
        ({"y": np.ones(100_000, np.float32)}, {"x": np.ones((300, 400), np.float16)}),
    ]
    for number, (outputs, gradients) in enumerate(rows * 2):
        found = read(reader, answer(outputs, gradients, queue_ns=10**number))
        assert list(found.outputs) == list(outputs)
        assert list(found.gradients) == list(gradients)
        for expected, values in ((outputs, found.outputs), (gradients, found.gradients)):
            for name, value in expected.items():
                if value is None:
                    assert values[name] is None
                    assert found.gradient_kinds[name] == "unconnected"
                else:
                    np.testing.assert_array_equal(values[name], value)
                    assert values[name].dtype == value.dtype
                    assert values[name].flags.writeable
        assert (found.timings.queue, found.device) == (10**number / 1e9, "CPU:0")


def test_an_answer_with_the_last_layout_is_not_parsed(reader: AnswerReader) -> None:
    first = reader.read(answer({"y": np.float32([1])}, {"x": np.float32([2])}).SerializeToString())
    second = reader.read(answer({"y": np.float32([3])}, {"x": np.float32([4])}, 10**9).SerializeToString())
    assert second.layout is first.layout
    assert call_results.Result(second, call_results.ProgramDetails()).gradients["x"].tolist() == [4.0]


def test_tensors_after_the_expected_ones_are_read(reader: AnswerReader) -> None:
    usual = answer({"y": np.float32([1])}, {})
    usual.ClearField("device")
    usual.ClearField("timings")
    reader.read(usual.SerializeToString())
    both = usual.SerializeToString() + answer({"z": np.float32([2])}, {}).SerializeToString()
    found = call_results.Result(reader.read(both), call_results.ProgramDetails())
    assert {name: value.tolist() for name, value in found.outputs.items()} == {"y": [1.0], "z": [2.0]}


def test_fields_between_tensors_are_read(reader: AnswerReader) -> None:
    parts = [answer({"y": np.float32([1])}, {}).SerializeToString(), answer({"z": np.float32([2])}, {})]
    data = parts[0] + parts[1].SerializeToString()  # type: ignore[attr-defined]  # a message
    for _ in range(2):
        found = call_results.Result(reader.read(data), call_results.ProgramDetails())
        assert (found.device, list(found.outputs)) == ("CPU:0", ["y", "z"])


def test_results_can_be_copied_and_pickled(reader: AnswerReader) -> None:
    found = read(reader, answer({"y": np.float32([1])}, {"x": np.float32([2]), "w": None}))
    for other in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert (other.outputs["y"].tolist(), other.gradients["x"].tolist()) == ([1.0], [2.0])
        assert other.gradients["w"] is None
        assert (other.device, other.timings, repr(other)) == (found.device, found.timings, repr(found))


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05ab", b"\x0a\x02\x12\x09", b"\x0b", b"\x2a\x02\x0a\xff"])
def test_malformed_answers_are_refused(reader: AnswerReader, data: bytes) -> None:
    with pytest.raises(InternalError, match="cannot be read"):
        reader.read(data)


def test_contents_that_do_not_fit_their_type_and_shape_are_refused(reader: AnswerReader) -> None:
    message = answer({"y": np.float32([1, 2])}, {})
    message.outputs[0].value.inline_tensor.tensor_content = b"123"
    with pytest.raises(InvalidTensorError, match=r"3 bytes do not fit float32 of shape \[2\]: 8"):
        reader.read(message.SerializeToString())
