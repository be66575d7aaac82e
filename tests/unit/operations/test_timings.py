"""Timings out of the bytes of answers, against protobuf's own reading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradrule.v1 import evaluate_pb2, tensor_pb2
from gradrule_server.operations.request import Request, enter, leave
from gradrule_server.operations.timings import fields_of, note_pull_back, note_run
from tests.unit.operations.requests import peer


def noted(note: object, *arguments: object) -> Request:
    request = Request("i", "S/M", 0, peer)
    token = enter(request)
    try:
        note(*arguments)  # type: ignore[operator]
    finally:
        leave(token)
    return request


@given(
    st.integers(0, 10**12),
    st.integers(0, 10**12),
    st.text(max_size=20),
    st.lists(st.binary(max_size=300), max_size=5),
    st.integers(0, 3),
)
def test_an_answer_s_timings_are_found(
    queue_ns: int, run_ns: int, device: str, contents: list[bytes], blocks: int
) -> None:
    answer = evaluate_pb2.EvaluateResponse(device=device)
    for content in contents:
        answer.outputs.add(name="y").value.inline.CopyFrom(tensor_pb2.Tensor(tensor_content=content))
        answer.gradients.add(x="x").dense.tensor_content = content
    for _ in range(blocks):
        answer.jacobians.add(y="y", x="x").dense.tensor_content = b"\x2a\x02ab" * 50
    answer.timings.queue.FromNanoseconds(queue_ns)
    answer.timings.run.FromNanoseconds(run_ns)
    request = noted(note_run, answer.SerializeToString(), 7)
    assert (request.taken_up_ns, request.engine_run) == (7, (queue_ns, run_ns, device))


def test_a_pull_back_s_timings_are_found() -> None:
    answer = evaluate_pb2.PullBackResponse()
    answer.gradients.add(x="x").dense.tensor_content = b"1234"
    answer.timings.run.FromNanoseconds(9)
    request = noted(note_pull_back, answer.SerializeToString(), 3)
    assert (request.taken_up_ns, request.engine_run.run_ns) == (3, 9)


def test_the_last_of_several_counts() -> None:
    assert fields_of(b"\x2a\x01a\x2a\x02bc\x30\x80\x01\x39" + bytes(8) + b"\x45" + bytes(4), (5,)) == {5: b"bc"}


@pytest.mark.parametrize("wrong", [b"\x2a", b"\x2a\x05ab", b"\xff", b"\x2b", b"\x31abc", b"\x08"])
def test_bytes_that_are_no_message(wrong: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        fields_of(wrong, (5,))
