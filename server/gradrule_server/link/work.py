"""A request to an engine, from when it is handed in until the engine is done with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gradrule_server.link.arena import Chunk
from gradrule_server.link.batching import Batch, BatchKey
from gradrule_server.link.framing import Kind
from gradrule_server.recovery.crash_history import OutcomeRecorder

if TYPE_CHECKING:
    from gradrule_server.link.connection import Connection


class EngineGone(Exception):
    """The engine closed its end, or died, before it answered.

    `started`: it had been sent the request.
    """

    def __init__(self, *, started: bool) -> None:
        super().__init__()
        self.started = started


class Work:
    """A request to an engine: it waits, then runs, then `answer` has the payload of its answer, or what went wrong."""

    # Most requests leave these as they are: class attributes cost a request nothing.
    batch: Batch | None = None
    """The requests that it was sent with, if there are others."""
    started_at: float | None = None
    """Loop time at which it was sent; None: it waits."""
    chunk: Chunk | None = None
    """Where the payload lies, if it is large and sent."""
    on_ask: Callable[[bytes], None] | None = None
    """Called with what the other end asks while it works on the request; see `Connection.answer_question`. Raises
    `DecodeError` or `ValueError` where that is no question."""
    is_asking = False
    """Whether the other end waits for the answer to a question."""
    is_given_up = False
    """Nobody waits for it any more, though it was sent."""
    shared_bytes = 0
    """What it uses of a client's shared memory, bytes."""
    ended = False
    """The engine is done with it, or never saw it and never will. (`answer` may be cancelled long before.)"""
    _timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        connection: Connection,
        request_id: int,
        kind: Kind,
        payload: Sequence[bytes],
        recorder: OutcomeRecorder | None,
        suffix: bytes = b"",
        batch_key: BatchKey | None = None,
    ) -> None:
        self.connection = connection
        self.id = request_id
        self.kind = kind
        self.payload = payload
        """Parts that follow one another in the frame."""
        self.recorder = recorder
        self.suffix = suffix
        """Appended to the answer's payload while that is copied: a large answer is not copied once more for it."""
        self.batch_key = batch_key
        """Which other requests it may run with; None: none."""
        self.submitted_at = connection.loop.time()
        """Loop time at which it was handed in."""
        self.answer: asyncio.Future[bytes] = connection.loop.create_future()

    @property
    def size(self) -> int:
        """Bytes of the request, those in shared memory included, and of the room there for its answer."""
        return sum(map(len, self.payload)) + self.shared_bytes

    def watch(self, timer: asyncio.TimerHandle | None) -> None:
        """Sets the timer that goes off if the work does not end; it takes the place of the one set before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def end(self) -> None:
        """The engine is done with it."""
        self.ended = True
        if self._timer is not None:
            self.watch(None)
