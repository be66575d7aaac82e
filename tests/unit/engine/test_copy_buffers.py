"""Buffers that tensors are copied into are used again once nothing refers to them."""

from __future__ import annotations

import gc

import numpy as np

from gradrule_server.engine.shared_memory import CopyBuffers

_SIZE = 5 << 20


def test_a_buffer_is_used_again_once_nothing_refers_to_it() -> None:
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


def test_buffers_in_use_never_share_memory_and_are_as_long_as_asked() -> None:
    buffers = CopyBuffers()
    taken = [buffers.take(size) for size in (10, 1 << 20, _SIZE, _SIZE, 0)]
    assert [len(buffer) for buffer in taken] == [10, 1 << 20, _SIZE, _SIZE, 0]
    assert not any(np.shares_memory(one, other) for one in taken for other in taken if one is not other)


def test_free_buffers_are_given_up_after_a_while() -> None:
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


def test_the_buffer_of_a_lone_call_is_given_up_too() -> None:
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
