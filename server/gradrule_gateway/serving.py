"""Runs the gateway: socket, TLS, timeouts of connections, signals."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import uvicorn

from gradrule.errors import InvalidParamError
from gradrule_gateway import logs
from gradrule_gateway.app import create_app
from gradrule_gateway.connections import Connection, Connections, Listener
from gradrule_gateway.converters import Converters
from gradrule_gateway.guard import MAX_HEADER_BYTES, Limits
from gradrule_gateway.upstream import Upstream

_log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75.0
_BACKLOG = 512
# The server's connection, processes and files of the gateway itself.
_OWN_DESCRIPTORS = 64
# The parent's end is noticed by polling, because other children of the parent inherit its pipes.
_PARENT_CHECK_S = 0.25
_RENEWAL_CHECK_S = 1.0
READY = "gradrule gateway: listening on "
"""What the line starts with that says the address."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a gateway.

    Attributes:
        target: Address of the server, `host:port`.
        read_credentials: Reads the TLS credentials for the server (None: not encrypted), and the name in the server's
            certificate (empty: the host of the target).
        credential_files: The files that `read_credentials` reads.
        insecure_tokens: Send tokens unencrypted to a server on another machine.
        host: Address to listen on.
        port: Port to listen on; 0: a free one.
        tls_cert: File of the gateway's certificate chain, PEM; empty: HTTP without TLS.
        tls_key: File of its private key, PEM.
        limits: Limits on requests.
        drain_s: Time that running requests get to finish after SIGTERM, seconds.
        log_level: Lowest level of lines in the log.
        log_format: `json`, `text` or `auto`.
        parent: Process id of the server that started the gateway, which ends with it; 0: none.
    """

    target: str
    read_credentials: Callable[[], tuple[grpc.ChannelCredentials | None, str]] = lambda: (None, "")
    credential_files: tuple[str, ...] = ()
    insecure_tokens: bool = False
    host: str = "127.0.0.1"
    port: int = 8480
    tls_cert: str = ""
    tls_key: str = ""
    limits: Limits = field(default_factory=Limits)
    drain_s: float = 20.0
    log_level: str = "info"
    log_format: logs.Form = "auto"
    parent: int = 0


def run(settings: Settings) -> int:
    """Serves until SIGTERM or SIGINT, then drains; returns the exit code.

    Raises:
        OSError: The address cannot be listened on, or a file of TLS cannot be read.
        InvalidParamError: The address of the server is not valid.
    """
    logs.configure(settings.log_level, settings.log_format)
    listener = _listen(settings.host, settings.port)
    with listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(settings, listener))
    return 0


def name_in(certificate: str) -> str:
    """Returns a name that a certificate is valid for. Raises `OSError`. Needs the package cryptography."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        found = x509.load_pem_x509_certificate(Path(certificate).read_bytes())
        extensions = found.extensions
    except ValueError as failure:
        raise OSError(f"{certificate} has no valid certificate: {failure}") from None
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        common = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(common[0].value) if common else ""
    dns = names.get_values_for_type(x509.DNSName)
    if dns:
        # A wildcard stands for any one label.
        return dns[0].replace("*", "gateway", 1)
    addresses = names.get_values_for_type(x509.IPAddress)
    return str(addresses[0]) if addresses else ""


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns what makes uvloop's event loop, which the server has too; None: asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _listen(host: str, port: int) -> socket.socket:
    host = host.removeprefix("[").removesuffix("]")
    is_any = host == "::"
    if is_any and not socket.has_dualstack_ipv6():
        # The machine has no IPv6.
        host, is_any = "0.0.0.0", False
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    # With this protocol, asyncio sends small answers at once; otherwise clients wait 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if is_any:
            # It accepts IPv4 too.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as failure:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {failure.strerror or failure}") from failure
    return listener


