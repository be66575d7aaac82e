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
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gradrule_server.errors import GradruleError
from gradrule_server.front.tenants import Tenant
from gradrule_server.link.shared_memory import ClientMemory, NotShareable, shareable_size

_log = logging.getLogger(__name__)

KEY_BYTES = 16
_HANDSHAKE_S = 5.0
_ACCEPTED, _REFUSED = b"\x00", b"\x01"
# SO_PASSRIGHTS: whether descriptors may be sent to a socket. Linux has it from 6.16 on, Python has no name for it.
_PASS_DESCRIPTORS = 83

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Keys:
    """What a caller was given to hand over one memory: the server's answer, its tenant, when the keys expire."""

    server_key: bytes
    tenant: Tenant
    timer: asyncio.TimerHandle


class MemoryReceiver(Protocol):
    """Checks keys and registers memory, see `shared_memory.SharedMemoryServer`. Its methods run on the event loop."""

    max_bytes: int
    is_closed: bool

    def redeem(self, handshake: Handshake, client_key: bytes) -> Keys | None: ...

    def register(self, handshake: Handshake, fd: int, size: int, connection: socket.socket) -> None: ...


class Handshake:
    """A connection whose client has not handed its memory over yet; `run` serves it in a thread of its own."""

    def __init__(self, receiver: MemoryReceiver, connection: socket.socket) -> None:
        self._receiver = receiver
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._ends_at = time.monotonic() + _HANDSHAKE_S
        self.tenant: Tenant | None = None
        """The tenant whose keys were shown. Changed on the event loop only."""

    def run(self) -> None:
        """Receives memory, or closes the connection."""
        is_registered = False
        try:
            is_registered = not self._receiver.is_closed and self._check_key() and self._receive_memory()
        except (OSError, RuntimeError) as cause:
            # RuntimeError: the loop has ended.
            _log.debug("a client shares no memory: %s", cause)
        finally:
            if not is_registered:
                self._connection.close()

    def _await_message(self) -> None:
        self._connection.settimeout(max(self._ends_at - time.monotonic(), 0.001))

    def _check_key(self) -> bool:
        self._await_message()
        # The kernel closes descriptors that come with the key, since this call does not ask for them.
        client_key = self._connection.recv(KEY_BYTES + 1)
        keys = self._on_loop(lambda: self._receiver.redeem(self, client_key))
        if keys is None:
            return False
        allow_descriptors(self._connection, True)
        self._connection.send(keys.server_key)
        return True

    def _receive_memory(self) -> bool:
        self._await_message()
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
        self._connection.setblocking(False)
        self._connection.send(_ACCEPTED + self.memory.name)

    def disconnect(self) -> None:
        """Makes all engines stop using the memory. Runs on the event loop; `release` must follow."""
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self.memory.close()

    def release(self) -> None:
        """Closes the connection and the memory, which may block."""
        self._connection.close()
        self.memory.release()


def allow_descriptors(sock: socket.socket, is_allowed: bool) -> None:
    """Allows or forbids others to send descriptors to a socket, where the kernel can do that."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _PASS_DESCRIPTORS, int(is_allowed))
