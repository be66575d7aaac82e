"""Tests shared memory of a client that is closed, and memory that is full."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from gradrule._rpc import shared_memory
from gradrule._rpc.shared_memory import SharedCall, SharedMemory
from gradrule.errors import SharedMemoryLostError
from gradrule.v1 import evaluate_pb2

_OFFER = evaluate_pb2.ShareMemoryResponse(max_bytes=4 << 20).SerializeToString()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """The server's end of each connection by which memory was handed over."""
    made: list[socket.socket] = []

    def handed_over(*_: Any) -> tuple[bytes, socket.socket]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        made.append(theirs)
        return b"name", ours

    monkeypatch.setattr(shared_memory, "_pass_to_server", handed_over)
    yield made
    for end in made:
        end.close()


def test_memory_passed_to_the_server_while_the_client_closes_is_released(ends: list[socket.socket]) -> None:
    memory, call = SharedMemory(), Mock(reader=None)
    memory.close()
    memory.open(call, 1, _OFFER, 1.0)
    assert not memory.is_shared
    assert ends[0].recv(1) == b""
    memory.refuse("no")
    assert memory._not_before == float("inf")


def test_full_memory_is_replaced_by_one_of_twice_the_size_up_to_the_limit(
    ends: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_MIN_MEMORY_BYTES", 1 << 20)
    memory, call = SharedMemory(), Mock(reader=None)
    sizes = []
    for _ in range(4):
        memory.open(call, 1, _OFFER, 1.0)
        attached = memory._attached
        assert attached is not None
        sizes.append(attached.memory.size >> 20)
        memory._grow(attached)
    assert sizes == [1, 2, 4, 4]
    assert memory.is_shared
    memory.close()


def test_memory_is_not_passed_again_soon_if_calls_reach_several_servers(ends: list[socket.socket]) -> None:
    memory, call = SharedMemory(), Mock(reader=None)
    memory.open(call, 1, _OFFER, 1.0)
    assert memory._attached is not None
    shared = SharedCall[Any](call, (), memory._attached, ())
    memory.end(shared, SharedMemoryLostError("another server"))
    assert not memory.must_open()
    assert "several servers" in memory.refusal
    assert ends[0].recv(1) == b""


def test_memory_of_a_server_that_was_restarted_is_passed_again_at_once(ends: list[socket.socket]) -> None:
    memory, call = SharedMemory(), Mock(reader=None)
    memory.open(call, 1, _OFFER, 1.0)
    assert memory._attached is not None
    shared = SharedCall[Any](call, (), memory._attached, ())
    ends[0].close()
    memory.end(shared, SharedMemoryLostError("restarted"))
    assert memory.must_open()
