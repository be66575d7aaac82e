"""Tests the limits of requests and bytes in flight, also while requests arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from gradrule.v1 import rule_pb2
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.front.admission import Admission, InFlight, InFlightLimits
from gradrule_server.front.authentication import CallerAuthenticator
from gradrule_server.front.calls import DETAILS_KEY, Call
from gradrule_server.front.connections import ConnectionWatch
from gradrule_server.front.request_pipeline import CallTimes, RequestPipeline
from gradrule_server.identity import Authenticator
from tests.battery import wire
from tests.waiting import wait_for_condition

MESSAGE = 1_000_000
# More than the requests that need not wait behind others.
PART = 100_000


def admission(requests: int = 8, size: int = 800, *, of_one: int = 100, size_of_one: int = 10_000) -> Admission:
    return Admission(InFlightLimits(requests, size), InFlightLimits(of_one, size_of_one))


def refused(pipeline: Admission, share: InFlight) -> str:
    with pytest.raises(GradruleError) as refusal:
        pipeline.admit(share)
    assert reason_name(refusal.value.reason) == "OVERLOADED"
    assert refusal.value.retry_after_s == 0.2
    return refusal.value.message


def fill(pipeline: Admission, share: InFlight, count: int) -> None:
    for _ in range(count):
        pipeline.admit(share)


def test_single_tenant_may_use_the_whole_server() -> None:
    pipeline, one = admission(), InFlight()
    fill(pipeline, one, 8)
    assert "--max-concurrent-requests" in refused(pipeline, one)
    pipeline.release(one, 0)
    fill(pipeline, one, 1)
    assert pipeline.in_flight == one.requests == 8


def test_tenant_is_limited_to_its_quota() -> None:
    pipeline, one = admission(of_one=3), InFlight()
    fill(pipeline, one, 3)
    assert "--tenant-requests" in refused(pipeline, one)
    fill(pipeline, InFlight(), 3)


def test_first_tenant_does_not_keep_others_out() -> None:
    pipeline, greedy, modest = admission(), InFlight(), InFlight()
    fill(pipeline, greedy, 8)
    # Two are here now: each may have half.
    fill(pipeline, modest, 4)
    refused(pipeline, modest)
    refused(pipeline, greedy)
    for _ in range(5):
        pipeline.release(greedy, 0)
    fill(pipeline, greedy, 1)


def test_fair_shares_are_limited() -> None:
    pipeline = admission()
    for _ in range(8):
        fill(pipeline, InFlight(), 1)
    # Nine share eight: no whole request is left for the ninth.
    refused(pipeline, InFlight())


def test_server_is_never_filled_beyond_twice_its_limit() -> None:
    pipeline, first = admission(), InFlight()
    fill(pipeline, first, 8)
    for others in range(1, 40):
        share = InFlight()
        for _ in range(8 // (others + 1)):
            with suppress(GradruleError):
                pipeline.admit(share)
    assert pipeline.in_flight <= 16


def test_refused_request_is_not_counted() -> None:
    pipeline, one = admission(1), InFlight()
    fill(pipeline, one, 1)
    for _ in range(5):
        refused(pipeline, one)
    pipeline.release(one, 0)
    assert (pipeline.in_flight, one.requests, one.size) == (0, 0, 0)


class Bytes:
    """Requests whose bytes are counted or wait. The limits are large enough for bytes that are not few.

    Args:
        server: limit of the server.
        tenant: limit of each tenant.
    """

    def __init__(self, server: int = 8 * PART, tenant: int = 100 * PART) -> None:
        self.admission = Admission(InFlightLimits(100, server), InFlightLimits(100, tenant), PART)
        self.order: list[str] = []

    async def _run(self, share: InFlight, size: int, name: str, left_s: float) -> None:
        self.admission.admit(share)
        try:
            if not self.admission.admit_now(share, size):
                await self.admission.wait(share, size, asyncio.get_running_loop().time() + left_s)
        except BaseException:
            self.admission.release(share, 0)
            raise
        self.order.append(name)

    async def ask(self, share: InFlight, size: int, name: str = "", left_s: float = 60.0) -> asyncio.Task[None]:
        """Starts a request; returns once it has been admitted or waits."""
        task = asyncio.create_task(self._run(share, size, name, left_s))
        await steps()
        return task

    async def release(self, share: InFlight, size: int) -> None:
        """Ends a request; returns once those that were waiting for it have been admitted."""
        self.admission.release(share, size)
        await steps()


async def steps() -> None:
    """Lets tasks go on as far as they can at once."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_requests_without_room_wait_in_order() -> None:
    """Nothing that the server can do a little later is refused."""
    held, one = Bytes(), InFlight()
    first = await held.ask(one, 5 * PART, "a")
    waiting = [await held.ask(one, size * PART, name) for name, size in (("b", 5), ("c", 5), ("d", 2))]
    assert first.done() and not any(task.done() for task in waiting)
    assert (one.running.size, one.arriving.size) == (5 * PART, 12 * PART)
    for _ in range(2):
        await held.release(one, 5 * PART)
    assert held.order == ["a", "b", "c", "d"]
    assert (one.running.size, one.arriving.size) == (7 * PART, 0)


