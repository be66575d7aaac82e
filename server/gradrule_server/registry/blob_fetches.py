"""Fetches blobs from an object store: each once for all calls that wait for it, and a few at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from gradrule_server.concurrency import TenantSlots, run_in_own_thread
from gradrule_server.registry.blob_index import BlobKey


@dataclass(slots=True, eq=False)
class _Fetch:
    task: asyncio.Task[None]
    is_unwanted: threading.Event
    waiters: int = field(default=0)


class BlobFetches:
    """The running fetches. Belongs to the event loop that calls `fetch` first.

    Args:
        slots: Limits the fetches that run at a time; a tenant is named by its folder.
    """

    def __init__(self, slots: TenantSlots) -> None:
        self._running: dict[BlobKey, _Fetch] = {}
        self._slots = slots

    async def fetch(self, key: BlobKey, download: Callable[[threading.Event], None]) -> None:
        """Waits until a blob is fetched. Raises what `download` raises.

        Args:
            key: Identifies the blob; another call for it waits for the fetch that is running.
            download: Fetches it, in a thread. It must end soon after its argument is set: nobody waits any more.
        """
        running = self._running.get(key)
        if running is None:
            is_unwanted = threading.Event()
            task = asyncio.create_task(self._run(key[0], download, is_unwanted), name="fetch-blob")
            running = self._running[key] = _Fetch(task, is_unwanted)
            task.add_done_callback(lambda done: self._forget(key, running, done))
        running.waiters += 1
        try:
            # A caller that is cancelled must not cancel the fetch for others.
            await asyncio.shield(running.task)
        finally:
            running.waiters -= 1
            if not running.waiters:
                running.is_unwanted.set()
                # This fetch is about to end; a later request for the blob starts another one.
                self._forget(key, running)

    def _forget(self, key: BlobKey, fetch: _Fetch, done: asyncio.Task[None] | None = None) -> None:
        if self._running.get(key) is fetch:
            del self._running[key]
        if done is not None and not done.cancelled():
            # Without waiters nobody else reads the exception, and asyncio would log it.
            done.exception()

    async def _run(
        self, folder: str, download: Callable[[threading.Event], None], is_unwanted: threading.Event
    ) -> None:
        async with self._slots.hold_in_task(folder):
            if not is_unwanted.is_set():
                await run_in_own_thread("fetch-blob", lambda: download(is_unwanted))
