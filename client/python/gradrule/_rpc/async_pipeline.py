"""Runs several calls at the same time, for asyncio; `sync_pipeline` has the same names."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Generic, TypeAlias, TypeVar

from gradrule._messages.request_messages import Feeds
from gradrule._messages.rpc_calls import Call
from gradrule._rpc.async_client.base import AsyncClientBase

R = TypeVar("R")

ManyFeeds: TypeAlias = "Iterable[Feeds] | AsyncIterable[Feeds]"


async def iterate(items: Iterable[R] | AsyncIterable[R]) -> AsyncIterator[R]:
    """Yields the items of an iterable of either kind."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


class AsyncPipeline(Generic[R]):
    """Calls that were started, in order; `len()` counts those whose result was not read.

    Args:
        client: Sends them.
        timeout: Seconds for each call; None: the client's.
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
        """Waits for the first call and returns its result. Raises what it failed with."""
        return await self._tasks.popleft()

    async def cancel(self) -> None:
        """Cancels all calls that are left."""
        for task in self._tasks:
            task.cancel()
        # asyncio logs failures that nobody has read.
        await asyncio.gather(*self._tasks, return_exceptions=True)
