"""Starts an S3 server for tests (moto), behind a proxy that can refuse, hold up and delay what is sent to it."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

SECRET = "secret-of-tests-0123456789"

# Prints the port, and serves until its standard input is closed, so that it ends with the tests.
_SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class FaultyProxy:
    """Passes connections on to a port of this machine.

    Attributes:
        port: The port that it listens on.
        delay_s: Time for which each piece of data from a client is held up.
        held: Number of pieces of data that are held up by `frozen`.
        answers: What it answers to the next requests, instead of passing them on.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.delay_s = 0.0
        self.held = 0
        self.answers: Iterator[bytes] = iter(())
        self.port = 0
        self._passing = threading.Event()
        self._passing.set()
        self._connections: set[socket.socket] = set()
        self.start()

    def start(self) -> None:
        """Accepts connections, always on the same port."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        """Refuses connections, and ends those that are open."""
        # Wake the thread that accepts: closing alone would leave it waiting.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Refuses connections within this context."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    @contextlib.contextmanager
    def answering(self, status: str, body: bytes) -> Iterator[None]:
        """Answers each request by itself within this context, as a proxy does whose service is away."""
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nContent-Length: {len(body)}\r\nConnection: close"
        self.answers = itertools.repeat(head.encode() + b"\r\n\r\n" + body)
        try:
            yield
        finally:
            self.answers = iter(())

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Passes on nothing within this context, and answers nothing."""
        self._passing.clear()
        try:
            yield
        finally:
            self._passing.set()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._connections.add(client)
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as server:
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if not self._passing.is_set():
                        self.held += 1
                        self._passing.wait()
                        self.held -= 1
                    if source is client and (answer := next(self.answers, b"")):
                        client.sendall(answer)
                        return
                    if source is client:
                        time.sleep(self.delay_s)
                        server.sendall(data)
                    else:
                        client.sendall(data)
        self._connections.discard(client)


class S3Server:
    """An S3 server.

    Attributes:
        proxy: What its clients are connected to.
        environment: The variables by which AWS libraries find it.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        self.proxy = FaultyProxy(port)
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            # Without this, missing credentials are asked for at an address of Amazon's machines.
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        import boto3

        self.client: Any = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            aws_access_key_id="tests",
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def create_bucket(self) -> str:
        """Creates a bucket and returns its name."""
        name = f"blobs-{uuid.uuid4().hex[:16]}"
        self.client.create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str) -> list[str]:
        """Returns the keys of all objects in a bucket."""
        return [item["Key"] for item in self.client.list_objects_v2(Bucket=bucket).get("Contents", [])]

    def close(self) -> None:
        self.proxy.stop()
        self.client.close()
        # Closes its standard input.
        self._process.communicate(timeout=30)


@contextlib.contextmanager
def running_s3() -> Iterator[S3Server]:
    """Starts an S3 server."""
    server = S3Server()
    try:
        yield server
    finally:
        server.close()
