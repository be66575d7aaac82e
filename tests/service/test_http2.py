"""Raw HTTP/2 that no gRPC library sends: the server answers it, or ends as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

import gradrule as gr
from tests.battery import http2, wire
from tests.battery.figures import Scale
from tests.battery.http2_cases import FORGED, SECRET, TIMEOUTS
from tests.battery.unfinished_messages import send_unfinished
from tests.processes import has_ended, peak_bytes, reset_peak, resources
from tests.service.guarded import Guarded
from tests.service.servers import RunningServer, running_server, started_server
from tests.waiting import wait_until

OK, UNKNOWN, UNIMPLEMENTED, INTERNAL = 0, 2, 12, 13
MIB = 1 << 20
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
EXIT_FAILED = 3

# Makes the accept task fail at the first call to /end, like a grpcio release that cannot read the call.
FAILING_ACCEPT_LOOP = """
import sys, uvloop
from gradrule_server.__main__ import main

class Loop(uvloop.Loop):
    def create_task(self, coroutine, **words):
        if getattr(coroutine, "__qualname__", "") == "_schedule_rpc_coro":
            Loop.calls += 1
            if Loop.calls == 3:
                raise UnicodeDecodeError("utf-8", b"a value of the client's", 0, 1, "invalid start byte")
        return super().create_task(coroutine, **words)

Loop.calls = 0
uvloop.new_event_loop = Loop
sys.exit(main())
"""


def log_lines(running: RunningServer) -> list[dict[str, str]]:
    """Returns the server's log without what Python itself writes at its end."""
    return [json.loads(line) for line in running.log.read_text().splitlines() if line.startswith("{")]


def http2_headers() -> list[tuple[str, bytes, set[int | None]]]:
    """Lists header blocks that no gRPC library sends: a name, the block, and the allowed result (None: a reset)."""
    found: list[tuple[str, bytes, set[int | None]]] = [
        # grpc.aio decodes the path before it asks the server for a handler, and names its own exception.
        ("path that is not UTF-8", wire.headers(b"/\xff/x"), {UNKNOWN, UNIMPLEMENTED}),
        ("authority that is not UTF-8", wire.headers(CHECK, authority=b"\xff\xfe"), {OK, INTERNAL}),
        ("method GET", wire.headers(CHECK, method=b"GET"), {None}),
        ("no path", wire.headers(CHECK, path=None), {None, INTERNAL}),
        # gRPC hides the content type from the server. What keeps web pages out is that no page can send `te`.
        ("text from a web page", wire.headers(CHECK, te=None, content_type=b"text/plain"), {None}),
        ("bytes from a web page", wire.headers(CHECK, te=None, content_type=None), {None}),
        ("te that is not trailers", wire.headers(CHECK, te=b"gzip"), {None, INTERNAL}),
        ("index out of range", b"\xff\xff\xff\x00" + wire.headers(CHECK), {INTERNAL}),
        ("header that does not end", b"\x00\x05x-a", {INTERNAL}),
    ]
    for key, value in (
        (b"x-a", b"\xff\xfe"),
        (b"x-\xff", b"a"),
        (b"X-UPPER", b"a"),
        (b"x-bin", b"no base64!"),
        (b"x-null", b"a\x00b"),
        (b"x-line", FORGED),
        (b":status", b"200"),
        (b"", b""),
        (b"grpc-encoding", b"zzz"),
        (b"x-long", b"a" * 20_000),
        *((b"grpc-timeout", timeout) for timeout in TIMEOUTS),
    ):
        block = wire.headers(CHECK, [(key, value)])
        found.append((f"{key!r}: {value[:20]!r}", block, {None, OK, 4, 8, INTERNAL}))
    return found


async def test_server_survives_invalid_headers(server: RunningServer) -> None:
    for name, block, allowed in http2_headers():
        found = await wire.answer(server.target, block)
        assert found.status in allowed, (name, found)
        assert found.status is not None or found.is_refused, (name, found)
        assert (await wire.answer(server.target, wire.headers(CHECK))).status == OK, name
    assert server.process.poll() is None


