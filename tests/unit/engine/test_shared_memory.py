"""Tensors that an engine copies out of a client's memory."""

from __future__ import annotations

import os
import socket

import numpy as np

from gradrule.v1 import evaluate_pb2, tensor_pb2
from gradrule_server.engine.shared_memory import AttachedMemories
from gradrule_server.link.shared_memory import ClientMemory, MemoryChannel, ReceivedMemories

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
