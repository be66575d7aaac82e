"""Tells open streams of a proxy that their replica is going to stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from typing import Any

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

    def set_replica(self, request_id: str, replica: ReplicaID, *, is_leaving: bool) -> None:
        """Records where a call was sent. Does nothing for calls that were not added.

        Args:
            request_id: Of the call.
            replica: Which has accepted the call.
            is_leaving: The replica takes no more calls, since the router chose it.
        """
        with self._lock:
            if (stream := self._streams.get(request_id)) is not None:
                stream.replica = replica
                if is_leaving:
                    stream.loop.call_soon_threadsafe(stream.on_leaving)

    def keep(self, deployment: Any, replicas: Collection[ReplicaID]) -> None:
        """Records which replicas of a deployment take calls now. Other deployments have routers of their own."""
        with self._lock:
            for stream in self._streams.values():
                if (
                    stream.replica is not None
                    and stream.replica.deployment_id == deployment
                    and stream.replica not in replicas
                ):
                    stream.loop.call_soon_threadsafe(stream.on_leaving)


LEAVING = LeavingReplicas()
"""Of this process, since Ray Serve creates the router and the handlers of calls apart."""
