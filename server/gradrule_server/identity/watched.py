"""What is read from a file, and read again when the file changes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_EVERY_S = 1.0

_Stamp = tuple[int, int, int]


class WatchedFile(Generic[T]):
    """A value that `read` makes of a file. Whatever `failure` says is wrong at first is raised; later it is logged, and
    what was read last goes on holding. Safe to use from several threads.
    """

    def __init__(self, path: Path, read: Callable[[Path], T], failure: type[Exception]) -> None:
        self._path = path
        self._read = read
        self._failure = failure
        self._lock = threading.Lock()
        self._looked_at = time.monotonic()
        self._stamp = self._look()
        self._value = read(path)

    def value(self) -> T:
        """The value as the file has it; looks at most once a second."""
        if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
            self.refresh()
        return self._value

    def refresh(self) -> None:
        """Looks now."""
        with self._lock:
            self._looked_at = time.monotonic()
            stamp = self._look()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            try:
                self._value = self._read(self._path)
            except self._failure as cause:
                _log.warning("%s; what was read before goes on holding", cause)
            else:
                _log.info("%s was read again", self._path)

    def _look(self) -> _Stamp | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size
