"""Takes memory that clients on this host share, and finds it again for their calls.

A caller that is let in gets two keys, and connects with them to a Unix socket of the server's (docs/shared-memory.md).
The memory belongs to the tenant of that call, and the server keeps it until the socket closes. The kernel closes the
socket when either process ends.

Any local process can connect and send a descriptor, and closing such a descriptor can block for as long as its sender
wants. Therefore the event loop never receives from these sockets and never closes them: separate threads do.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.calls import Caller
from gradrule_server.front.tenants import Tenant
from gradrule_server.link import arena
from gradrule_server.link.shared_memory import NAME_BYTES, ClientMemory, NotShareable, lost, shareable_size

_log = logging.getLogger(__name__)

_KEY_BYTES = 16
_KEYS_LAST_S = 10.0
_HANDSHAKE_S = 5.0
# Those of handshakes and those that close connections.
_MAX_THREADS = 64
_BACKLOG = 64
_CLOSING_S = 5.0
_MAX_KEYS_OF_TENANT = 16
# Each memory takes two descriptors, however small it is.
_LEAST_COUNTED_BYTES = 64 << 20
_ACCEPTED, _REFUSED = b"\x00", b"\x01"
# SO_PASSRIGHTS: whether descriptors may be sent to a socket. Linux has it from 6.16 on, Python has no name for it.
_PASS_DESCRIPTORS = 83
_NOTHING_LEFT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RETRY_S = 1.0

T = TypeVar("T")


class Doorkeeper(Protocol):
    """Counts bytes in flight, see `handlers.Door`."""

    def take_in(self, caller: Caller, size: int) -> None: ...

    def let_go(self, caller: Caller, size: int) -> None: ...


class Tenants(Protocol):
    """Keeps tenants at hand, see `tenants.Tenants`."""

    def enter(self, tenant: Tenant) -> None: ...

    def leave(self, tenant: Tenant) -> None: ...


@dataclass(frozen=True, slots=True)
class _Keys:
    """What a caller was given."""

    server_key: bytes
    tenant: Tenant
    timer: asyncio.TimerHandle


class SharedMemories:
    """The memories of all clients. Everything happens on one asyncio loop. `max_bytes`: of all; 0: none are taken."""

    def __init__(self, tenants: Tenants, max_bytes: int) -> None:
        self._tenants = tenants
        self.max_bytes = max_bytes
        self._listener: socket.socket | None = None
        self._keys: dict[bytes, _Keys] = {}
        self._memories: dict[tuple[str, bytes], _Handover] = {}
        self._handshakes: set[_Handshake] = set()
        self._threads = 0
        self._has_warned = False
        self.address = ""

    def start(self) -> None:
        """Listens, if memory is shared and the system can. Belongs to the running loop."""
        if not self.max_bytes or not arena.is_supported():
            return
        address = f"gradrule-{secrets.token_hex(_KEY_BYTES)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.setblocking(False)
            listener.bind("\0" + address)
            _pass_descriptors(listener, False)
            listener.listen(_BACKLOG)
        except OSError as cause:
            listener.close()
            _log.warning("clients on this host cannot share memory: %s", cause)
            return
        self._listener, self.address = listener, address
        self._loop = asyncio.get_running_loop()
        self._listen()

    def close(self) -> None:
        """Gives up all memories; takes no more. Waits until they are given back, but not for ever."""
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        self._loop.remove_reader(listener.fileno())
        for client_key in list(self._keys):
            self._forget(client_key)
        for handshake in list(self._handshakes):
            self.end_handshake(handshake)
        handovers = list(self._memories.values())
        for handover in handovers:
            handover.give_up()

        def release() -> None:
            listener.close()
            for handover in handovers:
                handover.release()

        _in_thread(release).join(_CLOSING_S)
        for handover in handovers:
            handover.on_released()

    def offer(self, caller: Caller) -> evaluate_pb2.ShareMemoryResponse:
        """Returns keys with which the caller's tenant can hand over one memory. UNSUPPORTED."""
        if self._listener is None:
            raise error(
                errors_pb2.ERROR_REASON_UNSUPPORTED,
                "this server shares no memory with clients (--max-shared-bytes 0, or a system without memfd_create)",
            )
        tenant = caller.tenant
        unused = [key for key, keys in self._keys.items() if keys.tenant is tenant]
        if len(unused) >= _MAX_KEYS_OF_TENANT:
            self._forget(unused[0])
        client_key, server_key = secrets.token_bytes(_KEY_BYTES), secrets.token_bytes(_KEY_BYTES)
        timer = asyncio.get_running_loop().call_later(_KEYS_LAST_S, self._forget, client_key)
        self._tenants.enter(tenant)
        self._keys[client_key] = _Keys(server_key, tenant, timer)
        return evaluate_pb2.ShareMemoryResponse(
            address=self.address,
            client_key=client_key,
            server_key=server_key,
            max_bytes=min(self.max_bytes, tenant.quotas["shared_bytes"].limit),
        )

    @contextlib.contextmanager
    def used(self, use: evaluate_pb2.SharedMemoryUse, caller: Caller, door: Doorkeeper) -> Iterator[ClientMemory]:
        """Within this context a call uses a memory, whose bytes count as bytes in flight.

        SHARED_MEMORY_LOST where the caller's tenant has no such memory, INVALID_TENSOR, OVERLOADED.
        """
        handover = self._memories.get((caller.tenant.name, use.memory))
        if handover is None:
            raise lost()
        memory = handover.memory
        if use.answer_offset + use.answer_bytes > memory.size or use.request_bytes > memory.size:
            raise error(
                errors_pb2.ERROR_REASON_INVALID_TENSOR,
                f"the request uses {use.request_bytes} bytes and {use.answer_bytes} bytes at {use.answer_offset} of a "
                f"shared memory of {memory.size} bytes",
                field="shared_memory",
            )
        size = use.request_bytes + use.answer_bytes
        door.take_in(caller, size)
        try:
            yield memory
        except asyncio.CancelledError:
            # An engine may still be at it, and write into what the client would use for another call.
            handover.close()
            raise
        finally:
            door.let_go(caller, size)

    def _forget(self, client_key: bytes) -> _Keys | None:
        """Takes keys back; they are of no use any more."""
        keys = self._keys.pop(client_key, None)
        if keys is not None:
            keys.timer.cancel()
            self._tenants.leave(keys.tenant)
        return keys

    def _listen(self) -> None:
        """Accepts connections, unless as many threads are at work as may be."""
        if self._listener is not None and self._threads < _MAX_THREADS:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as cause:
            if cause.errno in _NOTHING_LEFT:
                # The connection still waits, so the loop would find it again at once.
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(_RETRY_S, self._listen)
            if not self._has_warned:
                self._has_warned = True
                _log.warning("a client cannot share memory: %s", cause)
            return
        self._has_warned = False
        handshake = _Handshake(self, connection)
        self.in_thread(handshake.run, lambda: self.end_handshake(handshake))
        self._handshakes.add(handshake)

    def in_thread(self, work: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Does work that may block in a thread, and calls `on_end` on the loop then. No connections are accepted while
        too many such threads are at work.
        """

        def ended() -> None:
            self._threads -= 1
            on_end()
            self._listen()

        def run() -> None:
            try:
                work()
            finally:
                # The loop may have ended: nothing is left to be told then.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(ended)

        _in_thread(run)
        self._threads += 1
        if self._threads >= _MAX_THREADS and self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())

    def on_loop(self, function: Callable[[], T]) -> T:
        """Calls a function on the loop, from another thread. Raises what it raises, and `TimeoutError`."""
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
            # It was called in the meantime.
            return future.result()

    def redeem(self, handshake: _Handshake, client_key: bytes) -> _Keys | None:
        """Takes the keys that a client shows; the tenant stays at hand if there are any."""
        keys = self._keys.get(client_key)
        if keys is not None:
            self._tenants.enter(keys.tenant)
            handshake.tenant = keys.tenant
            self._forget(client_key)
        return keys

    def end_handshake(self, handshake: _Handshake) -> None:
        """A handshake is over."""
        self._handshakes.discard(handshake)
        tenant, handshake.tenant = handshake.tenant, None
        if tenant is not None:
            self._tenants.leave(tenant)

    def take(self, handshake: _Handshake, fd: int, size: int, connection: socket.socket) -> None:
        """Takes over a descriptor, and the connection that it came by, and tells the client the memory's name.

        Raises `NotShareable` and QUOTA_EXCEEDED; descriptor and connection are the caller's then.
        """
        tenant = handshake.tenant
        if tenant is None:
            raise NotShareable("the server stops")
        counted = max(size, _LEAST_COUNTED_BYTES)
        quota = tenant.quotas["shared_bytes"]
        quota.reserve(counted)
        # The memory keeps the tenant at hand from now on.
        handshake.tenant = None
        memory = ClientMemory(secrets.token_bytes(NAME_BYTES), fd, size)
        key = tenant.name, memory.name

        def released() -> None:
            quota.release(counted)
            self._tenants.leave(tenant)

        handover = _Handover(self, connection, memory, lambda: self._memories.pop(key), released)
        self._memories[key] = handover
        try:
            connection.setblocking(False)
            connection.send(_ACCEPTED + memory.name)
        except OSError as cause:
            _log.debug("a client that shares memory is gone: %s", cause)
            handover.close()


class _Handshake:
    """A connection on which a client has not handed its memory over yet, served in a thread of its own."""

    def __init__(self, memories: SharedMemories, connection: socket.socket) -> None:
        self._memories = memories
        self._connection = connection
        self._ends_at = time.monotonic() + _HANDSHAKE_S
        self.tenant: Tenant | None = None
        """Whose keys were shown. Belongs to the loop."""

    def run(self) -> None:
        """Takes memory, or closes the connection."""
        is_taken = False
        try:
            is_taken = self._is_key_shown() and self._is_memory_taken()
        except (OSError, RuntimeError) as cause:
            # The second: the loop has ended.
            _log.debug("a client shares no memory: %s", cause)
        finally:
            if not is_taken:
                self._connection.close()

    def _await_message(self) -> None:
        self._connection.settimeout(max(self._ends_at - time.monotonic(), 0.001))

    def _is_key_shown(self) -> bool:
        self._await_message()
        # Descriptors that come with it are closed by the kernel, since nothing asks for them.
        client_key = self._connection.recv(_KEY_BYTES + 1)
        keys = self._memories.on_loop(lambda: self._memories.redeem(self, client_key))
        if keys is None:
            return False
        _pass_descriptors(self._connection, True)
        self._connection.send(keys.server_key)
        return True

    def _is_memory_taken(self) -> bool:
        self._await_message()
        data, descriptors, _, _ = socket.recv_fds(self._connection, 1, 1)
        for fd in descriptors:
            is_taken = False
            try:
                os.set_inheritable(fd, False)
                if data:
                    self._take(fd)
                    is_taken = True
            except (NotShareable, GradruleError) as refusal:
                self._connection.send(_REFUSED + str(refusal).encode())
            finally:
                if not is_taken:
                    os.close(fd)
            return is_taken
        return False

    def _take(self, fd: int) -> None:
        memories = self._memories
        size = shareable_size(fd, memories.max_bytes)
        memories.on_loop(lambda: memories.take(self, fd, size, self._connection))


class _Handover:
    """A connection by which memory was taken: the memory lasts as long as it does.

    on_given_up: it can be used no more. on_released: its bytes are given back. Both are called on the loop.
    """

    def __init__(
        self,
        memories: SharedMemories,
        connection: socket.socket,
        memory: ClientMemory,
        on_given_up: Callable[[], object],
        on_released: Callable[[], None],
    ) -> None:
        self.memory = memory
        self.on_released = on_released
        self._memories = memories
        self._connection = connection
        self._on_given_up = on_given_up
        # The client has nothing more to say: whatever comes is the end of the connection, or against the protocol.
        asyncio.get_running_loop().add_reader(connection.fileno(), self.close)

    def close(self) -> None:
        """Gives the memory up, and its bytes back a moment later."""
        if not self.memory.is_closed:
            self.give_up()
            self._memories.in_thread(self.release, self.on_released)

    def give_up(self) -> None:
        """Has nobody use the memory any more."""
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self._on_given_up()
        self.memory.close()

    def release(self) -> None:
        """Closes the connection and gives the memory's bytes back, which may take long."""
        self._connection.close()
        self.memory.release()


def _in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="shared-memory", daemon=True)
    thread.start()
    return thread


def _pass_descriptors(sock: socket.socket, is_allowed: bool) -> None:
    """Allows or forbids others to send descriptors to a socket, where the kernel can do that."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _PASS_DESCRIPTORS, int(is_allowed))
