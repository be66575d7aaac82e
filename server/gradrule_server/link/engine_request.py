"""A request to an engine, from its submission until the engine is done with it."""

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


class ConnectionLost(Exception):
    """The connection to the engine closed before the engine answered. `started`: the request had been sent."""

    def __init__(self, *, started: bool) -> None:
        super().__init__()
        self.started = started


class EngineRequest:
    """A request that waits for a thread of an engine or runs there. `answer` becomes the payload of its answer.

    Args:
        connection: To the engine.
        request_id: The id of its frames.
        kind: The kind of its frame.
        payload: Its payload in parts; empty once it was sent.
        recorder: Records what the request does to its engine.
        suffix: Bytes to append to the payload of the answer while that is copied anyway.
        batch_key: Requests of one key may run together; None: the request runs alone.
    """

    # Most requests keep these defaults. As class attributes they cost nothing per request.
    batch: Batch | None = None
    """The requests that it was sent together with."""
    started_at: float | None = None
    """Loop time when it was sent; None: it waits."""
    chunk: Chunk | None = None
    """Where its payload lies in the arena, if it is large and was sent."""
    on_ask: Callable[[bytes], None] | None = None
    """Called with each question that the engine asks while it works on the request; see
    `Connection.answer_question`. Raises `DecodeError` or `ValueError` for a malformed question."""
    is_asking = False
    """Whether the engine waits for the answer to a question."""
    is_given_up = False
    """Whether it was sent, but no caller waits for it any more."""
    shared_bytes = 0
    """What it uses of a client's shared memory, bytes."""
    ended = False
    """Whether the engine is done with it, or will never see it. (`answer` may be cancelled long before.)"""
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
        self.recorder = recorder
        self.suffix = suffix
        self.batch_key = batch_key
        self.submitted_at = connection.loop.time()
        """Loop time."""
        self.answer: asyncio.Future[bytes] = connection.loop.create_future()

    @property
    def size(self) -> int:
        """Bytes of the payload, and of shared memory that the request and its answer use."""
        return sum(map(len, self.payload)) + self.shared_bytes

    def set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        """Sets the timer that fires if the request does not end in time, and cancels the one before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def end(self) -> None:
        """Marks the request as ended."""
        self.ended = True
        if self._timer is not None:
            self.set_timer(None)
