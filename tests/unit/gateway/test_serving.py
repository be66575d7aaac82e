"""Tests the limits on connections (slow headers, unread answers, their number), and the names in certificates."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import json
import socket
import ssl
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from uvicorn.server import ServerState

from gradrule_gateway import connections
from gradrule_gateway.connections import Connection, Connections, Listener
from gradrule_gateway.serving import _listen, _loop_factory, name_in
from tests.service.certificates import Authority
from tests.waiting import wait_for_condition

ANSWERED = asyncio.Event()
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def answer_ok(scope: Any, receive: Any, send: Any) -> None:
    """Answers with as many MiB as the path says."""
    name = scope["path"].removeprefix("/")
    if name == "never":
        # Begins its answer, and waits for the body.
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    size = int(name or "0")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (size << 20))]})
    for _ in range(size):
        await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
    await send({"type": "http.response.body"})
    ANSWERED.set()


@pytest.fixture
def opened() -> Connections:
    """Returns the connections of the server: at most three of one address."""
    return Connections(max_open=12, idle_s=30)


@pytest.fixture
async def port(opened: Connections) -> Any:
    """Returns the port of a server."""
    ANSWERED.clear()
    config = uvicorn.Config(answer_ok, ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()

    with listening(config, opened) as port:
        yield port


@contextlib.contextmanager
def listening(config: uvicorn.Config, opened: Connections, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serves for the `with` statement; returns the port."""
    state = ServerState()
    with _listen("127.0.0.1", 0) as accepting:
        listener = Listener(accepting, opened, lambda: Connection(config, state, {}, connections=opened), context)
        yield accepting.getsockname()[1]
        listener.close()


