"""Runs built programs, whole or in two parts: from the request's tensors to the bytes of the answer.

The two parts are a forward run, whose saved tensors are kept, and later any number of pull-backs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import tensorflow as tf

# `gradrule.common.tensor_packing` imports it at first use, when the process may no longer open files.
import zstandard  # noqa: F401

from gradrule.common.tensor_packing import Packing
from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.arguments import NO_STATE, ArgumentReader, parts_of, read_packing
from gradrule_server.engine.backward import TwoPartProgram
from gradrule_server.engine.checks import MAX_ANSWER_BYTES
from gradrule_server.engine.client_memory import AnswerArea
from gradrule_server.engine.derivatives import split_tensors
from gradrule_server.engine.kept_bytes import saved_bytes
from gradrule_server.engine.program import Arrays, BuiltProgram, Input, shape_from
from gradrule_server.engine.response_writer import NARROW_INT_BYTES, NARROW_INTS, write_gradient, write_tensor
from gradrule_server.engine.tf_errors import TENSORFLOW_ERRORS, translate_error
from gradrule_server.errors import error
from gradrule_server.link.framing import Buffer
from gradrule_server.link.messages import ReceivedRequest
from gradrule_server.link.v1 import link_pb2

_T = TypeVar("_T")

_COMPILED = evaluate_pb2.EvaluateResponse(jit=True).SerializeToString()
# Number of released names that are remembered: a run that ends after its release is not kept.
_MAX_RELEASED = 4096


def run(
    built: BuiltProgram, request: link_pb2.RunRequest, received: ReceivedRequest, reader: ArgumentReader
) -> list[Buffer]:
    """Runs the program; returns the parts of an `EvaluateResponse` with outputs, gradients, timings and device."""
    started = time.monotonic_ns()
    try:
        call = reader.open(built, received.values)
        arrays = reader.arrays(built, request, call)
        results = built.call(arrays)
    except TENSORFLOW_ERRORS as cause:
        raise translate_error(cause, built.naming_run(arrays), built.inputs_of) from cause
    return respond(
        built, results, received.received_ns, started, packing=call.layout.packing, answer_area=call.answer_area
    )


def respond(
    built: BuiltProgram,
    results: Arrays,
    received_ns: int,
    started_ns: int,
    batch_size: int = 0,
    *,
    packing: Packing | None = None,
    answer_area: AnswerArea | None = None,
) -> list[Buffer]:
    """Returns the parts of the `EvaluateResponse` with the results of a run. Raises MESSAGE_TOO_LARGE.

    `packing`: how results are packed. `answer_area`: takes large results that are not packed, as far as they fit.
    """
    _check_bytes(built.writer.size_of(results))
    queue_ns = max(0, started_ns - received_ns)
    parts = built.writer.write(results, queue_ns, started_ns, packing=packing, answer_area=answer_area)
    if built.jit:
        parts.append(_COMPILED)
    if batch_size:
        parts.append(evaluate_pb2.EvaluateResponse(batch_size=batch_size).SerializeToString())
    return parts


def set_timings(timings: evaluate_pb2.Timings, received_ns: int, started_ns: int) -> None:
    """Sets the time that the call waited and the time that it has run until now."""
    timings.queue.FromNanoseconds(max(0, started_ns - received_ns))
    timings.run.FromNanoseconds(time.monotonic_ns() - started_ns)


def execute(built: BuiltProgram, function: Callable[[], _T]) -> _T:
    """Returns what a function of a program returns; a small program runs on this thread. Translates errors."""
    with tf_private.on_calling_thread() if built.small else contextlib.nullcontext():
        try:
            return function()
        except TENSORFLOW_ERRORS as cause:
            raise translate_error(cause, inputs_of=built.inputs_of) from cause


def run_on_device(
    built: BuiltProgram,
    request: link_pb2.RunRequest,
    values: Buffer,
    reader: ArgumentReader,
    state: Mapping[str, tf.Tensor] = NO_STATE,
) -> list[tf.Tensor]:
    """Returns the results of a program's function as tensors. `values`, `state`: as for `ArgumentReader.arguments`."""
    arguments: Sequence[tf.Tensor] | None = None
    try:
        arguments = reader.arguments(built, request, values, state)
        return built.call.on_device(arguments)
    except TENSORFLOW_ERRORS as cause:
        run_again = None if arguments is None else built.naming_run(arguments)
        raise translate_error(cause, run_again, built.inputs_of) from cause


def check_size(results: Iterable[tf.Tensor]) -> None:
    """Raises MESSAGE_TOO_LARGE if the results do not fit into an answer. Copies nothing."""
    _check_bytes(sum(_size_of(tensor) for tensor in results))


