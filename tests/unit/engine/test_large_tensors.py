"""Tests large tensors: cut out of messages, against protobuf's own parser, and copied out of a client's memory."""

from __future__ import annotations

import gc
import os
import socket

import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from gradrule.v1 import evaluate_pb2, tensor_pb2
from gradrule_server.engine.large_tensors import AttachedMemories, CopyBuffers, CutPayload, cut_large_tensors
from gradrule_server.link.framing import Kind
from gradrule_server.link.shared_memory import ClientMemory, MemoryChannel, ReceivedMemories
from gradrule_server.link.v1 import link_pb2

_LARGE = 20_000
_FIELDS = ("feeds", "grad_ys", "tangents", "vectors")


def _entry(name: str, content: bytes, values: int = 0) -> tensor_pb2.NamedTensor:
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DT_FLOAT, tensor_content=content, float_val=[1.5] * values)
    tensor.tensor_shape.dim.add(size=-1)
    return tensor_pb2.NamedTensor(name=name, value=tensor_pb2.TensorSource(inline_tensor=tensor))


def _cut(kind: Kind, message: Message) -> CutPayload:
    return cut_large_tensors(kind, memoryview(message.SerializeToString()))


def _put_back(call: Message, cut: CutPayload) -> Message:
    """Returns the call with the bytes that were cut out of it."""
    for (field, index), content in cut.contents.items():
        tensor = getattr(call, field)[index].value.inline_tensor
        assert not tensor.tensor_content
        tensor.tensor_content = bytes(content)
    return call


_SIZES = st.sampled_from([0, 1, 127, 128, 16_000, _LARGE, 2_200_000])
_ENTRIES = st.lists(st.tuples(st.text(max_size=200), _SIZES, st.sampled_from([0, 3, 9_000])), max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(_FIELDS), _ENTRIES))
def test_message_and_cut_tensors_make_the_whole_request(
    drawn: dict[str, list[tuple[str, int, int]]],
) -> None:
    call = evaluate_pb2.EvaluateRequest(stacked_grad_ys=True)
    for field, entries in drawn.items():
        getattr(call, field).extend(
            _entry(name, bytes([index + 1]) * size, values) for index, (name, size, values) in enumerate(entries)
        )
    run = link_pb2.RunRequest(key="program", received_ns=-5, request=call.SerializeToString())
    run.params.add(rule=3, name="beta").value.number = 0.5
    cut = _cut(Kind.RUN, run)
    left = link_pb2.RunRequest.FromString(cut.payload)
    found = _put_back(evaluate_pb2.EvaluateRequest.FromString(left.request), cut)
    assert found == call
    left.request = run.request
    assert left == run
    large = sum(size >= _LARGE for entries in drawn.values() for _, size, _ in entries)
    assert len(cut.contents) >= large


def test_tensors_are_cut_out_of_every_kind_of_call() -> None:
    call = evaluate_pb2.EvaluateRequest(feeds=[_entry("a", b""), _entry("x", b"x" * _LARGE)])
    run = link_pb2.RunRequest(key="k", request=call.SerializeToString())
    forward = _cut(Kind.FORWARD, link_pb2.ForwardRequest(run=run, handle="h"))
    assert dict(forward.contents) == {("feeds", 1): b"x" * _LARGE}
    assert link_pb2.ForwardRequest.FromString(forward.payload).handle == "h"
    step = link_pb2.SessionRequest(session="s", run=link_pb2.SessionRun(run=run, store=["v"]))
    session = _cut(Kind.SESSION, step)
    assert dict(session.contents) == {("feeds", 1): b"x" * _LARGE}
    assert link_pb2.SessionRequest.FromString(session.payload).run.store == ["v"]
    grad_ys = evaluate_pb2.PullBackRequest(grad_ys=[_entry("y", b"y" * _LARGE)])
    pull_back = link_pb2.PullBackRequest(handle="h", request=grad_ys.SerializeToString())
    assert dict(_cut(Kind.PULL_BACK, pull_back).contents) == {("grad_ys", 0): b"y" * _LARGE}
    compiled = link_pb2.CompileRequest(graph=b"g" * _LARGE)
    assert _cut(Kind.COMPILE, compiled) == CutPayload(compiled.SerializeToString(), {})


def _wire(number: int, value: bytes) -> bytes:
    """Returns a length-delimited field. `number`: below 16."""
    size, length = len(value), bytearray()
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + value


@pytest.mark.parametrize("depth", range(5))
def test_tensor_in_several_parts_is_not_cut_out(depth: int) -> None:
    """Repeats a field, which protobuf merges, at each level: message, call, value, tensor and bytes."""
    whole, pieces = b"a" * _LARGE, b"b"
    # Field numbers from the bytes of a tensor outwards.
    for level, number in enumerate((4, 1, 2, 3, 3)):
        repeats = _wire(number, whole) + _wire(number, pieces) if level == 4 - depth else _wire(number, whole)
        whole, pieces = repeats, _wire(number, pieces)
    cut = cut_large_tensors(Kind.RUN, memoryview(whole))
    run = link_pb2.RunRequest.FromString(whole)
    left = link_pb2.RunRequest.FromString(cut.payload)
    call = evaluate_pb2.EvaluateRequest.FromString(run.request)
    assert _put_back(evaluate_pb2.EvaluateRequest.FromString(left.request), cut) == call


