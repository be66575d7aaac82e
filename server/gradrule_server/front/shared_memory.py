"""Accepts memory that clients on this host share, and finds it again for their calls.

An authenticated caller gets two keys, and connects with them to a Unix socket of the server
(docs/guide/shared-memory.md). The memory belongs to the tenant of that call, and the server keeps it until the socket
closes. The kernel closes the socket when either process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterator

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.concurrency import RepeatedWarning, run_in_own_thread, start_logged_task
from gradrule_server.errors import error, lacks_memory
from gradrule_server.front.calls import Caller
from gradrule_server.front.shared_memory_connections import (
    KEY_BYTES,
    Handshake,
    Keys,
    MemoryConnection,
    allow_descriptors,
)
from gradrule_server.front.tenants import Tenants
from gradrule_server.link import arena
from gradrule_server.link.shared_memory import NAME_BYTES, ClientMemory, MemoryUse, NotShareable, shared_memory_lost

_log = logging.getLogger(__name__)

_KEYS_LAST_S = 10.0
# Threads of handshakes and threads that close connections.
_MAX_THREADS = 64
_BACKLOG = 64
_MAX_HANDSHAKES = 256
_CLOSING_S = 5.0
_MAX_KEYS_PER_TENANT = 16
# Each memory takes two descriptors, however small it is.
_MIN_COUNTED_BYTES = 64 << 20
_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RETRY_S = 1.0


class SharedMemoryServer:
    """Keeps the shared memory of all clients. Belongs to one event loop.

    Args:
        tenants: kept loaded while a client of theirs has keys or memory.
        max_bytes: largest memory, bytes; 0 disables shared memory.
    """

    def __init__(self, tenants: Tenants, max_bytes: int) -> None:
        self._tenants = tenants
        self.max_bytes = max_bytes
        self.is_closed = False
        self._listener: socket.socket | None = None
        self._keys: dict[bytes, Keys] = {}
        self._connections: dict[tuple[str, bytes], MemoryConnection] = {}
        # In the order in which they connected.
        self._handshakes: dict[Handshake, None] = {}
        self._warning = RepeatedWarning(_log)
        self._running: set[asyncio.Task[None]] = set()
        self.address = ""

    def start(self) -> None:
        """Starts to listen on the running loop, unless shared memory is disabled or the system lacks it."""
        if not self.max_bytes or not arena.has_sealed_memory():
            return
        address = f"gradrule-{secrets.token_hex(KEY_BYTES)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.setblocking(False)
            listener.bind("\0" + address)
            allow_descriptors(listener, False)
            listener.listen(_BACKLOG)
        except OSError as cause:
            listener.close()
            _log.warning("clients on this host cannot share memory: %s", cause)
            return
        self._listener, self.address = listener, address
        self._loop = asyncio.get_running_loop()
        self._listen()

    async def close(self) -> None:
        """Accepts no more memory and releases what there is. Waits for that, but at most some seconds."""
        if self._listener is None:
            return
        self.is_closed = True
        listener, self._listener = self._listener, None
        self._loop.remove_reader(listener.fileno())
        for client_key in list(self._keys):
            self._withdraw_keys(client_key)
        # Threads close the connections of the others.
        for handshake in [each for each in self._handshakes if each.is_waiting]:
            self._end_handshake(handshake)
        for key in list(self._connections):
            self._end_connection(key)
        self._run_in_thread(listener.close, lambda: None)
        ends_at = self._loop.time() + _CLOSING_S
        while self._running and (left_s := ends_at - self._loop.time()) > 0:
            await asyncio.wait(self._running, timeout=left_s)

    def issue_keys(self, caller: Caller) -> evaluate_pb2.ShareMemoryResponse:
        """Returns keys with which the caller's tenant can hand over one memory. UNSUPPORTED."""
        if self._listener is None:
            raise error(
                errors_pb2.ERROR_REASON_UNSUPPORTED,
                "this server shares no memory with clients (--max-shared-bytes 0, or a system without memfd_create)",
            )
        tenant = caller.tenant
        unused = [key for key, keys in self._keys.items() if keys.tenant is tenant]
        if len(unused) >= _MAX_KEYS_PER_TENANT:
            self._withdraw_keys(unused[0])
        client_key, server_key = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES)
        timer = asyncio.get_running_loop().call_later(_KEYS_LAST_S, self._withdraw_keys, client_key)
        self._tenants.retain(tenant)
        self._keys[client_key] = Keys(server_key, tenant, timer)
        return evaluate_pb2.ShareMemoryResponse(
            address=self.address,
            client_key=client_key,
            server_key=server_key,
            max_bytes=min(self.max_bytes, tenant.quotas["shared_bytes"].limit),
        )

    @contextlib.contextmanager
    def use(self, use: evaluate_pb2.SharedMemoryUse, caller: Caller) -> Iterator[MemoryUse]:
        """Returns the memory that a call uses within this context.

        SHARED_MEMORY_LOST where the caller's tenant has no such memory, INVALID_TENSOR.
        """
        key = caller.tenant.name, use.memory
        connection = self._connections.get(key)
        if connection is None:
            raise shared_memory_lost()
        memory = connection.memory
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
            self._end_connection(key)
            raise shared_memory_lost()
        try:
            yield MemoryUse(memory, size)
        except asyncio.CancelledError:
            # An engine may still write into the memory, which the client would use for another call.
            self._end_connection(key)
            raise
        finally:
            memory.release_answer(use.answer_offset, use.answer_bytes)

    def redeem(self, handshake: Handshake, client_key: bytes) -> Keys | None:
        """Returns the keys that a client shows, which are used up by that; None where there are none.

        The handshake keeps the tenant loaded.
        """
        keys = self._keys.get(client_key)
        if keys is not None:
            self._tenants.retain(keys.tenant)
            handshake.tenant = keys.tenant
            self._withdraw_keys(client_key)
        return keys

    def register(self, handshake: Handshake, fd: int, size: int, connection: socket.socket) -> None:
        """Keeps a descriptor and its connection, and sends the client the name of the memory.

        Raises `NotShareable` and QUOTA_EXCEEDED; descriptor and connection stay with the caller then.
        """
        tenant = handshake.tenant
        if tenant is None:
            raise NotShareable("the server stops")
        tenant.quotas["shared_bytes"].reserve(_counted_bytes(size))
        # From now on the connection keeps the tenant loaded.
        handshake.tenant = None
        memory = ClientMemory(secrets.token_bytes(NAME_BYTES), fd, size)
        key = tenant.name, memory.name
        kept = MemoryConnection(tenant, connection, memory, lambda: self._end_connection(key))
        self._connections[key] = kept
        try:
            kept.confirm()
        except OSError as cause:
            _log.debug("a client that shares memory is gone: %s", cause)
            self._end_connection(key)

    def _end_connection(self, key: tuple[str, bytes]) -> None:
        """Makes all engines stop using a memory, then releases it in a thread."""
        connection = self._connections.pop(key, None)
        if connection is None:
            return
        connection.disconnect()

        def released() -> None:
            connection.tenant.quotas["shared_bytes"].release(_counted_bytes(connection.memory.size))
            self._tenants.release(connection.tenant)

        self._run_in_thread(connection.release, released)

    def _withdraw_keys(self, client_key: bytes) -> None:
        keys = self._keys.pop(client_key, None)
        if keys is not None:
            keys.timer.cancel()
            self._tenants.release(keys.tenant)

    def _wait_for_message(self, handshake: Handshake) -> None:
        """Lets a thread receive the next message of a client, or closes its connection after some seconds."""
        if handshake.has_ended:
            self._forget_handshake(handshake)
        elif self.is_closed:
            self._end_handshake(handshake)
        else:
            handshake.wait(lambda: self._receive(handshake), lambda: self._end_handshake(handshake))

    def _receive(self, handshake: Handshake) -> None:
        handshake.stop_waiting()
        self._run_in_thread(handshake.run, lambda: self._wait_for_message(handshake))

    def _end_handshake(self, handshake: Handshake) -> None:
        """Closes the connection of a client that has not handed memory over, in a thread."""
        handshake.stop_waiting()
        self._run_in_thread(handshake.close, lambda: self._forget_handshake(handshake))

    def _make_room(self) -> None:
        """Ends the oldest waiting handshake of the user that has most of them, if there are too many."""
        waiting = [handshake for handshake in self._handshakes if handshake.is_waiting]
        if len(waiting) > _MAX_HANDSHAKES:
            [(uid, _)] = Counter(handshake.uid for handshake in waiting).most_common(1)
            self._end_handshake(next(handshake for handshake in waiting if handshake.uid == uid))

    def _forget_handshake(self, handshake: Handshake) -> None:
        self._handshakes.pop(handshake, None)
        tenant, handshake.tenant = handshake.tenant, None
        if tenant is not None:
            self._tenants.release(tenant)

    def _listen(self) -> None:
        """Accepts connections, unless too many threads are running."""
        if self._listener is not None and len(self._running) < _MAX_THREADS:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as cause:
            if cause.errno in _OUT_OF_RESOURCES:
                # The connection still waits, so the loop would call this again at once.
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(_RETRY_S, self._listen)
            self._warning.report(f"a client cannot share memory: {cause}")
            return
        self._warning.report(None)
        handshake = Handshake(self, connection)
        self._handshakes[handshake] = None
        self._wait_for_message(handshake)
        self._make_room()

    def _run_in_thread(self, function: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Runs a function that may block, and stops accepting connections while too many threads run."""
        running = start_logged_task(self._run(function), "shared-memory", _log.error, "shared memory was not released")
        self._running.add(running)

        def ended(_: object) -> None:
            self._running.discard(running)
            on_end()
            self._listen()

        running.add_done_callback(ended)
        if self._listener is not None and len(self._running) >= _MAX_THREADS:
            self._loop.remove_reader(self._listener.fileno())

    async def _run(self, function: Callable[[], None]) -> None:
        """Runs a function in a thread; tries again every second where the system lets no thread start."""
        while True:
            try:
                return await run_in_own_thread("shared-memory", function)
            except RuntimeError as cause:
                if not lacks_memory(cause):
                    raise
                self._warning.report(f"no thread for shared memory can be started, trying again: {cause}")
            await asyncio.sleep(_RETRY_S)


def _counted_bytes(size: int) -> int:
    return max(size, _MIN_COUNTED_BYTES)
