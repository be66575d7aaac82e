"""Who computes the work: gradrule by raw bytes and by its client, bare echoes, and TensorFlow's own server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

import gradrule as gr
from tests.benchmarks.echo_server import METHOD as ECHO
from tests.benchmarks.echo_server import OPTIONS
from tests.benchmarks.work import Work

EVALUATE = "/gradrule.v1.GradientService/Evaluate"
_TIMEOUT = 120.0
_TF_RULE = "GradruleBenchSteSign"

Call = Callable[[], object]
Many = Callable[[int], object]


class Wire:
    """Raw bytes to a server through a grpcio channel: the same client for gradrule and for the echoes."""

    def __init__(self, target: str, method: str) -> None:
        self._channel = grpc.insecure_channel(target, options=OPTIONS)
        self._send: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(method)

    @classmethod
    def echo(cls, target: str) -> Self:
        return cls(target, ECHO)

    @classmethod
    def gradrule(cls, target: str) -> Self:
        return cls(target, EVALUATE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def call(self, request: bytes) -> Call:
        """One call after the other."""

        def once() -> bytes:
            answer: bytes = self._send(request, timeout=_TIMEOUT)
            return answer

        return once


class WireInFlight:
    """Raw bytes through an asyncio channel, so many at a time."""

    def __init__(self, target: str, method: str, in_flight: int, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._in_flight = in_flight
        self._channel = self._loop.run_until_complete(self._open(target))
        self._send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(method)

    async def _open(self, target: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(target, options=OPTIONS)

    def close(self) -> None:
        self._loop.run_until_complete(self._channel.close())

    def many(self, request: bytes) -> Many:
        """Makes so many calls and returns when all are answered."""

        async def worker(left: list[int]) -> None:
            while left[0] > 0:
                left[0] -= 1
                await self._send(request, timeout=_TIMEOUT)

        async def all_workers(count: int) -> None:
            left = [count]
            await asyncio.gather(*(worker(left) for _ in range(self._in_flight)))

        return lambda count: self._loop.run_until_complete(all_workers(count))


def client_many(program: gr.Program, work: Work, in_flight: int) -> Many:
    """gradrule's Python client, NumPy in and out."""

    def many(count: int) -> int:
        feeds = (work.feeds for _ in range(count))
        return sum(1 for _ in program.map(feeds, in_flight=in_flight, timeout=_TIMEOUT))

    return many


class TensorFlowSession:
    """`Session("grpc://…")` with the same graph and a clipped straight-through gradient of Sign, NumPy in and out."""

    def __init__(self, target: str, work: Work) -> None:
        import tensorflow as tf

        graph = tf.Graph()
        with graph.as_default():
            definition = tf.compat.v1.GraphDef.FromString(work.graph.to_bytes())
            for node in definition.node:
                if node.op == "Sign":
                    node.attr["_gradient_op_type"].s = _registered_rule().encode()
            tf.import_graph_def(definition, name="")
            ys = [graph.get_tensor_by_name(f"{y}:0") for y in work.ys]
            xs = [graph.get_tensor_by_name(f"{x}:0") for x in work.xs]
            fetches = [graph.get_tensor_by_name(f"{fetch}:0") for fetch in work.fetches]
            wanted = [fetches, tf.gradients(ys, xs)]
            self._session = tf.compat.v1.Session(f"grpc://{target}", graph=graph)
            self._run: Any = self._session.make_callable(wanted, feed_list=[f"{name}:0" for name in work.feeds])
        self._values = list(work.feeds.values())

    def close(self) -> None:
        self._session.close()

    def call(self) -> list[Any]:
        found: list[Any] = self._run(*self._values)
        return found

    def many(self, in_flight: int) -> Many:
        """From so many threads."""

        def run(count: int) -> None:
            with ThreadPoolExecutor(in_flight) as threads:
                for _ in threads.map(lambda _: self.call(), range(count)):
                    pass

        return run


def _registered_rule() -> str:
    """TensorFlow's registry forgets nothing, so the rule is registered once."""
    import tensorflow as tf
    from tensorflow.python.framework import ops

    if _TF_RULE not in ops.gradient_registry.list():

        @tf.RegisterGradient(_TF_RULE)
        def ste_sign(op: Any, dy: Any) -> Any:
            return tf.where(tf.abs(op.inputs[0]) <= 1, dy, tf.zeros_like(dy))

    return _TF_RULE
