"""Starts the processes of engines, keeps some ready, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradrule_server.errors import CannotStartError
from gradrule_server.link import arena
from gradrule_server.link.arena import Arenas
from gradrule_server.link.connection import Connection
from gradrule_server.link.fork_server import FatalMessage, ForkedProcess, ForkServer, ForkServerEnded, log_stderr
from gradrule_server.link.framing import LINK_VERSION
from gradrule_server.link.operating_system import OOM_KILLS
from gradrule_server.link.request_scheduler import ConnectionLost
from gradrule_server.link.v1 import link_pb2
from gradrule_server.recovery.endings import (
    EndReason,
    EngineEnd,
    EngineLost,
    end_from_exit,
    lost_while_running,
)

_log = logging.getLogger(__name__)

# A killed process may stay in the kernel for a while until its memory is freed.
_END_TIMEOUT_S = 10.0
_STDERR_TIMEOUT_S = 1.0
# A process that is killed with this share of its memory limit in use was killed because of the limit.
_NEAR_LIMIT = 0.9
# A process that crashes with this share of its memory limit in use may have crashed because an allocation failed:
# protobuf and parts of TensorFlow do not check that. It was measured before, and a large graph takes several copies.
_MAY_LACK = 0.5


class EngineRefused(CannotStartError):
    """The engine cannot start as configured (no such device, another release). Trying again would not help."""


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """How long the front end waits for engines, seconds."""

    greeting_s: float = 120.0
    """For the greeting of a new process."""
    retry_delay_s: float = 0.5
    """Between two attempts to start a process."""
    # A process starts within a second, so calls wait for one instead of failing.
    provide_s: float = 10.0
    """For a process of an engine."""
    # Another process has to compile the tenant's programs again, so turns are much longer than that usually takes.
    turn_s: float = 1.0
    """For which a tenant keeps an engine that another tenant waits for, since it could be used or last compiled."""
    # Less than the deadline of calls that set none (30 s), so that such calls get a turn.
    longest_turn_s: float = 10.0
    """For which a tenant keeps such an engine if it compiles again and again."""
    overrun_grace_s: float = 0.5
    """Between the deadline of a request and the end of the engine that still runs it."""
    # TensorFlow holds the interpreter lock for seconds at most, but a machine may be busy for longer.
    silence_idle_s: float = 10.0
    """Without an answer to a ping while no request runs."""
    silence_running_s: float = 30.0
    """Without an answer to a ping while a request runs."""
    memory_period_s: float = 0.25
    """Between two measurements of memory."""
    idle_s: float = 600.0
    """Until an idle engine is ended. Its programs are compiled again when its tenant comes back."""
    scarce_idle_s: float = 60.0
    """Until an idle engine may be ended before those of tenants that use more memory, if memory is short."""
    idle_period_s: float = 15.0
    """Between two searches for idle engines."""
    worker_idle_s: float = 15.0
    """Until an idle compile worker is ended."""


DEFAULT_TIMES = EngineTimes()


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """The options of an engine process; see the settings of the same names. `memory_limit`: bytes; 0: none."""

    device: str
    threads: int
    blob_folder: Path | None = None
    memory_limit: int = 0
    sandbox: str = "auto"
    max_batch_size: int = 1
    max_batch_delay_s: float = 0.0
    disabled_fast_paths: str = ""

    def flags(self) -> list[str]:
        """Returns the command line of the process."""
        blobs = [] if self.blob_folder is None else ["--blobs", str(self.blob_folder.absolute())]
        limit = [] if not self.memory_limit else ["--memory-limit", str(self.memory_limit)]
        given = ["--device", self.device, "--threads", str(self.threads), "--sandbox", self.sandbox]
        paths = [] if not self.disabled_fast_paths else ["--disabled-fast-paths", self.disabled_fast_paths]
        return [*given, *blobs, *limit, *paths]


@dataclass(eq=False)
class EngineProcess:
    """An engine process, from its fork on."""

    process: ForkedProcess
    connection: Connection
    stderr: asyncio.Task[None]
    fatal: FatalMessage
    arenas: Arenas | None
    """The memory that it shares with this process."""
    started_at: float = field(default_factory=time.monotonic)
    memory_limit: int = 0
    """Bytes; 0: none."""
    resident_bytes: int = 0
    """Its memory at the last measurement."""
    own_bytes: int = 0
    """The part of it that no other process has: a forked process shares pages until it writes to them."""
    _ended_for: EndReason | None = None
    _end_task: asyncio.Task[EngineEnd] | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the operating system has reported its end."""
        return self.process.returncode is not None

    @property
    def is_ending(self) -> bool:
        """Whether the front end has ended it."""
        return self._ended_for is not None

    async def greet(self, timeout_s: float = DEFAULT_TIMES.greeting_s) -> link_pb2.Greeting:
        """Waits for the greeting. Raises `EngineRefused` if the engine cannot run as configured, or ends before."""
        try:
            greeting = await asyncio.wait_for(self.connection.greeting, timeout_s)
        except (ConnectionLost, TimeoutError) as cause:
            if isinstance(cause, TimeoutError):
                self.end(EndReason.HEARTBEAT)
            raise EngineRefused(f"the engine died while it started: {await self.wait_ended()}") from None
        if greeting.refusal:
            await self.process.wait()
            raise EngineRefused(greeting.refusal)
        if greeting.link_version != LINK_VERSION:
            self.connection.close()
            await self.process.wait()
            raise EngineRefused(f"the engine speaks version {greeting.link_version} of the link, not {LINK_VERSION}")
        return greeting

    def kill(self) -> None:
        """Kills the process."""
        if self.process.returncode is None:
            # `Process.kill` would poll the process first, and so take the exit code away from the thread that waits.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def end(self, reason: EndReason) -> None:
        """Kills the process, and keeps the reason of the first such call."""
        if self._ended_for is None and self.process.returncode is None:
            self._ended_for = reason
        self.kill()

    async def wait_ended(self) -> EngineEnd:
        """Returns how the process ended. Kills it if it still lives: without a connection it is useless."""
        if self._end_task is None:
            self._end_task = asyncio.create_task(self._determine_end(), name="engine-end")
        return await asyncio.shield(self._end_task)

    def loss_error(self, end: EngineEnd) -> EngineLost:
        """Returns the error of a request that was running when the process ended."""
        return lost_while_running(end, ran_alone=self.connection.lost_one)

    async def _determine_end(self) -> EngineEnd:
        # The socket closes before the operating system reports the end.
        ended_by_itself = await self._has_ended(_STDERR_TIMEOUT_S)
        if not ended_by_itself:
            self.kill()
            await self._has_ended(_END_TIMEOUT_S)
        self.connection.close()
        await asyncio.wait([self.stderr], timeout=_STDERR_TIMEOUT_S)
        code = self.process.returncode if ended_by_itself else None
        used = self.resident_bytes / self.memory_limit if self.memory_limit else 0.0
        return end_from_exit(
            code,
            self._ended_for,
            self.fatal.text,
            was_short_of_memory=used >= _NEAR_LIMIT or OOM_KILLS.has_grown,
            may_lack_memory=used >= _MAY_LACK,
        )

    async def _has_ended(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), timeout_s)
        return self.process.returncode is not None


