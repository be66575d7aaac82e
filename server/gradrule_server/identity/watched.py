"""What is read from a file, and read again when the file changes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from gradrule_server.periodic import RepeatedWarning

_log = logging.getLogger(__name__)

T = TypeVar("T")

# So long holds what was read last where a file cannot be read: a file that is being replaced is gone for a moment.
GRACE_S = 30.0

# Some hundred lines of tokens: milliseconds.
_SMALL = 64 << 10

_Stamp = tuple[int, int, int]


class WatchedFile(Generic[T]):
    """A value that `read` makes of a file, read again by `refresh` where the file changed. Safe to use from threads.

    What `failure` says is wrong at first is raised. Later it is logged, once a minute; what was read before holds for
    `GRACE_S` more, and then `fallback` does, where there is one: credentials that nobody can take back must not hold.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], T],
        failure: type[Exception],
        *,
        fallback: T | None = None,
    ) -> None:
        self._path = path
        self._read = read
        self._failure = failure
        self._fallback = fallback
        self._lock = threading.Lock()
        self._warning = RepeatedWarning(_log)
        self._problem = ""
        self._failed_at = 0.0
        self._stamp = self._look()
        self._value = read(path)

    def value(self) -> T:
        """The value as the file had it when it was looked at last; never reads."""
        return self._value

    def refresh_if_small(self) -> None:
        """Looks at the file, and reads it where it changed and is so small that nobody waits for it."""
        stamp = self._look()
        if stamp is not None and stamp != self._stamp and stamp[2] <= _SMALL:
            self.refresh()

    def refresh(self) -> None:
        """Looks at the file, and reads it where it changed. Blocking."""
        with self._lock:
            stamp = self._look()
            # What makes a file readable again need not change it.
            if stamp != self._stamp or self._problem:
                self._stamp = stamp
                self._read_again()
            if self._problem:
                self._warning.report(self._problem + self._consequence())
            else:
                self._warning.report(None)

    def _read_again(self) -> None:
        try:
            self._value = self._read(self._path)
        except self._failure as cause:
            if not self._problem:
                self._failed_at = time.monotonic()
            self._problem = str(cause)
        else:
            self._problem = ""
            _log.info("%s was read again", self._path)

    def _consequence(self) -> str:
        """What holds while the file cannot be read; what was read before ends with the time of grace."""
        if self._fallback is None:
            return "; what was read before holds"
        if time.monotonic() - self._failed_at < GRACE_S:
            return f"; what was read before holds for {GRACE_S:g} s"
        self._value = self._fallback
        return "; nothing of it holds until it can be read"

    def _look(self) -> _Stamp | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size
