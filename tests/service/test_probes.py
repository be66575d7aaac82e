"""The health checks of `--metrics-port`, as Kubernetes calls them: over HTTP, without TLS and without a credential."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPSConnection
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

import gradrule as gr
from tests.processes import engines
from tests.service import loop_graphs
from tests.service.certificates import Authority
from tests.service.guarded import token_command
from tests.service.health import GRADIENTS, NOT_SERVING
from tests.service.servers import STOP_TIMEOUT_S, serve_command, server_environment
from tests.waiting import wait_until


@dataclass
class Probed:
    """Holds a server with TLS and tokens, and asks its health checks."""

    process: subprocess.Popen[bytes]
    target: str
    http_port: int
    metrics_port: int
    authority: Authority
    token: str

    def ask(self, path: str, timeout_s: float = 10.0) -> int | None:
        """Returns the status of an answer; None if there is none, as for a failed probe."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=timeout_s) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refusal:
            return refusal.code
        except OSError:
            return None

    def running_requests(self) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return sum(
            sample.value
            for family in families
            if family.name == "gradrule_engine_running_requests"
            for sample in family.samples
        )

    def evaluate_over_http(self, program: str, x: float) -> int | None:
        """Returns the status of the answer; None if the connection was closed without one."""
        context = ssl.create_default_context(cafile=str(self.authority.file))
        connection = HTTPSConnection("localhost", self.http_port, context=context)
        body = json.dumps({"program": program, "feeds": {"x": x}})
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
        try:
            connection.request("POST", "/v1/evaluate", body, headers)
            return connection.getresponse().status
        except OSError:
            return None
        finally:
            connection.close()

    def grpc_health(self) -> int:
        """Returns the status of `GRADIENTS`."""
        with grpc.secure_channel(self.target, gr.tls(self.authority.file)) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            status: int = stub.Check(health_pb2.HealthCheckRequest(service=GRADIENTS), timeout=10).status
        return status

    def wait_for(self, path: str, status: int) -> None:
        wait_until(lambda: self.ask(path) == status or None, f"status {status} of {path}")

    def connect(self) -> gr.Client:
        return gr.connect(self.target, credentials=gr.tls(self.authority.file), token=self.token)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
    """A server that is starting."""
    folder = tmp_path_factory.mktemp("probed")
    authority = Authority(folder, "authority")
    files = authority.server("server")
    token = token_command("new", "--tenant", "ada", "--file", str(folder / "tokens")).strip()
    port, http_port, metrics_port = free_ports(3)
    flags = {
        "port": port,
        "http-port": http_port,
        "metrics-port": metrics_port,
        "data-dir": folder / "registry",
        "tls-cert": files.certificate,
        "tls-key": files.key,
        "tokens": folder / "tokens",
        "spares": 0,
        "drain-s": 5,
    }
    command = serve_command(*(f"--{name}={value}" for name, value in flags.items()))
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=server_environment()) as process,
    ):
        try:
            yield Probed(process, f"localhost:{port}", http_port, metrics_port, authority, token)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            finally:
                process.kill()


def test_a_starting_server_is_live_and_then_ready(probed: Probed) -> None:
    seen: list[int | None] = []

    def probe() -> bool | None:
        status = probed.ask("/readyz")
        if seen[-1:] != [status]:
            seen.append(status)
        if status == 503:
            assert probed.ask("/livez") == 200
        return True if status == 200 else None

    wait_until(probe, "a ready server")
    # No answer, until the port is open; then no engine; then an engine.
    assert seen[-2:] == [503, 200]
    assert set(seen[:-2]) <= {None}
    # The HTTP gateway, which starts last, is there too.
    socket.create_connection(("127.0.0.1", probed.http_port)).close()


def test_a_server_without_an_engine_is_live_but_not_ready(probed: Probed) -> None:
    probed.wait_for("/readyz", 200)

    def probe() -> bool | None:
        # The next engine may be ready before the probe.
        for engine in engines(probed.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)
        return True if probed.ask("/readyz") == 503 else None

    wait_until(probe, "a server that is not ready")
    assert probed.ask("/livez") == 200
    probed.wait_for("/readyz", 200)


def test_a_front_end_that_does_nothing_is_not_live(probed: Probed) -> None:
    probed.wait_for("/livez", 200)
    os.kill(probed.process.pid, signal.SIGSTOP)
    try:
        assert probed.ask("/livez", timeout_s=0.5) is None
    finally:
        os.kill(probed.process.pid, signal.SIGCONT)
    assert probed.ask("/livez") == 200


def test_a_draining_server_is_live_but_not_ready(probed: Probed) -> None:
    """Must be the last test: it ends the server."""
    probed.wait_for("/readyz", 200)
    with probed.connect() as client, ThreadPoolExecutor() as threads:
        name = client.compile(loop_graphs.endless(), fetches=["y"]).name
        running = threads.submit(probed.evaluate_over_http, name, loop_graphs.ENDLESS)
        wait_until(lambda: probed.running_requests() or None, "a running request")
        probed.process.terminate()
        probed.wait_for("/readyz", 503)
        assert probed.ask("/livez") == 200
        # The gateway still waits for its request, and the gRPC port for the gateway.
        assert probed.grpc_health() == NOT_SERVING
        assert not running.done()
        assert running.result(STOP_TIMEOUT_S) != 200
    assert probed.process.wait(STOP_TIMEOUT_S) == 0