async def start_process(options: ProcessOptions, fork_server: ForkServer) -> EngineProcess:
    """Starts a process, which has not greeted yet.

    Raises `OSError` if the operating system cannot start it, and `EngineRefused` if the fork server does not start.
    """
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as failed:
        ours, theirs = socket.socketpair()
        failed.callback(ours.close)
        with contextlib.ExitStack() as inherited:
            inherited.callback(theirs.close)
            reading, writing = os.pipe()
            stderr = failed.enter_context(open(reading, "rb", buffering=0))
            inherited.callback(os.close, writing)
            # The engine inherits the arenas. They have no name, so nothing is left once both processes have ended.
            arenas, shared = Arenas.make() if arena.has_sealed_memory() else (None, [])
            memories = None
            if arenas is not None:
                failed.callback(arenas.close)
                memories, passed = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                failed.callback(memories.close)
                inherited.callback(passed.close)
                shared.append(passed.fileno())
            try:
                process = await fork_server.fork(options.flags(), [theirs.fileno(), writing, *shared])
            except ForkServerEnded as cause:
                raise EngineRefused(f"the engine died while it started: {cause}") from None
        # From here on a failure closes the socket, so that the engine ends.
        _, connection = await loop.create_connection(
            lambda: Connection(
                options.threads, arenas, options.max_batch_size, options.max_batch_delay_s, memories=memories
            ),
            sock=ours,
        )
        stream = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), stderr)
        failed.pop_all()
    fatal = FatalMessage()
    reader = asyncio.create_task(log_stderr(stream, f"engine {process.pid}", fatal), name="engine-stderr")
    return EngineProcess(process, connection, reader, fatal, arenas, memory_limit=options.memory_limit)


