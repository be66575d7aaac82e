"""Which waiting requests are sent together; the transport only records what is sent."""

from __future__ import annotations

import asyncio

import pytest

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.batching import BatchKey, pack_batch, unpack_batch
from gradrule_server.link.connection import Connection
from gradrule_server.link.framing import Kind, pack_header
from gradrule_server.link.messages import fault_message
from gradrule_server.link.process import EngineTimes
from gradrule_server.link.request_scheduler import ConnectionLost
from gradrule_server.link.v1 import link_pb2
from tests.unit.link.fake_engine import CRASH, FakeEngine, FakeProcess, FakeRecorder, Transport

P, Q = BatchKey("p"), BatchKey("q")


def connected(threads: int = 1, most: int = 64, delay_s: float = 0.0) -> tuple[Connection, Transport]:
    connection, transport = Connection(threads, None, most, delay_s), Transport()
    transport.connection = connection
    connection.connection_made(transport)
    return connection, transport


def frames(transport: Transport) -> list[list[bytes]]:
    """The requests of each frame that was sent."""
    return [
        [bytes(part) for _, part in unpack_batch(payload)[1]] if kind is Kind.RUN_BATCH else [payload]
        for kind, _, payload in transport.sent
    ]


def answer(connection: Connection, transport: Transport, *names: bytes) -> None:
    ids: dict[bytes, int] = {}
    for kind, number, payload in transport.sent:
        ids |= {bytes(part): n for n, part in unpack_batch(payload)[1]} if kind is Kind.RUN_BATCH else {payload: number}
    for name in names:
        connection.data_received(pack_header(Kind.RAN, ids[name], len(name)) + name)


def notice(
    connection: Connection, outcome: link_pb2.BatchNotice.Outcome.ValueType, key: str = "p", run: int = 0
) -> None:
    payload = link_pb2.BatchNotice(key=key, outcome=outcome).SerializeToString()
    connection.data_received(pack_header(Kind.BATCH_NOTICE, run, len(payload)) + payload)


def end_run(connection: Connection, transport: Transport) -> None:
    """The engine is done with the requests that were sent together last."""
    run = [number for kind, number, _ in transport.sent if kind is Kind.RUN_BATCH][-1]
    notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL, run=run)


def submit(connection: Connection, *names: bytes, key: BatchKey | None = P) -> None:
    for name in names:
        connection.submit(Kind.RUN, name, batch_key=key)


async def test_two_are_tried_and_all_that_wait_run_together_once_they_are_equal() -> None:
    connection, transport = connected()
    submit(connection, *(b"%d" % number for number in range(8)))
    assert frames(transport) == [[b"0"]]
    answer(connection, transport, b"0")
    assert frames(transport)[1:] == [[b"1", b"2"]]
    answer(connection, transport, b"1", b"2")
    assert len(transport.sent) == 2
    end_run(connection, transport)
    assert frames(transport)[2:] == [[b"3", b"4", b"5", b"6", b"7"]]


async def test_a_run_takes_one_thread_until_the_engine_is_done_with_it() -> None:
    connection, transport = connected()
    notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL)
    submit(connection, b"a", b"b", b"c", b"d")
    answer(connection, transport, b"a")
    submit(connection, b"e")
    answer(connection, transport, b"b", b"c")
    assert frames(transport) == [[b"a"], [b"b", b"c", b"d"]]
    assert connection.running == 1
    answer(connection, transport, b"d")
    assert len(transport.sent) == 2
    end_run(connection, transport)
    assert frames(transport)[2:] == [[b"e"]]


async def test_while_two_are_tried_the_others_run_alone() -> None:
    connection, transport = connected(threads=2)
    submit(connection, b"a", b"b", b"c", b"d", b"e")
    answer(connection, transport, b"a", b"b")
    assert frames(transport)[2:] == [[b"c", b"d"], [b"e"]]


async def test_a_program_that_is_refused_is_not_tried_again() -> None:
    connection, transport = connected()
    notice(connection, link_pb2.BatchNotice.OUTCOME_REFUSED)
    submit(connection, b"a", b"b", b"c")
    answer(connection, transport, b"a")
    assert frames(transport) == [[b"a"], [b"b"]]


