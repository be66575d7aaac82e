"""Runs functions that may block for long in threads, and reports their end on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

from gradrule_server.periodic import RepeatedWarning

_log = logging.getLogger(__name__)

_RETRY_S = 1.0

Work = Callable[[], None]


class BlockingThreads:
    """Runs each function in a thread of its own; belongs to the running event loop.

    Where the system lets no thread start, functions wait and are tried again every second. The waiting ones count
    towards `max_threads`.

    Args:
        name: name of the threads.
        max_threads: number of functions from which on `is_full` is true.
        on_end: called on the loop after a function has ended.
        retry_s: seconds between two attempts to start a thread.
    """

    def __init__(self, name: str, max_threads: int, on_end: Work, retry_s: float = _RETRY_S) -> None:
        self._name = name
        self._max_threads = max_threads
        self._on_end = on_end
        self._retry_s = retry_s
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[Work, Work]] = []
        self._count = 0
        self._warning = RepeatedWarning(_log)

    @property
    def is_full(self) -> bool:
        """Whether as many functions run or wait as may."""
        return self._count >= self._max_threads

    def run(self, function: Work, on_end: Work) -> None:
        """Runs a function in a thread, then calls `on_end` on the loop."""
        self._count += 1
        self._start(function, on_end)

    def finish(self, function: Work, seconds: float) -> None:
        """Runs the functions that wait for a thread, then `function`, all in one thread. Waits at most `seconds`.

        Blocks the event loop; for the end of the server. Threads that run already go on.
        """
        waiting, self._waiting = self._waiting, []

        def run_all() -> None:
            for each, _ in waiting:
                each()
            function()

        thread = threading.Thread(target=run_all, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as cause:
            _log.warning("no thread can be started (%s): descriptors are freed when the process ends", cause)
        else:
            thread.join(seconds)
        for _, on_end in waiting:
            on_end()

    def _start(self, function: Work, on_end: Work) -> None:
        def ended() -> None:
            self._count -= 1
            on_end()
            self._on_end()

        def run() -> None:
            try:
                function()
            finally:
                # Raised where the loop has ended: nothing is left to report to.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(ended)

        try:
            threading.Thread(target=run, name=self._name, daemon=True).start()
        except RuntimeError as cause:
            self._warning.report(f"no thread {self._name!r} can be started, trying again: {cause}")
            if not self._waiting:
                self._loop.call_later(self._retry_s, self._retry)
            self._waiting.append((function, on_end))
        else:
            self._warning.report(None)

    def _retry(self) -> None:
        waiting, self._waiting = self._waiting, []
        for function, on_end in waiting:
            self._start(function, on_end)
