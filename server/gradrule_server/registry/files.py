"""A registry's files beside its tables: what shows that a registry was here, and room for deleting on a full disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path

from gradrule_server.registry.migrations import sync

FILE_NAME = "gradrule.db"
MARKER = "gradrule.registry"
RESERVE = "gradrule.reserve"
BLOBS = "blobs"
"""Name of the folder of blobs within the data folder."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What system calls answer where a disk takes no more."""

# Deleting writes a page for each thousand pages that a program frees, and a few more.
_RESERVE_BYTES = 4 << 20


class StoreError(Exception):
    """The registry's files cannot be used; the message says why and what to do."""


def logs_of(path: Path) -> list[Path]:
    """Files beside a database's, from which SQLite takes over what a process that was killed wrote last."""
    found = (path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))
    return [log for log in found if log.exists()]


def read_marker(folder: Path) -> str | None:
    """The id of the registry that is in the folder, or was; empty where the marker cannot be read; None without one."""
    try:
        found = json.loads((folder / MARKER).read_bytes())["registry"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""


def write_marker(folder: Path, registry_id: str) -> None:
    """Writes the marker; it is on the disk as a whole, or not at all."""
    unfinished = folder / f".{MARKER}.unfinished"
    unfinished.write_text(json.dumps({"registry": registry_id}) + "\n", "utf-8")
    unfinished.chmod(0o600)
    sync(unfinished)
    unfinished.rename(folder / MARKER)
    sync(folder)


def check_not_lost(folder: Path, what: str) -> None:
    """Raises `StoreError` where the folder shows that a registry was in it. `what`: what its database is now."""
    signs = [MARKER] if (folder / MARKER).exists() else []
    if _has_blobs(folder / BLOBS):
        signs.append(f"{BLOBS}/")
    if signs:
        raise StoreError(
            f"the registry's database {folder / FILE_NAME} is {what}, but {' and '.join(signs)} beside it show that "
            f"there was one: put the file back, or bring back a copy (`gradrule registry restore COPY --data-dir "
            f"{folder}`), or begin with an empty registry (`gradrule registry new --data-dir {folder}`)"
        )


def set_aside(paths: Iterable[Path], suffix: str) -> list[Path]:
    """Renames files that are there by adding a suffix; their new names."""
    moved = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            moved.append(path.rename(path.with_name(path.name + suffix)))
    return moved


class OpenFiles:
    """The files that a database was opened as, by which a change behind the server's back is noticed."""

    def __init__(self, path: Path) -> None:
        self._files = {file: _identity(file) for file in (path, *(path.with_name(path.name + e) for e in _KEPT_OPEN))}

    def problem(self) -> str | None:
        """Which of the files is gone or another one by now; None where all are as they were."""
        for file, opened in self._files.items():
            found = _identity(file)
            if opened is not None and found != opened:
                return f"{file} was {'removed' if found is None else 'replaced'} while the server uses it"
        return None


class Reserve:
    """A file that takes room on the disk, to be given up when a deletion finds the disk full."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RESERVE

    def make(self) -> bool:
        """Takes the room; False where there is not enough, or the file system takes none in advance."""
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
        """Gives the room up; False where it was given up before."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True


# SQLite keeps these open for as long as a connection is, and removes them itself only with the last one.
_KEPT_OPEN = ("-wal", "-shm")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _has_blobs(folder: Path) -> bool:
    """Whether a file lies in the folder of blobs, or in a tenant's below it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return any(file for _, _, files in os.walk(folder) for file in files)
    return False
