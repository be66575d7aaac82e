"""Forward handles: forward runs that an engine keeps for the stream that asked for them, as long as they are used."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.engine import Engine
from gradrule_server.link.faults import EngineLost
from gradrule_server.link.framing import Kind
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.timings import note_pull_back
from gradrule_server.programs.house import ProgramHouse

# The first pull-back is built before it runs, and to end the engine would cost others more than its end.
_BUILD_PATIENCE_S = 30.0


@dataclass(slots=True, eq=False)
class _Handle:
    """`generation`: of the engine that keeps it."""

    name: str
    generation: int
    kept_bytes: int
    ttl_s: float
    timer: asyncio.TimerHandle | None = None
    is_used: bool = False


class HandleHouse:
    """What all streams keep together: bounded in bytes and in number. Everything happens on one asyncio loop."""

    def __init__(self, house: ProgramHouse, engine: Engine, *, max_bytes: int, max_handles: int, ttl_s: float) -> None:
        self.house = house
        self.engine = engine
        self.ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._max_handles = max_handles
        self._names = itertools.count(1)
        self._count = 0
        self._bytes = 0

    def new_name(self) -> str:
        """A name that no handle had, counted in. QUOTA_EXCEEDED where there are too many handles."""
        if self._count >= self._max_handles:
            raise _exceeded(f"there are {self._count} forward handles, the most that the server keeps; close some")
        self._count += 1
        return f"h{next(self._names)}"

    def give_up(self) -> None:
        """Nothing is kept under a new name after all."""
        self._count -= 1

    def add(self, handle: _Handle) -> None:
        """Counts a handle's bytes in. QUOTA_EXCEEDED where they are too many."""
        if self._bytes + handle.kept_bytes > self._max_bytes:
            raise _exceeded(
                f"the handle takes {handle.kept_bytes} bytes, and the others {self._bytes}; the server keeps "
                f"{self._max_bytes} for all. Close handles, or feed less at a time"
            )
        self._bytes += handle.kept_bytes

    def remove(self, handle: _Handle) -> None:
        """Counts a handle out."""
        self._count -= 1
        self._bytes -= handle.kept_bytes

    def release(self, name: str, generation: int) -> None:
        """Tells the engine, if it is still the same, that it need not keep it any more."""
        if generation == self.engine.generation:
            self.engine.tell(Kind.RELEASE, link_pb2.ReleaseRequest(handle=name).SerializeToString())


class StreamHandles:
    """The handles of one stream."""

    def __init__(self, house: HandleHouse) -> None:
        self._house = house
        self._handles: dict[str, _Handle] = {}

    async def forward(self, request: evaluate_pb2.ForwardRequest, received_ns: int, ends_at: float) -> bytes:
        """Runs forward and keeps what pulling back needs; the bytes of a `ForwardResponse`."""
        house = self._house
        ttl_s = house.ttl_s
        if request.HasField("ttl"):
            ttl_s = request.ttl.ToNanoseconds() / 1e9
            if ttl_s <= 0:
                raise error(
                    errors_pb2.ERROR_REASON_MALFORMED_REQUEST, f"ttl is more than 0 s, not {ttl_s:g}", field="ttl"
                )
        name = house.new_name()
        generation = house.engine.generation
        try:
            answer, kept_bytes, generation = await house.house.forward(request.evaluate, name, received_ns, ends_at)
            handle = _Handle(name, generation, kept_bytes, min(ttl_s, house.ttl_s))
            house.add(handle)
        except BaseException as cause:
            house.give_up()
            if not isinstance(cause, GradruleError) or cause.reason == errors_pb2.ERROR_REASON_QUOTA_EXCEEDED:
                # The engine has it, or will: the caller gave up, or it takes too much.
                house.release(name, generation)
            raise
        self._handles[name] = handle
        self._touch(handle)
        response = link_pb2.RawForwardResponse(evaluate=answer, handle=name, bytes=kept_bytes)
        response.ttl.FromNanoseconds(int(handle.ttl_s * 1e9))
        return response.SerializeToString()

    async def pull_back(self, raw: bytes, name: str, received_ns: int, ends_at: float) -> bytes:
        """Gradients, as the bytes of a `PullBackResponse`. HANDLE_EXPIRED where the handle is gone.

        `raw`: the bytes of the `PullBackRequest`.
        """
        handle = self._handles.get(name)
        if handle is None:
            raise _expired(f"there is no handle {name!r} on this stream: it was closed, or its time has run out")
        engine = self._house.engine
        if handle.generation != engine.generation:
            self.close(name)
            raise _expired(f"the handle {name!r} was lost with its engine")
        request = link_pb2.PullBackRequest(handle=name, received_ns=received_ns, request=raw)
        self._pause(handle)
        try:
            patience_s = 0.0 if handle.is_used else _BUILD_PATIENCE_S
            answer = await engine.call(Kind.PULL_BACK, request.SerializeToString(), ends_at, patience_s)
            handle.is_used = True
            note_pull_back(answer, received_ns)
            return answer
        except EngineLost as lost:
            if lost.suspect:
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
            self._house.remove(handle)
            self._house.release(handle.name, handle.generation)

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


def _exceeded(message: str) -> GradruleError:
    return error(errors_pb2.ERROR_REASON_QUOTA_EXCEEDED, message)