async def test_a_program_whose_calls_never_fit_together_is_tried_a_few_times_only() -> None:
    connection, transport = connected()
    for _ in range(16):
        notice(connection, link_pb2.BatchNotice.OUTCOME_UNSPECIFIED)
    submit(connection, b"a", b"b", b"c")
    answer(connection, transport, b"a")
    assert frames(transport) == [[b"a"], [b"b"]]


async def test_requests_of_other_programs_or_params_stay_apart() -> None:
    connection, transport = connected()
    for key in "pq":
        notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL, key)
    submit(connection, b"first", key=None)
    submit(connection, b"p0")
    submit(connection, b"q0", key=Q)
    submit(connection, b"none", key=None)
    submit(connection, b"other", key=BatchKey("p", "params"))
    submit(connection, b"p1")
    answer(connection, transport, b"first")
    assert frames(transport)[1:] == [[b"p0", b"p1"]]


async def test_no_more_than_allowed_run_together() -> None:
    connection, transport = connected(most=3)
    notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL)
    submit(connection, *(b"%d" % number for number in range(6)))
    answer(connection, transport, b"0")
    assert frames(transport)[1:] == [[b"1", b"2", b"3"]]
    alone, sent = connected(most=1)
    notice(alone, link_pb2.BatchNotice.OUTCOME_EQUAL)
    submit(alone, b"a", b"b", b"c")
    answer(alone, sent, b"a")
    assert frames(sent) == [[b"a"], [b"b"]]


async def test_while_two_runs_are_under_way_others_wait_for_one_of_them() -> None:
    connection, transport = connected(threads=8, delay_s=60.0)
    submit(connection, b"a", b"b", b"c")
    assert frames(transport) == [[b"a"], [b"b"], [b"c"]]
    notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL)
    submit(connection, b"d", b"e")
    submit(connection, b"other", key=Q)
    answer(connection, transport, b"a")
    assert frames(transport)[3:] == [[b"other"]]
    answer(connection, transport, b"b")
    assert frames(transport)[4:] == [[b"d", b"e"]]


async def test_a_second_run_begins_once_it_is_as_large_as_the_first() -> None:
    connection, transport = connected(threads=8, delay_s=60.0)
    notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL)
    submit(connection, b"a", b"b", b"c", b"d")
    answer(connection, transport, b"a")
    assert frames(transport) == [[b"a"], [b"b"], [b"c", b"d"]]
    answer(connection, transport, b"b")
    # Clients that were answered together come back one by one.
    submit(connection, b"e")
    assert frames(transport)[3:] == []
    submit(connection, b"f")
    assert [sorted(frame) for frame in frames(transport)[3:]] == [[b"e", b"f"]]


async def test_a_second_run_need_not_be_as_large_as_one_of_other_params() -> None:
    connection, transport = connected(threads=8, delay_s=60.0)
    notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL)
    submit(connection, b"a", b"b", b"c", b"d")
    answer(connection, transport, b"a")
    answer(connection, transport, b"b")
    assert frames(transport) == [[b"a"], [b"b"], [b"c", b"d"]]
    # The run of two cannot take it.
    submit(connection, b"e", key=BatchKey("p", "params"))
    assert frames(transport)[3:] == [[b"e"]]


async def test_a_request_does_not_wait_for_runs_of_other_params() -> None:
    other = BatchKey("p", "others")
    connection, transport = connected(threads=4, delay_s=60)
    notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL)
    submit(connection, b"a", b"b")
    submit(connection, b"c", key=other)
    assert frames(transport) == [[b"a"], [b"b"], [b"c"]]


async def test_bytes_in_shared_memory_count_for_the_size_of_a_run() -> None:
    connection, transport = connected()
    notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL)
    submit(connection, b"0")
    for name in (b"1", b"2", b"3"):
        connection.submit(Kind.RUN, name, batch_key=P, shared_bytes=3 << 20)
    answer(connection, transport, b"0")
    assert frames(transport)[1:] == [[b"1", b"2"]]


async def test_nobody_waits_longer_than_allowed() -> None:
    connection, transport = connected(threads=8, delay_s=0.01)
    notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL)
    submit(connection, b"a", b"b", b"c", b"d")
    assert frames(transport) == [[b"a"], [b"b"]]
    async with asyncio.timeout(30):
        while connection.waiting:
            await asyncio.sleep(0.001)
    assert frames(transport)[2:] == [[b"c", b"d"]]


