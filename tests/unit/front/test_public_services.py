"""The health service with clients that do not read, do not finish requests, or are many; over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gradrule_server.front.public_services import NOT_SERVING, SERVING, Health
from gradrule_server.front.server import GrpcServer, channel_options
from gradrule_server.settings import Settings
from tests.battery import wire

WATCH = "/grpc.health.v1.Health/Watch"


@asynccontextmanager
async def serving(health: Health) -> AsyncIterator[str]:
    """A server that has nothing but health; its target."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((health.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def stub(target: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(target) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def asked(service: str = "") -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


@asynccontextmanager
async def not_reading(target: str, count: int = 1) -> AsyncIterator[asyncio.StreamReader]:
    """A client that watches and lets nothing be sent to it; yields once the server writes on all its calls."""
    calls = b"".join(
        wire.frame(wire.HEADERS, wire.END_HEADERS, 2 * number + 1, wire.headers(WATCH))
        + wire.frame(wire.DATA, wire.END_STREAM, 2 * number + 1, wire.message(b""))
        for number in range(count)
    )
    async with wire.connected(target) as (reader, writer):
        writer.write(wire.PREFACE + wire.settings((wire.INITIAL_WINDOW_SIZE, 0)) + calls)
        async with asyncio.timeout(60):
            answered = 0
            while answered < count:
                kind, *_ = await wire.read_frame(reader)
                # Headers may be sent; they come with the first status, which may not.
                answered += kind == wire.HEADERS
        yield reader


async def eventually(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await check():
            await asyncio.sleep(0.02)


async def test_statuses_can_be_checked_and_watched() -> None:
    health = Health()
    async with serving(health) as target, stub(target) as client:
        assert (await client.Check(asked())).status == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            await client.Check(asked("s"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watched = client.Watch(asked("s"))
        assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        for status in (NOT_SERVING, SERVING):
            health.set("s", status)
            assert (await watched.read()).status == status
            assert (await client.Check(asked("s"))).status == status
        health.end()
        health.set("s", SERVING)
        assert (await watched.read()).status == NOT_SERVING
        assert await watched.read() is grpc.aio.EOF
        assert (await client.Check(asked())).status == NOT_SERVING


async def test_watcher_that_does_not_read_delays_no_other() -> None:
    # The other one is disconnected later than this test may take.
    health = Health(stall_s=300.0)
    health.set("", NOT_SERVING)
    async with serving(health) as target, stub(target) as client, not_reading(target):
        watched = client.Watch(asked())
        assert (await asyncio.wait_for(watched.read(), 60)).status == NOT_SERVING
        health.set("", SERVING)
        assert (await asyncio.wait_for(watched.read(), 60)).status == SERVING
        assert (await client.Check(asked(), timeout=60)).status == SERVING


async def test_watcher_that_does_not_read_is_disconnected() -> None:
    health = Health(max_watchers=2, stall_s=2.0)
    async with serving(health) as target, stub(target) as client:
        # It is connected before the time of the others begins.
        await client.Check(asked())
        async with not_reading(target, 2) as reader:
            with pytest.raises(grpc.RpcError) as caught:
                await client.Watch(asked()).read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await wire.read_until_closed(reader, 20)

        async def is_accepted() -> bool:
            try:
                return bool((await client.Watch(asked()).read()).status == SERVING)
            except grpc.RpcError:
                return False

        await eventually(is_accepted)


async def test_unfinished_request_times_out() -> None:
    async with serving(Health(request_s=0.3)) as target, grpc.aio.insecure_channel(target) as channel:

        async def never() -> AsyncIterator[bytes]:
            await asyncio.sleep(60)
            yield b""

        method: Any = channel.stream_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.RpcError) as caught:
            await method(never(), timeout=20)
        assert (caught.value.code(), caught.value.details()) == (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "no request came within 0.3 s",
        )
        with pytest.raises(grpc.RpcError) as caught:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff\xff", timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_server_stops_although_watchers_do_not_read() -> None:
    server = GrpcServer(channel_options(Settings(max_connections=16, max_connection_streams=100)))
    port = await server.start("127.0.0.1:0", None)
    target = f"127.0.0.1:{port}"
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(not_reading(target, 5))
        client = await stack.enter_async_context(stub(target))
        watched = client.Watch(asked())
        assert (await watched.read()).status == SERVING
        server.set_ready(True)
        draining = asyncio.ensure_future(server.drain(1.0))
        # A watcher that reads gets the status, and the server stops in time.
        assert (await asyncio.wait_for(watched.read(), 60)).status == NOT_SERVING
        await asyncio.wait_for(draining, 60)
