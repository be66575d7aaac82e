"""Tests the reading of arguments from a call."""

from __future__ import annotations

import os
import socket
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf.message import DecodeError

import gradrule as gr
from gradrule.common import tensor_codec
from gradrule.common.tensor_packing import Packing, pack
from gradrule.v1 import evaluate_pb2, program_pb2, tensor_pb2
from gradrule_server.engine import arguments
from gradrule_server.engine.arguments import ArgumentReader, parts_of
from gradrule_server.engine.batching import MergedRuns, group_key_for
from gradrule_server.engine.build import build
from gradrule_server.engine.client_memory import AttachedMemories
from gradrule_server.engine.program import BuiltProgram, as_tensors
from gradrule_server.engine.tensor_sources import BlobReader
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.graphs import Limits
from gradrule_server.link.framing import Buffer
from gradrule_server.link.messages import CallShape
from gradrule_server.link.shared_memory import ClientMemory, MemoryChannel, ReceivedMemories
from gradrule_server.link.v1 import link_pb2
from tests.call_payloads import call_values
from tests.service.graph_defs import build_graph
from tests.unit.engine.building import prepared


def arrays(built: BuiltProgram, values: Buffer, reader: ArgumentReader | None = None) -> list[Any]:
    """Returns the arguments of a call. `values`: bytes of an `EvaluateRequest` with a header."""
    reader = reader or ArgumentReader(BlobReader(None))
    return list(reader.read(built, link_pb2.RunRequest(), values).values)


def doubled() -> gr.Graph:
    """Returns a graph in which y is twice x, of any shape."""
    return build_graph(lambda: tf.add(*[tf.compat.v1.placeholder(tf.float32, None, "x")] * 2, name="y"))


@pytest.mark.parametrize("most", [2, 9])
@pytest.mark.parametrize("deep", ["x", "y"])
def test_rank_of_fed_tensors_is_limited(most: int, deep: str) -> None:
    program = prepared(
        doubled(),
        limits=Limits(rank=most),
        call=CallShape(grad_ys=frozenset({"y"})),
        vjp=program_pb2.Vjp(ys=["y"], xs=["x"]),
    )
    built = build(program.request)

    def arguments_of(rank: int) -> list[Any]:
        call = evaluate_pb2.EvaluateRequest()
        for name, given in (("x", call.feeds), ("y", call.grad_ys)):
            value = np.ones([1] * (rank if name == deep else 1), np.float32)
            given.add(name=name).value.inline_tensor.CopyFrom(tensor_codec.to_message(value))
        return arrays(built, call_values(call))

    assert max(argument.ndim for argument in arguments_of(most)) == most
    with pytest.raises(GradruleError) as caught:
        arguments_of(most + 1)
    assert reason_name(caught.value.reason) == "LIMIT_EXCEEDED"
    assert f"has rank {most + 1}; {most} is the most (--max-rank)" in caught.value.message


def test_a_tensor_of_unknown_rank_is_refused() -> None:
    """Refuses it although its bytes would fit."""
    built = build(prepared(doubled()).request)
    call = evaluate_pb2.EvaluateRequest()
    tensor = call.feeds.add(name="x").value.inline_tensor
    tensor.CopyFrom(tensor_codec.to_message(np.float32(1)))
    tensor.tensor_shape.unknown_rank = True
    with pytest.raises(GradruleError, match="shape must be known"):
        arrays(built, call_values(call))


def test_forward_runs_do_not_copy_variables() -> None:
    g = gr.Graph()
    w = tf.ones([3, 2])
    g.op("MatMul", g.placeholder("x", "float32", [None, 3]), g.variable("w", w.numpy()), name="y")
    request = prepared(g, vjp=program_pb2.Vjp(ys=["y"], xs=["x"])).request
    request.split = True
    # As if the caller had sent the variable's value with the program.
    request.variables.add(spec=next(item for item in request.inputs if item.name == "w"))
    del request.inputs[[item.name for item in request.inputs].index("w")]
    built = build(request, [w])
    call = evaluate_pb2.EvaluateRequest()
    call.feeds.add(name="x").value.inline_tensor.CopyFrom(tensor_codec.to_message(np.ones((2, 3), np.float32)))
    values = call_values(call)
    found = arrays(built, values)
    assert found[1] is w
    x, passed = as_tensors(found, built.function.inputs[:2])
    assert passed is w
    # The message's memory may be freed after the call.
    assert not np.shares_memory(np.frombuffer(values, np.uint8), x.numpy())


