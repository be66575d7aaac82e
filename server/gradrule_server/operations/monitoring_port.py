"""Serves metrics for Prometheus and health checks for Kubernetes over HTTP/1.1, without TLS and credentials.

The port is for the operator's own network. A probe of Kubernetes speaks no gRPC over TLS, so the health checks are here
and work the same with and without TLS and credentials.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

_log = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 16 * 1024
_MAX_CONNECTIONS = 32
_TIMEOUT_S = 10.0
_TEXT = "text/plain; charset=utf-8"
_PATHS = b"paths: /metrics, /livez, /readyz\n"


class MonitoringPort:
    """Serves three paths, on a loopback address by default.

    - `/metrics`: the metrics of the registry.
    - `/livez`: 200 as long as the event loop of the front end runs.
    - `/readyz`: 200 if the server accepts calls, otherwise 503.

    prometheus_client's own server starts a thread for each connection without a limit or a time-out, and serves any
    path.

    Args:
        registry: Metrics to serve.
        refresh: Called on the event loop before the metrics are read.
        is_ready: Returns whether the server accepts calls.
    """

    def __init__(self, registry: CollectorRegistry, refresh: Callable[[], None], is_ready: Callable[[], bool]) -> None:
        self._registry = registry
        self._refresh = refresh
        self._is_ready = is_ready
        self._server: asyncio.Server | None = None
        # The keys are ordered: oldest first.
        self._connections: dict[asyncio.Task[None], None] = {}

    async def start(self, host: str, port: int) -> None:
        """Binds the address and starts to serve. Raises `OSError` if the address is in use."""
        try:
            # A socket of :: has IPv6 only in asyncio; without a host it opens one for IPv4 and one for IPv6.
            hosts = None if host == "::" else host
            self._server = await asyncio.start_server(self._accept, hosts, port, limit=_MAX_HEAD_BYTES)
        except OSError as cause:
            raise OSError(f"cannot serve metrics on {host}:{port}: {cause}") from cause

    async def stop(self) -> None:
        """Stops serving, and closes open connections."""
        if self._server is not None:
            self._server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            # Idle connections must not make probes fail, because Kubernetes would restart the server.
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._serve(reader, writer), name="monitoring")
        self._connections[task] = None
        task.add_done_callback(lambda done: self._connections.pop(done, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request, and closes the connection."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer(head))
                await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as cause:
            _log.debug("a request for metrics or health was not finished: %r", cause)
        except Exception:
            _log.exception("a request for metrics or health failed")
            with contextlib.suppress(ConnectionError):
                writer.write(_response("500 Internal Server Error", _TEXT, b"the server failed\n"))
        finally:
            writer.close()

    async def _answer(self, head: bytes) -> bytes:
        first, *lines = head.decode("latin-1").split("\r\n")
        method, _, rest = first.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method != "GET":
            return _response("405 Method Not Allowed", _TEXT, b"only GET\n", "Allow: GET")
        if path == "/livez":
            return _response("200 OK", _TEXT, b"ok\n")
        if path == "/readyz":
            if self._is_ready():
                return _response("200 OK", _TEXT, b"ok\n")
            return _response("503 Service Unavailable", _TEXT, b"the server starts or drains, or no engine is ready\n")
        if path != "/metrics":
            return _response("404 Not Found", _TEXT, _PATHS)
        accept = next((line.partition(":")[2].strip() for line in lines if line.lower().startswith("accept:")), "")
        encode, content_type = choose_encoder(accept)
        self._refresh()
        # Encoding thousands of lines takes long, so it must not block the event loop.
        body = await asyncio.to_thread(encode, self._registry)
        return _response("200 OK", content_type, body)


def _response(status: str, content_type: str, body: bytes, *more: str) -> bytes:
    lines = (f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *more)
    return "\r\n".join((*lines, "Connection: close", "", "")).encode("latin-1") + body
