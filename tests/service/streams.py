"""Opens streams of plain messages."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.rpc import error_details_pb2

from gradrule.v1 import evaluate_pb2

PATH = "/gradrule.v1.GradientService/StreamEvaluate"


class RawStream:
    """Sends requests and reads answers in their order of arrival."""

    def __init__(self, channel: grpc.Channel, timeout: float) -> None:
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.call: Any = channel.stream_stream(PATH)(iter(self._outgoing.get, None), timeout=timeout)

    def send(self, number: int, **request: Any) -> None:
        """Sends one request."""
        self.send_bytes(evaluate_pb2.StreamEvaluateRequest(request_id=number, **request).SerializeToString())

    def send_bytes(self, data: bytes) -> None:
        """Sends bytes that may be no request."""
        self._outgoing.put(data)

    def end(self) -> None:
        """Half-closes the stream."""
        self._outgoing.put(None)

    def receive(self) -> evaluate_pb2.StreamEvaluateResponse:
        """Returns the next answer."""
        return evaluate_pb2.StreamEvaluateResponse.FromString(next(self.call))


@contextmanager
def open_stream(channel: grpc.Channel, timeout: float = 60.0) -> Iterator[RawStream]:
    """Opens a stream and cancels it at the end unless it has ended."""
    stream = RawStream(channel, timeout)
    try:
        yield stream
    finally:
        stream.end()
        stream.call.cancel()


def error_reason(answer: Any) -> str:
    """Returns the error reason of an answer; empty for a success."""
    if answer.WhichOneof("response") != "status":
        return ""
    info = error_details_pb2.ErrorInfo()
    assert answer.status.details[0].Unpack(info)
    return str(info.reason)
