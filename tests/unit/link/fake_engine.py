"""An engine without a process: records what it is sent, and answers as the test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any, cast

from gradrule_server.link.arena import Arenas
from gradrule_server.link.connection import Connection
from gradrule_server.link.engine import Engine
from gradrule_server.link.fork_server import ForkServer
from gradrule_server.link.framing import HEADER_BYTES, Kind, pack_header, unpack_header
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.process import DEFAULT_TIMES, EngineTimes, ProcessOptions
from gradrule_server.link.v1 import link_pb2
from gradrule_server.recovery.endings import EndReason, EngineEnd, EngineLost, lost_while_running


class Transport(asyncio.Transport):
    """Records the frames that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.connection: Connection | None = None
        self._sent: list[tuple[Kind, int, bytes]] = []
        self.is_closed = False
        self.unread = 0

    @property
    def sent(self) -> list[tuple[Kind, int, bytes]]:
        """The frames sent so far, as if the turn of the loop were over."""
        if self.connection is not None:
            self.connection.flush()
        return self._sent

    def get_write_buffer_size(self) -> int:
        return self.unread

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def write(self, data: Any) -> None:
        frames = bytes(data)
        while frames:
            length, kind, request_id = unpack_header(frames[:HEADER_BYTES])
            end = HEADER_BYTES + length
            self._sent.append((kind, request_id, frames[HEADER_BYTES:end]))
            frames = frames[end:]

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def payloads(self) -> list[bytes]:
        return [payload for _, _, payload in self.sent]


def connected(threads: int) -> tuple[Connection, Transport]:
    """Returns a connection to an engine with `threads` threads, and its transport."""
    connection, transport = Connection(threads), Transport()
    transport.connection = connection
    connection.connection_made(transport)
    return connection, transport


class FakeProcess:
    """A process that ends when the test says so."""

    pid = 4711
    resident_bytes = own_bytes = 0
    arenas: Arenas | None = None
    started_at = 0.0

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.ended_with: EngineEnd | None = None

    @property
    def is_killed(self) -> bool:
        return self.ended_with is not None

    @property
    def is_ending(self) -> bool:
        return self.is_killed

    @property
    def has_ended(self) -> bool:
        return self.is_killed

    async def greet(self, timeout_s: float = 120.0) -> link_pb2.Greeting:
        self.connection.data_received(pack_header(Kind.GREETING, 0, 0))
        return link_pb2.Greeting(device="CPU:0")

    def kill(self) -> None:
        self.die(KILLED)

    def end(self, reason: EndReason) -> None:
        self.die(EngineEnd(reason, reason))

    def die(self, ending: EngineEnd) -> None:
        """Ends the process."""
        if self.ended_with is None:
            self.ended_with = ending
            self.connection.connection_lost(None)

    async def wait_ended(self) -> EngineEnd:
        assert self.ended_with is not None
        return self.ended_with

    def loss_error(self, end: EngineEnd) -> EngineLost:
        return lost_while_running(end, ran_alone=self.connection.lost_one)


class FakeRecorder:
    """An outcome recorder that keeps the times of overruns and completions, and the losses."""

    workload = "the one"

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.taken: list[float] = []
        self.losses: list[EngineLost] = []

    def record_completion(self, seconds: float) -> None:
        self.taken.append(seconds)

    def record_overrun(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def record_engine_loss(self, cause: EngineLost) -> None:
        self.losses.append(cause)


class Starter:
    """Replaces `start_process`: fails with each of `errors` first, then records the processes that it starts."""

    def __init__(self, *errors: Exception, threads: int = 4) -> None:
        self.errors = list(errors)
        self.threads = threads
        self.started: list[FakeProcess] = []
        self.transports: list[Transport] = []

    async def __call__(self, options: ProcessOptions, fork_server: ForkServer) -> FakeProcess:
        if self.errors:
            raise self.errors.pop(0)
        connection, transport = connected(self.threads)
        process = FakeProcess(connection)
        process.pid = 1000 + len(self.started)
        self.started.append(process)
        self.transports.append(transport)
        return process


CRASH = EngineEnd(EndReason.CRASH, "SIGABRT", "Check failed: a")
KILLED = EngineEnd(EndReason.KILLED, "SIGKILL")


class FakeEngine(Engine):
    """The front end's engine, with a `FakeProcess`."""

    def __init__(self, threads: int = 4, index: int = 0, *, times: EngineTimes = DEFAULT_TIMES) -> None:
        super().__init__(index, None, owner="", times=times)
        self.transport: Transport
        self.start_another(threads)

    def start_another(self, threads: int = 4) -> None:
        """Installs a new process."""
        connection, self.transport = connected(threads)
        self.install(FakeProcess(connection))

    @property
    def fake(self) -> FakeProcess:
        """The process."""
        return cast(FakeProcess, self._process)

    def sent(self, kind: Kind) -> list[bytes]:
        """Returns the payloads of the frames of a kind, in order."""
        return [payload for found, _, payload in self.transport.sent if found is kind]

    async def next(self, kind: Kind, count: int = 1) -> bytes:
        """Waits for the `count`-th frame of a kind. Returns its payload."""
        async with asyncio.timeout(60):
            while len(self.sent(kind)) < count:
                await asyncio.sleep(0.001)
        return self.sent(kind)[count - 1]

    def answer(self, sent: bytes, kind: Kind, payload: bytes = b"") -> None:
        """Answers the request whose payload is `sent`."""
        request_id = next(number for _, number, found in self.transport.sent if found == sent)
        self.fake.connection.data_received(pack_header(kind, request_id, len(payload)) + payload)


class FakePool(EnginePool):
    """Engines with fake processes, for every tenant; `alone` gives fakes too, which `trial_engines` collects.

    `extras`: the engines that `claim_another` returns where a tenant may have more than usual.
    """

    def __init__(self, *engines: FakeEngine) -> None:
        super().__init__(ProcessOptions("cpu", 4), engines=0, spares=0)
        self.engines = list(engines)
        self.per_tenant = len(engines)
        self.trial_engines: list[FakeEngine] = []
        self.extras: list[Engine] = []

    def serves(self, owner: str) -> bool:
        return self.is_ready

    def claim_another(self, owner: str, *, surplus: int = 0) -> Engine | None:
        if not surplus:
            return super().claim_another(owner)
        if not self.extras:
            return None
        self.engines.append(self.extras[-1])
        return self.extras.pop()

    @contextlib.asynccontextmanager
    async def alone(self, owner: str) -> AsyncIterator[Engine]:
        engine = FakeEngine(index=-1)
        self.trial_engines.append(engine)
        try:
            yield engine
        finally:
            engine.is_removed = True
            self._report_removed(engine)
