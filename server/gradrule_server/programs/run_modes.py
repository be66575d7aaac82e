"""The ways in which an engine runs a program."""

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
    """Returns the bytes of what is the same in all calls of a program that differ in their tensors alone."""
    return link_pb2.RunRequest(params=run.params, blob_folder=run.blob_folder).SerializeToString()


def may_batch(request: link_pb2.RawEvaluateRequest) -> bool:
    """Returns whether a call may run together with others, as far as the call itself tells."""
    return request.batching.allowed or not request.batching.HasField("allowed")


class RunMode(Protocol):
    """One way; it may note what the engine tells besides its answer. `ends_at`: loop time of the deadline."""

    @property
    def ends_at(self) -> float: ...

    @property
    def pinned(self) -> Engine | None:
        """The engine that it must be; None: any."""
        ...

    @property
    def undo(self) -> Callable[[Engine], None] | None:
        """Takes back what a run left in an engine that is given up, so that it can be run elsewhere; None: nothing."""
        ...

    async def on(self, engine: Engine, run: link_pb2.RunRequest, recorder: OutcomeRecorder) -> bytes:
        """Runs a loaded program; the bytes of an `EvaluateResponse`."""
        ...


@dataclass(frozen=True, slots=True)
class RunOnce:
    """Forward and backward, and nothing is kept.

    `memory`: of the client, which the call uses. `may_batch`: whether it may run together with others.
    """

    ends_at: float
    pinned: Engine | None = None
    undo: Callable[[Engine], None] | None = None
    memory: MemoryUse | None = None
    may_batch: bool = True

    async def on(self, engine: Engine, run: link_pb2.RunRequest, recorder: OutcomeRecorder) -> bytes:
        batch_key = BatchKey(run.key, settings_of(run)) if self.may_batch else None
        payload = run.SerializeToString()
        return await engine.call(Kind.RUN, payload, self.ends_at, recorder, batch_key=batch_key, memory=self.memory)


@dataclass(slots=True)
class RunForward:
    """Forward only; the engine keeps what pulling back needs, under the name `handle`: so many bytes, afterwards."""

    ends_at: float
    handle: str
    kept_bytes: int = 0
    pinned: Engine | None = None

    def undo(self, engine: Engine) -> None:
        engine.notify(Kind.RELEASE, link_pb2.ReleaseRequest(handle=self.handle).SerializeToString())

    async def on(self, engine: Engine, run: link_pb2.RunRequest, recorder: OutcomeRecorder) -> bytes:
        request = link_pb2.ForwardRequest(run=run, handle=self.handle)
        reply = link_pb2.ForwardReply.FromString(
            await engine.call(Kind.FORWARD, request.SerializeToString(), self.ends_at, recorder)
        )
        self.kept_bytes = reply.kept_bytes
        return reply.response


@dataclass(slots=True)
class RunInSession:
    """With a session's variables. `store`: variables that the outputs become; `optimizer`: what applies gradients.

    Afterwards: bytes of the session, steps made.
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

    async def on(self, engine: Engine, run: link_pb2.RunRequest, recorder: OutcomeRecorder) -> bytes:
        work = link_pb2.SessionRun(run=run, store=self.store, optimizer=self.optimizer)
        self.reply = await self.channel.send(link_pb2.SessionRequest(run=work), self.ends_at, recorder)
        return self.reply.response


class SessionChannel(Protocol):
    """The way of a session's messages to the engine that holds it."""

    @property
    def engine(self) -> Engine:
        """The engine that holds it."""
        ...

    async def send(
        self, request: link_pb2.SessionRequest, ends_at: float, recorder: OutcomeRecorder | None = None
    ) -> link_pb2.SessionReply:
        """The engine's reply; `EngineLost` where it ended meanwhile, SESSION_LOST where it is another by now."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """Where something ran: an engine, and which of the processes that take turns there."""

    engine: Engine
    generation: int

    @property
    def is_gone(self) -> bool:
        """Whether what was kept there is lost."""
        return self.generation != self.engine.generation
