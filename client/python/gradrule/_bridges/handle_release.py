"""Releases forward runs that nothing refers to any more."""

from __future__ import annotations

import logging
import queue
import threading
import weakref

from gradrule._rpc.sync_client.forward import ForwardHandle
from gradrule.errors import GradruleError

_log = logging.getLogger(__name__)


class _Releaser:
    """Releases handles on a thread of its own, because a finalizer may run in any thread and must not wait."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[ForwardHandle | threading.Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, if it does not run."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="gradrule-release", daemon=True)
                self._thread.start()

    def release(self, handle: ForwardHandle) -> None:
        """Releases a handle soon. Takes no lock, so that a finalizer may call it."""
        if handle.is_open:
            self._waiting.put(handle)

    def wait(self) -> None:
        """Waits until the handles given so far are released."""
        done = threading.Event()
        self._waiting.put(done)
        self.start()
        done.wait()

    def _run(self) -> None:
        while True:
            first = self._waiting.get()
            if isinstance(first, threading.Event):
                first.set()
                continue
            try:
                first.close()
            except GradruleError as failure:
                _log.info("a forward handle was not released, the server releases it later: %s", failure)


_releaser = _Releaser()


def release_with(owner: object, handle: ForwardHandle) -> None:
    """Releases a handle soon after nothing refers to an object any more."""
    _releaser.start()
    # At exit, the connection closes and the server releases the run.
    weakref.finalize(owner, _releaser.release, handle).atexit = False


def wait_for_releases() -> None:
    """Waits until the handles of all objects that are gone are released."""
    _releaser.wait()
