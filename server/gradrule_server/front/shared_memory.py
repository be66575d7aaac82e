"""Takes memory that clients on this host share, and finds it again for their calls.

A caller that is let in gets two keys, and connects with them to a Unix socket of the server's (docs/shared-memory.md).
So memory belongs to the tenant of a call, and lasts as long as the socket: whichever side ends, the kernel closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

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
_MAX_HANDSHAKES = 64
_MAX_KEYS_OF_TENANT = 16
# Each memory takes two descriptors, however small it is.
_LEAST_COUNTED_BYTES = 64 << 20
_ACCEPTED, _REFUSED = b"\x00", b"\x01"


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
        self._max_bytes = max_bytes
        self._listener: socket.socket | None = None
        self._keys: dict[bytes, _Keys] = {}
        self._memories: dict[tuple[str, bytes], _Handover] = {}
        self._handshakes: set[_Handshake] = set()
        self.address = ""

    def start(self) -> None:
        """Listens, if memory is shared and the system can. Belongs to the running loop."""
        if not self._max_bytes or not arena.is_supported():
            return
        address = f"gradrule-{secrets.token_hex(_KEY_BYTES)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.setblocking(False)
            listener.bind("\0" + address)
            listener.listen(_MAX_HANDSHAKES)
        except OSError as cause:
            listener.close()
            _log.warning("clients on this host cannot share memory: %s", cause)
            return
        self._listener, self.address = listener, address
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Gives up all memories; takes no more."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for client_key in list(self._keys):
            self._forget(client_key)
        for handshake in list(self._handshakes):
            handshake.close()
        for handover in list(self._memories.values()):
            handover.close()

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
            max_bytes=min(self._max_bytes, tenant.quotas["shared_bytes"].limit),
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

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError as cause:
            if not isinstance(cause, BlockingIOError):
                _log.warning("a client cannot share memory: %s", cause)
            return
        if len(self._handshakes) >= _MAX_HANDSHAKES:
            connection.close()
            return
        self._handshakes.add(_Handshake(self, connection))

    def redeem(self, handshake: _Handshake, client_key: bytes) -> _Keys | None:
        """Takes the keys that a client shows; the tenant stays at hand if there are any."""
        keys = self._keys.get(client_key)
        if keys is not None:
            self._tenants.enter(keys.tenant)
            self._forget(client_key)
        return keys

    def end_handshake(self, handshake: _Handshake, tenant: Tenant | None) -> None:
        """A handshake is over."""
        self._handshakes.discard(handshake)
        if tenant is not None:
            self._tenants.leave(tenant)

    def take(self, tenant: Tenant, fd: int, connection: socket.socket) -> bytes:
        """Takes over a descriptor, and the connection that it came by; returns the memory's name.

        Raises `NotShareable` and QUOTA_EXCEEDED; descriptor and connection are the caller's then.
        """
        size = shareable_size(fd, self._max_bytes)
        counted = max(size, _LEAST_COUNTED_BYTES)
        quota = tenant.quotas["shared_bytes"]
        quota.reserve(counted)
        memory = ClientMemory(secrets.token_bytes(NAME_BYTES), fd, size)
        key = tenant.name, memory.name
        self._tenants.enter(tenant)

        def closed() -> None:
            del self._memories[key]
            memory.close()
            quota.release(counted)
            self._tenants.leave(tenant)

        self._memories[key] = _Handover(connection, memory, closed)
        return memory.name


class _Handshake:
    """A connection on which a client has not handed its memory over yet."""

    def __init__(self, memories: SharedMemories, connection: socket.socket) -> None:
        self._memories = memories
        self._connection: socket.socket | None = connection
        self._tenant: Tenant | None = None
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(connection.fileno(), self._on_message)
        self._timer = loop.call_later(_HANDSHAKE_S, self.close)

    def close(self) -> None:
        """Ends the connection, unless memory was taken by it."""
        connection = self._detached()
        if connection is not None:
            connection.close()

    def _on_message(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            if self._tenant is None:
                self._on_key(connection)
            else:
                self._on_memory(connection, self._tenant)
        except BlockingIOError:
            pass
        except OSError as cause:
            _log.debug("a client that shares memory is gone: %s", cause)
            self.close()

    def _on_key(self, connection: socket.socket) -> None:
        # Descriptors that come with it are closed by the kernel, since nothing asks for them.
        keys = self._memories.redeem(self, connection.recv(_KEY_BYTES + 1))
        if keys is None:
            self.close()
            return
        self._tenant = keys.tenant
        connection.send(keys.server_key)

    def _on_memory(self, connection: socket.socket, tenant: Tenant) -> None:
        data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not data or not descriptors:
            for fd in descriptors:
                os.close(fd)
            self.close()
            return
        try:
            name = self._memories.take(tenant, descriptors[0], connection)
        except (NotShareable, GradruleError, OSError) as refusal:
            os.close(descriptors[0])
            connection.send(_REFUSED + str(refusal).encode())
            self.close()
            return
        self._detached(taken=True)
        connection.send(_ACCEPTED + name)

    def _detached(self, *, taken: bool = False) -> socket.socket | None:
        """The connection, which is not listened to any more."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._timer.cancel()
            if not taken:
                asyncio.get_running_loop().remove_reader(connection.fileno())
            self._memories.end_handshake(self, self._tenant)
        return connection


class _Handover:
    """A connection by which memory was taken: the memory lasts as long as it does."""

    def __init__(self, connection: socket.socket, memory: ClientMemory, on_closed: Callable[[], None]) -> None:
        self.memory = memory
        self._connection = connection
        self._on_closed = on_closed
        self._is_closed = False
        # In place of the handshake's.
        asyncio.get_running_loop().add_reader(connection.fileno(), self._on_message)

    def close(self) -> None:
        """Gives the memory up."""
        if not self._is_closed:
            self._is_closed = True
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            self._connection.close()
            self._on_closed()

    def _on_message(self) -> None:
        # The client has nothing more to say: this is the end of the connection, or against the protocol.
        with contextlib.suppress(BlockingIOError, OSError):
            self._connection.recv(1)
        self.close()