@pytest.mark.parametrize("damage", [b"\x1a\xff\xff\xff\xff\x0f", b"\x1b", b"\xff" * 11, b"\x1a", b"\x0d\x00"])
def test_malformed_message_is_returned_unchanged(damage: bytes) -> None:
    run = link_pb2.RunRequest(request=b"r" * _LARGE).SerializeToString() + damage
    cut = cut_large_tensors(Kind.RUN, memoryview(run))
    assert cut == CutPayload(run, {})
    with pytest.raises(DecodeError):
        link_pb2.RunRequest.FromString(cut.payload)


def test_small_payload_is_returned_unchanged() -> None:
    assert cut_large_tensors(Kind.RUN, b"\xff") == CutPayload(b"\xff", {})


def test_content_of_packed_tensor_is_cut_out() -> None:
    packed = tensor_pb2.PackedTensor(dtype=tensor_pb2.DT_FLOAT, content=bytes(_LARGE))
    entry = tensor_pb2.NamedTensor(
        name="x", value=tensor_pb2.TensorSource(inline_tensor=tensor_pb2.Tensor(packed=packed))
    )
    call = evaluate_pb2.EvaluateRequest(feeds=[entry])
    cut = _cut(Kind.RUN, link_pb2.RunRequest(key="k", request=call.SerializeToString()))
    assert cut.contents[("feeds", 0)].tobytes() == bytes(_LARGE)
    left = evaluate_pb2.EvaluateRequest.FromString(link_pb2.RunRequest.FromString(cut.payload).request)
    assert left.feeds[0].value.inline_tensor.packed.dtype == tensor_pb2.DT_FLOAT
    assert not left.feeds[0].value.inline_tensor.packed.content
    # With two contents it is not known to which one the bytes belong.
    entry.value.inline_tensor.tensor_content = bytes(_LARGE)
    call = evaluate_pb2.EvaluateRequest(feeds=[entry])
    assert not _cut(Kind.RUN, link_pb2.RunRequest(key="k", request=call.SerializeToString())).contents


_BUFFER_BYTES = 5 << 20


def test_buffer_is_reused_once_nothing_refers_to_it() -> None:
    buffers = CopyBuffers()
    buffer = buffers.take(_BUFFER_BYTES)
    address = buffer.ctypes.data
    assert address % 64 == 0
    array = np.frombuffer(buffer.data, np.float32).reshape(5, -1)[1:]
    del buffer
    gc.collect()
    assert buffers.take(_BUFFER_BYTES).ctypes.data != address
    del array
    gc.collect()
    found = {buffers.take(_BUFFER_BYTES - 3).ctypes.data for _ in range(2)}
    assert address in found


def test_buffers_in_use_share_no_memory_and_have_the_requested_size() -> None:
    buffers = CopyBuffers()
    taken = [buffers.take(size) for size in (10, 1 << 20, _BUFFER_BYTES, _BUFFER_BYTES, 0)]
    assert [len(buffer) for buffer in taken] == [10, 1 << 20, _BUFFER_BYTES, _BUFFER_BYTES, 0]
    assert not any(np.shares_memory(one, other) for one in taken for other in taken if one is not other)


def test_free_buffers_are_freed_after_a_while() -> None:
    buffers = CopyBuffers()
    buffers.take(_BUFFER_BYTES)
    gc.collect()
    buffers.take(_BUFFER_BYTES)
    gc.collect()
    assert buffers._free or buffers._returned
    buffers._expire()
    buffers._expire()
    assert not buffers._free
    assert not buffers._returned


def test_buffer_of_a_single_call_is_freed() -> None:
    """Frees it even if it was in use for longer than free buffers are kept."""
    buffers = CopyBuffers()
    buffer = buffers.take(_BUFFER_BYTES)
    for _ in range(3):
        assert buffers._timer is not None
        buffers._timer.cancel()
        buffers._expire()
    del buffer
    gc.collect()
    assert buffers._timer is not None
    buffers._timer.cancel()
    buffers._expire()
    assert not buffers._free
    assert not buffers._returned
    assert not buffers._out


_BYTES = 1 << 20


def test_holes_are_zeros() -> None:
    fd = os.memfd_create("client")
    os.ftruncate(fd, _BYTES)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = ClientMemory(b"m" * 16, fd, _BYTES)
    channel = MemoryChannel(ours, lambda name: None)
    channel.attach(memory)
    call = evaluate_pb2.EvaluateRequest()
    call.shared_memory.memory = memory.name
    call.shared_memory.request_bytes = _BYTES
    source = call.feeds.add(name="x").value.shared_memory
    source.CopyFrom(tensor_pb2.SharedMemoryTensor(size_bytes=_BYTES, dtype=tensor_pb2.DT_FLOAT))
    source.shape.dim.add(size=_BYTES // 4)
    contents, _ = AttachedMemories(ReceivedMemories(theirs)).open(call, {})
    assert not np.frombuffer(contents["feeds", 0], np.float32).any()
    channel.close()
    theirs.close()
    memory.release()
