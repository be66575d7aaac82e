"""Targets of `connect`, and what a client reports that reaches no server."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

import gradrule as gr
from gradrule._rpc import channels
from gradrule.errors import InvalidParamError, UnavailableError
from tests.service.certificates import Authority


@pytest.mark.parametrize(
    ("target", "address"),
    [
        ("localhost", "localhost:8470"),
        ("localhost:9", "localhost:9"),
        ("http://localhost:9/", "localhost:9"),
        ("grpc://host.example", "host.example:8470"),
        ("127.0.0.1", "127.0.0.1:8470"),
        ("::1", "[::1]:8470"),
        ("[::1]", "[::1]:8470"),
        ("[::1]:9", "[::1]:9"),
        ("unix:/run/gradrule", "unix:/run/gradrule"),
        ("dns:///host:9", "dns:///host:9"),
        ("ipv4:10.0.0.1:9,10.0.0.2:9", "ipv4:10.0.0.1:9,10.0.0.2:9"),
    ],
)
def test_targets_get_a_port_and_lose_the_scheme_of_a_url(target: str, address: str) -> None:
    assert channels.endpoint(target, None) == (address, None)
    with gr.connect(target) as client:
        assert client.target == address


@pytest.mark.parametrize("target", ["https://host", "grpcs://host:1"])
def test_https_means_tls(target: str) -> None:
    _, credentials = channels.endpoint(target, None)
    assert credentials is not None
    gr.connect(target, token="secret").close()
    given = gr.tls()
    assert channels.endpoint(target, given)[1] is given


@pytest.mark.parametrize(
    "target", ["", ":8470", "localhost:", "localhost:http", "localhost:99999", "localhost:0", "http://host/path", "a b"]
)
def test_targets_that_are_no_address_are_refused(target: str) -> None:
    with pytest.raises(InvalidParamError, match=r"is not host:port.*'localhost:8470'"):
        gr.connect(target)


def test_a_target_is_text() -> None:
    wrong: Any = 8470
    with pytest.raises(InvalidParamError, match="the target is a text"):
        gr.connect(wrong)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def ports(files: Path) -> Iterator[dict[str, int]]:
    """Ports of servers without and with TLS, and a port at which nothing listens."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    pair = Authority(files, "authority").server("server")
    secret = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.certificate.read_bytes())])
    found = {"plain": server.add_insecure_port("127.0.0.1:0"), "tls": server.add_secure_port("127.0.0.1:0", secret)}
    server.start()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield found | {"nothing": unused.getsockname()[1]}
    server.stop(None)


@pytest.mark.parametrize(
    ("port", "authority", "says"),
    [
        ("nothing", None, r"no server listens at 127\.0\.0\.1:(\d+); start one \(gradrule serve --port \1\), or "),
        ("plain", "authority", r"the server at 127\.0\.0\.1:\d+ does not use TLS; connect without credentials$"),
        ("tls", None, r"127\.0\.0\.1:\d+ closed the connection; if it uses TLS, .*gradrule\.tls"),
        ("tls", "other", r"127\.0\.0\.1:\d+ is not signed by a trusted authority; .*gradrule\.tls\('ca\.pem'\)$"),
    ],
)
def test_a_client_without_a_connection_says_why(
    files: Path, ports: dict[str, int], port: str, authority: str | None, says: str
) -> None:
    Authority(files, "other")
    credentials = None if authority is None else gr.tls(files / f"{authority}.crt")
    with (
        gr.connect(f"127.0.0.1:{ports[port]}", credentials=credentials) as client,
        pytest.raises(UnavailableError, match=says),
    ):
        client.list_rules()


async def test_all_addresses_of_a_target_are_named(ports: dict[str, int]) -> None:
    port = ports["nothing"]
    target = f"ipv4:127.0.0.1:{port},127.0.0.2:{port}"
    says = (
        f"no server listens at {target}; start one (gradrule serve --port {port}), or connect to the address of another"
    )
    graph = gr.Graph()
    graph.placeholder("x", "float32", [])
    with gr.connect(target) as client:
        calls: list[Callable[[], object]] = [
            client.list_rules,
            lambda: client.upload(b"weights"),
            lambda: client.evaluate(graph, feeds={"x": 1.0}, fetches=["x"]),
            # Repeated calls are sent over a stream.
            lambda: client.evaluate(graph, feeds={"x": 1.0}, fetches=["x"]),
        ]
        for call in calls:
            with pytest.raises(UnavailableError) as caught:
                call()
            assert caught.value.message == says
    async with gr.aio.connect(target) as later:
        with pytest.raises(UnavailableError) as caught:
            await later.list_rules()
        assert caught.value.message == says


def test_an_unknown_host_is_named() -> None:
    with gr.connect("host.invalid") as client, pytest.raises(UnavailableError, match=r"host of 'host\.invalid:8470'"):
        client.list_rules()
