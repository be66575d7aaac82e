"""Memory that a client shares with the server. The front end keeps its descriptor and passes it on to engines.

The front end never maps the memory: a client may change it at any time. Only engines of the client's tenant read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error

NAME_BYTES = 16
"""Length of a memory's name."""

# Without the first seal a client could make the memory shorter, which would end a process that reads it.
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
_MAX_DETACHED = 16


class NotShareable(Exception):
    """A descriptor is not memory that can be shared. The message says why."""


class Holder(Protocol):
    """Has a memory, and gives it up on request."""

    def detach(self, memory: ClientMemory) -> None: ...


class ClientMemory:
    """Memory of one client.

    Args:
        name: By which requests name it.
        fd: Its descriptor, which is closed after `close`. Not on the event loop: freeing memory may take long.
        size: Its size, bytes.
    """

    def __init__(self, name: bytes, fd: int, size: int) -> None:
        self.name = name
        self.fd = fd
        self.size = size
        self.is_closed = False
        self.holders: set[Holder] = set()
        """The engines that have it."""
        self._answer_regions: set[tuple[int, int]] = set()

    def reserve_answer(self, offset: int, size: int) -> bool:
        """Reserves a region for the answer of one call, until `release_answer`.

        Returns False if it overlaps a region of another call that is under way: gRPC may send a call again while its
        first attempt still runs, and both would write there.
        """
        if not size:
            return True
        end = offset + size
        if any(offset < other_end and start < end for start, other_end in self._answer_regions):
            return False
        self._answer_regions.add((offset, end))
        return True

    def release_answer(self, offset: int, size: int) -> None:
        """Releases a region that was reserved."""
        self._answer_regions.discard((offset, offset + size))

    def close(self) -> None:
        """Makes all holders give it up. Running calls may still use it."""
        if self.is_closed:
            return
        self.is_closed = True
        for holder in list(self.holders):
            holder.detach(self)
        self.holders.clear()


class MemoryUse(NamedTuple):
    """The use of a client's memory by one call. `size`: bytes of its tensors there, and of the room for its answer."""

    memory: ClientMemory
    size: int


def shareable_size(fd: int, max_bytes: int) -> int:
    """Returns the size of a client's memory, without reading it. Raises `NotShareable`."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise NotShareable("the descriptor is no memory made by memfd_create") from None
    missing = [seal for seal in _SEALS if not seals & getattr(fcntl, seal)]
    if missing:
        raise NotShareable(f"the memory lacks the seals {', '.join(missing)}")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise NotShareable("the descriptor must be open for reading and writing")
    size = os.fstat(fd).st_size
    if not 0 < size <= max_bytes:
        raise NotShareable(f"the memory has {size} bytes, of 1 to {max_bytes}")
    return size


class MemoryChannel:
    """Passes memories on to one engine, over a separate socket that keeps message boundaries. Owns the socket.

    `notify_detached`: sends the engine the name of a memory that it should give up.
    """

    def __init__(self, sock: socket.socket, notify_detached: Callable[[bytes], None]) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._notify_detached = notify_detached
        self._attached: set[ClientMemory] = set()
        # Sizes. Calls that run may map a memory for a while after it was detached. The oldest entries are dropped.
        self._detached: deque[int] = deque(maxlen=_MAX_DETACHED)

    @property
    def shared_bytes(self) -> int:
        """The size of all memories that the engine may map, those that were detached lately included, bytes."""
        return sum(memory.size for memory in self._attached) + sum(self._detached)

    def attach(self, memory: ClientMemory) -> None:
        """Passes a memory on, unless the engine has it already. Raises SHARED_MEMORY_LOST."""
        if memory in self._attached:
            return
        if memory.is_closed:
            raise shared_memory_lost()
        try:
            socket.send_fds(self._socket, [memory.name], [memory.fd])
        except OSError:
            raise shared_memory_lost() from None
        self._attached.add(memory)
        memory.holders.add(self)

    def detach(self, memory: ClientMemory) -> None:
        """Makes the engine give up a memory."""
        if memory in self._attached:
            self._attached.discard(memory)
            self._detached.append(memory.size)
            self._notify_detached(memory.name)

    def close(self) -> None:
        """Forgets all memories, because the engine has ended."""
        for memory in self._attached:
            memory.holders.discard(self)
        self._attached.clear()
        self._socket.close()


class ReceivedMemories:
    """The engine's end of the socket. Owns the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock

    def next(self) -> tuple[bytes, int] | None:
        """Returns the name and descriptor of the next memory; None if there is none now."""
        with contextlib.suppress(BlockingIOError):
            name, descriptors, _, _ = socket.recv_fds(self._socket, NAME_BYTES, 1)
            if descriptors:
                return name, descriptors[0]
        return None


def shared_memory_lost() -> GradruleError:
    """Returns SHARED_MEMORY_LOST."""
    return error(
        errors_pb2.ERROR_REASON_SHARED_MEMORY_LOST,
        "the server does not have the shared memory that the request names; share memory again, or send tensors inline",
        field="shared_memory",
    )
