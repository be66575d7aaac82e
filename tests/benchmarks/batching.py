"""Throughput of many clients of one program, with dynamic batching and without, in interleaved rounds.

`python -m tests.benchmarks.batching` starts two servers that differ in --max-batch-size alone, and prints the requests
per second of each, their ratio, the processor time per request, and how large runs were; `--json` prints all as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

import gradrule as gr
from gradrule import _tensors
from gradrule.v1 import evaluate_pb2
from tests.service.servers import RunningServer, running_server

_METHOD = "/gradrule.v1.GradientService/Evaluate"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def perceptron(width: int) -> gr.Graph:
    """784 inputs, two layers of `width` units, ten outputs."""
    rng = np.random.default_rng(0)
    g = gr.Graph()
    h: Any = g.placeholder("x", "float32", [None, 784])
    for inputs, outputs in ((784, width), (width, width)):
        h = g.one("Relu", g.matmul(h, g.constant(_weights(rng, inputs, outputs))))
    g.matmul(h, g.constant(_weights(rng, width, 10)), name="y")
    return g


def convolution(width: int) -> gr.Graph:
    """Images of 32 by 32, three convolutions of `width` channels."""
    rng = np.random.default_rng(0)
    g = gr.Graph()
    h: Any = g.placeholder("x", "float32", [None, 32, 32, 3])
    for inputs, outputs in ((3, width), (width, width), (width, width)):
        kernel = g.constant(_weights(rng, 9 * inputs, outputs).reshape(3, 3, inputs, outputs))
        h = g.one("Relu", g.one("Conv2D", h, kernel, strides=[1, 2, 2, 1], padding="SAME"))
    g.matmul(g.reshape(h, [-1, 16 * width]), g.constant(_weights(rng, 16 * width, 10)), name="y")
    return g


def recurrent(width: int) -> gr.Graph:
    """A recurrent network of `width` units, unrolled for 100 steps: many small ops."""
    rng = np.random.default_rng(0)
    g = gr.Graph()
    x: Any = g.placeholder("x", "float32", [None, width])
    weights = g.constant(_weights(rng, width, width))
    h = x
    for _ in range(100):
        h = g.one("Relu", g.matmul(h, weights) + x)
    g.matmul(h, g.constant(_weights(rng, width, 10)), name="y")
    return g


PROGRAMS = {"perceptron": perceptron, "convolution": convolution, "recurrent": recurrent}
_SHAPES = {"perceptron": (1, 784), "convolution": (1, 32, 32, 3)}


def _weights(rng: np.random.Generator, inputs: int, outputs: int) -> np.ndarray:
    return (rng.normal(size=(inputs, outputs)) / np.sqrt(inputs)).astype(np.float32)


class Subject:
    """A server, the program on it, and what it has answered."""

    def __init__(self, server: RunningServer, graph: gr.Graph) -> None:
        self.server = server
        self.sizes: Counter[int] = Counter()
        self.rates: list[float] = []
        self.cpu_ms: list[float] = []
        with gr.connect(server.target, timeout=300.0) as client:
            self.program = client.compile(
                graph, fetches=["y"], ys=["y"], xs=["x"], overrides={"Relu": "guided_relu"}
            ).name

    def cpu_s(self) -> float:
        """Processor time of the front end and its engines so far."""
        pids = [self.server.process.pid, self.server.engine_pid()]
        return sum(_cpu_s(pid) for pid in pids if pid is not None)

    async def round(self, requests: Sequence[bytes], seconds: float) -> None:
        """All clients call again and again, each as soon as it has its answer."""
        cpu = self.cpu_s()
        started = time.monotonic()
        counts = await asyncio.gather(*(self._client(request, started + seconds) for request in requests))
        self.rates.append(sum(counts) / (time.monotonic() - started))
        self.cpu_ms.append(1000 * (self.cpu_s() - cpu) / sum(counts))

    async def _client(self, request: bytes, ends_at: float) -> int:
        count = 0
        async with grpc.aio.insecure_channel(self.server.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            call: Any = channel.unary_unary(_METHOD)
            while count == 0 or time.monotonic() < ends_at:
                answer = evaluate_pb2.EvaluateResponse.FromString(await call(request, timeout=300))
                self.sizes[answer.batch_size] += 1
                count += 1
        return count


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def _requests(program: str, shape: Sequence[int], clients: int) -> list[bytes]:
    rng = np.random.default_rng(1)
    made = []
    for _ in range(clients):
        request = evaluate_pb2.EvaluateRequest(program=program)
        value = rng.normal(size=shape).astype(np.float32)
        request.feeds.add(name="x").value.inline.CopyFrom(_tensors.to_message(value))
        made.append(request.SerializeToString())
    return made


async def _measure(subjects: Sequence[Subject], options: argparse.Namespace, shape: Sequence[int]) -> None:
    for number in range(options.rounds + 1):
        for subject in subjects if number % 2 else subjects[::-1]:
            await subject.round(_requests(subject.program, shape, options.clients), options.seconds)
    for subject in subjects:
        # The first round compiles, and proves that the program may be batched.
        del subject.rates[0], subject.cpu_ms[0]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", choices=PROGRAMS, default="perceptron")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("flags", nargs="*", help="flags of both servers, behind --")
    options = parser.parse_args()
    graph = PROGRAMS[options.program](options.width)
    shape = _SHAPES.get(options.program, (1, options.width))
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder) / "with", options.flags) as batching,
        running_server(Path(folder) / "without", [*options.flags, "--max-batch-size", "1"]) as plain,
    ):
        subjects = [Subject(batching, graph), Subject(plain, graph)]
        asyncio.run(_measure(subjects, options, shape))
    ratios = [a / b for a, b in zip(*(subject.rates for subject in subjects), strict=True)]
    answers = subjects[0].sizes
    figures = {
        "program": f"{options.program} {options.width}",
        "clients": options.clients,
        "with": statistics.median(subjects[0].rates),
        "without": statistics.median(subjects[1].rates),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "cpu_ms_with": statistics.median(subjects[0].cpu_ms),
        "cpu_ms_without": statistics.median(subjects[1].cpu_ms),
        "mean_batch": sum(size * count for size, count in answers.items()) / max(1, sum(answers.values())),
    }
    if options.json:
        print(json.dumps(figures))
        return
    print(
        f"{figures['program']}, {options.clients} clients, one example each: {figures['with']:.0f} requests/s with "
        f"batching, {figures['without']:.0f} without: {figures['ratio']:.2f} times "
        f"({min(ratios):.2f} to {max(ratios):.2f}); processor time of the server per request "
        f"{figures['cpu_ms_with']:.2f} ms and {figures['cpu_ms_without']:.2f} ms; a request ran with "
        f"{figures['mean_batch']:.0f} examples on average"
    )


if __name__ == "__main__":
    main()