def test_calls_know_the_values_of_variables_without_comparing_them() -> None:
    """Calls that do not feed a variable may run together, and the bytes of its value are not compared."""
    g = gr.Graph()
    w = tf.ones([3, 2])
    g.op("MatMul", g.placeholder("x", "float32", [None, 3]), g.variable("w", w.numpy()), name="y")
    request = prepared(g).request
    request.variables.add(spec=next(item for item in request.inputs if item.name == "w"))
    del request.inputs[[item.name for item in request.inputs].index("w")]
    built = build(request, [w])
    call = evaluate_pb2.EvaluateRequest()
    call.feeds.add(name="x").value.inline_tensor.CopyFrom(tensor_codec.to_message(np.ones((2, 3), np.float32)))
    keys = []
    for factor in (1, 2):
        value = np.full((2, 3), factor, np.float32)
        call.feeds[0].value.inline_tensor.CopyFrom(tensor_codec.to_message(value))
        found = arrays(built, call_values(call))
        assert found[1] is w
        keys.append(group_key_for(built, MergedRuns(frozenset({0}), ["y"]), found))
    assert keys == [((3,),), ((3,),)]


def pair() -> BuiltProgram:
    """Returns a program of two inputs of any shape."""
    g = gr.Graph()
    g.op("AddV2", g.placeholder("x", "float32", None), g.placeholder("b", "float32", [2]), name="y")
    return build(prepared(g).request)


def header_of(**shapes: list[int]) -> evaluate_pb2.EvaluateHeader:
    header = evaluate_pb2.EvaluateHeader()
    for name, shape in shapes.items():
        header.feeds.add(name=name, dtype=tensor_pb2.DT_FLOAT, shape=shape)
    return header


X, B = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([7, 8], np.float32)


def request_of(header: evaluate_pb2.EvaluateHeader, *contents: bytes, **more: Any) -> bytes:
    return evaluate_pb2.EvaluateRequest(
        header=header.SerializeToString(), contents=contents, **more
    ).SerializeToString()


def test_contents_are_read_in_the_order_of_the_header_without_a_copy() -> None:
    built, header = pair(), header_of(b=[2], x=[3, 2])
    for seed in range(3):
        values = memoryview(request_of(header, (B + seed).tobytes(), (X * seed).tobytes()))
        x, b = arrays(built, values)
        np.testing.assert_array_equal(x, X * seed)
        np.testing.assert_array_equal(b, B + seed)
        assert np.shares_memory(x, np.frombuffer(values, np.uint8))


def test_a_header_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built, values = pair(), request_of(header_of(b=[2], x=[3, 2]), B.tobytes(), X.tobytes())
    arrays(built, values)
    layout = built.feed_plan.layout(parts_of(values).header)
    assert built.feed_plan.layout(parts_of(values).header) is layout
    monkeypatch.setattr(arguments, "evaluate_pb2", None)
    np.testing.assert_array_equal(arrays(built, values)[0], X)


@pytest.mark.parametrize(
    ("header", "contents", "reason", "says"),
    [
        (header_of(x=[3, 2]), [X.tobytes()], "MISSING_FEED", "feed 'b' is missing: float32 of shape (2,)"),
        (header_of(x=[3, 2], b=[3]), [X.tobytes(), bytes(12)], "FEED_SHAPE", "feed 'b' has shape (3,)"),
        (header_of(x=[3, 2], b=[2]), [X.tobytes()], "MALFORMED_REQUEST", "has 1 contents, but its header has 2"),
        (header_of(x=[3, 2], b=[2]), [b"", b"", b""], "MALFORMED_REQUEST", "has 3 contents, but its header has 2"),
        (header_of(x=[3, 2], b=[2]), [X.tobytes()[1:], B.tobytes()], "INVALID_TENSOR", "feed 'x': 23 bytes do not fit"),
        (header_of(x=[-1, 2], b=[2]), [X.tobytes(), B.tobytes()], "INVALID_TENSOR", "shape must be known"),
        (header_of(x=[0, 2], b=[2]), [b"a", B.tobytes()], "INVALID_TENSOR", "1 bytes do not fit"),
        (header_of(x=[1 << 40, 1 << 40], b=[2]), [b"a", B.tobytes()], "INVALID_TENSOR", "1 bytes do not fit"),
        (header_of(x=[1 << 62, 0], b=[2]), [b"", B.tobytes()], "INVALID_TENSOR", "which is too large"),
        (header_of(**{"x": [3, 2], "x:0": [3, 2], "b": [2]}), [b""] * 3, "UNKNOWN_FEED", "feeds name 'x' twice"),
    ],
)
def test_faults_are_reported(
    header: evaluate_pb2.EvaluateHeader, contents: list[bytes], reason: str, says: str
) -> None:
    """Also in the second call with the header."""
    built = pair()
    for _ in range(2):
        with pytest.raises(GradruleError) as caught:
            arrays(built, request_of(header, *contents))
        assert reason_name(caught.value.reason) == reason
        assert says in caught.value.message