@pytest.mark.parametrize(
    "path",
    ["/a/b", "/", "x", "/gradrule.v1.RuleService/Nothing", "/gradrule.v1.Nothing/GetRule", "/grpc.health.v1.Health/"],
)
async def test_unknown_methods_are_reported_as_unimplemented(
    server: RunningServer, guarded: Guarded, path: str
) -> None:
    assert (await wire.answer(server.target, wire.headers(path))).status == UNIMPLEMENTED
    with grpc.secure_channel(guarded.running.target, gr.tls(guarded.authority.file)) as channel:
        for metadata in ((), (("authorization", f"Bearer {guarded.web_token('ada')}"),)):
            method: Any = channel.unary_unary(path)
            with pytest.raises(grpc.RpcError) as caught:
                method(b"", metadata=metadata, timeout=20)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_clients_cannot_forge_log_lines(server: RunningServer) -> None:
    before = server.log.stat().st_size
    goaway = wire.frame(wire.GOAWAY, payload=bytes(8) + FORGED)
    block = wire.headers(CHECK, [(b"x-a", SECRET + b"\xff"), (b"x-b", FORGED + b"\xff")])
    for _ in range(100):
        async with wire.connected(server.target) as (reader, writer):
            writer.write(wire.PREFACE + wire.settings() + wire.call(block, wire.message(b"")) + goaway)
            await wire.read_answer(reader)
    with server.log.open("rb") as log:
        log.seek(before)
        lines = log.read().splitlines()
    assert len(lines) < 60
    for line in lines:
        assert SECRET not in line
        assert json.loads(line)["message"] != "forged"


async def test_unfinished_messages_without_a_credential_take_no_memory(tmp_path: Path) -> None:
    """The messages announce 3,000 MiB. The server is new, because the heap left by other tests would count."""
    with running_server(tmp_path) as server:
        pid = server.process.pid
        before = resources(pid).resident_bytes
        reset_peak(pid)
        attacks = (send_unfinished(server.target, REFLECTION, streams=5, size=60 * MIB, hold_s=8) for _ in range(10))
        assert sum(sent for sent, _ in await asyncio.gather(*attacks)) > 10 * MIB
        assert peak_bytes(pid) - before < 1024 * MIB
        # Fragmented free memory cannot be returned by the C library: up to 140 MiB were measured.
        async with asyncio.timeout(60):
            while resources(pid).resident_bytes - before > 256 * MIB:
                await asyncio.sleep(0.2)
        # 60,000 calls that were reset at once took 900 MiB before the number of waiting calls was limited.
        reset_peak(pid)
        await asyncio.gather(*(send_resets(server.target, 1500) for _ in range(40)))
        await wait_for_health_answer(server.target)
        assert peak_bytes(pid) - before < 768 * MIB
        async with asyncio.timeout(60):
            while resources(pid).resident_bytes - before > 256 * MIB:
                await asyncio.sleep(0.2)


async def send_resets(target: str, count: int) -> None:
    """Starts that many calls on one connection and resets each at once."""
    block = wire.headers(CHECK)
    calls = b"".join(
        wire.frame(wire.HEADERS, wire.END_HEADERS, stream, block)
        + wire.frame(wire.RST_STREAM, 0, stream, wire.CANCEL.to_bytes(4, "big"))
        for stream in range(1, 2 * count, 2)
    )
    with contextlib.suppress(OSError):
        async with wire.connected(target) as (_, writer):
            writer.write(wire.PREFACE + wire.settings() + calls)
            await writer.drain()


async def wait_for_health_answer(target: str) -> None:
    """Waits until a call is answered: by then the server has read what was sent before."""
    async with asyncio.timeout(60):
        while (await wire.answer(target, wire.headers(CHECK))).status != OK:
            await asyncio.sleep(0.2)


async def test_short_run_of_the_http2_fuzzer(server: RunningServer, tmp_path: Path) -> None:
    figures = await http2.fuzz(server, Scale(1, seed=1, folder=tmp_path, seconds=6), 10**9)
    assert figures.cases > 50
    assert figures.met, figures.findings


async def test_process_and_engine_end_with_the_accept_loop(tmp_path: Path) -> None:
    with started_server(tmp_path, program=("-c", FAILING_ACCEPT_LOOP)) as running:
        engine = running.wait_for_engine()
        # A call that stays open must not keep the process.
        async with wire.connected(running.target) as (_, writer):
            writer.write(wire.PREFACE + wire.settings() + wire.call(wire.headers(WATCH), wire.message(b"")))
            assert (await wire.answer(running.target, wire.headers(CHECK))).status == 0
            assert (await wire.answer(running.target, wire.headers("/end"))).is_refused
            assert running.process.wait(120) == EXIT_FAILED
        wait_until(lambda: has_ended(engine) or None, "end of the engine")
        told = [line["message"] for line in log_lines(running) if "accepts no more calls" in line["message"]]
        assert told == ["gRPC accepts no more calls (UnicodeDecodeError); the server exits with 3"]
