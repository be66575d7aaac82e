"""What the asyncio client does in another way than the sync one; `sync_transport` has the same names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from gradrule._messages.error_status import error_of
from gradrule._messages.session_calls import METHOD
from gradrule.errors import UnavailableError

R = TypeVar("R")

CHANNEL_CLOSED = grpc.aio.UsageError
"""What gRPC raises when a closed channel is used."""

sleep = asyncio.sleep


async def run_in_thread(function: Callable[..., R], *arguments: Any) -> R:
    """Runs a function that blocks, without blocking the event loop."""
    return await asyncio.to_thread(function, *arguments)


class AsyncSessionStream:
    """The stream of a session, on which each message has one answer. Raises `CHANNEL_CLOSED`."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Any) -> None:
        self._call: Any = channel.stream_stream(METHOD)(metadata=metadata)

    async def exchange(self, message: bytes) -> bytes:
        """Sends a message and returns the answer.

        Raises:
            UnavailableError: The server ended the session, or the client was closed.
            GradruleError: The stream failed.
        """
        try:
            # If the stream takes no more messages, reading tells why.
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.UsageError):
                await self._call.write(message)
            answer: Any = await self._call.read()
        except grpc.RpcError as failure:
            raise error_of(failure) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                # The stream was cancelled because its channel was closed, not the task.
                raise UnavailableError("the client is closed, and the session with it") from None
            raise
        if answer is grpc.aio.EOF:
            await self._call.code()
            raise UnavailableError(await self._call.details() or "the server has ended the session")
        return bytes(answer)

    def close(self) -> None:
        """Ends the stream."""
        self._call.cancel()
