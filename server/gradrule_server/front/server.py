"""Runs the gRPC server: its services, the limits of its connections, and its TLS certificate."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from gradrule.v1 import admin_pb2
from gradrule_server.concurrency import RepeatedWarning
from gradrule_server.errors import CannotStartError
from gradrule_server.front.connections import ConnectionWatch
from gradrule_server.front.public_services import NOT_SERVING, SERVING, Health, Reflection
from gradrule_server.front.request_pipeline import RequestPipeline
from gradrule_server.front.services import (
    ADMIN_SERVICE,
    BLOB_SERVICE,
    GRADIENT_SERVICE,
    PROGRAM_SERVICE,
    RULE_SERVICE,
    SESSION_SERVICE,
    AdminServicer,
    BlobServicer,
    GradientServicer,
    ProgramServicer,
    RuleServicer,
    SessionServicer,
)
from gradrule_server.front.shared_memory import SharedMemoryServer
from gradrule_server.settings import Settings

_log = logging.getLogger(__name__)

# Calls that wait for the event loop, 7 to 23 KiB each. Above the first number gRPC cancels some new calls, above the
# second all. A client can start and reset thousands of calls per second.
_MANY_PENDING, _MAX_PENDING = 20_000, 40_000
_UNLIMITED = -1
# Clients ping to notice a server that hangs before the deadlines of their calls.
_PING_INTERVAL_MS = 5_000
# Name of the task of grpc.aio that accepts calls, which grpc.aio does not expose.
_ACCEPT_LOOP = "AioServer._server_main_loop"


class CertificateError(CannotStartError):
    """Certificate files cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class _Files:
    chain: bytes
    key: bytes
    client_ca: bytes | None


class Certificates:
    """A certificate with its key, and optionally the authorities of client certificates. Raises `CertificateError`.

    New connections use a renewed certificate; existing connections stay as they are.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._paths = certificate, key, client_ca
        self._warning = RepeatedWarning(_log)
        self._files = self._given = self._read()
        self._check(self._files)

    def credentials(self) -> grpc.ServerCredentials:
        """Returns gRPC credentials that ask for the current certificate whenever a client connects."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._files),
            self._renewed,  # type: ignore[arg-type]  # None says that nothing changed, which the stubs do not know
            require_client_authentication=self._files.client_ca is not None,
        )

    def refresh(self) -> None:
        """Reads the files again, which are small. Blocks.

        Certificate and key are renewed one after the other; until they fit each other the previous ones stay in use.
        """
        try:
            files = self._read()
            if files != self._files:
                self._check(files)
                self._files = files
                _log.info("the certificate was read again")
            self._warning.report(None)
        except CertificateError as cause:
            self._warning.report(f"{cause}; the previous certificate stays in use")

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns the certificate if it has changed since gRPC's last call. Threads of gRPC call this."""
        files = self._files
        if files is self._given:
            return None
        self._given = files
        return _configuration(files)

    def _read(self) -> _Files:
        certificate, key, client_ca = self._paths
        return _Files(_read_file(certificate), _read_file(key), None if client_ca is None else _read_file(client_ca))

    def _check(self, files: _Files) -> None:
        """Raises `CertificateError` for files that gRPC would accept silently although no client could connect."""
        certificate, key, client_ca = self._paths
        try:
            chain = x509.load_pem_x509_certificates(files.chain)
        except ValueError as cause:
            raise CertificateError(f"{certificate} holds no certificate in PEM: {cause}") from cause
        try:
            private = load_pem_private_key(files.key, None)
        except (ValueError, TypeError) as cause:
            raise CertificateError(f"{key} holds no private key in PEM without a password: {cause}") from cause
        form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        if private.public_key().public_bytes(*form) != chain[0].public_key().public_bytes(*form):
            raise CertificateError(f"{key} is not the key of the certificate in {certificate}")
        if files.client_ca is not None:
            try:
                x509.load_pem_x509_certificates(files.client_ca)
            except ValueError as cause:
                raise CertificateError(f"{client_ca} holds no certificates of authorities in PEM: {cause}") from cause


def _configuration(files: _Files) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.chain)], files.client_ca)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        raise CertificateError(f"{path} cannot be read: {cause.strerror or cause}") from cause


class AcceptLoopEnded(Exception):
    """gRPC accepts no more calls although the server was not stopped; the message says why."""


