"""Requests of header and contents say what the plain messages would, and every check holds after the first call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradrule as gr
from gradrule._messages import error_status, request_encoding, request_messages
from gradrule._messages.request_encoding import EncodedForward, EncodedRequest, RequestEncoder
from gradrule.common import tensor_codec
from gradrule.common.dtypes import NAMES, as_dt
from gradrule.common.memory_regions import MIN_LARGE_BYTES
from gradrule.common.tensor_packing import Packing, unpack_all
from gradrule.v1 import evaluate_pb2, program_pb2, tensor_pb2
from tests.unit.client.plain_requests import plain, sent, translated

FLOAT = tensor_pb2.DT_FLOAT
TYPES = {
    "x": FLOAT,
    "h": tensor_pb2.DT_BFLOAT16,
    "i": tensor_pb2.DT_INT64,
    "s": tensor_pb2.DT_STRING,
    "n": tensor_pb2.DT_INT4,
}
# No values can be sent, or arrays hold plain integers.
OTHER_TYPES = {"resource", "variant", "qint8", "quint8", "qint16", "quint16", "qint32"}
LARGE = np.arange(40_000, dtype=np.float32).reshape(200, 200)


def program() -> program_pb2.Program:
    inputs = [tensor_pb2.TensorSpec(name=name, dtype=number) for name, number in TYPES.items()]
    y = tensor_pb2.TensorSpec(name="y", dtype=FLOAT)
    return program_pb2.Program(name="programs/p", inputs=inputs, ys=[y], aliases={"image": "x"})


def encoder_of(message: program_pb2.Program) -> RequestEncoder:
    return RequestEncoder(message, request_messages.types_of_specs([*message.inputs, *message.ys]))


@pytest.fixture
def encoder() -> RequestEncoder:
    return encoder_of(program())


def expected(tensors: Mapping[str, Mapping[str, Any]], **fields: Any) -> evaluate_pb2.EvaluateRequest:
    """Returns the message of a call, written with protobuf only; arrays have their tensors' types."""
    message = evaluate_pb2.EvaluateRequest(program="programs/p", **fields)
    for field, values in tensors.items():
        for name, value in values.items():
            inline = tensor_codec.to_message(value)
            source = value.source() if isinstance(value, gr.Blob) else tensor_pb2.TensorSource(inline_tensor=inline)
            getattr(message, field).append(tensor_pb2.NamedTensor(name=name, value=source))
    return message


@pytest.mark.parametrize(
    ("feeds", "arrays"),
    [
        ({"x": np.float32([[1, 2], [3, 4]])}, None),
        ({"x": np.arange(6, dtype=np.float32).reshape(2, 3).T}, None),
        ({"x": np.arange(6, dtype=">f4")}, None),
        ({"x": np.arange(12, dtype=np.float32)[::3]}, None),
        ({"x": np.float32(3)}, None),
        ({"x": np.zeros((0, 3), np.float32)}, None),
        ({"x": LARGE}, None),
        ({"x": LARGE.T}, None),
        ({"x": LARGE.astype(">f4"), "i": LARGE.astype(np.int64)[::2, 1:]}, None),
        ({"x": [1, 2.5]}, {"x": np.float32([1, 2.5])}),
        ({"x": np.float64([1, 2.5])}, {"x": np.float32([1, 2.5])}),
        ({"image": [[1]], "i": [1, 2]}, {"x": np.float32([[1]]), "i": np.int64([1, 2])}),
        ({"x:0": np.float32([1]), "i": np.int64([2])}, None),
        ({"h": np.arange(5).astype(ml_dtypes.bfloat16)}, None),
        ({"s": ["a", b"bc"]}, {"s": np.array([b"a", b"bc"], object)}),
        ({"s": np.array(["a" * 100_000])}, {"s": np.array([b"a" * 100_000], object)}),
        ({"n": np.array([1, -2], ml_dtypes.int4)}, None),
        ({"n": np.zeros(100_000, ml_dtypes.int4)}, None),
        ({"unknown": np.float64([1])}, None),
        ({}, None),
        (None, {}),
    ],
    ids=str,
)
def test_a_request_says_what_its_message_would(encoder: RequestEncoder, feeds: Any, arrays: Any) -> None:
    message = expected({"feeds": feeds if arrays is None else arrays})
    for _ in range(3):
        request = encoder.encode({"feeds": feeds})
        assert plain(request) == message
        assert translated(sent(request)) == message


