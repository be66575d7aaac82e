"""Manages forward handles: an engine keeps forward runs for a stream, until they expire or the stream ends."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import GradruleError, NoMemoryLeft, error
from gradrule_server.link.engine import Engine
from gradrule_server.link.framing import Kind
from gradrule_server.link.messages import release_payload, with_values
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import record_pull_back
from gradrule_server.programs.call_requests import EvaluateCall, translate_pull_back
from gradrule_server.programs.runner import ForwardRun, ProcessRef
from gradrule_server.programs.service import ProgramService
from gradrule_server.quotas import Quota
from gradrule_server.recovery.crash_history import OutcomeRecorder
from gradrule_server.recovery.endings import EngineLost

# Errors after which the engine may keep the run.
_KEPT_REASONS = frozenset(
    {
        errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
        errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED,
        errors_pb2.ERROR_REASON_OVERLOADED,
    }
)


class ForwardRunner(Protocol):
    """Runs forward parts of programs: of any programs, or of those of one session."""

    @property
    def engines(self) -> Sequence[Engine]:
        """The engines that may keep a run."""
        ...

    async def forward(self, call: EvaluateCall, handle: str, received_ns: int, ends_at: float) -> ForwardRun:
        """Runs the forward part; an engine keeps what the backward part needs, under the name `handle`."""
        ...


@dataclass(slots=True, eq=False)
class _Handle:
    """A forward run that an engine keeps.

    `kept_bytes`: On the device. `recorder`: Records what pulling back does to the engine.
    """

    name: str
    process: ProcessRef
    recorder: OutcomeRecorder
    kept_bytes: int
    ttl_s: float
    timer: asyncio.TimerHandle | None = None


class StreamHandles:
    """Manages the handles of one stream. Belongs to one asyncio loop.

    Args:
        service: The programs of the tenant.
        quotas: The tenant's quotas: `handles` limits the number of its handles, `handle_bytes` their bytes.
        ttl_s: Longest lifetime of a handle that is not used, seconds.
        runner: Runs the programs; None: the service.
    """

    def __init__(
        self,
        service: ProgramService,
        quotas: Mapping[str, Quota],
        ttl_s: float,
        runner: ForwardRunner | None = None,
    ) -> None:
        self._service = service
        self._quota = quotas["handles"]
        self.bytes_quota = quotas["handle_bytes"]
        """Limits the bytes of the tenant's handles."""
        self._ttl_s = ttl_s
        self._runner: ForwardRunner = service if runner is None else runner
        self._handles: dict[str, _Handle] = {}

    async def forward(
        self, request: link_pb2.RawForwardRequest, call: EvaluateCall, received_ns: int, ends_at: float
    ) -> bytes:
        """Runs forward; the engine keeps what pulling back needs. Returns the bytes of a `ForwardResponse`.

        `call`: The evaluation of the request.
        """
        ttl_s = self._ttl_s
        if request.HasField("ttl"):
            ttl_s = request.ttl.ToNanoseconds() / 1e9
            if ttl_s <= 0:
                raise error(
                    errors_pb2.ERROR_REASON_MALFORMED_REQUEST, f"ttl is more than 0 s, not {ttl_s:g}", field="ttl"
                )
        self._quota.reserve()
        # Nobody may guess the names of others.
        name = f"h{secrets.token_hex(8)}"
        run: ForwardRun | None = None
        try:
            run = await self._runner.forward(call, name, received_ns, ends_at)
            # The handle does not keep the program, whose bytes no quota counts.
            handle = _Handle(name, run.process, run.recorder, run.kept_bytes, min(ttl_s, self._ttl_s))
            # Another call may have made an engine keep handles since this one started.
            self._service.pool.check_may_keep(run.process.engine)
            if run.is_within_quota:
                # The run has changed variables of a session, so it can no longer be refused.
                self.bytes_quota.adjust(handle.kept_bytes)
            else:
                self.bytes_quota.reserve(handle.kept_bytes)
        except BaseException as cause:
            self._quota.release()
            if not isinstance(cause, GradruleError) or cause.reason in _KEPT_REASONS:
                # The engine keeps the run, or will: the caller cancelled, or the run took too long or too many bytes.
                self._release(name, None if run is None else run.process)
            raise
        run.process.engine.add_kept(run.process.generation, 1)
        self._handles[name] = handle
        self._start_timer(handle)
        response = link_pb2.RawForwardResponse(evaluate=run.answer, handle=name, size_bytes=handle.kept_bytes)
        response.ttl.FromNanoseconds(int(handle.ttl_s * 1e9))
        return response.SerializeToString()

    async def pull_back(self, request: evaluate_pb2.PullBackRequest, received_ns: int, ends_at: float) -> bytes:
        """Returns gradients, as the bytes of a `PullBackResponse`. Raises HANDLE_EXPIRED."""
        name = request.handle
        handle = self._handles.get(name)
        if handle is None:
            raise _expired(f"there is no handle {name!r} on this stream: it was closed, or it expired")
        if handle.process.is_gone:
            self.close(name)
            raise _expired(f"the handle {name!r} was lost with its engine")
        message = link_pb2.PullBackRequest(handle=name, blob_folder=self._service.blobs.folder_name)
        payload = with_values(message.SerializeToString(), received_ns, translate_pull_back(request).values)
        self._stop_timer(handle)
        try:
            answer = await self._run_backward(handle, payload, ends_at)
            record_pull_back(answer, received_ns)
            if request.close_handle:
                self.close(name)
            return answer
        except EngineLost as lost:
            handle.recorder.record_engine_loss(lost)
            if lost.is_blamable and lost.ran_alone:
                raise
            raise _expired(f"the handle {name!r} was lost with its engine") from lost
        finally:
            if self._handles.get(name) is handle:
                self._start_timer(handle)

    async def _run_backward(self, handle: _Handle, payload: Sequence[bytes], ends_at: float) -> bytes:
        """Returns the engine's answer; unloads idle programs and asks once more if there is no memory left."""
        engine = handle.process.engine
        try:
            return await engine.call(Kind.PULL_BACK, payload, ends_at, handle.recorder)
        except NoMemoryLeft:
            if handle.process.is_gone or not self._service.unload_idle(engine):
                raise
        return await engine.call(Kind.PULL_BACK, payload, ends_at, handle.recorder)

    def close(self, name: str) -> None:
        """Closes a handle, if it exists."""
        handle = self._handles.pop(name, None)
        if handle is not None:
            self._stop_timer(handle)
            self._quota.release()
            self.bytes_quota.release(handle.kept_bytes)
            handle.process.engine.add_kept(handle.process.generation, -1)
            self._release(handle.name, handle.process)

    def close_all(self) -> None:
        """Closes all handles: the stream has ended."""
        for name in list(self._handles):
            self.close(name)

    def _release(self, name: str, process: ProcessRef | None) -> None:
        """Tells the engine to drop a forward run. `process`: None: tells all engines that may keep it."""
        if process is not None and process.is_gone:
            return
        for engine in self._runner.engines if process is None else (process.engine,):
            engine.notify(Kind.RELEASE, release_payload(name))

    def _start_timer(self, handle: _Handle) -> None:
        self._stop_timer(handle)
        handle.timer = asyncio.get_running_loop().call_later(handle.ttl_s, self.close, handle.name)

    def _stop_timer(self, handle: _Handle) -> None:
        if handle.timer is not None:
            handle.timer.cancel()
            handle.timer = None


def _expired(message: str) -> GradruleError:
    return error(errors_pb2.ERROR_REASON_HANDLE_EXPIRED, f"{message}; run forward again", field="handle")
