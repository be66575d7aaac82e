"""Tries, in a process of its own, what an engine must not do, with or without the sandbox; prints outcomes as JSON."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from gradrule_server.engine.sandbox import enter_sandbox

_libc = ctypes.CDLL(None, use_errno=True)

# Constants without a name in Python: asm-generic/fcntl.h and asm-generic/sockios.h.
_F_SETSIG, _F_SETOWN_EX, _F_OWNER_PID = 10, 15, 1
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902


def attempts(folder: Path, port: int, end: int) -> dict[str, Callable[[], object]]:
    """Returns the attempts by name. `folder` holds the data. `port` accepts connections. `end` is an open socket.

    The signal that is sent to the parent process does nothing there.
    """
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
        "a datagram to a path": lambda: _send_datagram(folder / "mailbox"),
        "a file that signals the parent": lambda: fcntl.fcntl(end, fcntl.F_SETOWN, os.getppid()),
        "a file that signals in another way": lambda: fcntl.fcntl(end, _F_SETSIG, signal.SIGURG),
        "a file that signals a thread": lambda: fcntl.fcntl(end, _F_SETOWN_EX, _owner()),
        "a socket that signals the parent": lambda: fcntl.ioctl(end, _FIOSETOWN, _parent()),
        "a socket that signals the group": lambda: fcntl.ioctl(end, _SIOCSPGRP, _parent()),
        "the parent's processors": lambda: os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0)),
        "the parent's scheduler": lambda: os.sched_setscheduler(os.getppid(), os.SCHED_OTHER, os.sched_param(0)),
        "the parent's priority": lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 0),
        "one's own processors": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
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


def _send_datagram(path: Path) -> None:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ends[0], ends[1]:
        ends[0].sendto(b"x", str(path))


def _parent() -> bytes:
    return struct.pack("i", os.getppid())


def _owner() -> bytes:
    """Returns a `struct f_owner_ex`."""
    return struct.pack("ii", _F_OWNER_PID, os.getppid())


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
    """Runs the attempts. Arguments: mode of the sandbox, folder, port."""
    mode, folder, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    socket.gethostbyname("127.0.0.1")
    ours, _theirs = socket.socketpair()
    sandbox = enter_sandbox(mode, folder / "blobs")
    core = resource.getrlimit(resource.RLIMIT_CORE)
    outcomes = {}
    for name, attempt in attempts(folder, port, ours.fileno()).items():
        outcomes[name] = "done"
        try:
            attempt()
        except OSError as refusal:
            outcomes[name] = errno.errorcode.get(refusal.errno or 0, str(refusal))
    report = {"held": sandbox.held, "missing": sandbox.missing, "core": core, "outcomes": outcomes}
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(report).encode())


if __name__ == "__main__":
    main()
