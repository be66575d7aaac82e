"""The gRPC server: services, health, reflection, limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from gradrule.v1 import admin_pb2
from gradrule_server.front.admin_service import ADMIN_SERVICE, AdminServicer
from gradrule_server.front.blob_service import BLOB_SERVICE, BlobServicer
from gradrule_server.front.connections import ConnectionWatch
from gradrule_server.front.handlers import Door
from gradrule_server.front.health import NOT_SERVING, SERVING, Health
from gradrule_server.front.reflection import Reflection
from gradrule_server.front.services import (
    GRADIENT_SERVICE,
    PROGRAM_SERVICE,
    RULE_SERVICE,
    GradientServicer,
    ProgramServicer,
    RuleServicer,
)
from gradrule_server.front.session_service import SESSION_SERVICE, SessionServicer
from gradrule_server.front.shared_memory import SharedMemoryServer
from gradrule_server.front.tls import Certificates

# Calls that gRPC has read and the event loop has not taken yet, each of 7 to 23 KiB. Beyond the first number gRPC
# cancels some that come, beyond the second all. A client can begin and reset thousands in a second.
_MANY_PENDING, _MOST_PENDING = 20_000, 40_000
_UNLIMITED = -1
# grpc.aio keeps the task that accepts calls to itself.
_ACCEPT_LOOP = "AioServer._server_main_loop"


class AcceptLoopEnded(Exception):
    """gRPC accepts no more calls though nobody stopped it; the message says why."""


@dataclass(frozen=True, slots=True)
class Connections:
    """What one connection may do, and how long. Seconds and bytes; 0 for an age: without end."""

    max_message_bytes: int
    max_metadata_bytes: int
    max_connections: int
    max_connection_streams: int
    handshake_timeout_s: float
    keepalive_s: float
    keepalive_timeout_s: float
    max_age_s: float
    age_grace_s: float

    def options(self) -> list[tuple[str, int]]:
        """gRPC's names for it."""
        keepalive_ms = _ms(self.keepalive_s)
        options = [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", _UNLIMITED),
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_connection_streams),
            # By default gRPC cancels calls at random, without a reason, where a thousand begin at once.
            ("grpc.server.max_pending_requests", _MANY_PENDING),
            ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING),
            ("grpc.server_handshake_timeout_ms", _ms(self.handshake_timeout_s)),
            ("grpc.max_metadata_size", self.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.max_metadata_bytes),
            ("grpc.keepalive_time_ms", keepalive_ms),
            # The first is TCP's, the second how long the answer to a PING may take.
            ("grpc.keepalive_timeout_ms", _ms(self.keepalive_timeout_s)),
            ("grpc.http2.ping_timeout_ms", _ms(self.keepalive_timeout_s)),
            # A client may ping as often as the server itself does, also while it has no call.
            ("grpc.http2.min_ping_interval_without_data_ms", keepalive_ms // 2),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
        if self.max_age_s:
            # gRPC adds or takes up to a tenth, so that not all clients come back at once.
            options += [
                ("grpc.max_connection_age_ms", _ms(self.max_age_s)),
                ("grpc.max_connection_age_grace_ms", _ms(self.age_grace_s)),
            ]
        return options


class Front:
    """The server's face: knows whether an engine is ready, answers health, drains on stop."""

    def __init__(self, connections: Connections, watch: ConnectionWatch | None = None) -> None:
        self._watch = watch or ConnectionWatch()
        self._server = grpc.aio.server(options=connections.options())
        self._accept_loop: asyncio.Task[object] | None = None
        self._is_draining = False
        self._health = Health(self._watch)
        self._health.set(GRADIENT_SERVICE, NOT_SERVING)

    def add_services(
        self,
        door: Door,
        memories: SharedMemoryServer,
        *,
        with_reflection: bool,
        status: Callable[[], admin_pb2.ServerStatus] | None = None,
    ) -> None:
        """Adds gradrule's services, administration if there is a `status` to tell, and reflection if wanted."""
        gradients, blobs = GradientServicer(door, memories), BlobServicer()
        # gRPC asks one service after the other for the handler of a call, so the one that is called most comes first.
        self._server.add_generic_rpc_handlers(
            (
                door.service(GRADIENT_SERVICE, gradients.methods(), streams=gradients.streams()),
                door.service(RULE_SERVICE, RuleServicer().methods()),
                door.service(PROGRAM_SERVICE, ProgramServicer().methods()),
                door.service(SESSION_SERVICE, streams=SessionServicer(door).streams()),
                door.service(BLOB_SERVICE, blobs.methods(), uploads=blobs.uploads()),
            )
        )
        services = [RULE_SERVICE, PROGRAM_SERVICE, GRADIENT_SERVICE, SESSION_SERVICE, BLOB_SERVICE]
        if status is not None:
            self._server.add_generic_rpc_handlers((door.service(ADMIN_SERVICE, AdminServicer(status).methods()),))
            services.append(ADMIN_SERVICE)
        if with_reflection:
            names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            self._server.add_generic_rpc_handlers((Reflection(names, self._watch),))

    async def start(self, address: str, certificates: Certificates | None) -> int:
        """Binds and serves, by TLS where there is a certificate; returns the port. `OSError` where it is taken."""
        self._server.add_generic_rpc_handlers((self._health.handler(),))
        try:
            port: int = (
                self._server.add_insecure_port(address)
                if certificates is None
                else self._server.add_secure_port(address, certificates.credentials())
            )
        except RuntimeError as cause:
            raise OSError(f"cannot listen on {address}: {cause}") from cause
        await self._server.start()
        self._accept_loop = _accept_loop()
        self._watch.start(port)
        return port

    async def run_accept_loop(self) -> None:
        """Waits until gRPC accepts no more calls; raises `AcceptLoopEnded` unless `drain` ended it.

        `wait_for_termination` of gRPC is not enough: while any call is open it goes on after the loop has failed.
        """
        if self._accept_loop is None:
            raise RuntimeError("the server was not started")
        await asyncio.wait({self._accept_loop})
        if self._is_draining:
            return
        failure = None if self._accept_loop.cancelled() else self._accept_loop.exception()
        # The exception's text may hold what a client sent.
        raise AcceptLoopEnded("cancelled" if failure is None else type(failure).__name__)

    def set_ready(self, ready: bool) -> None:
        """Tells health whether an engine is ready."""
        self._health.set(GRADIENT_SERVICE, SERVING if ready else NOT_SERVING)

    async def drain(self, seconds: float) -> None:
        """Says NOT_SERVING, lets running calls finish for at most `seconds`, stops."""
        self._is_draining = True
        self._health.end()
        # In a task of its own: gRPC's coroutine loses the exception that its caller handles (`sys.exc_info()`).
        await asyncio.create_task(self._server.stop(seconds), name="grpc-stop")
        await self._watch.stop()


def _accept_loop() -> asyncio.Task[object]:
    """The task of grpc.aio that accepts calls."""
    for task in asyncio.all_tasks():
        if getattr(task.get_coro(), "__qualname__", "") == _ACCEPT_LOOP:
            return task
    raise RuntimeError(f"this release of grpcio has no task {_ACCEPT_LOOP}, so its end would not be noticed")


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
