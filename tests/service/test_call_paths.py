"""Calls of every client are recognised from the second one on, as the server's metrics count them."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import gradrule as gr
from gradrule.common.fast_paths import VARIABLE, disabled_paths
from gradrule.v1 import evaluate_pb2, tensor_pb2
from tests.e2e.pages import GUIDE, read_example
from tests.node_client import run_node
from tests.service import loop_graphs, raw
from tests.service.answers import refused
from tests.service.gateways import running_gateway
from tests.service.servers import RunningServer, free_port, running_server
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(
    "known-calls" in disabled_paths(os.environ.get(VARIABLE, "")), reason="calls are not recognised"
)

CALLS = 5


@dataclass(frozen=True)
class CountingServer:
    """Holds a server, and reads how many calls took each path."""

    server: RunningServer
    metrics_url: str

    def counts(self) -> dict[str, int]:
        """Returns the number of calls of `Evaluate` by path, and of those in streams."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        found = {"known": 0, "general": 0, "stream": 0}
        for sample in (sample for family in families for sample in family.samples):
            if sample.name == "gradrule_calls_total":
                found[sample.labels["path"]] = int(sample.value)
            elif sample.labels.get("rpc") == "GradientService/StreamEvaluate/evaluate":
                found["stream"] += int(sample.value) if sample.name == "gradrule_requests_total" else 0
        return found

    def grown(self, run: Callable[[], Any], calls: int) -> dict[str, int]:
        """Returns how the counts grow with the given number of calls, which `run` makes."""
        before = self.counts()
        run()

        def probe() -> dict[str, int] | None:
            # A request is counted after its answer is sent.
            after = {name: count - before[name] for name, count in self.counts().items()}
            return after if after["known"] + after["general"] >= calls else None

        return wait_until(probe, f"{calls} counted calls")


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingServer]:
    port = free_port()
    with running_server(tmp_path_factory.mktemp("counting"), ("--metrics-port", str(port))) as server:
        yield CountingServer(server, f"http://127.0.0.1:{port}/metrics")


def compiled(client: gr.Client) -> gr.Program:
    """Compiles a program with a param; every call makes a program of its own, for which no call is known."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    total = g.add(g.op_output("Sign", x), g.op_output("Tanh", x))
    g.multiply(total, g.constant(np.random.default_rng().random(dtype=np.float32)), name="y")
    rule = gr.Rule("where(abs(x) <= a, dy, 0)", params={"a": 1.0})
    override = gr.Override(rule, op_type="Sign", label="L")
    return client.compile(g, ys="y", xs="x", fetches=["y"], overrides=[override])


KINDS: dict[str, Callable[[gr.Program], Any]] = {
    "default": lambda p: p(x=[1.0, 2.0]),
    "timeout": lambda p: p.evaluate({"x": [1.0, 2.0]}, timeout=20),
    "params": lambda p: p.evaluate({"x": [1.0, 2.0]}, params={"L": {"a": 2.0}}),
    "grad_ys": lambda p: p.evaluate({"x": [1.0, 2.0]}, grad_ys={"y": [1.0, 2.0]}),
    "large": lambda p: p(x=np.ones(300_000, np.float32)),
    "jvp": lambda p: p.jvp({"x": [1.0, 2.0]}, {"x": [1.0, 1.0]}),
    "jacobian": lambda p: p.jacobian({"x": [1.0, 2.0]}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_the_python_client_are_recognised(counting: CountingServer, kind: str, stream: bool) -> None:
    """The first call of a program is parsed. Large tensors are in shared memory, where the machine has it."""
    with gr.connect(counting.server.target, stream=stream) as client:
        program = compiled(client)
        grown = counting.grown(lambda: [KINDS[kind](program) for _ in range(CALLS)], CALLS)
    assert (grown["general"], grown["known"]) == (1, CALLS - 1)
    if kind != "large":
        assert (grown["stream"] > 0) == stream


@pytest.mark.parametrize("shared_memory", [False, True])
@pytest.mark.parametrize("size", [10, 300_000])
def test_calls_of_several_shapes_are_recognised(counting: CountingServer, size: int, shared_memory: bool) -> None:
    """The first call of each shape is parsed."""
    with gr.connect(counting.server.target, shared_memory=shared_memory) as client:
        program = compiled(client)
        # Sets up the shared memory, if there is any.
        KINDS["large"](program)
        values = [np.full(size + 1 + number, 1.0, np.float32) for number in range(CALLS)]
        for general in (CALLS, 0):
            grown = counting.grown(lambda: [program(x=value) for value in values], CALLS)
            assert (grown["general"], grown["known"]) == (general, CALLS - general)
        # The calls of map are sent without shared memory, so the first of each shape may have another header.
        counting.grown(lambda: list(program.map([{"x": value} for value in values])), CALLS)
        mapped = counting.grown(lambda: list(program.map([{"x": value} for value in values])), CALLS)
        assert (mapped["general"], mapped["known"]) == (0, CALLS)


def test_packed_tensors_are_recognised(counting: CountingServer) -> None:
    transfer = gr.Transfer(wire_dtype="bfloat16")
    with gr.connect(counting.server.target, transfer=transfer) as client:
        program = compiled(client)
        grown = counting.grown(lambda: [program(x=np.ones(1000, np.float32)) for _ in range(CALLS)], CALLS)
    assert (grown["general"], grown["known"]) == (1, CALLS - 1)


def test_calls_of_the_asyncio_client_are_recognised(counting: CountingServer) -> None:
    async def run() -> None:
        async with gr.aio.connect(counting.server.target) as client:
            program = await client.program(name)
            for _ in range(CALLS):
                await program(x=[1.0, 2.0])

    with gr.connect(counting.server.target) as client:
        name = compiled(client).name
    grown = counting.grown(lambda: asyncio.run(run()), CALLS)
    assert (grown["general"], grown["known"]) == (1, CALLS - 1)


def test_calls_through_the_gateway_are_recognised(counting: CountingServer) -> None:
    """With the gateway's default deadline, and with a timeout of the request; the bodies are natural JSON."""
    with gr.connect(counting.server.target) as client:
        name = compiled(client).name
    body = {"program": name, "feeds": {"x": [1.0, 2.0]}}
    with running_gateway(counting.server.target) as gateway:
        for headers in ({}, {"Grpc-Timeout": "20S"}):

            def send(headers: dict[str, str] = headers) -> None:
                for _ in range(CALLS):
                    answer = gateway.send("POST", "/v1/evaluate", body, headers)
                    assert answer.status == 200, answer.body

            grown = counting.grown(send, CALLS)
            assert (grown["general"], grown["known"]) == (1, CALLS - 1)


