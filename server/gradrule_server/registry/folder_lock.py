"""Locks a data folder, so that only one server uses it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

FILE_NAME = "gradrule.lock"

# Errors of file systems that cannot lock folders. Network file systems, for example, can lock only files.
_NO_FOLDER_LOCKS = frozenset({errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
_IS_RUNNING = "running"


class FolderInUseError(Exception):
    """Another process has locked the folder; the message names the process."""


class FolderLock:
    """Holds advisory locks on a folder and on a lock file in it until `release` or the end of the process.

    The lock on the folder stays valid if the lock file is removed. The lock file names the process; older releases lock
    only the file.

    Attributes:
        was_killed: Whether the process that held the lock before ended without releasing it.

    Raises:
        FolderInUseError: Another process has locked the folder.
        OSError: The folder cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / FILE_NAME
        self._file = -1
        self._handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._lock_folder()
            self.was_killed = self._lock_file()
        except BaseException:
            self.release()
            raise

    def restore_file(self) -> bool:
        """Creates and locks the lock file again if it was removed or replaced; returns whether it was.

        Raises:
            FolderInUseError: Another process has locked the new lock file.
        """
        try:
            found = self._path.stat()
        except FileNotFoundError:
            found = None
        held = os.fstat(self._file)
        if found is not None and (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino):
            return False
        os.close(self._file)
        self._file = -1
        self._lock_file()
        return True

    def release(self) -> None:
        """Releases the locks, so that other processes can use the folder."""
        if self._file >= 0:
            os.ftruncate(self._file, 0)
            os.close(self._file)
        os.close(self._handle)

    def _lock_folder(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as held:
            raise self._in_use() from held
        except OSError as cause:
            if cause.errno not in _NO_FOLDER_LOCKS:
                raise

    def _lock_file(self) -> bool:
        """Locks the file and writes the process id into it; returns `was_killed`."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Only current releases write this word; older ones leave their process id in the file when they stop.
            was_killed = os.pread(file, 64, 0).decode(errors="replace").split()[1:] == [_IS_RUNNING]
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()} {_IS_RUNNING}\n".encode(), 0)
        except BlockingIOError as held:
            os.close(file)
            raise self._in_use() from held
        except BaseException:
            os.close(file)
            raise
        self._file = file
        return was_killed

    def _in_use(self) -> FolderInUseError:
        try:
            holder = self._path.read_text(errors="replace").split()[:1]
        except OSError:
            holder = []
        return FolderInUseError(
            f"{self._folder} is in use by another server (process {holder[0] if holder else 'unknown'}); stop it, or "
            "give another --data-dir"
        )
