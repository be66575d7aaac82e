"""A process that tries what an engine must not do, with and without the sandbox; it prints the outcomes as JSON."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from gradrule_server.engine.sandbox.enter import enter

_libc = ctypes.CDLL(None, use_errno=True)


def attempts(folder: Path, port: int) -> dict[str, Callable[[], object]]:
    """By name; `folder` holds the data, `port` listens, and the parent process takes a signal that does nothing."""
    blob = folder / "blobs" / "blob"
    return {
        "read a file": (folder / "registry.db").read_bytes,
        "list the blobs": lambda: os.listdir(folder / "blobs"),
        "read a blob": blob.read_bytes,
        "read a blob's neighbour by a way round": (folder / "blobs" / ".." / "registry.db").read_bytes,
        "write a file": lambda: (folder / "made").write_bytes(b"x"),
        "append to a blob": lambda: os.close(os.open(blob, os.O_WRONLY | os.O_APPEND)),
        "remove a blob": lambda: os.rename(blob, folder / "gone"),
        "empty a file": lambda: os.truncate(folder / "registry.db", 1),
        "change a mode": lambda: os.chmod(folder / "registry.db", 0o600),
        "connect": lambda: socket.create_connection(("127.0.0.1", port)).close(),
        "listen": lambda: socket.create_server(("127.0.0.1", 0)).close(),
        "a socket of another kind": lambda: socket.socket(socket.AF_UNIX).close(),
        "fork": _fork,
        "start a program": lambda: subprocess.run(["true"], check=True),
        "signal the parent": lambda: os.kill(os.getppid(), signal.SIGURG),
        "signal the group": lambda: os.kill(0, signal.SIGURG),
        "look at the parent": lambda: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
        "limit the parent": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0)),
        "shared memory that stays": _shared_memory,
        "another user": lambda: _call("setuid", os.getuid()),
        "start a thread": _thread,
        "signal oneself": lambda: os.kill(os.getpid(), signal.SIGURG),
        "read a library": lambda: Path(os.__file__).read_bytes(),
        "random bytes": lambda: Path("/dev/urandom").open("rb").close(),
    }


def _fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _shared_memory() -> None:
    private, remove = 0, 0
    _libc.shmctl(_call("shmget", private, 4096, 0o600), remove, None)


def _thread() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


def _call(name: str, *arguments: int) -> int:
    result = int(getattr(_libc, name)(*arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def main() -> None:
    """Arguments: mode of the sandbox, folder, port."""
    mode, folder, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    socket.gethostbyname("127.0.0.1")
    sandbox = enter(mode, folder / "blobs")
    outcomes = {}
    for name, attempt in attempts(folder, port).items():
        outcomes[name] = "done"
        try:
            attempt()
        except OSError as refusal:
            outcomes[name] = errno.errorcode.get(refusal.errno or 0, str(refusal))
    with contextlib.suppress(OSError):
        os.write(1, json.dumps({"held": sandbox.held, "missing": sandbox.missing, "outcomes": outcomes}).encode())


if __name__ == "__main__":
    main()