def test_calls_of_generated_clients_are_recognised(counting: CountingServer) -> None:
    """In the plain form, and with a header as in docs/guide/other-languages.md."""
    with gr.connect(counting.server.target) as client:
        g = gr.Graph()
        x = g.placeholder("x", "float32", [None, 3])
        program = client.compile(g, fetches=g.op_output("Sign", x, name="y"), name="signs")
        batches = [np.full((2, 3), number, np.float32) for number in range(CALLS)]
        found: list[bytes] = []

        def send(request: evaluate_pb2.EvaluateRequest, timeout: float) -> evaluate_pb2.EvaluateResponse:
            answer = raw.send(channel, "GradientService/Evaluate", request.SerializeToString())
            message = evaluate_pb2.EvaluateResponse.FromString(answer)
            found.append(message.outputs[0].value.inline_tensor.tensor_content)
            return message

        def send_plain() -> None:
            for x in batches:
                send(evaluate_pb2.EvaluateRequest(program=program.name, feeds=raw.feeds({"x": raw.tensor(x)})), 30)

        names = {"evaluate_pb2": evaluate_pb2, "tensor_pb2": tensor_pb2, "batches": batches}
        example = compile(read_example(GUIDE / "other-languages.md", "header"), "header", "exec")
        with grpc.insecure_channel(counting.server.target) as channel:
            plain = counting.grown(send_plain, CALLS)
            with_header = counting.grown(lambda: exec(example, names | {"stub": SimpleNamespace(Evaluate=send)}), CALLS)
        assert (plain["general"], plain["known"]) == (1, CALLS - 1)
        # The plain form of the same call was known.
        assert (with_header["general"], with_header["known"]) == (0, CALLS)
        assert found == 2 * [np.sign(x).tobytes() for x in batches]


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_calls_of_the_node_client_are_recognised(counting: CountingServer, stream: bool) -> None:
    with gr.connect(counting.server.target) as client:
        name = compiled(client).name
    code = f"""
        import {{ connect }} from "gradrule";
        const client = await connect({json.dumps(counting.server.target)}, {{ stream: {json.dumps(stream)} }});
        const program = await client.program({json.dumps(name)});
        for (let i = 0; i < {CALLS}; i++) await program.evaluate({{ x: [1, 2] }});
        await client.close();
    """
    grown = counting.grown(lambda: run_node(code), CALLS)
    assert (grown["general"], grown["known"]) == (1, CALLS - 1)
    assert (grown["stream"] > 0) == stream


def test_known_calls_end_at_their_run_timeout(counting: CountingServer) -> None:
    """The deadline is much later. The error is that of a call that is parsed."""
    with gr.connect(counting.server.target, timeout=2.0, compile_timeout=60.0) as client:
        program = client.compile(loop_graphs.endless(), fetches="y")

        def run() -> None:
            for _ in range(2):
                assert program(x=loop_graphs.ENDS).outputs["y"] == loop_graphs.ENDS
            with refused("DEADLINE_EXCEEDED") as known:
                program(x=loop_graphs.ENDLESS)
            known.says("2 s", "run_timeout")

        grown = counting.grown(run, 3)
        assert (grown["general"], grown["known"]) == (1, 2)
        # The engine was replaced.
        assert program(x=loop_graphs.ENDS).outputs["y"] == loop_graphs.ENDS
