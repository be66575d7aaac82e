"""Runs slow and hostile clients, each beside a healthy one.

Target: the healthy client sees no error and no wrong answer, and waits at most a second (p99); the front end survives
with its former number of descriptors and limited memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import numpy as np

from gradrule.v1 import blob_pb2, evaluate_pb2
from tests.battery import answer_checks, wire
from tests.battery.figures import Figures, Findings, Scale
from tests.battery.known_answers import HealthyClient
from tests.battery.serving import growth_faults, served, settled
from tests.processes import Resources, resources
from tests.service import raw
from tests.service.servers import RunningServer

TARGET = "a healthy client beside each: 0 errors, p99 ≤ 1 s; descriptors return, memory ≤ 256 MiB more"
P99_S = 1.0
# A silent connection is closed after the handshake timeout of 10 s.
_SETTLE_S = 20.0
_LONG_S = 60.0
_SHORT_S = 2.0
_EVALUATE = "/gradrule.v1.GradientService/Evaluate"
_STREAM = "/gradrule.v1.GradientService/StreamEvaluate"
_SESSION = "/gradrule.v1.SessionService/RunSession"
_UPLOAD = "/gradrule.v1.BlobService/UploadBlob"

Did = tuple[int, str]
"""How much an attack came to do, and in words."""

Attack = Callable[[str, float], Awaitable[Did]]
"""Takes the target and seconds, and says what was done; raises nothing."""


def run(scale: Scale) -> Figures:
    """Runs each attack for a minute at full scale."""
    with served(scale, "hostile") as server:
        return asyncio.run(run_attacks(server, scale, max(_SHORT_S, _LONG_S * scale.share)))


async def run_attacks(server: RunningServer, scale: Scale, seconds: float, p99_s: float = P99_S) -> Figures:
    """Runs each attack for that many seconds."""
    findings = Findings()
    details: dict[str, object] = {}
    clock = scale.clock()
    done = asked = 0
    await _warm_up(server.target)
    for name, attack in ATTACKS.items():
        if clock.is_over:
            break
        before = resources(server.process.pid)
        healthy = HealthyClient(server.target, every_s=0.02)
        asking = asyncio.ensure_future(healthy.run())
        started = time.monotonic()
        count, told = await attack(server.target, seconds)
        healthy.stop()
        await asking
        after = await settled(server, before, _SETTLE_S)
        done += 1
        seen = healthy.seen
        asked += seen.asked
        details[name] = {
            "did": f"{count} {told}",
            "seconds": round(time.monotonic() - started, 1),
            "healthy_asked": seen.asked,
            "healthy_errors": seen.errors,
            "p99_ms": round(seen.quantile(0.99) * 1e3, 1),
            "descriptors": [before.descriptors, after.descriptors],
            "grew_mib": round((after.resident_bytes - before.resident_bytes) / 2**20, 1),
        }
        for fault in judge(name, seen.errors, seen.wrong, seen.quantile(0.99), before, after, p99_s):
            findings.add(fault)
        if not count:
            findings.add(f"{name}: nothing was done")
        if server.process.poll() is not None:
            findings.add(f"{name}: the front end ended with {server.process.returncode}")
            break
    return Figures(
        target=TARGET,
        cases=asked,
        failures=findings.count,
        met=not findings.count and (done == len(ATTACKS) or clock.ends_at is not None),
        details=details,
        findings=findings.lines,
    )


def judge(
    name: str,
    errors: Mapping[str, int],
    wrong: list[str],
    p99_s: float,
    before: Resources,
    after: Resources,
    most_s: float = P99_S,
) -> list[str]:
    """Returns the faults during one attack."""
    found = [f"{name}: the healthy client saw {count} × {reason}" for reason, count in errors.items()]
    found += [f"{name}: a wrong answer: {fault}" for fault in wrong]
    if p99_s > most_s:
        found.append(f"{name}: the healthy client waited {p99_s:.2f} s (p99)")
    return found + [f"{name}: {fault}" for fault in growth_faults(before, after)]


async def _warm_up(target: str) -> None:
    healthy = HealthyClient(target, every_s=0.01)
    asking = asyncio.ensure_future(healthy.run())
    await asyncio.sleep(1.5)
    healthy.stop()
    await asking


# Connections.


async def silent_connections(target: str, seconds: float) -> Did:
    """Opens connections that send nothing, or half a preface."""
    async with contextlib.AsyncExitStack() as stack:
        for number in range(300):
            _, writer = await stack.enter_async_context(wire.connected(target))
            writer.write(wire.PREFACE[: number % len(wire.PREFACE)])
        await asyncio.sleep(seconds)
    return 300, "connections"


async def byte_at_a_time(target: str, seconds: float) -> Did:
    """Sends a request byte by byte, without its end."""
    block = wire.headers(_EVALUATE)
    data = wire.PREFACE + wire.settings() + wire.frame(wire.HEADERS, wire.END_HEADERS, 1, block)
    data += wire.frame(wire.DATA, 0, 1, wire.message(raw.request(raw.sign_graph()).SerializeToString()))[:-5]

    async def trickle() -> int:
        done = 0
        async with wire.connected(target) as (_, writer):
            pause = seconds / len(data)
            for position in range(len(data)):
                done += await wire.flood(writer, data[position : position + 1], 1)
                await asyncio.sleep(pause)
        return done

    return sum(await asyncio.gather(*(trickle() for _ in range(20)))), f"bytes of {len(data)} on each of 20 connections"


async def garbage(target: str, seconds: float) -> Did:
    """Sends invalid HTTP/2, before and after the preface."""
    random = np.random.default_rng(1)
    ends_at = time.monotonic() + seconds
    count = 0
    while time.monotonic() < ends_at:
        async with wire.connected(target) as (reader, writer):
            start = wire.PREFACE + wire.settings() if count % 2 else b""
            await wire.flood(writer, start + random.bytes(2000), 1)
            await wire.read_until_closed(reader, 0.2)
        count += 1
    return count, "connections"


# Frames.


async def _flooded(target: str, seconds: float, start: bytes, data: bytes) -> Did:
    """Opens one connection after another and sends the same frames as fast as possible."""
    ends_at = time.monotonic() + seconds
    connections = frames = closed = 0
    while time.monotonic() < ends_at:
        async with wire.connected(target) as (reader, writer):
            reading = asyncio.ensure_future(wire.read_until_closed(reader, seconds + 1))
            await wire.flood(writer, wire.PREFACE + wire.settings() + start, 1)
            while time.monotonic() < ends_at and not reading.done():
                sent = await wire.flood(writer, data * 50, 4)
                frames += 50 * sent
                if sent < 4:
                    break
                await asyncio.sleep(0)
            closed += reading.done()
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
        connections += 1
        await asyncio.sleep(0.05)
    return frames, f"on {connections} connections, {closed} of them closed by the server"


async def pings(target: str, seconds: float) -> Did:
    """Sends PING frames."""
    return await _flooded(target, seconds, b"", wire.frame(wire.PING, payload=b"\x00" * 8))


async def settings_frames(target: str, seconds: float) -> Did:
    """Sends SETTINGS frames, each of which needs an acknowledgement."""
    return await _flooded(target, seconds, b"", wire.settings((wire.INITIAL_WINDOW_SIZE, 65_535)))


async def empty_data(target: str, seconds: float) -> Did:
    """Sends empty DATA frames without END_STREAM."""
    start = wire.frame(wire.HEADERS, wire.END_HEADERS, 1, wire.headers(_UPLOAD))
    return await _flooded(target, seconds, start, wire.frame(wire.DATA, 0, 1))


async def endless_headers(target: str, seconds: float) -> Did:
    """Sends CONTINUATION frames without end."""
    start = wire.frame(wire.HEADERS, 0, 1, wire.headers(_EVALUATE))
    more = wire.frame(wire.CONTINUATION, 0, 1, wire.literal(b"more", b"x" * 1000))
    return await _flooded(target, seconds, start, more)


async def rapid_resets(target: str, seconds: float) -> Did:
    """Starts calls and resets them at once."""
    block = wire.headers(_STREAM)
    cancel = wire.CANCEL.to_bytes(4, "big")
    ends_at = time.monotonic() + seconds
    count = connections = 0
    while time.monotonic() < ends_at:
        async with wire.connected(target) as (reader, writer):
            reading = asyncio.ensure_future(wire.read_until_closed(reader, seconds + 1))
            await wire.flood(writer, wire.PREFACE + wire.settings(), 1)
            stream = 1
            while time.monotonic() < ends_at and not reading.done():
                burst = b""
                for _ in range(50):
                    burst += wire.frame(wire.HEADERS, wire.END_HEADERS, stream, block)
                    burst += wire.frame(wire.RST_STREAM, 0, stream, cancel)
                    stream += 2
                if not await wire.flood(writer, burst, 1):
                    break
                count += 50
                await asyncio.sleep(0)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
        connections += 1
        await asyncio.sleep(0.05)
    return count, f"calls on {connections} connections"


# Calls.


def _channel(target: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(
        target,
        options=[
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.max_receive_message_length", -1),
        ],
    )


async def huge_metadata(target: str, seconds: float) -> Did:
    """Sends more metadata than the server accepts."""
    ends_at = time.monotonic() + seconds
    reasons: dict[str, int] = {}
    async with _channel(target) as channel:
        while time.monotonic() < ends_at:
            metadata = tuple((f"key-{number}", "v" * 900) for number in range(64))
            try:
                await channel.unary_unary(_EVALUATE)(b"", timeout=10.0, metadata=metadata)
            except grpc.RpcError as failure:
                judged = answer_checks.check_failure(failure)
                reason = judged.reason or judged.what
                reasons[reason] = reasons.get(reason, 0) + 1
    return sum(reasons.values()), f"refusals of 64 keys of 900 bytes: {reasons}"


async def many_streams(target: str, seconds: float) -> Did:
    """Opens thousands of streams on a few connections and leaves them open."""
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(_channel(target)) for _ in range(5)]
        calls: list[Any] = [
            channels[number % len(channels)].stream_stream(_SESSION if number % 2 else _STREAM)(timeout=seconds + 30)
            for number in range(3_000)
        ]
        await asyncio.sleep(seconds)
        still_open = sum(not call.done() for call in calls)
        for call in calls:
            call.cancel()
        await asyncio.sleep(0.2)
    return still_open, "of 3,000 streams on 5 connections were not refused"


async def never_reading(target: str, seconds: float) -> Did:
    """Opens streams that request much and read nothing: windows of one byte are never enlarged."""
    x = np.zeros(256 * 1024, np.float32)
    graph = raw.sign_graph()
    question = evaluate_pb2.StreamEvaluateRequest(evaluate=raw.request(graph, {"x": raw.tensor(x)}))
    asked = 0

    async def ask() -> None:
        nonlocal asked
        async with wire.connected(target) as (reader, writer):
            start = wire.PREFACE + wire.settings((wire.INITIAL_WINDOW_SIZE, 1))
            start += wire.frame(wire.HEADERS, wire.END_HEADERS, 1, wire.headers(_STREAM))
            await wire.flood(writer, start, 1)
            reading = asyncio.ensure_future(wire.read_until_closed(reader, seconds + 30))
            ends_at = time.monotonic() + seconds
            number = 0
            while time.monotonic() < ends_at and not reading.done():
                question.request_id = number
                data = wire.message(question.SerializeToString())
                pieces = [data[at : at + 16_384] for at in range(0, len(data), 16_384)]
                try:
                    # Flow control also blocks this stream once the server stops reading.
                    async with asyncio.timeout(0.5):
                        for piece in pieces:
                            writer.write(wire.frame(wire.DATA, 0, 1, piece))
                            await writer.drain()
                except (TimeoutError, OSError):
                    break
                number += 1
                asked += 1
            await asyncio.sleep(max(0.0, ends_at - time.monotonic()))
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading

    await asyncio.gather(*(ask() for _ in range(8)))
    return asked, "answers of 1 MiB asked for on 8 streams"


async def endless_uploads(target: str, seconds: float) -> Did:
    """Sends blobs without end."""
    sent = 0
    ends_at = time.monotonic() + seconds

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        yield blob_pb2.UploadBlobRequest(sha256="0" * 64).SerializeToString()
        piece = blob_pb2.UploadBlobRequest(data=b"\x00" * 65_536).SerializeToString()
        while time.monotonic() < ends_at:
            yield piece
            sent += len(piece)
            await asyncio.sleep(0.01)
        await asyncio.sleep(3600)

    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(_channel(target))
        calls: list[Any] = [channel.stream_unary(_UPLOAD)(pieces(), timeout=seconds + 60) for _ in range(10)]
        await asyncio.sleep(seconds + 0.2)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    return sent >> 10, "KiB in 10 uploads"


async def reconnecting(target: str, seconds: float) -> Did:
    """Opens a new connection for every call and closes it during the call."""
    ends_at = time.monotonic() + seconds
    block = wire.headers(_EVALUATE)
    body = wire.message(raw.request(raw.sign_graph()).SerializeToString())
    count = 0
    while time.monotonic() < ends_at:
        async with wire.connected(target) as (_, writer):
            data = wire.PREFACE + wire.settings() + wire.frame(wire.HEADERS, wire.END_HEADERS, 1, block)
            await wire.flood(writer, data + wire.frame(wire.DATA, wire.END_STREAM, 1, body), 1)
        count += 1
    return count, "connections"


ATTACKS: dict[str, Attack] = {
    "silent connections": silent_connections,
    "a byte at a time": byte_at_a_time,
    "garbage": garbage,
    "pings": pings,
    "settings": settings_frames,
    "empty data": empty_data,
    "endless headers": endless_headers,
    "rapid resets": rapid_resets,
    "huge metadata": huge_metadata,
    "many streams": many_streams,
    "never reading": never_reading,
    "endless uploads": endless_uploads,
    "reconnecting": reconnecting,
}
