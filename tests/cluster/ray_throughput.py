"""Measures calls per second of 1, 2 and 4 replicas on Ray Serve: `python -m tests.cluster.ray_throughput`.

Prints the tables of docs/guide/ray.md. One engine with one thread serves each replica, so a machine with n cores can
show a gain up to n replicas at most; proxies, replicas and front ends need processor time of the same cores too.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradrule as gr
from tests.cluster.postgres import running_postgres
from tests.cluster.ray_cluster import RayCluster, running_ray, sign_graph
from tests.service.servers import running_server

REPLICAS = (1, 2, 4)
SECONDS = 10.0
SMALL_CALLS = 200
CLIENTS = 8
_SIZE = 512
_PRODUCTS = 6
_WARM_UP_S = 180.0
_ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "OMP_NUM_THREADS": "1"}
_SETTINGS = {"spares": 0, "engine_threads": 1}


def compute_graph() -> gr.Graph:
    """Returns a program of products of matrices that it makes from one number, so that messages are small."""
    graph = gr.Graph()
    x = graph.placeholder("x", "float32", [])
    shape = graph.constant([_SIZE, _SIZE], "int32")
    matrix = factor = graph.op("Fill", shape, x)
    for _ in range(_PRODUCTS):
        matrix = graph.op("MatMul", matrix, factor)
    graph.op("Max", matrix, graph.constant([0, 1], "int32"), name="y")
    return graph


def calls_per_second(target: str, seconds: float = SECONDS) -> float:
    """Returns the calls per second of a compute-bound program from several clients."""
    counts = [0] * CLIENTS
    warm, stop = threading.Barrier(CLIENTS + 1), threading.Event()

    def call(number: int) -> None:
        with gr.connect(target, stream=False, timeout=120.0) as client:
            program = client.compile(compute_graph(), fetches=["y"], ys=["y"], xs=["x"])
            for _ in range(8):
                program(x=1e-3)
            warm.wait(_WARM_UP_S)
            while not stop.is_set():
                program(x=1e-3)
                counts[number] += 1

    threads = [threading.Thread(target=call, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    warm.wait(_WARM_UP_S)
    started, before = time.monotonic(), sum(counts)
    time.sleep(seconds)
    rate = (sum(counts) - before) / (time.monotonic() - started)
    stop.set()
    for thread in threads:
        thread.join()
    return rate


def small_call_ms(target: str, *, stream: bool) -> float:
    """Returns the median time of a small call, in milliseconds."""
    with gr.connect(target, stream=stream) as client:
        program = client.compile(sign_graph(), fetches=["y"], ys=["y"], xs=["x"])
        for _ in range(8):
            program(x=[1.0])
        times = []
        for _ in range(SMALL_CALLS):
            started = time.perf_counter()
            program(x=[1.0])
            times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def row(name: str, target: str) -> tuple[str, ...]:
    """Measures one deployment."""
    print(f"measuring {name}", file=sys.stderr)
    small = (f"{small_call_ms(target, stream=stream):.1f} ms" for stream in (False, True))
    return name, f"{calls_per_second(target):.1f}", *small


def main() -> None:
    """Measures one server without Ray, and the replicas."""
    os.environ.update(_ONE_THREAD)
    rows = []
    flags = [part for name, value in _SETTINGS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder), flags) as server:
        rows.append(row("one server, without Ray", server.target))
    with running_postgres() as postgres, running_ray() as cluster:
        settings = {**_SETTINGS, "registry": postgres.create_database()}
        rows += [measured(cluster, settings, count) for count in REPLICAS]
    print(f"{os.cpu_count()} cores, {CLIENTS} clients\n")
    print(table(("deployment", "gradients per second", "small call", "small call over a stream"), rows))


def measured(cluster: RayCluster, settings: dict[str, Any], count: int) -> tuple[str, ...]:
    """Deploys so many replicas and measures them."""
    cluster.deploy(settings, num_replicas=count)
    return row(f"{count} replica{'s' * (count > 1)}", cluster.target)


if __name__ == "__main__":
    main()
