"""Tests that large tensors after a message give the bytes of one message."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradrule._messages import error_status, request_messages
from gradrule.common import large_tensors, wire_format
from gradrule.common.tensor_codec import to_numpy
from gradrule.errors import FeedDtypeError, MessageTooLargeError
from gradrule.v1 import evaluate_pb2

_SIDE = 200
_VALUES = np.arange(_SIDE * _SIDE).reshape(_SIDE, _SIDE)


def _unknown(name: str, needed: bool) -> int:
    return 0


def _sent(feeds: dict[Any, Any], **more: Any) -> tuple[evaluate_pb2.EvaluateRequest, list[wire_format.Parts]]:
    """The request as the server reads it, and what went beside the message."""
    large: list[wire_format.Parts] = []
    request = request_messages.evaluate_request(feeds, _unknown, large=large, **more)
    return evaluate_pb2.EvaluateRequest.FromString(error_status.serialized(request, large)), large


@pytest.mark.parametrize(
    "array",
    [
        _VALUES.astype(np.float32),
        _VALUES.astype(np.float64).T,
        _VALUES.astype(">f4"),
        _VALUES.astype(np.int64)[::2, 1:],
        _VALUES.astype(ml_dtypes.bfloat16),
        _VALUES.astype(np.complex64),
        np.zeros(large_tensors.MIN_LARGE_BYTES, bool),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_a_large_array_arrives_as_it_would_in_the_message(array: np.ndarray[Any, Any]) -> None:
    sent, large = _sent({"small": np.float32(1), "x": array})
    assert len(large) == 1
    assert [feed.name for feed in sent.feeds] == ["small", "x"]
    plain = request_messages.evaluate_request({"x": array}, _unknown)
    assert sent.feeds[1] == plain.feeds[0]
    np.testing.assert_array_equal(to_numpy(sent.feeds[1].value.inline_tensor), array)


def test_the_array_is_sent_without_a_copy() -> None:
    array = _VALUES.astype(np.float32)
    _, content = large_tensors.parts(3, "x", array)
    assert np.shares_memory(np.frombuffer(content, np.float32), array)


def test_upstream_gradients_and_scalars_keep_their_fields() -> None:
    big = _VALUES.astype(np.float32)
    sent, large = _sent({"x": big}, grad_ys={"y": big + 1, "loss": np.float32(2)}, stacked_grad_ys=True)
    assert len(large) == 2
    assert sent.stacked_grad_ys
    assert {item.name: to_numpy(item.value.inline_tensor).sum() for item in sent.grad_ys} == {
        "y": (big + 1).sum(),
        "loss": 2,
    }


@pytest.mark.parametrize("array", [np.array(["a" * 100_000]), np.zeros(100_000, ml_dtypes.int4), np.zeros(10)])
def test_strings_narrow_integers_and_small_arrays_go_into_the_message(array: np.ndarray[Any, Any]) -> None:
    sent, large = _sent({"x": array})
    assert not large
    assert len(sent.feeds) == 1


def test_a_large_array_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(FeedDtypeError, match="convert it"):
        request_messages.evaluate_request({"x": _VALUES + 0.1}, lambda name, needed: 1, large=[])


def test_requests_above_two_gibibytes_are_refused_before_they_are_copied() -> None:
    part = memoryview(np.zeros(1, np.uint8))
    too_many: list[wire_format.Parts] = [(part, memoryview(np.broadcast_to(np.uint8(0), 2**30)))] * 2
    with pytest.raises(MessageTooLargeError, match="2147483650 bytes of at most 2147483647"):
        error_status.serialized(evaluate_pb2.EvaluateRequest(), too_many)