async def test_what_is_dropped_while_it_waits_is_not_sent() -> None:
    connection, transport = connected()
    notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL)
    submit(connection, b"a", b"b")
    dropped = connection.submit(Kind.RUN, b"c", batch_key=P)
    submit(connection, b"d")
    assert connection.drop(dropped)
    answer(connection, transport, b"a")
    assert frames(transport)[1:] == [[b"b", b"d"]]


async def test_a_lost_engine_tells_all_requests_of_a_run() -> None:
    connection, transport = connected()
    notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL)
    works = [connection.submit(Kind.RUN, name, batch_key=P) for name in (b"a", b"b", b"c")]
    answer(connection, transport, b"a")
    connection.connection_lost(None)
    assert len(connection.lost) == 2
    for work in works[1:]:
        with pytest.raises(ConnectionLost) as gone:
            await work.answer
        assert gone.value.started


def test_a_batch_that_is_cut_short_is_refused() -> None:
    payload = b"".join(pack_batch(4, [(7, (b"ab", b"c")), (8, ())]))
    assert unpack_batch(payload) == (4, [(7, b"abc"), (8, b"")])
    for wrong in (payload[:-1], payload + b"x", payload[:6]):
        with pytest.raises(ValueError, match="batch of requests"):
            unpack_batch(wrong)


async def test_a_program_whose_calls_ended_an_engine_together_runs_them_alone_from_then_on() -> None:
    engine = FakeEngine()
    connection, transport = connected()
    engine.install(FakeProcess(connection))
    notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL, "digest/1")
    works = [engine.submit(Kind.RUN, name, batch_key=BatchKey("digest/1")) for name in (b"a", b"b", b"c")]
    answer(connection, transport, b"a")
    engine.fake.die(CRASH)
    connection, transport = connected()
    engine.install(FakeProcess(connection))
    notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL, "digest/2")
    for name in (b"d", b"e", b"f"):
        engine.submit(Kind.RUN, name, batch_key=BatchKey("digest/2"))
    answer(connection, transport, b"d")
    assert frames(transport) == [[b"d"], [b"e"]]
    for work in works[1:]:
        with pytest.raises(ConnectionLost):
            await work.answer


async def test_a_program_whose_merged_runs_differed_runs_its_calls_alone_in_all_engines_from_then_on() -> None:
    first, second = FakeEngine(), FakeEngine()
    # As the engines of a pool.
    first._unbatched = second._unbatched
    connection, _ = connected()
    first.install(FakeProcess(connection))
    notice(connection, link_pb2.BatchNotice.OUTCOME_REFUSED, "digest/1")
    connection, transport = connected()
    second.install(FakeProcess(connection))
    notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL, "digest/2")
    for name in (b"d", b"e", b"f"):
        second.submit(Kind.RUN, name, batch_key=BatchKey("digest/2"))
    answer(connection, transport, b"d")
    assert frames(transport) == [[b"d"], [b"e"]]


async def test_an_engine_that_has_no_memory_for_a_run_tells_all_its_requests_and_takes_others() -> None:
    connection, transport = connected()
    works = [connection.submit(Kind.RUN, name, batch_key=P) for name in (b"a", b"b", b"c")]
    submit(connection, b"d", b"e")
    answer(connection, transport, b"a")
    assert frames(transport)[1:] == [[b"b", b"c"]]
    run = transport.sent[-1][1]
    answer(connection, transport, b"b")
    refused = fault_message(error(errors_pb2.ERROR_REASON_MEMORY_EXCEEDED, "no memory is left")).SerializeToString()
    connection.data_received(pack_header(Kind.FAULT, run, len(refused)) + refused)
    assert await works[1].answer == b"b"
    with pytest.raises(GradruleError, match="no memory is left"):
        await asyncio.wait_for(works[2].answer, 60)
    # They are tried once more: nothing is known against the program.
    assert frames(transport)[2:] == [[b"d", b"e"]]