def test_all_faults_of_a_call_are_reported_at_once() -> None:
    header = header_of(x=[3, 2])
    with pytest.raises(GradruleError) as caught:
        arrays(pair(), request_of(header, b"short"))
    assert {item.node for item in caught.value.findings} == {"", "b"}


@pytest.mark.parametrize("compression", ["zstd", "bfloat16"])
def test_packed_contents_are_unpacked(compression: str) -> None:
    values = np.ones((400, 2), np.float32)
    packed = pack(tensor_pb2.DT_FLOAT, values, Packing(**{compression: True}))
    assert packed is not None
    message = tensor_pb2.Tensor.FromString(packed.head + bytes(packed.content)).packed
    header = header_of(x=[400, 2], b=[2])
    header.feeds[0].compression, header.feeds[0].content_dtype = message.compression, message.content_dtype
    built = pair()
    np.testing.assert_array_equal(arrays(built, request_of(header, message.content, B.tobytes()))[0], values)
    # The header alone says how much memory the tensor takes.
    del header.feeds[0].shape[:]
    header.feeds[0].shape.extend([1 << 40, 2])
    with pytest.raises(GradruleError) as caught:
        arrays(built, request_of(header, message.content, B.tobytes()))
    assert reason_name(caught.value.reason) == "LIMIT_EXCEEDED"


def test_a_content_may_be_a_tensor_of_the_type_and_shape_of_its_header() -> None:
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DT_FLOAT, float_val=[2.5])
    tensor.tensor_shape.CopyFrom(tensor_codec.shape_message([3, 2]))
    header = header_of(x=[3, 2], b=[2])
    header.feeds[0].content_is_tensor = True
    built = pair()
    found = arrays(built, request_of(header, tensor.SerializeToString(), B.tobytes()))[0]
    np.testing.assert_array_equal(found, np.full((3, 2), 2.5))
    for content in (b"\xff", tensor_codec.to_message(X.T.copy()).SerializeToString(), b""):
        with pytest.raises((GradruleError, DecodeError)):
            arrays(built, request_of(header, content, B.tobytes()))


@pytest.mark.parametrize("place", ["in_shared_memory", "blob_sha256", "content_is_tensor"])
def test_a_packed_tensor_has_its_own_content(place: str) -> None:
    header = header_of(x=[3, 2], b=[2])
    header.feeds[0].compression = tensor_pb2.COMPRESSION_ZSTD
    setattr(header.feeds[0], place, "a" * 64 if place == "blob_sha256" else True)
    contents = [X.tobytes(), B.tobytes()] if header.feeds[0].content_is_tensor else [B.tobytes()]
    with pytest.raises(GradruleError, match="exclude each other") as caught:
        arrays(pair(), request_of(header, *contents))
    assert reason_name(caught.value.reason) == "INVALID_TENSOR"


def test_tensors_in_shared_memory_need_the_memory_and_an_offset_each() -> None:
    header = header_of(x=[3, 2], b=[2])
    header.feeds[0].in_shared_memory = True
    with pytest.raises(GradruleError, match="lies in shared memory, which this request does not use"):
        arrays(pair(), request_of(header, B.tobytes()))
    fd = os.memfd_create("client")
    os.ftruncate(fd, 4096)
    os.pwrite(fd, X.tobytes(), 100)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = ClientMemory(b"m" * 16, fd, 4096)
    channel = MemoryChannel(ours, lambda name: None)
    channel.attach(memory)
    reader = ArgumentReader(BlobReader(None), AttachedMemories(ReceivedMemories(theirs)))
    use = evaluate_pb2.SharedMemoryUse(memory=memory.name, request_bytes=24)
    try:
        for offsets, reason in (([100], ""), ([], "offsets"), ([1, 2], "offsets"), ([4090], "do not lie in")):
            del use.offsets[:]
            use.offsets.extend(offsets)
            values = request_of(header, B.tobytes(), shared_memory=use)
            if not reason:
                np.testing.assert_array_equal(arrays(pair(), values, reader)[0], X)
                continue
            with pytest.raises(GradruleError, match=reason):
                arrays(pair(), values, reader)
        use.request_bytes = 23
        use.offsets[:] = [100]
        with pytest.raises(GradruleError, match="take more than the 23 bytes"):
            arrays(pair(), request_of(header, B.tobytes(), shared_memory=use), reader)
    finally:
        channel.close()
        theirs.close()
        os.close(memory.fd)
