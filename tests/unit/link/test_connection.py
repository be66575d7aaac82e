"""What the front end sends to an engine, and when; the transport only records it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gradrule.v1 import errors_pb2, program_pb2
from gradrule_server.errors import Finding, GradruleError
from gradrule_server.link.connection import Connection
from gradrule_server.link.framing import HEADER_BYTES, Kind, pack_header
from gradrule_server.link.messages import fault_message
from gradrule_server.link.request_scheduler import ConnectionLost
from gradrule_server.link.v1 import link_pb2
from gradrule_server.recovery.endings import ProgramNotLoaded
from tests.unit.link.fake_engine import Transport, connected


def answer(connection: Connection, transport: Transport, payload: bytes, kind: Kind = Kind.RAN) -> None:
    """Answers the request that was sent with this payload."""
    request_id = next(number for _, number, sent in transport.sent if sent == payload)
    connection.data_received(pack_header(kind, request_id, len(payload)) + payload)


async def test_an_engine_gets_no_more_requests_than_it_has_threads() -> None:
    connection, transport = connected(2)
    works = [connection.submit(Kind.RUN, name) for name in (b"a", b"b", b"c", b"d")]
    assert transport.payloads() == [b"a", b"b"]
    answer(connection, transport, b"b")
    assert transport.payloads() == [b"a", b"b", b"c"]
    assert await works[1].answer == b"b"
    assert [work.ended for work in works] == [False, True, False, False]


async def test_a_waiting_request_is_dropped_without_telling_the_engine() -> None:
    connection, transport = connected(1)
    running, waiting, last = (connection.submit(Kind.RUN, name) for name in (b"a", b"b", b"c"))
    assert connection.drop(waiting)
    assert waiting.ended
    assert waiting.answer.cancelled()
    assert not connection.drop(running)
    assert not running.ended
    answer(connection, transport, b"a")
    assert transport.payloads() == [b"a", b"c"]
    assert not last.ended


async def test_one_compilation_at_a_time_leaves_threads_to_runs() -> None:
    connection, transport = connected(3)
    for name in (b"c1", b"c2", b"c3"):
        connection.submit(Kind.COMPILE, name)
    connection.submit(Kind.RUN, b"r")
    assert transport.payloads() == [b"c1", b"r"]
    answer(connection, transport, b"c1", Kind.COMPILED)
    assert transport.payloads() == [b"c1", b"r", b"c2"]


@pytest.mark.parametrize("threads", [1, 2])
async def test_requests_are_sent_in_the_order_in_which_they_came(threads: int) -> None:
    connection, transport = connected(threads)
    names = [f"{number}".encode() for number in range(5)]
    for name in names:
        connection.submit(Kind.RUN, name)
    for name in names:
        answer(connection, transport, name)
    assert transport.payloads() == names


async def test_a_request_that_was_given_up_keeps_its_thread_until_it_is_answered() -> None:
    connection, transport = connected(1)
    given_up = connection.submit(Kind.RUN, b"a")
    given_up.answer.cancel()
    connection.submit(Kind.RUN, b"b")
    assert transport.payloads() == [b"a"]
    answer(connection, transport, b"a")
    assert given_up.ended
    assert transport.payloads() == [b"a", b"b"]


async def test_a_lost_connection_tells_which_requests_had_started() -> None:
    connection, _ = connected(1)
    running, waiting = connection.submit(Kind.RUN, b"a"), connection.submit(Kind.RUN, b"b")
    connection.connection_lost(None)
    for work, started in ((running, True), (waiting, False)):
        with pytest.raises(ConnectionLost) as gone:
            await work.answer
        assert gone.value.started is started
        assert work.ended
    with pytest.raises(ConnectionLost):
        connection.submit(Kind.RUN, b"c")


@pytest.mark.parametrize("kind", [GradruleError, ProgramNotLoaded])
async def test_a_fault_arrives_as_the_error_that_it_was(kind: type[GradruleError]) -> None:
    connection, transport = connected(1)
    work = connection.submit(Kind.RUN, b"a")
    sent = kind([Finding(errors_pb2.ERROR_REASON_FEED_SHAPE, "wrong", "n", "feeds"), Finding(2, "too", "", "")])
    fault = fault_message(sent).SerializeToString()
    connection.data_received(pack_header(Kind.FAULT, transport.sent[0][1], len(fault)) + fault)
    with pytest.raises(kind) as caught:
        await work.answer
    assert type(caught.value) is kind
    assert list(caught.value.findings) == list(sent.findings)


_NO_MESSAGE = b"\xff\xff"
_NO_SUCH_REASON = link_pb2.Fault(reason=cast(Any, 99_999)).SerializeToString()
_NO_SUCH_REASON_OF_A_FINDING = link_pb2.Fault(
    findings=[program_pb2.Finding(reason=cast(Any, 99_999))]
).SerializeToString()


@pytest.mark.parametrize("fault", [_NO_MESSAGE, _NO_SUCH_REASON, _NO_SUCH_REASON_OF_A_FINDING])
async def test_a_malformed_fault_ends_the_connection_and_fails_all_requests(fault: bytes) -> None:
    connection, transport = connected(1)
    works = [connection.submit(Kind.RUN, name) for name in (b"a", b"b")]
    connection.data_received(pack_header(Kind.FAULT, transport.sent[0][1], len(fault)) + fault)
    assert transport.is_closed
    connection.connection_lost(None)
    for work, started in zip(works, (True, False), strict=True):
        with pytest.raises(ConnectionLost) as gone:
            await work.answer
        assert gone.value.started is started


@pytest.mark.parametrize(
    "frame",
    [
        pack_header(Kind.RAN, 1, 2**31 + 1),
        pack_header(Kind.RAN, 1, 2**64 - 1),
        b"\xee" * HEADER_BYTES,
        pack_header(Kind.GREETING, 0, len(_NO_MESSAGE)) + _NO_MESSAGE,
    ],
)
async def test_a_malformed_frame_ends_the_connection_at_once(frame: bytes) -> None:
    connection, transport = connected(1)
    connection.data_received(frame)
    assert transport.is_closed


async def test_frames_that_arrive_in_pieces() -> None:
    connection, transport = connected(2)
    works = [connection.submit(Kind.RUN, name) for name in (b"a", b"b")]
    data = b"".join(pack_header(Kind.RAN, number, 3) + b"xyz" for _, number, _ in transport.sent)
    for position in range(len(data)):
        connection.data_received(data[position : position + 1])
    assert [await work.answer for work in works] == [b"xyz", b"xyz"]


class Writes(Transport):
    """Notes what each system call would send."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))


async def test_frames_of_one_turn_of_the_loop_are_sent_at_once_and_in_order() -> None:
    connection, transport, large = Connection(5), Writes(), bytes(20_000)
    connection.connection_made(transport)
    for payload in (b"a", b"b", b"c", large, b"d", b"e"):
        connection.submit(Kind.RUN, payload)
    # Nothing was under way when the first came, so it is not held back, and a large one is sent at once.
    assert [len(data) // HEADER_BYTES for data in transport.written][:2] == [1, 2]
    await asyncio.sleep(0)
    payloads = [data[HEADER_BYTES:] for data in transport.written]
    assert len(payloads) == 4
    assert (payloads[0], payloads[2]) == (b"a", large)
    assert [payload[-1:] for payload in payloads] == [b"a", b"c", b"\0", b"d"]


async def test_frames_that_were_held_back_are_sent_before_the_socket_is_closed() -> None:
    connection, transport = Connection(4), Writes()
    connection.connection_made(transport)
    for payload in (b"a", b"b"):
        connection.submit(Kind.RUN, payload)
    connection.close()
    assert [data[HEADER_BYTES:] for data in transport.written] == [b"a", b"b"]
