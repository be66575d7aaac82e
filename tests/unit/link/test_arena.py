"""Arenas, and frames whose payload lies in one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from gradrule_server.link.arena import MIN_PLACED_BYTES, Arenas, Chunk, Incoming, Outgoing, make_arena
from gradrule_server.link.connection import Connection
from gradrule_server.link.framing import Frame, FrameSocket, Kind, pack_header, pack_place
from gradrule_server.link.request_scheduler import ConnectionLost
from tests.processes import count_descriptors

_PAGE = os.sysconf("SC_PAGE_SIZE")
_SIZE = 256 * _PAGE


class Both:
    """Both ends of an arena."""

    def __init__(self) -> None:
        fd = make_arena(_SIZE)
        self.writer, self.reader = Outgoing(fd), Incoming(os.dup(fd))

    @property
    def resident_bytes(self) -> int:
        return os.fstat(self.writer.fd).st_blocks * 512


@pytest.fixture
def both() -> Iterator[Both]:
    made = Both()
    yield made
    made.writer.close()
    made.reader.close()


def used_bytes(arena: Outgoing) -> int:
    return len(arena._map) - sum(end - start for start, end in arena._free)


def test_placed_payloads_are_read_back_and_do_not_overlap(both: Both) -> None:
    chance = random.Random(0)
    placed: dict[Chunk, bytes] = {}
    refused = 0
    for _ in range(2000):
        if placed and chance.random() < 0.45:
            chunk = chance.choice(list(placed))
            assert both.reader.read(chunk) == both.reader.view(chunk) == placed.pop(chunk)
            both.writer.release(chunk)
            continue
        parts = [chance.randbytes(chance.randrange(1, 20 * _PAGE)) for _ in range(chance.randrange(1, 3))]
        found = both.writer.place(parts)
        if found is None:
            refused += 1
        else:
            placed[found] = b"".join(parts)
        assert used_bytes(both.writer) == sum(-(-chunk.length // _PAGE) * _PAGE for chunk in placed)
    assert refused
    for chunk in placed:
        both.writer.release(chunk)
    # All of it is in one piece again.
    assert both.writer.place([bytes(_SIZE)]) == Chunk(0, _SIZE)


def test_memory_is_given_back_but_not_what_is_in_use(both: Both) -> None:
    kept, freed = both.writer.place([b"k" * 10 * _PAGE]), both.writer.place([b"f" * 200 * _PAGE])
    assert kept is not None
    assert freed is not None
    both.writer.release(freed)
    assert both.resident_bytes >= 210 * _PAGE
    both.writer.trim()
    assert both.resident_bytes == 10 * _PAGE
    assert both.reader.read(kept) == b"k" * 10 * _PAGE
    assert both.writer.place([bytes(240 * _PAGE)]) is not None


@pytest.mark.parametrize(
    "chunk", [Chunk(0, _SIZE + 1), Chunk(_SIZE, 1), Chunk(_SIZE - 1, 2), Chunk(2**64 - 1, 2**64 - 1), Chunk(0, 0)]
)
def test_chunks_outside_the_arena_are_refused(both: Both, chunk: Chunk) -> None:
    with pytest.raises(ValueError, match="lies outside"):
        both.reader.read(chunk)
    with pytest.raises(ValueError, match="lies outside"):
        both.reader.view(chunk)


def test_the_size_of_an_arena_cannot_change(both: Both) -> None:
    for size in (0, 2 * _SIZE):
        with pytest.raises(OSError) as caught:
            os.ftruncate(both.writer.fd, size)
        assert caught.value.errno == errno.EPERM
    # Holes read as zeros.
    assert both.reader.read(Chunk(0, _SIZE)) == bytes(_SIZE)


def test_after_closing_nothing_is_placed_and_trimming_touches_no_other_file() -> None:
    with open(os.devnull, "rb") as other:
        writer = Outgoing(make_arena(_SIZE))
        writer.close()
        os.dup2(other.fileno(), writer.fd)
        writer.close()
        os.close(writer.fd)
    assert writer.place([b"x"]) is None
    writer.trim()
    writer.release(Chunk(0, 1))


class Link:
    """A connection, and the other end of it."""

    def __init__(self, connection: Connection, arenas: Arenas, theirs: socket.socket, other: Arenas) -> None:
        self.connection, self.arenas, self.theirs = connection, arenas, theirs
        self.engine = FrameSocket(theirs, other)

    async def received(self) -> Frame:
        frame = await asyncio.to_thread(self.engine.receive)
        assert frame is not None
        return frame


@contextlib.asynccontextmanager
async def _linked() -> AsyncIterator[Link]:
    ours, theirs = socket.socketpair()
    arenas, shared = Arenas.make()
    other = Arenas.from_descriptors(os.dup(shared[0]), os.dup(shared[1]))
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(2, arenas), sock=ours)
    with theirs:
        yield Link(connection, arenas, theirs, other)
    async with asyncio.timeout(60):
        while not connection.is_closed:
            await asyncio.sleep(0.01)
    # The transport closes its socket right after it has called the connection.
    await asyncio.sleep(0.01)
    other.outgoing.close()
    # A test may hold a view.
    with contextlib.suppress(BufferError):
        other.incoming.close()


async def test_large_payloads_do_not_go_through_the_socket_and_their_room_is_free_afterwards() -> None:
    async with _linked() as link:
        request, answer = os.urandom(MIN_PLACED_BYTES), os.urandom(3 * MIN_PLACED_BYTES)
        work = link.connection.submit(Kind.RUN, request)
        other = link.connection.submit(Kind.RUN, b"small")
        frame, small = await link.received(), await link.received()
        assert isinstance(frame.payload, memoryview)
        assert frame.payload == request
        assert (frame.kind, small) == (Kind.RUN, Frame(Kind.RUN, 2, b"small"))
        assert used_bytes(link.arenas.outgoing) == MIN_PLACED_BYTES
        link.engine.send(Kind.RAN, frame.request_id, answer)
        assert await work.answer == answer
        assert used_bytes(link.arenas.outgoing) == 0
        taken = await link.received()
        assert (taken.kind, taken.request_id) == (Kind.ACK, frame.request_id)
        assert link.engine.answer_housekeeping(taken)
        assert link.engine._arenas is not None
        assert used_bytes(link.engine._arenas.outgoing) == 0
        other.answer.cancel()


async def test_an_unwanted_answer_is_released_unread() -> None:
    async with _linked() as link:
        work = link.connection.submit(Kind.RUN, bytes(MIN_PLACED_BYTES))
        work.answer.cancel()
        frame = await link.received()
        link.engine.send(Kind.RAN, frame.request_id, bytes(MIN_PLACED_BYTES))
        assert (await link.received()).kind is Kind.ACK
        assert work.ended
        assert used_bytes(link.arenas.outgoing) == 0


async def test_a_payload_that_cannot_be_read_fails_its_request_and_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with _linked() as link:
        work = link.connection.submit(Kind.RUN, b"a")
        frame = await link.received()

        def fails(*_: object) -> bytes:
            raise OSError("no such memory")

        monkeypatch.setattr(link.arenas.incoming, "read", fails)
        link.engine.send(Kind.RAN, frame.request_id, bytes(MIN_PLACED_BYTES))
        with pytest.raises(ConnectionLost):
            await work.answer
        assert "no such memory" in caplog.text


async def test_a_payload_without_room_goes_through_the_socket() -> None:
    async with _linked() as link:
        assert link.arenas.outgoing.place([bytes(510 << 20)]) is not None
        work = link.connection.submit(Kind.RUN, bytes(4 << 20))
        frame = await link.received()
        assert frame.payload == bytes(4 << 20)
        assert used_bytes(link.arenas.outgoing) == 510 << 20
        link.engine.send(Kind.RAN, frame.request_id, b"done")
        assert await work.answer == b"done"


@pytest.mark.parametrize(
    "place",
    [
        pack_place(Kind.RAN, Chunk(2**63, 4096)),
        pack_place(Kind.RAN, Chunk(0, 2**64 - 1)),
        pack_place(Kind.RAN, Chunk(512 << 20, 1)),
        b"short",
        b"\xff" * 20,
    ],
)
async def test_a_malformed_place_ends_the_connection_and_fails_all_requests(place: bytes) -> None:
    async with _linked() as link:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        works = [link.connection.submit(Kind.RUN, b"a"), link.connection.submit(Kind.RUN, bytes(MIN_PLACED_BYTES))]
        frame = await link.received()
        link.theirs.sendall(pack_header(Kind.PLACED, frame.request_id, len(place)) + place)
        for work in works:
            with pytest.raises(ConnectionLost):
                await asyncio.wait_for(work.answer, 60)
        assert link.connection.is_closed


async def test_memory_falls_once_nothing_large_has_come_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradrule_server.link.arena._TRIM_AFTER_S", 0.2)
    async with _linked() as link:
        work = link.connection.submit(Kind.RUN, bytes(16 << 20))
        frame = await link.received()
        link.engine.send(Kind.RAN, frame.request_id, bytes(16 << 20))
        await work.answer
        sizes = (link.arenas.outgoing.fd, link.arenas.incoming.fd)
        assert all(os.fstat(fd).st_blocks * 512 >= 16 << 20 for fd in sizes)
        for expected in (Kind.ACK, Kind.TRIM):
            housekeeping = await link.received()
            assert housekeeping.kind is expected
            assert link.engine.answer_housekeeping(housekeeping)
        async with asyncio.timeout(60):
            while any(os.fstat(fd).st_blocks for fd in sizes):
                await asyncio.sleep(0.02)


async def test_failed_trim_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("gradrule_server.link.arena._TRIM_AFTER_S", 0.05)

    def fails(*_: object) -> None:
        raise OSError("no such range")

    async with _linked() as link:
        monkeypatch.setattr(link.arenas.outgoing, "trim", fails)
        link.connection.submit(Kind.RUN, bytes(MIN_PLACED_BYTES)).answer.cancel()
        async with asyncio.timeout(60):
            while "no such range" not in caplog.text:
                await asyncio.sleep(0.02)
    assert "an arena keeps its memory" in caplog.text


async def test_descriptors_are_as_before_when_a_connection_ends() -> None:
    before = count_descriptors()
    async with _linked() as link:
        work = link.connection.submit(Kind.RUN, bytes(MIN_PLACED_BYTES))
        await link.received()
        assert count_descriptors() > before
        work.answer.cancel()
    assert count_descriptors() == before
