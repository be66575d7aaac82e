"""An engine process as the front end holds it: started, greeted, restarted when it dies, stopped."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable

from gradrule.v1 import errors_pb2
from gradrule_server.errors import error
from gradrule_server.link.connection import Connection, EngineGone
from gradrule_server.link.framing import LINK_VERSION, Kind
from gradrule_server.link.v1 import link_pb2

_log = logging.getLogger(__name__)

_GREETING_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 5.0
_RESTART_DELAY_S = 0.5
_OVERRUN_GRACE_S = 0.5
_RETRY_AFTER_S = 2.0

# What an engine's environment may hold: where Python and libraries are, and TensorFlow's and CUDA's own settings.
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
_PASSED_ON_PREFIXES = ("TF_", "CUDA_", "NVIDIA_", "XLA_", "OMP_")


class EngineRefused(Exception):
    """The engine cannot start as asked (no such device, another release); trying again would not help."""


class Engine:
    """One engine, replaced at once when it dies. All calls come from one asyncio loop."""

    def __init__(self, device: str, threads: int, on_change: Callable[[bool], None] = lambda ready: None) -> None:
        self._device = device
        self._threads = threads
        self._on_change = on_change
        self._connection: Connection | None = None
        self._up = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._last_words: collections.deque[str] = collections.deque(maxlen=20)
        self.greeting = link_pb2.Greeting()
        self.generation = 0
        """Grows with each new process: what the last one had loaded is gone."""

    @property
    def ready(self) -> bool:
        """An engine is up."""
        return self._connection is not None

    async def wait_ready(self, timeout: float) -> None:
        """Waits until an engine is up, for at most `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._up.wait(), timeout)

    async def start(self) -> None:
        """Starts the process and waits for its greeting. `EngineRefused` where it cannot run as asked."""
        process, connection = await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise(process, connection), name="engine-supervisor")

    async def call(self, kind: Kind, payload: bytes, timeout: float) -> bytes:
        """One request. ENGINE_UNAVAILABLE while there is no engine, ENGINE_CRASHED if it dies meanwhile.

        A call that overruns `timeout` seconds is DEADLINE_EXCEEDED; the process is ended if it does not finish soon,
        since nothing else stops a kernel or a loop that never ends.
        """
        connection = self._connection
        if connection is None:
            raise error(
                errors_pb2.ERROR_REASON_ENGINE_UNAVAILABLE,
                "no engine is ready yet; it is being started",
                retry_after_s=_RETRY_AFTER_S,
            )
        ends_at = asyncio.get_running_loop().time() + timeout
        work = asyncio.ensure_future(connection.request(kind, payload))
        try:
            return await asyncio.wait_for(asyncio.shield(work), timeout)
        except TimeoutError:
            self._end_if_overrun(work, connection, ends_at)
            raise error(errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED, f"not done within {timeout:.3g} s") from None
        except asyncio.CancelledError:
            self._end_if_overrun(work, connection, ends_at)
            raise
        except EngineGone:
            # The socket tells of an engine's death before the operating system does.
            self._set_down(connection)
            raise error(errors_pb2.ERROR_REASON_ENGINE_CRASHED, self._obituary()) from None

    def tell(self, kind: Kind, payload: bytes) -> None:
        """One message without an answer."""
        if self._connection is not None:
            self._connection.tell(kind, payload)

    async def stop(self) -> None:
        """Ends the process."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None and self._process.returncode is None:
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def _spawn(self) -> tuple[asyncio.subprocess.Process, Connection]:
        ours, theirs = socket.socketpair()
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
        }
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "gradrule_server.engine",
                *("--fd", str(theirs.fileno()), "--device", self._device, "--threads", str(self._threads)),
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        self._process = process
        asyncio.get_running_loop().create_task(self._read_stderr(process), name="engine-stderr")
        _, connection = await asyncio.get_running_loop().create_connection(Connection, sock=ours)
        try:
            greeting = await asyncio.wait_for(connection.greeting, _GREETING_TIMEOUT_S)
        except (EngineGone, TimeoutError):
            if process.returncode is None:
                process.kill()
            await process.wait()
            raise EngineRefused(self._obituary()) from None
        if greeting.refusal:
            await process.wait()
            raise EngineRefused(greeting.refusal)
        if greeting.link_version != LINK_VERSION:
            connection.close()
            await process.wait()
            raise EngineRefused(f"the engine speaks version {greeting.link_version} of the link, not {LINK_VERSION}")
        self.greeting = greeting
        self.generation += 1
        self._connection = connection
        self._up.set()
        self._on_change(True)
        return process, connection

    async def _supervise(self, process: asyncio.subprocess.Process, connection: Connection) -> None:
        while True:
            code = await process.wait()
            self._set_down(connection)
            connection.close()
            _log.warning("engine %d ended (%s); starting another", process.pid, _how_it_ended(code))
            while self._connection is None:
                try:
                    process, connection = await self._spawn()
                except EngineRefused as refusal:
                    _log.error("engine does not start: %s", refusal)
                    await asyncio.sleep(_RESTART_DELAY_S)

    def _set_down(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = None
            self._up.clear()
            self._on_change(False)

    def _end_if_overrun(self, work: asyncio.Future[bytes], connection: Connection, ends_at: float) -> None:
        def end() -> None:
            if not work.done() and self._connection is connection and self._process is not None:
                _log.warning("a request overran its deadline; ending engine %d", self._process.pid)
                self._process.kill()

        # The answer, or the exception, of a call that nobody waits for any more is of no use to anyone.
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        asyncio.get_running_loop().call_at(ends_at + _OVERRUN_GRACE_S, end)

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        if process.stderr is None:
            return
        async for line in process.stderr:
            text = line.decode(errors="replace").rstrip()
            self._last_words.append(text)
            _log.info("engine %d: %s", process.pid, text)

    def _obituary(self) -> str:
        code = self._process.returncode if self._process is not None else None
        how = _how_it_ended(code) if code is not None else "its connection broke"
        return f"the engine died while it held the request: {how}"


def _how_it_ended(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