@contextlib.contextmanager
def listening_with_tls(opened: Connections, tmp_path: Path) -> Iterator[tuple[int, ssl.SSLContext]]:
    """Serves with TLS for the `with` statement; returns the port, and the context of its clients."""
    authority = Authority(tmp_path, "authority")
    files = authority.server("localhost")
    config = uvicorn.Config(
        answer_ok,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        ssl_certfile=files.certificate,
        ssl_keyfile=files.key,
    )
    config.load()
    with listening(config, opened, config.ssl) as port:
        yield port, ssl.create_default_context(cafile=str(authority.file))


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: local"], ids=["nothing", "a part"])
async def test_slow_headers(port: int, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HEADER_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


async def test_slow_headers_of_the_second_request(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    monkeypatch.setattr(connections, "_HEADER_S", 0.05)
    writer.write(b"GET / HT")
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


async def test_an_answer_that_is_not_read_does_not_stay_in_memory(port: int, opened: Connections) -> None:
    opened.idle_s = 0.2
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(REQUEST.replace(b"/", b"/64", 1))
    # `send` returns when the connection is closed: the system's buffers are smaller than 64 MiB.
    await asyncio.wait_for(ANSWERED.wait(), 30)
    received = 0
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 20):
            received += len(part)
    assert received < 64 << 20
    writer.close()


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (b"GARBAGE\r\n\r\n", 400, "illegal request line"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "multiple Host"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "Content-Length"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n", 501, "Transfer-Encoding"),
    ],
)
async def test_what_is_not_http_is_answered_with_a_problem(port: int, text: bytes, status: int, said: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    head, _, body = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"content-type: application/problem+json" in head
    assert b"x-content-type-options: nosniff" in head
    problem = json.loads(body)
    assert (problem["status"], problem["reason"]) == (status, "MALFORMED_REQUEST")
    assert said in problem["detail"]
    writer.close()


async def test_a_new_connection_replaces_the_one_that_was_idle_longest(port: int) -> None:
    clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    # The first one has had the latest request.
    for reader, writer in (*clients[1:], clients[0]):
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\n")
    new_reader, new_writer = await asyncio.open_connection("127.0.0.1", port)
    new_writer.write(REQUEST)
    assert (await new_reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(clients[1][0].read(), 30) == b""
    for reader, writer in (clients[0], clients[2]):
        writer.write(REQUEST)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    for _, writer in (*clients, (new_reader, new_writer)):
        writer.close()


def run_as_gateway(check: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine in the event loop that the gateway has: uvloop's closes handshakes in another way."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(check)


def test_connections_count_before_their_handshake(opened: Connections, tmp_path: Path) -> None:
    async def check() -> None:
        with listening_with_tls(opened, tmp_path) as (port, context):
            await open_silent_connections(opened, port, context)

    run_as_gateway(check())


async def open_silent_connections(opened: Connections, port: int, context: ssl.SSLContext) -> None:
    """Opens more than one address may have, and then sends a request."""
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
    # Only a quarter of twelve is open; the oldest were closed.
    await wait_for_condition(lambda: opened.closed["address"] == 2)
    assert len(opened.open) == 3
    for reader, _ in silent[:2]:
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 30) == b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    writer.write(REQUEST)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    for _, each in (*silent, (reader, writer)):
        each.close()


def test_handshakes_have_a_time_limit(opened: Connections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HANDSHAKE_S", 0.05)

    async def check() -> None:
        with listening_with_tls(opened, tmp_path) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 30) == b""
            await wait_for_condition(lambda: not opened.open)
            writer.close()

    run_as_gateway(check())
    assert opened.closed["handshake"] == 1


async def test_connections_with_unfinished_bodies_are_closed_for_new_ones(port: int, opened: Connections) -> None:
    head = b"POST /never HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n1"
    clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    for reader, writer in clients:
        writer.write(head)
        await reader.readuntil(b"\r\n\r\n")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    with contextlib.suppress(ConnectionError):
        assert b"HTTP" not in await asyncio.wait_for(clients[0][0].read(), 30)
    assert [each[0].at_eof() for each in clients[1:]] == [False, False]
    for _, each in (*clients, (reader, writer)):
        each.close()


async def test_accepting_goes_on_after_a_lack_of_descriptors(
    opened: Connections, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files")]
    accept = socket.socket.accept

    def fail_once(listening: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", fail_once)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).startswith(b"HTTP/1.1 200")
    assert opened.closed["system"] == 1
    writer.close()


class Fake:
    """A connection that only counts whether it was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def abort(self) -> None:
        self.is_closed = True


def add(opened: Connections, address: str, *, is_busy: bool = False) -> Any:
    found: Any = Fake()
    if not opened.add(found, address):
        found.abort()
    elif is_busy:
        opened.set_waiting(found, False)
    return found


def test_limits_on_connections() -> None:
    opened = Connections(max_open=8, idle_s=1)
    busy = [add(opened, "192.0.2.1", is_busy=True) for _ in range(2)]
    # One address may have a quarter, and connections in use are not closed.
    assert add(opened, "192.0.2.1").is_closed
    assert not any(each.is_closed for each in busy)
    # A client has a whole network of IPv6.
    old = [add(opened, f"2001:db8::{number}") for number in range(3)]
    assert [each.is_closed for each in old] == [True, False, False]
    others = [add(opened, f"192.0.2.{number}") for number in range(2, 7)]
    # Nine connections: the oldest idle one of all addresses is closed.
    assert [each.is_closed for each in (*old[1:], *others)] == [True, *[False] * 6]
    opened.remove(busy[0])
    assert not add(opened, "192.0.2.1").is_closed


def test_certificate_whose_names_cannot_be_read_is_named(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "server")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now)
    names = x509.UnrecognizedExtension(x509.SubjectAlternativeName.oid, b"no list of names")
    signed = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    file = tmp_path / "certificate"
    for content in (signed.public_bytes(Encoding.PEM), b"no certificate"):
        file.write_bytes(content)
        # The gateway goes on with its last certificate after this error.
        with pytest.raises(OSError, match=f"{file} has no valid certificate"):
            name_in(str(file))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::", "[::]"])
def test_all_addresses_are_those_of_ipv4_and_ipv6(host: str) -> None:
    with _listen(host, 0) as listener:
        port = listener.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, port), 10).close()


def test_all_addresses_are_those_of_ipv4_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with _listen("::", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_connections_of_ipv4_to_a_socket_of_ipv6_are_counted_by_address(opened: Connections) -> None:
    def add(host: str) -> bool:
        connection: Any = object()
        is_added = opened.add(connection, host)
        if is_added:
            opened.set_waiting(connection, False)
        return is_added

    assert [add(f"::ffff:192.0.2.{number}") for number in range(5)] == [True] * 5
    assert [add("::ffff:192.0.2.1") for _ in range(3)] == [True, True, False]
    assert [add(f"2001:db8::{number}") for number in range(4)] == [True, True, True, False]