def _allow_connections(count: int) -> int:
    """Raises the limit of open files, often 1024, so that `count` clients fit; returns how many fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OWN_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return count
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        _log.warning("%d files may be open (ulimit -n), but --max-connections %d needs %d", allowed, count, wanted)
    return max(1, allowed - _OWN_DESCRIPTORS)


async def _serve(settings: Settings, listener: socket.socket) -> None:
    files = _TlsFiles(settings)
    upstream = Upstream(settings.target, *settings.read_credentials())
    converters = Converters()
    connections = Connections(_allow_connections(settings.limits.max_connections), settings.limits.idle_s)
    app = create_app(upstream, converters, settings.limits, connections, insecure_tokens=settings.insecure_tokens)
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=int(_KEEP_ALIVE_S),
        timeout_graceful_shutdown=int(settings.drain_s),
        ssl_certfile=settings.tls_cert or None,
        ssl_keyfile=settings.tls_key or None,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        config.load()
    except ssl.SSLError as failure:
        raise OSError(f"the TLS certificate or its key is not valid: {failure.reason or failure}") from failure
    host, port = listener.getsockname()[:2]
    where = f"http{'s' if settings.tls_cert else ''}://{f'[{host}]' if ':' in host else host}:{port}"
    server = _Server(config, connections, f"{READY}{where}")
    watches = [asyncio.ensure_future(_end_with(settings.parent, server))] if settings.parent else []
    if files.paths:
        watches.append(asyncio.ensure_future(files.follow(config.ssl, upstream)))
    try:
        await server.serve(sockets=[listener])
    finally:
        for watch in watches:
            watch.cancel()
        converters.stop()
        await upstream.close()


async def _end_with(parent: int, server: uvicorn.Server) -> None:
    while os.getppid() == parent:
        await asyncio.sleep(_PARENT_CHECK_S)
    server.should_exit = True


class _TlsFiles:
    """The files of TLS, which are read again when they are renewed, while connections and requests go on."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.paths = [path for path in (settings.tls_cert, settings.tls_key, *settings.credential_files) if path]
        # Before the files are read: a renewal meanwhile must be noticed.
        self._seen = self._stamps()

    async def follow(self, context: ssl.SSLContext | None, upstream: Upstream) -> None:
        """Lets new connections use renewed files. `context`: That of clients; None: no TLS."""
        problem = ""
        while True:
            await asyncio.sleep(_RENEWAL_CHECK_S)
            found = self._stamps()
            if found == self._seen:
                continue
            try:
                self._renew(context)
                credentials, server_name = self._settings.read_credentials()
                if credentials is not None:
                    await upstream.reconnect(credentials, server_name)
            except TimeoutError:
                failure = "no connection to the server was established with them"
            except (OSError, InvalidParamError) as cause:
                # Certificate and key are replaced one after the other.
                failure = str(cause)
            else:
                self._seen, problem = found, ""
                _log.info("the files of TLS were read again")
                continue
            if failure != problem:
                problem = failure
                _log.warning("changed files of TLS are not used yet: %s; trying again every second", problem)

    def _renew(self, context: ssl.SSLContext | None) -> None:
        if context is None:
            return
        files = self._settings.tls_cert, self._settings.tls_key
        # In a context of its own first: a failure leaves a context without a key.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files)
        context.load_cert_chain(*files)

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self.paths]


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        # A file that is being replaced.
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


class _Server(uvicorn.Server):
    """A server that counts connections when it accepts them, prints its address, and leaves the exit code."""

    def __init__(self, config: uvicorn.Config, connections: Connections, ready: str) -> None:
        super().__init__(config)
        self._connections = connections
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn itself listens on none.
        await super().startup([])
        listeners: list[Any] = self.servers
        listeners += [Listener(each, self._connections, self._create, self.config.ssl) for each in sockets or []]
        print(self._ready, flush=True)

    def _create(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state, connections=self._connections)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        # uvicorn raises the signal again after the shutdown, which would end the process with the signal's code.
        self._captured_signals.clear()
