"""`gradrule serve --http-port`: a gateway process beside the server, which lives and ends with it."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
from concurrent import futures
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

import gradrule as gr
from gradrule_server.settings import Settings, SettingsError
from tests.service import loop_graphs
from tests.service.certificates import Authority
from tests.service.gateways import read
from tests.service.graph_defs import sign_graph
from tests.service.servers import (
    STOP_TIMEOUT_S,
    RunningServer,
    free_port,
    running_server,
    serve_command,
    server_environment,
    started_server,
)
from tests.waiting import wait_until

_FEEDS = {"x": [-2.0]}


def http_address(server: RunningServer) -> tuple[str, int]:
    text = next(server.data_dir.glob("*.stdout")).read_text()
    found = re.search(r"^gradrule: HTTP at https?://(\S+):(\d+)$", text, re.MULTILINE)
    assert found is not None, text
    return found[1], int(found[2])


def status_of(connection: HTTPConnection, path: str = "/v1/health") -> int | None:
    """Returns the HTTP status; None if nothing listens."""
    try:
        connection.request("GET", path)
        return read(connection.getresponse()).status
    except OSError:
        return None
    finally:
        connection.close()


def gateway_pid(server: RunningServer) -> int | None:
    """Returns the process id of the server's gateway."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"gateway" in words and str(server.process.pid).encode() in words:
                return int(folder.name)
    return None


def test_the_gateway_starts_again_and_ends_with_its_server(tmp_path: Path) -> None:
    with running_server(tmp_path, ("--http-port", "0")) as server:
        address = http_address(server)
        assert status_of(HTTPConnection(*address)) == 200
        first = gateway_pid(server)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        # The same port, in another process.
        wait_until(lambda: status_of(HTTPConnection(*address)) == 200 or None, "the gateway after its end")
        assert gateway_pid(server) not in (None, first)
        assert "the HTTP gateway ended (SIGKILL)" in server.log.read_text()
        assert server.terminate() == 0
        assert gateway_pid(server) is None
        assert status_of(HTTPConnection(*address)) is None


def children(server: RunningServer) -> list[int]:
    """Returns the fork server, engines, compile workers and gateway."""
    parent = server.process.pid
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def test_all_processes_are_back_after_a_kill_of_all_but_the_front_end(tmp_path: Path) -> None:
    port = free_port()
    with running_server(tmp_path, ("--http-port", "0", "--metrics-port", str(port), "--spares", "1")) as server:
        address = http_address(server)
        with gr.connect(server.target, timeout=60.0) as client:
            # Reading a graph starts a compile worker.
            assert client.evaluate(sign_graph(), feeds=_FEEDS, fetches=["y"]).outputs["y"].tolist() == [-1.0]
            wait_until(lambda: client.server_status().spare_engines or None, "a spare")
            killed = children(server)
            # Fork server, engine, worker, spare and gateway.
            assert len(killed) >= 5
            started = time.monotonic()
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            r = client.evaluate(sign_graph(), feeds={"x": [3.0]}, fetches=["y"])
            assert r.outputs["y"].tolist() == [1.0]
            print(f"answered after {time.monotonic() - started:.1f} s")
            wait_until(lambda: status_of(HTTPConnection(*address)) == 200 or None, "the gateway")
            print(f"HTTP after {time.monotonic() - started:.1f} s")

            def counts() -> dict[str, float] | None:
                found = {helper: restarts(port, helper) for helper in ("fork_server", "worker", "gateway")}
                return found if all(found.values()) else None

            assert wait_until(counts, "counted restarts") == {"fork_server": 1, "worker": 1, "gateway": 1}


def restarts(port: int, helper: str) -> float:
    """Returns how often a helper process ended unexpectedly, as the metrics say."""
    connection = HTTPConnection("127.0.0.1", port)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    lines = [
        line for line in text.splitlines() if line.startswith(f'gradrule_helper_restarts_total{{helper="{helper}"')
    ]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_a_signal_to_all_processes_ends_the_server_after_its_running_calls(tmp_path: Path) -> None:
    with (
        running_server(
            tmp_path,
            (
                "--http-port",
                "0",
            ),
        ) as server,
        gr.connect(server.target, timeout=60.0) as client,
    ):
        with futures.ThreadPoolExecutor() as threads:
            long = threads.submit(client.evaluate, loop_graphs.counted(300_000), feeds={"x": 1.0}, fetches=["y"])
            server.wait_for_running_calls(1)
            started = time.monotonic()
            # As systemd and terminals do.
            for pid in (server.process.pid, *children(server)):
                os.kill(pid, signal.SIGTERM)
            assert server.process.wait(STOP_TIMEOUT_S) == 0
            print(f"ended after {time.monotonic() - started:.1f} s")
            assert long.result().outputs["y"] == 1.0
        text = server.log.read_text()
        assert not re.search(r"(engine|fork server) \d+ ended", text), text


