"""Runs a server while the parent process lives, then stops the server and removes its temporary folder.

`LocalServer` runs this file as a script in a separate process, so the server ends even if the client is killed. The
file imports only the standard library, and few modules of it, so that it starts within 30 ms and needs little memory.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

# Interval at which the end of the parent is noticed. Polling works on every system, for any thread that started this
# process, and though children of the parent inherit its pipes.
_CHECK_EVERY_S = 0.25
_PR_SET_PDEATHSIG = 1
STOP_S = 30.0
"""Time that the server gets to end after SIGTERM, in seconds."""


def main(parent: int, stop_s: float, command: Sequence[str]) -> int:
    """Runs the command until it ends, its parent ends, or SIGTERM or SIGINT arrives; returns its exit code.

    The command gets SIGTERM, after `stop_s` seconds SIGKILL. Its data folder is in a temporary folder, unless a flag of
    the command names another one.

    Args:
        parent: Process ID of the parent, since it may have ended already; 0: whichever process it is now.
        stop_s: Time that the command gets to end.
        command: To run.
    """
    parent = parent or os.getppid()
    signals = _signals_as_bytes(signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    with tempfile.TemporaryDirectory(prefix="gradrule-", ignore_cleanup_errors=True) as folder:
        server = subprocess.Popen(
            command,
            env={**os.environ, "GRADRULE_DATA_DIR": os.path.join(folder, "data")},
            # This process has one thread, so the code is safe between fork and exec.
            preexec_fn=functools.partial(_end_with_parent, os.getpid()),  # noqa: PLW1509
        )
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
