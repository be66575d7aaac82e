"""Runs a server while the parent process lives, then stops the server and removes its temporary folder.

`LocalServer` runs this file as a script in a separate process, so the server ends even if the client is killed. The
file imports only the standard library, and few modules of it, so that it starts within 30 ms and needs little memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

# Interval at which the end of the parent is noticed. Polling works on every system, for any thread that started this
# process, and though children of the parent inherit its pipes.
_CHECK_EVERY_S = 0.25
_PR_SET_PDEATHSIG = 1
_PREFIX = "gradrule-local-"
_DATA = "data"
STOP_S = 30.0
"""Time that the server gets to end after SIGTERM, in seconds."""


def main(parent: int, stop_s: float, command: Sequence[str]) -> int:
    """Runs the command until it ends, its parent ends, or SIGTERM or SIGINT arrives; returns its exit code.

    The command gets SIGTERM, after `stop_s` seconds SIGKILL. Its data folder is in a temporary folder, unless a flag of
    the command names another one.

    Args:
        parent: Process ID of the process whose end ends the command; 0: the present parent. The caller gives the ID
            where the parent may have ended before this call.
        stop_s: Time that the command gets to end.
        command: To run.
    """
    parent = parent or os.getppid()
    signals = _signals_as_bytes(signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    with _temporary_folder() as folder:
        server = subprocess.Popen(
            command,
            env={**os.environ, "GRADRULE_DATA_DIR": os.path.join(folder, _DATA)},
            # This process has one thread, so the code is safe between fork and exec.
            preexec_fn=functools.partial(_end_with_parent, os.getpid()),  # noqa: PLW1509
        )
        _remove_abandoned_folders()
        while server.poll() is None and os.getppid() == parent:
            readable, _, _ = select.select([signals], [], [], _CHECK_EVERY_S)
            if readable and {signal.SIGTERM, signal.SIGINT} & set(os.read(signals, 4096)):
                break
        if server.poll() is None:
            server.terminate()
            try:
                server.wait(stop_s)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """Creates a folder that is locked while this process lives, and removes it at the end."""
    with contextlib.ExitStack() as locks:
        while True:
            folder = tempfile.mkdtemp(prefix=_PREFIX)
            _lock(folder, locks, waits=True)
            # Another supervisor may have taken it for an abandoned one before it was locked.
            if os.path.isdir(folder):
                break
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned_folders() -> None:
    """Removes the folders of this user's supervisors that were killed, unless their servers still run."""
    # The folder for temporary files may refuse to be listed. Other supervisors remove their folders meanwhile.
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if not entry.name.startswith(_PREFIX):
                continue
            data = os.path.join(entry.path, _DATA)
            with contextlib.ExitStack() as locks:
                # A server locks its data folder.
                if _lock(entry.path, locks) and (not os.path.isdir(data) or _lock(data, locks)):
                    shutil.rmtree(entry.path, ignore_errors=True)


def _lock(folder: str, locks: contextlib.ExitStack, *, waits: bool = False) -> bool:
    """Locks a folder of this user until `locks` is closed; returns False if it is gone, locked, or another user's."""
    # Not available on Windows, where clients import this file.
    import fcntl

    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        locks.callback(os.close, handle)
        if os.fstat(handle).st_uid != os.getuid():
            return False
        fcntl.flock(handle, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _end_with_parent(parent: int) -> None:
    """Makes Linux send SIGTERM to this process when its parent ends, even if that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)


def _signals_as_bytes(*numbers: signal.Signals) -> int:
    """Returns a file descriptor from which each signal that arrives is read as one byte, its number."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    for number in numbers:
        # Only signals with a handler of Python are written to the descriptor.
        signal.signal(number, lambda *_: None)
    return readable


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
