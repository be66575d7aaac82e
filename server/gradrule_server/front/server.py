"""The gRPC server: services, health, reflection, limits."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gradrule.v1 import admin_pb2
from gradrule_server.front.admin_service import ADMIN_SERVICE, AdminServicer
from gradrule_server.front.blob_service import BLOB_SERVICE, BlobServicer
from gradrule_server.front.handlers import Door
from gradrule_server.front.services import (
    GRADIENT_SERVICE,
    PROGRAM_SERVICE,
    RULE_SERVICE,
    GradientServicer,
    ProgramServicer,
    RuleServicer,
)
from gradrule_server.front.session_service import SESSION_SERVICE, SessionServicer
from gradrule_server.programs.handles import HandleHouse
from gradrule_server.programs.house import ProgramHouse
from gradrule_server.programs.sessions import SessionHouse
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.rules import RuleRegistry

_UNLIMITED = -1
_HANDSHAKE_TIMEOUT_MS = 10_000
_MAX_METADATA_BYTES = 8 * 1024
_KEEPALIVE_MS = 30_000


class Front:
    """The server's face: knows whether an engine is ready, answers health, drains on stop."""

    def __init__(self, max_message_bytes: int) -> None:
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", _UNLIMITED),
                ("grpc.so_reuseport", 0),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
                ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
                ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
                # A client may ping as often as the server itself does, also while it has no call.
                ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add_services(
        self,
        rules: RuleRegistry,
        house: ProgramHouse,
        handles: HandleHouse,
        sessions: SessionHouse,
        blobs: BlobStore,
        door: Door,
        *,
        with_reflection: bool,
        status: Callable[[], admin_pb2.ServerStatus] | None = None,
    ) -> None:
        """Adds gradrule's services, administration if there is a `status` to tell, and reflection if wanted."""
        gradients = GradientServicer(house, handles, door)
        blob_servicer = BlobServicer(blobs)
        self._server.add_generic_rpc_handlers(
            (
                door.service(RULE_SERVICE, RuleServicer(rules, house).methods()),
                door.service(PROGRAM_SERVICE, ProgramServicer(house).methods()),
                door.service(GRADIENT_SERVICE, gradients.methods(), streams=gradients.streams()),
                door.service(SESSION_SERVICE, streams=SessionServicer(sessions, door).streams()),
                door.service(BLOB_SERVICE, blob_servicer.methods(), uploads=blob_servicer.uploads()),
            )
        )
        services = [RULE_SERVICE, PROGRAM_SERVICE, GRADIENT_SERVICE, SESSION_SERVICE, BLOB_SERVICE]
        if status is not None:
            self._server.add_generic_rpc_handlers((door.service(ADMIN_SERVICE, AdminServicer(status).methods()),))
            services.append(ADMIN_SERVICE)
        if with_reflection:
            names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)

    async def start(self, address: str) -> int:
        """Binds and serves; returns the port. `OSError` where the address is taken."""
        try:
            port: int = self._server.add_insecure_port(address)
        except RuntimeError as cause:
            raise OSError(f"cannot listen on {address}: {cause}") from cause
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)
        await self._server.start()
        return port

    async def set_ready(self, ready: bool) -> None:
        """Tells health whether an engine is ready."""
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(GRADIENT_SERVICE, serving if ready else not_serving)

    async def drain(self, seconds: float) -> None:
        """Says NOT_SERVING, lets running calls finish for at most `seconds`, stops."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(seconds)
