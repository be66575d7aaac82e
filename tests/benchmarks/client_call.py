"""Measures the Python client's own cost: processor time of a program call, and of a bare unary call of the same bytes.

A small gRPC server in a process of its own gives prepared answers, so nothing but the client and gRPC is measured:

    python -m tests.benchmarks.client_call [--calls 1000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np

import gradrule as gr
from gradrule._messages.error_status import message_parts
from gradrule._messages.program_calls import ProgramBase
from gradrule.common import tensor_codec
from gradrule.v1 import evaluate_pb2, program_pb2, tensor_pb2

NAME = "programs/tiny"
BARE = "/bench/Bare"
SERVER_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
TINY = {"x": np.ones((2, 4), np.float32), "w": np.ones((4, 3), np.float32)}


def program() -> program_pb2.Program:
    """Describes a program with inputs x and w, whose gradients are asked."""
    specs = [
        tensor_pb2.TensorSpec(name=name, dtype=tensor_pb2.DT_FLOAT, shape=tensor_codec.shape_message(array.shape))
        for name, array in TINY.items()
    ]
    loss = tensor_pb2.TensorSpec(name="loss", dtype=tensor_pb2.DT_FLOAT)
    return program_pb2.Program(name=NAME, inputs=specs, xs=specs, ys=[loss], outputs=[loss], device="CPU:0")


def answer(feeds: dict[str, Any]) -> bytes:
    """Returns the bytes of an answer: a loss, and gradients of the feeds' shapes."""
    response = evaluate_pb2.EvaluateResponse(device="CPU:0")
    tensor_codec.write_message(response.outputs.add(name="loss").value.inline_tensor, np.asarray(np.float32(1)))
    for name, array in feeds.items():
        tensor_codec.write_message(response.gradients.add(x=name).dense, array)
    for part in (response.timings.queue, response.timings.run):
        part.FromNanoseconds(123_456)
    response.digests.graph = response.digests.program = "0123456789abcdef" * 4
    return response.SerializeToString()