class BatchEngine(FakeEngine):
    """An engine of one thread whose requests `b` and `c` were sent together; `b` and `c` can be watched."""

    def __init__(self) -> None:
        super().__init__(times=EngineTimes(overrun_grace_s=0.02))
        connection, self.transport = connected()
        self.install(FakeProcess(connection))
        notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL, "digest/1")
        self.recorders = [FakeRecorder() for _ in range(3)]
        self.works = [
            self.submit(Kind.RUN, name, recorder, batch_key=BatchKey("digest/1"))
            for name, recorder in zip((b"a", b"b", b"c"), self.recorders, strict=True)
        ]
        answer(connection, self.transport, b"a")
        assert frames(self.transport) == [[b"a"], [b"b", b"c"]]


async def until_killed(process: FakeProcess) -> None:
    async with asyncio.timeout(60):
        while not process.is_killed:
            await asyncio.sleep(0.005)


async def test_cancelling_one_request_of_a_run_costs_the_others_nothing() -> None:
    engine = BatchEngine()
    process, (_, kept, cancelled) = engine.fake, engine.works
    cancelled.answer.cancel()
    engine.abandon(cancelled, asyncio.get_running_loop().time())
    # Several times the time after which a request that ran by itself would have ended the engine.
    await asyncio.sleep(0.2)
    assert not process.is_killed
    answer(process.connection, engine.transport, b"b", b"c")
    end_run(process.connection, engine.transport)
    assert await kept.answer == b"b"
    await asyncio.sleep(0.1)
    assert not process.is_killed
    assert process.connection.running == 0


async def test_a_run_that_nobody_waits_for_ends_the_engine_and_nobody_is_blamed_for_its_length() -> None:
    engine = BatchEngine()
    process = engine.fake
    for work in engine.works[1:]:
        work.answer.cancel()
        engine.abandon(work, asyncio.get_running_loop().time())
    await until_killed(process)
    assert [recorder.seconds for recorder in engine.recorders] == [[], [], []]
    # From then on each runs alone, and is blamed for itself.
    connection, transport = connected()
    engine.install(FakeProcess(connection))
    notice(connection, link_pb2.BatchNotice.OUTCOME_EQUAL, "digest/2")
    recorder = FakeRecorder()
    for name in (b"d", b"e", b"f"):
        engine.submit(Kind.RUN, name, recorder, batch_key=BatchKey("digest/2"))
    answer(connection, transport, b"d")
    assert frames(transport) == [[b"d"], [b"e"]]
    (work,) = (work for work in connection._running.values())
    work.answer.cancel()
    engine.abandon(work, asyncio.get_running_loop().time())
    await until_killed(engine.fake)
    assert len(recorder.seconds) == 1


async def test_the_last_of_a_run_that_is_given_up_ends_the_engine_though_others_were_answered() -> None:
    engine = BatchEngine()
    process, (_, _, cancelled) = engine.fake, engine.works
    answer(process.connection, engine.transport, b"b")
    cancelled.answer.cancel()
    engine.abandon(cancelled, asyncio.get_running_loop().time())
    await until_killed(process)
    assert engine.recorders[2].seconds == []


async def test_an_engine_that_dies_after_it_answered_while_it_tries_a_program_does_not_try_it_again() -> None:
    engine = FakeEngine()
    connection, transport = connected(threads=2)
    engine.install(FakeProcess(connection))
    tried, other = FakeRecorder(), FakeRecorder()
    other.workload = "other"
    key = BatchKey("digest/1")
    works = [engine.submit(Kind.RUN, name, tried, batch_key=key) for name in (b"a", b"b", b"c", b"d")]
    answer(connection, transport, b"a")
    assert frames(transport) == [[b"a"], [b"b"], [b"c", b"d"]]
    answer(connection, transport, b"b")
    beside = engine.submit(Kind.RUN, b"beside", other)
    answer(connection, transport, b"c", b"d")
    process = engine.fake
    process.die(CRASH)
    # The request that ran beside was not alone: nobody may blame it for this end.
    with pytest.raises(ConnectionLost) as gone:
        await beside.answer
    assert not (await engine.loss_error(beside, gone.value)).ran_alone
    assert all(work.answer.done() for work in works)
    connection, transport = connected()
    engine.install(FakeProcess(connection))
    for name in (b"e", b"f", b"g"):
        engine.submit(Kind.RUN, name, batch_key=BatchKey("digest/2"))
    answer(connection, transport, b"e")
    assert frames(transport) == [[b"e"], [b"f"]]
