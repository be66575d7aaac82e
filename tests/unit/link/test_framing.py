"""Frames over a real socket pair."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from gradrule_server.link.framing import Frame, FrameSocket, Kind, serve_frames

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_frames_arrive_whole_and_in_order(pair: Pair) -> None:
    ours, theirs = pair
    payloads = [b"", b"x", bytes(range(256)) * 20_000]
    sender = FrameSocket(ours)

    def send_all() -> None:
        for index, data in enumerate(payloads):
            sender.send(Kind.RUN, index, data)

    thread = threading.Thread(target=send_all)
    thread.start()
    receiver = FrameSocket(theirs)
    frames = [receiver.receive() for _ in payloads]
    thread.join()
    assert frames == [Frame(Kind.RUN, index, data) for index, data in enumerate(payloads)]


def test_a_closed_socket_is_none_and_not_an_error_even_within_a_frame(pair: Pair) -> None:
    ours, theirs = pair
    ours.sendall(b"\x08\x00")
    ours.shutdown(socket.SHUT_RDWR)
    assert FrameSocket(theirs).receive() is None


def test_threads_handle_frames_side_by_side(pair: Pair) -> None:
    ours, theirs = pair
    both_inside = threading.Barrier(2, timeout=10)
    seen: list[int] = []

    def handle(frame: Frame) -> None:
        both_inside.wait()
        seen.append(frame.request_id)

    sender = FrameSocket(ours)
    sender.send(Kind.RUN, 1, b"a")
    sender.send(Kind.RUN, 2, b"b")
    closer = threading.Timer(0.5, ours.shutdown, args=[socket.SHUT_RDWR])
    closer.start()
    serve_frames(FrameSocket(theirs), handle, threads=2)
    closer.join()
    assert sorted(seen) == [1, 2]


def test_writers_do_not_mix(pair: Pair) -> None:
    ours, theirs = pair
    sender, receiver = FrameSocket(ours), FrameSocket(theirs)
    data = {number: bytes([number]) * 100_000 for number in range(8)}
    threads = [threading.Thread(target=sender.send, args=(Kind.RAN, number, data[number])) for number in data]
    for thread in threads:
        thread.start()
    got = {}
    for _ in data:
        frame = receiver.receive()
        assert frame is not None
        got[frame.request_id] = frame.payload
    for thread in threads:
        thread.join()
    assert got == data
