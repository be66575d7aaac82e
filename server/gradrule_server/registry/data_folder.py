"""Manages the files beside a registry's database: the lock, the marker, the reserve for a full disk, SQLite's logs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from pathlib import Path

from gradrule_server.errors import CannotStartError

DATABASE_FILE = "gradrule.db"
MARKER = "gradrule.registry"
"""Name of a file that shows that the folder has a registry."""
RESERVE = "gradrule.reserve"
_LOCK_FILE = "gradrule.lock"
BLOBS = "blobs"
"""Name of the folder of blobs within the data folder."""
BLOB_CACHE = "blob-cache"
"""Name of the folder with copies of blobs that are in an object store, within the data folder."""

DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of system calls on a full disk."""

# Size of the reserve, bytes. Deleting a program writes one page for each thousand pages that it frees, and a few more.
_RESERVE_BYTES = 4 << 20

# SQLite keeps these files open and removes them only when the last connection is closed.
_KEPT_OPEN = ("-wal", "-shm")

# Errors of file systems that cannot lock folders. Network file systems, for example, can lock only files.
_NO_FOLDER_LOCKS = frozenset({errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


class StoreError(CannotStartError):
    """The registry's files cannot be used; the message says why, and what to do."""


class FolderInUseError(StoreError):
    """Another process has locked the folder; the message names the process."""


def sync_to_disk(path: Path) -> None:
    """Makes sure that the content of a file, or the names in a folder, survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: str | Path) -> str:
    """Returns the SHA-256 of a file's content, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_logs(path: Path) -> list[Path]:
    """Returns SQLite's logs beside a database, which hold the last writes of a process that was killed."""
    found = (path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))
    return [log for log in found if log.exists()]


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that only its owner can read. After a power failure it has either the old or the new content."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.touch(0o600)
    unfinished.write_bytes(content)
    sync_to_disk(unfinished)
    unfinished.rename(path)
    sync_to_disk(path.parent)


def refuse_lost_database(folder: Path, problem: str) -> None:
    """Raises `StoreError` if the marker shows that the folder had a registry.

    Args:
        folder: The data folder.
        problem: What is wrong with the database: `missing` or `empty`.
    """
    if (folder / MARKER).exists():
        raise StoreError(
            f"the registry's database {folder / DATABASE_FILE} is {problem}, but {MARKER} beside it shows that the "
            f"folder had a registry: put the file back, restore a backup (`gradrule registry restore BACKUP --data-dir "
            f"{folder}`), or remove {MARKER} to start with an empty registry"
        )


class FolderLock:
    """Holds advisory locks on a folder and on a lock file in it until `release` or the end of the process.

    The lock on the folder stays valid if the lock file is removed. The lock file names the process; older releases, and
    file systems that cannot lock folders, lock only the file.

    Raises:
        FolderInUseError: Another process has locked the folder.
        OSError: The folder cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / _LOCK_FILE
        with contextlib.ExitStack() as opened:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, handle)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            opened.callback(os.close, self._file)
            try:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as cause:
                    if cause.errno not in _NO_FOLDER_LOCKS:
                        raise
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as held:
                holder = os.pread(self._file, 64, 0).decode(errors="replace").split()[:1]
                raise FolderInUseError(
                    f"{folder} is in use by another server (process {holder[0] if holder else 'unknown'}); stop it, "
                    "or give another --data-dir"
                ) from held
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
            self._opened = opened.pop_all()

    def release(self) -> None:
        """Releases the locks, so that other processes can use the folder; does nothing the second time."""
        self._opened.close()


def lock_folder(folder: Path) -> FolderLock:
    """Creates a data folder if it is missing, and locks it. Raises `StoreError`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return FolderLock(folder)
    except OSError as cause:
        raise StoreError(
            f"the data folder {folder} cannot be used: {cause.strerror}; give another --data-dir"
        ) from cause


class OpenFiles:
    """Remembers the inodes of an open database's files, and detects that a file was removed or replaced."""

    def __init__(self, path: Path) -> None:
        self._files = {file: _identity(file) for file in (path, *(path.with_name(path.name + e) for e in _KEPT_OPEN))}

    def problem(self) -> str | None:
        """Returns a sentence that names a file that was removed or replaced; None if there is none."""
        for file, opened in self._files.items():
            found = _identity(file)
            if opened is not None and found != opened:
                return f"{file} was {'removed' if found is None else 'replaced'} while the server uses it"
        return None


class Reserve:
    """A file that reserves disk space, so that deleting works on a full disk."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RESERVE

    def create(self) -> bool:
        """Reserves the space; returns False if the disk is full or the file system cannot reserve space."""
        handle = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(handle, 0, _RESERVE_BYTES)
        except OSError:
            self._path.unlink()
            return False
        finally:
            os.close(handle)
        return True

    def release(self) -> bool:
        """Frees the space; returns False if no space was reserved."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
