"""Messages between the front end and the engines' fork server, on a socket that keeps message boundaries.

A request holds the engine's flags, separated by NUL, and its descriptors: the link's socket, stderr, and optionally the
two arenas and the socket that passes on the memory of clients. The answer is the pid of the engine, or a negative error
number.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_REQUEST_BYTES = 64 * 1024
_MAX_DESCRIPTORS = 5
MAX_ANSWER_BYTES = 64


@dataclass(frozen=True, slots=True)
class Request:
    """A request to fork one engine. The descriptors belong to the request."""

    flags: Sequence[str]
    link: int
    stderr: int
    arenas: Sequence[int]

    def close(self) -> None:
        """Closes the descriptors."""
        for fd in (self.link, self.stderr, *self.arenas):
            os.close(fd)


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Returns the two ends of a new socket. Raises `OSError`."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_request(control: socket.socket, flags: Sequence[str], descriptors: Sequence[int]) -> None:
    """Requests an engine. Raises `OSError` if the fork server is gone."""
    socket.send_fds(control, ["\0".join(flags).encode()], list(descriptors))


def receive_request(control: socket.socket) -> Request | None:
    """Waits for the next request. Returns None when the front end has closed the socket."""
    data, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, _MAX_DESCRIPTORS)
    if not data:
        return None
    link, stderr, *arenas = descriptors
    return Request(data.decode().split("\0"), link, stderr, arenas)


def send_pid(control: socket.socket, pid: int) -> None:
    """Answers with the pid of the engine."""
    control.send(str(pid).encode())


def send_failure(control: socket.socket, cause: OSError) -> None:
    """Answers that the operating system could not start a process."""
    control.send(str(-(cause.errno or errno.EAGAIN)).encode())


def parse_answer(answer: bytes) -> int:
    """Returns the pid. Raises `OSError` if no engine could be forked."""
    pid = int(answer)
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid))
    return pid
