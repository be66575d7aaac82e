"""An engine as the front end holds it: started, given work, ended when it overruns, replaced when it dies, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from gradrule.v1 import errors_pb2
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.link.connection import Connection, EngineGone, Work
from gradrule_server.link.faults import EngineLost
from gradrule_server.link.framing import Kind
from gradrule_server.link.process import EngineProcess, EngineRefused, start_process
from gradrule_server.link.v1 import link_pb2

__all__ = ["Engine", "EngineRefused"]

_log = logging.getLogger(__name__)

_RESTART_DELAY_S = 0.5
_RETRY_AFTER_S = 2.0
_OVERRUN_GRACE_S = 0.5
# How long a call that was cancelled may go on before its deadline: ending an engine costs others more than that.
_CANCEL_PATIENCE_S = 5.0


class Engine:
    """One engine, replaced at once when it dies. All calls come from one asyncio loop."""

    def __init__(
        self,
        device: str,
        threads: int,
        on_change: Callable[[bool], None] = lambda ready: None,
        *,
        blob_folder: Path | None = None,
    ) -> None:
        self._device = device
        self._blob_folder = blob_folder
        self._threads = threads
        self._on_change = on_change
        self._engine: EngineProcess | None = None
        self._up = asyncio.Event()
        self._overrun: Connection | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self.greeting = link_pb2.Greeting()
        self.generation = 0
        """Grows whenever a process comes or goes: what the last one held is gone."""

    @property
    def pid(self) -> int | None:
        """The process that serves; None while there is none."""
        return self._engine.pid if self._engine is not None and self._up.is_set() else None

    @property
    def was_overrun(self) -> bool:
        """The process was ended since a request overran its deadline."""
        return self._engine is not None and self._overrun is self._engine.connection

    @property
    def load(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        return self._engine.connection.load if self._engine is not None else (0, 0)

    async def wait_ready(self) -> None:
        """Waits until an engine is up."""
        await self._up.wait()

    async def start(self) -> None:
        """Starts the process and waits for its greeting. `EngineRefused` where it cannot run as asked."""
        await self._start()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        self._supervisor.add_done_callback(_report_end)

    async def call(self, kind: Kind, payload: bytes, ends_at: float, patience_s: float = 0.0) -> bytes:
        """One request, given up when the caller is cancelled. `ends_at`: loop time after which it is of no use.

        ENGINE_UNAVAILABLE while there is no engine; `EngineLost` if it dies meanwhile. An engine that is still at it
        soon after the call was given up is ended, since nothing else stops a kernel or a loop that never ends; a call
        that must build something first gets `patience_s`.
        """
        loop = asyncio.get_running_loop()
        if loop.time() >= ends_at:
            raise error(errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED, "the deadline passed before the engine was asked")
        work = self.submit(kind, payload)
        try:
            return await work.answer
        except asyncio.CancelledError:
            self.abandon(work, max(patience_s, min(max(0.0, ends_at - loop.time()), _CANCEL_PATIENCE_S)))
            raise
        except EngineGone as gone:
            raise self.lost(work.connection, gone) from None

    def submit(self, kind: Kind, payload: bytes) -> Work:
        """Hands a request in, for callers that share its answer; ENGINE_UNAVAILABLE while there is no engine."""
        if self._engine is None or not self._up.is_set():
            raise error(
                errors_pb2.ERROR_REASON_ENGINE_UNAVAILABLE,
                "no engine is ready yet; it is being started",
                retry_after_s=_RETRY_AFTER_S,
            )
        try:
            return self._engine.connection.submit(kind, payload)
        except EngineGone as gone:
            raise self.lost(self._engine.connection, gone) from None

    def abandon(self, work: Work, patience_s: float) -> None:
        """Nobody waits for it any more: it is dropped, or, where it runs, the engine is ended after `patience_s`."""
        if not work.ended and not work.connection.drop(work):
            timer = asyncio.get_running_loop().call_later(patience_s + _OVERRUN_GRACE_S, self._end_overrun, work)
            work.watch(timer)

    def lost(self, connection: Connection, gone: EngineGone) -> GradruleError:
        """The error of a request whose engine is gone."""
        engine = self._engine
        how = "its connection broke"
        if engine is not None and engine.connection is connection:
            how = engine.how_it_ended()
            # The socket tells of a death before the operating system does; an engine that lives is lost without it.
            self._set_down()
            engine.kill()
        held = "held" if gone.started else "was to get"
        return EngineLost(
            [Finding(errors_pb2.ERROR_REASON_ENGINE_CRASHED, f"the engine died while it {held} the request: {how}")],
            suspect=gone.started and self._overrun is not connection,
        )

    def tell(self, kind: Kind, payload: bytes) -> None:
        """One message without an answer."""
        if self._engine is not None:
            self._engine.connection.tell(kind, payload)

    async def stop(self) -> None:
        """Ends the process."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        if self._engine is not None:
            await self._engine.stop()

    async def _start(self) -> None:
        engine = self._engine = await start_process(self._device, self._threads, self._blob_folder)
        try:
            self.greeting = await engine.greet()
        except BaseException:
            engine.kill()
            engine.connection.close()
            raise
        self.generation += 1
        self._up.set()
        self._on_change(True)

    async def _supervise(self) -> None:
        while True:
            if self._engine is not None:
                await self._engine.process.wait()
                self._set_down()
                self._engine.connection.close()
                _log.warning("engine %d ended (%s); starting another", self._engine.pid, self._engine.how_it_ended())
            try:
                await self._start()
            except EngineRefused as refusal:
                _log.error("engine does not start: %s", refusal)
            except Exception:
                # Whatever it is (no memory, no file descriptors), a server without an engine must go on trying.
                _log.exception("engine cannot be started")
            if not self._up.is_set():
                self._engine = None
                await asyncio.sleep(_RESTART_DELAY_S)

    def _set_down(self) -> None:
        if self._up.is_set():
            # What it held is gone from now on, not only once there is another.
            self.generation += 1
            self._up.clear()
            self._on_change(False)

    def _end_overrun(self, work: Work) -> None:
        engine = self._engine
        if engine is not None and engine.connection is work.connection and not work.ended:
            _log.warning("a request overran its deadline; ending engine %d", engine.pid)
            self._overrun = work.connection
            engine.kill()


def _report_end(supervisor: asyncio.Task[None]) -> None:
    if not supervisor.cancelled() and (cause := supervisor.exception()) is not None:
        _log.critical("the engine's supervisor failed: no engine will be started any more", exc_info=cause)
