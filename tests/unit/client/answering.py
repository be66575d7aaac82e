"""Runs a gRPC server in this process that answers calls alone, over streams, in chunks, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2

from gradrule.v1 import evaluate_pb2, program_pb2, tensor_pb2
from tests.unit.client.plain_requests import translated

PROGRAM = "programs/p"
MIB = 1 << 20


def answer_to(request: evaluate_pb2.EvaluateRequest, way: str) -> bytes:
    """The feed x as gradient of x; the device tells the way on which the request came."""
    response = evaluate_pb2.EvaluateResponse(device=way)
    feeds = (translated(request) if request.header else request).feeds
    response.gradients.add(x="x").dense.CopyFrom(feeds[0].value.inline_tensor)
    return response.SerializeToString()


def failure(reason: str, code: int, request_id: str = "") -> bytes:
    """A status as servers send it on a stream."""
    status = status_pb2.Status(code=code, message=f"it is {reason}")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="gradrule"))
    if request_id:
        status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
    return status.SerializeToString()


UNAVAILABLE = failure("ENGINE_UNAVAILABLE", code_pb2.UNAVAILABLE)
NO_PROGRAM = failure("PROGRAM_NOT_FOUND", code_pb2.NOT_FOUND, "7f-1/2")

OnStream = Callable[[int, evaluate_pb2.StreamEvaluateRequest, Any], "bytes | None"]
"""From the stream's number, a request and the call: a status to answer with, b"" for the answer, None for none."""


class Answering(grpc.GenericRpcHandler):
    """Counts what comes. `on_stream` decides what becomes of a request on a stream; it may end the call."""

    def __init__(self, max_message_bytes: int = -1, address: str = "127.0.0.1:0") -> None:
        self.alone = 0
        """Calls that came alone."""
        self.streams = 0
        self.chunks = 0
        self.tokens: list[Any] = []
        self.ended = threading.Semaphore(0)
        """Released once for each stream that its client has ended."""
        self.on_stream: OnStream = lambda number, request, context: b""
        self._server = grpc.server(
            futures.ThreadPoolExecutor(16),
            # With SO_REUSEPORT, servers of other test processes may get a part of the connections to this port.
            options=[("grpc.max_receive_message_length", max_message_bytes), ("grpc.so_reuseport", 0)],
        )
        self._server.add_generic_rpc_handlers((self,))
        self.target = f"{address.rpartition(':')[0]}:{self._server.add_insecure_port(address)}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method.endswith("/StreamEvaluate"):
            return grpc.stream_stream_rpc_method_handler(self._stream)
        if details.method.endswith("/ShareMemory"):
            return None
        return grpc.unary_unary_rpc_method_handler(self._get if details.method.endswith("Program") else self._evaluate)

    def _get(self, _: bytes, context: Any) -> bytes:
        x = tensor_pb2.TensorSpec(name="x", dtype=tensor_pb2.DT_FLOAT)
        program = program_pb2.Program(name=PROGRAM, inputs=[x], xs=[x])
        return program_pb2.GetProgramResponse(program=program).SerializeToString()

    def _evaluate(self, raw: bytes, context: Any) -> bytes:
        self.alone += 1
        return answer_to(evaluate_pb2.EvaluateRequest.FromString(raw), "alone")

    def _stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self.streams += 1
        stream = self.streams
        self.tokens.append(dict(context.invocation_metadata()).get("authorization"))
        pieces: dict[int, list[bytes]] = {}
        for raw in requests:
            message = evaluate_pb2.StreamEvaluateRequest.FromString(raw)
            number = message.request_id
            if message.WhichOneof("request") == "chunk":
                self.chunks += 1
                pieces.setdefault(number, []).append(message.chunk)
            elif message.WhichOneof("request") == "evaluate":
                before = b"".join(pieces.pop(number, ()))
                assert len(before) == message.total_bytes
                request = evaluate_pb2.EvaluateRequest.FromString(before) if before else message.evaluate
                status = self.on_stream(stream, message, context)
                if status is not None:
                    yield from self._messages(message, status, request)
            elif message.WhichOneof("request") == "forward" and (status := self.on_stream(stream, message, context)):
                yield status
        self.ended.release()

    def _messages(
        self, message: evaluate_pb2.StreamEvaluateRequest, status: bytes, request: evaluate_pb2.EvaluateRequest
    ) -> Iterator[bytes]:
        head = evaluate_pb2.StreamEvaluateResponse(request_id=message.request_id)
        if status:
            head.status.ParseFromString(status)
            yield head.SerializeToString()
            return
        data, size = answer_to(request, "stream"), message.answer_chunk_bytes
        if len(data) <= size:
            head.evaluate.ParseFromString(data)
        else:
            for start in range(0, len(data), size):
                head.chunk = data[start : start + size]
                yield head.SerializeToString()
            head.evaluate.SetInParent()
        yield head.SerializeToString()
