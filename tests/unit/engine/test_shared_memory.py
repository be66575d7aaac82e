"""Tests the buffers for copies, and tensors that an engine copies out of a client's memory."""

from __future__ import annotations

import gc
import os
import socket

import numpy as np

from gradrule.v1 import evaluate_pb2, tensor_pb2
from gradrule_server.engine.shared_memory import AttachedMemories, CopyBuffers
from gradrule_server.link.shared_memory import ClientMemory, MemoryChannel, ReceivedMemories

_SIZE = 5 << 20


def test_buffer_is_reused_once_nothing_refers_to_it() -> None:
    buffers = CopyBuffers()
    buffer = buffers.take(_SIZE)
    address = buffer.ctypes.data
    assert address % 64 == 0
    array = np.frombuffer(buffer.data, np.float32).reshape(5, -1)[1:]
    del buffer
    gc.collect()
    assert buffers.take(_SIZE).ctypes.data != address
    del array
    gc.collect()
    found = {buffers.take(_SIZE - 3).ctypes.data for _ in range(2)}
    assert address in found


def test_buffers_in_use_share_no_memory_and_have_the_requested_size() -> None:
    buffers = CopyBuffers()
    taken = [buffers.take(size) for size in (10, 1 << 20, _SIZE, _SIZE, 0)]
    assert [len(buffer) for buffer in taken] == [10, 1 << 20, _SIZE, _SIZE, 0]
    assert not any(np.shares_memory(one, other) for one in taken for other in taken if one is not other)


def test_free_buffers_are_freed_after_a_while() -> None:
    buffers = CopyBuffers()
    buffers.take(_SIZE)
    gc.collect()
    buffers.take(_SIZE)
    gc.collect()
    assert buffers._free or buffers._returned
    buffers._expire()
    buffers._expire()
    assert not buffers._free
    assert not buffers._returned


def test_buffer_of_a_single_call_is_freed() -> None:
    """It may be in use for longer than free buffers are kept."""
    buffers = CopyBuffers()
    buffer = buffers.take(_SIZE)
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


def test_holes_are_zeros_and_their_pages_count_as_the_clients() -> None:
    fd = os.memfd_create("client")
    os.ftruncate(fd, _BYTES)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = ClientMemory(b"m" * 16, fd, _BYTES)
    channel = MemoryChannel(ours, lambda name: None)
    channel.attach(memory)
    assert channel.held_bytes == 0
    call = evaluate_pb2.EvaluateRequest()
    call.shared_memory.memory = memory.name
    call.shared_memory.request_bytes = _BYTES
    source = call.feeds.add(name="x").value.shared_memory
    source.CopyFrom(tensor_pb2.SharedMemoryTensor(size_bytes=_BYTES, dtype=tensor_pb2.DT_FLOAT))
    source.shape.dim.add(size=_BYTES // 4)
    contents, _ = AttachedMemories(ReceivedMemories(theirs)).open(call, {})
    assert not np.frombuffer(contents["feeds", 0], np.float32).any()
    # The server's watch of memory sees pages that reading has filled.
    assert channel.held_bytes == _BYTES
    channel.close()
    theirs.close()
    memory.release()
