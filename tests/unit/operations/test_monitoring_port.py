"""Tests the HTTP port of metrics and health checks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gradrule_server.operations.metrics import Metrics
from gradrule_server.operations.monitoring_port import MonitoringPort
from tests.unit.operations.records import make
from tests.unit.operations.states import sources


@dataclass
class Served:
    """Holds the metrics and the port that they are served on; `is_ready` is what the server says of itself."""

    metrics: Metrics
    port: int
    is_ready: bool = True


@pytest.fixture
async def page() -> AsyncIterator[Served]:
    metrics = Metrics()
    found = Served(metrics, 0)
    served = MonitoringPort(
        metrics.registry,
        lambda: metrics.set_state(sources(), audit_dropped=0),
        lambda: found.is_ready,
    )
    await served.start("127.0.0.1", 0)
    assert served._server is not None
    found.port = served._server.sockets[0].getsockname()[1]
    yield found
    await served.stop()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_all_addresses_are_those_of_ipv4_and_ipv6() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    served = MonitoringPort(Metrics().registry, lambda: None, lambda: True)
    await served.start("::", port)
    for host in ("127.0.0.1", "::1"):
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
    await served.stop()


async def ask(port: int, request: bytes) -> tuple[str, str, str]:
    """Status line, head and body of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = (await asyncio.wait_for(reader.read(), 60)).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    status, _, rest = head.partition("\r\n")
    return status, rest, body


async def test_metrics_are_served_as_text(page: Served) -> None:
    make(page.metrics, rpc="A/B")
    status, head, body = await ask(page.port, b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: text/plain\r\n\r\n")
    assert status == "HTTP/1.1 200 OK"
    assert f"Content-Length: {len(body)}" in head
    families = {family.name for family in text_string_to_metric_families(body)}
    assert {"gradrule_requests", "gradrule_engine_up", "process_resident_memory_bytes"} <= families


async def test_metrics_are_served_as_openmetrics(page: Served) -> None:
    accept = b"Accept: application/openmetrics-text; version=1.0.0\r\n"
    status, head, body = await ask(page.port, b"GET /metrics HTTP/1.1\r\n" + accept + b"\r\n")
    assert status.endswith("200 OK")
    assert "openmetrics" in head
    assert body.endswith("# EOF\n")


async def test_readiness_follows_the_server_and_liveness_does_not(page: Served) -> None:
    # The kubelet sends HTTP/1.1 with several headers; /livez?verbose is a habit from the API server of Kubernetes.
    for ready, expected in ((True, "200 OK"), (False, "503 Service Unavailable"), (True, "200 OK")):
        page.is_ready = ready
        request = b"GET /readyz HTTP/1.1\r\nHost: 10.0.0.1:9470\r\nUser-Agent: kube-probe/1.32\r\nAccept: */*\r\n\r\n"
        status, _, body = await ask(page.port, request)
        assert status == f"HTTP/1.1 {expected}"
        assert (body == "ok\n") == ready
        assert (await ask(page.port, b"GET /livez?verbose HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"GET /metricsx HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
        (b"\xff\xfe\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
        (b"x" * 100_000, ""),
    ],
)
async def test_other_http_requests_are_refused(page: Served, request_: bytes, status: str) -> None:
    try:
        answered = (await ask(page.port, request_))[0]
    except ConnectionError:
        answered = ""
    assert answered == status
    assert (await ask(page.port, b"GET /metrics HTTP/1.0\r\n\r\n"))[0].endswith("200 OK")


async def test_silent_connections_keep_no_probe_out(page: Served) -> None:
    silent = [await asyncio.open_connection("127.0.0.1", page.port) for _ in range(40)]
    assert (await ask(page.port, b"GET /livez HTTP/1.1\r\n\r\n"))[0].endswith("200 OK")
    # The oldest ones were closed to make room.
    oldest, _ = silent[0]
    assert await asyncio.wait_for(oldest.read(), 60) == b""
    youngest, _ = silent[-1]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(youngest.read(), 0.05)
    for _, writer in silent:
        writer.close()
