"""Tests reading the timings of encoded responses, against the parser of protobuf."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradrule.v1 import evaluate_pb2, tensor_pb2
from gradrule_server.operations.request_record import (
    RequestRecord,
    read_fields,
    record_pull_back,
    record_run,
    reset_current,
    set_current,
)
from tests.unit.operations.records import peer


def noted(note: object, *arguments: object) -> RequestRecord:
    request = RequestRecord("i", "S/M", 0, peer)
    token = set_current(request)
    try:
        note(*arguments)  # type: ignore[operator]
    finally:
        reset_current(token)
    return request


@given(
    st.integers(0, 10**12),
    st.integers(0, 10**12),
    st.text(max_size=20),
    st.lists(st.binary(max_size=300), max_size=5),
    st.integers(0, 3),
)
def test_timings_of_evaluate_are_read(
    queue_ns: int, run_ns: int, device: str, contents: list[bytes], blocks: int
) -> None:
    answer = evaluate_pb2.EvaluateResponse(device=device)
    for content in contents:
        answer.outputs.add(name="y").value.inline_tensor.CopyFrom(tensor_pb2.Tensor(tensor_content=content))
        answer.gradients.add(x="x").dense.tensor_content = content
    for _ in range(blocks):
        answer.jacobians.add(y="y", x="x").dense.tensor_content = b"\x2a\x02ab" * 50
    answer.timings.queue.FromNanoseconds(queue_ns)
    answer.timings.run.FromNanoseconds(run_ns)
    request = noted(record_run, answer.SerializeToString(), 7)
    assert (request.sent_to_engine_ns, request.engine_run) == (7, (queue_ns, run_ns, device))


def test_timings_of_pull_back_are_read() -> None:
    answer = evaluate_pb2.PullBackResponse()
    answer.gradients.add(x="x").dense.tensor_content = b"1234"
    answer.timings.run.FromNanoseconds(9)
    request = noted(record_pull_back, answer.SerializeToString(), 3)
    assert (request.sent_to_engine_ns, request.engine_run.run_ns) == (3, 9)


def test_last_of_several_fields_counts() -> None:
    assert read_fields(b"\x2a\x01a\x2a\x02bc\x30\x80\x01\x39" + bytes(8) + b"\x45" + bytes(4), (5,)) == {5: b"bc"}


@pytest.mark.parametrize("wrong", [b"\x2a", b"\x2a\x05ab", b"\xff", b"\x2b", b"\x31abc", b"\x08"])
def test_malformed_bytes_are_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_fields(wrong, (5,))
