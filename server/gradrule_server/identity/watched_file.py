"""Holds a value that is read from a file, and reads it again when the file changes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from gradrule_server.concurrency import RepeatedWarning

_log = logging.getLogger(__name__)

T = TypeVar("T")

# While a file cannot be read, its last value stays valid for this time: a file that is being replaced is missing for a
# moment.
GRACE_S = 30.0

# A file of this size is read in milliseconds: some hundred lines of tokens.
_SMALL_FILE_BYTES = 64 << 10

# A file that was written in place this recently may be written further: its end may be missing.
_SETTLED_S = 1.0

_FileStamp = tuple[int, int, int]


class WatchedFile(Generic[T]):
    """Holds the value that `read` returns for a file; `refresh` reads a changed file again. Safe to use from threads.

    An error of the first reading is raised. Later errors are logged once a minute; the last value then stays valid for
    `GRACE_S`, and `fallback`, if there is one, replaces it: credentials must not stay valid if they cannot be revoked.

    Args:
        path: The file.
        read: Reads the file.
        failure: The exceptions that `read` raises for a file that cannot be used.
        fallback: The value once the file could not be read for `GRACE_S`; None: the last value stays.
        merge: Returns what is valid, from the last value and a new one, while a file is written in place; None: the
            new value.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], T],
        failure: type[Exception],
        *,
        fallback: T | None = None,
        merge: Callable[[T, T], T] | None = None,
    ) -> None:
        self._path = path
        self._read = read
        self._failure = failure
        self._fallback = fallback
        self._merge = merge
        self._is_settled = True
        self._lock = threading.Lock()
        self._warning = RepeatedWarning(_log)
        self._problem = ""
        self._failed_at = 0.0
        self._stamp = self._read_stamp()
        self._value = read(path)

    def value(self) -> T:
        """Returns the value of the last reading. Does not access the file."""
        return self._value

    def refresh_if_small(self) -> None:
        """Reads the file if it has changed and is small enough to read on the event loop."""
        stamp = self._read_stamp()
        if stamp is not None and stamp != self._stamp and stamp[2] <= _SMALL_FILE_BYTES:
            self.refresh()

    def refresh(self) -> None:
        """Reads the file if it has changed, or could not be read before. Blocks."""
        with self._lock:
            stamp = self._read_stamp()
            # A file can become readable without a change of its stamp, so read it again after a failure too. A file
            # that is being written is read once more when that has ended, since stamps are not exact.
            if stamp != self._stamp or self._problem or not self._is_settled:
                self._read_again(stamp)
            if self._problem:
                self._warning.report(self._problem + self._consequence())
            else:
                self._warning.report(None)

    def _read_again(self, stamp: _FileStamp | None) -> None:
        """Reads the file, whose stamp was just `stamp`."""
        was_being_written = stamp is not None and self._is_being_written(stamp)
        self._stamp = stamp
        try:
            value = self._read(self._path)
        except self._failure as cause:
            if not self._problem:
                self._failed_at = time.monotonic()
            self._problem = str(cause)
            self._is_settled = not was_being_written
        else:
            # A complete file may be written in place between the look at its stamp and the end of its reading.
            self._is_settled = not was_being_written and self._read_stamp() == stamp
            self._value = value if self._is_settled or self._merge is None else self._merge(self._value, value)
            self._problem = ""
            _log.info("%s was read again", self._path)

    def _is_being_written(self, stamp: _FileStamp) -> bool:
        """Returns whether a file was changed just now, other than by renaming a complete file to its name."""
        modified_ns, inode, size = stamp
        is_in_place = self._stamp is None or inode == self._stamp[1] or not size
        return is_in_place and abs(time.time() - modified_ns / 1e9) < _SETTLED_S

    def _consequence(self) -> str:
        """Returns what is valid while the file cannot be read, as a clause; applies the fallback after `GRACE_S`."""
        if self._fallback is None:
            return "; the content that was read last stays valid"
        if time.monotonic() - self._failed_at < GRACE_S:
            return f"; the content that was read last stays valid for {GRACE_S:g} s"
        self._value = self._fallback
        return "; nothing in it is valid until it can be read"

    def _read_stamp(self) -> _FileStamp | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size