async def test_small_requests_do_not_wait_behind_large_ones() -> None:
    held, one, other = Bytes(), InFlight(), InFlight()
    await held.ask(one, 5 * PART)
    large = await held.ask(one, 5 * PART)
    for share in (one, other):
        assert (await held.ask(share, 10)).done()
    assert not large.done()


async def test_tenants_take_turns() -> None:
    held, greedy, modest = Bytes(), InFlight(), InFlight()
    await held.ask(greedy, 8 * PART)
    for number in range(3):
        await held.ask(greedy, 6 * PART, f"greedy {number}")
    for number in range(2):
        await held.ask(modest, 6 * PART, f"modest {number}")
    held.order.clear()
    await held.release(greedy, 8 * PART)
    for share in (greedy, modest, greedy, modest):
        await held.release(share, 6 * PART)
    assert held.order == ["greedy 0", "modest 0", "greedy 1", "modest 1", "greedy 2"]


async def test_tenant_below_its_fair_share_does_not_wait() -> None:
    held, greedy, modest = Bytes(), InFlight(), InFlight()
    await held.ask(greedy, 8 * PART)
    assert not (await held.ask(greedy, PART)).done()
    assert [(await held.ask(modest, PART)).done() for _ in range(5)] == [True] * 4 + [False]


async def test_requests_that_fit_do_not_keep_a_larger_one_waiting_for_ever() -> None:
    held, one, other, third = Bytes(), InFlight(), InFlight(), InFlight()
    await held.ask(one, 3 * PART)
    await held.ask(other, 3 * PART)
    large = await held.ask(third, 6 * PART)
    # It would fit now, but not beside the large one; this tenant has its fair share.
    later = await held.ask(one, 2 * PART)
    await held.release(other, 3 * PART)
    assert not large.done() and not later.done()
    await held.release(one, 3 * PART)
    assert large.done() and later.done()


async def test_request_larger_than_the_limits_is_admitted_beside_small_ones() -> None:
    held, one = Bytes(8 * PART, 4 * PART), InFlight()
    await held.ask(one, 10)
    assert (await held.ask(one, 50 * PART)).done()
    waits = await held.ask(one, PART)
    assert not waits.done()
    await held.release(one, 50 * PART)
    assert waits.done() and one.size == PART + 10


@pytest.mark.parametrize(("limits", "setting"), [((8, 100), "--max-bytes"), ((100, 8), "--tenant-bytes")])
async def test_request_that_waits_in_vain_is_told_what_is_full(limits: tuple[int, int], setting: str) -> None:
    held, one = Bytes(limits[0] * PART, limits[1] * PART), InFlight()
    await held.ask(one, 8 * PART)
    with pytest.raises(GradruleError) as refusal:
        await (await held.ask(one, PART, left_s=0.1))
    assert reason_name(refusal.value.reason) == "OVERLOADED"
    assert f"{setting}-in-flight" in refusal.value.message
    assert f"{8 * PART} bytes of running requests" in refusal.value.message
    await held.release(one, 8 * PART)
    assert (one.requests, one.size) == (0, 0)


async def test_cancelled_request_leaves_and_keeps_nobody_waiting() -> None:
    held, one, other = Bytes(), InFlight(), InFlight()
    await held.ask(one, 8 * PART)
    gone, next_one, last = await held.ask(one, 8 * PART), await held.ask(other, 6 * PART), await held.ask(one, 2 * PART)
    held.admission.release(one, 8 * PART)
    # At the same time as it would get its turn, and after it has got it.
    gone.cancel()
    await steps()
    assert gone.cancelled() and next_one.done() and last.done()
    unlucky = await held.ask(one, 8 * PART)
    held.admission.release(one, 2 * PART)
    held.admission.release(other, 6 * PART)
    await asyncio.sleep(0)
    assert one.running.size == 8 * PART
    unlucky.cancel()
    await steps()
    assert unlucky.cancelled()
    assert (one.requests, one.size, other.size) == (0, 0, 0)
    assert (await held.ask(other, 8 * PART)).done()


async def test_answers_of_one_tenant_do_not_keep_others_waiting() -> None:
    held, greedy, modest = Bytes(), InFlight(), InFlight()
    # Its client need not read it.
    held.admission.count(greedy, 1000 * PART)
    assert not (await held.ask(greedy, PART)).done()
    assert (await held.ask(modest, 4 * PART)).done()
    held.admission.count(greedy, -1000 * PART)
    await steps()
    assert greedy.running.size == PART
    assert (await held.ask(modest, 3 * PART)).done()


class FakeTenants:
    """One fake tenant without quotas."""

    def __init__(self) -> None:
        self.tenant: Any = SimpleNamespace(name="default", in_flight=InFlight(), quotas={})

    def get_loaded(self, _: str) -> Any:
        return self.tenant

    async def load(self, _: str) -> Any:
        return self.tenant

    def retain(self, _: Any) -> None: ...

    def release(self, _: Any) -> None: ...


async def echo(call: Call[rule_pb2.GetRuleRequest]) -> bytes:
    return call.raw


