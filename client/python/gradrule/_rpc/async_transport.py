"""Implements for asyncio what differs between the two clients; `sync_transport` has the same names."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Generator, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import grpc
import grpc.aio

from gradrule._messages.error_status import error_of
from gradrule._messages.session_calls import METHOD
from gradrule._rpc.stream_messages import StreamLostError
from gradrule.errors import UnavailableError

if TYPE_CHECKING:
    from gradrule._messages.call_arguments import Feeds
    from gradrule._messages.rpc_calls import Call
    from gradrule._rpc.async_client.base import AsyncClientBase

R = TypeVar("R")

CHANNEL_CLOSED = grpc.aio.UsageError
"""Exception of gRPC for the use of a closed channel."""

sleep = asyncio.sleep
Lock = asyncio.Lock
Channel: TypeAlias = grpc.aio.Channel
ManyFeeds: TypeAlias = "Iterable[Feeds] | AsyncIterable[Feeds]"


class Starting(Generic[R]):
    """Starts a client when it is awaited, or at the start of an `async with` block, which closes it."""

    def __init__(self, start: Callable[[], Awaitable[R]]) -> None:
        self._start = start
        self._client: Any = None

    def __await__(self) -> Generator[Any, Any, R]:
        return self._start().__await__()

    async def __aenter__(self) -> R:
        self._client = await self._start()
        client: R = self._client
        return client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()


def guarded(channel: grpc.aio.Channel) -> Channel:
    """Returns a channel unchanged: event loops run signal handlers between calls."""
    return channel


def starting(start: Callable[[], Awaitable[R]]) -> Starting[R]:
    """Returns what starts a client later, because starting takes an event loop."""
    return Starting(start)


async def run_in_thread(function: Callable[..., R], *arguments: Any) -> R:
    """Runs a function that blocks, without blocking the event loop."""
    return await asyncio.to_thread(function, *arguments)


class AsyncSessionStream:
    """Exchanges messages over the stream of a session; each message has one answer. Raises `CHANNEL_CLOSED`."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Any, target: str) -> None:
        self._target = target
        self._call: Any = channel.stream_stream(METHOD)(metadata=metadata)

    async def exchange(self, message: bytes, seconds: float) -> bytes:
        """Sends a message and returns the answer.

        Raises:
            StreamLostError: The stream has ended.
            TimeoutError: There was no answer within `seconds`; the stream has ended.
            UnavailableError: The client was closed.
        """
        try:
            async with asyncio.timeout(seconds):
                # If the stream accepts no more messages, reading raises the reason.
                with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.UsageError):
                    await self._call.write(message)
                answer: Any = await self._call.read()
        except grpc.RpcError as failure:
            raise StreamLostError(error_of(failure, self._target)) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                # The stream was cancelled because its channel was closed, not the task.
                raise UnavailableError("the client is closed, and the session with it") from None
            raise
        if answer is grpc.aio.EOF:
            await self._call.code()
            raise StreamLostError(UnavailableError(await self._call.details() or "the server has ended the session"))
        return bytes(answer)

    def close(self) -> None:
        """Ends the stream."""
        self._call.cancel()


async def iterate(items: Iterable[R] | AsyncIterable[R]) -> AsyncIterator[R]:
    """Yields the items of an iterable of either kind."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


class AsyncPipeline(Generic[R]):
    """Runs several calls at the same time and returns their results in order; `len()` counts unread results.

    Args:
        client: Client that sends the calls.
        timeout: Timeout in seconds for each call; None: the client's.
    """

    def __init__(self, client: AsyncClientBase, timeout: float | None) -> None:
        self._client = client
        self._timeout = timeout
        self._tasks: deque[asyncio.Task[R]] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, call: Call[R]) -> None:
        """Sends a call without waiting for its answer."""
        self._tasks.append(asyncio.ensure_future(self._client._run(call, self._timeout)))

    async def next_result(self) -> R:
        """Waits for the first call and returns its result. Raises the error of a failed call."""
        return await self._tasks.popleft()

    async def cancel(self) -> None:
        """Cancels the calls without a result."""
        for task in self._tasks:
            task.cancel()
        # asyncio logs exceptions that are never retrieved.
        await asyncio.gather(*self._tasks, return_exceptions=True)
