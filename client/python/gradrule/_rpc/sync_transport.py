"""What the sync client does in another way than the asyncio one; `async_transport` has the same names."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from gradrule._messages.error_status import error_of
from gradrule._messages.session_calls import METHOD
from gradrule.errors import UnavailableError

R = TypeVar("R")

CHANNEL_CLOSED = ValueError
"""What gRPC raises when a closed channel is used."""

sleep = time.sleep


def run_in_thread(function: Callable[..., R], *arguments: Any) -> R:
    """Runs a function that blocks, in the caller's own thread."""
    return function(*arguments)


class SessionStream:
    """The stream of a session, on which each message has one answer. Raises `CHANNEL_CLOSED`."""

    def __init__(self, channel: grpc.Channel, metadata: Any) -> None:
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        opened: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
        self._call: Any = opened(iter(self._messages.get, None), metadata=metadata)

    def exchange(self, message: bytes) -> bytes:
        """Sends a message and returns the answer.

        Raises:
            UnavailableError: The server ended the session.
            GradruleError: The stream failed.
        """
        self._messages.put(message)
        try:
            return bytes(next(self._call))
        except grpc.RpcError as failure:
            raise error_of(failure) from None
        except StopIteration:
            raise UnavailableError("the server has ended the session") from None

    def close(self) -> None:
        """Ends the stream."""
        self._messages.put(None)
        self._call.cancel()
