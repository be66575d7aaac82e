"""Tells open streams of a proxy that their replica is going to stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable

from ray.serve.request_router import ReplicaID


class _Stream:
    def __init__(self, on_leaving: Callable[[], None]) -> None:
        self.on_leaving = on_leaving
        self.loop = asyncio.get_running_loop()
        self.replica: ReplicaID | None = None


class LeavingReplicas:
    """Tells open streams of this process that their replica takes no new calls, so that their clients open new ones.

    Ray Serve itself waits until the streams end, which an open stream of a client may never do, and then kills the
    replica. Routers may run in another thread than the streams.
    """

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()

    def add(self, request_id: str, on_leaving: Callable[[], None]) -> None:
        """Calls `on_leaving` in the running event loop once the replica of a call leaves."""
        with self._lock:
            self._streams[request_id] = _Stream(on_leaving)

    def remove(self, request_id: str) -> None:
        """Forgets a stream that has ended."""
        with self._lock:
            self._streams.pop(request_id, None)

    def set_replica(self, request_id: str, replica: ReplicaID) -> None:
        """Records where a call was sent. Does nothing for calls that were not added."""
        with self._lock:
            if (stream := self._streams.get(request_id)) is not None:
                stream.replica = replica

    def keep(self, replicas: Iterable[ReplicaID]) -> None:
        """Records which replicas take calls now."""
        running = set(replicas)
        with self._lock:
            for stream in self._streams.values():
                if stream.replica is not None and stream.replica not in running:
                    stream.loop.call_soon_threadsafe(stream.on_leaving)


LEAVING = LeavingReplicas()
"""Of this process, since Ray Serve creates the router and the handlers of calls apart."""
