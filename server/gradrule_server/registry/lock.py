"""One server per data folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FolderInUseError(Exception):
    """Another process holds the folder; the message names it."""


class FolderLock:
    """An advisory lock on a file of the folder, held from construction to `release`, and never longer than the process.

    The file stays behind: removing it would let two processes hold locks on two files of one name.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "gradrule.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as held:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise FolderInUseError(
                f"{folder} is in use by another server (process {holder}); stop it, or give another --data-dir"
            ) from held
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Lets others in."""
        os.close(self._file)
