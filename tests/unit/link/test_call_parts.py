"""Tests where the parts of a request with a header are found, against protobuf's own parser."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradrule.v1 import evaluate_pb2
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.link.call_parts import MAX_FIELDS, encode_parts, find_parts

HEADER = evaluate_pb2.EvaluateHeader(program="programs/p").SerializeToString()
USE = evaluate_pb2.SharedMemoryUse(memory=b"m" * 16, request_bytes=300, offsets=[0, 4096])


@given(st.binary(min_size=1, max_size=300), st.lists(st.binary(max_size=300), max_size=5), st.booleans(), st.booleans())
def test_parts_are_those_that_protobuf_finds(header: bytes, contents: list[bytes], uses: bool, is_view: bool) -> None:
    use = USE if uses else None
    data = evaluate_pb2.EvaluateRequest(header=header, contents=contents, shared_memory=use).SerializeToString()
    for encoded in (data, b"".join(encode_parts(header, contents, use))):
        parts = find_parts(memoryview(encoded) if is_view else encoded)
        assert parts is not None
        assert (parts.header, parts.shared_memory) == (header, use)
        assert [encoded[start:end] for start, end in parts.contents] == contents


@pytest.mark.parametrize(
    "message",
    [
        evaluate_pb2.EvaluateRequest(),
        evaluate_pb2.EvaluateRequest(program="programs/p"),
        evaluate_pb2.EvaluateRequest(spec={}),
        evaluate_pb2.EvaluateRequest(shared_memory=USE),
    ],
    ids=["empty", "program", "inline", "memory"],
)
def test_requests_without_a_header_have_no_parts(message: evaluate_pb2.EvaluateRequest) -> None:
    assert find_parts(message.SerializeToString()) is None


FEED = evaluate_pb2.EvaluateRequest(feeds=[{"name": "x"}]).SerializeToString()
MANY_OFFSETS = evaluate_pb2.EvaluateRequest(shared_memory={"offsets": [1] * (12 * MAX_FIELDS)}).SerializeToString()
WITH_HEADER = evaluate_pb2.EvaluateRequest(header=HEADER, contents=[b"a" * 200]).SerializeToString()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (WITH_HEADER + FEED, "MALFORMED_REQUEST"),
        (evaluate_pb2.EvaluateRequest(contents=[b"a"]).SerializeToString(), "MALFORMED_REQUEST"),
        (WITH_HEADER[:-1], "MALFORMED_REQUEST"),
        (WITH_HEADER + b"\xff", "MALFORMED_REQUEST"),
        (WITH_HEADER + b"\x5a\x01\xff", "MALFORMED_REQUEST"),
        (WITH_HEADER + b"\x7a\x00" * MAX_FIELDS, "LIMIT_EXCEEDED"),
        (b"\x7a\x00" * (MAX_FIELDS + 1), "LIMIT_EXCEEDED"),
        (WITH_HEADER + MANY_OFFSETS, "LIMIT_EXCEEDED"),
    ],
    ids=["feed", "no header", "truncated", "junk", "memory", "many", "many without a header", "offsets"],
)
def test_bad_requests_with_a_header_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(GradruleError) as caught:
        find_parts(data)
    assert reason_name(caught.value.reason) == reason


def test_fields_of_newer_clients_are_skipped() -> None:
    for newer in (b"\x80\x01\x05", b"\x82\x01\x03abc"):
        for data in (newer + WITH_HEADER, WITH_HEADER + newer):
            parts = find_parts(data)
            assert parts is not None
            assert parts.header == HEADER
