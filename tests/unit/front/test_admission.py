"""Tests the limits of requests and bytes in flight, also while requests arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from gradrule.v1 import rule_pb2
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.front.admission import Admission, InFlight, InFlightLimits, UnaryRequests
from gradrule_server.front.authentication import CallerAuthenticator
from gradrule_server.front.calls import DETAILS_KEY, Call
from gradrule_server.front.connections import ConnectionWatch
from gradrule_server.front.request_pipeline import CallTimes, RequestPipeline
from gradrule_server.identity import Authenticator
from tests.battery import wire
from tests.waiting import wait_for_condition

MESSAGE = 1_000_000


def admission(requests: int = 8, size: int = 800, *, of_one: int = 100, size_of_one: int = 10_000) -> Admission:
    return Admission(InFlightLimits(requests, size), InFlightLimits(of_one, size_of_one))


def refused(pipeline: Admission, share: InFlight, size: int = 0) -> str:
    with pytest.raises(GradruleError) as refusal:
        pipeline.admit(share, size)
    assert reason_name(refusal.value.reason) == "OVERLOADED"
    assert refusal.value.retry_after_s == 0.2
    return refusal.value.message


def fill(pipeline: Admission, share: InFlight, count: int, size: int = 0) -> None:
    for _ in range(count):
        pipeline.admit(share, size)


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
            if pipeline.find_refusal(share) is None:
                pipeline.admit(share, 0)
    assert pipeline.in_flight <= 16


def test_bytes_are_shared_like_requests() -> None:
    pipeline, greedy, modest = admission(100), InFlight(), InFlight()
    fill(pipeline, greedy, 8, 100)
    assert "--max-bytes-in-flight" in refused(pipeline, greedy, 1)
    fill(pipeline, modest, 4, 100)
    refused(pipeline, modest, 100)
    for _ in range(8):
        pipeline.release(greedy, 100)
    assert (greedy.requests, greedy.size) == (0, 0)
    pipeline.admit(greedy, 400)


def test_answers_of_one_tenant_do_not_refuse_others() -> None:
    pipeline, greedy, modest = admission(100), InFlight(), InFlight()
    # An answer that is alone may be of any size, and its client need not read it.
    pipeline.admit_bytes(greedy, 100_000)
    with pytest.raises(GradruleError):
        pipeline.admit_bytes(greedy, 1)
    pipeline.admit(modest, 400)
    pipeline.release(modest, 400)
    pipeline.adjust_bytes(greedy, -100_000)
    fill(pipeline, modest, 8, 100)
    assert "--max-bytes-in-flight" in refused(pipeline, modest, 1)


def test_only_request_of_a_tenant_may_have_any_size() -> None:
    pipeline, one = admission(size_of_one=50), InFlight()
    pipeline.admit(one, 5000)
    assert "--tenant-bytes-in-flight" in refused(admission_with(one, size_of_one=50), one, 1)
    pipeline.release(one, 5000)
    assert (one.size, one.requests) == (0, 0)


def admission_with(share: InFlight, size_of_one: int) -> Admission:
    """A pipeline that knows of what a share has already."""
    pipeline = admission(size=10**6, size_of_one=size_of_one)
    share.size, share.requests = 5000, 1
    return pipeline


def test_refused_request_is_not_counted() -> None:
    pipeline, one = admission(1), InFlight()
    fill(pipeline, one, 1)
    for _ in range(5):
        refused(pipeline, one, 10)
    pipeline.release(one, 0)
    assert (pipeline.in_flight, one.requests, one.size) == (0, 0, 0)


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
        async with asyncio.timeout(10):
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


async def test_slow_requests_count_as_the_largest_message() -> None:
    served = Served()
    served.pipeline._unary_requests = UnaryRequests(served.admission, ConnectionWatch(), 0.1)
    share = served.tenants.tenant.in_flight
    async with served.running() as method:
        first = method(never(), timeout=30)
        await served.has_in_flight(1)
        await wait_for_condition(lambda: share.size == MESSAGE)
        # There is no room for a second one that may be as large; what comes quickly fits in beside it.
        assert await status_of(method(never(), timeout=30)) == "OVERLOADED"
        # On a busy machine this one may take longer than 0.1 s.
        served.pipeline._unary_requests = UnaryRequests(served.admission, ConnectionWatch(), 10.0)
        assert await method(of(b"\n\x01a"), timeout=30) == b"\n\x01a"
        first.cancel()
        await served.has_in_flight(0)
        async with asyncio.timeout(10):
            while share.size:
                await asyncio.sleep(0.01)


async def test_request_too_large_beside_others_is_refused() -> None:
    served = Served()
    async with served.running() as method:
        served.admission.adjust_bytes(served.tenants.tenant.in_flight, MESSAGE)
        large = rule_pb2.GetRuleRequest(name="x" * MESSAGE).SerializeToString()
        assert await status_of(method(of(large), timeout=30)) == "OVERLOADED"
        served.admission.adjust_bytes(served.tenants.tenant.in_flight, -MESSAGE)
        assert await method(of(large), timeout=30) == large


@pytest.mark.parametrize("stall_s", [0.4, 60.0])
async def test_connection_with_an_unread_answer_is_closed(stall_s: float) -> None:
    served = Served(stall_s=stall_s)
    share = served.tenants.tenant.in_flight
    request = rule_pb2.GetRuleRequest(name="x" * 1000).SerializeToString()
    async with served.running() as method, wire.connected(served.target) as (reader, writer):
        start = wire.PREFACE + wire.settings((wire.INITIAL_WINDOW_SIZE, 0))
        start += wire.frame(wire.HEADERS, wire.END_HEADERS, 1, wire.headers("/s/m"))
        writer.write(start + wire.frame(wire.DATA, wire.END_STREAM, 1, wire.message(request)))
        async with asyncio.timeout(10):
            while share.size != len(request) or share.requests:
                await asyncio.sleep(0.01)
        # No other connection is closed.
        assert await method(of(request)) == request
        assert await wire.read_until_closed(reader, 3.0) is (stall_s < 3)
        if stall_s < 3:
            async with asyncio.timeout(10):
                while share.size:
                    await asyncio.sleep(0.01)
        else:
            assert share.size == len(request)
        assert await method(of(request)) == request


async def test_abandoned_read_ends_with_its_call() -> None:
    """grpc.aio never frees what belongs to a read that is cancelled."""
    message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    class Call:
        def peer(self) -> str:
            return "ipv4:192.0.2.1:1234"

        async def read(self) -> bytes:
            return await message

    bound = InFlightLimits(9, MESSAGE)
    context: Any = Call()
    reading = asyncio.create_task(UnaryRequests(Admission(bound, bound), ConnectionWatch()).read(context, InFlight()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not message.cancelled()
    message.set_result(b"")


async def test_abandoned_read_of_a_stream_ends_with_its_call() -> None:
    message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    class Requests:
        def __aiter__(self) -> AsyncIterator[bytes]:
            return self

        async def __anext__(self) -> bytes:
            return await message

    connection = ConnectionWatch().get("ipv4:192.0.2.1:1234")
    reading: asyncio.Future[bytes] = asyncio.ensure_future(anext(connection.messages(Requests())))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not message.cancelled()
    assert not connection.reads
    message.set_result(b"")
