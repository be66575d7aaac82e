"""Runs built programs, whole or in two parts: from the request's tensors to the bytes of the answer.

The two parts are a forward run, whose saved tensors are kept, and later any number of pull-backs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.arguments import ArgumentReader, CallArguments, parts_of, read_packing
from gradrule_server.engine.backward import TwoPartProgram
from gradrule_server.engine.kept_bytes import saved_bytes
from gradrule_server.engine.program import Arrays, BuiltProgram
from gradrule_server.engine.response_writer import ResponseWriter, results_of
from gradrule_server.engine.tf_errors import TENSORFLOW_ERRORS, translate_error
from gradrule_server.errors import error
from gradrule_server.link.framing import Buffer
from gradrule_server.link.messages import ReceivedRequest
from gradrule_server.link.v1 import link_pb2

# Number of released names that are remembered: a run that ends after its release is not kept.
_MAX_RELEASED = 4096


def run(
    built: BuiltProgram, request: link_pb2.RunRequest, received: ReceivedRequest, reader: ArgumentReader
) -> list[Buffer]:
    """Runs the program; returns the parts of an `EvaluateResponse` with outputs, gradients, timings and device."""
    started = time.monotonic_ns()
    call = reader.read(built, request, received.values)
    return respond(built, built.run(call.values), call, received.received_ns, started)


def respond(
    built: BuiltProgram,
    results: Arrays,
    call: CallArguments,
    received_ns: int,
    started_ns: int,
    batch_size: int = 0,
) -> list[Buffer]:
    """Returns the parts of the `EvaluateResponse` with the results of a run. Raises MESSAGE_TOO_LARGE."""
    writer = ResponseWriter(call.packing, call.answer_area)
    typed = list(zip(built.result_types, results, strict=True))
    writer.add_outputs(built.outputs, typed[: len(built.outputs)])
    writer.add_derivatives(built.kind, built.layout, typed[len(built.outputs) :])
    return [*writer.parts, end_of_response(built, received_ns, started_ns, batch_size)]


def end_of_response(built: BuiltProgram, received_ns: int, started_ns: int, batch_size: int = 0) -> bytes:
    """Returns the fields of an `EvaluateResponse` that follow the results."""
    timings = timings_of(received_ns, started_ns)
    return evaluate_pb2.EvaluateResponse(
        device=built.device, timings=timings, jit=built.jit, batch_size=batch_size
    ).SerializeToString()


def timings_of(received_ns: int, started_ns: int) -> evaluate_pb2.Timings:
    """Returns the time that a call waited, and the time that it has run until now."""
    timings = evaluate_pb2.Timings()
    timings.queue.FromNanoseconds(max(0, started_ns - received_ns))
    timings.run.FromNanoseconds(time.monotonic_ns() - started_ns)
    return timings


@dataclass(frozen=True, slots=True)
class _ForwardRun:
    built: BuiltProgram
    two_parts: TwoPartProgram
    saved: Sequence[tf.Tensor]


class ForwardRuns:
    """Keeps the saved tensors of forward runs, by handle, until the front end releases them. Thread-safe."""

    def __init__(self, reader: ArgumentReader) -> None:
        self._reader = reader
        self._runs: dict[str, _ForwardRun] = {}
        self._released: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def forward(
        self, built: BuiltProgram, request: link_pb2.ForwardRequest, received: ReceivedRequest
    ) -> link_pb2.ForwardReply:
        """Runs the forward part of a program."""
        started = time.monotonic_ns()
        call = self._reader.read(built, request.run, received.values)
        results = built.run_on_device(call.values)
        outputs, saved = results[: len(built.outputs)], results[len(built.outputs) :]
        writer = ResponseWriter(call.packing)
        writer.add_outputs(built.outputs, results_of(outputs))
        response = b"".join([*writer.parts, end_of_response(built, received.received_ns, started)])
        return link_pb2.ForwardReply(response=response, kept_bytes=self.keep(request.handle, built, saved))

    def keep(self, handle: str, built: BuiltProgram, saved: Sequence[tf.Tensor]) -> int:
        """Keeps what the forward part of a program saved, unless the handle is released already; returns its bytes."""
        if built.two_parts is None:
            raise AssertionError("the program was not built in two parts")
        with self._lock:
            if handle in self._released:
                del self._released[handle]
            else:
                self._runs[handle] = _ForwardRun(built, built.two_parts, saved)
        return saved_bytes(saved)

    def pull_back(self, request: link_pb2.PullBackRequest, received: ReceivedRequest) -> list[Buffer]:
        """Runs the backward part; returns the parts of a `PullBackResponse`. Raises HANDLE_EXPIRED."""
        started = time.monotonic_ns()
        with self._lock:
            forward_run = self._runs.get(request.handle)
        if forward_run is None:
            message = f"the engine keeps nothing under the handle {request.handle!r}; run forward again"
            raise error(errors_pb2.ERROR_REASON_HANDLE_EXPIRED, message, field="handle")
        built, two_parts = forward_run.built, forward_run.two_parts
        parts = parts_of(received.values)
        header = evaluate_pb2.EvaluateHeader.FromString(parts.header)
        stacked = header.stacked_grad_ys
        grad_ys = self._reader.grad_ys(built, header, parts, request.blob_folder)
        with tf_private.on_calling_thread() if built.small else contextlib.nullcontext():
            try:
                gradients = two_parts.backward(forward_run.saved, grad_ys, stacked=stacked)
            except TENSORFLOW_ERRORS as cause:
                raise translate_error(cause, inputs_of=built.inputs_of) from cause
        response = evaluate_pb2.PullBackResponse
        writer = ResponseWriter(read_packing(header.answer_packing))
        layout = two_parts.stacked_layout if stacked else two_parts.layout
        writer.add_gradients(layout, results_of(gradients), response.GRADIENTS_FIELD_NUMBER)
        end = response(timings=timings_of(received.received_ns, started))
        return [*writer.parts, end.SerializeToString()]

    def release(self, name: str) -> None:
        """Releases a forward run, even one that has not ended yet."""
        with self._lock:
            if self._runs.pop(name, None) is None:
                self._released[name] = None
                while len(self._released) > _MAX_RELEASED:
                    self._released.popitem(last=False)