class Spares:
    """Starts processes on request, and keeps `count` ready once the first one is up. Belongs to one asyncio loop.

    A process that was taken never comes back, because it has run a tenant's work.
    """

    def __init__(self, options: ProcessOptions, count: int, times: EngineTimes = DEFAULT_TIMES) -> None:
        self._times = times
        self._options = options
        self._fork_server = ForkServer()
        self._count = count
        self._ready: deque[EngineProcess] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._all: set[EngineProcess] = set()
        self._has_first = False
        self._is_stopped = False
        self.greeting = link_pb2.Greeting()

    @property
    def ready(self) -> int:
        """The number of processes that are ready."""
        return len(self._ready)

    @property
    def fork_server_ends(self) -> Mapping[str, int]:
        """The number of fork servers that ended unexpectedly, by reason."""
        return self._fork_server.ended

    @property
    def processes(self) -> list[EngineProcess]:
        """All processes that are connected, whether ready or taken."""
        self._forget_ended()
        return [process for process in self._all if not process.connection.is_closed]

    def take_now(self) -> EngineProcess | None:
        """Returns a ready process and starts another in its place; None if none is ready."""
        if not self._ready:
            return None
        process = self._ready.popleft()
        process.connection.on_lost = None
        self._fill()
        return process

    async def take(self) -> EngineProcess:
        """Returns a ready process, or starts one. Raises `EngineRefused` if the very first process cannot start."""
        process = self.take_now()
        if process is None:
            process = await self._start()
            self._fill()
        return process

    async def stop(self) -> None:
        """Ends all processes and the fork server."""
        self._is_stopped = True
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait({self._filling})
        left = list(self._all)
        for process in left:
            process.end(EndReason.STOPPED)
        await asyncio.gather(*(process.wait_ended() for process in left))
        await self._fork_server.stop()

    def _on_spare_lost(self, process: EngineProcess) -> Callable[[], None]:
        def lost() -> None:
            if process in self._ready:
                self._ready.remove(process)
            process.kill()
            self._fill()

        return lost

    def _forget_ended(self) -> None:
        self._all = {process for process in self._all if not process.has_ended}

    def _fill(self) -> None:
        """Starts spare processes one at a time, unless there are enough."""
        is_filling = self._filling is not None and not self._filling.done()
        if not (self._is_stopped or is_filling) and len(self._ready) < self._count:
            self._filling = asyncio.create_task(self._add_spares(), name="engine-start")

    async def _add_spares(self) -> None:
        while len(self._ready) < self._count:
            process = await self._start()
            process.connection.on_lost = self._on_spare_lost(process)
            self._ready.append(process)

    async def _start(self) -> EngineProcess:
        """Starts a process. Tries again until that works, unless no process ever ran; then raises `EngineRefused`."""
        while True:
            try:
                process = await start_process(self._options, self._fork_server)
                self._forget_ended()
                self._all.add(process)
                try:
                    greeting = await process.greet(self._times.greeting_s)
                    if self._is_stopped or process.connection.is_closed:
                        raise EngineRefused("it ended, or the server has stopped")
                except BaseException:
                    process.kill()
                    process.connection.close()
                    raise
            except Exception as cause:
                if self._is_stopped or not self._has_first:
                    # Where no process ever ran, the start of the server fails with this error.
                    raise
                # Whatever the cause (no memory, no file descriptors), a server without engines must keep trying.
                _log.error("an engine cannot be started: %s", cause, exc_info=not isinstance(cause, EngineRefused))
                await asyncio.sleep(self._times.retry_delay_s)
            else:
                _log.info("engine %d is ready", process.pid)
                self.greeting, self._has_first = greeting, True
                return process
