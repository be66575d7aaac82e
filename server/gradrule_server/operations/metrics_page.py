"""Serves the metrics for Prometheus: `GET /metrics` over HTTP/1.1, nothing else.

The page has neither TLS nor credentials, and is bound to a loopback address by default. prometheus_client's own server
is not used: it starts a thread for each connection without a limit or a time-out, and serves any path.
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


class MetricsPage:
    """Serves the metrics of a registry. `refresh` is called on the event loop before each response."""

    def __init__(self, registry: CollectorRegistry, refresh: Callable[[], None]) -> None:
        self._registry = registry
        self._refresh = refresh
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> None:
        """Binds the address and starts to serve. Raises `OSError` if the address is in use."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=_MAX_HEAD_BYTES)
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
            writer.close()
            return
        task = asyncio.create_task(self._serve(reader, writer), name="metrics")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request, and closes the connection."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer(head))
                await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as cause:
            _log.debug("a request for the metrics was not finished: %r", cause)
        except Exception:
            _log.exception("a request for the metrics failed")
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
        if path != "/metrics":
            return _response("404 Not Found", _TEXT, b"metrics are at /metrics\n")
        accept = next((line.partition(":")[2].strip() for line in lines if line.lower().startswith("accept:")), "")
        encode, content_type = choose_encoder(accept)
        self._refresh()
        # Encoding thousands of lines takes long, so it must not block the event loop.
        body = await asyncio.to_thread(encode, self._registry)
        return _response("200 OK", content_type, body)


def _response(status: str, content_type: str, body: bytes, *more: str) -> bytes:
    lines = (f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *more)
    return "\r\n".join((*lines, "Connection: close", "", "")).encode("latin-1") + body