@pytest.mark.parametrize("name", [name for name in NAMES.values() if name not in OTHER_TYPES])
@pytest.mark.parametrize("size", [0, 3, MIN_LARGE_BYTES])
def test_every_dtype_arrives(name: str, size: int) -> None:
    values = np.arange(size) % 2
    number = tensor_codec.dtype_number(name)
    array = values.astype(str).astype(object) if name == "string" else values.astype(tensor_codec.numpy_dtype(number))
    spec = tensor_pb2.TensorSpec(name="x", dtype=as_dt(number))
    request = encoder_of(program_pb2.Program(name="programs/p", inputs=[spec])).encode({"feeds": {"x": array}})
    found = sent(request)
    assert translated(found) == expected({"feeds": {"x": array}})


def test_all_other_fields_arrive(encoder: RequestEncoder) -> None:
    x, y = np.float32([1]), np.float32([1, 2])
    tensors = {"feeds": {"x": x}, "grad_ys": {"y": y}, "tangents": {"x": 2 * x}, "vectors": {"x": 3 * x}}
    kind = evaluate_pb2.DERIVATIVE_HVP
    # The fields are sent in the order of the contents, whatever order they are given in.
    given: Any = dict(reversed(tensors.items()))
    request = encoder.encode(given, {"ste": {"a": 2.0}}, stacked_grad_ys=True, derivative=kind)
    request.run_timeout_s = 1.5
    message = expected(tensors, stacked_grad_ys=True, derivative=kind)
    message.params["ste"].values["a"].number = 2
    message.run_timeout.FromMilliseconds(1500)
    found = sent(request)
    assert translated(found) == message


@pytest.mark.parametrize("packing", [Packing(zstd=True), Packing(bfloat16=True), Packing(zstd=True, bfloat16=True)])
def test_packed_tensors_arrive(encoder: RequestEncoder, packing: Packing) -> None:
    arrays = {"x": np.ones((30, 40), np.float32), "i": np.arange(3), "s": np.array([b"a"], object)}
    found = sent(encoder.encode({"feeds": arrays}, packing=packing))
    found = translated(found)
    assert [feed.value.inline_tensor.HasField("packed") for feed in found.feeds] == [True, False, False]
    assert found.answer_packing == packing.message()
    unpack_all(found, keep_bfloat16=False)
    assert found == expected({"feeds": arrays}, answer_packing=packing.message())


def test_blobs_are_named_and_returned(encoder: RequestEncoder) -> None:
    x, y = gr.Blob(np.float32([1, 2])), gr.Blob(np.float32([3]))
    request = encoder.encode({"feeds": {"x": x, "i": [1]}, "grad_ys": {"y": y}})
    assert set(request.blobs) == {x.sha256, y.sha256}
    found = sent(request)
    found = translated(found)
    assert [item.value.blob.sha256 for item in (found.feeds[0], found.grad_ys[0])] == [x.sha256, y.sha256]
    assert found.feeds[1] == expected({"feeds": {"i": np.int64([1])}}).feeds[0]


@pytest.mark.parametrize("inline", [False, True])
def test_large_contents_may_lie_in_shared_memory(encoder: RequestEncoder, inline: bool) -> None:
    arrays = {"x": LARGE, "i": np.int64([1]), "s": np.array([b"a" * MIN_LARGE_BYTES], object), "d": LARGE.astype("f8")}
    request = encoder.encode({"feeds": arrays, "grad_ys": {"y": LARGE}})
    if inline:
        request.set_spec(program_pb2.ProgramSpec(fetches=["y"]), {})
    request.run_timeout_s = 30.0
    assert list(request.sharable_contents()) == [0, 3, 4]
    offsets = {0: 4096, 3: 8192, 4: 65536}
    use = evaluate_pb2.SharedMemoryUse(memory=b"m", request_bytes=7, answer_offset=8, answer_bytes=9)
    data = b"".join(request.parts_in_memory(use, offsets))
    assert len(data) < 2 * MIN_LARGE_BYTES
    found = evaluate_pb2.EvaluateRequest.FromString(data)
    if not inline:
        assert list(found.shared_memory.offsets) == list(offsets.values())
        found = translated(found)
    assert (found.spec.fetches == ["y"]) == inline
    assert found.run_timeout.seconds == 30
    assert (found.shared_memory.memory, found.shared_memory.answer_bytes) == (b"m", 9)
    places = [item.value.shared_memory for item in (found.feeds[0], found.feeds[3], found.grad_ys[0])]
    assert [place.offset for place in places] == list(offsets.values())
    assert places[1].size_bytes == LARGE.size * 8
    rest = expected({"feeds": {"i": arrays["i"], "s": arrays["s"]}})
    assert list(found.feeds[1:3]) == list(rest.feeds)


