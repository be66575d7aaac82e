"""One run of a built program: from the request's tensors to the bytes of an answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.answers import write_derivatives, write_tensor
from gradrule_server.engine.arguments import ArgumentReader
from gradrule_server.engine.built import Built
from gradrule_server.engine.bulk import Contents
from gradrule_server.engine.checks import failed_check
from gradrule_server.engine.limits import MAX_ANSWER_BYTES
from gradrule_server.engine.memory import memory_error, out_of_memory
from gradrule_server.engine.names import message_of, readable
from gradrule_server.errors import error
from gradrule_server.link.v1 import link_pb2

T = TypeVar("T")

# As a varint, which a negative number fills.
_NARROW_INT_BYTES = 10
_NARROW_INTS = frozenset({"int2", "uint2", "int4", "uint4"})


def run(built: Built, request: link_pb2.RunRequest, contents: Contents, device: str, reader: ArgumentReader) -> bytes:
    """Runs the program; returns the bytes of an `EvaluateResponse` with outputs, gradients, timings and device.

    `contents`: what was cut out of the request.
    """
    started = time.monotonic_ns()
    call = evaluate_pb2.EvaluateRequest.FromString(request.request)
    reader = reader.within(request.blob_folder)
    results = execute(built, lambda: built.function(*reader.arguments(built, call, request.params, contents=contents)))
    return respond(built, results, device, request.received_ns, started)


def respond(
    built: Built, results: Sequence[tf.Tensor], device: str, received_ns: int, started_ns: int, batch_size: int = 0
) -> bytes:
    """Returns the bytes of the `EvaluateResponse` with the results of a run. MESSAGE_TOO_LARGE."""
    check_size(results)
    response = evaluate_pb2.EvaluateResponse(device=device, batch_size=batch_size)
    values = iter(results)
    for name in built.outputs:
        write_tensor(response.outputs.add(name=name).value.inline, next(values))
    write_derivatives(response, built, list(values))
    set_timings(response.timings, received_ns, started_ns)
    return response.SerializeToString()


def set_timings(timings: evaluate_pb2.Timings, received_ns: int, started_ns: int) -> None:
    """Where the time went, until now."""
    timings.queue.FromNanoseconds(max(0, started_ns - received_ns))
    timings.run.FromNanoseconds(time.monotonic_ns() - started_ns)


def execute(built: Built, function: Callable[[], T]) -> T:
    """What a function of a program returns; a failed check as the error that it stands for, or EXECUTION_FAILED."""
    try:
        with tf_private.on_calling_thread() if built.small else contextlib.nullcontext():
            return function()
    except (tf.errors.OpError, UnicodeDecodeError) as cause:
        message = message_of(cause)
        found = failed_check(message)
        if found is not None:
            raise found from cause
        if isinstance(cause, tf.errors.OpError) and out_of_memory(cause):
            raise memory_error(readable(message)) from cause
        raise error(errors_pb2.ERROR_REASON_EXECUTION_FAILED, readable(message)) from cause


def check_size(results: Iterable[tf.Tensor]) -> None:
    """MESSAGE_TOO_LARGE, before anything is copied."""
    size = sum(_size_of(tensor) for tensor in results)
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
    return size * (_NARROW_INT_BYTES if tensor.dtype.name in _NARROW_INTS else tensor.dtype.size)
