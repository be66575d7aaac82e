"""Declares the ways in which an engine runs a program: once, forward only, or in a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gradrule.v1 import session_pb2
from gradrule_server.link.batching import BatchKey
from gradrule_server.link.engine import Engine
from gradrule_server.link.framing import Kind
from gradrule_server.link.shared_memory import MemoryUse
from gradrule_server.link.v1 import link_pb2
from gradrule_server.recovery.crash_history import OutcomeRecorder


def settings_of(run: link_pb2.RunRequest) -> bytes:
    """Returns the bytes of a run request that do not depend on the call's tensors."""
    return link_pb2.RunRequest(params=run.params, blob_folder=run.blob_folder).SerializeToString()


def may_batch(request: link_pb2.RawEvaluateRequest) -> bool:
    """Returns whether the caller allows that a call runs together with others."""
    return request.batching.allowed or not request.batching.HasField("allowed")


class RunMode(Protocol):
    """One way to run a program. `ends_at`: loop time of the deadline; 0: none."""

    @property
    def ends_at(self) -> float: ...

    @property
    def pinned(self) -> Engine | None:
        """The only engine that can run it; None: any engine can."""
        ...

    @property
    def undo(self) -> Callable[[Engine], None] | None:
        """Removes what a run left in an engine, before it runs in another one; None: it leaves nothing."""
        ...

    async def run(self, engine: Engine, run: link_pb2.RunRequest, recorder: OutcomeRecorder) -> bytes:
        """Runs a loaded program; returns the bytes of an `EvaluateResponse`."""
        ...


@dataclass(frozen=True, slots=True)
class RunOnce:
    """Runs forward and backward; the engine keeps nothing.

    `memory`: the client's shared memory that the call uses. `may_batch`: whether it may run together with others.
    """

    ends_at: float
    pinned: Engine | None = None
    undo: Callable[[Engine], None] | None = None
    memory: MemoryUse | None = None
    may_batch: bool = True

    async def run(self, engine: Engine, run: link_pb2.RunRequest, recorder: OutcomeRecorder) -> bytes:
        batch_key = BatchKey(run.key, settings_of(run)) if self.may_batch else None
        payload = run.SerializeToString()
        return await engine.call(Kind.RUN, payload, self.ends_at, recorder, batch_key=batch_key, memory=self.memory)


@dataclass(slots=True)
class RunForward:
    """Runs forward only; the engine keeps what the backward part needs, under the name `handle`.

    `kept_bytes`: Bytes that the engine keeps; set by `run`.
    """

    ends_at: float
    handle: str
    kept_bytes: int = 0
    pinned: Engine | None = None

    def undo(self, engine: Engine) -> None:
        engine.notify(Kind.RELEASE, link_pb2.ReleaseRequest(handle=self.handle).SerializeToString())

    async def run(self, engine: Engine, run: link_pb2.RunRequest, recorder: OutcomeRecorder) -> bytes:
        request = link_pb2.ForwardRequest(run=run, handle=self.handle)
        reply = link_pb2.ForwardReply.FromString(
            await engine.call(Kind.FORWARD, request.SerializeToString(), self.ends_at, recorder)
        )
        self.kept_bytes = reply.kept_bytes
        return reply.response


@dataclass(slots=True)
class RunInSession:
    """Runs with the variables of a session.

    `store`: variables that get the outputs as values. `optimizer`: applies the gradients. `reply`: size and steps of
    the session; set by `run`.
    """

    channel: SessionChannel
    ends_at: float
    store: tuple[str, ...] = ()
    optimizer: session_pb2.Optimizer | None = None
    reply: link_pb2.SessionReply | None = None
    undo: Callable[[Engine], None] | None = None

    @property
    def pinned(self) -> Engine | None:
        return self.channel.engine

    async def run(self, engine: Engine, run: link_pb2.RunRequest, recorder: OutcomeRecorder) -> bytes:
        work = link_pb2.SessionRun(run=run, store=self.store, optimizer=self.optimizer)
        self.reply = await self.channel.send(link_pb2.SessionRequest(run=work), self.ends_at, recorder)
        return self.reply.response


class SessionChannel(Protocol):
    """Sends messages to the engine that holds a session."""

    @property
    def engine(self) -> Engine:
        """The engine that holds the session."""
        ...

    async def send(
        self, request: link_pb2.SessionRequest, ends_at: float, recorder: OutcomeRecorder | None = None
    ) -> link_pb2.SessionReply:
        """Returns the reply. Raises `EngineLost` if the engine ends meanwhile, SESSION_LOST if it had ended before."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """One process of an engine; another process takes its place after it has ended."""

    engine: Engine
    generation: int

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, and what it kept is lost."""
        return self.generation != self.engine.generation