def test_inline_programs_are_sent_in_the_plain_form(encoder: RequestEncoder) -> None:
    g = gr.Graph()
    g.placeholder("x", "float32", None)
    blob = gr.Blob(np.float32([1, 2]))
    request = RequestEncoder(g, request_messages.types_of_graph(g)).encode({"feeds": {"x": blob}})
    spec = program_pb2.ProgramSpec(fetches=["x"])
    request.set_spec(spec, {"graph": b"data"})
    assert set(request.blobs) == {"graph", blob.sha256}
    found = sent(request)
    assert (found.spec, found.header, found.feeds[0].value) == (spec, b"", blob.source())


def test_forward_requests_hold_the_request(encoder: RequestEncoder) -> None:
    request = encoder.encode({"feeds": {"x": [1]}})
    for ttl in (None, 1.5):
        parts, _ = error_status.message_parts(EncodedForward(request, ttl))
        found = evaluate_pb2.ForwardRequest.FromString(b"".join(parts))
        assert found.evaluate == sent(request)
        assert found.HasField("ttl") == (ttl is not None)
        assert found.ttl.ToMilliseconds() == (ttl or 0) * 1000


def test_values_are_checked_in_later_calls_too(encoder: RequestEncoder) -> None:
    for _ in range(2):
        encoder.encode({"feeds": {"x": np.float32([1, 2]), "s": ["a"]}})
        with pytest.raises(gr.errors.FeedDtypeError, match=r"feeds\['x'\] is an array of float64"):
            encoder.encode({"feeds": {"x": np.float64([1, 0.1])}})
        with pytest.raises(gr.errors.FeedDtypeError, match="int64"):
            encoder.encode({"feeds": {"i": np.float32([1, 2])}})
        with pytest.raises(gr.errors.InvalidTensorError, match=r"feeds\['x'\] is None"):
            encoder.encode({"feeds": {"x": None}})
        with pytest.raises(
            gr.errors.InvalidTensorError, match=r"feeds\['s'\]: an array of objects must hold bytes or str"
        ):
            encoder.encode({"feeds": {"s": np.array([1, 2], object)}})
        with pytest.raises(gr.errors.InvalidTensorError, match="feeds is a dict"):
            encoder.encode({"feeds": [1]})  # type: ignore[dict-item]
        with pytest.raises(gr.errors.FeedDtypeError, match=r"feeds\['x'\] is a blob of float64, the tensor is float32"):
            encoder.encode({"feeds": {"x": gr.Blob(np.float64([1]))}})


def test_large_arrays_are_not_copied(encoder: RequestEncoder) -> None:
    array = np.ones(1 << 20, np.float32)
    for spec in (None, program_pb2.ProgramSpec(fetches=["y"])):
        request = encoder.encode({"feeds": {"x": array}})
        if spec is not None:
            request.set_spec(spec, {})
        assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in request.parts() if len(part))
        own = request.with_own_contents()
        assert not np.shares_memory(np.frombuffer(own.contents[0], np.uint8), array)


def test_equal_calls_have_the_same_header(encoder: RequestEncoder) -> None:
    """The server finds what it knows about a call by the header's bytes."""

    def header(size: int = 2, **more: Any) -> bytes:
        return encoder.encode({"feeds": {"x": np.ones(size, np.float32)}}, **more).header

    assert header() is header()
    params: dict[str, Any] = {"b": {"q": 1.0, "p": 2.0}, "a": {"r": 3.0}}
    assert header(params=params) == header(params=dict(reversed(params.items())))
    different = [
        header(),
        header(3),
        header(params=params),
        header(packing=Packing(zstd=True)),
        header(stacked_grad_ys=True),
    ]
    assert len(set(different)) == len(different)


def test_the_number_of_kept_headers_is_limited(encoder: RequestEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_encoding, "_MAX_HEADERS", 8)
    for size in range(100):
        assert len(plain(encoder.encode({"feeds": {"x": np.ones(size, np.float32)}})).feeds) == 1
        assert len(encoder._headers) <= 8


def test_requests_above_two_gibibytes_are_refused_before_they_are_copied() -> None:
    part = memoryview(np.broadcast_to(np.uint8(0), 2**30))
    header = evaluate_pb2.EvaluateHeader(
        feeds=[evaluate_pb2.TensorHeader(name=name, dtype=4, shape=[2**30]) for name in "ab"]
    )
    request = EncodedRequest(header.SerializeToString(), [part, part], {}, program_pb2.ProgramSpec())
    with pytest.raises(gr.errors.MessageTooLargeError, match="bytes of at most 2147483647"):
        error_status.message_parts(request)
