"""Starts gateways for tests, and sends requests to them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from typing import Any

_READY = "gradrule gateway: listening on "
_ENDED_S = 30.0


@dataclass(frozen=True)
class Answer:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class RunningGateway:
    """A gateway process.

    Attributes:
        process: The process.
        url: Where it listens: `http://127.0.0.1:PORT`.
        log: The last lines of its log.
    """

    process: subprocess.Popen[str]
    url: str
    log: deque[str] = field(default_factory=lambda: deque(maxlen=200))

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.rpartition("://")[2].rpartition(":")
        return host, int(port)

    def connect(self, timeout: float = 60.0) -> HTTPConnection:
        return HTTPConnection(*self.address, timeout=timeout)

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """Sends one request; a body that is not bytes is sent as JSON."""
        headers = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers.setdefault("Content-Type", "application/json")
        connection = self.connect()
        try:
            connection.request(method, path, body, headers)
            return read(connection.getresponse())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.send("POST", path, body, {name.replace("_", "-"): text for name, text in headers.items()})


def read(response: HTTPResponse) -> Answer:
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, response.read())


@contextlib.contextmanager
def running_gateway(target: str, *flags: str) -> Iterator[RunningGateway]:
    """Runs `gradrule gateway` for the `with` statement."""
    command = [sys.executable, "-m", "gradrule", "gateway", "--server", target, "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    gateway = RunningGateway(process, "")
    reader = threading.Thread(target=gateway.log.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        line = process.stdout.readline()
        assert line.startswith(_READY), (line, list(gateway.log))
        gateway.url = line.removeprefix(_READY).strip()
        yield gateway
    finally:
        process.terminate()
        try:
            process.wait(_ENDED_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            reader.join(5)
            process.stdout.close()
            process.stderr.close()
