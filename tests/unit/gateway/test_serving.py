"""Connections that send their headers slowly, or not at all, are closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from gradrule_gateway import connections
from gradrule_gateway.connections import Connection, Connections


async def answer_ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the port of a server that waits a twentieth of a second for headers."""
    monkeypatch.setattr(connections, "_HEADER_S", 0.05)
    config = uvicorn.Config(answer_ok, ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()

    opened = Connections(max_open=8, idle_s=10)

    def protocol() -> Connection:
        return Connection(config, ServerState(), {}, connections=opened)

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: local"], ids=["nothing", "a part"])
async def test_slow_headers(port: int, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


async def test_slow_headers_of_the_second_request(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
    writer.write(b"GET / HT")
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