def _check_bytes(size: int) -> None:
    if size > MAX_ANSWER_BYTES:
        raise error(
            errors_pb2.ERROR_REASON_MESSAGE_TOO_LARGE,
            f"the answer's tensors take {size} bytes; a message holds at most {MAX_ANSWER_BYTES}",
            field="fetches",
        )


def _size_of(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.string:
        return sum(len(value) for value in np.asarray(tensor.numpy(), object).flat)
    size: int = tensor.shape.num_elements()
    return size * (NARROW_INT_BYTES if tensor.dtype.name in NARROW_INTS else tensor.dtype.size)


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
        self, built: BuiltProgram, request: link_pb2.ForwardRequest, received: ReceivedRequest, device: str
    ) -> link_pb2.ForwardReply:
        """Runs the forward part of a program."""
        if built.two_parts is None:
            raise AssertionError("the program was not built in two parts")
        started = time.monotonic_ns()
        packing = built.feed_plan.layout(parts_of(received.values).header).packing
        results = run_on_device(built, request.run, received.values, self._reader)
        outputs, saved = results[: len(built.outputs)], results[len(built.outputs) :]
        check_size(outputs)
        response = evaluate_pb2.EvaluateResponse(device=device)
        for name, value in zip(built.outputs, outputs, strict=True):
            write_tensor(response.outputs.add(name=name).value.inline_tensor, value, packing)
        set_timings(response.timings, received.received_ns, started)
        kept_bytes = self.keep(request.handle, built, saved)
        return link_pb2.ForwardReply(response=response.SerializeToString(), kept_bytes=kept_bytes)

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

    def pull_back(self, request: link_pb2.PullBackRequest, received: ReceivedRequest) -> evaluate_pb2.PullBackResponse:
        """Runs the backward part; returns gradients. Raises HANDLE_EXPIRED if the handle is unknown."""
        started = time.monotonic_ns()
        with self._lock:
            forward_run = self._runs.get(request.handle)
        if forward_run is None:
            message = f"the engine keeps nothing under the handle {request.handle!r}; run forward again"
            raise error(errors_pb2.ERROR_REASON_HANDLE_EXPIRED, message, field="handle")
        two_parts = forward_run.two_parts
        header = evaluate_pb2.EvaluateHeader.FromString(parts_of(received.values).header)
        stacked = header.stacked_grad_ys
        packing = read_packing(header.answer_packing)
        grad_ys = self._read_grad_ys(header, received.values, forward_run.built, request.blob_folder)
        gradients = execute(forward_run.built, lambda: two_parts.backward(forward_run.saved, grad_ys, stacked=stacked))
        check_size(gradients)
        response = evaluate_pb2.PullBackResponse()
        layout = two_parts.stacked_layout if stacked else two_parts.layout
        for (x,), form, values in split_tensors(layout, gradients):
            write_gradient(response.gradients.add(x=x), form, values, packing)
        set_timings(response.timings, received.received_ns, started)
        return response

    def release(self, name: str) -> None:
        """Releases a forward run, even one that has not ended yet."""
        with self._lock:
            if self._runs.pop(name, None) is None:
                self._released[name] = None
                while len(self._released) > _MAX_RELEASED:
                    self._released.popitem(last=False)

    def _read_grad_ys(
        self, header: evaluate_pb2.EvaluateHeader, values: Buffer, built: BuiltProgram, blob_folder: str
    ) -> dict[int, tf.Tensor]:
        """Returns upstream gradients by the index of their y. Raises INVALID_DERIVATIVE for any other name."""
        ys = {_short_name(spec.name): index for index, spec in enumerate(built.specs["ys"])}
        given = [_short_name(item.name) for item in header.grad_ys]
        for name in given:
            if name not in ys or given.count(name) > 1:
                why = "twice" if name in ys else f"which is none of the ys: {', '.join(ys)}"
                raise error(
                    errors_pb2.ERROR_REASON_INVALID_DERIVATIVE, f"grad_ys names {name!r} {why}", field="grad_ys"
                )
        specs = [built.specs["ys"][ys[name]] for name in given]
        inputs = [Input(spec.name, tf.as_dtype(spec.dtype), shape_from(spec.shape)) for spec in specs]
        tensors = self._reader.grad_ys(values, inputs, built, blob_folder)
        return {ys[name]: tensor for name, tensor in zip(given, tensors, strict=True)}


def _short_name(name: str) -> str:
    """Returns the short name of a tensor: `y` for `y:0`."""
    return name.removesuffix(":0")