class Served:
    """A real server with one unary method, which answers with its request."""

    def __init__(self, *, requests: int = 9, deadline_s: float = 10.0, stall_s: float = 60.0) -> None:
        bound = InFlightLimits(requests, 3 * MESSAGE // 2)
        self.admission = Admission(bound, bound, MESSAGE)
        self.tenants = FakeTenants()
        self.pipeline = RequestPipeline(
            CallerAuthenticator(Authenticator()), self.tenants, self.admission, CallTimes(deadline_s, 60.0, stall_s)
        )
        self.target = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Any]:
        """Yields the method."""
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self.pipeline.create_service("s", {"m": (rule_pb2.GetRuleRequest, echo)}),))
        self.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            async with grpc.aio.insecure_channel(self.target) as channel:
                yield channel.stream_unary("/s/m")
        finally:
            await server.stop(0)

    async def has_in_flight(self, count: int) -> None:
        async with asyncio.timeout(60):
            while self.admission.in_flight != count:
                await asyncio.sleep(0.01)


async def never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def of(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def status_of(call: Any) -> str:
    """The reason that the server gives."""
    with pytest.raises(grpc.RpcError) as caught:
        await call
    failure: Any = caught.value
    info = error_details_pb2.ErrorInfo()
    for key, value in failure.trailing_metadata():
        if key == DETAILS_KEY:
            status_pb2.Status.FromString(value).details[0].Unpack(info)
    return info.reason


async def test_missing_request_is_counted_and_times_out() -> None:
    served = Served(requests=1, deadline_s=1.0)
    async with served.running() as method:
        slow = method(never())
        await served.has_in_flight(1)
        assert await status_of(method(of(b""), timeout=30)) == "OVERLOADED"
        assert await status_of(slow) == "DEADLINE_EXCEEDED"
        assert await method(of(b"\n\x01a"), timeout=30) == b"\n\x01a"
        share = served.tenants.tenant.in_flight
        # An answer counts until gRPC has sent it.
        await wait_for_condition(lambda: (share.requests, share.size) == (0, 0))


async def test_incomplete_request_is_counted_and_times_out() -> None:
    served = Served(deadline_s=1.0)
    async with served.running(), wire.connected(served.target) as (_, writer):
        half = wire.frame(wire.DATA, 0, 1, wire.message(bytes(1000))[:500])
        start = wire.PREFACE + wire.settings() + wire.frame(wire.HEADERS, wire.END_HEADERS, 1, wire.headers("/s/m"))
        writer.write(start + half)
        await served.has_in_flight(1)
        await served.has_in_flight(0)


async def test_call_without_a_message_is_malformed() -> None:
    served = Served()
    async with served.running() as method:
        assert await status_of(method(of(), timeout=30)) == "MALFORMED_REQUEST"


async def test_request_without_room_beside_others_waits() -> None:
    served = Served()
    share = served.tenants.tenant.in_flight
    async with served.running() as method:
        served.admission.count(share, MESSAGE)
        large = rule_pb2.GetRuleRequest(name="x" * (MESSAGE - 10)).SerializeToString()
        assert await status_of(method(of(large), timeout=0.5)) == "OVERLOADED"
        waiting = asyncio.ensure_future(method(of(large), timeout=30))
        await wait_for_condition(lambda: share.arriving.size == len(large))
        served.admission.count(share, -MESSAGE)
        assert await waiting == large


@pytest.mark.parametrize("stall_s", [0.4, 60.0])
async def test_connection_with_an_unread_answer_is_closed(stall_s: float) -> None:
    served = Served(stall_s=stall_s)
    share = served.tenants.tenant.in_flight
    request = rule_pb2.GetRuleRequest(name="x" * 1000).SerializeToString()
    async with served.running() as method, wire.connected(served.target) as (reader, writer):
        start = wire.PREFACE + wire.settings((wire.INITIAL_WINDOW_SIZE, 0))
        start += wire.frame(wire.HEADERS, wire.END_HEADERS, 1, wire.headers("/s/m"))
        writer.write(start + wire.frame(wire.DATA, wire.END_STREAM, 1, wire.message(request)))
        async with asyncio.timeout(60):
            while share.size != len(request) or share.requests:
                await asyncio.sleep(0.01)
        # No other connection is closed.
        assert await method(of(request)) == request
        assert await wire.read_until_closed(reader, 60.0 if stall_s < 3 else 3.0) is (stall_s < 3)
        if stall_s < 3:
            async with asyncio.timeout(60):
                while share.size:
                    await asyncio.sleep(0.01)
        else:
            assert share.size == len(request)
        assert await method(of(request)) == request


async def test_abandoned_read_ends_with_its_call() -> None:
    """grpc.aio never frees what belongs to a read that is cancelled."""
    message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    class Call:
        async def read(self) -> bytes:
            return await message

    context: Any = Call()
    connection = ConnectionWatch().get("ipv4:192.0.2.1:1234")
    reading = asyncio.create_task(connection.read(context))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert connection.reads
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not message.cancelled()
    assert not connection.reads
    message.set_result(b"")
