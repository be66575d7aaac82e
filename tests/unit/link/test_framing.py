"""Frames over a real socket pair."""

from __future__ import annotations

import itertools
import logging
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from gradrule_server.link.arena import MIN_PLACED_BYTES, Arenas
from gradrule_server.link.framing import Frame, FrameSocket, Kind, serve_frames

Pair = tuple[socket.socket, socket.socket]

_MEBIBYTE = 1024 * 1024


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
        if len(seen) == 2:
            ours.shutdown(socket.SHUT_RDWR)

    sender = FrameSocket(ours)
    sender.send(Kind.RUN, 1, b"a")
    sender.send(Kind.RUN, 2, b"b")
    serve_frames(FrameSocket(theirs), handle, pytest.fail, threads=2)
    assert sorted(seen) == [1, 2]


def test_frames_that_come_one_at_a_time_are_handled_by_one_thread(pair: Pair) -> None:
    ours, theirs = pair
    sender, frames = FrameSocket(ours), FrameSocket(theirs)
    threads: list[str] = []

    def handle(frame: Frame) -> None:
        threads.append(threading.current_thread().name)
        # Other threads run meanwhile, as while TensorFlow computes.
        time.sleep(0.001)
        frames.send(Kind.RAN, frame.request_id, b"")

    serving = threading.Thread(target=serve_frames, args=(frames, handle, pytest.fail, 3))
    serving.start()
    # The next frame may come just before the thread is done with this one, and wake another. Time makes that rare, but
    # not on a busy machine.
    for _ in range(5):
        threads.clear()
        for number in range(50):
            sender.send(Kind.RUN, number, b"a")
            assert sender.receive() is not None
            time.sleep(0.002)
        assert len(threads) == 50
        changes = sum(before != after for before, after in itertools.pairwise(threads))
        if changes < 25:
            break
    ours.shutdown(socket.SHUT_RDWR)
    serving.join()
    assert changes < 25


def test_what_never_ends_is_not_waited_for(pair: Pair) -> None:
    ours, theirs = pair
    goes_on = threading.Event()

    def handle(frame: Frame) -> None:
        ours.shutdown(socket.SHUT_RDWR)
        goes_on.wait(30)

    FrameSocket(ours).send(Kind.RUN, 1, b"a")
    serving = threading.Thread(target=serve_frames, args=(FrameSocket(theirs), handle, pytest.fail, 1))
    serving.start()
    serving.join(10)
    goes_on.set()
    assert not serving.is_alive()


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


def test_large_payloads_are_not_copied(pair: Pair) -> None:
    ours, theirs = pair
    receiver = FrameSocket(theirs)
    for size, kind in ((MIN_PLACED_BYTES - 1, bytes), (MIN_PLACED_BYTES, memoryview)):
        thread = threading.Thread(target=FrameSocket(ours).send, args=(Kind.RUN, 1, bytes(size)))
        thread.start()
        frame = receiver.receive()
        thread.join()
        assert frame == Frame(Kind.RUN, 1, bytes(size))
        assert isinstance(frame.payload, kind)


_WITH_LITTLE_MEMORY = """
import re, resource, socket, sys
from pathlib import Path
from gradrule_server.link.framing import FrameSocket, Kind, serve_frames

frames = FrameSocket(socket.socket(fileno=int(sys.argv[1])))

def handle(frame):
    if frame.kind is Kind.COMPILE:
        taken = re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())
        most = int(taken[1]) * 1024 + (64 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    elif frame.kind is Kind.FORWARD:
        bytearray(1 << 30)
    frames.send(Kind.RAN, frame.request_id, b"%d" % len(frame.payload))

serve_frames(frames, handle, lambda request_id: frames.send(Kind.FAULT, request_id, b"no memory"), threads=2)
"""


def test_what_there_is_no_memory_for_is_refused_and_the_next_frame_is_read(pair: Pair) -> None:
    ours, theirs = pair
    command = [sys.executable, "-c", _WITH_LITTLE_MEMORY, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        link = FrameSocket(ours)

        def ask(kind: Kind, number: int, size: int) -> Frame | None:
            link.send(kind, number, bytes(size))
            return link.receive()

        assert ask(Kind.COMPILE, 1, 3) == Frame(Kind.RAN, 1, b"3")
        # More often than there are threads; two of 40 MiB find no room side by side.
        for number in range(2, 10, 4):
            assert ask(Kind.RUN, number, 200 * _MEBIBYTE) == Frame(Kind.FAULT, number, b"no memory")
            assert ask(Kind.RUN, number + 1, 5) == Frame(Kind.RAN, number + 1, b"5")
            assert ask(Kind.FORWARD, number + 2, 5) == Frame(Kind.FAULT, number + 2, b"no memory")
            assert ask(Kind.RUN, number + 3, 40 * _MEBIBYTE) == Frame(Kind.RAN, number + 3, b"%d" % (40 * _MEBIBYTE))
        ours.shutdown(socket.SHUT_RDWR)
        assert process.wait(30) == 0


def _raises(frame: Frame) -> None:
    raise OSError("anything")


def _refuses(frame: Frame) -> None:
    raise MemoryError


def _fails(request_id: int) -> None:
    raise RuntimeError(f"there is no memory to refuse {request_id}")


@pytest.mark.parametrize(("handle", "failure"), [(_raises, OSError), (_refuses, RuntimeError)])
def test_what_goes_wrong_otherwise_ends_all_at_once(
    pair: Pair, handle: Callable[[Frame], None], failure: type[Exception]
) -> None:
    ours, theirs = pair
    sender = FrameSocket(ours)
    sender.send(Kind.RUN, 1, b"a")
    with pytest.raises(failure):
        serve_frames(FrameSocket(theirs), handle, _fails, threads=3)
    assert sender.receive() is None


def test_who_answers_when_nobody_listens_ends_in_silence(pair: Pair) -> None:
    ours, theirs = pair
    frames = FrameSocket(theirs)

    def handle(frame: Frame) -> None:
        ours.close()
        frames.send(Kind.RAN, frame.request_id, b"late")

    FrameSocket(ours).send(Kind.RUN, 1, b"a")
    serve_frames(frames, handle, pytest.fail, threads=2)


def test_memory_that_cannot_be_returned_is_logged_and_kept(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    arenas, _ = Arenas.make()
    frames = FrameSocket(pair[1], arenas)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with caplog.at_level(logging.WARNING):
        # No file can be opened any more, which trimming does.
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
        try:
            assert frames.answer_housekeeping(Frame(Kind.TRIM, 0, b""))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "an arena keeps its memory: [Errno 24]" in caplog.text
    assert frames.answer_housekeeping(Frame(Kind.TRIM, 0, b""))
    arenas.close()
