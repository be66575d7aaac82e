"""Contenders that a driver measures.

gradrule by raw bytes and by its client, bare echoes, TensorFlow's own server, TensorFlow in this process.
"""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import grpc
import grpc.aio

import gradrule as gr
from gradrule.v1 import evaluate_pb2
from tests.benchmarks import hop
from tests.benchmarks.driver_loop import many_by_threads
from tests.benchmarks.echo_server import METHOD as ECHO
from tests.benchmarks.echo_server import OPTIONS
from tests.benchmarks.work import Work

EVALUATE = "/gradrule.v1.GradientService/Evaluate"
STREAM_EVALUATE = "/gradrule.v1.GradientService/StreamEvaluate"
TIMEOUT_S = 600.0
_TF_RULE = "GradruleBenchSteSign"


class Wire:
    """Raw bytes by unary calls: the same client for gradrule and for the echoes."""

    def __init__(self, target: str, method: str, request: bytes) -> None:
        self._target, self._method, self._request = target, method, request
        self._channel = grpc.insecure_channel(target, options=OPTIONS)
        self._send: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(method)
        self._loop = asyncio.new_event_loop()
        self._send_async: Any = None

    def call(self) -> bytes:
        answer: bytes = self._send(self._request, timeout=TIMEOUT_S)
        return answer

    def many(self, count: int, in_flight: int) -> None:
        """Through an asyncio channel, which makes more requests per second than threads."""

        async def worker(left: list[int]) -> None:
            while left[0] > 0:
                left[0] -= 1
                await self._send_async(self._request, timeout=TIMEOUT_S)

        async def all_workers() -> None:
            if self._send_async is None:
                channel = grpc.aio.insecure_channel(self._target, options=OPTIONS)
                self._send_async = channel.unary_unary(self._method)
            left = [count]
            await asyncio.gather(*(worker(left) for _ in range(in_flight)))

        self._loop.run_until_complete(all_workers())


class RawStream:
    """Raw bytes over one persistent `StreamEvaluate`."""

    def __init__(self, target: str, request: bytes) -> None:
        message = evaluate_pb2.StreamEvaluateRequest(request_id=1)
        message.evaluate.MergeFromString(request)
        # Ids of requests under way must differ. The id is the first field, so that it can be put before the rest.
        self._message = message.SerializeToString().removeprefix(b"\x08\x01")
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(target, options=OPTIONS)
        self._answers: Any = self._channel.stream_stream(STREAM_EVALUATE)(iter(self._outgoing.get, None))
        answer = evaluate_pb2.StreamEvaluateResponse.FromString(self.call())
        if answer.WhichOneof("response") != "evaluate":
            raise RuntimeError(f"the stream answered {answer}")

    def call(self) -> bytes:
        self._put(1)
        answer: bytes = next(self._answers)
        return answer

    def many(self, count: int, in_flight: int) -> None:
        """Pipelined: the next request is sent when an answer has come."""
        for number in range(min(count, in_flight)):
            self._put(number)
        for number in range(count):
            next(self._answers)
            if number + in_flight < count:
                self._put(number + in_flight)

    def _put(self, number: int) -> None:
        # Requests under way are consecutive and fewer than 128, so that the id is one byte.
        self._outgoing.put(b"\x08" + bytes([number % 128]) + self._message)


class Client:
    """gradrule's Python client, NumPy in and out; over TCP, unless it shares memory with the server."""

    def __init__(
        self, target: str, work: Work, *, token: str | None = None, inline: bool = False, shared_memory: bool = False
    ) -> None:
        self._client = gr.connect(target, timeout=TIMEOUT_S, shared_memory=shared_memory, token=token)
        self._work = work
        self._program = None if inline else work.compile(self._client)

    def call(self) -> gr.Result:
        if self._program is None:
            return self._work.evaluate(self._client)
        return self._program.evaluate(self._work.feeds)

    def many(self, count: int, in_flight: int) -> int:
        if self._program is None:
            raise ValueError("requests in flight are measured by program name: give a program")
        feeds = (self._work.feeds for _ in range(count))
        return sum(1 for _ in self._program.map(feeds, in_flight=in_flight, timeout=TIMEOUT_S))