def channel_options(settings: Settings) -> list[tuple[str, int]]:
    """Returns the limits of connections as gRPC channel arguments."""
    keepalive_ms = _ms(settings.keepalive_s)
    options = [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", _UNLIMITED),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.max_concurrent_streams", settings.max_connection_streams),
        # By default gRPC cancels some calls, without a reason, where a thousand start at once.
        ("grpc.server.max_pending_requests", _MANY_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
        ("grpc.server_handshake_timeout_ms", _ms(settings.handshake_timeout_s)),
        ("grpc.max_metadata_size", settings.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_metadata_bytes),
        ("grpc.keepalive_time_ms", keepalive_ms),
        # The first is the timeout of TCP, the second that of a PING.
        ("grpc.keepalive_timeout_ms", _ms(settings.keepalive_timeout_s)),
        ("grpc.http2.ping_timeout_ms", _ms(settings.keepalive_timeout_s)),
        # Clients may ping twice as often as the server, and every 5 s in any case, also while they have no call.
        ("grpc.http2.min_ping_interval_without_data_ms", min(keepalive_ms // 2, _PING_INTERVAL_MS)),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    if settings.max_connection_age_s:
        # gRPC varies this by up to 10 %, so that not all clients reconnect at once.
        options += [
            ("grpc.max_connection_age_ms", _ms(settings.max_connection_age_s)),
            ("grpc.max_connection_age_grace_ms", _ms(settings.max_connection_age_grace_s)),
        ]
    return options


class GrpcServer:
    """The gRPC server: serves the services, reports whether an engine is ready, and drains before it stops."""

    def __init__(self, options: Sequence[tuple[str, int]], watch: ConnectionWatch | None = None) -> None:
        self._watch = watch or ConnectionWatch()
        self._server = grpc.aio.server(options=options)
        self._accept_loop: asyncio.Task[object] | None = None
        self._is_draining = False
        self._health = Health(self._watch)
        self._health.set(GRADIENT_SERVICE, NOT_SERVING)

    def add_services(
        self,
        pipeline: RequestPipeline,
        shared_memory: SharedMemoryServer,
        *,
        with_reflection: bool,
        status: Callable[[], admin_pb2.ServerStatus] | None = None,
    ) -> None:
        """Adds gradrule's services.

        Args:
            pipeline: runs the steps of every call.
            shared_memory: of clients on this host.
            with_reflection: whether to add the reflection service.
            status: returns the state of the server for the admin service; None: no admin service.
        """
        gradients, blobs = GradientServicer(pipeline, shared_memory), BlobServicer()
        # gRPC asks each service in turn for the handler of a call, so the most used service comes first.
        self._server.add_generic_rpc_handlers(
            (
                pipeline.create_service(GRADIENT_SERVICE, gradients.methods(), streams=gradients.streams()),
                pipeline.create_service(RULE_SERVICE, RuleServicer().methods()),
                pipeline.create_service(PROGRAM_SERVICE, ProgramServicer().methods()),
                pipeline.create_service(SESSION_SERVICE, streams=SessionServicer(pipeline).streams()),
                pipeline.create_service(BLOB_SERVICE, blobs.methods(), uploads=blobs.uploads()),
            )
        )
        services = [RULE_SERVICE, PROGRAM_SERVICE, GRADIENT_SERVICE, SESSION_SERVICE, BLOB_SERVICE]
        if status is not None:
            self._server.add_generic_rpc_handlers(
                (pipeline.create_service(ADMIN_SERVICE, AdminServicer(status).methods()),)
            )
            services.append(ADMIN_SERVICE)
        if with_reflection:
            names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            self._server.add_generic_rpc_handlers((Reflection(names, self._watch).handler(),))

    async def start(self, address: str, certificates: Certificates | None) -> int:
        """Starts to serve, with TLS if there is a certificate. Returns the port. Raises `OSError` if it is in use."""
        self._server.add_generic_rpc_handlers((self._health.handler(),))
        try:
            port: int = (
                self._server.add_insecure_port(address)
                if certificates is None
                else self._server.add_secure_port(address, certificates.credentials())
            )
        except RuntimeError as cause:
            raise OSError(f"cannot listen on {address}: {_why_taken(address) or cause}") from cause
        await self._server.start()
        self._accept_loop = _find_accept_loop()
        self._watch.start(port)
        return port

    async def run_accept_loop(self) -> None:
        """Waits until gRPC accepts no more calls; raises `AcceptLoopEnded` unless `drain` was called.

        gRPC's `wait_for_termination` is not enough: it continues after a failure while any call is open.
        """
        if self._accept_loop is None:
            raise RuntimeError("the server was not started")
        await asyncio.wait({self._accept_loop})
        if self._is_draining:
            return
        failure = None if self._accept_loop.cancelled() else self._accept_loop.exception()
        # Only the type: the exception's text may hold what a client sent.
        raise AcceptLoopEnded("cancelled" if failure is None else type(failure).__name__)

    def set_ready(self, ready: bool) -> None:
        """Changes the health status of `GradientService`."""
        self._health.set(GRADIENT_SERVICE, SERVING if ready else NOT_SERVING)

    @property
    def is_ready(self) -> bool:
        """Whether the health status of `GradientService` is SERVING."""
        return self._health.is_serving(GRADIENT_SERVICE)

    def end_health(self) -> None:
        """Reports NOT_SERVING permanently, for all services."""
        self._health.end()

    async def drain(self, seconds: float) -> None:
        """Reports NOT_SERVING, waits at most `seconds` for running calls, and stops."""
        self._is_draining = True
        self.end_health()
        # In a separate task: gRPC's coroutine clears `sys.exc_info()`, which the caller may be handling.
        await asyncio.create_task(self._server.stop(seconds), name="grpc-stop")
        await self._watch.stop()


def _why_taken(address: str) -> str:
    """Returns why an address cannot be listened on, which gRPC does not say; empty if that is over by now."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, where = found[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen()
    except OSError as cause:
        remedy = "; choose another port: --port" if cause.errno == errno.EADDRINUSE else ""
        return f"{cause.strerror}{remedy}"
    return ""


def _find_accept_loop() -> asyncio.Task[object]:
    """Returns the task of grpc.aio that accepts calls."""
    for task in asyncio.all_tasks():
        if getattr(task.get_coro(), "__qualname__", "") == _ACCEPT_LOOP:
            return task
    raise RuntimeError(f"this release of grpcio has no task {_ACCEPT_LOOP}, so its end would not be noticed")


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