class Answers(grpc.GenericRpcHandler):
    """Answers every call with prepared bytes; `/bench/Size` sets the size of the gradients."""

    def __init__(self) -> None:
        self._answer = answer(TINY)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method.endswith("/StreamEvaluate"):
            return grpc.stream_stream_rpc_method_handler(self._stream)
        if details.method.endswith("/GetProgram"):
            return grpc.unary_unary_rpc_method_handler(self._program)
        if details.method.endswith("/Size"):
            return grpc.unary_unary_rpc_method_handler(self._set_size)
        return grpc.unary_unary_rpc_method_handler(self._unary)

    async def _unary(self, request: bytes, context: Any) -> bytes:
        return self._answer

    async def _program(self, request: bytes, context: Any) -> bytes:
        return program_pb2.GetProgramResponse(program=program()).SerializeToString()

    async def _set_size(self, request: bytes, context: Any) -> bytes:
        size = int(request)
        self._answer = answer({"x": np.ones(size // 4, np.float32)} if size else TINY)
        return self._answer

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for raw in requests:
            message = evaluate_pb2.StreamEvaluateRequest.FromString(raw)
            if message.WhichOneof("request") == "evaluate":
                response = evaluate_pb2.StreamEvaluateResponse(request_id=message.request_id)
                response.evaluate.ParseFromString(self._answer)
                await context.write(response.SerializeToString())


async def serve() -> None:
    """Serves until the process is ended; prints the port."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((Answers(),))
    port = server.add_insecure_port("localhost:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


def cost(call: Callable[[], object], calls: int) -> float:
    """Returns microseconds of this process's time per call."""
    started = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - started) / calls * 1e6


async def async_cost(call: Callable[[], Awaitable[object]], calls: int) -> float:
    """Returns microseconds of this process's time per awaited call."""
    started = time.process_time()
    for _ in range(calls):
        await call()
    return (time.process_time() - started) / calls * 1e6


def sent(program: ProgramBase, feeds: dict[str, Any]) -> bytes:
    """Returns the request that a call of the program sends."""
    parts, _ = message_parts(program._call(feeds, None, None).request)
    return b"".join(parts)


def sync_rounds(target: str, feeds: dict[str, Any], calls: int, rounds: int) -> dict[str, list[float]]:
    """Measures the sync client and a bare call in turn."""
    found: dict[str, list[float]] = {}
    with grpc.insecure_channel(target, options=SERVER_OPTIONS) as channel:
        bare: Any = channel.unary_unary(BARE)
        # The server here shares no memory.
        with (
            gr.connect(target, shared_memory=False) as streaming,
            gr.connect(target, stream=False, shared_memory=False) as plain,
        ):
            ways = {"client, unary": plain.program(NAME), "client": streaming.program(NAME)}
            request = sent(ways["client"], feeds)
            calling: dict[str, Callable[[], object]] = {"bare unary": lambda: bare(request, timeout=30)}
            for name, each in ways.items():

                def call(each: Any = each) -> object:
                    return each.evaluate(feeds).gradients["x"]

                calling[name] = call
            for one in calling.values():
                cost(one, max(10, calls // 10))
            for _ in range(rounds):
                for name, one in calling.items():
                    found.setdefault(name, []).append(cost(one, calls))
    return found


async def async_rounds(target: str, feeds: dict[str, Any], calls: int, rounds: int) -> dict[str, list[float]]:
    """Measures the async client and a bare call in turn."""
    found: dict[str, list[float]] = {}
    async with grpc.aio.insecure_channel(target, options=SERVER_OPTIONS) as channel:
        bare: Any = channel.unary_unary(BARE)
        async with (
            gr.aio.connect(target, shared_memory=False) as streaming,
            gr.aio.connect(target, stream=False, shared_memory=False) as plain,
        ):
            ways = {"client, unary": await plain.program(NAME), "client": await streaming.program(NAME)}
            request = sent(ways["client"], feeds)

            async def bare_call() -> object:
                return await bare(request, timeout=30)

            calling: dict[str, Callable[[], Awaitable[object]]] = {"bare unary": bare_call}
            for name, each in ways.items():

                async def call(each: Any = each) -> object:
                    return (await each.evaluate(feeds)).gradients["x"]

                calling[name] = call
            for one in calling.values():
                await async_cost(one, max(10, calls // 10))
            for _ in range(rounds):
                for name, one in calling.items():
                    found.setdefault(name, []).append(await async_cost(one, calls))
    return found


def main() -> None:
    """Prints medians in microseconds, and ratios to the bare call, as a table and as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000, help="tiny calls per round")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve())
        return
    command = [sys.executable, "-m", "tests.benchmarks.client_call", "--serve"]
    figures: dict[str, dict[str, float]] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            target = f"localhost:{int(server.stdout.readline())}"
            for size in (0, 1 << 20, 16 << 20):
                with grpc.insecure_channel(target, options=SERVER_OPTIONS) as channel:
                    set_size: Any = channel.unary_unary("/bench/Size")
                    set_size(str(size).encode())
                feeds = {"x": np.ones(size // 4, np.float32)} if size else TINY
                calls = max(3, given.calls >> (size >> 17).bit_length()) if size else given.calls
                found = {
                    f"sync, {name}": each for name, each in sync_rounds(target, feeds, calls, given.rounds).items()
                }
                more = asyncio.run(async_rounds(target, feeds, calls, given.rounds))
                found |= {f"async, {name}": each for name, each in more.items()}
                title = f"{size >> 20} MiB" if size else "tiny"
                figures[title] = {name: round(statistics.median(each), 1) for name, each in found.items()}
                for name, median in figures[title].items():
                    ratio = median / figures[title][f"{name.partition(',')[0]}, bare unary"]
                    print(f"{title:>7}  {name:<22} {median:>10.1f} us  {ratio:.2f}")
        finally:
            server.terminate()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