class TensorFlowSession:
    """`Session("grpc://…")` with the same graph and a clipped straight-through gradient of Sign, NumPy in and out."""

    def __init__(self, target: str, work: Work) -> None:
        import tensorflow as tf

        graph = tf.Graph()
        with graph.as_default():
            tf.import_graph_def(_definition(work), name="")
            ys = [graph.get_tensor_by_name(f"{y}:0") for y in work.ys]
            xs = [graph.get_tensor_by_name(f"{x}:0") for x in work.xs]
            fetches = [graph.get_tensor_by_name(f"{fetch}:0") for fetch in work.fetches]
            wanted = [fetches, tf.gradients(ys, xs)]
            self._session = tf.compat.v1.Session(f"grpc://{target}", graph=graph)
            # The callable is bound to the graph that is the default here.
            self._run: Any = self._session.make_callable(wanted, feed_list=[f"{name}:0" for name in work.feeds])
        self._values = list(work.feeds.values())

    def call(self) -> list[Any]:
        found: list[Any] = self._run(*self._values)
        return found

    def many(self, count: int, in_flight: int) -> None:
        many_by_threads(self.call, count, in_flight)


class Function:
    """The same graph as a function of TensorFlow's in this process, NumPy in and out."""

    def __init__(self, work: Work) -> None:
        import tensorflow as tf

        definition = _definition(work)

        def function(**feeds: Any) -> list[Any]:
            inputs = {name: tf.identity(value) for name, value in feeds.items()}
            names = [f"{name}:0" for name in (*work.fetches, *work.ys)]
            found = tf.import_graph_def(definition, {f"{n}:0": v for n, v in inputs.items()}, names, name="")
            fetches, ys = found[: len(work.fetches)], found[len(work.fetches) :]
            return [*fetches, *tf.gradients(ys, [inputs[x] for x in work.xs])]

        specs = {name: tf.TensorSpec(value.shape, value.dtype) for name, value in work.feeds.items()}
        self._function = tf.function(function, autograph=False).get_concrete_function(**specs)
        self._constant = tf.constant
        self._feeds = work.feeds

    def call(self) -> list[Any]:
        found = self._function(**{name: self._constant(value) for name, value in self._feeds.items()})
        return [tensor.numpy() for tensor in found]

    def many(self, count: int, in_flight: int) -> None:
        many_by_threads(self.call, count, in_flight)


class Hop:
    """A frame of so many bytes to another process and back, as the front end and an engine exchange them."""

    def __init__(self, size: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._payload = bytes(size)
        self._exchange, _ = self._loop.run_until_complete(hop.exchange("arenas"))

    def call(self) -> int:
        return self._loop.run_until_complete(self._exchange(self._payload))

    def many(self, count: int, in_flight: int) -> None:
        async def one_after_the_other() -> None:
            for _ in range(count):
                await self._exchange(self._payload)

        self._loop.run_until_complete(one_after_the_other())


def _definition(work: Work) -> Any:
    """Returns the work's graph, each Sign marked with the rule that overrides it."""
    import tensorflow as tf

    definition = tf.compat.v1.GraphDef.FromString(work.graph.to_bytes())
    for node in definition.node:
        if node.op == "Sign":
            node.attr["_gradient_op_type"].s = _registered_rule().encode()
    return definition


def _registered_rule() -> str:
    """Registers the rule once: TensorFlow's registry forgets nothing."""
    import tensorflow as tf
    from tensorflow.python.framework import ops

    if _TF_RULE not in ops.gradient_registry.list():

        @tf.RegisterGradient(_TF_RULE)
        def ste_sign(op: Any, dy: Any) -> Any:
            return tf.where(tf.abs(op.inputs[0]) <= 1, dy, tf.zeros_like(dy))

    return _TF_RULE


def gradrule_wire(target: str, work: Work, *, inline: bool = False) -> Wire:
    """Returns raw bytes to gradrule: by program name, or with the graph in the request."""
    return Wire(target, EVALUATE, request_of(target, work, inline=inline))


def echo(target: str, request: bytes) -> Wire:
    """Returns the same bytes to a bare echo server."""
    return Wire(target, ECHO, request)


def request_of(target: str, work: Work, *, inline: bool = False) -> bytes:
    """Returns the bytes of a call; the program is compiled on the server first."""
    if inline:
        return work.inline_request()
    with gr.connect(target, timeout=TIMEOUT_S) as client:
        return work.named_request(work.compile(client))
