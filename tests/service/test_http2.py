"""What raw HTTP/2 can say that no gRPC library says: the server answers, or ends as a whole."""

from __future__ import annotations

import json
from pathlib import Path

from tests.battery import wire
from tests.service.servers import RunningServer, started_server, wait_until

UNIMPLEMENTED = 12
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
EXIT_FAILED = 3

# Makes the task that accepts calls fail at the first call to /end, as a release of grpcio would that cannot read it.
FAILING_ACCEPT_LOOP = """
import asyncio, sys
from gradrule_server.__main__ import main

class Loop(asyncio.SelectorEventLoop):
    def create_task(self, coroutine, **words):
        if getattr(coroutine, "__qualname__", "") == "_schedule_rpc_coro":
            Loop.calls += 1
            if Loop.calls == 3:
                raise UnicodeDecodeError("utf-8", b"a value of the client's", 0, 1, "invalid start byte")
        return super().create_task(coroutine, **words)

Loop.calls = 0
asyncio.DefaultEventLoopPolicy._loop_factory = Loop
sys.exit(main())
"""


def is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


def lines_of(running: RunningServer) -> list[dict[str, str]]:
    """The server's log, without what Python itself says at its end."""
    return [json.loads(line) for line in running.log.read_text().splitlines() if line.startswith("{")]


async def test_an_accept_loop_that_ends_ends_the_process_and_its_engine(tmp_path: Path) -> None:
    with started_server(tmp_path, program=("-c", FAILING_ACCEPT_LOOP)) as running:
        engine = running.wait_for_engine()
        # A call that stays open must not keep the process.
        async with wire.connected(running.target) as (_, writer):
            writer.write(wire.PREFACE + wire.settings() + wire.call(wire.headers(WATCH), wire.message(b"")))
            assert (await wire.answer(running.target, wire.headers(CHECK))).status == 0
            assert (await wire.answer(running.target, wire.headers("/end"))).is_refused
            assert running.process.wait(30) == EXIT_FAILED
        wait_until(lambda: is_gone(engine) or None, "end of the engine")
        told = [line["message"] for line in lines_of(running) if "accepts no more calls" in line["message"]]
        assert told == ["gRPC accepts no more calls (UnicodeDecodeError); the server exits with 3"]
