"""Forward handles: forward runs that an engine keeps for the stream that asked for them, as long as they are used."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.framing import Kind
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import record_pull_back
from gradrule_server.programs.run_modes import ProcessRef
from gradrule_server.programs.service import ProgramService
from gradrule_server.quotas import Quota
from gradrule_server.recovery.crash_history import OutcomeRecorder
from gradrule_server.recovery.endings import EngineLost


@dataclass(slots=True, eq=False)
class _Handle:
    """What an engine keeps of a program. `kept_bytes`: on the device. `recorder`: who answers for pulling back."""

    name: str
    place: ProcessRef
    recorder: OutcomeRecorder
    kept_bytes: int
    ttl_s: float
    timer: asyncio.TimerHandle | None = None


class HandleManager:
    """What all streams of a tenant keep together: bounded in bytes and in number. Everything happens on one asyncio
    loop.

    blob_folder: name of the folder of the tenant's blobs.
    """

    def __init__(
        self,
        program_service: ProgramService,
        *,
        quota: Quota,
        bytes_quota: Quota,
        ttl_s: float,
        blob_folder: str = "",
    ) -> None:
        self.program_service = program_service
        self.ttl_s = ttl_s
        self.blob_folder = blob_folder
        self._quota = quota
        self._bytes_quota = bytes_quota

    def reserve_name(self) -> str:
        """A name that no handle had, counted in. QUOTA_EXCEEDED where there are too many handles."""
        self._quota.reserve()
        # Names that nobody can guess.
        return f"h{secrets.token_hex(8)}"

    def release_name(self) -> None:
        """Nothing is kept under a new name after all."""
        self._quota.release()

    def add(self, handle: _Handle) -> None:
        """Counts a handle's bytes in. QUOTA_EXCEEDED where they are too many."""
        self._bytes_quota.reserve(handle.kept_bytes)
        handle.place.engine.add_kept(handle.place.generation, 1)

    def remove(self, handle: _Handle) -> None:
        """Counts a handle out."""
        self._quota.release()
        self._bytes_quota.release(handle.kept_bytes)
        handle.place.engine.add_kept(handle.place.generation, -1)

    def release(self, name: str, place: ProcessRef | None) -> None:
        """Tells the engine, if it is still the same, that it need not keep it any more; None: all of the tenant's."""
        message = link_pb2.ReleaseRequest(handle=name).SerializeToString()
        if place is None:
            engines = self.program_service.pool.engines_of(self.program_service.owner)
        else:
            engines = [] if place.is_gone else [place.engine]
        for engine in engines:
            engine.notify(Kind.RELEASE, message)


class StreamHandles:
    """The handles of one stream."""

    def __init__(self, manager: HandleManager) -> None:
        self._manager = manager
        self._handles: dict[str, _Handle] = {}

    async def forward(self, request: link_pb2.RawForwardRequest, received_ns: int, ends_at: float) -> bytes:
        """Runs forward and keeps what pulling back needs; the bytes of a `ForwardResponse`."""
        manager = self._manager
        ttl_s = manager.ttl_s
        if request.HasField("ttl"):
            ttl_s = request.ttl.ToNanoseconds() / 1e9
            if ttl_s <= 0:
                raise error(
                    errors_pb2.ERROR_REASON_MALFORMED_REQUEST, f"ttl is more than 0 s, not {ttl_s:g}", field="ttl"
                )
        name = manager.reserve_name()
        place: ProcessRef | None = None
        try:
            answer, how, place, program = await manager.program_service.forward(
                request.evaluate, name, received_ns, ends_at
            )
            # Not the program itself: nobody counts what it takes here.
            recorder = manager.program_service.recovery().recorder(program.workload)
            handle = _Handle(name, place, recorder, how.kept_bytes, min(ttl_s, manager.ttl_s))
            manager.add(handle)
        except BaseException as cause:
            manager.release_name()
            if not isinstance(cause, GradruleError) or cause.reason == errors_pb2.ERROR_REASON_QUOTA_EXCEEDED:
                # The engine has it, or will: the caller gave up, or it takes too much.
                manager.release(name, place)
            raise
        self._handles[name] = handle
        self._touch(handle)
        response = link_pb2.RawForwardResponse(evaluate=answer, handle=name, size_bytes=handle.kept_bytes)
        response.ttl.FromNanoseconds(int(handle.ttl_s * 1e9))
        return response.SerializeToString()

    async def pull_back(self, raw: bytes, name: str, received_ns: int, ends_at: float) -> bytes:
        """Gradients, as the bytes of a `PullBackResponse`. HANDLE_EXPIRED where the handle is gone.

        `raw`: the bytes of the `PullBackRequest`.
        """
        handle = self._handles.get(name)
        if handle is None:
            raise _expired(f"there is no handle {name!r} on this stream: it was closed, or its time has run out")
        if handle.place.is_gone:
            self.close(name)
            raise _expired(f"the handle {name!r} was lost with its engine")
        request = link_pb2.PullBackRequest(
            handle=name, received_ns=received_ns, request=raw, blob_folder=self._manager.blob_folder
        )
        self._pause(handle)
        try:
            answer = await handle.place.engine.call(
                Kind.PULL_BACK, request.SerializeToString(), ends_at, handle.recorder
            )
            record_pull_back(answer, received_ns)
            return answer
        except EngineLost as lost:
            handle.recorder.record_engine_loss(lost)
            if lost.is_blamable and lost.ran_alone:
                raise
            raise _expired(f"the handle {name!r} was lost with its engine") from lost
        finally:
            if self._handles.get(name) is handle:
                self._touch(handle)

    def close(self, name: str) -> None:
        """Lets a handle go, if it is there."""
        handle = self._handles.pop(name, None)
        if handle is not None:
            self._pause(handle)
            self._manager.remove(handle)
            self._manager.release(handle.name, handle.place)

    def close_all(self) -> None:
        """Lets all handles go: the stream has ended."""
        for name in list(self._handles):
            self.close(name)

    def _touch(self, handle: _Handle) -> None:
        self._pause(handle)
        handle.timer = asyncio.get_running_loop().call_later(handle.ttl_s, self.close, handle.name)

    def _pause(self, handle: _Handle) -> None:
        if handle.timer is not None:
            handle.timer.cancel()
            handle.timer = None


def _expired(message: str) -> GradruleError:
    return error(errors_pb2.ERROR_REASON_HANDLE_EXPIRED, f"{message}; run forward again", field="handle")
