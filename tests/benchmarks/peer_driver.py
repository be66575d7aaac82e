"""A driver for a service that is a library of its own; runs in the peers' environment, which has no gradrule.

`python -m tests.benchmarks.peer_driver '{"peer": "umbridge", "size": 0, "folder": "…"}'` starts the peer's server as a
process, connects the peer's own client, and then answers the bench. All compute the same: y = sign(x) with a clipped
straight-through gradient, of a vector of `size` numbers; 0 is the tiny work: (2, 4) by (4, 3), sign, sum, and two
gradients.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.driver_loop import many_by_threads, serve

_START_S = 90.0
_ROOT = Path(__file__).resolve().parents[2]


class Peer:
    """A peer's client."""

    def __init__(self, call: Callable[[], Any], values: int) -> None:
        self._call = call
        (first, *_) = found = call()
        # A peer that computes something else, or nothing, must not be measured.
        if sum(np.size(item) for item in found) != values or not np.isfinite(np.asarray(first)).all():
            raise RuntimeError(f"expected {values} numbers, got {[np.shape(item) for item in found]}")

    def call(self) -> object:
        return self._call()

    def many(self, count: int, in_flight: int) -> None:
        many_by_threads(self._call, count, in_flight)


def feeds(size: int) -> dict[str, Any]:
    """Returns what the work is called with, as `work.tiny` and `work.large` have it."""
    rng = np.random.default_rng(0)
    if size:
        return {"x": rng.normal(size=size).astype(np.float32)}
    return {"x": rng.normal(size=(2, 4)).astype(np.float32), "w": rng.normal(size=(4, 3)).astype(np.float32)}


def tesseract(size: int, folder: Path) -> Peer:
    """tesseract-core: `vector_jacobian_product` over HTTP."""
    from tesseract_core import Tesseract

    api = Path(__file__).with_name("peer_tesseract.py")
    port = _free_port()
    environment = {"TESSERACT_API_PATH": str(api), "BENCH_SIZE": str(size)}
    command = [
        str(Path(sys.executable).with_name("tesseract-runtime")),
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    _start(command, environment, f"http://127.0.0.1:{port}/health", folder / "tesseract.log")
    client = Tesseract.from_url(f"http://127.0.0.1:{port}")
    inputs = feeds(size)
    cotangent = np.ones(size, np.float32) if size else np.float32(1)

    def call() -> list[Any]:
        found = client.vector_jacobian_product(inputs, list(inputs), ["y"], {"y": cotangent})
        return [np.asarray(found[name]) for name in inputs]

    return Peer(call, sum(item.size for item in inputs.values()))


def umbridge(size: int, folder: Path) -> Peer:
    """UM-Bridge: `gradient` over HTTP, JSON lists of doubles."""
    import umbridge as um

    port = _free_port()
    command = [sys.executable, "-m", "tests.benchmarks.peer_umbridge", str(port), str(size)]
    _start(command, {}, f"http://127.0.0.1:{port}/Info", folder / "umbridge.log")
    model = um.HTTPModel(f"http://127.0.0.1:{port}", "forward")
    inputs = [np.ravel(item).tolist() for item in feeds(size).values()]
    sens = [1.0] * (size or 1)

    def call() -> list[Any]:
        return [model.gradient(0, number, inputs, sens) for number in range(len(inputs))]

    return Peer(call, sum(map(len, inputs)))


def pytriton(size: int, folder: Path) -> Peer:
    """PyTriton: a NumPy callable behind Triton's gRPC."""
    from pytriton.client import ModelClient

    http, grpc, metrics = _free_port(), _free_port(), _free_port()
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.peer_pytriton",
        *map(str, (http, grpc, metrics, size)),
        str(folder),
    ]
    # Triton embeds Python and must load the library of this one, not of another of the same version on the machine.
    environment = {"LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR"))}
    _start(command, environment, f"http://127.0.0.1:{http}/v2/models/gradient/ready", folder / "pytriton.log")
    client = ModelClient(f"grpc://127.0.0.1:{grpc}", "gradient", lazy_init=False)
    inputs = feeds(size)

    def call() -> list[Any]:
        found = client.infer_sample(**inputs)
        return [found[f"d{name}"] for name in inputs]

    class OneAtATime(Peer):
        """Its client is not for several threads."""

        def many(self, count: int, in_flight: int) -> None:
            import threading
            from concurrent.futures import ThreadPoolExecutor

            local = threading.local()

            def once(_: int) -> None:
                if not hasattr(local, "client"):
                    local.client = ModelClient(f"grpc://127.0.0.1:{grpc}", "gradient", lazy_init=False)
                local.client.infer_sample(**inputs)

            with ThreadPoolExecutor(in_flight) as threads:
                for _ in threads.map(once, range(count)):
                    pass

    return OneAtATime(call, sum(item.size for item in inputs.values()))


PEERS = {"tesseract-core": tesseract, "umbridge": umbridge, "pytriton": pytriton}
_stack = contextlib.ExitStack()


def _start(command: list[str], environment: dict[str, str], ready_url: str, log: Path) -> None:
    """Starts a peer's server and waits until it answers; it ends with this process."""
    _stack.enter_context(_process(command, environment, log))
    ends = time.monotonic() + _START_S
    while time.monotonic() < ends:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(ready_url, timeout=2).close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"{command[0]} did not serve within {_START_S:g} s:\n{log.read_text()[-1500:]}")


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    # Peers write into the folder that they run in.
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"PYTHONPATH": str(_ROOT)} | environment,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    with _stack:
        serve(PEERS[settings["peer"]](settings["size"], Path(settings["folder"])))
