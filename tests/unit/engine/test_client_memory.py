"""Tests the reading of tensors from memory that clients share."""

from __future__ import annotations

import gc
import os
import socket
import threading

import numpy as np
import pytest

from gradrule.v1 import evaluate_pb2
from gradrule_server.engine import client_memory
from gradrule_server.engine.client_memory import AttachedMemories, CopyBuffers
from gradrule_server.link.shared_memory import ClientMemory, MemoryChannel, ReceivedMemories

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
    assert buffers._free
    buffers._expire()
    buffers._expire()
    assert not buffers._free


def test_buffer_of_a_single_call_is_freed() -> None:
    """Frees it even if it was in use for longer than free buffers are kept."""
    buffers = CopyBuffers()
    buffer = buffers.take(_BUFFER_BYTES)
    for _ in range(3):
        buffers._expire()
    del buffer
    gc.collect()
    assert buffers._free
    buffers._expire()
    assert not buffers._free


def test_buffers_expire_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    expired = threading.Event()
    monkeypatch.setattr(client_memory, "_FREE_AFTER_S", 0.001)
    monkeypatch.setattr(CopyBuffers, "_expire", lambda _: expired.set())
    CopyBuffers().take(_BUFFER_BYTES)
    assert expired.wait(60)


_BYTES = 1 << 20


def test_holes_are_zeros() -> None:
    fd = os.memfd_create("client")
    os.ftruncate(fd, _BYTES)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = ClientMemory(b"m" * 16, fd, _BYTES)
    channel = MemoryChannel(ours, lambda name: None)
    channel.attach(memory)
    use = evaluate_pb2.SharedMemoryUse(memory=memory.name, request_bytes=_BYTES)
    content = AttachedMemories(ReceivedMemories(theirs)).open(use).read(0, _BYTES, "x", "feeds")
    assert not np.frombuffer(content, np.float32).any()
    channel.close()
    theirs.close()
    os.close(memory.fd)
