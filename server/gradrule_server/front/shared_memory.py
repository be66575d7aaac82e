"""Accepts memory that clients on this host share, and finds it again for their calls.

An authenticated caller gets two keys, and connects with them to a Unix socket of the server
(docs/guide/shared-memory.md). The memory belongs to the tenant of that call, and the server keeps it until the socket
closes. The kernel closes the socket when either process ends.

Any local process can connect and send a descriptor, and closing such a descriptor can block for as long as its sender
wants. Therefore the event loop never receives from these sockets and never closes them: each has a thread of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.concurrency import RepeatedWarning
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.calls import Caller
from gradrule_server.front.tenants import Tenant, Tenants
from gradrule_server.link import arena
from gradrule_server.link.shared_memory import (
    NAME_BYTES,
    ClientMemory,
    MemoryUse,
    NotShareable,
    shareable_size,
    shared_memory_lost,
)

_log = logging.getLogger(__name__)

_KEY_BYTES = 16
_KEYS_LAST_S = 10.0
_MAX_KEYS_PER_TENANT = 16
_ACCEPTED, _REFUSED = b"\x00", b"\x01"
# Most time for each message of a handshake.
_MESSAGE_S = 5.0
_MAX_HANDSHAKES = 256
# Handshakes that were ended may block while they close descriptors.
_MAX_HANDSHAKE_THREADS = _MAX_HANDSHAKES + 64
_BACKLOG = 64
_CLOSING_S = 5.0
_POLL_S = 0.01
_RETRY_S = 1.0
# Each memory takes two descriptors, however small it is.
_MIN_COUNTED_BYTES = 64 << 20
# SO_PASSRIGHTS: whether descriptors may be sent to a socket. Linux has it from 6.16 on, Python has no name for it.
_PASS_DESCRIPTORS = 83

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Keys:
    """What a caller was given to hand over one memory. `ends_at`: CLOCK_MONOTONIC, seconds.

    Its tenant stays loaded for longer than that, since it has just called.
    """

    server_key: bytes
    tenant: Tenant
    ends_at: float


class _Connection:
    """A connection of a client. `has_memory`: whether the handshake is over."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.has_memory = self.is_ended = False

    def end(self) -> None:
        """Wakes its thread, which then closes it."""
        self.is_ended = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class SharedMemoryServer:
    """Keeps the shared memory of all clients. Belongs to one event loop.

    Args:
        tenants: kept loaded while a client of theirs has a connection.
        max_bytes: largest memory, bytes; 0 disables shared memory.
    """

    def __init__(self, tenants: Tenants, max_bytes: int) -> None:
        self._tenants = tenants
        self._max_bytes = max_bytes
        self._closing = threading.Event()
        self._listener: socket.socket | None = None
        self._keys: dict[bytes, _Keys] = {}
        self._memories: dict[tuple[str, bytes], tuple[ClientMemory, _Connection]] = {}
        # Each has a thread, in the order in which they connected.
        self._connections: dict[_Connection, None] = {}
        self._warning = RepeatedWarning(_log)
        self.address = ""

    def start(self) -> None:
        """Starts to listen on the running loop, unless shared memory is disabled or the system lacks it."""
        if not self._max_bytes or not arena.has_sealed_memory():
            return
        address = f"gradrule-{secrets.token_hex(_KEY_BYTES)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind("\0" + address)
            _allow_descriptors(listener, False)
            listener.listen(_BACKLOG)
        except OSError as cause:
            listener.close()
            _log.warning("clients on this host cannot share memory: %s", cause)
            return
        self._listener, self.address = listener, address
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._accept, args=(listener,), name="shared-memory", daemon=True).start()

    async def close(self) -> None:
        """Accepts no more memory and releases what there is. Waits for that, but at most some seconds."""
        if self._listener is None:
            return
        self._closing.set()
        # Wakes the thread that accepts connections.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._keys.clear()
        for connection in list(self._connections):
            connection.end()
        ends_at = self._loop.time() + _CLOSING_S
        while (self._connections or self._listener is not None) and self._loop.time() < ends_at:
            await asyncio.sleep(_POLL_S)

    def issue_keys(self, caller: Caller) -> evaluate_pb2.ShareMemoryResponse:
        """Returns keys with which the caller's tenant can hand over one memory. UNSUPPORTED."""
        if self._listener is None:
            raise error(
                errors_pb2.ERROR_REASON_UNSUPPORTED,
                "this server shares no memory with clients (--max-shared-bytes 0, or a system without memfd_create)",
            )
        tenant, now = caller.tenant, time.monotonic()
        self._keys = {key: keys for key, keys in self._keys.items() if now < keys.ends_at}
        unused = [key for key, keys in self._keys.items() if keys.tenant is tenant]
        if len(unused) >= _MAX_KEYS_PER_TENANT:
            del self._keys[unused[0]]
        client_key, server_key = secrets.token_bytes(_KEY_BYTES), secrets.token_bytes(_KEY_BYTES)
        self._keys[client_key] = _Keys(server_key, tenant, now + _KEYS_LAST_S)
        return evaluate_pb2.ShareMemoryResponse(
            address=self.address,
            client_key=client_key,
            server_key=server_key,
            max_bytes=min(self._max_bytes, tenant.quotas["shared_bytes"].limit),
        )

    @contextlib.contextmanager
    def use(self, use: evaluate_pb2.SharedMemoryUse, caller: Caller) -> Iterator[MemoryUse]:
        """Returns the memory that a call uses within this context.

        SHARED_MEMORY_LOST where the caller's tenant has no such memory, INVALID_TENSOR.
        """
        key = caller.tenant.name, use.memory
        if key not in self._memories:
            raise shared_memory_lost()
        memory, connection = self._memories[key]
        if use.answer_offset + use.answer_bytes > memory.size or use.request_bytes > memory.size:
            raise error(
                errors_pb2.ERROR_REASON_INVALID_TENSOR,
                f"the request uses {use.request_bytes} bytes and {use.answer_bytes} bytes at {use.answer_offset} of a "
                f"shared memory of {memory.size} bytes",
                field="shared_memory",
            )
        size = use.request_bytes + use.answer_bytes
        if not memory.reserve_answer(use.answer_offset, use.answer_bytes):
            # An earlier attempt of this call may still run and would write into this one's answer.
            self._give_up(key, memory, connection)
            raise shared_memory_lost()
        try:
            yield MemoryUse(memory, size)
        except asyncio.CancelledError:
            # An engine may still write into the memory, which the client would use for another call.
            self._give_up(key, memory, connection)
            raise
        finally:
            memory.release_answer(use.answer_offset, use.answer_bytes)

    def _give_up(self, key: tuple[str, bytes], memory: ClientMemory, connection: _Connection) -> None:
        """Makes all engines stop using a memory, whose thread then releases it."""
        self._memories.pop(key, None)
        memory.close()
        connection.end()

    def _take_keys(self, client_key: bytes) -> _Keys | None:
        """Returns the keys that a client shows, and keeps their tenant loaded; None if there are none."""
        keys = self._keys.pop(client_key, None)
        if keys is None or time.monotonic() >= keys.ends_at:
            return None
        self._tenants.retain(keys.tenant)
        return keys

    def _accept(self, listener: socket.socket) -> None:
        """Starts a thread for each connection. Runs in a thread."""
        with listener:
            while not self._closing.is_set():
                try:
                    if self._has_room():
                        self._serve_next(listener)
                        self._warning.report(None)
                        continue
                except (OSError, RuntimeError) as cause:
                    # No descriptor or no thread is left, unless the listener was closed.
                    if not self._closing.is_set():
                        self._warning.report(f"a client cannot share memory: {cause}")
                self._closing.wait(_RETRY_S)
        self._listener = None

    def _has_room(self) -> bool:
        """Returns whether one more connection may be accepted; ends the oldest handshake if there are too many."""
        handshakes = [connection for connection in list(self._connections) if not connection.has_memory]
        waiting = [connection for connection in handshakes if not connection.is_ended]
        if len(waiting) > _MAX_HANDSHAKES:
            waiting[0].end()
        return len(handshakes) < _MAX_HANDSHAKE_THREADS

    def _serve_next(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        connection = _Connection(sock)
        self._connections[connection] = None
        try:
            threading.Thread(target=self._serve, args=(connection,), name="shared-memory", daemon=True).start()
        except RuntimeError:
            del self._connections[connection]
            sock.close()
            raise
        if self._closing.is_set():
            connection.end()

    def _serve(self, connection: _Connection) -> None:
        """Receives the key of a client, then its memory, and keeps that until the connection closes."""
        try:
            with connection.sock as sock:
                sock.settimeout(_MESSAGE_S)
                # The kernel closes descriptors that come with the key, since this call does not ask for them.
                client_key = sock.recv(_KEY_BYTES + 1)
                keys = self._on_loop(self._take_keys, client_key)
                if keys is None:
                    return
                try:
                    _allow_descriptors(sock, True)
                    sock.send(keys.server_key)
                    self._receive_memory(connection, keys.tenant)
                finally:
                    self._on_loop(self._tenants.release, keys.tenant)
        except (OSError, RuntimeError) as cause:
            # RuntimeError: the loop has ended.
            _log.debug("a client shares no memory any more: %s", cause)
        finally:
            del self._connections[connection]

    def _receive_memory(self, connection: _Connection, tenant: Tenant) -> None:
        """Keeps the memory that a client sends, or sends the client the reason for refusing it."""
        _, descriptors, _, _ = socket.recv_fds(connection.sock, 1, 1)
        for fd in descriptors:
            quota, counted = tenant.quotas["shared_bytes"], 0
            try:
                os.set_inheritable(fd, False)
                size = shareable_size(fd, self._max_bytes)
                quota.reserve(max(size, _MIN_COUNTED_BYTES))
                counted = max(size, _MIN_COUNTED_BYTES)
                self._keep(connection, tenant, ClientMemory(secrets.token_bytes(NAME_BYTES), fd, size))
            except (NotShareable, GradruleError) as refusal:
                connection.sock.send(_REFUSED + str(refusal).encode())
            finally:
                os.close(fd)
                quota.release(counted)

    def _keep(self, connection: _Connection, tenant: Tenant, memory: ClientMemory) -> None:
        """Keeps a memory until its connection closes."""
        key = tenant.name, memory.name
        self._on_loop(self._memories.__setitem__, key, (memory, connection))
        try:
            connection.has_memory = True
            connection.sock.send(_ACCEPTED + memory.name)
            connection.sock.settimeout(None)
            # The client sends nothing more: anything that arrives is the end of the connection or a breach of protocol.
            connection.sock.recv(1)
        finally:
            self._on_loop(self._give_up, key, memory, connection)

    def _on_loop(self, function: Callable[..., T], *arguments: object) -> T:
        """Calls a function on the event loop, from another thread, and waits for its result."""
        done = concurrent.futures.Future[T]()

        def call() -> None:
            try:
                done.set_result(function(*arguments))
            except BaseException as cause:
                done.set_exception(cause)

        self._loop.call_soon_threadsafe(call)
        return done.result()


def _allow_descriptors(sock: socket.socket, is_allowed: bool) -> None:
    """Allows or forbids others to send descriptors to a socket, where the kernel can do that."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _PASS_DESCRIPTORS, int(is_allowed))
