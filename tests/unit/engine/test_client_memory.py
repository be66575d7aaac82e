"""Tests the reading of tensors from memory that clients share."""

from __future__ import annotations

import os
import socket

import numpy as np

from gradrule.v1 import evaluate_pb2
from gradrule_server.engine.client_memory import AttachedMemories
from gradrule_server.link.shared_memory import ClientMemory, MemoryChannel, ReceivedMemories

_BYTES = 1 << 20


def test_copies_are_aligned_and_holes_are_zeros() -> None:
    fd = os.memfd_create("client")
    os.ftruncate(fd, _BYTES)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = ClientMemory(b"m" * 16, fd, _BYTES)
    channel = MemoryChannel(ours, lambda name: None)
    channel.attach(memory)
    use = evaluate_pb2.SharedMemoryUse(memory=memory.name, request_bytes=_BYTES)
    content = AttachedMemories(ReceivedMemories(theirs)).open(use).read(0, _BYTES, "x", "feeds")
    found = np.frombuffer(content, np.float32)
    assert not found.any()
    # A session would copy it again at another address.
    assert found.ctypes.data % 64 == 0
    channel.close()
    theirs.close()
    os.close(memory.fd)
