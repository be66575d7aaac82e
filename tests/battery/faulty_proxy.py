"""Runs a proxy before a real server that sometimes changes or drops answers: faults that the battery must notice."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import Any

import grpc
import numpy as np

from gradrule.v1 import evaluate_pb2

EVALUATE = "/gradrule.v1.GradientService/Evaluate"
_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]

Lie = Callable[[bytes], bytes]
"""Answer of Evaluate → what the caller gets instead."""


def honest(answer: bytes) -> bytes:
    """Returns the answer unchanged."""
    return answer


def swap_answers() -> Lie:
    """Gives every third answer of a kind to the next caller of that kind too."""
    numbers: defaultdict[tuple[str, ...], Iterator[int]] = defaultdict(lambda: itertools.count(1))
    kept: dict[tuple[str, ...], bytes] = {}

    def lie(answer: bytes) -> bytes:
        message = evaluate_pb2.EvaluateResponse.FromString(answer)
        form = (*(output.name for output in message.outputs), *(gradient.x for gradient in message.gradients))
        number = next(numbers[form])
        if number % 3 == 1:
            kept[form] = answer
        return kept[form] if number % 3 == 2 else answer

    return lie


def add_a_thousandth(answer: bytes) -> bytes:
    """Adds a thousandth to all float32 results."""
    message = evaluate_pb2.EvaluateResponse.FromString(answer)
    tensors = [output.value.inline_tensor for output in message.outputs] + [
        gradient.dense for gradient in message.gradients
    ]
    for tensor in tensors:
        if tensor.tensor_content and len(tensor.tensor_content) % 4 == 0:
            values = np.frombuffer(tensor.tensor_content, np.float32)
            tensor.tensor_content = (values * np.float32(1.001)).tobytes()
    return message.SerializeToString()


@contextlib.asynccontextmanager
async def running_proxy(
    target: str, lie: Lie = honest, *, typed: bool = True, muted: Collection[str] = (), hung: Collection[str] = ()
) -> AsyncIterator[str]:
    """Starts a proxy and returns its address.

    typed: whether errors keep their reasons. muted: names of RPCs whose answers are dropped; hung: of those that never
    end.
    """
    async with grpc.aio.insecure_channel(target, options=[*_OPTIONS, ("grpc.enable_retries", 0)]) as channel:
        proxy = grpc.aio.server(options=_OPTIONS)
        proxy.add_generic_rpc_handlers((_Relay(channel, lie, typed, muted, hung),))
        port = proxy.add_insecure_port("127.0.0.1:0")
        await proxy.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await proxy.stop(None)


class _Relay(grpc.GenericRpcHandler):
    """Forwards any call as a stream, which all calls are on the wire."""

    def __init__(
        self, channel: grpc.aio.Channel, lie: Lie, typed: bool, muted: Collection[str], hung: Collection[str]
    ) -> None:
        self._channel = channel
        self._lie = lie
        self._typed = typed
        self._muted = muted
        self._hung = hung

    def service(self, handler_call_details: Any) -> Any:
        method: str = handler_call_details.method
        is_muted, is_hung = (method.rpartition("/")[2] in names for names in (self._muted, self._hung))

        async def relay(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            call: Any = self._channel.stream_stream(method)(requests, timeout=context.time_remaining())
            try:
                async for answer in call:
                    if is_hung:
                        await asyncio.Event().wait()
                    if is_muted:
                        continue
                    yield self._lie(answer) if method == EVALUATE else answer
            except grpc.RpcError as failure:
                told: Any = failure
                if self._typed:
                    context.set_trailing_metadata(tuple(told.trailing_metadata() or ()))
                await context.abort(told.code(), told.details())

        return grpc.stream_stream_rpc_method_handler(relay)
