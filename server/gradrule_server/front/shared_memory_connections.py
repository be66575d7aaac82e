"""Unix socket connections on which clients hand over shared memory: the handshake, and the connection afterwards.

Any local process can connect and send a descriptor, and closing such a descriptor can block for as long as its sender
wants. Therefore the event loop never receives from these sockets and never closes them: separate threads do.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from gradrule_server.errors import GradruleError
from gradrule_server.front.tenants import Tenant
from gradrule_server.link.shared_memory import ClientMemory, NotShareable, shareable_size

if TYPE_CHECKING:
    from gradrule_server.front.shared_memory import SharedMemoryServer

_log = logging.getLogger(__name__)

KEY_BYTES = 16
_HANDSHAKE_S = 5.0
_ACCEPTED, _REFUSED = b"\x00", b"\x01"
# Process, user and group of the other end.
_CREDENTIALS = struct.Struct("3i")
# SO_PASSRIGHTS: whether descriptors may be sent to a socket. Linux has it from 6.16 on, Python has no name for it.
_PASS_DESCRIPTORS = 83

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Keys:
    """What a caller was given to hand over one memory: the server's answer, its tenant, when the keys expire."""

    server_key: bytes
    tenant: Tenant
    timer: asyncio.TimerHandle


class Handshake:
    """A connection whose client has not handed its memory over yet.

    The event loop waits for each message of the client, so that clients that send nothing take no thread; `run`
    receives a message in a thread.
    """

    def __init__(self, receiver: SharedMemoryServer, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._receiver = receiver
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + _HANDSHAKE_S
        self._timer: asyncio.TimerHandle | None = None
        self._has_shown_key = False
        self.uid = _peer_uid(connection)
        """User of the process that has connected."""
        self.has_ended = False
        """Whether the connection is closed, or is that of a registered memory."""
        self.tenant: Tenant | None = None
        """The tenant whose keys were shown. Changed on the event loop only."""

    @property
    def is_waiting(self) -> bool:
        """Whether the event loop waits for a message."""
        return self._timer is not None

    def wait(self, on_message: Callable[[], None], on_timeout: Callable[[], None]) -> None:
        """Calls one of two functions on the event loop: when a message arrives, or when the client has no more time."""
        self._loop.add_reader(self._connection.fileno(), on_message)
        self._timer = self._loop.call_at(self._ends_at, on_timeout)

    def stop_waiting(self) -> None:
        """Waits no longer for a message."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._loop.remove_reader(self._connection.fileno())

    def run(self) -> None:
        """Receives the next message: the key, then the memory; anything else closes the connection."""
        is_kept = False
        try:
            if self._receiver.is_closed:
                return
            if self._has_shown_key:
                is_kept = self.has_ended = self._receive_memory()
            else:
                is_kept = self._has_shown_key = self._check_key()
        except (OSError, RuntimeError) as cause:
            # RuntimeError: the loop has ended.
            _log.debug("a client shares no memory: %s", cause)
        finally:
            if not is_kept:
                self.close()

    def close(self) -> None:
        """Closes the connection, which may block."""
        self.has_ended = True
        self._connection.close()

    def _check_key(self) -> bool:
        # The kernel closes descriptors that come with the key, since this call does not ask for them.
        client_key = self._connection.recv(KEY_BYTES + 1)
        keys = self._on_loop(lambda: self._receiver.redeem(self, client_key))
        if keys is None:
            return False
        allow_descriptors(self._connection, True)
        self._connection.send(keys.server_key)
        return True

    def _receive_memory(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._connection, 1, 1)
        for fd in descriptors:
            is_registered = False
            try:
                os.set_inheritable(fd, False)
                if data:
                    self._register(fd)
                    is_registered = True
            except (NotShareable, GradruleError) as refusal:
                self._connection.send(_REFUSED + str(refusal).encode())
            finally:
                if not is_registered:
                    os.close(fd)
            return is_registered
        return False

    def _register(self, fd: int) -> None:
        size = shareable_size(fd, self._receiver.max_bytes)
        self._on_loop(lambda: self._receiver.register(self, fd, size, self._connection))

    def _on_loop(self, function: Callable[[], T]) -> T:
        """Calls a function on the event loop, from this thread. Raises what it raises, and `TimeoutError`."""
        future = concurrent.futures.Future[T]()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as cause:
                future.set_exception(cause)

        self._loop.call_soon_threadsafe(call)
        try:
            return future.result(_HANDSHAKE_S)
        except TimeoutError:
            if future.cancel():
                raise
            # The function has started in the meantime.
            return future.result()


class MemoryConnection:
    """A connection that has handed over memory. The memory lasts until the connection closes.

    Args:
        tenant: owner of the memory.
        connection: taken over.
        memory: taken over.
        on_disconnect: called on the event loop once, when the connection closes.
    """

    def __init__(
        self, tenant: Tenant, connection: socket.socket, memory: ClientMemory, on_disconnect: Callable[[], None]
    ) -> None:
        self.tenant = tenant
        self.memory = memory
        self._connection = connection
        # The client sends nothing more: anything that arrives is the end of the connection or a breach of protocol.
        asyncio.get_running_loop().add_reader(connection.fileno(), on_disconnect)

    def confirm(self) -> None:
        """Sends the client the name of the memory. Raises `OSError` where the client is gone."""
        self._connection.send(_ACCEPTED + self.memory.name)

    def disconnect(self) -> None:
        """Makes all engines stop using the memory. Runs on the event loop; `release` must follow."""
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self.memory.close()

    def release(self) -> None:
        """Closes the connection and the memory, which may block."""
        self._connection.close()
        self.memory.release()


def _peer_uid(connection: socket.socket) -> int:
    """Returns the user of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid


def allow_descriptors(sock: socket.socket, is_allowed: bool) -> None:
    """Allows or forbids others to send descriptors to a socket, where the kernel can do that."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _PASS_DESCRIPTORS, int(is_allowed))