def test_the_gateway_ends_when_its_server_is_killed(tmp_path: Path) -> None:
    with started_server(tmp_path, ("--http-port", "0")) as server:
        address = http_address(server)
        server.kill()
        wait_until(lambda: True if status_of(HTTPConnection(*address)) is None else None, "the end of the gateway")


def test_a_server_whose_gateway_cannot_start_does_not_start(tmp_path: Path) -> None:
    with HTTPServerSocket() as port:
        command = serve_command("--port", "0", "--data-dir", str(tmp_path), "--http-port", str(port), "--spares", "0")
        ended = subprocess.run(command, capture_output=True, text=True, env=server_environment(), check=False)
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "gradrule serve: the HTTP gateway did not start (exit code 1)" in ended.stderr
    assert "listening" not in ended.stdout


class HTTPServerSocket:
    """A port that is taken."""

    def __enter__(self) -> int:
        import socket

        self._socket: Any = socket.create_server(("127.0.0.1", 0))
        return int(self._socket.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def test_a_server_with_tls_has_a_gateway_with_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    files = authority.server("localhost")
    flags = ("--http-port", "0", "--tls-cert", str(files.certificate), "--tls-key", str(files.key))
    with running_server(tmp_path / "server", flags) as server:
        _, port = http_address(server)
        context = ssl.create_default_context(cafile=str(authority.file))
        assert status_of(HTTPSConnection("localhost", port, context=context)) == 200


def test_renewed_certificate_is_used_without_a_refused_request(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    files = authority.server("localhost")
    flags = ("--http-port", "0", "--tls-cert", str(files.certificate), "--tls-key", str(files.key))
    context = ssl.create_default_context(cafile=str(authority.file))
    statuses: list[int | None] = []
    is_done = threading.Event()
    with running_server(tmp_path / "server", flags) as server:
        _, port = http_address(server)
        pid = gateway_pid(server)

        def send() -> None:
            while not is_done.is_set():
                # Each has a connection of its own, and the gateway asks the server.
                statuses.append(status_of(HTTPSConnection("localhost", port, context=context)))

        def is_renewed() -> bool | None:
            expected = ssl.PEM_cert_to_DER_cert(files.certificate.read_text())
            with context.wrap_socket(
                socket.create_connection(("localhost", port)), server_hostname="localhost"
            ) as found:
                return found.getpeercert(binary_form=True) == expected or None

        threads = [threading.Thread(target=send) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(2):
                # Another key; the certificate is replaced first, then the key.
                authority.server("localhost")
                wait_until(is_renewed, "the renewed certificate")
            # It is also trusted: the gateway has connected to the server again.
            wait_until(lambda: "the files of TLS were read again" in server.log.read_text() or None, "a connection")
        finally:
            is_done.set()
            for thread in threads:
                thread.join()
        assert set(statuses) == {200}
        assert gateway_pid(server) == pid
        # A key that does not belong to the certificate changes nothing.
        files.key.write_bytes(authority.server("other").key.read_bytes())
        wait_until(lambda: "changed files of TLS are not used yet" in server.log.read_text() or None, "a warning")
        assert status_of(HTTPSConnection("localhost", port, context=context)) == 200


def test_idle_connections_with_tls_do_not_hold_up_the_end(tmp_path: Path) -> None:
    """Their clients answer the end of TLS only when they send the next request."""
    authority = Authority(tmp_path, "authority")
    files = authority.server("server")
    context = ssl.create_default_context(cafile=str(authority.file))
    flags = ("--http-port", "0", "--tls-cert", str(files.certificate), "--tls-key", str(files.key), "--drain-s", "20")
    with running_server(tmp_path / "server", flags) as server:
        connection = HTTPSConnection("localhost", http_address(server)[1], context=context)
        connection.request("GET", "/v1/health")
        assert read(connection.getresponse()).status == 200
        assert server.terminate() == 0
        connection.close()
        # uvicorn says so when it ends connections after the drain time.
        assert "graceful shutdown exceeded" not in server.log.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--http-port", "0", "--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "a"], "gradrule gateway"),
        (["--http-allowed-hosts", "example.org"], "--http-port"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.load(flags, {"HOME": "/nonexistent"})
